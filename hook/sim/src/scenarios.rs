//! The scenarios that the figures are made of.

use crate::world::{Death, Load, Moment, Tenant};

/// Seeds that every scenario runs with.
pub const SEEDS: [u64; 2] = [1, 2];

/// Kernels of every scenario.
pub const KERNELS_NS: [u64; 7] = [5_000, 50_000, 500_000, 5_000_000, 50_000_000, 500_000_000, 2_000_000_000];

/// Percentages of the tenants of every scenario, one to four of them.
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

/// Tenants of these percentages with the same load.
pub fn tenants(percents: &[u8], load: Load) -> Vec<Tenant> {
    percents.iter().map(|percent| Tenant { percent: *percent, load, is_soft: false, priority: 0 }).collect()
}

/// A window in which a percentage can show: ten seconds, or a hundred kernels at the smallest share.
pub fn window(tenants: &[Tenant]) -> u64 {
    let of =
        |tenant: &Tenant| tenant.load.longest_ns().saturating_mul(10_000) / u64::from(tenant.percent.max(1));
    tenants.iter().map(of).max().unwrap_or(0).max(10_000_000_000)
}

/// What busy tenants do: kernels of all lengths, a graph, a mix, overlapping streams. Bursts with pauses are no busy
/// tenants, so they are left out here.
pub fn loads() -> Vec<Load> {
    let mut loads: Vec<Load> = KERNELS_NS.iter().map(|kernel| Load::of(*kernel)).collect();
    // A graph is one launch of many kernels: to the limiter a launch of unsteady length.
    loads.push(Load { jitter_percent: 40, ..Load::of(8_000_000) });
    loads.push(Load { kernels_ns: [20_000, 200_000, 2_000_000], ..Load::of(1) });
    loads.push(Load { streams: 8, width: crate::gpu::WHOLE / 8, ..Load::of(5_000_000) });
    loads
}

/// The same with three processes in each share, the first of which is killed in line or with a lease in its hands.
pub fn deadly_loads() -> Vec<Load> {
    let moments = [Moment::InLine, Moment::Admitted];
    let deaths = moments.map(|moment| Some(Death { from_ns: 500_000_000, moment }));
    loads().into_iter().flat_map(|load| deaths.map(|death| Load { processes: 3, death, ..load })).collect()
}
