//! A sample of all metrics, for the reference documentation.

use super::{KindLabel, Metrics, OutcomeLabel, ReasonLabel, WriteLabels};

impl Metrics {
    /// Returns metrics with one series in each family, because the text leaves out families without a series.
    /// The sample shows which families there are and which labels they have. A test counts the families, so a
    /// new one is not forgotten.
    pub fn sample() -> Self {
        let metrics = Self::new();
        drop(metrics.writes.get_or_create(&WriteLabels::default()));
        for family in [&metrics.queue, &metrics.objects] {
            drop(family.get_or_create(&KindLabel::default()));
        }
        drop(metrics.parked.get_or_create(&ReasonLabel::default()));
        drop(metrics.unchecked.get_or_create(&ReasonLabel::default()));
        let by_outcome = [
            &metrics.decisions,
            &metrics.deallocated,
            &metrics.evictions,
            &metrics.compactions,
            &metrics.compaction_looks,
            &metrics.reservations,
            &metrics.limits,
        ];
        for family in by_outcome {
            drop(family.get_or_create(&OutcomeLabel::default()));
        }
        metrics.budgets.touch();
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
        let text = metrics.text();
        for name in &registered {
            assert!(text.contains(&format!("# TYPE aliquot_controller_{name} ")), "{name}");
        }
    }
}
