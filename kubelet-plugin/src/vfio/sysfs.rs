//! Reads and writes the kernel's files about PCI devices under `/sys`.
//!
//! A write can stay unanswered for as long as the device is in use, in a sleep that no signal ends. So each
//! write is made on a thread of its own that may stay behind, and an unanswered write is not repeated.

use super::VfioError;
use super::slot::{Function, Group, Write};
use crate::devices::CharDevice;
use aliquot_model::config::{Iommu, IommuBackend};
use aliquot_model::layout::Passthrough;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The device number of `/dev/vfio/vfio`, which the kernel reserves
/// (`Documentation/admin-guide/devices.txt`).
const VFIO: (u32, u32) = (10, 196);
/// The time that a driver may take to start after the kernel looked for it, and the interval between checks.
const STARTS: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(2);
/// The flag in a line of `resource` that marks memory.
const IS_MEMORY: u64 = 0x200;

/// A sysfs. Clones share the unanswered writes.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
    limit: Duration,
    unanswered: Arc<Mutex<BTreeSet<(PathBuf, String)>>>,
}

impl Sysfs {
    /// Uses the sysfs under this root, such as `/sys`; a write is waited for at most `limit`.
    pub fn new(root: &Path, limit: Duration) -> Self {
        Self { root: root.to_owned(), limit, unanswered: Arc::default() }
    }

    /// Returns the root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn pci(&self) -> PathBuf {
        self.root.join("bus/pci")
    }

    fn device(&self, address: &str) -> PathBuf {
        self.pci().join("devices").join(address)
    }

    /// Returns true if vfio-pci is loaded.
    pub fn has_vfio_pci(&self) -> bool {
        self.pci().join("drivers").join(super::slot::VFIO_PCI).is_dir()
    }

    /// Returns true if the kernel has IOMMUFD, and VFIO's devices for it.
    pub fn has_iommu_fd(&self) -> bool {
        self.root.join("class/misc/iommu").exists() && self.root.join("class/vfio-dev").exists()
    }

    /// Returns the IOMMU group of a GPU.
    ///
    /// # Errors
    /// Fails with [`VfioError::Absent`], or with the error of the file system.
    pub fn group(&self, address: &str) -> Result<Group, VfioError> {
        let device = self.device(address);
        if !device.exists() {
            return Err(VfioError::Absent { address: address.to_owned() });
        }
        let link = device.join("iommu_group");
        let Some(number) = link_name(&link)?.and_then(|name| name.parse().ok()) else {
            let alone = function(address, &device)?;
            return Ok(Group { gpu: address.to_owned(), number: None, functions: vec![alone] });
        };
        let members = link.join("devices");
        let mut functions = Vec::new();
        for entry in fs::read_dir(&members).map_err(io_error("list", &members))? {
            let entry = entry.map_err(io_error("list", &members))?;
            functions.push(function(&entry.file_name().to_string_lossy(), &entry.path())?);
        }
        functions.sort_by(|a, b| a.address.cmp(&b.address));
        Ok(Group { gpu: address.to_owned(), number: Some(number), functions })
    }

    /// Returns the facts of a device besides its group.
    pub fn facts(&self, address: &str) -> Passthrough {
        let device = self.device(address);
        let text = |name: &str| fs::read_to_string(device.join(name)).unwrap_or_default();
        Passthrough {
            vendor_id: text("vendor").trim().to_owned(),
            device_id: text("device").trim().to_owned(),
            iommu_fd: self.has_iommu_fd(),
            addressable_bytes: addressable(&text("resource")),
        }
    }

    /// Returns the device nodes that a container needs for a device that is with vfio-pci.
    ///
    /// # Errors
    /// Fails with [`VfioError`] if the kernel does not have them.
    pub fn nodes(&self, address: &str, iommu: Iommu) -> Result<Vec<CharDevice>, VfioError> {
        let own = self.iommu_fd_name(address);
        let name = match (iommu.backend, own) {
            (IommuBackend::Legacy, _) | (IommuBackend::PreferIommuFd, None) => None,
            (IommuBackend::IommuFd, None) => {
                return Err(VfioError::NoIommuFd { address: address.to_owned() });
            }
            (IommuBackend::IommuFd | IommuBackend::PreferIommuFd, Some(name)) => Some(name),
        };
        let mut nodes = Vec::new();
        let char_device =
            |path: &str, (major, minor)| CharDevice { path: format!("/dev/{path}"), major, minor };
        if let Some(name) = name {
            if iommu.api_device {
                nodes.push(char_device("iommu", self.number(Path::new("class/misc/iommu"))?));
            }
            let of_device = self.device(address).join("vfio-dev").join(&name);
            nodes.push(char_device(&format!("vfio/devices/{name}"), self.number(&of_device)?));
            return Ok(nodes);
        }
        let group =
            self.group(address)?.number.ok_or_else(|| VfioError::NoGroup { address: address.to_owned() })?;
        if iommu.api_device {
            nodes.push(char_device("vfio/vfio", VFIO));
        }
        let of_group = self.number(&Path::new("class/vfio").join(group.to_string()))?;
        nodes.push(char_device(&format!("vfio/{group}"), of_group));
        Ok(nodes)
    }

    /// Returns the nodes under `/dev` that a virtual machine has open while it uses the device.
    pub fn names(&self, group: &Group) -> Vec<String> {
        let of_group = group.number.map(|number| format!("vfio/{number}"));
        let own = self.iommu_fd_name(&group.gpu).map(|name| format!("vfio/devices/{name}"));
        of_group.into_iter().chain(own).collect()
    }

    /// Returns the name of the device's VFIO device for IOMMUFD, such as `vfio3`, if the kernel has one.
    fn iommu_fd_name(&self, address: &str) -> Option<String> {
        if !self.has_iommu_fd() {
            return None;
        }
        let entries = fs::read_dir(self.device(address).join("vfio-dev")).ok()?;
        entries.flatten().find_map(|entry| entry.file_name().into_string().ok())
    }

    /// Returns the major and minor number in a device's file `dev`.
    fn number(&self, of: &Path) -> Result<(u32, u32), VfioError> {
        let path = self.root.join(of).join("dev");
        let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
        let numbers = text.trim().split_once(':');
        let parsed = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        parsed.ok_or_else(|| io_error("understand", &path)(io::ErrorKind::InvalidData.into()))
    }

    /// Makes a write, and waits for the kernel's answer.
    ///
    /// # Errors
    /// Fails with [`VfioError::Unanswered`] after the time limit, and for each repeated write until the
    /// kernel has answered the first.
    pub fn write(&self, write: &Write) -> Result<(), VfioError> {
        let (path, text) = match write {
            Write::Keep { address, driver } => {
                (self.device(address).join("driver_override"), driver.unwrap_or("\n").to_owned())
            }
            Write::Unbind { address } => (self.device(address).join("driver/unbind"), address.clone()),
            Write::Probe { address } => (self.pci().join("drivers_probe"), address.clone()),
        };
        let unanswered =
            || VfioError::Unanswered { path: path.clone(), text: text.clone(), limit: self.limit };
        let key = (path.clone(), text.clone());
        if !self.unanswered.lock().insert(key.clone()) {
            return Err(unanswered());
        }
        let (to, answer) = mpsc::channel();
        let all = Arc::clone(&self.unanswered);
        let work = key.clone();
        let spawned = std::thread::Builder::new().name("sysfs".to_owned()).spawn(move || {
            let result = put(&work.0, &work.1);
            all.lock().remove(&work);
            // If it took too long, the receiver is gone.
            let _ = to.send(result);
        });
        if let Err(source) = spawned {
            self.unanswered.lock().remove(&key);
            return Err(io_error("start a thread for", &path)(source));
        }
        match answer.recv_timeout(self.limit) {
            Ok(result) => result.map_err(io_error("write to", &path)),
            Err(_) => Err(unanswered()),
        }
    }

    /// Waits until the effect of a write is there. As a rule it is there when the kernel answers, but a
    /// driver may also be started later (`driver_async_probe`). A function for which there is no driver stays
    /// without.
    ///
    /// # Errors
    /// Fails with [`VfioError::Unanswered`] if a driver does not let go of a function.
    pub fn await_effect(&self, write: &Write) -> Result<(), VfioError> {
        let (address, bound, limit) = match write {
            Write::Keep { .. } => return Ok(()),
            Write::Unbind { address } => (address, false, self.limit),
            Write::Probe { address } => (address, true, self.limit.min(STARTS)),
        };
        let device = self.device(address);
        let started = Instant::now();
        while link_name(&device.join("driver"))?.is_some() != bound {
            if started.elapsed() < limit {
                std::thread::sleep(LOOK);
            } else if bound {
                return Ok(());
            } else {
                let path = device.join("driver/unbind");
                return Err(VfioError::Unanswered { path, text: address.clone(), limit });
            }
        }
        Ok(())
    }

    /// Checks that the kernel has answered all writes about a device.
    ///
    /// # Errors
    /// Fails with [`VfioError::Unanswered`], for the first write that the kernel has not answered.
    pub fn refuse_unanswered(&self, address: &str) -> Result<(), VfioError> {
        let device = self.device(address);
        let all = self.unanswered.lock();
        match all.iter().find(|(path, text)| text == address || path.starts_with(&device)) {
            None => Ok(()),
            Some((path, text)) => {
                Err(VfioError::Unanswered { path: path.clone(), text: text.clone(), limit: self.limit })
            }
        }
    }
}

/// Makes one write call, into a file that exists.
fn put(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).truncate(true).open(path)?.write_all(text.as_bytes())
}

fn function(address: &str, at: &Path) -> Result<Function, VfioError> {
    let text = |name: &str| fs::read_to_string(at.join(name)).unwrap_or_default().trim().to_owned();
    let wanted = Some(text("driver_override")).filter(|text| !text.is_empty() && text != "(null)");
    Ok(Function {
        address: address.to_owned(),
        class: u32::from_str_radix(text("class").trim_start_matches("0x"), 16).unwrap_or(0),
        driver: link_name(&at.join("driver"))?,
        wanted,
        is_virtual: at.join("physfn").exists(),
    })
}

/// Returns the last component of a link's target; `None` if there is no link.
fn link_name(link: &Path) -> Result<Option<String>, VfioError> {
    match fs::read_link(link) {
        Ok(target) => Ok(target.file_name().map(|name| name.to_string_lossy().into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(io_error("read the link", link)(source)),
    }
}

/// Returns the bytes of memory in lines of start, end and flags, rounded up to a power of two.
fn addressable(resource: &str) -> u64 {
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let sizes = resource.lines().filter_map(|line| {
        let mut parts = line.split_whitespace().map(number);
        let (start, end, flags) = (parts.next()??, parts.next()??, parts.next()??);
        (flags & IS_MEMORY != 0 && end > start).then(|| end - start + 1)
    });
    match sizes.fold(0_u64, u64::saturating_add) {
        0 => 0,
        sum => sum.checked_next_power_of_two().unwrap_or(sum),
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VfioError {
    let path = path.to_owned();
    move |source| VfioError::Io { action, path, source }
}

#[cfg(test)]
#[path = "sysfs/tests.rs"]
mod tests;
