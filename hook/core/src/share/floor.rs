//! Floors: the least that each process of a share holds, as the kernel says it by the length of a lock.
//!
//! A tenant can write every word of the region, and make the words agree. But it cannot take a lock of an
//! open file from another process. So a process that holds much keeps a lock on as many bytes of the region's
//! file, far behind its end, as it holds MiB: its *floor*. A floor is never more than what the process is
//! charged, whoever is stopped or killed in between, because it is raised after the charge and lowered before
//! the release. So in a sound region the floors of all processes never exceed the total, and refuse nobody
//! anything.
//!
//! Floors are read where a process has grown by [`part`] of the limit since it last read them, so most
//! charges make no system call. A process may hold less than two such parts beyond its floor. That is how
//! much, for each process of the share, somebody who writes into the region can take beyond the quota.

use crate::path::Path;
use crate::sys::{self, Errno, File};
use aliquot_quota::region::SLOT_COUNT;

/// The floor of slot `i` begins at byte `BASE + (i << SHIFT)`.
const BASE: u64 = 1 << 40;
/// Bits of the room for one floor: enough for 256 TiB.
const SHIFT: u32 = 28;
const MIB_SHIFT: u32 = 20;
/// Bytes of the region that are mapped to keep the lock.
const MAPPED: usize = 4096;
/// The most locks that are read. Whoever makes more has the share's memory refused to everybody, itself
/// included.
const LOOKS: u32 = 4 * SLOT_COUNT as u32;

/// Returns the part of a limit by which a process may grow before floors are read.
pub(super) const fn part(limit: u64) -> u64 {
    limit / 32
}

/// A lock that says how much a process holds at least.
pub(super) struct Floor {
    /// A mapping of the open file that has the lock; it keeps the lock when all descriptors are closed.
    at: *mut u8,
    mib: u64,
}

// SAFETY: owns its mapping.
unsafe impl Send for Floor {}

impl Floor {
    /// Takes a floor of `bytes`, rounded down to MiB, for a slot of the caller.
    pub(super) fn take(path: &Path, slot: usize, bytes: u64) -> Result<Self, Errno> {
        let mib = (bytes >> MIB_SHIFT).clamp(1, (1 << SHIFT) - 1);
        let file = File::read_write(path.as_c())?;
        file.share_lock(BASE + ((slot as u64) << SHIFT), mib)?;
        let at = file.map_shared(MAPPED)?;
        sys::keep_from_children(at, MAPPED);
        Ok(Self { at, mib })
    }

    /// Returns the bytes of the floor.
    pub(super) fn bytes(&self) -> u64 {
        self.mib << MIB_SHIFT
    }

    /// Forgets the floor in a forked child, which has neither the mapping nor the lock.
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

/// Returns the bytes that all other processes hold at least. More locks than processes can have count as
/// everything.
pub(super) fn of_others(path: &Path, own: usize) -> u64 {
    let Ok(file) = File::read_write(path.as_c()) else { return 0 };
    let mut looks = LOOKS;
    let mib = sum(&file, [0, SLOT_COUNT as u64], own as u64, &mut looks).unwrap_or(u64::MAX);
    mib.saturating_mul(1 << MIB_SHIFT)
}

/// Returns the MiB of the floors of some slots; `None` if there are too many locks.
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

/// Returns the first byte of some lock in a range, and the byte after its last one. The outer `None` means
/// that too many locks were read.
fn next(file: &File, from: u64, to: u64, looks: &mut u32) -> Option<Option<(u64, u64)>> {
    *looks = looks.checked_sub(1)?;
    // Where the kernel does not say, there is nothing to compare with.
    let found = file.lock_in(from, to - from).ok().flatten();
    Some(found.map(|(start, length)| {
        let end = if length == 0 { u64::MAX } else { start.saturating_add(length) };
        (start.max(from), end)
    }))
}
