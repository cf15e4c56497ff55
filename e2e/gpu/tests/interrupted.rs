//! However a run ends, and whoever of it is ended, nothing of it is left but its results.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test"
)]

mod common;

use aliquot_sim_node::NodeSpec;
use common::{node, runner};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Whom a signal is sent to.
#[derive(Debug, Clone, Copy)]
enum Whom {
    Guard,
    Run,
}

/// Processes that were started with something in this folder.
fn processes(folder: &Path) -> Vec<Pid> {
    let folder = folder.to_str().unwrap();
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_ours = |pid: &i32| {
        ["cmdline", "environ"].iter().any(|file| {
            let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            String::from_utf8_lossy(&bytes).contains(folder)
        })
    };
    pids.filter(is_ours).map(Pid::from_raw).collect()
}

/// Control groups of containers of this runner.
fn groups(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if entry.file_name().to_string_lossy().starts_with("gpu-check-") {
                found.insert(entry.path().display().to_string());
            }
            groups(&entry.path(), found);
        }
    }
}

fn all_groups() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    groups(Path::new("/sys/fs/cgroup"), &mut found);
    found
}

/// On a busy machine a run may be over before this test saw the line that it waited for: then it is started again.
fn nothing_is_left_after(moment: &str, whom: Whom, signal: Signal) {
    let in_time = (0..5).any(|_| was_in_time(moment, whom, signal));
    assert!(in_time, "{signal} to the {whom:?} at {moment:?}: five runs were over before the signal");
}

/// Returns false if the run was complete before the signal reached it.
fn was_in_time(moment: &str, whom: Whom, signal: Signal) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let node = node(folder.path(), NodeSpec::new(["H100-80"]));
    let (groups, what) = (all_groups(), format!("{signal} to the {whom:?} at {moment:?}"));
    let mut command = runner(folder.path(), &[], &["--change-mig"]);
    let mut guard = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_raw(i32::try_from(guard.id()).unwrap());
    let mut lines = BufReader::new(guard.stdout.take().unwrap()).lines().map_while(Result::ok);
    if !lines.any(|line| line.contains(moment)) {
        // This machine lets us start no containers, or the board has nothing of it.
        println!("SKIPPED: {what}: the run did not get there");
        guard.wait().unwrap();
        return true;
    }
    let run = || {
        let children = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = children.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let mut of_guard = pids.filter(|child| {
            let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
            let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
            parent == Some(pid.to_string().as_str())
        });
        of_guard.next().map(Pid::from_raw)
    };
    let receiver = match whom {
        Whom::Guard => Some(pid),
        Whom::Run => run(),
    };
    // A guard is there until it is waited for; its run may have been.
    if let Some(receiver) = receiver {
        kill(receiver, signal).unwrap();
    }
    // What is said from now on is not wanted, but has to have room.
    lines.by_ref().for_each(drop);
    let status = guard.wait().unwrap();
    let started = Instant::now();
    let left = || {
        let files: Vec<_> = std::fs::read_dir(folder.path().join("tmp")).unwrap().flatten().collect();
        let users = node.processes(0).unwrap().len();
        let partitions = node.mig_devices(0).unwrap().len() + usize::from(node.mig_mode(0).unwrap().current);
        let groups: Vec<_> = all_groups().difference(&groups).cloned().collect();
        format!(
            "files {files:?}, processes {:?}, users {users}, partitions {partitions}, groups {groups:?}",
            processes(folder.path())
        )
    };
    let nothing = "files [], processes [], users 0, partitions 0, groups []";
    // A guard that was killed cannot be waited for: the run ends in order by itself.
    while left() != nothing && started.elapsed() < Duration::from_secs(90) {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(left(), nothing, "{what}");
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(common::results(folder.path())).unwrap()).unwrap();
    let complete = report["complete"].as_bool().unwrap();
    assert!(complete || !status.success(), "{what}: success of a run that is not complete");
    !complete
}

#[test]
fn with_a_container_that_is_running() {
    nothing_is_left_after("gpu-0 is prepared", Whom::Guard, Signal::SIGINT);
    nothing_is_left_after("gpu-0 is prepared", Whom::Guard, Signal::SIGKILL);
    nothing_is_left_after("gpu-0 is prepared", Whom::Run, Signal::SIGKILL);
}

#[test]
fn with_a_partition_that_was_made() {
    nothing_is_left_after("gpu-0-mig-1g10gb-19-6 is prepared", Whom::Guard, Signal::SIGTERM);
    nothing_is_left_after("gpu-0-mig-1g10gb-19-6 is prepared", Whom::Run, Signal::SIGKILL);
}

#[test]
fn with_cases_that_are_running() {
    nothing_is_left_after("queries show the quota (LD_PRELOAD)", Whom::Guard, Signal::SIGHUP);
    nothing_is_left_after("queries show the quota (LD_PRELOAD)", Whom::Guard, Signal::SIGKILL);
    nothing_is_left_after("queries show the quota (LD_PRELOAD)", Whom::Run, Signal::SIGKILL);
}
