//! SELinux for the node agent and the OCI hook: the labels of files, and what the loaded policy lets a
//! process with one label do with a file that has another. This crate does not decide what is to be labelled.
//!
//! It uses nothing of libselinux: a label is an extended attribute, and the policy is asked through files
//! that the kernel has in selinuxfs.
#![forbid(unsafe_code)]

mod label;
mod policy;

pub use label::{Label, NotALabel, of, set, through};
pub use policy::{Class, Policy, PolicyError};

use std::io;
use std::path::Path;

/// Returns true if this kernel enforces a policy, or is permissive: it has SELinux, and a policy is loaded.
/// `proc` is the path of `/proc`.
///
/// A kernel with SELinux that found no policy, as with `SELINUX=disabled`, denies nothing, and refuses mounts
/// with labels.
///
/// # Errors
/// If the kernel's list of file systems or this process's own label cannot be read.
pub fn is_on(proc: &Path) -> io::Result<bool> {
    let filesystems = std::fs::read_to_string(proc.join("filesystems"))?;
    if !filesystems.lines().any(|line| line.split_whitespace().last() == Some("selinuxfs")) {
        return Ok(false);
    }
    // Without a policy every process is called `kernel`, which is no label.
    let own = std::fs::read(proc.join("thread-self/attr/current"))?;
    Ok(Label::from_bytes(&own).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn found(filesystems: &str, current: Option<&str>) -> Option<bool> {
        let proc = tempfile::tempdir().unwrap();
        fs::write(proc.path().join("filesystems"), filesystems).unwrap();
        let attr = proc.path().join("thread-self/attr");
        fs::create_dir_all(&attr).unwrap();
        if let Some(current) = current {
            fs::write(attr.join("current"), current).unwrap();
        }
        is_on(proc.path()).ok()
    }

    #[test]
    fn it_is_on_with_a_policy_only() {
        let with = "nodev\tsysfs\nnodev\tselinuxfs\n\text4\n";
        assert_eq!(found(with, Some("system_u:system_r:spc_t:s0\0")), Some(true));
        assert_eq!(found(with, Some("kernel\0")), Some(false), "no policy is loaded");
        assert_eq!(found(with, None), None, "it cannot be told");
        let without = "nodev\tsysfs\n\text4\n";
        assert_eq!(found(without, None), Some(false));
        // What another security module calls the process is no label either.
        assert_eq!(found(without, Some("cri-containerd.apparmor.d (enforce)\n")), Some(false));
        assert!(is_on(Path::new("/nowhere")).is_err());
    }
}
