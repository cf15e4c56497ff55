//! The driver root of a node: device nodes, libraries, and what `/proc` and `/sys` say about the GPUs.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::dev;
use crate::drm;
use crate::error::NodeError;
use crate::layout::{MAX_CIS, MAX_GIS};
use crate::spec::{Gpu, NodeSpec, ci_capability_minor, gi_capability_minor};

/// Where libraries lie in the driver root.
const LIBRARY_DIR: &str = "usr/lib/x86_64-linux-gnu";
/// What sysfs has of the module.
const MODULE: &str = "sys/module/nvidia";
/// The driver's libraries.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so", "libcuda.so"];

/// Writes `<dir>/root`.
pub(crate) fn lay_out(dir: &Path, spec: &NodeSpec, gpus: &[Gpu]) -> Result<(), NodeError> {
    let root = dir.join("root");
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| NodeError::Io { what: "could not write", path, source }
    };
    if root.exists() {
        fs::remove_dir_all(&root).map_err(failed(&root))?;
    }
    let layout = Layout { root: &root };
    layout.devices(spec, gpus).map_err(failed(&root.join("dev")))?;
    layout.libraries(spec).map_err(failed(&root.join("usr")))?;
    layout.proc(spec).and_then(|()| layout.numbers(gpus)).map_err(failed(&root.join("proc")))?;
    layout.module(spec).map_err(failed(&root.join("sys/module")))?;
    layout.sys(gpus).map_err(failed(&root.join("sys")))?;
    drm::show(&root, gpus).map_err(failed(&root.join("sys/bus/pci")))?;
    Ok(())
}

/// Loses what a reboot loses: capabilities of MIG instances, nvidia-uvm where it comes late, and numbers of GPUs that
/// changed with their MIG mode.
pub(crate) fn restart(dir: &Path, spec: &NodeSpec, gpus: &[Gpu]) -> Result<(), NodeError> {
    let root = dir.join("root");
    let layout = Layout { root: &root };
    layout.modules(spec, gpus).and_then(|()| layout.numbers(gpus)).map_err(|source| NodeError::Io {
        what: "could not write",
        path: root.clone(),
        source,
    })
}

/// Shows GPUs by other minor numbers than before.
pub(crate) fn number(dir: &Path, gpus: &[Gpu]) -> Result<(), NodeError> {
    let root = dir.join("root");
    Layout { root: &root }.numbers(gpus).map_err(|source| NodeError::Io {
        what: "could not write",
        path: root.clone(),
        source,
    })
}

/// Loses what the driver's modules show while they are loaded.
pub(crate) fn unload(dir: &Path) -> Result<(), NodeError> {
    let root = dir.join("root");
    Layout { root: &root }.without_modules().map_err(|source| NodeError::Io {
        what: "could not write",
        path: root.clone(),
        source,
    })
}

/// Shows it again.
pub(crate) fn load(dir: &Path, spec: &NodeSpec, gpus: &[Gpu]) -> Result<(), NodeError> {
    let root = dir.join("root");
    let layout = Layout { root: &root };
    layout
        .modules(spec, gpus)
        .and_then(|()| layout.proc(spec))
        .and_then(|()| layout.numbers(gpus))
        .and_then(|()| layout.module(spec))
        .and_then(|()| drm::show(&root, gpus))
        .map_err(|source| NodeError::Io { what: "could not write", path: root.clone(), source })
}

/// Removes the libraries of one version and puts those of another in their place.
pub(crate) fn exchange_libraries(dir: &Path, before: &NodeSpec, after: &NodeSpec) -> Result<(), NodeError> {
    let root = dir.join("root");
    let lib = root.join(LIBRARY_DIR);
    let exchange = || {
        for name in LIBRARIES {
            let versioned = format!("{name}.{}", before.driver_version);
            for file in [versioned, format!("{name}.1"), name.to_owned()] {
                dev::gone(fs::remove_file(lib.join(file)))?;
            }
        }
        Layout { root: &root }.libraries(after)
    };
    exchange().map_err(|source| NodeError::Io {
        what: "could not exchange the libraries in",
        path: lib.clone(),
        source,
    })
}

/// Writes the boot id where the kernel shows it.
pub(crate) fn write_boot_id(dir: &Path, id: &str) -> Result<(), NodeError> {
    let path = dir.join("root/proc/sys/kernel/random/boot_id");
    let write = || {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, format!("{id}\n"))
    };
    write().map_err(|source| NodeError::Io { what: "could not write", path: path.clone(), source })
}

struct Layout<'a> {
    root: &'a Path,
}

impl Layout<'_> {
    fn devices(&self, spec: &NodeSpec, gpus: &[Gpu]) -> io::Result<()> {
        dev::make(&self.dir("dev")?.join("nvidiactl"))?;
        self.modules(spec, gpus)
    }

    /// The GPUs by their minor numbers: their nodes, and what `/proc` says of them.
    fn numbers(&self, gpus: &[Gpu]) -> io::Result<()> {
        dev::make_gpus(&self.dir("dev")?, gpus.iter().map(|gpu| gpu.minor))?;
        for gpu in gpus {
            let info = self.dir(&format!("proc/driver/nvidia/gpus/{}", gpu.bdf()))?;
            fs::write(
                info.join("information"),
                format!(
                    "Model: \t\t {}\nGPU UUID: \t {}\nBus Type: \t PCIe\nBus Location: \t {}\nDevice Minor: \t {}\n",
                    gpu.board.product,
                    gpu.uuid,
                    gpu.bdf(),
                    gpu.minor
                ),
            )?;
        }
        Ok(())
    }

    /// What is there when the driver's modules were loaded, and nobody has used them yet.
    fn modules(&self, spec: &NodeSpec, gpus: &[Gpu]) -> io::Result<()> {
        let dev = self.dir("dev")?;
        let caps = dev.join("nvidia-caps");
        if caps.exists() {
            fs::remove_dir_all(&caps)?;
        }
        if gpus.iter().any(|gpu| gpu.board.has_mig()) {
            dev::make_capability(&dev, dev::CONFIG)?;
            dev::make_capability(&dev, dev::MONITOR)?;
        }
        if spec.late_uvm {
            dev::remove_uvm(&dev)?
        } else {
            dev::make_uvm(&dev)?
        }
        fs::write(self.dir("proc")?.join("devices"), dev::list(spec, !spec.late_uvm))
    }

    fn without_modules(&self) -> io::Result<()> {
        for gone in ["dev/nvidia-caps", "proc/driver"] {
            dev::gone(fs::remove_dir_all(self.root.join(gone)))?;
        }
        dev::remove_uvm(&self.root.join("dev"))?;
        drm::hide(self.root)?;
        fs::write(self.root.join("proc/devices"), dev::list_without_driver())?;
        // Kept aside: as in sysfs, the number of its directory is not used again in this boot.
        let aside = self.dir("sys/module/.unloaded")?;
        let count = fs::read_dir(&aside)?.count();
        fs::rename(self.root.join(MODULE), aside.join(count.to_string()))
    }

    /// What the kernel says of the module nvidia.
    fn module(&self, spec: &NodeSpec) -> io::Result<()> {
        fs::write(self.dir(MODULE)?.join("version"), format!("{}\n", spec.driver_version))
    }

    fn libraries(&self, spec: &NodeSpec) -> io::Result<()> {
        let lib = self.dir(LIBRARY_DIR)?;
        for (file, name) in [&spec.nvml_library, &spec.cuda_library].into_iter().zip(LIBRARIES) {
            let Some(file) = file else { continue };
            // As the real packages have it: a versioned file, and the SONAME as a link to it.
            let versioned = format!("{name}.{}", spec.driver_version);
            fs::copy(file, lib.join(&versioned))?;
            symlink(&versioned, lib.join(format!("{name}.1")))?;
            symlink(format!("{name}.1"), lib.join(name))?;
        }
        if let Some(program) = &spec.nvidia_smi {
            let path = self.dir("usr/bin")?.join("nvidia-smi");
            fs::copy(program, &path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    fn proc(&self, spec: &NodeSpec) -> io::Result<()> {
        let caps = self.dir("proc/driver/nvidia-caps")?;
        fs::write(caps.join("mig-minors"), mig_minors())?;
        let driver = self.dir("proc/driver/nvidia")?;
        fs::write(
            driver.join("version"),
            format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  (simulated)\n", spec.driver_version),
        )
    }

    fn sys(&self, gpus: &[Gpu]) -> io::Result<()> {
        let links = self.dir("sys/bus/pci/devices")?;
        for gpu in gpus {
            // One root port for each GPU, so that the PCIe root can be told from the path.
            let relative =
                format!("devices/pci0000:{:02x}/0000:{:02x}:01.0/{}", gpu.bus - 1, gpu.bus - 1, gpu.bdf());
            let device = self.dir(&format!("sys/{relative}"))?;
            fs::write(device.join("numa_node"), format!("{}\n", gpu.numa_node))?;
            fs::write(device.join("vendor"), "0x10de\n")?;
            fs::write(device.join("device"), format!("{:#06x}\n", gpu.board.pci_device_id >> 16))?;
            fs::write(device.join("class"), "0x030200\n")?;
            symlink(format!("../../../{relative}"), links.join(gpu.bdf()))?;
        }
        Ok(())
    }

    fn dir(&self, relative: &str) -> io::Result<PathBuf> {
        let path = self.root.join(relative);
        fs::create_dir_all(&path)?;
        Ok(path)
    }
}

/// The driver's table of MIG capabilities: every instance that a GPU could have, for as many GPUs as it knows,
/// whatever boards there are.
fn mig_minors() -> String {
    const GPUS: u32 = 32;
    let mut text = format!("config {}\nmonitor {}\n", dev::CONFIG, dev::MONITOR);
    for gpu in 0..GPUS {
        for gi in (0_u32..).take(MAX_GIS) {
            text.push_str(&format!("gpu{gpu}/gi{gi}/access {}\n", gi_capability_minor(gpu, gi)));
            for ci in (0_u32..).take(MAX_CIS) {
                text.push_str(&format!(
                    "gpu{gpu}/gi{gi}/ci{ci}/access {}\n",
                    ci_capability_minor(gpu, gi, ci)
                ));
            }
        }
    }
    text
}
