//! What containers share with a daemon lies in file systems of its own, which are bounded.

use super::common::kill::{killer, settle_daemons};
use super::common::supervisor::Supervisor;
use super::common::{World, now, private_mounts};
use super::{wanted, world};
use aliquot_kubelet_plugin::mps::Mps;
use aliquot_kubelet_plugin::prepare::Node;
use aliquot_kubelet_plugin::share::RegionStorage;
use aliquot_nvml::fake::until_killed;
use nix::mount::{MntFlags, umount2};
use nix::sys::statvfs::{FsFlags, statvfs};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

fn node(world: &World) -> Node {
    let mut node = world.node();
    node.machine.mps = Mps::new(world.mps(), RegionStorage::Tmpfs, Duration::from_secs(20));
    node
}

/// Mount points of the world's MPS directory.
fn mounted(world: &World) -> Vec<String> {
    let all = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let own = format!("{}/", world.mps().display());
    let mut points: Vec<String> = all
        .lines()
        .filter_map(|line| line.split(' ').nth(4)?.strip_prefix(&own).map(str::to_owned))
        .collect();
    points.sort();
    points
}

#[test]
fn a_container_can_fill_what_it_shares_with_the_daemon_and_no_more() {
    if !private_mounts("a_container_can_fill_what_it_shares_with_the_daemon_and_no_more") {
        return;
    }
    let world = world();
    let _supervisor = Supervisor::start(world.mps());
    node(&world).prepare(&wanted(), false, now()).unwrap();
    assert_eq!(mounted(&world), ["c-1/pipe", "c-1/shm"]);
    for (name, bytes, files, mode) in [("pipe", 1 << 20, 256, 0o1777), ("shm", 64 << 20, 16_384, 0o1777)] {
        let dir = world.mps().join("c-1").join(name);
        let found = statvfs(&dir).unwrap();
        assert_eq!(found.blocks() * found.fragment_size(), bytes, "{name}");
        assert_eq!(found.files(), files, "{name}");
        assert!(
            found.flags().contains(FsFlags::ST_NOSUID | FsFlags::ST_NODEV | FsFlags::ST_NOEXEC),
            "{name}"
        );
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o7777, mode, "{name}");
    }
    assert!(node(&world).unprepare("c-1").unwrap());
    assert_eq!(mounted(&world), [""; 0]);
    world.assert_clean();
}

/// As after a reboot, which leaves the directories and the ask.
#[test]
fn a_daemon_whose_file_systems_are_gone_is_made_anew() {
    if !private_mounts("a_daemon_whose_file_systems_are_gone_is_made_anew") {
        return;
    }
    let world = world();
    let supervisor = Supervisor::start(world.mps());
    node(&world).prepare(&wanted(), false, now()).unwrap();
    umount2(&world.mps().join("c-1/pipe"), MntFlags::MNT_DETACH).unwrap();
    node(&world).prepare(&wanted(), false, now()).unwrap();
    assert_eq!(mounted(&world), ["c-1/pipe", "c-1/shm"]);
    assert_eq!(supervisor.asks().len(), 1);
    node(&world).unprepare("c-1").unwrap();
    world.assert_clean();
}

#[test]
fn shared_memory_is_as_large_as_the_administrator_says() {
    if !private_mounts("shared_memory_is_as_large_as_the_administrator_says") {
        return;
    }
    let world = world();
    let _supervisor = Supervisor::start(world.mps());
    let mut node = node(&world);
    node.machine.mps = node.machine.mps.with_shared_memory(3 << 30);
    node.prepare(&wanted(), false, now()).unwrap();
    let found = statvfs(&world.mps().join("c-1/shm")).unwrap();
    assert_eq!(found.blocks() * found.fragment_size(), 3 << 30);
    node.unprepare("c-1").unwrap();
    world.assert_clean();
}

#[test]
fn a_kill_at_any_point_leaves_no_mount_behind() {
    if !private_mounts("kills around the mounts of an MPS daemon") {
        return;
    }
    for at in 1.. {
        let world = world();
        let _supervisor = Supervisor::start(world.mps());
        let (probe, _) = killer(at);
        let mut killed = node(&world);
        killed.machine.probe = probe;
        let ended = until_killed(|| {
            killed.prepare(&wanted(), false, now()).unwrap();
            killed.unprepare("c-1").unwrap();
        });
        let node = node(&world);
        node.recover().unwrap();
        settle_daemons(&node);
        node.unprepare("c-1").unwrap();
        assert_eq!(mounted(&world), [""; 0], "killed at {at}");
        world.assert_clean();
        if ended.is_some() {
            break;
        }
    }
}
