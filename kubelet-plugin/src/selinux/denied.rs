//! Checks whether confined containers may use the driver's files. Files under `/usr` are labelled by the
//! distribution. Those of a driver container or of an installer's own directory may not be, and a container's
//! loader does not say why it does not find a library that it may not read. This driver must not label these
//! files itself.

use crate::driver::{Driver, DriverFile, DriverFiles};
use aliquot_model::DriverCapabilities;
use aliquot_selinux::{Class, Label, Policy, PolicyError};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

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
