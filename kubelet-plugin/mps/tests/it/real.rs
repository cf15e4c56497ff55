//! The supervisor with NVIDIA's own control daemon, which needs no GPU until a client comes.

use crate::world::{World, gone, kill_hard, lives, real_files, state_of, wait};
use aliquot_mps::contract::{ClaimDir, Phase};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, symlink};

/// The driver's files, and whether a daemon gets a root of its own, which only root can give it.
pub(crate) fn real(what: &str) -> Option<(std::path::PathBuf, bool)> {
    match real_files() {
        Ok(files) => Some((files, nix::unistd::geteuid().is_root())),
        Err(reason) => {
            println!("SKIPPED: {what} with the real control daemon: {reason}");
            None
        }
    }
}

pub(crate) fn limits(world: &World, claim: &ClaimDir) -> (String, String) {
    let percent = world.tell(claim, "get_default_active_thread_percentage");
    let memory = world.tell(claim, "get_default_device_pinned_mem_limit 1");
    (percent.trim().to_owned(), memory.trim().to_owned())
}

#[test]
fn a_daemon_is_ready_with_the_claims_limits_and_gone_with_the_ask() {
    let Some((files, isolated)) = real("limits") else { return };
    let mut world = World::new(&files, isolated);
    world.supervise();
    let claim = world.ask("c-1", Some(40), Some(2 << 30));
    let state = state_of(&claim, Phase::Ready);
    assert_eq!((state.restarts, state.reason), (0, None));
    assert_eq!(limits(&world, &claim), ("40.0".into(), "2G".into()));
    let pid = state.pid.unwrap();
    assert!(lives(pid));
    claim.withdraw_ask().unwrap();
    gone(&claim);
    assert!(!lives(pid), "the state goes after the daemon");
}

#[test]
fn each_claim_has_a_daemon_of_its_own() {
    let Some((files, isolated)) = real("two claims") else { return };
    let mut world = World::new(&files, isolated);
    world.supervise();
    let one = world.ask("c-1", Some(10), None);
    let two = world.ask("c-2", None, Some(512 << 20));
    let pids = [state_of(&one, Phase::Ready).pid, state_of(&two, Phase::Ready).pid];
    assert_ne!(pids[0], pids[1]);
    assert_eq!(limits(&world, &one).0, "10.0");
    assert_eq!(limits(&world, &two), ("100.0".into(), "512M".into()));
    one.withdraw_ask().unwrap();
    gone(&one);
    assert!(lives(pids[1].unwrap()), "the other claim's daemon goes on");
}

#[test]
fn a_daemon_that_was_killed_is_started_again_with_its_limits() {
    let Some((files, isolated)) = real("a killed daemon") else { return };
    let mut world = World::new(&files, isolated);
    world.supervise();
    let claim = world.ask("c-1", Some(40), None);
    let first = state_of(&claim, Phase::Ready).pid.unwrap();
    kill_hard(first);
    let second = wait("another daemon", || state_of(&claim, Phase::Ready).pid.filter(|pid| *pid != first));
    assert!(lives(second) && !lives(first));
    assert_eq!(limits(&world, &claim).0, "40.0");
    assert_eq!(state_of(&claim, Phase::Ready).restarts, 1);
}

#[test]
fn a_supervisor_that_was_killed_is_followed_by_one_that_ends_its_daemons_and_starts_new_ones() {
    let Some((files, isolated)) = real("a killed supervisor") else { return };
    let mut world = World::new(&files, isolated);
    world.supervise();
    let [kept, dropped] = ["c-1", "c-2"].map(|uid| world.ask(uid, Some(40), None));
    let [first, orphan] = [&kept, &dropped].map(|claim| state_of(claim, Phase::Ready).pid.unwrap());
    world.kill_supervisor();
    assert!(!world.dir.is_served().unwrap());
    assert!(lives(first) && lives(orphan), "nothing but the supervisor died");
    dropped.withdraw_ask().unwrap();
    world.supervise();
    assert!(!lives(first) && !lives(orphan), "they ended before the new one was seen");
    let second = state_of(&kept, Phase::Ready).pid.unwrap();
    assert!(second != first && lives(second));
    assert_eq!(limits(&world, &kept).0, "40.0");
    assert_eq!(dropped.state().unwrap(), None);
}

#[test]
fn a_supervisor_that_is_told_to_end_ends_its_daemons_first() {
    let Some((files, isolated)) = real("the end") else { return };
    let mut world = World::new(&files, isolated);
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let pid = state_of(&claim, Phase::Ready).pid.unwrap();
    assert!(world.terminate_supervisor());
    assert!(!lives(pid));
    assert_eq!(claim.state().unwrap(), None);
    assert!(claim.ask().unwrap().is_some(), "what is asked is the agent's");
}

#[test]
fn a_client_that_blocks_its_daemon_cannot_keep_it_from_ending() {
    let Some((files, isolated)) = real("a blocked daemon") else { return };
    let mut world = World::new(&files, isolated);
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let pid = state_of(&claim, Phase::Ready).pid.unwrap();
    // The control daemon waits for what a client says first, and serves nobody else meanwhile.
    let silent = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None).unwrap();
    connect(silent.as_raw_fd(), &UnixAddr::new(&claim.pipe().join("control")).unwrap()).unwrap();
    claim.withdraw_ask().unwrap();
    gone(&claim);
    assert!(!lives(pid));
    drop(silent);
}

#[test]
fn without_a_root_of_its_own_a_daemon_serves_as_well() {
    let Some((files, _)) = real("no isolation") else { return };
    let mut world = World::new(&files, false);
    world.supervise();
    let claim = world.ask("c-1", Some(40), None);
    state_of(&claim, Phase::Ready);
    assert_eq!(limits(&world, &claim).0, "40.0");
}

#[test]
fn what_a_client_leaves_among_the_sockets_leads_a_new_daemon_nowhere() {
    let Some((files, isolated)) = real("what clients leave") else { return };
    let mut world = World::new(&files, isolated);
    let victim = world.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let first = state_of(&claim, Phase::Ready).pid.unwrap();
    for name in ["control", "control_lock", "control_privileged", "log"] {
        let _ = fs::remove_file(claim.pipe().join(name));
        symlink(&victim, claim.pipe().join(name)).unwrap();
    }
    fs::create_dir(claim.pipe().join("more")).unwrap();
    kill_hard(first);
    wait("another daemon", || state_of(&claim, Phase::Ready).pid.filter(|pid| *pid != first));
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(!claim.pipe().join("more").exists());
}

#[test]
fn a_driver_without_the_program_is_not_served_and_one_that_loses_it_is_a_failure_that_says_what_to_do() {
    let driver = tempfile::tempdir().unwrap();
    let mut world = World::new(driver.path(), false);
    let log = world.path().join("log");
    world.start_supervisor(fs::File::create(&log).unwrap().into());
    wait("its complaint", || fs::read_to_string(&log).unwrap().contains("MPS is not served").then_some(()));
    assert!(!world.dir.is_served().unwrap());
    let program = driver.path().join("usr/bin/nvidia-cuda-mps-control");
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    fs::write(&program, "#!/bin/sh\n").unwrap();
    wait("the supervisor is seen", || world.dir.is_served().unwrap().then_some(()));
    fs::remove_file(&program).unwrap();
    let claim = world.ask("c-1", None, None);
    let reason = state_of(&claim, Phase::Failed).reason.unwrap();
    assert!(reason.contains(&driver.path().display().to_string()) && reason.contains("install"), "{reason}");
    claim.withdraw_ask().unwrap();
    gone(&claim);
}

#[test]
fn a_driver_that_is_not_loaded_is_a_failure_that_says_so() {
    let Some((files, isolated)) = real("no driver") else { return };
    if !isolated {
        return println!("SKIPPED: a driver that is not loaded: needs root");
    }
    let mut world = World::new(&files, true);
    fs::write(world.devices(), "Character devices:\n  1 mem\n").unwrap();
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let reason = state_of(&claim, Phase::Failed).reason.unwrap();
    assert!(reason.contains("modprobe nvidia"), "{reason}");
}

/// An idle daemon has no device open, so it does not keep the driver from being loaded anew.
#[test]
fn an_idle_daemon_is_started_again_when_the_driver_numbers_its_devices_otherwise() {
    let Some((files, isolated)) = real("other numbers") else { return };
    if !isolated {
        return println!("SKIPPED: other numbers: needs root");
    }
    let mut world = World::new(&files, true);
    world.supervise();
    let claim = world.ask("c-1", Some(40), None);
    let first = state_of(&claim, Phase::Ready).pid.unwrap();
    fs::write(world.devices(), "Character devices:\n  1 mem\n").unwrap();
    // The supervisor has looked at both when the second one has failed.
    state_of(&world.ask("c-2", None, None), Phase::Failed);
    assert_eq!(state_of(&claim, Phase::Ready).pid, Some(first), "without a driver there is nothing better");
    let numbers = "Character devices:\n195 nvidia\n195 nvidiactl\n510 nvidia-uvm\n";
    fs::write(world.devices(), numbers).unwrap();
    let second = wait("another daemon", || state_of(&claim, Phase::Ready).pid.filter(|pid| *pid != first));
    let node = fs::metadata(format!("/proc/{second}/root/dev/nvidia-uvm")).unwrap();
    assert_eq!(node.rdev(), nix::sys::stat::makedev(510, 0));
    assert_eq!(limits(&world, &claim).0, "40.0");
}
