//! What the node agent measured of the share's processes.

use super::Share;
use super::files::{pid_namespace, start_time};
use crate::sys::{self, File};
use aliquot_quota::measured::{Identity, MOST_SIZE, Measured};

/// Returns this process's identity in that file; `None` if `/proc` does not tell.
pub(crate) fn own_identity() -> Option<Identity> {
    let (pid_namespace, start_time) = (pid_namespace(), start_time());
    let is_known = pid_namespace != 0 && start_time != 0;
    is_known.then(|| Identity { pid_namespace, start_time, pid: sys::process_id() })
}

/// The content of the file, in memory of its own, because callers may be on small stacks.
pub(crate) struct Page {
    bytes: *mut u8,
    read: usize,
}

impl Page {
    /// Returns the measurement, if it is whole and still valid.
    pub(crate) fn fresh(&self) -> Option<Measured<'_>> {
        // SAFETY: our own memory, of which so many bytes were read into.
        let bytes = unsafe { core::slice::from_raw_parts(self.bytes, self.read) };
        Measured::decode(bytes).filter(|measured| measured.is_fresh(sys::now_ns()))
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: our own memory; nothing refers to it any more.
        unsafe { sys::free_memory(self.bytes, MOST_SIZE + 1) };
    }
}

impl Share {
    /// Reads the file as it is now, if there is one. The file is read, never mapped, whatever it holds.
    pub(crate) fn measured(&self) -> Option<Page> {
        let path = *self.measured_path.lock();
        let file = File::read_only(path.as_c()).ok()?;
        let bytes = sys::memory(MOST_SIZE + 1);
        if bytes.is_null() {
            return None;
        }
        let mut page = Page { bytes, read: 0 };
        // SAFETY: our own memory of this size, which nothing else refers to.
        let room = unsafe { core::slice::from_raw_parts_mut(bytes, MOST_SIZE + 1) };
        page.read = file.read_at(room, 0).ok()?;
        Some(page)
    }
}
