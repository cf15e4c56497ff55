//! Names that several parts must agree on. Names of Kubernetes itself are marked as such.

mod keys;
mod taints;

pub use keys::*;
pub use taints::{
    DeviceTaint, TAINTS, condition_taint, controller_taint, cordoned_taint, driver_paused_taint, held_taint,
    is_reserved_taint, other_driver_taint,
};

/// Files that are installed on nodes for containers, in one directory for each version: the limiter's two
/// libraries and the OCI hook.
pub const NODE_FILES: [&str; 3] = ["libaliquot_preload.so", "libaliquot_core.so", "aliquot-oci-hook"];

/// The default driver name (`--driver-name`).
pub const DEFAULT_DRIVER: &str = "gpu.aliquot.dev";
/// The longest name of a DRA driver, in bytes, as Kubernetes checks it (`resource/v1`, DriverNameMaxLength).
const DRIVER_NAME_MAX: usize = 63;

/// Parses a driver's name: a DNS subdomain of at most 63 characters.
///
/// # Errors
/// If it has another form; the error states the form.
pub fn parse_driver(text: &str) -> Result<String, String> {
    let is_part = |part: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !part.is_empty() && part.chars().all(inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    if text.len() <= DRIVER_NAME_MAX && text.split('.').all(is_part) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "{text:?} is not a name of a DRA driver: use a DNS subdomain of at most {DRIVER_NAME_MAX} characters, for example \
         {DEFAULT_DRIVER}"
    ))
}

/// API group and version of this driver's opaque configuration kinds and CRDs.
pub const API_VERSION: &str = "aliquot.dev/v1alpha1";
/// API group and version of NVIDIA's opaque configuration kinds, which this driver also understands.
pub const NVIDIA_API_VERSION: &str = "resource.nvidia.com/v1beta1";
/// Kubernetes' finalizer of an allocated claim.
pub const CLAIM_FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Kubernetes' annotation of a claim that was made from a template: the name in `pod.spec.resourceClaims`.
pub const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
/// Labels of others with the same meaning as [`GANG`], newest first; the size is in a PodGroup or in
/// [`GANG_SIZE`].
pub const POD_GROUP_LABELS: [&str; 2] = [COSCHEDULING, EARLIER_COSCHEDULING];
/// `apiGroup` of the entry in a claim's `reservedFor` by which this driver keeps the claim's devices.
/// kube-controller-manager does not touch entries of a kind that it does not know.
pub const HOLD_GROUP: &str = "aliquot.dev";
/// `resource` of that entry.
pub const HOLD_RESOURCE: &str = "holds";
/// Value of the controller taint while neither allocator may use the pool.
pub const HAND_OVER: &str = "hand-over";
/// Standard attribute: PCI address, `dddd:bb:dd.f` (k8s.io/dynamic-resource-allocation).
pub const ATTR_PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
/// Standard attribute: PCIe root complex, `pci0000:00`.
pub const ATTR_PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
/// Standard attribute: NUMA node number (KEP-6072).
pub const ATTR_NUMA_NODE: &str = "resource.kubernetes.io/numaNode";

/// Attribute in the driver's domain: GPUs with the same value reach each other over NVLink. NVIDIA's driver
/// has no such attribute (dra-driver-nvidia-gpu issue 214).
pub const ATTR_NVLINK_DOMAIN: &str = "nvlinkDomain";

/// Returns the name of a node's pool. It contains the driver's name because kube-scheduler up to 1.36 mixes
/// up the counters of drivers that share a pool name.
pub fn pool_name(driver: &str, node: &str) -> String {
    format!("{driver}/{node}")
}

/// Returns the node of a pool name made by [`pool_name`]; `None` if the text after the driver cannot be a
/// node's name, because a pool name may have more than two parts.
pub fn pool_node<'a>(driver: &str, pool: &'a str) -> Option<&'a str> {
    pool.strip_prefix(driver)?.strip_prefix('/').filter(|node| !node.is_empty() && !node.contains('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_drivers_are_dns_subdomains() {
        let long = format!("{}.dev", "a".repeat(59));
        for good in [DEFAULT_DRIVER, "gpu", "a-1.b", &long] {
            assert_eq!(parse_driver(good).as_deref(), Ok(good));
        }
        let too_long = format!("a{long}");
        for bad in ["", "Bad", "a_b", "a b", ".a", "a.", "a..b", "-a", "a-", "a/b", &too_long] {
            assert!(parse_driver(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pool_names_round_trip_and_foreign_pools_are_refused() {
        assert_eq!(pool_node(DEFAULT_DRIVER, &pool_name(DEFAULT_DRIVER, "n1")), Some("n1"));
        assert_eq!(pool_node(DEFAULT_DRIVER, "n1"), None);
        assert_eq!(pool_node(DEFAULT_DRIVER, "gpu.aliquot.dev/"), None);
        assert_eq!(pool_node(DEFAULT_DRIVER, "gpu.aliquot.dev/n1/more"), None);
    }
}
