//! What NVIDIA's control daemon does not show without a GPU: that it hangs, refuses a limit, and leaves servers behind.

use crate::world::{World, gone, kill_hard, lives, state_of, wait};
use aliquot_mps::contract::Phase;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

/// A driver whose control daemon starts a server at once; what it answers commands with is the caller's.
pub(crate) fn driver(answers: &str) -> tempfile::TempDir {
    let temp = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bin = temp.path().join("usr/bin");
    fs::create_dir_all(&bin).unwrap();
    let script = format!(
        "#!/bin/bash\nPATH=/usr/bin:/bin\nif [[ $1 == -f ]]; then\n\
         env -i \"ALIQUOT_MPS_CLAIM=$ALIQUOT_MPS_CLAIM\" sleep 1000 & echo $! >\"$CUDA_MPS_LOG_DIRECTORY/server\"\n\
         trap '' TERM\nwait\nexit 1\nfi\n{answers}\n"
    );
    let program = bin.join("nvidia-cuda-mps-control");
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    temp
}

fn server(log: &Path) -> u32 {
    wait("there is a server", || fs::read_to_string(log.join("server")).ok()?.trim().parse().ok())
}

#[test]
fn a_daemon_that_hangs_at_quit_is_killed_with_its_servers() {
    let driver = driver("read -r line; [[ $line == quit* ]] && exec sleep 1000; true");
    let mut world = World::new(driver.path(), false);
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let pid = state_of(&claim, Phase::Ready).pid.unwrap();
    let server = server(&claim.log());
    claim.withdraw_ask().unwrap();
    gone(&claim);
    assert!(!lives(pid) && !lives(server));
}

#[test]
fn servers_of_a_daemon_that_died_are_gone_before_the_next_one_starts() {
    let driver = driver("true");
    let mut world = World::new(driver.path(), false);
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let first = state_of(&claim, Phase::Ready).pid.unwrap();
    let orphan = server(&claim.log());
    assert!(lives(orphan));
    kill_hard(first);
    wait("another daemon", || state_of(&claim, Phase::Ready).pid.filter(|pid| *pid != first));
    assert!(!lives(orphan));
}

#[test]
fn a_limit_that_the_daemon_does_not_take_keeps_it_from_being_ready() {
    let driver = driver("echo 'Unknown command'");
    let mut world = World::new(driver.path(), false);
    world.supervise();
    let claim = world.ask("c-1", Some(50), None);
    let reason = wait("a reason", || claim.state().unwrap()?.reason);
    assert!(reason.contains("activeThreadPercentage") && reason.contains("Unknown command"), "{reason}");
}

#[test]
fn an_ask_that_cannot_be_read_for_a_while_leaves_a_daemon_as_it_is() {
    let driver = driver("true");
    let mut world = World::new(driver.path(), false);
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let before = state_of(&claim, Phase::Ready);
    let ask = claim.ask().unwrap().unwrap();
    let link = claim.path().join("link");
    symlink("log", &link).unwrap();
    // To read it is an I/O error from now on: it is a directory.
    fs::rename(&link, claim.ask_file()).unwrap();
    // The supervisor has looked at both several times when the second one is ready.
    state_of(&world.ask("c-2", None, None), Phase::Ready);
    assert_eq!(claim.state().unwrap().as_ref(), Some(&before));
    assert!(lives(before.pid.unwrap()));
    claim.write_ask(&ask).unwrap();
    state_of(&world.ask("c-3", None, None), Phase::Ready);
    assert_eq!(claim.state().unwrap(), Some(before));
    claim.withdraw_ask().unwrap();
    gone(&claim);
}
