//! The scenarios that the figures are made of.

use crate::world::{Death, Load, Moment, Tenant};

/// The seeds that every scenario runs with.
pub const SEEDS: [u64; 2] = [1, 2];

/// The kernel lengths of every scenario, in nanoseconds.
pub const KERNELS_NS: [u64; 7] = [5_000, 50_000, 500_000, 5_000_000, 50_000_000, 500_000_000, 2_000_000_000];

/// The percentages of the tenants of every scenario, one to four of them.
pub const PERCENTS: [&[u8]; 12] = [
    &[10],
    &[30],
    &[50],
    &[70],
    &[90],
    &[30, 70],
    &[10, 90],
    &[50, 50],
    &[30, 50],
    &[10, 30, 50],
    &[10, 10, 30, 50],
    &[10, 30, 30, 30],
];

/// Returns tenants of these percentages with the same load.
pub fn tenants(percents: &[u8], load: Load) -> Vec<Tenant> {
    percents.iter().map(|percent| Tenant { percent: *percent, load, is_soft: false, priority: 0 }).collect()
}

/// Returns the length of a window in which a percentage can show, in nanoseconds: ten seconds, or a hundred
/// kernels at the smallest share.
pub fn window(tenants: &[Tenant]) -> u64 {
    let of =
        |tenant: &Tenant| tenant.load.longest_ns().saturating_mul(10_000) / u64::from(tenant.percent.max(1));
    tenants.iter().map(of).max().unwrap_or(0).max(10_000_000_000)
}

/// Returns the loads of busy tenants: kernels of all lengths, a graph, a mix, overlapping streams. Tenants
/// with bursts and pauses are not busy, so they are left out here.
pub fn loads() -> Vec<Load> {
    let mut loads: Vec<Load> = KERNELS_NS.iter().map(|kernel| Load::of(*kernel)).collect();
    // A graph is one launch of many kernels: to the limiter a launch of unsteady length.
    loads.push(Load { jitter_percent: 40, ..Load::of(8_000_000) });
    loads.push(Load { kernels_ns: [20_000, 200_000, 2_000_000], ..Load::of(1) });
    loads.push(Load { streams: 8, width: crate::gpu::WHOLE / 8, ..Load::of(5_000_000) });
    loads
}

/// Returns loads of graphs of many kernels, with gaps between them: few long kernels, many short ones, and a
/// gap of a twentieth.
pub fn graphs() -> Vec<Load> {
    let of = |kernel_ns, nodes, gap_ns| Load { nodes, gap_ns, ..Load::of(kernel_ns) };
    vec![of(1_000_000, 8, 2_000), of(100_000, 100, 1_500), of(20_000, 200, 1_000), of(5_000_000, 20, 5_000)]
}

/// Returns loads of kernels whose lengths have a long tail.
pub fn long_tails() -> Vec<Load> {
    let of = |kernel_ns, sigma_percent| Load { sigma_percent, ..Load::of(kernel_ns) };
    let kernels = [50_000, 500_000, 5_000_000, 50_000_000];
    kernels.into_iter().flat_map(|kernel| [25, 50].map(|sigma| of(kernel, sigma))).collect()
}

/// Returns loads of tenants that wait for each kernel before they launch the next one.
pub fn waiting() -> Vec<Load> {
    [500_000, 5_000_000, 50_000_000].map(|kernel| Load { waits: true, ..Load::of(kernel) }).to_vec()
}

/// The percentages that tenants of [`waiting`] can use.
pub const WAITING_PERCENTS: [&[u8]; 5] = [&[10], &[30], &[50], &[10, 30], &[30, 30]];

/// The percentages of eight tenants.
pub const EIGHT: [&[u8]; 3] = [&[5, 5, 10, 10, 10, 20, 20, 20], &[10; 8], &[5, 5, 5, 5, 10, 10, 10, 30]];

/// Returns loads with three processes in each share, the first of which is killed in line or while it has a
/// lease.
pub fn deadly_loads() -> Vec<Load> {
    let moments = [Moment::InLine, Moment::Admitted];
    let deaths = moments.map(|moment| Some(Death { from_ns: 500_000_000, moment }));
    loads().into_iter().flat_map(|load| deaths.map(|death| Load { processes: 3, death, ..load })).collect()
}
