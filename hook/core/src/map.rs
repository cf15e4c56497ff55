//! A hash map from handles and addresses to small records, on memory of its own: the limiter must not call
//! the program's malloc.

use crate::sys;
use core::mem::size_of;
use core::ptr::null_mut;

/// The error of a record that could not be kept because there is no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// A hash map with open addressing and linear probing; key 0 marks an empty place, and stands for no record.
pub(crate) struct Map<V: Copy> {
    places: *mut (u64, V),
    capacity: usize,
    len: usize,
}

// SAFETY: the map owns its places.
unsafe impl<V: Copy + Send> Send for Map<V> {}

impl<V: Copy> Map<V> {
    /// Returns an empty map, which has no memory until the first record.
    pub(crate) const fn new() -> Self {
        Self { places: null_mut(), capacity: 0, len: 0 }
    }

    /// Returns the number of records.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn home(&self, key: u64) -> usize {
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) as usize & (self.capacity - 1)
    }

    fn place(&self, index: usize) -> *mut (u64, V) {
        debug_assert!(index < self.capacity);
        // SAFETY: callers keep the index below the capacity, which is the number of places.
        unsafe { self.places.add(index) }
    }

    fn key_at(&self, index: usize) -> u64 {
        // SAFETY: the place exists; keys are initialised, as zeroed memory.
        unsafe { (*self.place(index)).0 }
    }

    /// Returns the index of the key, or of the empty place where it would go.
    fn find(&self, key: u64) -> usize {
        let mut at = self.home(key);
        loop {
            let found = self.key_at(at);
            if found == key || found == 0 {
                return at;
            }
            at = (at + 1) & (self.capacity - 1);
        }
    }

    /// Returns the record of a key, to be changed.
    pub(crate) fn get_mut(&mut self, key: u64) -> Option<&mut V> {
        if self.capacity == 0 || key == 0 {
            return None;
        }
        let at = self.find(key);
        // SAFETY: a place with the key has a record, and `self` is borrowed mutably.
        (self.key_at(at) == key).then(|| unsafe { &mut (*self.place(at)).1 })
    }

    /// Returns a copy of the record of a key.
    pub(crate) fn get(&self, key: u64) -> Option<V> {
        if self.capacity == 0 || key == 0 {
            return None;
        }
        let at = self.find(key);
        // SAFETY: a place with the key has a record.
        (self.key_at(at) == key).then(|| unsafe { (*self.place(at)).1 })
    }

    /// Keeps a record, and replaces any record of the same key.
    pub(crate) fn insert(&mut self, key: u64, value: V) -> Result<(), Full> {
        if key == 0 {
            return Err(Full);
        }
        if (self.len + 1) * 4 > self.capacity * 3 {
            self.grow()?;
        }
        let at = self.find(key);
        if self.key_at(at) == 0 {
            self.len += 1;
        }
        // SAFETY: the place exists.
        unsafe { self.place(at).write((key, value)) };
        Ok(())
    }

    /// Makes sure that the next insertion finds memory.
    pub(crate) fn reserve_one(&mut self) -> Result<(), Full> {
        if (self.len + 1) * 4 > self.capacity * 3 { self.grow() } else { Ok(()) }
    }

    fn grow(&mut self) -> Result<(), Full> {
        let capacity = (self.capacity * 2).max(64);
        let places = sys::memory(capacity * size_of::<(u64, V)>()).cast::<(u64, V)>();
        if places.is_null() {
            return Err(Full);
        }
        let old = core::mem::replace(self, Self { places, capacity, len: self.len });
        for index in 0..old.capacity {
            let key = old.key_at(index);
            if key != 0 {
                let at = self.find(key);
                // SAFETY: both places exist, in different memory.
                unsafe { self.place(at).write(old.place(index).read()) };
            }
        }
        if old.capacity > 0 {
            // SAFETY: the old map is not used any more.
            unsafe { sys::free_memory(old.places.cast(), old.capacity * size_of::<(u64, V)>()) };
        }
        Ok(())
    }

    /// Takes a record out.
    pub(crate) fn remove(&mut self, key: u64) -> Option<V> {
        if self.capacity == 0 || key == 0 {
            return None;
        }
        let mut hole = self.find(key);
        if self.key_at(hole) != key {
            return None;
        }
        // SAFETY: a place with the key has a record.
        let found = unsafe { (*self.place(hole)).1 };
        self.len -= 1;
        let mut at = hole;
        loop {
            at = (at + 1) & (self.capacity - 1);
            let key = self.key_at(at);
            if key == 0 {
                break;
            }
            // A record may fill the hole unless its home lies behind the hole on the way to its place.
            let home = self.home(key);
            let stays = if hole <= at { hole < home && home <= at } else { hole < home || home <= at };
            if !stays {
                // SAFETY: both places exist.
                unsafe { self.place(hole).write(self.place(at).read()) };
                hole = at;
            }
        }
        // SAFETY: the place exists.
        unsafe { (*self.place(hole)).0 = 0 };
        Some(found)
    }

    /// Returns the key of any record for which `wanted` holds.
    pub(crate) fn find_key(&self, mut wanted: impl FnMut(u64, &V) -> bool) -> Option<u64> {
        (0..self.capacity).find_map(|index| {
            let key = self.key_at(index);
            // SAFETY: the place exists, and has a record where its key is not 0.
            (key != 0 && wanted(key, unsafe { &(*self.place(index)).1 })).then_some(key)
        })
    }

    /// Forgets everything, keeping the memory.
    pub(crate) fn clear(&mut self) {
        for index in 0..self.capacity {
            // SAFETY: the place exists.
            unsafe { (*self.place(index)).0 = 0 };
        }
        self.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn behaves_like_the_standard_map() {
        let mut map = Map::new();
        let mut oracle = HashMap::new();
        let mut seed = 12345_u64;
        for step in 0..if cfg!(miri) { 300 } else { 200_000_u64 } {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // Keys that collide often: multiples of a page.
            let key = ((seed >> 33) % 3000 + 1) << 21;
            match seed >> 60 {
                0..=7 => {
                    map.insert(key, step).unwrap();
                    oracle.insert(key, step);
                }
                8..=14 => assert_eq!(map.remove(key), oracle.remove(&key)),
                _ => assert_eq!(map.get(key), oracle.get(&key).copied()),
            }
            assert_eq!(map.len(), oracle.len());
        }
        for (key, value) in &oracle {
            assert_eq!(map.get(*key), Some(*value));
        }
        assert_eq!(map.find_key(|_, _| true).is_some(), !oracle.is_empty());
        map.clear();
        assert_eq!((map.len(), map.find_key(|_, _| true)), (0, None));
    }

    #[test]
    fn key_zero_is_nobodys() {
        let mut map = Map::new();
        assert_eq!(map.insert(0, 1), Err(Full));
        assert_eq!((map.get(0), map.remove(0)), (None, None));
    }
}
