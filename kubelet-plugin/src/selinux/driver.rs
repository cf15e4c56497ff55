//! Checks whether confined containers may use the driver's files. Files under `/usr` are labelled by the
//! distribution. Those of a driver container or of an installer's own directory may not be, and a container's
//! loader does not say why it does not find a library that it may not read. This driver must not label these
//! files itself.

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

/// The label of a process in a container without special rights. Pods also have categories, which files of
/// the host do not have.
pub const CONTAINER: &str = "system_u:system_r:container_t:s0";

/// The permissions that a loader needs for a library, and that starting a program needs.
const EXECUTED: &[&str] = &["getattr", "open", "read", "map", "execute"];
/// The permissions that reading data needs.
const READ: &[&str] = &["getattr", "open", "read"];

/// A file of the driver that containers may not use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denied {
    /// The path on the host.
    pub path: PathBuf,
    /// The file's label.
    pub label: Label,
    /// The permissions that containers lack.
    pub permissions: Vec<&'static str>,
}

/// Returns the driver's files that containers get but may not use if they run with the label `container`.
/// Sockets and files without a visible label are left out.
///
/// # Errors
/// Fails if the policy cannot be queried.
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
    // Many files share few labels.
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

/// Reports where SELinux keeps containers from the driver's files. This can be found out only if the host's
/// selinuxfs is visible: below the driver's root if that is the host's root, or in the tree of the host's
/// first process.
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
