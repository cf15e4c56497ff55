//! Memory that several processes have: exported by one, imported by others.
//!
//! Who exported it pays for it. When it dies, its slot of the region stays charged with as much of it as the living
//! have imported (see `Share::reap`), so that the quota holds until the last of them gives it back. When it lives and
//! frees the memory while others still have it, it stays charged likewise, to a slot of nobody's (see `share/left.rs`):
//! what others have imported beyond what is exported now must be of what was freed. Nothing tells which import belongs
//! to which export, so all are sums.

use crate::account;
use crate::device::{self, Device};
use crate::lock::Mutex;
use crate::map::Map;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What a process has to do with shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// It has given it to others.
    Exported,
    /// It has got it from another.
    Imported,
}

#[derive(Clone, Copy)]
struct Part {
    device: u16,
    bytes: u64,
    /// Context that it goes with; 0 = none.
    context: u64,
}

/// Parts by a key of whoever made them: addresses, and numbers of physical memory with the lowest bit set.
struct Book {
    exported: Map<Part>,
    imported: Map<Part>,
    /// Exported and imported bytes.
    sums: [[u64; 2]; device::MOST],
    /// Bytes that were exported and freed, and stay charged because others have them: where no slot could be had.
    lingering: [u64; device::MOST],
}

static BOOK: Mutex<Book> = Mutex::new(Book {
    exported: Map::new(),
    imported: Map::new(),
    sums: [[0; 2]; device::MOST],
    lingering: [0; device::MOST],
});

/// Whether anything lingers.
static LINGERS: AtomicBool = AtomicBool::new(false);

/// Whether anything was ever noted: most programs share nothing.
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

    /// What others are told.
    fn shown(&self, device: Device) -> Option<(Device, [u64; 2])> {
        let [exported, imported] = self.sums.get(device)?;
        Some((device, [exported.saturating_add(*self.lingering.get(device)?), *imported]))
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

/// Notes memory under a key, or that it is of another size than was known.
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

/// Memory of others was given back, perhaps the last of it.
fn settle_left(changed: Option<(Device, [u64; 2])>) {
    if let Some(share) = changed.and_then(|(device, _)| account::shares_on(device).next()) {
        share.settle_left();
    }
}

/// Memory was freed that takes so many bytes of the charge: how many of them are to be released.
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

/// Releases what was freed and others no longer have. Tells whether anything came back.
pub(crate) fn settle(device: Device) -> bool {
    if !LINGERS.load(Relaxed) {
        return false;
    }
    let Some(share) = account::shares_on(device).next() else { return false };
    share.reap();
    let (imported, exported) = share.shared_by_others();
    let mut book = BOOK.lock();
    let exported = exported.saturating_add(book.sums.get(device).map_or(0, |[exported, _]| *exported));
    let Some(lingering) = book.lingering.get_mut(device) else { return false };
    let kept = imported.saturating_sub(exported).min(*lingering);
    let mut released = core::mem::replace(lingering, 0) - kept;
    if kept > 0 {
        // One share for all that it is charged to, or it stays where it is.
        drop(book);
        let is_left = account::shares_on(device).nth(1).is_none() && share.leave(kept);
        released += if is_left { kept } else { 0 };
        book = BOOK.lock();
        if !is_left && let Some(lingering) = book.lingering.get_mut(device) {
            *lingering = lingering.saturating_add(kept);
        }
    }
    let shown = book.shown(device);
    LINGERS.store(book.lingering.iter().any(|bytes| *bytes > 0), Relaxed);
    drop(book);
    if released > 0 {
        account::release(device, released);
        publish(shown);
    }
    released > 0
}

/// Forgets what went with a context.
pub(crate) fn context_gone(context: u64) {
    for side in [Side::Exported, Side::Imported] {
        loop {
            let mut book = BOOK.lock();
            let Some(key) = book.side(side).find_key(|_, part| part.context == context) else { break };
            let changed = book.forget(side, key);
            drop(book);
            publish(changed);
            if side == Side::Imported {
                settle_left(changed);
            }
        }
    }
}

/// In a forked child: nothing is known.
pub(crate) fn renew_after_fork() {
    BOOK.renew_after_fork();
    let mut book = BOOK.lock();
    book.exported.clear();
    book.imported.clear();
    book.sums = [[0; 2]; device::MOST];
    book.lingering = [0; device::MOST];
    LINGERS.store(false, Relaxed);
}
