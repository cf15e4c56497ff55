//! Builds edits, and resolves the device names of a container as a runtime does.

use crate::{ContainerEdits, DeviceNode, Mount, QualifiedName, Spec};

impl ContainerEdits {
    /// Returns true if nothing is edited.
    pub fn is_empty(&self) -> bool {
        let Self { env, device_nodes, net_devices, hooks, mounts, intel_rdt, additional_gids } = self;
        env.is_empty()
            && device_nodes.is_empty()
            && net_devices.is_empty()
            && hooks.is_empty()
            && mounts.is_empty()
            && intel_rdt.is_none()
            && additional_gids.is_empty()
    }

    /// Adds an environment variable.
    pub fn set_env(&mut self, name: &str, value: &str) -> &mut Self {
        self.env.push(format!("{name}={value}"));
        self
    }

    /// Adds other edits after these, as a runtime does: lists are appended, and later resctrl settings
    /// replace earlier ones.
    pub fn append(&mut self, other: &Self) -> &mut Self {
        let Self { env, device_nodes, net_devices, hooks, mounts, intel_rdt, additional_gids } = other;
        self.env.extend_from_slice(env);
        self.device_nodes.extend_from_slice(device_nodes);
        self.net_devices.extend_from_slice(net_devices);
        self.hooks.extend_from_slice(hooks);
        self.mounts.extend_from_slice(mounts);
        if intel_rdt.is_some() {
            self.intel_rdt.clone_from(intel_rdt);
        }
        self.additional_gids.extend_from_slice(additional_gids);
        self
    }

    /// Returns the environment that a container ends up with: the last value of each name, in the order in
    /// which the names first appeared.
    pub fn environment(&self) -> Vec<(&str, &str)> {
        let mut merged: Vec<(&str, &str)> = Vec::new();
        for (name, value) in self.env.iter().filter_map(|entry| entry.split_once('=')) {
            match merged.iter_mut().find(|(known, _)| *known == name) {
                Some(entry) => entry.1 = value,
                None => merged.push((name, value)),
            }
        }
        merged
    }
}

impl DeviceNode {
    /// Returns a device node at the same path as on the host; the runtime looks up the rest there.
    pub fn at(path: impl Into<String>) -> Self {
        Self { path: path.into(), ..Self::default() }
    }

    /// Returns a device node that has another path on the host.
    pub fn from_host(path: impl Into<String>, host_path: impl Into<String>) -> Self {
        Self { path: path.into(), host_path: Some(host_path.into()), ..Self::default() }
    }

    /// Returns a character device with this number, which the runtime creates without looking at the host.
    pub fn character(path: impl Into<String>, major: u32, minor: u32) -> Self {
        Self {
            path: path.into(),
            device_type: Some("c".to_owned()),
            major: Some(major.into()),
            minor: Some(minor.into()),
            ..Self::default()
        }
    }
}

impl Mount {
    /// Returns a bind mount that cannot be written, nor used to gain privileges.
    pub fn read_only(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::bind(host_path, container_path, &["ro", "nosuid", "nodev", "rbind", "rprivate"])
    }

    /// Returns a bind mount that can be written, but not executed from or used to gain privileges.
    pub fn read_write(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::bind(host_path, container_path, &["rw", "nosuid", "nodev", "noexec", "rbind", "rprivate"])
    }

    fn bind(host_path: impl Into<String>, container_path: impl Into<String>, options: &[&str]) -> Self {
        Self {
            host_path: host_path.into(),
            container_path: container_path.into(),
            options: options.iter().map(|&option| option.to_owned()).collect(),
            mount_type: None,
        }
    }
}

/// The reason why a device name cannot be resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// No spec has the device.
    #[error("no spec has the device {0}")]
    Unknown(QualifiedName),
    /// Two specs have the device; runtimes refuse such a device.
    #[error("more than one spec has the device {0}")]
    Ambiguous(QualifiedName),
}

/// Returns the edits for a container that requests these devices, in the order in which a runtime makes them:
/// for each device the edits of its spec, once for each spec, and then those of the device. Returns an error
/// if a device is in no spec or in more than one.
pub fn resolve<'a>(
    specs: &'a [Spec],
    devices: impl IntoIterator<Item = &'a QualifiedName>,
) -> Result<ContainerEdits, ResolveError> {
    let mut edits = ContainerEdits::default();
    let mut done: Vec<usize> = Vec::new();
    for name in devices {
        let mut matches = specs.iter().enumerate().filter_map(|(i, spec)| {
            let device = (spec.kind == name.kind).then(|| spec.device(&name.name))??;
            Some((i, spec, device))
        });
        let (i, spec, device) = matches.next().ok_or_else(|| ResolveError::Unknown(name.clone()))?;
        if matches.next().is_some() {
            return Err(ResolveError::Ambiguous(name.clone()));
        }
        if !done.contains(&i) {
            done.push(i);
            edits.append(&spec.container_edits);
        }
        edits.append(&device.container_edits);
    }
    Ok(edits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, IntelRdt};

    fn spec(class: &str, common: &str, devices: &[(&str, &[&str])]) -> Spec {
        let device = |&(name, env): &(&str, &[&str])| {
            let env = env.iter().map(|&e| e.to_owned()).collect();
            Device::new(name.parse().unwrap(), ContainerEdits { env, ..ContainerEdits::default() })
        };
        let mut spec =
            Spec::new(format!("v.example/{class}").parse().unwrap(), devices.iter().map(device).collect());
        spec.container_edits.env.push(common.to_owned());
        spec
    }

    #[test]
    fn the_edits_of_a_spec_are_made_once_and_before_those_of_its_devices() {
        let specs = [
            spec("a", "A=1", &[("x", &["X=1"]), ("y", &["Y=1", "A=2"])]),
            spec("b", "B=1", &[("x", &["Z=1"])]),
        ];
        let names: Vec<QualifiedName> =
            ["v.example/a=x", "v.example/b=x", "v.example/a=y"].map(|n| n.parse().unwrap()).into();
        let edits = resolve(&specs, &names).unwrap();
        assert_eq!(edits.env, ["A=1", "X=1", "B=1", "Z=1", "Y=1", "A=2"]);
        assert_eq!(edits.environment(), [("A", "2"), ("X", "1"), ("B", "1"), ("Z", "1"), ("Y", "1")]);
    }

    #[test]
    fn unknown_and_ambiguous_devices_are_refused_by_name() {
        let specs = [spec("a", "A=1", &[("x", &["X=1"])]), spec("a", "A=1", &[("x", &["X=1"])])];
        let unknown: QualifiedName = "v.example/a=z".parse().unwrap();
        assert_eq!(resolve(&specs, [&unknown]), Err(ResolveError::Unknown(unknown.clone())));
        let twice: QualifiedName = "v.example/a=x".parse().unwrap();
        assert_eq!(resolve(&specs, [&twice]), Err(ResolveError::Ambiguous(twice.clone())));
    }

    #[test]
    fn later_resctrl_settings_replace_earlier_ones_and_none_keeps_them() {
        let with = |id: &str| ContainerEdits {
            intel_rdt: Some(IntelRdt { clos_id: Some(id.to_owned()), ..IntelRdt::default() }),
            ..ContainerEdits::default()
        };
        let mut edits = with("one");
        edits.append(&ContainerEdits::default());
        assert_eq!(edits, with("one"));
        edits.append(&with("two"));
        assert_eq!(edits, with("two"));
    }
}
