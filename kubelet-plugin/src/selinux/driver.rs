//! Whether confined containers may use the driver's files. Those under `/usr` are labelled by the distribution; those of
//! a driver container or of an installer's own directory may not be, and a container's loader does not say why it does
//! not find a library that it may not read. They are not ours to label.

use crate::args::Args;
use crate::driver::{Driver, DriverFile, DriverFiles};
use crate::events::Events;
use crate::prepare::Node;
use crate::{notice, reasons};
use aliquot_model::DriverCapabilities;
use aliquot_selinux::{Class, Label, Policy, PolicyError};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// What a process in the container of somebody without special rights is labelled. Pods have categories besides, which
/// files of the host do not have.
pub const CONTAINER: &str = "system_u:system_r:container_t:s0";

/// What a loader does with a library, and what starting a program takes.
const EXECUTED: &[&str] = &["getattr", "open", "read", "map", "execute"];
/// What reading data takes.
const READ: &[&str] = &["getattr", "open", "read"];

/// A file of the driver that containers may not use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denied {
    /// On the host.
    pub path: PathBuf,
    /// Its label.
    pub label: Label,
    /// What containers may not do with it.
    pub permissions: Vec<&'static str>,
}

/// Files of the driver that containers get and that those with this label may not use. What has no label to be seen, and
/// sockets, are left out.
///
/// # Errors
/// If the policy does not say.
pub fn denied(
    policy: &Policy,
    container: &Label,
    driver: &Driver,
    capabilities: &DriverCapabilities,
) -> Result<Vec<Denied>, PolicyError> {
    let DriverFiles { libraries, others, .. } = driver.files().of(capabilities);
    let is_program = |file: &DriverFile| file.container.iter().any(|path| path.contains("bin/"));
    let (programs, data): (Vec<_>, Vec<_>) = others.into_iter().partition(is_program);
    let executed = libraries.into_iter().chain(programs).map(|file| (file.host, EXECUTED));
    // Many files have few labels.
    let mut known: BTreeMap<(Label, &[&str]), Vec<&'static str>> = BTreeMap::new();
    let mut found = Vec::new();
    for (path, wanted) in executed.chain(data.into_iter().map(|file| (file.host, READ))) {
        let here = driver.here(&path);
        let is_file = fs::symlink_metadata(&here).is_ok_and(|meta| meta.is_file());
        let Some(label) = aliquot_selinux::of(&here).ok().flatten().filter(|_| is_file) else { continue };
        let permissions = match known.get(&(label.clone(), wanted)) {
            Some(permissions) => permissions.clone(),
            None => {
                let permissions = policy.denied(container, &label, Class::File, wanted)?;
                known.insert((label.clone(), wanted), permissions.clone());
                permissions
            }
        };
        if !permissions.is_empty() {
            found.push(Denied { path, label, permissions });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found.dedup();
    Ok(found)
}

/// Tells where SELinux keeps containers from the driver's files. Whether it does cannot be found out where the host's
/// selinuxfs is not to be seen: it is below the driver's root where that is the host's, or in the tree of its first
/// process.
pub async fn tell(args: &Args, node: &Arc<Node>, events: &Events) {
    if !node.machine.labels.are_given() {
        return;
    }
    let roots = [&args.driver_root, &args.host_proc.join("1/root")].map(|root| root.join("sys"));
    let sys = [&args.sys_root].into_iter().chain(&roots);
    let Some(policy) = Policy::find(sys.map(|sys| sys.join("fs/selinux"))) else {
        tracing::info!("no selinuxfs is seen: whether containers may use the driver's files is not known");
        return;
    };
    let (worker, container) = (Arc::clone(node), args.selinux_container_label.clone());
    let look = move || {
        let machine = &worker.machine;
        denied(&policy, &container, &machine.driver, &machine.site.capabilities)
    };
    match tokio::task::spawn_blocking(look).await {
        Ok(Ok(found)) if found.is_empty() => {}
        Ok(Ok(found)) => events.node_warning(
            reasons::SELINUX_DRIVER_DENIED,
            notice::driver_denied(&args.selinux_container_label, &found),
        ),
        Ok(Err(error)) => {
            tracing::warn!(%error, "whether containers may use the driver's files is not known")
        }
        Err(error) => tracing::warn!(%error, "looking at the labels of the driver's files ended abnormally"),
    }
}
