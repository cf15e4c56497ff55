//! What devices are like, and what tenants do.

use crate::gpu::Slices;

/// What a device is like.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// For reports.
    pub name: &'static str,
    /// Time slices.
    pub slices: Slices,
    /// What the node agent is told of their length.
    pub told_ns: u64,
    /// Steps of event times.
    pub resolution_ns: u64,
    /// What a pair of events adds to the time between them.
    pub event_ns: u64,
}

/// The variants that every figure is the worst of. All parameters are assumed.
pub const VARIANTS: [Variant; 3] = [
    Variant {
        name: "2 ms slices",
        slices: Slices { slice_ns: 2_000_000, switch_ns: 0 },
        told_ns: 2_000_000,
        resolution_ns: 500,
        event_ns: 0,
    },
    Variant {
        name: "1 ms slices, slow events",
        slices: Slices { slice_ns: 1_000_000, switch_ns: 5_000 },
        told_ns: 1_000_000,
        resolution_ns: 1_000,
        event_ns: 1_000,
    },
    Variant {
        name: "0.3 ms slices",
        slices: Slices { slice_ns: 300_000, switch_ns: 1_000 },
        told_ns: 300_000,
        resolution_ns: 500,
        event_ns: 500,
    },
];

/// What a tenant does.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Kernels' lengths, launched in turn; zeros are left out.
    pub kernels_ns: [u64; 3],
    /// Random part of each, in percent to either side.
    pub jitter_percent: u64,
    /// Streams, used in turn.
    pub streams: usize,
    /// Part of the GPU that a kernel fills, in thousandths.
    pub width: u32,
    /// Launches between pauses of `pause_ns`; 0 = never.
    pub burst: u64,
    /// Host time between bursts.
    pub pause_ns: u64,
    /// Waits for each kernel before the next launch.
    pub waits: bool,
    /// When the first launch comes, from the start of the run.
    pub start_ns: u64,
    /// Processes that do this, each for itself.
    pub processes: usize,
    /// When the first of them is killed.
    pub death: Option<Death>,
}

/// The moment at which a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// Not before this time, from the start of the run.
    pub from_ns: u64,
    /// What it is doing then.
    pub moment: Moment,
}

/// What a process is doing when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// It has been told to wait.
    InLine,
    /// It was let go, and has not launched yet: that launch, and a lease if it took one, are charged for nothing.
    Admitted,
}

impl Load {
    /// Kernels of one length on one stream, as fast as they go.
    pub fn of(kernel_ns: u64) -> Self {
        Self {
            kernels_ns: [kernel_ns, 0, 0],
            jitter_percent: 5,
            streams: 1,
            width: crate::gpu::WHOLE,
            burst: 0,
            pause_ns: 0,
            waits: false,
            start_ns: 0,
            processes: 1,
            death: None,
        }
    }

    /// Longest kernel.
    pub fn longest_ns(&self) -> u64 {
        self.kernels_ns.iter().copied().max().unwrap_or(0)
    }
}

/// A share and what runs in it.
#[derive(Clone, Copy, Debug)]
pub struct Tenant {
    /// Percent of the GPU.
    pub percent: u8,
    /// What its processes do.
    pub load: Load,
    /// Whether it may borrow.
    pub is_soft: bool,
    /// Orders borrowers.
    pub priority: i8,
}
