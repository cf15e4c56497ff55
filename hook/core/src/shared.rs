//! Memory that several processes have: exported by one, imported by others.
//!
//! The exporter pays for it. When the exporter dies, its slot of the region stays charged with as much of it
//! as the living have imported (see `Share::reap`), so that the quota holds until the last of them gives it
//! back. When the exporter lives and frees the memory while others still have it, it stays charged likewise,
//! to a slot without an owner (see `share/left.rs`): what others have imported beyond what is exported now
//! must be of what was freed. Nothing tells which import belongs to which export, so all figures are sums.

use crate::account;
use crate::device::{self, Device};
use crate::lock::Mutex;
use crate::map::Map;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A process's side of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The process has exported the memory to others.
    Exported,
    /// The process has imported the memory from another.
    Imported,
}

#[derive(Clone, Copy)]
struct Part {
    device: u16,
    bytes: u64,
    /// The context that the memory goes with; 0 = none.
    context: u64,
}

/// Parts by a key that their makers choose: addresses, and numbers of physical memory with the lowest bit
/// set.
struct Book {
    exported: Map<Part>,
    imported: Map<Part>,
    /// Exported and imported bytes.
    sums: [[u64; 2]; device::MOST],
    /// Bytes that were exported and freed, and stay charged because others have them, where no slot could be
    /// had.
    lingering: [u64; device::MOST],
    /// Bytes of those that are being moved to a slot without an owner.
    leaving: [u64; device::MOST],
}

static BOOK: Mutex<Book> = Mutex::new(Book {
    exported: Map::new(),
    imported: Map::new(),
    sums: [[0; 2]; device::MOST],
    lingering: [0; device::MOST],
    leaving: [0; device::MOST],
});

/// True if any bytes linger.
static LINGERS: AtomicBool = AtomicBool::new(false);

/// True if anything was ever noted: most programs share nothing.
static IS_USED: AtomicBool = AtomicBool::new(false);

impl Book {
    fn side(&mut self, side: Side) -> &mut Map<Part> {
        match side {
            Side::Exported => &mut self.exported,
            Side::Imported => &mut self.imported,
        }
    }

    fn count(&mut self, side: Side, device: u16, change: impl Fn(u64) -> u64) -> Option<(Device, [u64; 2])> {
        let sums = self.sums.get_mut(usize::from(device))?;
        let [exported, imported] = sums;
        let sum = if side == Side::Exported { exported } else { imported };
        *sum = change(*sum);
        self.shown(usize::from(device))
    }

    /// Returns the exported and imported bytes that others are told.
    fn shown(&self, device: Device) -> Option<(Device, [u64; 2])> {
        let [exported, imported] = self.sums.get(device)?;
        let freed = self.lingering.get(device)?.saturating_add(*self.leaving.get(device)?);
        Some((device, [exported.saturating_add(freed), *imported]))
    }

    /// Ends the move of bytes to a slot without an owner. If `stay`, they linger as before.
    fn left(&mut self, device: Device, bytes: u64, stay: bool) {
        let (Some(leaving), Some(lingering)) = (self.leaving.get_mut(device), self.lingering.get_mut(device))
        else {
            return;
        };
        *leaving = leaving.saturating_sub(bytes);
        *lingering = lingering.saturating_add(if stay { bytes } else { 0 });
        LINGERS.store(self.lingering.iter().any(|bytes| *bytes > 0), Relaxed);
    }

    fn forget(&mut self, side: Side, key: u64) -> Option<(Device, [u64; 2])> {
        let part = self.side(side).remove(key)?;
        self.count(side, part.device, |sum| sum.saturating_sub(part.bytes))
    }
}

fn publish(changed: Option<(Device, [u64; 2])>) {
    if let Some((device, [exported, imported])) = changed
        && let Some(share) = account::shares_on(device).next()
    {
        share.show_shared(exported, imported);
    }
}

/// Notes memory under a key, or that its size is another than was known.
pub(crate) fn note(side: Side, key: u64, device: Device, bytes: u64, context: u64) {
    IS_USED.store(true, Relaxed);
    let mut book = BOOK.lock();
    let before = book.side(side).get(key);
    if before.is_some_and(|part| part.bytes == bytes) {
        return;
    }
    let _ = book.forget(side, key);
    let part = Part { device: device as u16, bytes, context };
    let is_noted = book.side(side).insert(key, part).is_ok();
    let changed = book.count(side, part.device, |sum| sum.saturating_add(if is_noted { bytes } else { 0 }));
    drop(book);
    publish(changed);
}

/// Forgets memory that is no longer there or no longer imported.
pub(crate) fn forget(side: Side, key: u64) {
    if !IS_USED.load(Relaxed) {
        return;
    }
    let changed = BOOK.lock().forget(side, key);
    publish(changed);
    if side == Side::Imported {
        settle_left(changed);
    }
}

/// Settles what exporters left, after memory of others was given back, which may have been the last of it.
fn settle_left(changed: Option<(Device, [u64; 2])>) {
    if let Some(share) = changed.and_then(|(device, _)| account::shares_on(device).next()) {
        share.settle_left();
    }
}

/// Notes that memory was freed which takes `bytes` of the charge. Returns how many of them are to be
/// released.
pub(crate) fn freed(key: u64, device: Device, bytes: u64) -> u64 {
    if !IS_USED.load(Relaxed) {
        return bytes;
    }
    let mut book = BOOK.lock();
    if book.forget(Side::Exported, key).is_none() {
        return bytes;
    }
    let Some(lingering) = book.lingering.get_mut(device) else { return bytes };
    *lingering = lingering.saturating_add(bytes);
    let shown = book.shown(device);
    LINGERS.store(true, Relaxed);
    drop(book);
    publish(shown);
    settle(device);
    0
}

/// Releases what was freed and others no longer have. Returns true if anything came back.
pub(crate) fn settle(device: Device) -> bool {
    if !LINGERS.load(Relaxed) {
        return false;
    }
    let Some(share) = account::shares_on(device).next() else { return false };
    share.reap();
    let (imported, exported) = share.shared_by_others();
    let mut book = BOOK.lock();
    let all = &mut *book;
    let (Some([own, _]), Some(lingering), Some(leaving)) =
        (all.sums.get(device), all.lingering.get_mut(device), all.leaving.get_mut(device))
    else {
        return false;
    };
    let exported = exported.saturating_add(*own).saturating_add(*leaving);
    let kept = imported.saturating_sub(exported).min(*lingering);
    let unused = core::mem::replace(lingering, 0) - kept;
    *leaving = leaving.saturating_add(kept);
    LINGERS.store(book.lingering.iter().any(|bytes| *bytes > 0), Relaxed);
    let shown = book.shown(device);
    drop(book);
    // Others are told before it is released: what is told to be exported is charged at any time.
    let give_up = |shown, bytes| {
        publish(shown);
        account::release(device, bytes);
    };
    if unused > 0 {
        give_up(shown, unused);
    }
    if kept > 0 {
        let leave = || {
            let mut book = BOOK.lock();
            book.left(device, kept, false);
            let shown = book.shown(device);
            drop(book);
            give_up(shown, kept);
        };
        // One share for all that it is charged to, or it stays where it is.
        if account::shares_on(device).nth(1).is_some() || !share.leave(kept, leave) {
            BOOK.lock().left(device, kept, true);
        }
    }
    unused > 0
}

/// Forgets what was imported into a context that is gone. What went with the context and others may have is
/// freed as if it had been freed before.
pub(crate) fn context_gone(context: u64) {
    loop {
        let mut book = BOOK.lock();
        let Some(key) = book.imported.find_key(|_, part| part.context == context) else { break };
        let changed = book.forget(Side::Imported, key);
        drop(book);
        publish(changed);
        settle_left(changed);
    }
}

/// Forgets all shared memory, in a forked child.
pub(crate) fn renew_after_fork() {
    BOOK.renew_after_fork();
    let mut book = BOOK.lock();
    book.exported.clear();
    book.imported.clear();
    book.sums = [[0; 2]; device::MOST];
    book.lingering = [0; device::MOST];
    book.leaving = [0; device::MOST];
    LINGERS.store(false, Relaxed);
}
