//! The kinds of this driver's API group, `aliquot.dev/v1alpha1`.
//!
//! The CustomResourceDefinitions of the chart are generated from these types ([`definitions()`]): fields, limits and
//! descriptions stand here alone. `make generate` writes them; a test fails if they are not current.

pub mod definitions;
pub mod gpu_budget;
pub mod gpu_quota;
pub mod node_limits;
pub mod node_usage;

pub use definitions::{Definition, definition, definitions};
pub use gpu_budget::{GpuBudget, GpuBudgetSpec, GpuBudgetStatus};
pub use gpu_quota::{GpuQuota, GpuQuotaSpec, GpuQuotaStatus};
pub use node_limits::{NodeLimits, NodeLimitsSpec, NodeLimitsStatus};
pub use node_usage::{NodeUsage, NodeUsageSpec, NodeUsageStatus};

use kube::Resource;
use kube::api::ApiResource;

/// API group of the kinds.
pub const GROUP: &str = "aliquot.dev";
/// API version of the kinds.
pub const VERSION: &str = "v1alpha1";

/// Returns the API resource of a kind, for objects that are read leniently: one that cannot be understood must not keep
/// the others of its list from being seen.
pub fn resource<K: Resource<DynamicType = ()>>() -> ApiResource {
    ApiResource::erase::<K>(&())
}
