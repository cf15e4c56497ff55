//! Metrics of budgets.

use aliquot_allocator::budget::{Book, amount};
use aliquot_api::v1alpha1::gpu_budget::Enforcement;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::collections::HashSet;
use std::sync::atomic::AtomicU64;

type Amount = Gauge<f64, AtomicU64>;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct BudgetLabels {
    namespace: String,
    budget: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct EnforcementLabel {
    enforcement: &'static str,
}

/// Metrics of budgets: use, limit and rate of each, and counts over all.
#[derive(Debug, Default)]
pub struct BudgetMetrics {
    used: Family<BudgetLabels, Amount>,
    limit: Family<BudgetLabels, Amount>,
    gpus: Family<BudgetLabels, Amount>,
    over: Family<BudgetLabels, Gauge>,
    pods: Family<EnforcementLabel, Counter>,
    releases: Gauge,
    known: Mutex<HashSet<BudgetLabels>>,
}

impl BudgetMetrics {
    /// Creates the metrics, all at zero, and adds them to the registry.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "budget_used_gpu_seconds",
            "GPU time used of a budget in its window",
            metrics.used.clone(),
        );
        registry.register(
            "budget_limit_gpu_seconds",
            "GPU time that a budget allows in its window",
            metrics.limit.clone(),
        );
        registry.register("budget_gpus", "GPUs that are charged to a budget now", metrics.gpus.clone());
        registry.register("budget_over", "1 if a budget is used up", metrics.over.clone());
        registry.register(
            "budget_pods",
            "Pods that met a used-up budget, by what it does",
            metrics.pods.clone(),
        );
        for enforcement in [Enforcement::Warn, Enforcement::LowerPriority, Enforcement::Refuse] {
            drop(metrics.pods.get_or_create(&EnforcementLabel { enforcement: enforcement.as_str() }));
        }
        registry.register(
            "budget_pending_releases",
            "Releases of nodes that are not counted for good",
            metrics.releases.clone(),
        );
        metrics
    }

    /// Creates a series in each family, see [`crate::metrics::Metrics::sample`].
    pub fn touch(&self) {
        for family in [&self.used, &self.limit, &self.gpus] {
            drop(family.get_or_create(&BudgetLabels::default()));
        }
        drop(self.over.get_or_create(&BudgetLabels::default()));
    }

    /// Counts a pod that met a used-up budget.
    pub fn pod(&self, enforcement: Enforcement) {
        self.pods.get_or_create(&EnforcementLabel { enforcement: enforcement.as_str() }).inc();
    }

    /// Sets all gauges to the current state, and removes the series of deleted budgets.
    pub fn update(&self, book: &Book) {
        let mut seen = HashSet::new();
        for (key, standing) in book.standings() {
            let labels = BudgetLabels { namespace: key.namespace.to_string(), budget: key.name.to_string() };
            self.used.get_or_create(&labels).set(amount::seconds(standing.used));
            self.limit.get_or_create(&labels).set(amount::seconds(standing.limit));
            self.gpus.get_or_create(&labels).set(amount::seconds(i128::from(standing.rate.0)));
            self.over.get_or_create(&labels).set(i64::from(standing.is_over()));
            seen.insert(labels);
        }
        let mut known = self.known.lock();
        for gone in known.difference(&seen) {
            self.used.remove(gone);
            self.limit.remove(gone);
            self.gpus.remove(gone);
            self.over.remove(gone);
        }
        *known = seen;
        self.releases.set(i64::try_from(book.pending_releases()).unwrap_or(i64::MAX));
    }
}
