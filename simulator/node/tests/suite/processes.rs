//! Processes that share a node: they compete for memory, die, fork, and live in containers.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::Other;
use aliquot_sim_node::board::MIB;
use aliquot_sim_node::{GpuSpec, Node, NodeError, NodeSpec, Pool, create};

const GIB: u64 = 1 << 30;

#[test]
fn plays_another_process() {
    crate::common::play();
}

fn node(board: &str) -> (tempfile::TempDir, Node) {
    let dir = tempfile::tempdir().unwrap();
    let node = create(dir.path(), &NodeSpec::new([board])).unwrap();
    (dir, node)
}

fn used(node: &Node) -> u64 {
    node.memory(Pool::whole(0)).unwrap().used
}

/// Waits for something that another process brings about.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn two_processes_compete_for_the_same_memory() {
    let (dir, node) = node("T4");
    let (mut a, mut b) = (Other::start(dir.path()), Other::start(dir.path()));
    let free = node.memory(Pool::whole(0)).unwrap().free;
    assert_eq!(a.ask(&format!("charge {}", free - GIB)), "ok");
    assert!(b.ask(&format!("charge {}", 2 * GIB)).starts_with("out of memory"));
    assert_eq!(b.ask(&format!("charge {GIB}")), "ok");
    assert_eq!(node.memory(Pool::whole(0)).unwrap().free, 0);
    assert!(matches!(node.charge(Pool::whole(0), 1), Err(NodeError::OutOfMemory { wanted: 1, free: 0 })));
    assert_eq!(a.ask(&format!("release {GIB}")), "ok");
    assert_eq!(b.ask(&format!("charge {GIB}")), "ok");
    assert_eq!(used(&node), free);
}

#[test]
fn a_killed_process_gives_its_memory_back() {
    let (dir, node) = node("L40S");
    let mut other = Other::start(dir.path());
    other.ask(&format!("charge {GIB}"));
    assert_eq!(used(&node), GIB);
    other.kill();
    assert_eq!(used(&node), 0);
    assert!(node.processes(0).unwrap().is_empty());
}

#[test]
fn memory_of_a_killed_process_stays_for_the_configured_delay() {
    let (dir, node) = node("L40S");
    node.set_reap_delay(Duration::from_secs(3600)).unwrap();
    let mut other = Other::start(dir.path());
    other.ask(&format!("charge {GIB}"));
    let pid = other.pid();
    other.kill();
    assert_eq!(used(&node), GIB, "kept");
    assert_eq!(node.processes(0).unwrap()[0].visible_pid, Some(pid), "still listed");
    node.set_reap_delay(Duration::from_millis(20)).unwrap();
    eventually("the delay is over", || used(&node) == 0);
}

#[test]
fn a_charge_that_would_fail_looks_for_dead_processes_first() {
    let (dir, node) = node("T4");
    let free = node.memory(Pool::whole(0)).unwrap().free;
    let mut other = Other::start(dir.path());
    other.ask(&format!("charge {free}"));
    other.kill();
    node.charge(Pool::whole(0), free).unwrap();
}

#[test]
fn processes_are_listed_under_their_pids() {
    let (dir, node) = node("A100-40");
    let mut other = Other::start(dir.path());
    other.ask("charge 1000");
    node.charge(Pool::whole(0), 2000).unwrap();
    let mut seen = node.processes(0).unwrap();
    seen.sort_by_key(|p| p.bytes);
    assert_eq!(seen.len(), 2);
    assert_eq!((seen[0].visible_pid, seen[0].is_self), (Some(other.pid()), false));
    let own = i32::try_from(std::process::id()).unwrap();
    assert_eq!((seen[1].visible_pid, seen[1].is_self), (Some(own), true));
    assert_eq!(other.ask("seen"), format!("1000:Some({}) 2000:Some({own})", other.pid()));
}

#[test]
fn pids_are_translated_between_pid_namespaces() {
    let (dir, node) = node("A30");
    let Some(mut inside) = Other::start_in_container(dir.path()) else {
        eprintln!("skipped: this machine has no unprivileged pid namespaces");
        return;
    };
    node.charge(Pool::whole(0), 2000).unwrap();
    assert_eq!(inside.ask("charge 1000"), "ok");
    assert_eq!(inside.ask("pid"), "1");
    assert_eq!(inside.ask("seen"), "1000:Some(1) 2000:None", "a container does not see the host's pids");
    let seen = node.processes(0).unwrap().into_iter().find(|p| !p.is_self).unwrap();
    assert_eq!(seen.own_pid, 1);
    let host = seen.visible_pid.unwrap();
    assert!(host > 1 && seen.host_pid == Some(host));
    let parent = std::fs::read_to_string(format!("/proc/{host}/status")).unwrap();
    assert!(parent.contains(&format!("PPid:\t{}", inside.pid())), "{parent}");
    inside.kill();
    eventually("the container's process is gone", || used(&node) == 2000);
}

#[test]
fn two_first_processes_of_containers_are_told_apart() {
    let (dir, node) = node("A30");
    let Some(mut a) = Other::start_in_container(dir.path()) else {
        eprintln!("skipped: this machine has no unprivileged pid namespaces");
        return;
    };
    let mut b = Other::start_in_container(dir.path()).unwrap();
    a.ask("charge 1000");
    b.ask("charge 2000");
    assert_eq!(a.ask("pid"), b.ask("pid"));
    assert_eq!(used(&node), 3000);
    a.kill();
    eventually("one of them is gone", || used(&node) == 2000);
}

#[test]
fn management_can_be_refused_in_containers() {
    let (dir, node) = node("H100-80");
    let Some(mut inside) = Other::start_in_container(dir.path()) else {
        eprintln!("skipped: this machine has no unprivileged pid namespaces");
        return;
    };
    node.set_deny_mig_in_containers(true).unwrap();
    assert!(inside.ask("mig 1").starts_with("no permission"));
    node.set_mig_mode(0, true).unwrap();
    node.set_deny_mig_in_containers(false).unwrap();
    assert_eq!(inside.ask("mig 0"), "ok");
}

#[test]
fn a_forked_child_has_an_account_of_its_own() {
    let (dir, node) = node("A30");
    let mut other = Other::start(dir.path());
    other.ask(&format!("charge {GIB}"));
    assert_eq!(other.ask(&format!("fork {GIB}")), "2", "parent's and child's");
    assert_eq!(used(&node), GIB, "the child's ended with it");
    assert_eq!(other.ask("charge 5"), "ok");
    assert_eq!(used(&node), GIB + 5, "the parent's did not");
}

#[test]
fn a_program_that_replaces_itself_starts_with_nothing() {
    let (dir, node) = node("A30");
    let mut other = Other::start(dir.path());
    other.ask(&format!("charge {GIB}"));
    assert_eq!(other.ask("exec"), "again");
    assert_eq!(used(&node), 0, "same pid, other program");
    assert_eq!(other.ask("charge 5"), "ok");
    assert_eq!(used(&node), 5);
    assert_eq!(node.processes(0).unwrap()[0].visible_pid, Some(other.pid()));
}

#[test]
fn shared_memory_outlives_its_exporter() {
    let (dir, node) = node("A30");
    let mut exporter = Other::start(dir.path());
    exporter.ask(&format!("charge {}", 3 * GIB));
    let id: u64 = exporter.ask(&format!("share {GIB}")).parse().unwrap();
    let mut importer = Other::start(dir.path());
    assert_eq!(importer.ask(&format!("attach {id}")), "ok");
    assert_eq!(used(&node), 3 * GIB, "sharing takes nothing more");
    assert_eq!(node.shared(id).unwrap().holders, 2);
    exporter.kill();
    assert_eq!(used(&node), GIB);
    let rest = node.processes(0).unwrap();
    assert_eq!((rest.len(), rest[0].bytes, rest[0].visible_pid), (1, GIB, Some(importer.pid())));
    assert_eq!(importer.ask(&format!("detach {id}")), "ok");
    assert_eq!(used(&node), 0);
    assert!(node.attach(id).is_err());
}

#[test]
fn sharing_more_than_is_held_is_refused() {
    let (_dir, node) = node("A30");
    node.charge(Pool::whole(0), 10).unwrap();
    assert!(matches!(node.share(Pool::whole(0), 11, 0), Err(NodeError::InvalidArgument(_))));
    assert_eq!(used(&node), 10);
}

#[test]
fn memory_of_an_instance_counts_for_it_and_for_the_gpu() {
    let dir = tempfile::tempdir().unwrap();
    let spec = NodeSpec { gpus: vec![GpuSpec::new("H100-80").with_mig()], ..NodeSpec::new(["T4"]) };
    let node = create(dir.path(), &spec).unwrap();
    assert!(matches!(node.charge(Pool::whole(0), 1), Err(NodeError::NotSupported(_))));
    let gi = node.create_gi(0, 19, None).unwrap();
    let other_gi = node.create_gi(0, 19, None).unwrap();
    let ci = node.create_ci(0, gi.id, gi.serial, 0, None).unwrap();
    let mut other = Other::start(dir.path());
    assert_eq!(other.ask(&format!("charge-gi {} {GIB}", gi.id)), "ok");
    let memory = |gi| node.memory(Pool::instance(0, gi)).unwrap();
    assert_eq!(memory(gi.id).used, GIB);
    assert_eq!(memory(gi.id).total, 9984 * MIB);
    assert_eq!(memory(other_gi.id).used, 0);
    assert_eq!(used(&node), GIB);
    assert!(other.ask(&format!("charge-gi {} {}", gi.id, 9 * GIB)).starts_with("out of memory"));
    assert!(matches!(node.destroy_ci(0, gi.id, gi.serial, ci.id), Err(NodeError::InUse(_))));
    assert!(matches!(node.reset(0), Err(NodeError::InUse(_))));
    other.kill();
    node.destroy_ci(0, gi.id, gi.serial, ci.id).unwrap();
    node.destroy_gi(0, gi.id, gi.serial).unwrap();
}

#[test]
fn a_process_killed_in_the_middle_of_its_work_leaves_the_node_usable() {
    let (dir, node) = node("A30");
    let mut steady = Other::start(dir.path());
    steady.ask("charge 12345");
    for round in 0..20 {
        let mut busy = Other::start(dir.path());
        busy.ask("charge 1");
        busy.tell("hammer 1000000000 3");
        // Meanwhile the lock goes to and fro; the kill falls somewhere into it.
        for _ in 0..20 * (round + 1) {
            node.charge(Pool::whole(0), 7).unwrap();
            node.release(Pool::whole(0), 7).unwrap();
        }
        busy.kill();
        eventually("only the steady process is left", || used(&node) == 12345);
    }
}

#[test]
fn threads_and_processes_do_not_lose_each_others_changes() {
    let (dir, node) = node("A30");
    let mut other = Other::start(dir.path());
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(other.ask("hammer 2000 3"), "ok"));
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    node.charge(Pool::whole(0), 5).unwrap();
                    node.release(Pool::whole(0), 4).unwrap();
                }
            });
        }
    });
    assert_eq!(used(&node), 4 * 500);
}

#[test]
fn a_node_survives_the_processes_that_use_it_and_forgets_them_at_a_reboot() {
    let dir = tempfile::tempdir().unwrap();
    let spec = NodeSpec { gpus: vec![GpuSpec::new("A100-80").with_mig()], ..NodeSpec::new(["T4"]) };
    drop(create(dir.path(), &spec).unwrap());
    let open = || Node::open(dir.path()).unwrap();
    open().create_gi(0, 14, None).unwrap();
    assert_eq!(Other::start(dir.path()).ask("gis"), "2g.20gb");
    let (boot, gis) = (open().boot_id().unwrap(), open().gis(0).unwrap());
    assert_eq!(gis.len(), 1);
    let mut other = Other::start(dir.path());
    other.ask(&format!("charge-gi {} {GIB}", gis[0].id));
    aliquot_sim_node::reboot(dir.path()).unwrap();
    let node = open();
    assert_ne!(node.boot_id().unwrap(), boot);
    assert!(node.gis(0).unwrap().is_empty());
    assert_eq!(used(&node), 0);
    assert!(node.mig_mode(0).unwrap().current, "an A100 keeps its MIG mode");
    let gi = node.create_gi(0, 14, None).unwrap();
    assert!(
        other.ask(&format!("charge-gi {} {GIB}", gi.id)).contains("rebooted"),
        "a process from before has nothing any more"
    );
    assert_eq!(boot_id_in(dir.path()), node.boot_id().unwrap());
}

fn boot_id_in(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("root/proc/sys/kernel/random/boot_id")).unwrap().trim().to_owned()
}
