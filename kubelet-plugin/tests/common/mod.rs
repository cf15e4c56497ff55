//! A node of fake GPUs in a temporary directory.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of this")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

pub mod cluster;
pub mod container;
pub mod kill;
pub mod supervisor;

use aliquot_cdi::SpecDir;
use aliquot_kubelet_plugin::claim::{Allocated, ClaimRef, Consumed, Request, Settings};
use aliquot_kubelet_plugin::driver::{Driver, Roots};
use aliquot_kubelet_plugin::driver_unload::Wish;
use aliquot_kubelet_plugin::edits::Site;
use aliquot_kubelet_plugin::execute::Machine;
use aliquot_kubelet_plugin::ledger::{Given, Ledger};
use aliquot_kubelet_plugin::mps::Mps;
use aliquot_kubelet_plugin::partitioning::{Partitioning, Shared, Unclaimed};
use aliquot_kubelet_plugin::prepare::{GivenBack, Node};
use aliquot_kubelet_plugin::probe::Probe;
use aliquot_kubelet_plugin::selinux::Labels;
use aliquot_kubelet_plugin::share::RegionStorage;
use aliquot_kubelet_plugin::store::Store;
use aliquot_kubelet_plugin::vfio::Vfio;
use aliquot_model::config::{MigConfig, MpsConfig, ShareConfig, VfioConfig};
use aliquot_model::{DeviceKind, DeviceName, DriverCapabilities};
use aliquot_nvml::fake::FakeGpus;
use aliquot_nvml::{ComputeMode, Gpus};
use jiff::Timestamp;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

pub const DRIVER: &str = "gpu.aliquot.dev";
pub const POOL: &str = "gpu.aliquot.dev/n1";

/// The kernel's list of devices with the driver loaded. No node of them is in any `/dev` of a [`World`].
pub const DEVICES: &str = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n235 nvidia-caps\n\
                           510 nvidia-uvm\n\nBlock devices:\n259 blkext\n";

/// A node's directories and GPUs; [`World::node`] is an agent process on it.
pub struct World {
    pub dir: TempDir,
    pub gpus: FakeGpus,
}

impl World {
    pub fn new(gpus: FakeGpus) -> Self {
        let world = Self { dir: scratch(), gpus };
        let mut minors = String::from("config 1\nmonitor 2\n");
        let mut next = 3;
        for gpu in world.gpus.inventory().unwrap().gpus {
            for instance in 0..15 {
                minors += &format!("gpu{}/gi{instance}/access {next}\n", gpu.minor);
                minors += &format!("gpu{}/gi{instance}/ci0/access {}\n", gpu.minor, next + 1);
                next += 2;
            }
        }
        let caps = world.proc().join("driver/nvidia-caps");
        fs::create_dir_all(&caps).unwrap();
        fs::write(caps.join("mig-minors"), minors).unwrap();
        fs::write(world.proc().join("devices"), DEVICES).unwrap();
        world.boot("boot-1");
        world.install_limiter();
        world.settle();
        world
    }

    /// A checkpoint that has lost nothing.
    pub fn settle(&self) {
        let node = self.node();
        let mut locked = node.store.lock(Duration::from_millis(500)).unwrap();
        let ledger = Ledger { lost: None, ..locked.load().unwrap().ledger };
        locked.save(&ledger).unwrap();
    }

    /// A directory with a limiter and nothing else, for a simulated node to be made in.
    pub fn bare() -> Self {
        let world = Self { dir: scratch(), gpus: FakeGpus::new([]) };
        world.install_limiter();
        world
    }

    fn install_limiter(&self) {
        let limiter = self.limiter().join(env!("CARGO_PKG_VERSION"));
        fs::create_dir_all(&limiter).unwrap();
        for name in ["libaliquot_preload.so", "libaliquot_core.so"] {
            fs::write(limiter.join(name), "").unwrap();
        }
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    pub fn proc(&self) -> PathBuf {
        self.root().join("proc")
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("plugins").join(DRIVER)
    }

    pub fn mps(&self) -> PathBuf {
        self.data().join("mps")
    }

    pub fn cdi(&self) -> PathBuf {
        self.dir.path().join("cdi")
    }

    pub fn limiter(&self) -> PathBuf {
        self.dir.path().join("limiter")
    }

    /// Sets the boot id.
    pub fn boot(&self, id: &str) {
        let path = self.proc().join("sys/kernel/random/boot_id");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{id}\n")).unwrap();
    }

    /// What a reboot does to hardware and transient files.
    pub fn reboot(&self, id: &str) {
        self.gpus.reboot();
        let _ = fs::remove_dir_all(self.cdi());
        self.boot(id);
    }

    pub fn node(&self) -> Node {
        self.node_with(Probe::default())
    }

    pub fn node_with(&self, probe: Probe) -> Node {
        let root = self.root();
        Node {
            store: Store::new(self.data()),
            machine: Machine {
                gpus: Arc::new(self.gpus.clone()),
                cdi: SpecDir::new(self.cdi()),
                driver: Driver::new(Roots { driver: root.clone(), host: root.clone(), proc: self.proc() }),
                site: Site {
                    driver: DRIVER.into(),
                    capabilities: DriverCapabilities::usual(),
                    mounts: Vec::new(),
                    shares_dir: self.data().join("shares"),
                    oci_hook: None,
                },
                regions: RegionStorage::Directory,
                mps: Mps::new(self.mps(), RegionStorage::Directory, Duration::from_secs(20)),
                labels: Labels::default(),
                limiter_dir: self.limiter(),
                data_dir: self.data(),
                proc_root: self.proc(),
                sys_root: root.join("sys"),
                vfio: Vfio::new(false, &root.join("sys"), &self.proc(), None),
                probe,
            },
            slots: 10,
            oversubscribe_at_most: 8 << 30,
            lock_timeout: Duration::from_millis(500),
            report_usage: true,
            device_metadata: false,
            hold_at_most: Duration::from_secs(3600),
            partitioning: Shared::new(Partitioning::OnDemand),
            unclaimed: Unclaimed::Adopt,
            wish: Wish::default(),
            given_back: GivenBack::default(),
        }
    }

    pub fn ledger(&self) -> Ledger {
        self.node().store.lock(Duration::from_millis(500)).unwrap().load().unwrap().ledger
    }

    /// (GPU minor, start, size, has a compute instance) of all instances.
    pub fn instances(&self) -> Vec<(u32, u32, u32, bool)> {
        let inventory = self.gpus.inventory().unwrap();
        let minor = |uuid| inventory.gpus.iter().find(|gpu| &gpu.uuid == uuid).unwrap().minor;
        let mut all: Vec<_> = inventory
            .live
            .iter()
            .map(|mig| {
                (minor(&mig.parent), mig.placement.start, mig.placement.size, mig.compute_instance.is_some())
            })
            .collect();
        all.sort_unstable();
        all
    }

    /// Files that belong to claims: CDI specs, share directories, device metadata and directories of MPS daemons.
    pub fn files(&self) -> Vec<String> {
        let mut names = list(&self.cdi());
        names.extend(list(&self.data().join("shares")));
        names.extend(list(&self.data().join("dra-device-metadata")));
        names.extend(list(&self.mps()).into_iter().filter(|name| !name.starts_with("supervisor.")));
        names
    }

    /// Nothing of any claim is left anywhere.
    pub fn assert_clean(&self) {
        assert_eq!(self.instances(), [], "leaked instances");
        assert_eq!(self.files(), Vec::<String>::new(), "leaked files");
        assert!(self.ledger().claims.is_empty(), "leaked records: {:?}", self.ledger().claims);
        for gpu in self.gpus.inventory().unwrap().gpus {
            let needs_reset =
                matches!(gpu.mig, aliquot_model::MigCapability::Supported { needs_reset: true, .. });
            assert!(needs_reset || !gpu.mig_enabled(), "GPU {} was left in MIG mode", gpu.minor);
            let mode = self.gpus.compute_mode(&gpu.uuid).unwrap();
            assert_eq!(mode, ComputeMode::Default, "GPU {} was left in another compute mode", gpu.minor);
        }
    }
}

/// Gives this thread, and what it starts, mounts of its own. Prints why a test is skipped where that does not go.
pub fn private_mounts(test: &str) -> bool {
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};
    let none = None::<&str>;
    let made = unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none));
    if let Err(errno) = made {
        println!("SKIPPED: {test}: needs the right to mount ({errno})");
    }
    made.is_ok()
}

/// A directory in memory where there is one: these tests sync thousands of files.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn list(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

pub fn request(uid: &str, devices: &[(&str, &str)]) -> Request {
    let devices = devices.iter().map(|(request, device)| {
        let device = DeviceName::parse(device).unwrap();
        let kind = device.kind();
        Allocated {
            request: (*request).to_owned(),
            pool: POOL.into(),
            share_id: kind.shareable().then(|| format!("share-{request}")),
            admin_access: kind == DeviceKind::Admin,
            consumed: kind.shareable().then_some(Consumed {
                memory_bytes: 4 << 30,
                cores_percent: 25,
                slots: 1,
            }),
            settings: match kind {
                DeviceKind::Share | DeviceKind::MigShare => Settings::Share(ShareConfig::default()),
                DeviceKind::Mig => Settings::Mig(MigConfig::default()),
                DeviceKind::Mps => Settings::Mps(MpsConfig::default()),
                DeviceKind::Admin => Settings::Admin,
                DeviceKind::Vfio => Settings::Vfio(VfioConfig::default()),
                _ => Settings::Gpu(None),
            },
            device,
        }
    });
    Request {
        claim: ClaimRef { namespace: "ns".into(), name: format!("claim-{uid}"), uid: uid.into() },
        devices: devices.collect(),
        given: Given::of(uid),
        charged_since: None,
        asked: std::collections::BTreeMap::new(),
        hold: None,
        pod_claim_name: None,
    }
}
