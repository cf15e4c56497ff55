//! Compiled expressions, kept for all who evaluate.

use super::{Environment, Selector};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Memory for compiled expressions, in bytes.
const MOST_BYTES: usize = 64 << 20;

/// Parts of the cache, each with a lock of its own.
const SHARDS: usize = 16;

/// What an entry needs beside the expression, in bytes.
const ENTRY: usize = 256;

/// A compiled expression in the cache.
#[derive(Debug)]
pub struct Compiled {
    /// A number that no other expression has, nor this one after it was dropped and compiled again.
    pub id: u64,
    /// The expression.
    pub selector: Selector,
    /// Whether it can select a device of our driver, whatever that publishes.
    pub may_select: bool,
    too_costly: AtomicBool,
}

impl Compiled {
    /// Whether it was given up once because of its cost. It is not evaluated again then, on whatever device:
    /// an expression that fails on one device is of no use for the others, upstream as here.
    pub fn is_too_costly(&self) -> bool {
        self.too_costly.load(Ordering::Relaxed)
    }

    /// Remembers that it was given up because of its cost.
    pub fn set_too_costly(&self) {
        self.too_costly.store(true, Ordering::Relaxed);
    }
}

/// Compiled expressions, the least recently used of which are dropped when they are in too much memory.
///
/// It is shared: a lock is held for a look-up or an insertion, not for compiling.
#[derive(Debug)]
pub struct Selectors {
    environment: Environment,
    shards: Vec<Mutex<Shard>>,
    most_bytes: usize,
    last: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    known: HashMap<Arc<str>, Entry>,
    /// A clock: what was used since its hand last came by stays for another round.
    order: VecDeque<Arc<str>>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    compiled: Arc<Compiled>,
    bytes: usize,
    used: bool,
}

impl Default for Selectors {
    fn default() -> Self {
        Self::with_room(MOST_BYTES)
    }
}

impl Selectors {
    /// A cache that has this much memory, in bytes.
    pub fn with_room(most_bytes: usize) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { environment: Environment::new(), shards, most_bytes, last: AtomicU64::new(0) }
    }

    /// What evaluations find around them.
    pub const fn environment(&self) -> &Environment {
        &self.environment
    }

    /// The expression if it is compiled already.
    pub fn known(&self, expression: &str) -> Option<Arc<Compiled>> {
        let mut shard = self.shard(expression)?.lock();
        let entry = shard.known.get_mut(expression)?;
        entry.used = true;
        Some(entry.compiled.clone())
    }

    /// The expression, compiled if it is not yet. `driver` is ours, always the same.
    pub fn get(&self, driver: &str, expression: &Arc<str>) -> Arc<Compiled> {
        if let Some(known) = self.known(expression) {
            return known;
        }
        let selector = Selector::compile(expression);
        let may_select = selector.may_select(driver, &self.environment);
        let id = self.last.fetch_add(1, Ordering::Relaxed);
        let compiled = Arc::new(Compiled { id, selector, may_select, too_costly: AtomicBool::new(false) });
        let Some(shard) = self.shard(expression) else { return compiled };
        shard.lock().insert(expression, compiled, self.most_bytes / SHARDS)
    }

    /// Estimate of the memory that the cache is in, in bytes.
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().bytes).sum()
    }

    fn shard(&self, expression: &str) -> Option<&Mutex<Shard>> {
        // FNV-1a, of the first bytes and the length: it only has to spread.
        let hash = expression.bytes().take(256).fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let spread = (hash ^ expression.len() as u64) % self.shards.len().max(1) as u64;
        self.shards.get(usize::try_from(spread).unwrap_or_default())
    }
}

impl Shard {
    /// Adds an expression unless somebody else was faster, and returns the one that is there.
    fn insert(&mut self, expression: &Arc<str>, compiled: Arc<Compiled>, most_bytes: usize) -> Arc<Compiled> {
        if let Some(known) = self.known.get(expression) {
            return known.compiled.clone();
        }
        let bytes = ENTRY + expression.len() + compiled.selector.bytes();
        if bytes > most_bytes {
            // What is too large to be kept is compiled whenever it is needed.
            return compiled;
        }
        self.bytes += bytes;
        while self.bytes > most_bytes {
            let Some(oldest) = self.order.pop_front() else { break };
            match self.known.get_mut(&oldest) {
                Some(entry) if entry.used => {
                    entry.used = false;
                    self.order.push_back(oldest);
                }
                Some(entry) => {
                    self.bytes -= entry.bytes;
                    self.known.remove(&oldest);
                }
                None => {}
            }
        }
        self.order.push_back(expression.clone());
        self.known.insert(expression.clone(), Entry { compiled: compiled.clone(), bytes, used: false });
        compiled
    }
}
