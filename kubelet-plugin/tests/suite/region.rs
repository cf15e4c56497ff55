//! What a container can do with the one file of ours that it writes.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::prepare::Node;
use aliquot_kubelet_plugin::share::RegionStorage;
use aliquot_nvml::fake::{FakeGpus, h100_80, until_killed};
use aliquot_quota::REGION_FILE_SIZE;
use common::container::{Bundle, edits, runcs, with_limiter};
use common::kill::killer;
use common::{DRIVER, World, now, private_mounts, request};
use nix::errno::Errno;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

fn world() -> World {
    World::new(FakeGpus::new([h100_80(0)]))
}

/// The world's node with a file system for each region.
fn bounded(mut node: Node) -> Node {
    node.machine.regions = RegionStorage::Tmpfs;
    node
}

fn prepare(node: &Node, uid: &str) {
    node.prepare(&request(uid, &[("s", "gpu-0-share")]), false, now()).unwrap();
}

/// Directory of the only share's region.
fn region_dir(world: &World) -> PathBuf {
    let shares = world.data().join("shares");
    fs::read_dir(shares).unwrap().next().unwrap().unwrap().path().join("region")
}

/// Mount points under a world's directories.
fn mounts(world: &World) -> Vec<String> {
    let all = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let own = world.dir.path().display().to_string();
    let points = all.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|point| point.starts_with(&own)).map(str::to_owned).collect()
}

/// Bytes that the region's file system can have, and has.
fn size(dir: &Path) -> (u64, u64) {
    let found = nix::sys::statvfs::statvfs(dir).unwrap();
    let block = found.fragment_size();
    (found.blocks() * block, (found.blocks() - found.blocks_free()) * block)
}

/// Mounts and container path of the share's region in the claim's spec.
fn region_mount(world: &World, uid: &str) -> (PathBuf, String) {
    let spec = world.node().machine.cdi.read(&format!("{DRIVER}-claim-{uid}")).unwrap().unwrap();
    let mut mounts = spec.devices.iter().flat_map(|device| &device.container_edits.mounts);
    let mount = mounts.find(|mount| mount.container_path.starts_with("/run/aliquot/region")).unwrap();
    (mount.host_path.clone().into(), mount.container_path.clone())
}

#[test]
fn a_region_is_one_file_of_fixed_size() {
    if !private_mounts("the size of a region") {
        return;
    }
    let (world, limit) = (world(), REGION_FILE_SIZE as u64);
    prepare(&bounded(world.node()), "c-1");
    let dir = region_dir(&world);
    assert_eq!(size(&dir), (limit, limit), "all of it is there from the start");
    let file = File::options().read(true).write(true).open(dir.join("region")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), limit);
    let full = |result: std::io::Result<()>| assert_eq!(result.unwrap_err().kind(), ErrorKind::StorageFull);
    // Behind the end, in a hole far away, and after the file was emptied.
    use std::os::unix::fs::FileExt;
    full(file.write_all_at(&[1; 4096], limit));
    full(file.write_all_at(&[1], 1 << 40));
    file.set_len(0).unwrap();
    full((&file).write_all(&vec![1; REGION_FILE_SIZE + 1]));
    assert_eq!(size(&dir), (limit, limit));
    // No other file.
    full(File::create(dir.join("other")).map(drop));
    assert_eq!(fs::create_dir(dir.join("other")).unwrap_err().kind(), ErrorKind::StorageFull);
}

#[test]
fn containers_get_the_file_where_the_limiter_looks_for_it() {
    let world = world();
    prepare(&world.node(), "c-1");
    let dir = region_dir(&world);
    let id = dir.parent().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    let want = (dir.join("region"), format!("/run/aliquot/region/{id}/region"));
    assert_eq!(region_mount(&world, "c-1"), want);
}

#[test]
fn an_unprepare_waits_for_nobody_who_has_the_region_open_or_locked() {
    if !private_mounts("an unprepare while the region is in use") {
        return;
    }
    let world = world();
    let node = bounded(world.node());
    prepare(&node, "c-1");
    let path = region_dir(&world).join("region");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    file.lock().unwrap();
    assert_eq!(mounts(&world).len(), 1);
    assert!(node.unprepare("c-1").unwrap());
    assert_eq!(mounts(&world), Vec::<String>::new());
    world.assert_clean();
    // Who has it open keeps it, and keeps it alone.
    assert_eq!(file.metadata().unwrap().len(), REGION_FILE_SIZE as u64);
    prepare(&node, "c-1");
    assert_ne!(
        file.metadata().unwrap().ino_and_dev(),
        fs::metadata(region_dir(&world).join("region")).unwrap().ino_and_dev()
    );
}

trait Identity {
    fn ino_and_dev(&self) -> (u64, u64);
}

impl Identity for fs::Metadata {
    fn ino_and_dev(&self) -> (u64, u64) {
        use std::os::unix::fs::MetadataExt;
        (self.ino(), self.dev())
    }
}

#[test]
fn a_region_survives_the_agent_and_is_made_anew_after_a_reboot() {
    if !private_mounts("regions over restarts") {
        return;
    }
    let world = world();
    prepare(&bounded(world.node()), "c-1");
    let path = region_dir(&world).join("region");
    let before = fs::metadata(&path).unwrap().ino_and_dev();
    // Another process of the agent.
    let node = bounded(world.node());
    assert!(node.recover().unwrap().orphans.is_empty());
    prepare(&node, "c-1");
    assert_eq!(fs::metadata(&path).unwrap().ino_and_dev(), before);
    // A reboot takes what lies in memory.
    for point in mounts(&world) {
        nix::mount::umount(point.as_str()).unwrap();
    }
    world.reboot("boot-2");
    let node = bounded(world.node());
    node.recover().unwrap();
    prepare(&node, "c-1");
    assert_eq!(mounts(&world).len(), 1);
    assert_eq!(size(&region_dir(&world)).0, REGION_FILE_SIZE as u64);
    assert!(node.unprepare("c-1").unwrap());
    assert_eq!(mounts(&world), Vec::<String>::new());
}

#[test]
fn a_kill_at_any_point_leaves_no_mount_behind() {
    if !private_mounts("kills around a region's mount") {
        return;
    }
    for at in 1.. {
        let world = world();
        let (probe, _) = killer(at);
        let node = bounded(world.node_with(probe));
        let ended = until_killed(|| {
            prepare(&node, "c-1");
            node.unprepare("c-1").unwrap()
        });
        let node = bounded(world.node());
        node.recover().unwrap();
        prepare(&node, "c-1");
        assert_eq!(mounts(&world).len(), 1, "killed at point {at}");
        assert!(node.unprepare("c-1").unwrap());
        assert_eq!(mounts(&world), Vec::<String>::new(), "killed at point {at}");
        world.assert_clean();
        if ended.is_some() {
            assert!(at > 10, "{at} points");
            break;
        }
    }
}

#[test]
fn where_nothing_can_be_mounted_a_prepare_is_refused_with_the_reason() {
    const INNER: &str = "ALIQUOT_TEST_WITHOUT_MOUNTS";
    let name = "region::where_nothing_can_be_mounted_a_prepare_is_refused_with_the_reason";
    if std::env::var_os(INNER).is_none() {
        if !private_mounts(name) {
            return;
        }
        let said = Command::new("setpriv")
            .args(["--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(INNER, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.status.success() && text.contains("1 passed"), "{said:?}");
        return;
    }
    let world = world();
    let node = bounded(world.node());
    let error = node.prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap_err().to_string();
    for part in ["cannot mount", "region", Errno::EPERM.desc(), "CAP_SYS_ADMIN", "--region-storage=directory"]
    {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    world.assert_clean();
    // Chosen, not fallen back to.
    prepare(&world.node(), "c-1");
    assert!(region_dir(&world).join("region").is_file());
}

#[test]
fn a_share_of_the_release_before_keeps_its_directory_and_can_be_given_back() {
    let world = world();
    prepare(&world.node(), "c-1");
    let dir = region_dir(&world);
    // As the release before this one left it; its containers have put a link in the file's place.
    fs::remove_file(dir.parent().unwrap().join("layout")).unwrap();
    let secret = world.dir.path().join("secret");
    fs::write(&secret, "of the host").unwrap();
    fs::remove_file(dir.join("region")).unwrap();
    std::os::unix::fs::symlink(&secret, dir.join("region")).unwrap();
    prepare(&world.node(), "c-1");
    let (host, inside) = region_mount(&world, "c-1");
    assert_eq!(host, dir, "a mount of the file would follow the link on the host");
    assert!(!inside.ends_with("/region"), "{inside}");
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
    assert_eq!(fs::read_to_string(secret).unwrap(), "of the host");
}

/// What a container's root tries: grow the file, make others beside it, put something in its place.
const TENANT: &str = "
    cd /run/aliquot/region/*
    dd if=/dev/zero of=region bs=65536 count=200 conv=notrunc && echo grown
    rm -f region && echo removed
    mv other region && echo replaced
    ln -sf /etc/passwd region && echo linked
    dd if=/dev/zero of=region bs=1 seek=1000000000 count=1 && echo sparse
    i=0; while [ $i -lt 50 ]; do mkdir -p here/$i; i=$((i+1)); done
    chmod 000 region
    echo done
";

#[test]
fn containers_can_change_nothing_of_the_node_but_the_content_of_that_file() {
    let name = "a container that writes what it can";
    let runcs = runcs(name);
    if runcs.is_empty() || !private_mounts(name) {
        return;
    }
    for runc in runcs {
        let world = world();
        let mut bundle = Bundle::new(&["sh", "dd", "rm", "mv", "ln", "mkdir", "chmod"]);
        let node = bounded(with_limiter(world.node(), bundle.folder.path()));
        let prepared = node.prepare(&request("c-1", &[("s", "gpu-0-share")]), false, now()).unwrap();
        bundle.edits = edits(&node, "c-1", &prepared);
        let output = bundle.run(&runc, &["/bin/sh", "-c", TENANT], "/");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text, "done\n", "{runc:?}: {output:?}");
        let dir = region_dir(&world);
        let names = |dir: &Path| -> Vec<String> {
            let mut names: Vec<String> =
                fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&dir), ["region"], "{runc:?}");
        assert_eq!(names(dir.parent().unwrap()), ["layout", "quota", "region"], "{runc:?}");
        assert_eq!(size(&dir).0, REGION_FILE_SIZE as u64, "{runc:?}");
        assert!(node.unprepare("c-1").unwrap());
        assert_eq!(mounts(&world), Vec::<String>::new());
        world.assert_clean();
    }
}
