//! Builds metrics that show every family, for the reference documentation.

use super::{
    Breached, Gate, Gpu, GpuCause, GpuFault, Kind, Metrics, Mode, Name, Operation, Outcome, ShareLabels,
};

impl Metrics {
    /// Creates metrics with one series in each family. The text leaves out families without series; this one
    /// shows which families there are and what labels they have. A test counts them, so that new ones are not
    /// forgotten.
    pub fn sample() -> Self {
        let metrics = Self::default();
        drop(metrics.claims.get_or_create(&Operation::default()));
        for family in [&metrics.claim_duration, &metrics.driver_call_duration] {
            drop(family.get_or_create(&Name::default()));
        }
        drop(metrics.prepared_devices.get_or_create(&Kind::default()));
        drop(metrics.gpu_stuck.get_or_create(&Gpu::default()));
        drop(metrics.gpu_health.get_or_create(&GpuCause::default()));
        drop(metrics.gpu_faults.get_or_create(&GpuFault::default()));
        drop(metrics.server_features.get_or_create(&Gate::default()));
        drop(metrics.mode.get_or_create(&Mode::default()));
        let of_shares =
            [&metrics.share_quota, &metrics.share_used, &metrics.share_measured, &metrics.share_time];
        for family in of_shares {
            drop(family.get_or_create(&ShareLabels::default()));
        }
        drop(metrics.share_refused.get_or_create(&ShareLabels::default()));
        drop(metrics.share_over.get_or_create(&Breached::default()));
        drop(metrics.share_breaches.get_or_create(&Breached::default()));
        drop(metrics.audit_evictions.get_or_create(&Outcome::default()));
        metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_shows_every_family() {
        let metrics = Metrics::sample();
        // Families without a series are left out of the text, but not of this.
        let all = format!("{:?}", metrics.registry);
        let registered: Vec<&str> =
            all.split("Descriptor { name: \"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert!(registered.len() > 30, "{registered:?}");
        let text = metrics.encode().unwrap();
        for name in &registered {
            assert!(text.contains(&format!("# TYPE dra_gpu_{name} ")), "{name}");
        }
    }
}
