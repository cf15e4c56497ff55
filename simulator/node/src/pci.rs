//! PCI devices that change their driver, as sysfs has them: with no kernel behind the files, a thread does what it would.
//!
//! A write to `unbind` of a driver takes the device from it, one to `drivers_probe` finds a driver for it, and
//! `driver_override` says which. As on a real node a device that somebody uses has no driver while it is taken away, and
//! nothing else can be done with it until nobody uses it any more; and a driver can refuse a device.
//!
//! Not as on a real node: the write itself returns at once, and its effect follows within milliseconds or, while the
//! device is in use, not at all. The files that are written are pipes, so that no write is lost.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::NodeError;
use crate::node::Node;

/// The driver that hands devices to user space.
const VFIO_PCI: &str = "vfio-pci";
/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(1);
/// Major number of `/dev/vfio/<group>` here; a kernel chooses one.
const GROUP_MAJOR: u32 = 243;
/// Major number of `/dev/vfio/devices/vfio<n>` here.
const DEVICE_MAJOR: u32 = 511;

/// A device as the bus has it at first.
#[derive(Debug, Clone)]
pub struct PciDevice {
    /// Address, `0000:17:00.0`.
    pub address: String,
    /// Class code.
    pub class: u32,
    /// IOMMU group, if an IOMMU is on.
    pub group: Option<u32>,
    /// The driver that it is bound to, and that knows it.
    pub driver: Option<&'static str>,
}

/// What the world around the bus is told and asked.
pub trait Hardware: Send + Sync {
    /// A device has this driver now, or none.
    fn changed(&self, address: &str, driver: Option<&str>);
    /// Whether somebody uses a device through its driver, which does not give it away then.
    fn in_use(&self, address: &str) -> bool;
}

/// A bus, as long as it is kept.
pub struct PciBus {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    sys: PathBuf,
    hardware: Box<dyn Hardware>,
    state: Mutex<State>,
    stop: AtomicBool,
}

#[derive(Default)]
struct State {
    devices: BTreeMap<String, PciDevice>,
    /// Devices that are on their way from their driver.
    leaving: Vec<String>,
    /// Devices for which a driver is to be found.
    probing: Vec<String>,
    /// Drivers that refuse every device.
    refusing: Vec<String>,
}

impl PciBus {
    /// Adds these devices under a sysfs root and does what the kernel would from then on. Drivers that are named there
    /// are loaded, and vfio-pci; `iommu_fd` says whether the kernel has IOMMUFD.
    pub fn start(
        sys: &Path,
        devices: impl IntoIterator<Item = PciDevice>,
        iommu_fd: bool,
        hardware: impl Hardware + 'static,
    ) -> io::Result<Self> {
        let devices: BTreeMap<String, PciDevice> =
            devices.into_iter().map(|device| (device.address.clone(), device)).collect();
        let shared = Shared {
            sys: sys.to_owned(),
            hardware: Box::new(hardware),
            state: Mutex::new(State { devices, ..State::default() }),
            stop: AtomicBool::new(false),
        };
        let pipes = shared.lay_out(iommu_fd)?;
        let shared = Arc::new(shared);
        let worker = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("pci".to_owned()).spawn(move || worker.run(pipes))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The driver of a device, as sysfs shows it.
    pub fn driver(&self, address: &str) -> Option<String> {
        self.shared.driver(address)
    }

    /// Has a driver refuse every device, or take them again.
    pub fn refuse(&self, driver: &str, refuses: bool) {
        let mut state = self.shared.state();
        state.refusing.retain(|name| name != driver);
        if refuses {
            state.refusing.push(driver.to_owned());
        }
    }
}

impl Drop for PciBus {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The GPUs of a simulated node.
struct Gpus {
    node: Node,
}

impl Gpus {
    fn index(&self, address: &str) -> Option<usize> {
        self.node.gpus().iter().find(|gpu| gpu.bdf() == address).map(|gpu| gpu.index)
    }
}

impl Hardware for Gpus {
    fn changed(&self, address: &str, driver: Option<&str>) {
        if let Some(index) = self.index(address) {
            let _ = self.node.set_away(index, driver != Some("nvidia"));
        }
    }

    fn in_use(&self, address: &str) -> bool {
        let Some(index) = self.index(address) else { return false };
        let with_nvidia = self.node.settings(index).is_ok_and(|now| !now.away);
        // The driver keeps a GPU in persistence mode open itself. In doubt it stays.
        let persistent = self.node.settings(index).is_ok_and(|now| now.persistence);
        with_nvidia && (persistent || self.node.is_gpu_in_use(index).unwrap_or(true))
    }
}

impl Node {
    /// A bus with the node's GPUs, each in an IOMMU group of its own, under its `root/sys`: they can go to vfio-pci for
    /// as long as it is kept.
    pub fn pci_bus(&self) -> Result<PciBus, NodeError> {
        let device = |gpu: &crate::Gpu| {
            let group = u32::try_from(gpu.index).ok().map(|index| index + 1);
            PciDevice { address: gpu.bdf(), class: 0x03_02_00, group, driver: Some("nvidia") }
        };
        let (sys, gpus) = (self.dir.join("root/sys"), Gpus { node: Self::open(&self.dir)? });
        PciBus::start(&sys, self.gpus().iter().map(device), false, gpus).map_err(|source| NodeError::Io {
            what: "could not make a PCI bus in",
            path: sys,
            source,
        })
    }
}

/// A pipe that the kernel would read, and what it is for.
struct Pipe {
    file: File,
    unbind: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn device(&self, address: &str) -> PathBuf {
        self.sys.join("bus/pci/devices").join(address)
    }

    fn driver_dir(&self, driver: &str) -> PathBuf {
        self.sys.join("bus/pci/drivers").join(driver)
    }

    fn driver(&self, address: &str) -> Option<String> {
        let target = fs::read_link(self.device(address).join("driver")).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    fn lay_out(&self, iommu_fd: bool) -> io::Result<Vec<Pipe>> {
        let state = self.state();
        let mut drivers: Vec<&str> = state.devices.values().filter_map(|device| device.driver).collect();
        drivers.push(VFIO_PCI);
        drivers.sort_unstable();
        drivers.dedup();
        let mut pipes = Vec::new();
        for driver in drivers {
            fs::create_dir_all(self.driver_dir(driver))?;
            pipes.push(pipe(&self.driver_dir(driver).join("unbind"), true)?);
        }
        pipes.push(pipe(&self.sys.join("bus/pci/drivers_probe"), false)?);
        for device in state.devices.values() {
            let at = self.device(&device.address);
            if !at.exists() {
                fs::create_dir_all(&at)?;
                fs::write(at.join("vendor"), "0x10de\n")?;
                fs::write(at.join("device"), "0x2330\n")?;
            }
            fs::write(at.join("class"), format!("{:#08x}\n", device.class))?;
            fs::write(at.join("driver_override"), "(null)\n")?;
            fs::write(at.join("resource"), "0x0 0x1fffffffff 0x14220c\n0x0 0x0 0x0\n")?;
            if let Some(group) = device.group {
                let members = self.sys.join(format!("kernel/iommu_groups/{group}/devices"));
                fs::create_dir_all(&members)?;
                link(&at.canonicalize()?, &members.join(&device.address))?;
                link(&members.join("..").canonicalize()?, &at.join("iommu_group"))?;
            }
            if let Some(driver) = device.driver {
                link(&self.driver_dir(driver), &at.join("driver"))?;
            }
        }
        if iommu_fd {
            for (of, number) in [("class/misc/iommu", "10:123"), ("class/vfio-dev", "")] {
                fs::create_dir_all(self.sys.join(of))?;
                fs::write(self.sys.join(of).join("dev"), number)?;
            }
        }
        Ok(pipes)
    }

    fn run(&self, mut pipes: Vec<Pipe>) {
        while !self.stop.load(Ordering::SeqCst) {
            for pipe in &mut pipes {
                let mut buffer = [0; 256];
                let Ok(length @ 1..) = pipe.file.read(&mut buffer) else { continue };
                let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned();
                let mut state = self.state();
                // Several writes may have come together: addresses have no end of their own.
                let named: Vec<String> =
                    state.devices.keys().filter(|address| text.contains(address.as_str())).cloned().collect();
                for address in named {
                    if pipe.unbind {
                        // The link goes before the driver's own work begins.
                        let _ = fs::remove_file(self.device(&address).join("driver"));
                        state.leaving.push(address);
                    } else {
                        state.probing.push(address);
                    }
                }
            }
            self.work();
            std::thread::sleep(LOOK);
        }
    }

    fn work(&self) {
        let mut state = self.state();
        let (stay, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut state.leaving).into_iter().partition(|address| self.hardware.in_use(address));
        state.leaving = stay;
        for address in gone {
            self.show_nodes(&state, &address, false);
            self.hardware.changed(&address, None);
        }
        let State { leaving, probing, .. } = &mut *state;
        let (wait, ready): (Vec<_>, Vec<_>) =
            std::mem::take(probing).into_iter().partition(|address| leaving.contains(address));
        state.probing = wait;
        for address in ready {
            if self.driver(&address).is_some() {
                continue;
            }
            let kept = fs::read_to_string(self.device(&address).join("driver_override")).unwrap_or_default();
            let kept = kept.trim();
            let own = state.devices.get(&address).and_then(|device| device.driver).map(str::to_owned);
            let found = if kept.is_empty() || kept == "(null)" { own } else { Some(kept.to_owned()) };
            let Some(driver) = found.filter(|driver| !state.refusing.contains(driver)) else { continue };
            if !self.driver_dir(&driver).is_dir() {
                continue;
            }
            // What the device is for is there before the link.
            self.show_nodes(&state, &address, driver == VFIO_PCI);
            self.hardware.changed(&address, Some(&driver));
            let _ = link(&self.driver_dir(&driver), &self.device(&address).join("driver"));
        }
    }

    /// What vfio-pci has in sysfs of a device.
    fn show_nodes(&self, state: &State, address: &str, shown: bool) {
        let Some(group) = state.devices.get(address).and_then(|device| device.group) else { return };
        let of_group = self.sys.join(format!("class/vfio/{group}"));
        let of_device = self.device(address).join("vfio-dev");
        if !shown {
            let _ = fs::remove_dir_all(of_group);
            let _ = fs::remove_dir_all(of_device);
            return;
        }
        let put = |dir: &Path, number: String| {
            let _ = fs::create_dir_all(dir);
            let _ = fs::write(dir.join("dev"), number);
        };
        put(&of_group, format!("{GROUP_MAJOR}:{group}\n"));
        if self.sys.join("class/vfio-dev").exists() {
            put(&of_device.join(format!("vfio{group}")), format!("{DEVICE_MAJOR}:{group}\n"));
        }
    }
}

fn link(to: &Path, at: &Path) -> io::Result<()> {
    let _ = fs::remove_file(at);
    symlink(to, at)
}

#[allow(unsafe_code)]
fn pipe(path: &Path, unbind: bool) -> io::Result<Pipe> {
    let _ = fs::remove_file(path);
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `name` is a string that ends with a zero, and lives for the call.
    if unsafe { libc::mkfifo(name.as_ptr(), 0o600) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Open for writing as well, so that whoever writes never waits for a reader.
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    Ok(Pipe { file, unbind })
}
