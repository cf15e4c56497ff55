//! SELinux labels of what containers find of ours. A label is an attribute of a file and a kernel without SELinux keeps
//! it as well, so this needs root and nothing else; what a policy makes of it is played by `fake`.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;
#[path = "../../../hook/selinux/tests/fake/mod.rs"]
mod fake;

use aliquot_kubelet_plugin::audit::measured;
use aliquot_kubelet_plugin::driver::{Driver, Roots};
use aliquot_kubelet_plugin::metadata;
use aliquot_kubelet_plugin::mps::Mps;
use aliquot_kubelet_plugin::prepare::Node;
use aliquot_kubelet_plugin::selinux::{self, Labelling, Labels, Pair};
use aliquot_kubelet_plugin::share::RegionStorage;
use aliquot_model::DriverCapabilities;
use aliquot_nvml::fake::{FakeGpus, h100_80};
use aliquot_selinux::{Label, Policy};
use common::supervisor::Supervisor;
use common::{DRIVER, World, now, private_mounts, request};
use fake::Selinuxfs;
use nix::mount::{MsFlags, mount};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0)]))
}

fn pair() -> Pair {
    Pair { read_only: selinux::READ_ONLY.parse().unwrap(), writable: selinux::WRITABLE.parse().unwrap() }
}

/// The world's node with SELinux on.
fn labelling(world: &World) -> Node {
    let mut node = world.node();
    node.machine.labels = Labels::of(pair());
    node
}

fn may_label(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIPPED: {test}: only root may give labels");
    }
    root
}

fn label_of(path: &Path) -> Option<Label> {
    aliquot_selinux::of(path).unwrap()
}

/// What of ours a claim's containers have mounted, directories with what is in them, and whether they may write it.
fn mounted(world: &World, uid: &str) -> BTreeMap<PathBuf, bool> {
    let spec = world.node().machine.cdi.read(&format!("{DRIVER}-claim-{uid}")).unwrap().unwrap();
    let mut found = BTreeMap::new();
    for mount in spec.devices.iter().flat_map(|device| &device.container_edits.mounts) {
        let (path, writable) = (PathBuf::from(&mount.host_path), mount.options.iter().any(|o| o == "rw"));
        for entry in fs::read_dir(&path).into_iter().flatten() {
            found.insert(entry.unwrap().path(), writable);
        }
        found.insert(path, writable);
    }
    found
}

/// Those that have not the label that they should have.
fn unlabelled(world: &World, uid: &str) -> Vec<PathBuf> {
    let Pair { read_only, writable } = pair();
    let wrong = |(path, writes): &(PathBuf, bool)| {
        label_of(path).as_ref() != Some(if *writes { &writable } else { &read_only })
    };
    mounted(world, uid).into_iter().filter(wrong).map(|(path, _)| path).collect()
}

#[test]
fn all_that_containers_of_a_share_mount_of_ours_is_labelled_before_it_is_prepared() {
    if !may_label("labels of a share") {
        return;
    }
    let world = world();
    labelling(&world).prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap();
    let all = mounted(&world, "c-1");
    // Stub, core, their list, the quota's directory with quota and grant, and the region.
    assert_eq!((all.len(), all.values().filter(|writable| **writable).count()), (7, 1), "{all:?}");
    assert_eq!(unlabelled(&world, "c-1"), [] as [PathBuf; 0]);
}

#[test]
fn device_metadata_is_labelled_as_it_is_made_and_at_a_start() {
    if !may_label("labels of device metadata") {
        return;
    }
    let world = world();
    let node = Node { device_metadata: true, ..labelling(&world) };
    node.prepare(&request("c-1", &[("g", "gpu-0")]), false, now()).unwrap();
    let found = metadata::files::all(&world.data());
    let [file] = found.as_slice() else { panic!("one file: {found:?}") };
    assert_eq!(label_of(file), Some(pair().read_only));
    aliquot_selinux::set(file, &pair().writable).unwrap();
    assert!(node.machine.label_existing().is_empty());
    assert_eq!(label_of(file), Some(pair().read_only));
}

#[test]
fn labels_are_given_where_selinux_is_on_unless_they_are_never_to_be() {
    let proc = tempfile::tempdir().unwrap();
    let chosen = |labelling| Labels::chosen(labelling, pair(), proc.path()).ok();
    assert_eq!(chosen(Labelling::Auto), None, "it cannot be told");
    fs::write(proc.path().join("filesystems"), "nodev\tsysfs\n").unwrap();
    assert_eq!(chosen(Labelling::Auto), Some(Labels::default()));
    fs::write(proc.path().join("filesystems"), "nodev\tselinuxfs\n").unwrap();
    let attr = proc.path().join("thread-self/attr");
    fs::create_dir_all(&attr).unwrap();
    fs::write(attr.join("current"), "system_u:system_r:spc_t:s0\0").unwrap();
    assert_eq!(chosen(Labelling::Auto), Some(Labels::of(pair())));
    assert_eq!(chosen(Labelling::Never), Some(Labels::default()));
}

#[test]
fn without_selinux_nothing_is_labelled() {
    let world = world();
    world.node().prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap();
    let all = mounted(&world, "c-1");
    assert!(all.len() == 7 && all.keys().all(|path| label_of(path).is_none()), "{all:?}");
}

#[test]
fn what_replaces_a_file_of_a_share_has_its_label() {
    if !may_label("labels of replaced files") {
        return;
    }
    let world = world();
    let node = labelling(&world);
    let prepare = |uid: &str, cores| {
        let mut request = request(uid, &[("s", "gpu-0-share")]);
        request.devices[0].consumed.as_mut().unwrap().cores_percent = cores;
        node.prepare(&request, false, now()).unwrap();
    };
    prepare("c-1", 0);
    let quota = mounted(&world, "c-1").into_keys().find(|path| path.ends_with("quota/quota")).unwrap();
    let before = fs::read(&quota).unwrap();
    prepare("c-2", 30);
    assert_ne!(fs::read(&quota).unwrap(), before, "it is capped now");
    let id = quota.ancestors().nth(2).unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    let machine = &node.machine;
    measured::write(
        &machine.site.shares_dir,
        &machine.labels,
        &BTreeMap::from([(id, Vec::new())]),
        1,
        Duration::from_secs(1),
    );
    assert_eq!(mounted(&world, "c-1").len(), 8, "what was measured is told");
    assert_eq!(unlabelled(&world, "c-1"), [] as [PathBuf; 0]);
}

#[test]
fn what_an_agent_without_labels_left_is_labelled_at_the_next_start() {
    if !may_label("labels of what is there") {
        return;
    }
    let world = world();
    world.node().prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap();
    assert_eq!(unlabelled(&world, "c-1").len(), 7);
    let node = labelling(&world);
    assert!(node.recover().unwrap().unlabelled.is_empty());
    assert_eq!(unlabelled(&world, "c-1"), [] as [PathBuf; 0]);
}

#[test]
fn a_share_whose_files_cannot_be_labelled_is_not_prepared() {
    if !private_mounts("a share whose files cannot be labelled") {
        return;
    }
    let world = world();
    let node = labelling(&world);
    let (limiter, none) = (world.limiter(), None::<&str>);
    mount(Some(&limiter), &limiter, none, MsFlags::MS_BIND, none).unwrap();
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(none, &limiter, none, read_only, none).unwrap();
    let error = node.prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap_err().to_string();
    for part in ["libaliquot_preload.so the SELinux label system_u:object_r:container_ro_file_t:s0", "spc_t"]
    {
        assert!(error.contains(part), "{error}");
    }
    world.assert_clean();
    let failed: Vec<String> = node.recover().unwrap().unlabelled.iter().map(ToString::to_string).collect();
    assert_eq!(failed.len(), 2, "{failed:?}");
    // What has its label needs no right to give it.
    mount(none, &limiter, none, MsFlags::MS_BIND | MsFlags::MS_REMOUNT, none).unwrap();
    assert!(node.recover().unwrap().unlabelled.is_empty());
    mount(none, &limiter, none, read_only, none).unwrap();
    node.prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap();
}

#[test]
fn a_whole_gpu_needs_no_label() {
    if !private_mounts("a whole GPU where nothing can be labelled") {
        return;
    }
    let (world, none) = (world(), None::<&str>);
    let dir = world.limiter();
    mount(Some(&dir), &dir, none, MsFlags::MS_BIND, none).unwrap();
    mount(none, &dir, none, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, none).unwrap();
    labelling(&world).prepare(&request("c-1", &[("g", "gpu-0")]), false, now()).unwrap();
}

/// A kernel without SELinux does not know the option, so that it refuses the mount; that it is asked is what is tested.
#[test]
fn a_regions_file_system_is_asked_to_have_the_label() {
    if !private_mounts("a region's file system with a label") {
        return;
    }
    let world = world();
    let mut node = labelling(&world);
    node.machine.regions = RegionStorage::Tmpfs;
    let prepared = node.prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now());
    if aliquot_selinux::is_on(Path::new("/proc")).unwrap() {
        prepared.unwrap();
        return assert_eq!(unlabelled(&world, "c-1"), [] as [PathBuf; 0]);
    }
    let error = prepared.unwrap_err().to_string();
    let options = "mode=0755,context=\"system_u:object_r:container_file_t:s0\")";
    assert!(error.contains(options) && error.contains("--selinux-writable-label"), "{error}");
    world.assert_clean();
}

#[test]
fn what_containers_share_with_an_mps_daemon_is_asked_to_have_the_label() {
    if !private_mounts("file systems of an MPS daemon with a label") {
        return;
    }
    let world = world();
    let _supervisor = Supervisor::start(world.mps());
    let mut node = labelling(&world);
    node.machine.mps = Mps::new(world.mps(), RegionStorage::Tmpfs, Duration::from_secs(20));
    let prepared = node.prepare(&request("c-1", &[("m", "gpu-0-mps")]), false, now());
    if aliquot_selinux::is_on(Path::new("/proc")).unwrap() {
        return assert!(prepared.is_ok(), "{prepared:?}");
    }
    let error = prepared.unwrap_err().to_string();
    let options = "mode=1777,context=\"system_u:object_r:container_file_t:s0\")";
    assert!(error.contains(options) && error.contains("--selinux-writable-label"), "{error}");
    world.assert_clean();
}

#[test]
fn files_of_the_driver_that_containers_may_not_use_are_found_and_left_as_they_are() {
    if !may_label("labels of the driver's files") {
        return;
    }
    let world = world();
    let version = world.proc().join("driver/nvidia/version");
    fs::create_dir_all(version.parent().unwrap()).unwrap();
    fs::write(version, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Wed Jun 11 2025\n")
        .unwrap();
    let place = |path: &str, label: &str| {
        let path = world.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        aliquot_selinux::set(&path, &label.parse().unwrap()).unwrap();
    };
    place("usr/lib64/libcuda.so.535.261.03", "system_u:object_r:usr_t:s0");
    place("usr/lib64/libnvidia-ml.so.535.261.03", "system_u:object_r:lib_t:s0");
    place("usr/bin/nvidia-smi", "system_u:object_r:usr_t:s0");
    place("etc/OpenCL/vendors/nvidia.icd", "system_u:object_r:usr_t:s0");
    let root = world.root();
    // On the host it all lies elsewhere.
    let driver = Driver::new(Roots { driver: root, host: "/opt/driver".into(), proc: world.proc() });
    let selinuxfs = Selinuxfs::new(|question| match question {
        // What is `usr_t` may be read, and only `lib_t` may be executed.
        "system_u:system_r:container_t:s0 system_u:object_r:usr_t:s0 6" => "f ffffffff 0 ffffffff 1 0",
        "system_u:system_r:container_t:s0 system_u:object_r:lib_t:s0 6" => "1f ffffffff 0 ffffffff 1 0",
        _ => "no such question",
    });
    selinuxfs.class("file", 6, &["getattr", "open", "read", "map", "execute"]);
    let policy = Policy::new(selinuxfs.path());
    let container = selinux::CONTAINER.parse().unwrap();
    let denied = selinux::denied(&policy, &container, &driver, &DriverCapabilities::usual()).unwrap();
    let paths: Vec<&str> = denied.iter().map(|denied| denied.path.to_str().unwrap()).collect();
    assert_eq!(paths, ["/opt/driver/usr/bin/nvidia-smi", "/opt/driver/usr/lib64/libcuda.so.535.261.03"]);
    assert_eq!(
        (denied[0].label.as_str(), &denied[0].permissions),
        ("system_u:object_r:usr_t:s0", &vec!["execute"])
    );
    let note = aliquot_kubelet_plugin::notice::driver_denied(&container, &denied);
    assert!(note.contains("execute /opt/driver/usr/bin/nvidia-smi") && note.contains("(1 more)"), "{note}");
    assert!(note.len() < 1000, "an event has no room for it");
    let library = world.root().join("usr/lib64/libcuda.so.535.261.03");
    assert_eq!(label_of(&library).unwrap().as_str(), "system_u:object_r:usr_t:s0");
}
