//! Names that several parts must agree on. Kubernetes' own names are marked as such.

/// The driver name unless configured otherwise (`--driver-name`).
pub const DEFAULT_DRIVER: &str = "gpu.aliquot.dev";
/// Longest name of a DRA driver, as Kubernetes checks it (`resource/v1`, DriverNameMaxLength).
const DRIVER_NAME_MAX: usize = 63;

/// Reads a driver's name: a DNS subdomain of at most 63 characters.
///
/// # Errors
/// Says what it has to look like.
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

/// API group and version of our opaque configuration kinds and CRDs.
pub const API_VERSION: &str = "aliquot.dev/v1alpha1";
/// API group and version of NVIDIA's opaque configuration kinds, which are understood as well.
pub const NVIDIA_API_VERSION: &str = "resource.nvidia.com/v1beta1";
/// Scheduling gate that the webhook sets and the controller lifts (Pod `spec.schedulingGates`).
pub const SCHEDULING_GATE: &str = "aliquot.dev/allocation";
/// Annotation by which the controller knows an allocation of its own again; begins with its time in
/// seconds and a dot (see [`crate::allocation::mark`]). A policy lets nobody else change it.
pub const ALLOCATION: &str = "aliquot.dev/allocation";
/// Kubernetes' finalizer on an allocated claim.
pub const CLAIM_FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Kubernetes' annotation on a claim made from a template: the name in `pod.spec.resourceClaims`.
pub const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
/// Annotation of a pod that may be evicted so that gaps on GPUs can be filled: `Allow`.
pub const COMPACTION: &str = "aliquot.dev/compaction";
/// Label of pods that get all their devices or none: the name of their group.
pub const GANG: &str = "aliquot.dev/gang";
/// Annotation of such a pod: how many pods its group needs.
pub const GANG_SIZE: &str = "aliquot.dev/gang-size";
/// Annotation with the PodGroup of a pod whose `spec.schedulingGroup` names one: the webhook writes it.
pub const POD_GROUP: &str = "aliquot.dev/pod-group";
/// Labels of others that say the same, newest first; the size is in a PodGroup or in [`GANG_SIZE`].
pub const POD_GROUP_LABELS: [&str; 2] = ["scheduling.x-k8s.io/pod-group", "pod-group.scheduling.sigs.k8s.io"];
/// Annotation of a claim or a class: when the claim gets its devices, `Immediate` or
/// `WaitForFirstConsumer` (the default).
pub const BINDING: &str = "aliquot.dev/binding";
/// Annotation of a claim or a class: what becomes of the devices after the last pod, `Delete` (the
/// default) or `Retain`.
pub const RECLAIM: &str = "aliquot.dev/reclaim";
/// Annotation of a claim or a class: how long devices are kept without a pod, for example `30m`.
pub const HOLD_FOR: &str = "aliquot.dev/hold-for";
/// Annotation of a claim or a class: where the claim stands while it keeps devices without a pod, a number
/// of at most 0 (the default). Pods of higher priority may be given its devices.
pub const HOLD_PRIORITY: &str = "aliquot.dev/hold-priority";
/// Annotation of a hold claim of the controller's: which devices it keeps, and for whom. A policy lets
/// nobody else write it.
pub const HOLD_OF: &str = "aliquot.dev/hold-of";
/// Label of the ConfigMaps in our own namespace in which the controller writes down what running pods will leave to the
/// next.
pub const WILL: &str = "aliquot.dev/will";
/// `apiGroup` of the entry in a claim's `reservedFor` by which we keep its devices.
/// kube-controller-manager leaves entries alone whose kind it does not know.
pub const HOLD_GROUP: &str = "aliquot.dev";
/// `resource` of that entry.
pub const HOLD_RESOURCE: &str = "holds";
/// Annotation of a claim: what its shares may use from now on, for example `memory=20Gi,cores=40`. A wish:
/// the controller grants it, or says why not.
pub const LIMITS: &str = "aliquot.dev/limits";
/// Annotation of a claim that the controller made for another one whose share grew:
/// `<name>/<uid>/<share id>` of that one. Nobody else may set it (policy `aliquot-companions`).
pub const COMPANION_OF: &str = "aliquot.dev/companion-of";
/// Value of the controller taint while neither allocator may use the pool.
pub const HAND_OVER: &str = "hand-over";
/// Annotation of a ResourceSlice whose pool is handed over from kube-scheduler to the controller: when that ends at the
/// latest, by the node's clock (RFC 3339). The first slice of the pool has it.
pub const HAND_OVER_UNTIL: &str = "aliquot.dev/hand-over-until";
/// Annotation of a Node: generation (decimal) of a pool under hand-over of which the controller has seen that
/// kube-scheduler has nothing under way any more that could take devices of it.
pub const SCHEDULER_IDLE: &str = "aliquot.dev/scheduler-idle";
/// Standard attribute: PCI address, `dddd:bb:dd.f` (k8s.io/dynamic-resource-allocation).
pub const ATTR_PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
/// Standard attribute: PCIe root complex, `pci0000:00`.
pub const ATTR_PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
/// Standard attribute: NUMA node number (KEP-6072).
pub const ATTR_NUMA_NODE: &str = "resource.kubernetes.io/numaNode";

/// Attribute in the driver's domain: GPUs with the same value reach each other over NVLink. NVIDIA's driver has none
/// (dra-driver-nvidia-gpu issue 214).
pub const ATTR_NVLINK_DOMAIN: &str = "nvlinkDomain";

/// Key of the taint that hands a device to our controller and keeps kube-scheduler off it.
pub fn controller_taint(driver: &str) -> String {
    format!("{driver}/controller-allocated")
}

/// Key of the taint on devices whose hardware is held by a claim that no longer exists.
pub fn held_taint(driver: &str) -> String {
    format!("{driver}/held")
}

/// Key of the taint on devices of a GPU that an administrator took out of service (see [`crate::cordon`]).
pub fn cordoned_taint(driver: &str) -> String {
    format!("{driver}/cordoned")
}

/// Key of a taint for what is the matter with a GPU: `<driver>/<what>`, as NVIDIA's driver has it for its own
/// (`gpu.nvidia.com/xid`, `…/gpu-lost`, `…/unmonitored`).
pub fn condition_taint(driver: &str, what: &str) -> String {
    format!("{driver}/{what}")
}

/// Pool of a node. It contains the driver's name because kube-scheduler up to 1.36 mixes up counters
/// of drivers that share a pool name.
pub fn pool_name(driver: &str, node: &str) -> String {
    format!("{driver}/{node}")
}

/// Node that a pool name of [`pool_name`] belongs to; `None` if what follows the driver can be no node's
/// name: a pool may have more parts than two.
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
