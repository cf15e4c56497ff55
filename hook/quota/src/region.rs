//! The region: one preallocated file per share, mapped by every process of the claim.
//!
//! It holds a header of one page, [`SLOT_COUNT`] slots of 256 bytes (one per process), and the compute side
//! (see [`crate::gate`]). Every field is atomic; the offsets are frozen per layout version and asserted at
//! compile time. The node agent creates the file with [`initial_header`] followed by zeros, and later reads
//! it through [`RegionView`] or, mapped, through [`Region`]. [`crate::ledger`] says how the fields are
//! changed.

use crate::gate::Compute;
use core::fmt;
use core::mem::{align_of, offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64};

/// The layout version that this crate creates.
pub const REGION_LAYOUT_VERSION: u32 = 3;

/// Size of the region's file, in bytes; a mapped file of any other size is refused.
pub const REGION_FILE_SIZE: usize = size_of::<Region>();

/// The number of processes that can use one share at the same time.
pub const SLOT_COUNT: usize = 1024;

/// The first locked byte: the owner of slot `i` holds an OFD lock on byte `LOCK_BASE + i`, far behind the
/// file's end.
pub const LOCK_BASE: u64 = 1 << 32;

const MAGIC: u64 = u64::from_le_bytes(*b"ALQREGN1");

/// Two words that change together, by a 128-bit compare and swap.
#[repr(C, align(16))]
pub struct Pair {
    /// The value.
    pub value: AtomicU64,
    /// A stamp that makes the pair unique over its whole life: it only grows, or never repeats.
    pub stamp: AtomicU64,
}

/// The file's first page.
#[repr(C, align(64))]
pub struct Header {
    /// Magic bytes `ALQREGN1`.
    pub magic: AtomicU64,
    /// Layout version, [`REGION_LAYOUT_VERSION`].
    pub version: AtomicU32,
    /// Size of one slot in bytes.
    pub slot_size: AtomicU32,
    /// Size of the file in bytes.
    pub file_size: AtomicU64,
    /// Number of slots.
    pub slot_count: AtomicU32,
    /// Offset of the first slot in bytes.
    pub slots_offset: AtomicU32,
    reserved0: [AtomicU64; 4],
    /// Bytes charged by all slots, and the last operation (slot and number) that changed them.
    pub total: Pair,
    reserved1: [AtomicU64; 6],
    /// Highest total seen, in bytes.
    pub peak_bytes: AtomicU64,
    /// The number of charges refused because of the quota.
    pub refused: AtomicU64,
    /// The number of slots whose owner died and whose bytes were taken back.
    pub reaped: AtomicU64,
    /// Bits of [`audit`].
    pub audit: AtomicU64,
    /// Bytes that a process's first context takes on this GPU, as last measured; 0 = not yet.
    pub context_bytes: AtomicU64,
    /// When a process of the share was last found dead, in milliseconds of the monotonic clock; 0 = never.
    pub last_death_ms: AtomicU64,
    reserved2: [AtomicU64; 2],
    reserved3: [AtomicU64; 488],
}

/// Bits of [`Header::audit`]: events that the limiter cannot see through.
pub mod audit {
    /// A library was opened with `RTLD_DEEPBIND`, which binds past the limiter.
    pub const DEEPBIND: u64 = 1;
    /// The driver packed an allocation differently than assumed.
    pub const PACKING: u64 = 2;
    /// The driver handed out a symbol that could not be matched with the table.
    pub const RESOLVER: u64 = 4;
    /// A value in the region was impossible.
    pub const CORRUPT: u64 = 8;
}

/// One process of the claim.
#[repr(C, align(64))]
pub struct Slot {
    /// Bytes charged after an operation, and its number: operation `n` uses entry `n % 2`.
    pub entries: [Pair; 2],
    /// Number of the last operation that is known to have happened; its entry is what the slot is charged.
    pub recorded: AtomicU64,
    /// Generation and [`SlotState`].
    pub state: AtomicU64,
    /// The owner's pid in its own pid namespace.
    pub pid: AtomicU32,
    /// Not used: the node agent says which pid a process has on the node, in [`crate::measured`].
    pub host_pid: AtomicU32,
    /// Start time of the owner in clock ticks since boot.
    pub start_time: AtomicU64,
    /// Inode of the owner's pid namespace.
    pub pid_namespace: AtomicU64,
    /// Part of the charge that is not allocations: contexts and modules.
    pub overhead_bytes: AtomicU64,
    /// When the owner was found dead, in milliseconds of the monotonic clock; 0 = not yet.
    pub dead_since_ms: AtomicU64,
    /// 1 while launches of the owner are timed whose end it has not seen yet.
    pub pending: AtomicU64,
    /// Part of the charge that other processes may have imported.
    pub exported_bytes: AtomicU64,
    /// Bytes of other processes that the owner has imported; they are charged to the process that exported
    /// them.
    pub imported_bytes: AtomicU64,
    reserved0: [AtomicU64; 2],
    reserved1: [AtomicU64; 16],
}

/// Who may change a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum SlotState {
    /// Nobody may; the slot's charge is zero.
    Free = 0,
    /// The process that holds the slot's lock may.
    Live = 1,
    /// Any process may, to take the bytes back.
    Dead = 2,
}

impl SlotState {
    /// Returns the state in a state word; `None` if the word is impossible.
    pub const fn of(word: u64) -> Option<Self> {
        match word & 0xff {
            0 => Some(Self::Free),
            1 => Some(Self::Live),
            2 => Some(Self::Dead),
            _ => None,
        }
    }

    /// Returns the state word of this state and `generation`.
    pub const fn word(self, generation: u64) -> u64 {
        generation << 8 | self as u64
    }
}

/// Returns the generation in a state word.
pub const fn generation(word: u64) -> u64 {
    word >> 8
}

/// The whole file of a region.
#[repr(C, align(4096))]
pub struct Region {
    /// The first page.
    pub header: Header,
    /// The slots, one per process.
    pub slots: [Slot; SLOT_COUNT],
    /// The account of GPU time.
    pub compute: Compute,
}

const _: () = {
    assert!(size_of::<Header>() == 4096 && align_of::<Header>() == 64);
    assert!(offset_of!(Header, version) == 8);
    assert!(offset_of!(Header, file_size) == 16);
    assert!(offset_of!(Header, total) == 64);
    assert!(offset_of!(Header, peak_bytes) == 128);
    assert!(offset_of!(Header, audit) == 152);
    assert!(offset_of!(Header, context_bytes) == 160);
    assert!(offset_of!(Header, last_death_ms) == 168);
    assert!(size_of::<Slot>() == 256 && align_of::<Slot>() == 64);
    assert!(offset_of!(Slot, recorded) == 32);
    assert!(offset_of!(Slot, state) == 40);
    assert!(offset_of!(Slot, pid) == 48);
    assert!(offset_of!(Slot, host_pid) == 52);
    assert!(offset_of!(Slot, start_time) == 56);
    assert!(offset_of!(Slot, pid_namespace) == 64);
    assert!(offset_of!(Slot, overhead_bytes) == 72);
    assert!(offset_of!(Slot, dead_since_ms) == 80);
    assert!(offset_of!(Slot, pending) == 88);
    assert!(offset_of!(Slot, exported_bytes) == 96);
    assert!(offset_of!(Slot, imported_bytes) == 104);
    assert!(offset_of!(Region, slots) == 4096);
    assert!(offset_of!(Region, compute) == 4096 + 256 * SLOT_COUNT);
    assert!(offset_of!(Compute, charged_ns) == 8);
    assert!(offset_of!(Compute, delayed) == 16);
    assert!(offset_of!(Compute, logged) == 48);
    assert!(offset_of!(Compute, log) == 64);
    assert!(offset_of!(Compute, members) == 49_352);
    assert!(offset_of!(Compute, purses) == 49_408);
    assert!(REGION_FILE_SIZE == 4096 + 256 * SLOT_COUNT + 131_072);
};

/// Why a region was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionError {
    /// The file does not have [`REGION_FILE_SIZE`] bytes. Holds its size.
    Size(usize),
    /// The file does not start with the magic bytes.
    Magic,
    /// The file has a layout version that this reader does not know.
    Version(u32),
    /// The header's constants do not fit the layout version.
    Header,
}

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(size) => write!(f, "region has {size} bytes instead of {REGION_FILE_SIZE}"),
            Self::Magic => f.write_str("region does not start with its magic bytes"),
            Self::Version(version) => write!(
                f,
                "region has unknown layout version {version}, version {REGION_LAYOUT_VERSION} is read here: node agent and limiter are of different releases"
            ),
            Self::Header => f.write_str("region has a header that does not fit its layout version"),
        }
    }
}

impl core::error::Error for RegionError {}

/// Size of [`initial_header`], in bytes.
pub const INITIAL_HEADER_SIZE: usize = 64;

/// Returns the bytes that a new region starts with; the rest of the file is zero.
pub fn initial_header() -> [u8; INITIAL_HEADER_SIZE] {
    let mut out = [0; INITIAL_HEADER_SIZE];
    let fields: [(usize, &[u8]); 6] = [
        (0, &MAGIC.to_le_bytes()),
        (8, &REGION_LAYOUT_VERSION.to_le_bytes()),
        (12, &(size_of::<Slot>() as u32).to_le_bytes()),
        (16, &(REGION_FILE_SIZE as u64).to_le_bytes()),
        (24, &(SLOT_COUNT as u32).to_le_bytes()),
        (28, &(offset_of!(Region, slots) as u32).to_le_bytes()),
    ];
    for (at, value) in fields {
        if let Some(target) = out.get_mut(at..at + value.len()) {
            target.copy_from_slice(value);
        }
    }
    out
}

/// Checks the first bytes and the size of a region's file, before the file is mapped or read further.
pub fn check(file_size: usize, head: &[u8]) -> Result<(), RegionError> {
    // Another version may have another size, and the version says more.
    let (Some(magic), Some(version)) = (u64_at(head, 0), u64_at(head, 8)) else {
        return Err(RegionError::Size(file_size));
    };
    if magic != MAGIC {
        return Err(RegionError::Magic);
    }
    let version = version as u32;
    if version != REGION_LAYOUT_VERSION {
        return Err(RegionError::Version(version));
    }
    if file_size != REGION_FILE_SIZE {
        return Err(RegionError::Size(file_size));
    }
    if head.get(..INITIAL_HEADER_SIZE) != Some(initial_header().as_slice()) {
        return Err(RegionError::Header);
    }
    Ok(())
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_le_bytes)
}

/// Usage read from a snapshot of the region's bytes, for metrics. The numbers of a region in use are each
/// correct, but may be a moment apart.
#[derive(Clone, Copy)]
pub struct RegionView<'a> {
    bytes: &'a [u8],
}

/// One process as a [`RegionView`] shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Index of the process's slot.
    pub slot: usize,
    /// Pid in the process's own pid namespace.
    pub pid: u32,
    /// Inode of that pid namespace; 0 if the process could not tell.
    pub pid_namespace: u64,
    /// Start of the process in clock ticks since boot; 0 if the process could not tell.
    pub start_time: u64,
    /// Bytes charged to the process in all.
    pub charged_bytes: u64,
    /// Part of the charge that is not allocations, in bytes.
    pub overhead_bytes: u64,
    /// Part of the charge that other processes may have imported, in bytes.
    pub exported_bytes: u64,
    /// Bytes of other processes that this one has imported.
    pub imported_bytes: u64,
    /// True if the process was found dead and its bytes wait to be taken back.
    pub dead: bool,
}

impl<'a> RegionView<'a> {
    /// Creates a view of the whole content of a region's file.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, RegionError> {
        check(bytes.len(), bytes)?;
        Ok(Self { bytes })
    }

    fn word(&self, at: usize) -> u64 {
        u64_at(self.bytes, at).unwrap_or_default()
    }

    /// Returns the bytes charged by all processes, dead ones included until their bytes are taken back.
    pub fn total_bytes(&self) -> u64 {
        self.word(offset_of!(Header, total))
    }

    /// Returns the highest total so far, in bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.word(offset_of!(Header, peak_bytes))
    }

    /// Returns the number of allocations refused because of the quota so far.
    pub fn refused(&self) -> u64 {
        self.word(offset_of!(Header, refused))
    }

    /// Returns the number of processes that died with bytes charged so far.
    pub fn reaped(&self) -> u64 {
        self.word(offset_of!(Header, reaped))
    }

    /// Returns the bits of [`audit`].
    pub fn audit(&self) -> u64 {
        self.word(offset_of!(Header, audit))
    }

    /// Returns the bytes charged to the slot at this offset: the entry of its last operation.
    fn charged(&self, base: usize) -> u64 {
        let entry = |number: u64| base + (number % 2) as usize * size_of::<Pair>();
        let recorded = self.word(base + offset_of!(Slot, recorded));
        // The very last operation of all may have happened without its slot showing it yet.
        let last = self.word(offset_of!(Header, total) + 8);
        let (slot, number) = ((last >> 48) as usize, last & ((1 << 48) - 1));
        let is_newer = offset_of!(Region, slots) + slot * size_of::<Slot>() == base && number > recorded;
        self.word(entry(if is_newer { number } else { recorded }))
    }

    /// Returns the processes that hold a slot.
    pub fn processes(&self) -> impl Iterator<Item = ProcessUsage> + 'a {
        let view = *self;
        (0..SLOT_COUNT).filter_map(move |slot| {
            let base = offset_of!(Region, slots) + slot * size_of::<Slot>();
            let state = SlotState::of(view.word(base + offset_of!(Slot, state)))?;
            if state == SlotState::Free {
                return None;
            }
            let pids = view.word(base + offset_of!(Slot, pid));
            Some(ProcessUsage {
                slot,
                pid: pids as u32,
                pid_namespace: view.word(base + offset_of!(Slot, pid_namespace)),
                start_time: view.word(base + offset_of!(Slot, start_time)),
                charged_bytes: view.charged(base),
                overhead_bytes: view.word(base + offset_of!(Slot, overhead_bytes)),
                exported_bytes: view.word(base + offset_of!(Slot, exported_bytes)),
                imported_bytes: view.word(base + offset_of!(Slot, imported_bytes)),
                dead: state == SlotState::Dead,
            })
        })
    }

    /// Returns the bytes that living processes hold: their own, and what they have imported from processes
    /// that are gone.
    pub fn held_bytes(&self, lives: impl Fn(&ProcessUsage) -> bool) -> u64 {
        let (mut held, mut imported, mut left) = (0_u64, 0_u64, 0_u64);
        for process in self.processes() {
            if lives(&process) {
                held = held.saturating_add(process.charged_bytes);
                imported = imported.saturating_add(process.imported_bytes);
            } else {
                left = left.saturating_add(process.charged_bytes.min(process.exported_bytes));
            }
        }
        held.saturating_add(left.min(imported))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Vec<u8> {
        let mut bytes = vec![0; REGION_FILE_SIZE];
        bytes[..INITIAL_HEADER_SIZE].copy_from_slice(&initial_header());
        bytes
    }

    #[test]
    fn a_fresh_region_is_empty() {
        let bytes = fresh();
        let view = RegionView::parse(&bytes).unwrap();
        assert_eq!((view.total_bytes(), view.peak_bytes(), view.refused(), view.reaped()), (0, 0, 0, 0));
        assert_eq!(view.processes().count(), 0);
    }

    #[test]
    fn a_region_of_another_size_version_or_kind_is_refused() {
        let bytes = fresh();
        let parse = |bytes: &[u8]| RegionView::parse(bytes).err();
        assert_eq!(parse(&bytes[..REGION_FILE_SIZE - 1]), Some(RegionError::Size(REGION_FILE_SIZE - 1)));
        assert_eq!(parse(&[]), Some(RegionError::Size(0)));
        let changed = |at: usize| {
            let mut bytes = bytes.clone();
            bytes[at] ^= 2;
            parse(&bytes)
        };
        assert_eq!(changed(0), Some(RegionError::Magic));
        assert_eq!(changed(8), Some(RegionError::Version(REGION_LAYOUT_VERSION ^ 2)));
        assert_eq!(changed(24), Some(RegionError::Header));
    }

    #[test]
    fn what_the_living_have_of_the_dead_is_held() {
        let mut bytes = fresh();
        // Charged, exported, imported, and whether it lives.
        let all = [(100, 0, 60, true), (50, 50, 0, false), (30, 20, 0, false), (7, 0, 0, false)];
        for (slot, (charged, exported, imported, lives)) in all.into_iter().enumerate() {
            let base = 4096 + 256 * slot;
            let state = if lives { SlotState::Live } else { SlotState::Dead };
            for (at, value) in [(0, charged), (40, state.word(1)), (96, exported), (104, imported)] {
                bytes[base + at..base + at + 8].copy_from_slice(&value.to_le_bytes());
            }
        }
        let held = |bytes: &[u8]| RegionView::parse(bytes).unwrap().held_bytes(|process| !process.dead);
        assert_eq!(held(&bytes), 160, "70 of the dead are exported, and 60 imported");
        bytes[4096 + 104] = 200;
        assert_eq!(held(&bytes), 170);
        bytes[4096 + 104] = 0;
        assert_eq!(held(&bytes), 100);
    }

    #[test]
    fn processes_show_what_their_slots_hold() {
        let mut bytes = fresh();
        let mut put = |at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let base = 4096 + 256 * 5;
        // Operation 3 has happened, operation 4 is only prepared.
        put(base + 16, 1 << 30);
        put(base + 24, 3);
        put(base, 5 << 30);
        put(base + 8, 4);
        put(base + 32, 3);
        put(base + 40, SlotState::Live.word(9));
        put(base + 48, 77 << 32 | 12);
        put(base + 56, 4711);
        put(base + 64, 4_026_531_836);
        put(base + 72, 1 << 20);
        put(4096 + 256 * 6 + 40, SlotState::Dead.word(1));
        put(64, 1 << 30);
        let view = RegionView::parse(&bytes).unwrap();
        let all: Vec<_> = view.processes().collect();
        assert_eq!(
            all[0],
            ProcessUsage {
                slot: 5,
                pid: 12,
                pid_namespace: 4_026_531_836,
                start_time: 4711,
                charged_bytes: 1 << 30,
                overhead_bytes: 1 << 20,
                exported_bytes: 0,
                imported_bytes: 0,
                dead: false
            }
        );
        assert_eq!((all[1].slot, all[1].dead, all.len()), (6, true, 2));
        assert_eq!(view.total_bytes(), 1 << 30);
        // Now it has happened, and only the header says so.
        bytes[72..80].copy_from_slice(&(5_u64 << 48 | 4).to_le_bytes());
        assert_eq!(RegionView::parse(&bytes).unwrap().processes().next().unwrap().charged_bytes, 5 << 30);
    }
}
