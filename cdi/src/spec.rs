//! The types of a spec file, field by field as runtimes know them.
//!
//! Unknown fields are refused, as runtimes refuse them. Empty lists and absent values are omitted when
//! written, as the specification's own types do it.

use crate::{DeviceName, Kind, Version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A spec file: devices of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// Version of the specification that the file follows.
    pub cdi_version: Version,
    /// Vendor and class of all devices of the file.
    pub kind: Kind,
    /// Annotations of the spec, without effect on containers. From 0.6.0 on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices, at least one.
    pub devices: Vec<Device>,
    /// Edits that are made once for a container that requests any of the devices.
    #[serde(default, skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

impl Spec {
    /// Returns a spec of these devices that declares the lowest version that it needs. Call
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

    /// Sets the version to the lowest one that knows all fields that the spec uses, so that runtimes as old
    /// as possible accept it.
    pub fn declare_lowest_version(&mut self) {
        self.cdi_version = self.version_range().lowest;
    }

    /// Returns the device of that name; `None` if there is none.
    pub fn device(&self, name: &DeviceName) -> Option<&Device> {
        self.devices.iter().find(|device| &device.name == name)
    }

    /// Returns the edits of the spec itself and of each device.
    pub(crate) fn all_edits(&self) -> impl Iterator<Item = &ContainerEdits> {
        std::iter::once(&self.container_edits).chain(self.devices.iter().map(|d| &d.container_edits))
    }
}

/// A device that a container can request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// The name, unique in the spec.
    pub name: DeviceName,
    /// Annotations of the device, without effect on containers. From 0.6.0 on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The edits for the container; a device without any edit is not valid.
    pub container_edits: ContainerEdits,
}

impl Device {
    /// Returns a device without annotations.
    pub fn new(name: DeviceName, container_edits: ContainerEdits) -> Self {
        Self { name, annotations: BTreeMap::new(), container_edits }
    }
}

/// Changes to a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// Environment variables, each as `NAME=value`; a later entry of the same name wins.
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
    /// Path on the host where the runtime looks up the fields that are missing; `path` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Type of the node: `b`, `c`, `u` (also a character device) or `p`.
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
    /// Access in the device cgroup, of `r`, `w` and `m`; all three by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// User ID of the owner in the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group ID in the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A mount in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Path on the host, or the source of another file system.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Mount options such as `ro` or `bind`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// File system type; it has no meaning for bind mounts.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub mount_type: Option<String>,
}

/// A program that the runtime runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// The point of the container's life at which it runs.
    pub hook_name: HookName,
    /// Path of the program.
    pub path: String,
    /// Argument list, with the program's name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment of the hook, at least one variable. Without one, runc up to 1.2 gives the hook the
    /// environment of the container, which the image's author writes (the cause of CVE-2025-23266).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds after which the hook is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
}

/// Points of a container's life, as in the OCI runtime specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HookName {
    /// Deprecated by OCI in favour of the three points below.
    Prestart,
    /// In the runtime's namespaces, before the root is pivoted.
    CreateRuntime,
    /// In the container's namespaces, before the root is pivoted; the path is on the host.
    CreateContainer,
    /// In the container, before its program starts; the path is in the container.
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
    /// True if monitoring is enabled. From 1.1.0 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_monitoring: Option<bool>,
    /// True if cache monitoring is enabled. Up to 1.0.0; runtimes that know 1.1.0 refuse files with it.
    #[serde(default, rename = "enableCMT", skip_serializing_if = "Option::is_none")]
    pub enable_cmt: Option<bool>,
    /// True if bandwidth monitoring is enabled. Up to 1.0.0; runtimes that know 1.1.0 refuse files with it.
    #[serde(default, rename = "enableMBM", skip_serializing_if = "Option::is_none")]
    pub enable_mbm: Option<bool>,
}

/// A network interface that moves into the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetDevice {
    /// Name of the interface on the host.
    pub host_interface_name: String,
    /// Name of the interface in the container.
    pub name: String,
}
