//! A cache of compiled expressions, shared by all evaluations.

use super::{Environment, Selector};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The most memory of compiled expressions, in bytes.
const MOST_BYTES: usize = 64 << 20;

/// The number of parts of the cache, each of which has its own lock.
const SHARDS: usize = 16;

/// The memory that an entry needs in addition to the expression, in bytes.
const ENTRY: usize = 256;

/// A compiled expression in the cache.
#[derive(Debug)]
pub struct Compiled {
    /// A number that no other expression has. The same expression gets a new number if it was dropped and is
    /// compiled again.
    pub id: u64,
    /// The selector.
    pub selector: Selector,
    /// True if the selector can select a device of this driver, whatever the driver publishes.
    pub may_select: bool,
    too_costly: AtomicBool,
}

impl Compiled {
    /// Returns true if an evaluation was given up because of its cost. Then the expression is not evaluated
    /// again on any device: as in upstream, an expression that fails on one device is of no use for the
    /// others.
    pub fn is_too_costly(&self) -> bool {
        self.too_costly.load(Ordering::Relaxed)
    }

    /// Remembers that an evaluation was given up because of its cost.
    pub fn set_too_costly(&self) {
        self.too_costly.store(true, Ordering::Relaxed);
    }
}

/// Compiled expressions. If they take too much memory, the least recently used are dropped.
///
/// The cache is shared: a lock is held for a look-up or an insertion, not for compiling.
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
    /// The queue of the clock algorithm: an expression that was used since its last turn stays for another
    /// round.
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
    /// Creates a cache with this limit on memory, in bytes.
    pub fn with_room(most_bytes: usize) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { environment: Environment::new(), shards, most_bytes, last: AtomicU64::new(0) }
    }

    /// Returns the environment of evaluations.
    pub const fn environment(&self) -> &Environment {
        &self.environment
    }

    /// Returns the expression if it is already compiled.
    pub fn known(&self, expression: &str) -> Option<Arc<Compiled>> {
        let mut shard = self.shard(expression)?.lock();
        let entry = shard.known.get_mut(expression)?;
        entry.used = true;
        Some(entry.compiled.clone())
    }

    /// Returns the expression, and compiles it if necessary. `driver` is this driver, and is always the same.
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

    /// Returns the estimated memory of the cache, in bytes.
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().bytes).sum()
    }

    fn shard(&self, expression: &str) -> Option<&Mutex<Shard>> {
        // This is FNV-1a of the first bytes and the length; it only has to distribute the expressions.
        let hash = expression.bytes().take(256).fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let spread = (hash ^ expression.len() as u64) % self.shards.len().max(1) as u64;
        self.shards.get(usize::try_from(spread).unwrap_or_default())
    }
}

impl Shard {
    /// Adds an expression unless another thread was faster; returns the one that is in the cache.
    fn insert(&mut self, expression: &Arc<str>, compiled: Arc<Compiled>, most_bytes: usize) -> Arc<Compiled> {
        if let Some(known) = self.known.get(expression) {
            return known.compiled.clone();
        }
        let bytes = ENTRY + expression.len() + compiled.selector.bytes();
        if bytes > most_bytes {
            // An expression that is too large for the cache is compiled whenever it is needed.
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
