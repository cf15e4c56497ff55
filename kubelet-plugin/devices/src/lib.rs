//! Finds the character devices that a GPU program needs, by number. The numbers come from the kernel's own
//! lists, so the content of `/dev` does not matter. Device nodes are made from the numbers, and a device
//! whose module is loaded later is found at the next look. Everything but [`Majors::read`] is pure.

pub mod drm;
pub mod layout;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The minor number of `nvidiactl`, under the major of the GPUs (`nv-chardev-numbers.h` of NVIDIA's kernel
/// modules).
const CONTROL: u32 = 255;
/// The minor number of `nvidia-modeset`, under the major of the GPUs.
const MODESET: u32 = 254;
/// The minor numbers of `nvidia-uvm` and `nvidia-uvm-tools`, under a major of their own.
const UVM: u32 = 0;
const UVM_TOOLS: u32 = 1;

/// A character device as a container gets it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CharDevice {
    /// The path in the container.
    pub path: String,
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
}

/// The reason why a container could not open a device that it needs.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The kernel's list cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The driver's first module is not loaded.
    #[error(
        "the NVIDIA driver is not loaded: {} lists neither `nvidia` nor `nvidia-frontend`; load it (modprobe nvidia), and look into the kernel's log if that fails", .0.display()
    )]
    NoDriver(PathBuf),
    /// The module for unified memory is not loaded.
    #[error(
        "the kernel module nvidia-uvm is not loaded ({} does not list it), and no CUDA program starts without it: run `nvidia-modprobe -c 0 -u` or `modprobe nvidia-uvm` on the node, and name it in /etc/modules-load.d for each boot", .0.display()
    )]
    NoUvm(PathBuf),
    /// The driver has no capability devices.
    #[error(
        "the NVIDIA driver has no capability devices ({} does not list `nvidia-caps`), so no container could open a MIG partition: reload the driver, or install one that knows MIG (450 or later)", .0.display()
    )]
    NoCapabilities(PathBuf),
}

/// The major numbers of the driver's devices at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Majors {
    /// The file that they were read from, for errors.
    list: PathBuf,
    gpu: Option<u32>,
    uvm: Option<u32>,
    capabilities: Option<u32>,
    modeset: bool,
}

impl Majors {
    /// Reads `devices` and, where an older driver needs it, `modules` under a proc root (`/proc`).
    ///
    /// # Errors
    /// Fails with [`DeviceError::Read`].
    pub fn read(proc_root: &Path) -> Result<Self, DeviceError> {
        let list = proc_root.join("devices");
        let devices = match fs::read_to_string(&list) {
            Ok(text) => text,
            Err(source) => return Err(DeviceError::Read { path: list, source }),
        };
        // A failure to read the modules costs at worst a device for graphics.
        let modules = || fs::read_to_string(proc_root.join("modules")).unwrap_or_default();
        Ok(Self::parse(list, &devices, modules))
    }

    /// Parses lines such as `195 nvidia` of the part about character devices. Drivers before 550.40 have one
    /// entry `nvidia-frontend` for the GPUs, `nvidiactl` and `nvidia-modeset`. So whether the last is there
    /// is looked up among the modules (`nvidia_modeset 1482752 …`).
    fn parse(list: PathBuf, devices: &str, modules: impl FnOnce() -> String) -> Self {
        let lines = devices.lines().take_while(|line| !line.starts_with("Block"));
        let known: Vec<(&str, u32)> = lines
            .filter_map(|line| {
                let (major, name) = line.trim().split_once(' ')?;
                Some((name.trim(), major.parse().ok()?))
            })
            .collect();
        let of = |name: &str| known.iter().find(|(known, _)| *known == name).map(|(_, major)| *major);
        let frontend = of("nvidia-frontend");
        let modeset_loaded = || modules().lines().any(|line| line.starts_with("nvidia_modeset "));
        Self {
            gpu: of("nvidia").or(frontend),
            uvm: of("nvidia-uvm"),
            capabilities: of("nvidia-caps"),
            modeset: of("nvidia-modeset").is_some() || frontend.is_some() && modeset_loaded(),
            list,
        }
    }

    /// Returns the control devices that every GPU program opens, and `nvidia-modeset` if the driver has it.
    ///
    /// # Errors
    /// Fails if the driver or nvidia-uvm is not loaded.
    pub fn control(&self) -> Result<Vec<CharDevice>, DeviceError> {
        let gpu = self.gpu_major()?;
        let uvm = self.uvm.ok_or_else(|| DeviceError::NoUvm(self.list.clone()))?;
        let modeset = self.modeset.then_some(("nvidia-modeset", gpu, MODESET));
        let always =
            [("nvidiactl", gpu, CONTROL), ("nvidia-uvm", uvm, UVM), ("nvidia-uvm-tools", uvm, UVM_TOOLS)];
        Ok(always.into_iter().chain(modeset).map(|(name, major, minor)| device(name, major, minor)).collect())
    }

    /// Returns the device of a GPU.
    ///
    /// # Errors
    /// Fails if the driver is not loaded.
    pub fn gpu(&self, minor: u32) -> Result<CharDevice, DeviceError> {
        Ok(device(&format!("nvidia{minor}"), self.gpu_major()?, minor))
    }

    /// Returns the device of a capability, such as the one to use a MIG partition.
    ///
    /// # Errors
    /// Fails if the driver has no capability devices.
    pub fn capability(&self, minor: u32) -> Result<CharDevice, DeviceError> {
        let major = self.capabilities.ok_or_else(|| DeviceError::NoCapabilities(self.list.clone()))?;
        Ok(device(&format!("nvidia-caps/nvidia-cap{minor}"), major, minor))
    }

    fn gpu_major(&self) -> Result<u32, DeviceError> {
        self.gpu.ok_or_else(|| DeviceError::NoDriver(self.list.clone()))
    }
}

fn device(name: &str, major: u32, minor: u32) -> CharDevice {
    CharDevice { path: format!("/dev/{name}"), major, minor }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: &str = "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n\
                       234 nvidia-caps-imex-channels\n235 nvidia-caps\n508 nvidia-uvm\n\nBlock devices:\n259 blkext\n";
    const OLD: &str = "Character devices:\n  4 /dev/vc/0\n195 nvidia-frontend\n237 nvidia-caps\n\
                       511 nvidia-uvm\n\nBlock devices:\n";

    fn majors(devices: &str, modules: &str) -> Majors {
        Majors::parse("/proc/devices".into(), devices, || modules.to_owned())
    }

    fn numbers(devices: &[CharDevice]) -> Vec<(&str, u32, u32)> {
        devices.iter().map(|device| (device.path.as_str(), device.major, device.minor)).collect()
    }

    #[test]
    fn devices_have_the_drivers_numbers() {
        let majors = majors(NEW, "");
        assert_eq!(
            numbers(&majors.control().unwrap()),
            [
                ("/dev/nvidiactl", 195, 255),
                ("/dev/nvidia-uvm", 508, 0),
                ("/dev/nvidia-uvm-tools", 508, 1),
                ("/dev/nvidia-modeset", 195, 254),
            ]
        );
        let others = [majors.gpu(3).unwrap(), majors.capability(138).unwrap()];
        assert_eq!(
            numbers(&others),
            [("/dev/nvidia3", 195, 3), ("/dev/nvidia-caps/nvidia-cap138", 235, 138)]
        );
    }

    #[test]
    fn older_drivers_name_one_frontend_for_all_and_modeset_is_seen_among_the_modules() {
        let names = |modules| {
            let devices = majors(OLD, modules).control().unwrap();
            devices.into_iter().map(|device| device.path).collect::<Vec<_>>()
        };
        assert_eq!(names(""), ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]);
        let loaded = "nvidia_modeset 1482752 1 nvidia_drm, Live 0x0000000000000000\n";
        assert_eq!(names(loaded).last().unwrap(), "/dev/nvidia-modeset");
        assert_eq!(majors(OLD, "").gpu(0).unwrap().major, 195);
    }

    #[test]
    fn what_is_not_loaded_is_named_with_what_to_do() {
        let without = |name: &str| {
            let lines = NEW.lines().filter(|line| !line.ends_with(name));
            majors(&lines.collect::<Vec<_>>().join("\n"), "")
        };
        let error = without(" nvidia-uvm").control().unwrap_err().to_string();
        assert!(error.contains("nvidia-modprobe -c 0 -u") && error.contains("/proc/devices"), "{error}");
        let error = without(" nvidia").gpu(0).unwrap_err().to_string();
        assert!(error.contains("modprobe nvidia"), "{error}");
        let error = without(" nvidia-caps").capability(3).unwrap_err().to_string();
        assert!(error.contains("nvidia-caps"), "{error}");
    }

    #[test]
    fn block_devices_are_not_mistaken_for_the_drivers() {
        let text = "Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n";
        assert!(majors(text, "").gpu(0).is_err());
    }

    #[test]
    fn a_list_that_cannot_be_read_is_named() {
        let error = Majors::read(Path::new("/nonexistent/proc")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/proc/devices"), "{error}");
    }
}
