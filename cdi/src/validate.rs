//! Validates a spec before a runtime sees it.

use crate::spec::{ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice};
use crate::{Spec, Version};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// A broken rule of a spec, with its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct Problem {
    /// Path of the field, for example `devices[2].containerEdits.env[0]`.
    pub path: String,
    /// What is wrong with the field.
    pub reason: String,
}

/// All problems of a spec, in the order of the file; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl std::error::Error for Problems {}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}

/// The largest total size of keys and values of one set of annotations, in bytes.
const ANNOTATIONS_LIMIT: usize = 256 * 1024;

impl Spec {
    /// Checks all rules of the runtimes and of the specification's text. Returns all problems as an error.
    /// The rules for names are enforced by their types.
    pub fn validate(&self) -> Result<(), Problems> {
        let mut found = Findings::default();
        self.check_version(&mut found);
        found.annotations("annotations", &self.annotations);
        if self.devices.is_empty() {
            found.add("devices", "a spec needs at least one device");
        }
        let mut seen = BTreeSet::new();
        for (i, device) in self.devices.iter().enumerate() {
            let path = format!("devices[{i}]");
            if !seen.insert(&device.name) {
                found.add(
                    format!("{path}.name"),
                    format!("{:?} is in the spec already", device.name.as_str()),
                );
            }
            found.annotations(&format!("{path}.annotations"), &device.annotations);
            let edits_path = format!("{path}.containerEdits");
            if device.container_edits.is_empty() {
                found.add(&edits_path, "a device needs at least one edit");
            }
            found.edits(&edits_path, &device.container_edits);
        }
        found.edits("containerEdits", &self.container_edits);
        found.into_result()
    }

    fn check_version(&self, found: &mut Findings) {
        let range = self.version_range();
        if range.lowest > range.highest {
            found.add(
                "cdiVersion",
                format!(
                    "uses fields that came with {} and others that went after {}",
                    range.lowest, range.highest
                ),
            );
        } else if self.cdi_version < range.lowest {
            found.add(
                "cdiVersion",
                format!("{} is too low: the spec uses fields of {}", self.cdi_version, range.lowest),
            );
        } else if self.cdi_version > range.highest {
            found.add(
                "cdiVersion",
                format!(
                    "{} is too high: the spec uses fields that went after {}",
                    self.cdi_version, range.highest
                ),
            );
        }
        debug_assert!(Version::OLDEST <= range.lowest && range.highest <= Version::NEWEST);
    }
}

/// The list of problems while it grows.
#[derive(Default)]
struct Findings(Vec<Problem>);

impl Findings {
    fn add(&mut self, path: impl Into<String>, reason: impl Into<String>) {
        self.0.push(Problem { path: path.into(), reason: reason.into() });
    }

    fn into_result(self) -> Result<(), Problems> {
        if self.0.is_empty() { Ok(()) } else { Err(Problems(self.0)) }
    }

    fn annotations(&mut self, path: &str, annotations: &BTreeMap<String, String>) {
        let total: usize = annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
        if total > ANNOTATIONS_LIMIT {
            self.add(path, format!("{total} bytes are more than {ANNOTATIONS_LIMIT}"));
        }
        for key in annotations.keys() {
            if let Some(reason) = annotation_key_problem(key) {
                self.add(format!("{path}[{key:?}]"), reason);
            }
        }
    }

    fn edits(&mut self, path: &str, edits: &ContainerEdits) {
        self.env(&format!("{path}.env"), &edits.env);
        for (i, node) in edits.device_nodes.iter().enumerate() {
            self.device_node(&format!("{path}.deviceNodes[{i}]"), node);
        }
        self.net_devices(&format!("{path}.netDevices"), &edits.net_devices);
        for (i, hook) in edits.hooks.iter().enumerate() {
            self.hook(&format!("{path}.hooks[{i}]"), hook);
        }
        for (i, mount) in edits.mounts.iter().enumerate() {
            self.mount(&format!("{path}.mounts[{i}]"), mount);
        }
        if let Some(rdt) = &edits.intel_rdt {
            self.rdt(&format!("{path}.intelRdt"), rdt);
        }
    }

    fn env(&mut self, path: &str, env: &[String]) {
        for (i, entry) in env.iter().enumerate() {
            let path = format!("{path}[{i}]");
            match entry.split_once('=') {
                None | Some(("", _)) => self.add(&path, format!("{entry:?} is not NAME=value")),
                Some(_) => {}
            }
            self.no_nul(&path, entry);
        }
    }

    fn no_nul(&mut self, path: &str, text: &str) {
        if text.contains('\0') {
            self.add(path, "contains a NUL byte");
        }
    }

    fn absolute(&mut self, path: &str, value: &str) {
        if value.is_empty() {
            self.add(path, "is empty");
        } else if !value.starts_with('/') {
            self.add(path, format!("{value:?} is not an absolute path"));
        }
        self.no_nul(path, value);
    }

    fn device_node(&mut self, path: &str, node: &DeviceNode) {
        self.absolute(&format!("{path}.path"), &node.path);
        if let Some(host_path) = &node.host_path {
            self.absolute(&format!("{path}.hostPath"), host_path);
        }
        if let Some(kind) = &node.device_type
            && !matches!(kind.as_str(), "b" | "c" | "u" | "p")
        {
            self.add(format!("{path}.type"), format!("{kind:?} is none of b, c, u, p"));
        }
        if let Some(permissions) = &node.permissions
            && (permissions.is_empty() || permissions.chars().any(|c| !"rwm".contains(c)))
        {
            self.add(format!("{path}.permissions"), format!("{permissions:?} is not made of r, w and m"));
        }
        for (field, number) in [("major", node.major), ("minor", node.minor)] {
            if number.is_some_and(|number| number < 0) {
                self.add(format!("{path}.{field}"), "is negative");
            }
        }
    }

    fn net_devices(&mut self, path: &str, devices: &[NetDevice]) {
        let mut host = BTreeSet::new();
        let mut inside = BTreeSet::new();
        for (i, device) in devices.iter().enumerate() {
            for (field, name, seen) in [
                ("hostInterfaceName", &device.host_interface_name, &mut host),
                ("name", &device.name, &mut inside),
            ] {
                let path = format!("{path}[{i}].{field}");
                if name.is_empty() {
                    self.add(path, "is empty");
                } else if !seen.insert(name.as_str()) {
                    self.add(path, format!("{name:?} is in the list already"));
                }
            }
        }
    }

    fn hook(&mut self, path: &str, hook: &Hook) {
        self.absolute(&format!("{path}.path"), &hook.path);
        for (i, arg) in hook.args.iter().enumerate() {
            self.no_nul(&format!("{path}.args[{i}]"), arg);
        }
        if hook.env.is_empty() {
            self.add(
                format!("{path}.env"),
                "is empty, and runc up to 1.2 then runs the hook with the container's own environment, LD_PRELOAD \
                 included; give PATH at least",
            );
        }
        self.env(&format!("{path}.env"), &hook.env);
        if hook.timeout == Some(0) {
            self.add(format!("{path}.timeout"), "is zero; leave it out to wait for the hook");
        }
    }

    fn mount(&mut self, path: &str, mount: &Mount) {
        // A mount that names a file system may have any source (`tmpfs`); all others are bind mounts.
        if matches!(mount.mount_type.as_deref(), None | Some("" | "none" | "bind")) {
            self.absolute(&format!("{path}.hostPath"), &mount.host_path);
        } else if mount.host_path.is_empty() {
            self.add(format!("{path}.hostPath"), "is empty");
        }
        self.absolute(&format!("{path}.containerPath"), &mount.container_path);
        for (i, option) in mount.options.iter().enumerate() {
            if option.is_empty() || option.contains(',') {
                self.add(format!("{path}.options[{i}]"), format!("{option:?} is not one mount option"));
            }
        }
    }

    fn rdt(&mut self, path: &str, rdt: &IntelRdt) {
        // The name of a directory of resctrl, or `/` for its root.
        if let Some(id) = rdt.clos_id.as_deref()
            && id != "/"
            && (id.is_empty() || id.len() >= 4096 || id == "." || id == ".." || id.contains(['/', '\n']))
        {
            self.add(format!("{path}.closID"), format!("{id:?} is not the name of a directory"));
        }
    }
}

/// Returns the problem of an annotation key; `None` if it is valid. Keys have the form of Kubernetes,
/// `[domain/]name`.
fn annotation_key_problem(key: &str) -> Option<String> {
    let (domain, name) = match key.split_once('/') {
        Some((domain, name)) => (Some(domain), name),
        None => (None, key),
    };
    let edge_ok = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.ends_with(|c: char| c.is_ascii_alphanumeric())
    };
    if !edge_ok(name)
        || name.len() > 63
        || name.chars().any(|c| !c.is_ascii_alphanumeric() && !"-_.".contains(c))
    {
        return Some(format!(
            "{name:?} is not a name of at most 63 letters, digits, '-', '_' and '.' that starts and ends with a letter or digit"
        ));
    }
    let domain = domain?;
    let label_ok = |label: &str| {
        edge_ok(label) && label.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    (domain.len() > 253 || !domain.split('.').all(label_ok))
        .then(|| format!("{domain:?} is not a DNS subdomain"))
}

#[cfg(test)]
mod tests;
