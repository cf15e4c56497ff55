//! A full disk under the agent's data directory: nothing new is prepared, everything is given back.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::prepare::PrepareError;
use aliquot_nvml::fake::{FakeGpus, h100_80};
use common::{World, now, request};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rstest::rstest;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;

/// A small file system of its own at the data directory.
struct Disk {
    path: PathBuf,
    filler: Option<File>,
    empty: usize,
}

impl Disk {
    /// Mounts it; says why not where this user may not.
    fn mount(world: &World, options: &str) -> Option<Self> {
        let path = world.data();
        fs::create_dir_all(&path).unwrap();
        let mounted = mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), Some(options));
        if let Err(errno) = mounted {
            eprintln!("SKIPPED: cannot mount a small file system: {errno}");
            return None;
        }
        Some(Self { path, filler: None, empty: 0 })
    }

    /// Takes every byte that is free.
    fn fill(&mut self) {
        let filler = self.path.join("filler");
        let file = self
            .filler
            .get_or_insert_with(|| OpenOptions::new().append(true).create(true).open(filler).unwrap());
        for size in [64 << 10, 4096, 1] {
            let chunk = vec![b'x'; size];
            while file.write_all(&chunk).is_ok() {}
        }
    }

    /// Gives back that many bytes.
    fn release(&mut self, bytes: u64) {
        let file = self.filler.as_ref().unwrap();
        let length = file.metadata().unwrap().len();
        file.set_len(length.saturating_sub(bytes)).unwrap();
    }

    /// Takes every inode that is free.
    fn fill_inodes(&mut self) {
        let dir = self.path.join("many");
        if self.empty == 0 {
            fs::create_dir(&dir).unwrap();
        }
        loop {
            match File::create_new(dir.join(self.empty.to_string())) {
                Ok(_) => self.empty += 1,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
                    return;
                }
            }
        }
    }

    /// Frees everything again.
    fn clear(&mut self) {
        self.filler = None;
        let _ = fs::remove_file(self.path.join("filler"));
        let _ = fs::remove_dir_all(self.path.join("many"));
        self.empty = 0;
    }

    /// What the agent has there, without what fills the disk and without the trash, which is emptied in the background.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.path).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != "filler" && name != "many" && name != "trash");
        names.sort();
        names
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.filler = None;
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}

#[derive(Debug, Clone, Copy)]
enum Lacks {
    Space,
    Inodes,
}

impl Disk {
    fn exhaust(&mut self, lacks: Lacks) {
        match lacks {
            Lacks::Space => self.fill(),
            Lacks::Inodes => self.fill_inodes(),
        }
    }
}

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0), h100_80(1), h100_80(2), h100_80(3)]))
}

/// A claim of every kind.
fn tenants() -> Vec<Request> {
    vec![
        request("partitions", &[("a", "gpu-0-mig-1g10gb-19-6"), ("b", "gpu-0-mig-3g40gb-9-0")]),
        request("share", &[("s", "gpu-1-share")]),
        request("neighbour", &[("s", "gpu-1-share")]),
        request("whole", &[("g", "gpu-2")]),
    ]
}

fn late() -> Request {
    request("late", &[("a", "gpu-3-mig-1g10gb-19-6"), ("s", "gpu-1-share")])
}

const SMALL: &str = "size=8m,nr_inodes=200";

#[rstest]
#[case::of_space(Lacks::Space, false)]
#[case::of_space_and_a_restart(Lacks::Space, true)]
#[case::of_inodes(Lacks::Inodes, false)]
#[case::of_inodes_and_a_restart(Lacks::Inodes, true)]
fn a_full_disk_does_not_stop_an_unprepare(#[case] lacks: Lacks, #[case] restart: bool) {
    let world = world();
    let Some(mut disk) = Disk::mount(&world, SMALL) else { return };
    world.node().recover().unwrap();
    for tenant in tenants() {
        world.node().prepare(&tenant, false, now()).unwrap();
    }
    let (files, instances) = (world.files(), world.instances());
    disk.exhaust(lacks);

    let ours = disk.names();
    let refused = world.node().prepare(&late(), false, now()).unwrap_err();
    assert!(matches!(refused, PrepareError::Store(_) | PrepareError::Step { .. }), "{refused:?}");
    let text = refused.to_string();
    let path = world.data().display().to_string();
    assert!(text.contains("No space left") && text.contains("df -h") && text.contains(&path), "{text}");
    assert_eq!((world.files(), world.instances()), (files, instances), "a refused claim left something");
    assert_eq!(disk.names(), ours, "a refused claim left something");
    assert!(!world.ledger().claims.contains_key("late"));

    for tenant in tenants() {
        if restart {
            let recovery = world.node().recover().unwrap();
            assert!(recovery.failed.is_empty() && recovery.damaged.is_empty(), "{recovery:?}");
        }
        assert!(world.node().unprepare(&tenant.claim.uid).unwrap(), "{}", tenant.claim.uid);
        // Whatever it gave back is taken at once.
        disk.exhaust(lacks);
    }
    world.assert_clean();
    assert_eq!(disk.names(), ours);

    // And it was the disk alone.
    disk.clear();
    world.node().prepare(&late(), false, now()).unwrap();
    world.node().unprepare("late").unwrap();
    world.assert_clean();
}

/// An unprepare that the hardware refuses, over and over, takes nothing from the reserve.
#[test]
fn retries_do_not_use_the_reserve_up() {
    let world = world();
    let Some(mut disk) = Disk::mount(&world, SMALL) else { return };
    for tenant in tenants() {
        world.node().prepare(&tenant, false, now()).unwrap();
    }
    disk.fill();
    let sizes = || {
        ["checkpoint.json", "checkpoint.copy.json", "checkpoint.reserve"]
            .map(|name| fs::metadata(world.data().join(name)).unwrap().len())
    };
    let before = sizes();
    use aliquot_nvml::{GpuProcess, Gpus, ProcessKind};
    let gpu = h100_80(0).uuid;
    let instance = world.gpus.live_migs(&gpu).unwrap()[0].gpu_instance;
    let process = GpuProcess {
        pid: 4711,
        name: None,
        kind: ProcessKind::Compute,
        memory_bytes: None,
        gpu_instance: Some(instance),
        compute_instance: Some(0),
    };
    world.gpus.start_process(&gpu, process);
    for _ in 0..40 {
        let error = world.node().unprepare("partitions").unwrap_err().to_string();
        assert!(error.contains("4711"), "{error}");
        disk.fill();
    }
    assert_eq!(sizes(), before);
    world.gpus.stop_process(4711);
    for tenant in tenants() {
        world.node().unprepare(&tenant.claim.uid).unwrap();
    }
    world.assert_clean();
}

/// With every amount of free space: each write of a prepare is the one that fails once.
#[test]
fn a_prepare_that_any_write_of_fails_leaves_nothing() {
    let world = world();
    let Some(mut disk) = Disk::mount(&world, SMALL) else { return };
    for tenant in tenants() {
        world.node().prepare(&tenant, false, now()).unwrap();
    }
    let (files, instances) = (world.files(), world.instances());
    let (mut reasons, mut pages) = (std::collections::BTreeSet::new(), 0);
    loop {
        // As the agent does in the background.
        let _ = fs::remove_dir_all(world.data().join("trash"));
        disk.fill();
        disk.release(pages * 4096);
        let ours = disk.names();
        match world.node().prepare(&late(), false, now()) {
            Ok(_) => break,
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("No space left"), "{pages} pages: {text}");
                reasons.insert(text);
            }
        }
        assert_eq!((world.files(), world.instances()), (files.clone(), instances.clone()), "{pages} pages");
        assert_eq!(disk.names(), ours, "{pages} pages");
        assert!(!world.ledger().claims.contains_key("late"), "{pages} pages");
        pages += 1;
    }
    for file in ["checkpoint.tmp", "region/region"] {
        assert!(reasons.iter().any(|text| text.contains(file)), "no write of {file} failed: {reasons:#?}");
    }
    // It was prepared with the last free pages; all of it goes all the same.
    disk.fill();
    for uid in tenants().iter().map(|tenant| tenant.claim.uid.as_str()).chain(["late"]) {
        assert!(world.node().unprepare(uid).unwrap(), "{uid}");
        disk.fill();
    }
    world.assert_clean();
}
