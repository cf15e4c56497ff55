//! Unprepare and removal of whatever a container has made in a share's directories.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::metrics::Metrics;
use aliquot_kubelet_plugin::trash::{self, Trash, sweep};
use aliquot_nvml::fake::{FakeGpus, h100_80};
use common::{World, now, private_mounts, request};
use nix::fcntl::{OFlag, openat};
use nix::mount::{MsFlags, mount, umount};
use nix::sys::stat::{Mode, mkdirat};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A node with a prepared share, and the directory that its containers could write until this release.
fn world() -> (World, PathBuf) {
    let world = World::new(FakeGpus::new([h100_80(0)]));
    let request = request("c-1", &[("s", "gpu-0-share")]);
    world.node().prepare(&request, false, now()).unwrap();
    let shares = world.data().join("shares");
    let share = fs::read_dir(&shares).unwrap().next().unwrap().unwrap().path();
    (world, share.join("region"))
}

/// Directories inside each other.
fn nest(dir: &Path, depth: usize) {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
    let mut at: OwnedFd = File::open(dir).unwrap().into();
    for _ in 0..depth {
        mkdirat(&at, "d", Mode::from_bits_truncate(0o755)).unwrap();
        at = openat(&at, "d", flags, Mode::empty()).unwrap();
    }
}

fn trash_of(world: &World) -> PathBuf {
    trash::dir(&world.data().join("shares"))
}

/// Names in the trash.
fn left(world: &World) -> usize {
    fs::read_dir(trash_of(world)).unwrap().count()
}

fn swept(world: &World) -> Vec<String> {
    let failed = sweep(&trash_of(world), &[], &AtomicBool::new(false)).unwrap();
    failed.into_iter().map(|(_, error)| error.to_string()).collect()
}

#[test]
fn twenty_thousand_nested_directories_cost_an_unprepare_nothing_and_are_removed() {
    let (world, region) = world();
    nest(&region, 20_000);
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
    // Nothing of it was touched under the node's lock.
    assert_eq!(left(&world), 1);
    assert!(world.node().recover().unwrap().orphans.is_empty());
    assert_eq!(swept(&world), Vec::<String>::new());
    assert_eq!(left(&world), 0);
}

#[test]
fn a_share_without_a_claim_is_out_of_the_way_after_a_start_whatever_is_in_it() {
    let (world, region) = world();
    nest(&region, 20_000);
    let stray = world.data().join("shares/stray");
    fs::rename(region.parent().unwrap(), &stray).unwrap();
    let recovery = world.node().recover().unwrap();
    assert_eq!(recovery.orphans, ["share stray"]);
    assert!(!stray.exists());
    assert_eq!(swept(&world), Vec::<String>::new());
    assert_eq!(left(&world), 0);
}

#[test]
fn depth_takes_no_descriptors() {
    const INNER: &str = "ALIQUOT_TEST_FEW_DESCRIPTORS";
    if std::env::var_os(INNER).is_none() {
        let own = std::env::current_exe().unwrap();
        let said = Command::new("sh")
            .args(["-c", "ulimit -n 64; exec \"$@\"", "sh"])
            .arg(own)
            .args(["--exact", "trash::depth_takes_no_descriptors", "--nocapture", "--test-threads=1"])
            .env(INNER, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.status.success() && text.contains("1 passed"), "{said:?}");
        return;
    }
    let (world, region) = world();
    nest(&region, 1_500);
    assert!(world.node().unprepare("c-1").unwrap());
    assert_eq!(swept(&world), Vec::<String>::new());
    assert_eq!(left(&world), 0);
}

#[test]
fn wide_directories_links_and_pipes_are_removed_and_links_are_not_followed() {
    let (world, region) = world();
    let outside = world.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("kept"), "kept").unwrap();
    for number in 0..6_000 {
        let dir = region.join(format!("d{number}"));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("file"), "").unwrap();
    }
    // Names that the removal itself uses.
    for name in [".0", ".1", ".2"] {
        fs::create_dir(region.join(name)).unwrap();
        fs::write(region.join(name).join("file"), "").unwrap();
    }
    std::os::unix::fs::symlink(&outside, region.join("link")).unwrap();
    std::os::unix::fs::symlink(&outside, region.join("d1/link")).unwrap();
    nix::unistd::mkfifo(&region.join("pipe"), Mode::from_bits_truncate(0o600)).unwrap();
    assert!(world.node().unprepare("c-1").unwrap());
    // What an interrupted removal left under such a name.
    fs::create_dir_all(trash_of(&world).join(".0/inner")).unwrap();
    fs::write(trash_of(&world).join(".1"), "").unwrap();
    assert_eq!(swept(&world), Vec::<String>::new());
    assert_eq!(left(&world), 0);
    assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "kept");
}

#[test]
fn a_foreign_mount_stops_no_unprepare_and_is_not_entered() {
    if !private_mounts("removal around a foreign mount") {
        return;
    }
    let (world, region) = world();
    let outside = world.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("kept"), "kept").unwrap();
    fs::create_dir_all(region.join("a/b/c")).unwrap();
    fs::create_dir_all(region.join("a/other/d")).unwrap();
    let none = None::<&str>;
    mount(Some(&outside), &region.join("a/b/c"), none, MsFlags::MS_BIND, none).unwrap();
    assert!(world.node().unprepare("c-1").unwrap());
    world.assert_clean();
    let failed = swept(&world);
    assert!(failed.len() == 1 && failed[0].contains("busy"), "{failed:?}");
    assert_eq!(left(&world), 1, "only the way to the mount is left");
    assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "kept");
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let point = mounts.lines().filter_map(|line| line.split(' ').nth(4)).find(|at| at.ends_with("/c"));
    umount(point.unwrap()).unwrap();
    assert_eq!(swept(&world), Vec::<String>::new());
    assert_eq!(left(&world), 0);
    assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "kept");
}

#[test]
fn an_immutable_directory_stops_no_unprepare() {
    let (world, region) = world();
    let stuck = region.join("a/stuck");
    fs::create_dir_all(&stuck).unwrap();
    fs::write(stuck.join("file"), "").unwrap();
    let flag = |flag: &str, path: &Path| {
        Command::new("chattr").arg(flag).arg(path).output().is_ok_and(|said| said.status.success())
    };
    if !flag("+i", &stuck) {
        println!("SKIPPED: removal of an immutable directory: chattr cannot make one here");
        return;
    }
    let unprepared = world.node().unprepare("c-1");
    let failed = swept(&world);
    let clean = left(&world);
    let path = find(&trash_of(&world), "stuck").unwrap();
    assert!(flag("-i", &path));
    assert!(unprepared.unwrap());
    assert!(failed.len() == 1 && failed[0].contains("not permitted"), "{failed:?}");
    assert_eq!(clean, 1);
    assert_eq!(swept(&world), Vec::<String>::new());
    assert_eq!(left(&world), 0);
}

fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .find_map(|path| if path.file_name().unwrap() == name { Some(path) } else { find(&path, name) })
}

#[tokio::test]
async fn the_agent_removes_in_the_background_what_an_earlier_process_left_and_what_comes() {
    let (world, region) = world();
    nest(&region, 2_000);
    fs::create_dir_all(trash_of(&world).join("from-before/a/b")).unwrap();
    let cancel = CancellationToken::new();
    let task = Trash::new(&world.data().join("shares"), Metrics::default());
    let running = tokio::spawn(task.run(cancel.clone()));
    for step in ["what was left", "what came"] {
        let begun = std::time::Instant::now();
        while left(&world) > 0 {
            assert!(begun.elapsed() < Duration::from_secs(120), "{step} is still there");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        world.node().unprepare("c-1").unwrap();
    }
    cancel.cancel();
    tokio::time::timeout(Duration::from_secs(60), running).await.unwrap().unwrap();
}
