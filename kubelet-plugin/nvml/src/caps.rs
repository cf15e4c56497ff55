//! Reads the MIG capability devices: which `/dev/nvidia-caps/nvidia-cap<n>` opens which instance.
//!
//! A process can use a MIG device only if it can open the capability nodes of the GPU instance and of the
//! compute instance. The driver lists their minor numbers in `/proc/driver/nvidia-caps/mig-minors`, for every
//! id that an instance could have, once and for all when the module loads.

use memchr::memmem;
use std::io;
use std::path::{Path, PathBuf};

/// The minor numbers of the capability devices of MIG instances. The driver's list is kept as text, because
/// it has thousands of lines, of which a claim needs two.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigMinors(String);

impl MigMinors {
    /// Reads the driver's list under a proc root (`/proc`). A driver without MIG has no list, which counts as
    /// an empty one.
    pub fn read(proc_root: &Path) -> io::Result<Self> {
        match std::fs::read_to_string(Self::path(proc_root)) {
            Ok(text) => Ok(Self(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    /// Returns the path of the driver's file.
    pub fn path(proc_root: &Path) -> PathBuf {
        proc_root.join("driver/nvidia-caps/mig-minors")
    }

    /// Returns the number in the last line that begins with a capability's path.
    fn find(&self, capability: &str) -> Option<u32> {
        let text = self.0.as_bytes();
        let wanted = format!("{capability} ");
        let mut found = memmem::rfind_iter(text, &wanted);
        let after = found.find_map(|at| {
            let begins_line = at.checked_sub(1).is_none_or(|before| text.get(before) == Some(&b'\n'));
            begins_line.then(|| self.0.get(at + wanted.len()..)).flatten()
        })?;
        after.lines().next()?.trim().parse().ok()
    }

    /// Returns the minor number of the capability to divide GPUs into instances.
    pub fn config(&self) -> Option<u32> {
        self.0
            .lines()
            .find_map(|line| line.strip_prefix("config "))
            .and_then(|minor| minor.trim().parse().ok())
    }

    /// Returns the minor number of the capability of a GPU instance.
    pub fn gpu_instance(&self, gpu_minor: u32, gpu_instance: u32) -> Option<u32> {
        self.find(&format!("gpu{gpu_minor}/gi{gpu_instance}/access"))
    }

    /// Returns the minor number of the capability of a compute instance.
    pub fn compute_instance(&self, gpu_minor: u32, gpu_instance: u32, compute_instance: u32) -> Option<u32> {
        self.find(&format!("gpu{gpu_minor}/gi{gpu_instance}/ci{compute_instance}/access"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_found_and_other_lines_are_not_mistaken_for_them() {
        let minors = MigMinors(
            "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu7/gi13/access 1000\n\
             gpu7/gi13/ci6/access 1007\nnonsense\ngpu0/gi1/other 9\ngpux/gi1/access 9\ngpu0/gi1/access/more 9\n\
             gpu0/gi1/ci0 9\nagpu0/gi1/access 9\ngpu3/gi2/access 69\ngpu3/gi2/access 70\n"
                .to_owned(),
        );
        assert_eq!(minors.config(), Some(1));
        assert_eq!(minors.gpu_instance(0, 0), Some(3));
        assert_eq!(minors.compute_instance(0, 0, 0), Some(4));
        assert_eq!(minors.gpu_instance(7, 13), Some(1000));
        assert_eq!(minors.compute_instance(7, 13, 6), Some(1007));
        assert_eq!(minors.gpu_instance(3, 2), Some(70));
        assert_eq!(minors.gpu_instance(0, 1), None);
        assert_eq!(minors.compute_instance(0, 0, 1), None);
        assert_eq!(minors.gpu_instance(0, 13), None);
    }

    #[test]
    fn a_driver_without_mig_has_an_empty_list() {
        let proc = tempfile::tempdir().unwrap();
        assert_eq!(MigMinors::read(proc.path()).unwrap(), MigMinors::default());
    }
}
