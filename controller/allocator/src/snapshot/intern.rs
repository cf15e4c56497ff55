//! Small numbers that stand for strings, and for what many devices have in common.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

/// The number of a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sym(u32);

/// A table of strings with their numbers; a number is never reused.
#[derive(Debug, Clone, Default)]
pub struct Interner {
    table: Table<str>,
}

impl Interner {
    /// Returns the number of a string; adds the string if it is not known yet.
    pub fn intern(&mut self, text: &str) -> Sym {
        Sym(self.table.intern_with(text, || Arc::from(text)))
    }

    /// Returns the number of a string; `None` if the string is not known.
    pub fn find(&self, text: &str) -> Option<Sym> {
        self.table.ids.get(text).copied().map(Sym)
    }

    /// Returns the string of a number; empty if the number is not known.
    pub fn get(&self, sym: Sym) -> &str {
        self.table.items.get(sym.0 as usize).map_or("", |text| text)
    }

    /// Returns the string of a number as a shared pointer; empty if the number is not known.
    pub fn shared(&self, sym: Sym) -> Arc<str> {
        self.table.items.get(sym.0 as usize).cloned().unwrap_or_else(|| Arc::from(""))
    }
}

/// A pool that keeps equal values once, as long as something else uses them.
#[derive(Debug)]
pub struct Pooled<T> {
    items: HashSet<Arc<T>>,
    sweep_at: usize,
}

impl<T> Default for Pooled<T> {
    fn default() -> Self {
        Self { items: HashSet::new(), sweep_at: 1024 }
    }
}

impl<T: Hash + Eq> Pooled<T> {
    /// Returns the shared value that is equal to this one.
    pub fn share(&mut self, value: T) -> Arc<T> {
        if let Some(known) = self.items.get(&value) {
            return known.clone();
        }
        if self.items.len() >= self.sweep_at {
            self.items.retain(|item| Arc::strong_count(item) > 1);
            self.sweep_at = self.items.len().saturating_mul(2).max(1024);
        }
        let value = Arc::new(value);
        self.items.insert(value.clone());
        value
    }
}

/// A table of distinct values with their numbers.
#[derive(Debug)]
pub struct Table<T: ?Sized> {
    ids: HashMap<Arc<T>, u32>,
    items: Vec<Arc<T>>,
}

impl<T: ?Sized> Default for Table<T> {
    fn default() -> Self {
        Self { ids: HashMap::new(), items: Vec::new() }
    }
}

impl<T: ?Sized> Clone for Table<T> {
    fn clone(&self) -> Self {
        Self { ids: self.ids.clone(), items: self.items.clone() }
    }
}

impl<T: Hash + Eq> Table<T> {
    /// Returns the number of a value; adds the value if it is not known yet.
    pub fn intern(&mut self, value: T) -> u32 {
        if let Some(id) = self.ids.get(&value) {
            return *id;
        }
        self.insert(Arc::new(value))
    }

    /// Returns the number of a value; `None` if the value is not known.
    pub fn find(&self, value: &T) -> Option<u32> {
        self.ids.get(value).copied()
    }

    /// Returns the value of a number.
    ///
    /// # Panics
    /// If the number is from another table.
    #[expect(clippy::indexing_slicing, reason = "numbers come from intern of the same table only")]
    pub fn get(&self, id: u32) -> &T {
        &self.items[id as usize]
    }
}

impl<T: ?Sized + Hash + Eq> Table<T> {
    fn intern_with(&mut self, value: &T, make: impl FnOnce() -> Arc<T>) -> u32 {
        if let Some(id) = self.ids.get(value) {
            return *id;
        }
        self.insert(make())
    }

    fn insert(&mut self, value: Arc<T>) -> u32 {
        // 2^32 distinct values do not fit in memory.
        let id = u32::try_from(self.items.len()).unwrap_or(u32::MAX);
        self.items.push(value.clone());
        self.ids.insert(value, id);
        id
    }

    /// Returns the number of distinct values.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Returns true if there are no values.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}
