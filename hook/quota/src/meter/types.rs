//! The records that the learner keeps, and those that it is given and returns.

use super::{CLEAN_ALL, CLEAN_FIRST, LEAST_NS, LEAST_WEIGHT, LONG_NS, MIXED, STREAMS};

#[derive(Clone, Copy)]
pub(super) struct Cost {
    pub(super) key: u64,
    /// GPU time that the next launch is charged, in nanoseconds.
    pub(super) estimate_ns: u64,
    /// The level of low measurements, in nanoseconds: falls fast and rises slowly.
    pub(super) low_ns: u64,
    /// Wall time that a launch adds on average to what others of the process take, in nanoseconds.
    pub(super) wall_ns: u64,
    /// A measurement far below the low ones, in nanoseconds; 0 = none.
    pub(super) dip_ns: u64,
    /// The number of measurements so far, up to the inverse of the learning rate.
    pub(super) count: u32,
    /// The part of the measurements that were about as long as the low ones, of [`CLEAN_ALL`].
    pub(super) clean: u32,
    /// The number of launches until a delicate one is timed.
    pub(super) rest: u32,
    /// The first launch that may be other work than was measured; 0 = none.
    pub(super) doubted_from: u64,
    /// True if it was long when it was last measured, and has not become clearly shorter since.
    pub(super) was_long: bool,
}

pub(super) const NO_COST: Cost = Cost {
    key: 0,
    estimate_ns: 0,
    low_ns: 0,
    wall_ns: 0,
    dip_ns: 0,
    count: 0,
    clean: 0,
    rest: 0,
    doubted_from: 0,
    was_long: false,
};

impl Cost {
    /// Returns true if launches are timed in windows. A launch that shares its time with other streams can be
    /// cheap and long.
    pub(super) fn is_short(&self) -> bool {
        self.estimate_ns < LONG_NS && self.low_ns < LONG_NS && self.doubted_from == 0 && !self.was_long
    }

    /// Takes the mean of what was measured as the cost of the next launch. Where lengths vary about
    /// [`LONG_NS`], a mean that is below it by chance would be charged unmeasured until it is above it again,
    /// and so be too low on average. So long launches stay long until they are clearly shorter.
    pub(super) fn estimate(&mut self, estimate_ns: u64) {
        self.estimate_ns = estimate_ns.max(LEAST_NS);
        if self.estimate_ns >= LONG_NS {
            self.was_long = true;
        } else if self.estimate_ns < LONG_NS / 4 * 3 {
            self.was_long = false;
        }
    }

    /// Notes how much wall time a launch had that no other measurement counts, in nanoseconds.
    pub(super) fn note_wall(&mut self, fresh_ns: u64) {
        let weight = u64::from(LEAST_WEIGHT);
        self.wall_ns = match self.wall_ns {
            0 => fresh_ns,
            before => before.saturating_mul(weight - 1).saturating_add(fresh_ns) / weight,
        };
    }

    /// Notes the length of a launch, which had the GPU to itself (`is_alone`) or perhaps not. Returns true if
    /// it is about as long as the low ones.
    pub(super) fn note(&mut self, length_ns: u64, is_alone: bool) -> bool {
        let dips = length_ns < self.low_ns / 4 * 3 && !is_alone;
        if dips && self.dip_ns == 0 {
            // One such measurement may be a mistake.
            self.dip_ns = length_ns.max(1);
        } else if dips {
            // Twice: what was learned before lay in slices of others.
            let low_ns = length_ns.max(self.dip_ns);
            *self = Cost { low_ns, dip_ns: 0, count: 1, clean: CLEAN_FIRST, ..*self };
            self.estimate(low_ns);
        } else if length_ns < self.low_ns {
            self.low_ns -= (self.low_ns - length_ns).div_ceil(2);
        } else {
            self.low_ns += (length_ns - self.low_ns).min(self.low_ns) / 64;
        }
        let is_clean = length_ns / 5 * 4 <= self.low_ns;
        self.clean = self.clean - self.clean / 16 + if is_clean { CLEAN_ALL / 16 } else { 0 };
        is_clean
    }
}

/// A launch as the learner sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The key: function and grid, or graph, and context.
    pub key: u64,
    /// The context that the launch's events would be of.
    pub context: u64,
    /// The stream's handle.
    pub stream: u64,
    /// The calling thread.
    pub thread: u64,
    /// True if the handle means another stream in another thread.
    pub is_thread_stream: bool,
    /// True if events would defeat what the launch was made for.
    pub is_delicate: bool,
}

#[derive(Clone, Copy)]
pub(super) struct Single {
    pub(super) key: u64,
    pub(super) context: u64,
    pub(super) account: u32,
    pub(super) first_ns: u64,
    pub(super) charged_ns: u64,
    pub(super) order: u64,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) begins: Begins,
    pub(super) is_ready: bool,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Lane {
    pub(super) stream: u64,
    pub(super) start: usize,
    pub(super) end: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) context: u64,
    pub(super) account: u32,
    pub(super) thread: u64,
    pub(super) first_ns: u64,
    pub(super) last_ns: u64,
    pub(super) launches: u32,
    pub(super) charged_ns: u64,
    pub(super) keys: [(u64, u32); MIXED],
    pub(super) lanes: [Lane; STREAMS],
    pub(super) lane_count: usize,
    pub(super) has_thread_stream: bool,
    pub(super) is_closed: bool,
    pub(super) is_ready: bool,
    pub(super) is_spoilt: bool,
}

/// The bounds on when a launch can have begun, on the host's clock, where the GPU had nothing to do before;
/// zeros where it had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Begins {
    /// The earliest start.
    pub from_ns: u64,
    /// The latest start, if no other process had the GPU.
    pub until_ns: u64,
}

/// The events that the caller records around a launch; handed back with [`super::Meter::launched`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The event to record on the launch's stream before it.
    pub before: Option<usize>,
    /// The place of the launch if it is timed by itself; the second event of that place is recorded after the
    /// launch.
    pub single: Option<usize>,
    /// The window that the launch closes: the second events of all its streams are recorded after the launch.
    pub closes: Option<usize>,
    /// The window that the launch belongs to, as the first or a further one.
    pub window: Option<usize>,
}

/// What is known of other processes on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Others {
    /// Part of the wall time of kernels that was recently this process's own, in thousandths; 1000 if nobody
    /// else has work, `None` if others may have work and the part is not known.
    pub own_permille: Option<u32>,
    /// Time for which a process has the GPU while others wait, in nanoseconds.
    pub slice_ns: u64,
}

impl Others {
    /// No other processes.
    pub const NONE: Self = Self { own_permille: Some(1000), slice_ns: ASSUMED_SLICE_NS };
}

/// Length of a time slice where nothing else is known, in nanoseconds.
pub const ASSUMED_SLICE_NS: u64 = 2_000_000;

/// The predicted cost of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// GPU time to charge, in nanoseconds.
    pub cost_ns: u64,
    /// True if the cost has been measured.
    pub is_known: bool,
    /// True if the launch is timed in windows only.
    pub is_short: bool,
}

/// The result of a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Finding {
    /// The account that was charged.
    pub account: u32,
    /// GPU time to charge on top (above zero) or to refund (below zero), in nanoseconds.
    pub delta_ns: i64,
    /// The launch, if it was timed by itself.
    pub seen: Option<Seen>,
}

/// The place of a launch on the host's clock, and what it was charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Start of the launch, in nanoseconds.
    pub start_ns: u64,
    /// End of the launch, in nanoseconds.
    pub end_ns: u64,
    /// GPU time that it was charged, in nanoseconds.
    pub taken_ns: u64,
    /// Part of its wall time that no other measurement has counted, in nanoseconds.
    pub fresh_ns: u64,
    /// True if the charge is what the launch really had, and not its assumed part.
    pub is_sure: bool,
    /// A number for the launch's key; 24 bits.
    pub key: u32,
}

/// A measurement whose events may have been reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    /// A launch, by its place.
    Single(usize),
    /// A window, by its place.
    Window(usize),
}
