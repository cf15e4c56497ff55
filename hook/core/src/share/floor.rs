//! What each process of a share holds at the least, as the kernel says it: by the length of a lock.
//!
//! A tenant can write every word of the region, and make them agree. A lock of an open file it cannot take from another
//! process. So a process that holds much keeps a lock on as many bytes of the region's file, far behind its end, as it
//! holds MiB: the *floor*. It is never more than what the process is charged, because it is raised behind the charge and
//! lowered before the release, whoever is stopped or killed in between; so in a sound region the floors of all never
//! exceed the total, and refuse nobody anything.
//!
//! Floors are looked at where a process has grown by [`part`] of the limit since it last did, so most charges make no
//! system call. What a process may hold beyond its floor is less than two such parts, which is what can be taken beyond
//! the quota, for each process of the share, by somebody who writes into the region.

use super::Path;
use crate::sys::{self, Errno, File};
use aliquot_quota::region::SLOT_COUNT;

/// The floor of slot `i` begins at byte `BASE + (i << SHIFT)`.
const BASE: u64 = 1 << 40;
/// Room for 256 TiB.
const SHIFT: u32 = 28;
const MIB_SHIFT: u32 = 20;
/// Bytes of the region that are mapped to keep the lock.
const MAPPED: usize = 4096;
/// Locks that are looked at. Who makes more has the share's memory refused to everybody, itself included.
const LOOKS: u32 = 4 * SLOT_COUNT as u32;

/// The part of a limit by which a process may grow before floors are looked at.
pub(super) const fn part(limit: u64) -> u64 {
    limit / 32
}

/// A lock that says what a process holds at the least.
pub(super) struct Floor {
    /// A mapping of the open file that has the lock, which keeps it when all descriptors are closed.
    at: *mut u8,
    mib: u64,
}

// SAFETY: owns its mapping.
unsafe impl Send for Floor {}

impl Floor {
    /// Takes a floor of so many bytes, rounded down to MiB, for a slot of the caller's.
    pub(super) fn take(path: &Path, slot: usize, bytes: u64) -> Result<Self, Errno> {
        let mib = (bytes >> MIB_SHIFT).clamp(1, (1 << SHIFT) - 1);
        let file = File::read_write(path.as_c())?;
        file.share_lock(BASE + ((slot as u64) << SHIFT), mib)?;
        let at = file.map_shared(MAPPED)?;
        sys::keep_from_children(at, MAPPED);
        Ok(Self { at, mib })
    }

    /// Bytes that it says.
    pub(super) fn bytes(&self) -> u64 {
        self.mib << MIB_SHIFT
    }

    /// Forgets it in a forked child, which has neither the mapping nor the lock.
    pub(super) fn forget(self) {
        core::mem::forget(self);
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nothing refers to.
        unsafe { sys::free_memory(self.at, MAPPED) };
    }
}

/// Bytes that all others hold at the least. More locks than processes can have count as everything.
pub(super) fn of_others(path: &Path, own: usize) -> u64 {
    let Ok(file) = File::read_write(path.as_c()) else { return 0 };
    let mut looks = LOOKS;
    let mib = sum(&file, [0, SLOT_COUNT as u64], own as u64, &mut looks).unwrap_or(u64::MAX);
    mib.saturating_mul(1 << MIB_SHIFT)
}

/// MiB of the floors of some slots; `None` if there are too many locks.
fn sum(file: &File, [mut from, mut to]: [u64; 2], own: u64, looks: &mut u32) -> Option<u64> {
    let mut sum = 0_u64;
    while from < to {
        let Some(found) = next(file, BASE + (from << SHIFT), BASE + (to << SHIFT), looks)? else { break };
        let slot = (found.0.saturating_sub(BASE) >> SHIFT).clamp(from, to - 1);
        let (begin, end) = (BASE + (slot << SHIFT), BASE + ((slot + 1) << SHIFT));
        // While an owner exchanges its floor for another one it has both, from the same byte on.
        let mut reached = found.1.clamp(begin, end);
        while reached < end {
            match next(file, reached, end, looks)? {
                Some(further) => reached = further.1.clamp(reached + 1, end),
                None => break,
            }
        }
        if slot != own {
            sum = sum.saturating_add(reached - begin);
        }
        // The smaller half by recursion, which then is never deep.
        if slot - from < to - slot {
            sum = sum.saturating_add(self::sum(file, [from, slot], own, looks)?);
            from = slot + 1;
        } else {
            sum = sum.saturating_add(self::sum(file, [slot + 1, to], own, looks)?);
            to = slot;
        }
    }
    Some(sum)
}

/// First byte of some lock in a range, and the byte behind its last one. The outer `None`: too many were looked at.
fn next(file: &File, from: u64, to: u64, looks: &mut u32) -> Option<Option<(u64, u64)>> {
    *looks = looks.checked_sub(1)?;
    // Where the kernel does not say, there is nothing to compare with.
    let found = file.lock_in(from, to - from).ok().flatten();
    Some(found.map(|(start, length)| {
        let end = if length == 0 { u64::MAX } else { start.saturating_add(length) };
        (start.max(from), end)
    }))
}
