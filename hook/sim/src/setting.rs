//! The devices of the simulation, and what tenants do.

use crate::gpu::Slices;

/// The properties of a device.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// The name for reports.
    pub name: &'static str,
    /// The time slices.
    pub slices: Slices,
    /// The length of the slices that the node agent is told, in nanoseconds.
    pub told_ns: u64,
    /// The step of event times, in nanoseconds.
    pub resolution_ns: u64,
    /// The time that a pair of events adds to the time between them, in nanoseconds.
    pub event_ns: u64,
}

/// The variants that every figure is the worst of. All parameters are assumed; [`recorded`] replaces those
/// that there is a record of.
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

/// Returns the variants with time slices of a recorded length, of which the node agent is told.
fn recorded(slice_ns: u64) -> [Variant; 3] {
    let names = ["recorded slices", "recorded slices, slow events", "recorded slices, quick switches"];
    let mut named = names.into_iter();
    VARIANTS.map(|variant| Variant {
        name: named.next().unwrap_or(variant.name),
        slices: Slices { slice_ns, ..variant.slices },
        told_ns: slice_ns,
        ..variant
    })
}

/// The devices of all figures.
#[derive(Clone, Debug)]
pub struct Devices {
    /// The variants of which each figure is the worst.
    pub variants: [Variant; 3],
    /// The parameters that have no record.
    pub assumed: Vec<&'static str>,
}

impl Devices {
    /// Returns the devices as recorded of a real driver, and as assumed where there is no record.
    pub fn new(slice_ns: Option<u64>) -> Self {
        let variants = slice_ns.map_or(VARIANTS, recorded);
        let slices = slice_ns.is_none().then_some("time slices");
        Self {
            variants,
            assumed: slices.into_iter().chain(["switches", "cost and steps of events"]).collect(),
        }
    }
}

/// What a tenant does.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The lengths of kernels in nanoseconds, launched in turn; zeros are left out.
    pub kernels_ns: [u64; 3],
    /// The random part of each length, in percent to either side.
    pub jitter_percent: u64,
    /// The standard deviation of the logarithm of log-normal lengths about their mean, in percent; 0 =
    /// lengths with the random part above.
    pub sigma_percent: u64,
    /// The number of kernels of a launch; more than one are a graph.
    pub nodes: u64,
    /// The time between two kernels of a graph, in nanoseconds.
    pub gap_ns: u64,
    /// The number of streams, used in turn.
    pub streams: usize,
    /// The part of the GPU that a kernel fills, in thousandths.
    pub width: u32,
    /// The number of launches between pauses of `pause_ns`; 0 = no pauses.
    pub burst: u64,
    /// Host time between bursts, in nanoseconds.
    pub pause_ns: u64,
    /// True if each kernel is waited for before the next launch.
    pub waits: bool,
    /// The time of the first launch from the start of the run, in nanoseconds.
    pub start_ns: u64,
    /// The number of processes that do this, each for itself.
    pub processes: usize,
    /// The moment at which the first of them is killed.
    pub death: Option<Death>,
}

/// The moment at which a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// The earliest time, from the start of the run, in nanoseconds.
    pub from_ns: u64,
    /// What the process is doing then.
    pub moment: Moment,
}

/// What a process is doing when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The process has been told to wait.
    InLine,
    /// The process was let go, and has not launched yet: that launch, and a lease if it took one, are charged
    /// for nothing.
    Admitted,
}

impl Load {
    /// Returns a load of kernels of one length on one stream, as fast as they go.
    pub fn of(kernel_ns: u64) -> Self {
        Self {
            kernels_ns: [kernel_ns, 0, 0],
            jitter_percent: 5,
            sigma_percent: 0,
            nodes: 1,
            gap_ns: 0,
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

    /// Returns the length of the longest launch in nanoseconds, of launches of even length.
    pub fn longest_ns(&self) -> u64 {
        self.kernels_ns.iter().copied().max().unwrap_or(0) * self.nodes
    }

    /// Returns the length of one kernel in nanoseconds.
    pub(crate) fn length(&self, mean_ns: u64, state: &mut u64) -> u64 {
        if self.sigma_percent > 0 {
            let sigma = self.sigma_percent as f64 / 100.0;
            let length = mean_ns as f64 * (sigma * normal(state) - sigma * sigma / 2.0).exp();
            return (length as u64).max(1);
        }
        let spread = mean_ns / 100 * self.jitter_percent;
        mean_ns - spread + if spread > 0 { random(state) % (2 * spread) } else { 0 }
    }
}

pub(crate) fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Returns a normal number of mean 0 and deviation 1, by Box and Muller.
fn normal(state: &mut u64) -> f64 {
    let mut unit = || (random(state) >> 11) as f64 / (1_u64 << 53) as f64;
    let (a, b) = (unit().max(1e-12), unit());
    (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

/// A share and what runs in it.
#[derive(Clone, Copy, Debug)]
pub struct Tenant {
    /// Percent of the GPU.
    pub percent: u8,
    /// What the share's processes do.
    pub load: Load,
    /// True if the share may borrow.
    pub is_soft: bool,
    /// The order among borrowers; higher goes first.
    pub priority: i8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_normal_lengths_have_their_mean_and_a_long_tail() {
        let (load, mut state) = (Load { sigma_percent: 50, ..Load::of(1) }, 7);
        let all: Vec<u64> = (0..100_000).map(|_| load.length(1_000_000, &mut state)).collect();
        let mean = all.iter().sum::<u64>() / all.len() as u64;
        assert!((990_000..1_010_000).contains(&mean), "{mean}");
        let long = all.iter().filter(|length| **length > 2_000_000).count();
        // One in twenty-one is more than 1.64 deviations above the median of 882 us.
        assert!((4_000..6_500).contains(&long), "{long}");
    }
}
