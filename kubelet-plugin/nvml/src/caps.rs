//! MIG capability devices: which `/dev/nvidia-caps/nvidia-cap<n>` opens which instance.
//!
//! A process can use a MIG device only if it can open the capability nodes of the GPU instance and
//! of the compute instance. The driver lists their minor numbers in
//! `/proc/driver/nvidia-caps/mig-minors`, for every id that an instance could have, once and for all
//! when the module loads.

use std::io;
use std::path::{Path, PathBuf};

/// GPU minor, GPU instance and, for a compute instance, its id.
type Instance = (u32, u32, Option<u32>);

/// Minor numbers of the capability devices of MIG instances.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigMinors {
    /// Sorted: the driver lists thousands, of which a claim needs a few.
    minors: Vec<(Instance, u32)>,
    config: Option<u32>,
}

impl MigMinors {
    /// Reads the driver's list under a proc root (`/proc`). A driver without MIG has none, which is
    /// an empty list.
    pub fn read(proc_root: &Path) -> io::Result<Self> {
        match std::fs::read_to_string(Self::path(proc_root)) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    /// The driver's file.
    pub fn path(proc_root: &Path) -> PathBuf {
        proc_root.join("driver/nvidia-caps/mig-minors")
    }

    /// Takes lines such as `gpu0/gi1/access 12`, `gpu0/gi1/ci0/access 13` and `config 1`; others (`monitor`) are not about
    /// instances. Of several lines about one instance the last one counts.
    fn parse(text: &str) -> Self {
        let mut minors = Vec::new();
        let mut config = None;
        for line in text.lines() {
            let Some((path, minor)) = line.trim().rsplit_once(' ') else { continue };
            let Ok(minor) = minor.parse() else { continue };
            match instance(path) {
                Some(instance) => minors.push((instance, minor)),
                None if path == "config" => config = config.or(Some(minor)),
                None => {}
            }
        }
        // Stable, so that the last of equal ones stays the last.
        minors.sort_by_key(|(instance, _)| *instance);
        Self { minors, config }
    }

    fn find(&self, instance: Instance) -> Option<u32> {
        let after = self.minors.partition_point(|(other, _)| *other <= instance);
        let (found, minor) = self.minors.get(after.checked_sub(1)?)?;
        (*found == instance).then_some(*minor)
    }

    /// Minor of the capability to divide GPUs into instances.
    pub fn config(&self) -> Option<u32> {
        self.config
    }

    /// Minor of the capability of a GPU instance.
    pub fn gpu_instance(&self, gpu_minor: u32, gpu_instance: u32) -> Option<u32> {
        self.find((gpu_minor, gpu_instance, None))
    }

    /// Minor of the capability of a compute instance.
    pub fn compute_instance(&self, gpu_minor: u32, gpu_instance: u32, compute_instance: u32) -> Option<u32> {
        self.find((gpu_minor, gpu_instance, Some(compute_instance)))
    }
}

/// The instance of a line's path.
fn instance(path: &str) -> Option<Instance> {
    let mut parts = path.split('/');
    let mut number = |prefix: &str| parts.next()?.strip_prefix(prefix)?.parse::<u32>().ok();
    let (gpu, gi) = (number("gpu")?, number("gi")?);
    let ci = match parts.next()? {
        "access" => None,
        ci => {
            let ci = ci.strip_prefix("ci")?.parse().ok()?;
            (parts.next()? == "access").then_some(Some(ci))?
        }
    };
    parts.next().is_none().then_some((gpu, gi, ci))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_found_and_other_lines_are_not_mistaken_for_them() {
        let minors = MigMinors::parse(
            "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu7/gi13/access 1000\n\
             gpu7/gi13/ci6/access 1007\nnonsense\ngpu0/gi1/other 9\ngpux/gi1/access 9\ngpu0/gi1/access/more 9\n\
             gpu0/gi1/ci0 9\n  gpu3/gi2/access 70\n",
        );
        assert_eq!(minors.config(), Some(1));
        assert_eq!(minors.gpu_instance(0, 0), Some(3));
        assert_eq!(minors.compute_instance(0, 0, 0), Some(4));
        assert_eq!(minors.gpu_instance(7, 13), Some(1000));
        assert_eq!(minors.compute_instance(7, 13, 6), Some(1007));
        assert_eq!(minors.gpu_instance(3, 2), Some(70));
        assert_eq!(minors.gpu_instance(0, 1), None);
        assert_eq!(minors.compute_instance(0, 0, 1), None);
        assert_eq!(minors.minors.len(), 5);
    }

    #[test]
    fn a_driver_without_mig_has_an_empty_list() {
        let proc = tempfile::tempdir().unwrap();
        assert_eq!(MigMinors::read(proc.path()).unwrap(), MigMinors::default());
    }
}
