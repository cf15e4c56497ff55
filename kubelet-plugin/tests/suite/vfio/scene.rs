//! A node with two GPUs on a bus. The first has a group of its own, with its sound; the second shares one with a
//! network card.

use super::common::World;
use aliquot_kubelet_plugin::prepare::Node;
use aliquot_kubelet_plugin::probe::Probe;
use aliquot_kubelet_plugin::vfio::Vfio;
use aliquot_kubelet_plugin::vfio::sysfs::Sysfs;
use aliquot_model::{GpuInfo, GpuUuid};
use aliquot_nvml::fake::{FakeGpus, h100_80};
use aliquot_nvml::{Gpus, Opened, Pauses, Reopening};
use aliquot_sim_node::{Hardware, PciBus, PciDevice};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(crate) const GPU: &str = "0000:17:00.0";
pub(crate) const SOUND: &str = "0000:17:00.1";
const OTHER: &str = "0000:2a:00.0";
pub(crate) const NEIGHBOUR: &str = "0000:2b:00.0";

/// What a test may wait for the kernel.
const LIMIT: Duration = Duration::from_secs(20);

pub(crate) struct Scene {
    pub(crate) world: World,
    pub(crate) bus: PciBus,
    library: Arc<Reopening>,
    in_use: Arc<AtomicBool>,
}

/// The driver's side: it lists what it has, and gives away only what nobody has open.
struct Driver {
    gpus: FakeGpus,
    library: Weak<Reopening>,
    in_use: Arc<AtomicBool>,
}

impl Hardware for Driver {
    fn changed(&self, address: &str, driver: Option<&str>) {
        let uuid = match address {
            GPU => h100_80(0).uuid,
            OTHER => h100_80(1).uuid,
            _ => return,
        };
        match driver {
            Some("nvidia") => self.gpus.bring_back(&uuid),
            _ => self.gpus.take_away(&uuid),
        }
    }

    /// NVML has every GPU open while it is.
    fn in_use(&self, address: &str) -> bool {
        let open = self.library.upgrade().is_some_and(|library| library.is_held());
        let with_nvidia = self.gpus.inventory().is_ok_and(|inventory| {
            inventory.gpus.iter().any(|gpu| gpu.pci_bus_id.as_deref() == Some(address))
        });
        let persistent = self.gpus.inventory().is_ok_and(|inventory| {
            let mut gpus = inventory.gpus.iter().filter(|gpu| gpu.pci_bus_id.as_deref() == Some(address));
            gpus.any(|gpu| self.gpus.persistence_mode(&gpu.uuid) == Ok(true))
        });
        with_nvidia && (open || persistent || self.in_use.load(Ordering::SeqCst))
    }
}

fn device(address: &str, class: u32, group: u32, driver: &'static str) -> PciDevice {
    PciDevice { address: address.into(), class, group: Some(group), driver: Some(driver) }
}

fn bus(sys: &Path, driver: Driver) -> PciBus {
    let devices = [
        device(GPU, 0x03_02_00, 15, "nvidia"),
        device(SOUND, 0x04_03_00, 15, "snd_hda_intel"),
        device(OTHER, 0x03_02_00, 16, "nvidia"),
        device(NEIGHBOUR, 0x02_00_00, 16, "mlx5_core"),
    ];
    PciBus::start(sys, devices, true, driver).unwrap()
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    /// With something changed of each GPU.
    pub(crate) fn with(change: impl Fn(&mut GpuInfo)) -> Self {
        let at = |minor, address: &str| {
            let mut info = h100_80(minor);
            info.pci_bus_id = Some(address.to_owned());
            change(&mut info);
            info
        };
        let world = World::new(FakeGpus::new([at(0, GPU), at(1, OTHER)]));
        let open = {
            let gpus = world.gpus.clone();
            move || Ok(Opened { gpus: Arc::new(gpus.clone()), held: Box::new(|| false) })
        };
        let library = Arc::new(Reopening::new(open().unwrap(), Pauses::default(), open));
        let in_use = Arc::new(AtomicBool::new(false));
        let (sys, driver) = (world.root().join("sys"), driver(&world, &library, &in_use));
        let bus = bus(&sys, driver);
        Self { world, bus, library, in_use }
    }

    pub(crate) fn sys(&self) -> PathBuf {
        self.world.root().join("sys")
    }

    pub(crate) fn node(&self) -> Node {
        self.node_with(Probe::default())
    }

    pub(crate) fn node_with(&self, probe: Probe) -> Node {
        let mut node = self.world.node_with(probe);
        node.machine.gpus = Arc::clone(&self.library) as Arc<dyn Gpus>;
        node.machine.vfio = Vfio {
            on: true,
            on_nvswitch: false,
            sysfs: Sysfs::new(&self.sys(), LIMIT),
            proc_root: self.world.proc(),
            library: Some(Arc::clone(&self.library)),
        };
        node
    }

    /// Of the first GPU, its sound and the second GPU.
    pub(crate) fn drivers(&self) -> [Option<String>; 3] {
        [GPU, SOUND, OTHER].map(|address| self.bus.driver(address))
    }

    /// Whether something that is in no list keeps the driver from giving a GPU away.
    pub(crate) fn set_in_use(&self, in_use: bool) {
        self.in_use.store(in_use, Ordering::SeqCst);
    }

    /// Has the driver keep the first GPU initialised while nothing uses it.
    pub(crate) fn persist(&self) {
        self.world.gpus.set_persistence_mode(&Self::gpu(), true).unwrap();
    }

    /// Whether the driver keeps the first GPU initialised.
    pub(crate) fn is_persistent(&self) -> bool {
        self.world.gpus.persistence_mode(&Self::gpu()).unwrap()
    }

    /// The first GPU.
    pub(crate) fn gpu() -> GpuUuid {
        h100_80(0).uuid
    }

    /// All copies of the checkpoint are gone.
    pub(crate) fn lose_checkpoint(&self) {
        for name in fs::read_dir(self.world.data()).unwrap() {
            let path = name.unwrap().path();
            if path.is_file() {
                fs::remove_file(path).unwrap();
            }
        }
    }

    /// A process that has a device node open; it ends when its folder goes.
    pub(crate) fn open(&self, pid: &str, name: &str, node: &str) -> PathBuf {
        let process = self.world.proc().join(pid);
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::write(process.join("comm"), format!("{name}\n")).unwrap();
        symlink(node, process.join("fd/7")).unwrap();
        process
    }

    pub(crate) fn reboot(&mut self) {
        self.world.reboot("boot-next");
        self.world.boot(&format!("boot-{:?}", std::time::Instant::now()));
        fs::remove_dir_all(self.sys()).unwrap();
        let driver = driver(&self.world, &self.library, &self.in_use);
        self.bus = bus(&self.sys(), driver);
    }

    /// Everything is as it was before any claim.
    pub(crate) fn assert_clean(&self) {
        self.world.assert_clean();
        let own = [Some("nvidia".into()), Some("snd_hda_intel".into()), Some("nvidia".into())];
        assert_eq!(self.drivers(), own, "drivers");
        for address in [GPU, SOUND] {
            let kept = self.sys().join("bus/pci/devices").join(address).join("driver_override");
            let kept = fs::read_to_string(kept).unwrap();
            assert!(matches!(kept.trim(), "" | "(null)"), "{address} is kept for {kept}");
        }
        assert_eq!(self.world.gpus.inventory().unwrap().gpus.len(), 2, "NVML lists both GPUs");
        let notes = self.world.data().join("vfio");
        let notes: Vec<_> =
            fs::read_dir(notes).into_iter().flatten().map(|note| note.unwrap().path()).collect();
        assert_eq!(notes, Vec::<PathBuf>::new(), "leaked notes");
        assert!(self.library.inventory().is_ok(), "the library is open");
    }
}

fn driver(world: &World, library: &Arc<Reopening>, in_use: &Arc<AtomicBool>) -> Driver {
    Driver { gpus: world.gpus.clone(), library: Arc::downgrade(library), in_use: Arc::clone(in_use) }
}
