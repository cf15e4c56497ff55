//! The figures.

use crate::world::{Load, Tenant, Variant, run};

/// Runs one scenario; the errors in percentage points.
pub fn errors(variant: Variant, tenants: &[Tenant], seed: u64) -> Vec<f64> {
    let window = tenants
        .iter()
        .map(|tenant| tenant.load.longest_ns().saturating_mul(10_000) / u64::from(tenant.percent.max(1)))
        .max()
        .unwrap_or(0)
        .max(10_000_000_000);
    let outcome = run(variant, tenants, window, 3, seed);
    let of = |shares: &Vec<f64>| -> Vec<f64> {
        shares.iter().zip(tenants).map(|(share, tenant)| share * 100.0 - f64::from(tenant.percent)).collect()
    };
    outcome.windows.iter().flat_map(of).collect()
}

/// Tenants of these percentages with the same load.
pub fn tenants(percents: &[u8], load: Load) -> Vec<Tenant> {
    percents.iter().map(|percent| Tenant { percent: *percent, load, is_soft: false, priority: 0 }).collect()
}
