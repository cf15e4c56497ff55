//! Small numbers in place of strings and of what many devices have in common.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

/// A string's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sym(u32);

/// Numbers for strings; a number is never given up.
#[derive(Debug, Clone, Default)]
pub struct Interner {
    table: Table<str>,
}

impl Interner {
    /// The number of a string, new if need be.
    pub fn intern(&mut self, text: &str) -> Sym {
        Sym(self.table.intern_with(text, || Arc::from(text)))
    }

    /// The number of a string that is known.
    pub fn find(&self, text: &str) -> Option<Sym> {
        self.table.ids.get(text).copied().map(Sym)
    }

    /// The string.
    pub fn get(&self, sym: Sym) -> &str {
        self.table.items.get(sym.0 as usize).map_or("", |text| text)
    }

    /// The string, shared.
    pub fn shared(&self, sym: Sym) -> Arc<str> {
        self.table.items.get(sym.0 as usize).cloned().unwrap_or_else(|| Arc::from(""))
    }
}

/// Equal values kept once, as long as somebody uses them.
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
    /// The one value that is equal to this.
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

/// Numbers for equal values.
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
    /// The number of a value, new if need be.
    pub fn intern(&mut self, value: T) -> u32 {
        if let Some(id) = self.ids.get(&value) {
            return *id;
        }
        self.insert(Arc::new(value))
    }

    /// The number of a value that is known.
    pub fn find(&self, value: &T) -> Option<u32> {
        self.ids.get(value).copied()
    }

    /// The value.
    ///
    /// # Panics
    /// On a number of another table.
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

    /// How many distinct values there are.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}
