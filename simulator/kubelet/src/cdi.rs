//! Reads CDI specs as a runtime does, and makes of them what [`crate::container`] takes.

use crate::container::{Bind, Hook, Node};
use aliquot_cdi::{ContainerEdits, HookName, QualifiedName, Spec};
use anyhow::{Context, Result};
use std::path::Path;

/// The edits for a container that asks for these devices.
///
/// # Errors
/// If a spec of the folder cannot be read, or none has such a device.
pub fn edits(cdi_dir: &Path, ids: &[String]) -> Result<ContainerEdits> {
    let mut specs = Vec::new();
    for entry in std::fs::read_dir(cdi_dir).with_context(|| format!("cannot list {}", cdi_dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "json") {
            let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let spec: Spec = serde_json::from_slice(&text)
                .with_context(|| format!("{} is no CDI spec", path.display()))?;
            specs.push(spec);
        }
    }
    let names: Vec<QualifiedName> = ids
        .iter()
        .map(|id| id.parse().with_context(|| format!("{id:?} is no CDI device")))
        .collect::<Result<_>>()?;
    Ok(aliquot_cdi::resolve(&specs, &names)?)
}

/// The container's mounts, device nodes and hooks that edits come to.
///
/// # Errors
/// If a device node has no number that could be one.
pub fn apply(edits: &ContainerEdits) -> Result<(Vec<Bind>, Vec<Node>, Vec<Hook>)> {
    let mut binds: Vec<Bind> = Vec::new();
    for mount in &edits.mounts {
        let read_only = mount.options.iter().any(|option| option == "ro");
        let (host, container) = ((&mount.host_path).into(), (&mount.container_path).into());
        binds.push(Bind { host, container, read_only });
    }
    // What a spec gives by number is made, as a runtime does; the rest is looked for on the host.
    let mut nodes = Vec::new();
    for node in &edits.device_nodes {
        match (&node.device_type, node.major, node.minor) {
            (Some(_), Some(major), Some(minor)) => {
                let number = (u64::try_from(major)?, u64::try_from(minor)?);
                nodes.push(Node { path: (&node.path).into(), number });
            }
            _ => {
                let host = node.host_path.as_deref().unwrap_or(&node.path).into();
                binds.push(Bind { host, container: (&node.path).into(), read_only: false });
            }
        }
    }
    let create = edits.hooks.iter().filter(|hook| hook.hook_name == HookName::CreateContainer);
    let hooks =
        create.map(|hook| Hook { path: (&hook.path).into(), args: hook.args.clone(), env: hook.env.clone() });
    Ok((binds, nodes, hooks.collect()))
}
