//! What a control plane is started with.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

/// The Kubernetes minor release whose behaviour is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ServerVersion {
    /// 1.34: counters, shared devices and taints are behind gates that are off.
    V1_34,
    /// 1.35: as 1.34, with counter sets in slices of their own.
    V1_35,
    /// 1.36: counters, shared devices and taints on by default.
    #[default]
    V1_36,
    /// 1.37: device taint rules in v1.
    V1_37,
}

impl ServerVersion {
    /// The minor number, as `/version` gives it.
    #[must_use]
    pub const fn minor(self) -> u32 {
        match self {
            Self::V1_34 => 34,
            Self::V1_35 => 35,
            Self::V1_36 => 36,
            Self::V1_37 => 37,
        }
    }
}

impl std::str::FromStr for ServerVersion {
    type Err = UnknownVersion;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s.trim_start_matches('v') {
            "1.34" => Ok(Self::V1_34),
            "1.35" => Ok(Self::V1_35),
            "1.36" => Ok(Self::V1_36),
            "1.37" => Ok(Self::V1_37),
            _ => Err(UnknownVersion(s.to_owned())),
        }
    }
}

/// A version that is not modelled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown Kubernetes version {0:?}: known are 1.34, 1.35, 1.36 and 1.37")]
pub struct UnknownVersion(pub String);

/// Feature gates whose fields the server drops when they are off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gates {
    /// `DRAPartitionableDevices`: counters and per-device node selection.
    pub partitionable_devices: bool,
    /// `DRAConsumableCapacity`: shared devices, request policies, share ids.
    pub consumable_capacity: bool,
    /// `DRADeviceTaints`: taints of devices and tolerations of requests.
    pub device_taints: bool,
    /// `DRADeviceTaintRules`: the DeviceTaintRule kind.
    pub device_taint_rules: bool,
    /// `DRADeviceBindingConditions`: binding conditions and the allocation's time stamp.
    pub binding_conditions: bool,
    /// `DRAAdminAccess`.
    pub admin_access: bool,
    /// `DRAPrioritizedList`: `firstAvailable`.
    pub prioritized_list: bool,
    /// `DRAResourceClaimDeviceStatus`: `status.devices` of claims.
    pub device_status: bool,
    /// `DRAExtendedResource`: `extendedResourceName` of classes.
    pub extended_resource: bool,
    /// `DRAListTypeAttributes`.
    pub list_attributes: bool,
    /// `DRAFractionalCapacityRange`: steps finer than one.
    pub fractional_capacity: bool,
}

impl Gates {
    /// The gates as a default cluster of that version has them.
    #[must_use]
    pub const fn of(version: ServerVersion) -> Self {
        let minor = version.minor();
        Self {
            partitionable_devices: minor >= 36,
            consumable_capacity: minor >= 36,
            device_taints: minor >= 36,
            device_taint_rules: minor >= 37,
            binding_conditions: minor >= 36,
            admin_access: true,
            prioritized_list: true,
            device_status: true,
            extended_resource: minor >= 36,
            list_attributes: false,
            // Beta in 1.37, and off all the same.
            fractional_capacity: false,
        }
    }

    /// Sets the gate with this Kubernetes name; false when it is not one that is modelled.
    pub fn set(&mut self, name: &str, on: bool) -> bool {
        let gate = match name {
            "DRAPartitionableDevices" => &mut self.partitionable_devices,
            "DRAConsumableCapacity" => &mut self.consumable_capacity,
            "DRADeviceTaints" => &mut self.device_taints,
            "DRADeviceTaintRules" => &mut self.device_taint_rules,
            "DRADeviceBindingConditions" => &mut self.binding_conditions,
            "DRAAdminAccess" => &mut self.admin_access,
            "DRAPrioritizedList" => &mut self.prioritized_list,
            "DRAResourceClaimDeviceStatus" => &mut self.device_status,
            "DRAExtendedResource" => &mut self.extended_resource,
            "DRAListTypeAttributes" => &mut self.list_attributes,
            "DRAFractionalCapacityRange" => &mut self.fractional_capacity,
            _ => return false,
        };
        *gate = on;
        true
    }
}

/// Which of the built-in controllers run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Controllers {
    /// Makes claims from templates for pods.
    pub claim_templates: bool,
    /// Removes reservations of pods that ended, deallocates, lifts the finalizer.
    pub claim_cleanup: bool,
    /// Deletes dependents whose owners are gone.
    pub garbage_collection: bool,
    /// Binds pods that are ready to run.
    pub binding: bool,
    /// Empties namespaces that are being deleted.
    pub namespaces: bool,
}

impl Controllers {
    /// All of them.
    pub const ALL: Self = Self {
        claim_templates: true,
        claim_cleanup: true,
        garbage_collection: true,
        binding: true,
        namespaces: true,
    };
    /// None of them: an API server alone.
    pub const NONE: Self = Self {
        claim_templates: false,
        claim_cleanup: false,
        garbage_collection: false,
        binding: false,
        namespaces: false,
    };
}

/// What becomes of a pod on a node when it is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PodDeletion {
    /// As with a kubelet: it stays, marked, until somebody deletes it with grace period 0.
    #[default]
    Graceful,
    /// It goes at once, for tests in which nobody plays kubelet.
    Immediate,
}

/// What a control plane is started with.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to listen; port 0 takes any free one.
    pub listen: SocketAddr,
    /// The release that is modelled.
    pub version: ServerVersion,
    /// Its feature gates; `None` for the release's own defaults.
    pub gates: Option<Gates>,
    /// API versions served beyond the defaults, such as `resource.k8s.io/v1beta2`.
    pub runtime_config: BTreeSet<String>,
    /// The controllers that run inside.
    pub controllers: Controllers,
    /// What becomes of a deleted pod on a node.
    pub pod_deletion: PodDeletion,
    /// How many changes of a resource are kept for watches to resume from.
    pub watch_history: usize,
    /// How many writes the audit log keeps; the oldest go first.
    pub audit_limit: usize,
    /// How often an idle watch gets a bookmark, when it asked for them.
    pub bookmark_interval: Duration,
    /// Namespaces made at start, besides the usual four.
    pub namespaces: Vec<String>,
    /// Where webhooks that name a service are found: `namespace/name` to address.
    pub services: BTreeMap<String, SocketAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            version: ServerVersion::default(),
            gates: None,
            runtime_config: BTreeSet::new(),
            controllers: Controllers::ALL,
            pod_deletion: PodDeletion::default(),
            watch_history: 4096,
            audit_limit: 1_000_000,
            bookmark_interval: Duration::from_secs(60),
            namespaces: Vec::new(),
            services: BTreeMap::new(),
        }
    }
}

impl Options {
    /// The gates in force.
    #[must_use]
    pub fn effective_gates(&self) -> Gates {
        self.gates.unwrap_or_else(|| Gates::of(self.version))
    }
}
