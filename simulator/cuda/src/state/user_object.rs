//! Objects of the program's own that graphs keep alive.

use std::collections::BTreeMap;

use crate::codes::{Code, Cu};

/// Objects of the program's own that graphs keep alive.
#[derive(Default)]
pub(crate) struct UserObjects {
    objects: BTreeMap<u64, (u64, usize, u32)>,
    /// Destructors that are to be called: function and object.
    pub(crate) ended: Vec<(usize, u64)>,
}

impl UserObjects {
    pub(crate) fn insert(&mut self, handle: u64, object: u64, destructor: usize, count: u32) {
        self.objects.insert(handle, (object, destructor, count));
    }

    pub(crate) fn retain(&mut self, handle: u64, count: u32) -> Cu {
        let entry = self.objects.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        entry.2 = entry.2.checked_add(count).ok_or(Code::INVALID_VALUE)?;
        Ok(())
    }

    /// Whether the object is known.
    pub(crate) fn release(&mut self, handle: u64, count: u32) -> bool {
        let Some(entry) = self.objects.get_mut(&handle) else { return false };
        entry.2 = entry.2.saturating_sub(count);
        if entry.2 == 0 {
            let (object, destructor, _) = *entry;
            self.objects.remove(&handle);
            self.ended.push((destructor, object));
        }
        true
    }
}
