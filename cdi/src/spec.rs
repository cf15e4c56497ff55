//! The types of a spec file, field by field as the runtimes know them.
//!
//! Unknown fields are refused, as the runtimes refuse them; empty lists and absent values are left
//! out when written, which is how the specification's own types are written.

use crate::{DeviceName, Kind, Version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One spec file: devices of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// Version of the specification that the file follows.
    pub cdi_version: Version,
    /// Vendor and class of all devices of the file.
    pub kind: Kind,
    /// About the spec; no effect on containers. From 0.6.0 on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices, at least one.
    pub devices: Vec<Device>,
    /// Edits for a container that asks for any of the devices, made once.
    #[serde(default, skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

impl Spec {
    /// A spec of these devices that declares the lowest version that it needs. Call
    /// [`Spec::declare_lowest_version`] after changing it.
    pub fn new(kind: Kind, devices: Vec<Device>) -> Self {
        let mut spec = Self {
            cdi_version: Version::OLDEST,
            kind,
            annotations: BTreeMap::new(),
            devices,
            container_edits: ContainerEdits::default(),
        };
        spec.declare_lowest_version();
        spec
    }

    /// Sets the version to the lowest one that knows everything the spec uses, so that the oldest
    /// runtime that can serve it does.
    pub fn declare_lowest_version(&mut self) {
        self.cdi_version = self.version_range().lowest;
    }

    /// The device of that name.
    pub fn device(&self, name: &DeviceName) -> Option<&Device> {
        self.devices.iter().find(|device| &device.name == name)
    }

    /// The edits of the spec itself and of each device.
    pub(crate) fn all_edits(&self) -> impl Iterator<Item = &ContainerEdits> {
        std::iter::once(&self.container_edits).chain(self.devices.iter().map(|d| &d.container_edits))
    }
}

/// One device that a container can ask for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Unique in the spec.
    pub name: DeviceName,
    /// About the device; no effect on containers. From 0.6.0 on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// What the container gets; a device without any edit is not valid.
    pub container_edits: ContainerEdits,
}

impl Device {
    /// A device without annotations.
    pub fn new(name: DeviceName, container_edits: ContainerEdits) -> Self {
        Self { name, annotations: BTreeMap::new(), container_edits }
    }
}

/// Changes to a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// Environment, `NAME=value` each; a later entry of the same name wins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes, with their permissions in the device cgroup.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Network interfaces that move into the container. From 1.1.0 on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// Programs that the runtime runs at points of the container's life.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Cache and memory bandwidth control. From 0.7.0 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    /// Supplementary groups of the container's process; runtimes ignore 0. From 0.7.0 on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

/// A device node in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    /// Path on the host where the runtime looks up what is missing below; `path` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `b`, `c`, `u` (a character device too) or `p`.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub device_type: Option<String>,
    /// Major number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// Minor number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Permission bits of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Of `r`, `w` and `m`; all three by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Owner in the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group in the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A mount in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// What is mounted.
    pub host_path: String,
    /// Where in the container.
    pub container_path: String,
    /// Mount options, `ro`, `bind`….
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// File system type; with bind mounts it means nothing.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub mount_type: Option<String>,
}

/// A program that the runtime runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// When.
    pub hook_name: HookName,
    /// The program.
    pub path: String,
    /// Its argument list, the program's name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its environment, at least one variable: runc up to 1.2 gives a hook without one the environment of the
    /// container, which the image's author writes (the cause of CVE-2025-23266).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds after which it is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
}

/// Points of a container's life, as in the OCI runtime specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HookName {
    /// Deprecated by OCI in favour of the three below.
    Prestart,
    /// In the runtime's namespaces, before the root is pivoted.
    CreateRuntime,
    /// In the container's namespaces, before the root is pivoted; the path is the host's.
    CreateContainer,
    /// In the container, before its program; the path is the container's.
    StartContainer,
    /// After the program started.
    Poststart,
    /// After the container was deleted.
    Poststop,
}

/// resctrl settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IntelRdt {
    /// Class of service.
    #[serde(default, rename = "closID", skip_serializing_if = "Option::is_none")]
    pub clos_id: Option<String>,
    /// Level 3 cache schema.
    #[serde(default, rename = "l3CacheSchema", skip_serializing_if = "Option::is_none")]
    pub l3_cache_schema: Option<String>,
    /// Memory bandwidth schema.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_bw_schema: Option<String>,
    /// All schemata, line by line. From 1.1.0 on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schemata: Vec<String>,
    /// Monitoring. From 1.1.0 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_monitoring: Option<bool>,
    /// Cache monitoring. Up to 1.0.0; runtimes that know 1.1.0 refuse files with it.
    #[serde(default, rename = "enableCMT", skip_serializing_if = "Option::is_none")]
    pub enable_cmt: Option<bool>,
    /// Bandwidth monitoring. Up to 1.0.0; runtimes that know 1.1.0 refuse files with it.
    #[serde(default, rename = "enableMBM", skip_serializing_if = "Option::is_none")]
    pub enable_mbm: Option<bool>,
}

/// A network interface that moves into the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetDevice {
    /// Its name on the host.
    pub host_interface_name: String,
    /// Its name in the container.
    pub name: String,
}
