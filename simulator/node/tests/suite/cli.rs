//! The `aliquot-sim` program, and its other name.

use std::path::Path;
use std::process::{Command, Output};

use aliquot_sim_node::Node;

fn sim(dir: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_aliquot-sim")).env("ALIQUOT_SIM_NODE", dir).args(words).output().unwrap()
}

fn ok(dir: &Path, words: &[&str]) -> String {
    let output = sim(dir, words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn fails(dir: &Path, words: &[&str]) -> String {
    let output = sim(dir, words);
    assert!(!output.status.success(), "{words:?} was accepted");
    String::from_utf8(output.stderr).unwrap()
}

/// What `nvidia-smi` of the driver root says when it fails.
fn fails_as_smi(dir: &Path, word: &str) -> String {
    let smi = dir.join("root/usr/bin/nvidia-smi");
    let output = Command::new(smi).env("ALIQUOT_SIM_NODE", dir).arg(word).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_node_can_be_made_broken_and_mended_from_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let shown = ok(dir.path(), &["create", "H100-80:mig*2", "A30", "--seed", "cli"]);
    assert_eq!(shown.lines().filter(|l| l.starts_with("gpu ")).count(), 3, "{shown}");
    let node = Node::open(dir.path()).unwrap();
    node.create_gi(1, 9, None).unwrap();
    assert!(ok(dir.path(), &["show"]).contains("3g.40gb {4}:4"));

    assert_eq!(ok(dir.path(), &["xid", "2", "79"]), "event 1\n");
    assert_eq!(ok(dir.path(), &["ecc", "0", "--uncorrected", "5"]), "event 2\n");
    assert_eq!(node.settings(0).unwrap().ecc_uncorrected, 5);
    ok(dir.path(), &["fail", "nvmlDeviceCreateGpuInstance", "23", "--nth", "2"]);
    ok(dir.path(), &["delay", "cuInit", "1500"]);
    ok(dir.path(), &["view", "own"]);
    let json: serde_json::Value = serde_json::from_str(&ok(dir.path(), &["show", "--json"])).unwrap();
    assert_eq!(json["gpus"][2]["lost"], true);
    assert_eq!(json["faults"][0]["code"], 23);
    assert_eq!(json["faults"][1]["delayMs"], 1500);
    ok(dir.path(), &["clear"]);
    ok(dir.path(), &["reset", "2"]);
    assert!(!node.settings(2).unwrap().lost && node.faults().unwrap().is_empty());
    let boot = node.boot_id().unwrap();
    ok(dir.path(), &["reboot"]);
    assert_ne!(node.boot_id().unwrap(), boot);
    assert!(node.gis(1).unwrap().is_empty());
}

#[test]
fn nvidia_uvm_is_loaded_when_told() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "T4", "--late-uvm"]);
    let uvm = dir.path().join("root/dev/nvidia-uvm");
    assert!(!uvm.exists());
    ok(dir.path(), &["load-uvm"]);
    assert!(uvm.exists());
}

#[test]
fn the_driver_is_unloaded_when_nobody_uses_it_and_comes_back_in_another_version() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "H100-80:mig", "A100-40:mig"]);
    let node = Node::open(dir.path()).unwrap();
    let root = |path: &str| dir.path().join("root").join(path);
    let devices = || std::fs::read_to_string(root("proc/devices")).unwrap();
    let text = |path: &str| std::fs::read_to_string(root(path)).unwrap();
    let inode = || std::os::unix::fs::MetadataExt::ino(&root("sys/module/nvidia").metadata().unwrap());
    let (before, boot) = (inode(), node.boot_id().unwrap());
    node.create_gi(0, 9, None).unwrap();
    node.set_compute_mode(1, 3).unwrap();

    // Whoever has NVML open keeps it.
    let hold = node.hold_module();
    assert!(fails(dir.path(), &["unload"]).contains("NVML open"));
    drop(hold);
    assert!(fails(dir.path(), &["load"]).contains("is loaded"));
    ok(dir.path(), &["unload"]);
    assert_eq!(node.module(), None);
    assert!(fails(dir.path(), &["unload"]).contains("not loaded"));
    assert!(fails(dir.path(), &["load-uvm"]).contains("not loaded"));
    assert!(!devices().contains("nvidia") && !root("proc/driver").exists());
    assert!(!root("dev/nvidia-uvm").exists() && !root("dev/nvidia-caps").exists());
    assert!(!root("sys/module/nvidia").exists());
    let drm = |bus| format!("sys/bus/pci/devices/0000:{bus}:00.0/drm");
    assert!(!root(&drm("0f")).exists() && !root("dev/dri").exists());
    assert!(fails_as_smi(dir.path(), "-L").contains("not loaded"));

    ok(dir.path(), &["load", "590.10.01"]);
    assert!(node.module().is_some());
    assert!(devices().contains(" nvidia\n") && root("dev/nvidia-uvm").exists());
    assert_eq!(text(&format!("{}/renderD129/dev", drm("1f"))), "123:129\n");
    assert!(root("dev/dri/by-path/pci-0000:1f:00.0-render").exists());
    assert!(text("proc/driver/nvidia/version").contains(" 590.10.01 "));
    assert_ne!(inode(), before, "as another load of the module is seen by");
    assert_eq!((node.boot_id().unwrap(), node.installed_version().unwrap().as_str()), (boot, "590.10.01"));
    // What only a driver knows is lost; the mode of an A100 is on the board.
    let settings = node.settings(1).unwrap();
    assert_eq!((node.gis(0).unwrap().len(), settings.compute_mode), (0, 0));
    assert_eq!((node.mig_mode(0).unwrap().current, node.mig_mode(1).unwrap().current), (false, true));
    // A reboot loads what is installed.
    ok(dir.path(), &["unload"]);
    ok(dir.path(), &["reboot"]);
    assert!(node.module().is_some() && text("proc/driver/nvidia/version").contains(" 590.10.01 "));
}

#[test]
fn a_driver_that_numbers_anew_says_so_in_proc_and_leaves_the_gpus_what_they_are() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "H100-80", "T4"]);
    let text = |path: &str| std::fs::read_to_string(dir.path().join("root/proc").join(path)).unwrap();
    let gpus = || -> Vec<(u32, String, String)> {
        let node = Node::open(dir.path()).unwrap();
        node.gpus().iter().map(|gpu| (gpu.minor, gpu.uuid.clone(), gpu.bdf())).collect()
    };
    let major = |name: &str| {
        let devices = text("devices");
        let line = devices.lines().find(|line| line.ends_with(&format!(" {name}"))).unwrap();
        line.split(' ').next().unwrap().to_owned()
    };
    let then = (gpus(), major("nvidia"), major("nvidia-caps"), major("nvidia-uvm"));
    assert!(fails(dir.path(), &["load", "--renumber"]).contains("is loaded"));
    ok(dir.path(), &["unload"]);
    ok(dir.path(), &["load", "--renumber"]);
    let now = gpus();
    assert_eq!((now[0].0, now[1].0), (1, 0));
    for (then, now) in then.0.iter().zip(&now) {
        assert_eq!((&then.1, &then.2), (&now.1, &now.2));
        let information = text(&format!("driver/nvidia/gpus/{}/information", now.2));
        assert!(information.contains(&format!("Device Minor: \t {}\n", now.0)), "{information}");
        assert!(information.contains(&now.1), "{information}");
    }
    assert_eq!(major("nvidia"), then.1, "it is fixed");
    assert_eq!((major("nvidia-uvm"), major("nvidia-caps")), (then.2.clone(), then.3.clone()));
    ok(dir.path(), &["reboot"]);
    assert_eq!((gpus(), major("nvidia-uvm")), (now, then.2), "a reboot changes nothing of it");
}

#[test]
fn a_process_keeps_the_driver_from_being_unloaded_but_by_force() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "T4"]);
    let node = Node::open(dir.path()).unwrap();
    let pool = aliquot_sim_node::Pool::whole(0);
    node.context_opened(pool, None).unwrap();
    assert!(fails(dir.path(), &["unload"]).contains("processes use the GPUs"));
    let _hold = node.hold_module();
    ok(dir.path(), &["unload", "--force"]);
    ok(dir.path(), &["load"]);
    assert!(node.charge(pool, 1).is_err(), "its context is lost");
    // What was held is not held of the new one.
    ok(dir.path(), &["unload"]);
}

#[test]
fn a_node_can_have_the_driver_of_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let (record, node) = (dir.path().join("record.json"), dir.path().join("node"));
    let path = record.to_str().unwrap();
    let file = r#"{"simulated": false, "device": {"name": "NVIDIA H200", "driver": "580.1"}, "facts": {
        "time_slices": {"median_us": 1989.6}, "release_after_sigkill": {"ms": 41.5}}}"#;
    std::fs::write(&record, file).unwrap();
    ok(&node, &["create", "--record", path, "H100-80"]);
    assert_eq!(std::fs::read_to_string(node.join("cuda.conf")).unwrap(), "slice_us=1990\n");
    assert_eq!(Node::open(&node).unwrap().spec().reap_delay_ms, 42);
    // Made anew without one, it has nothing of it.
    ok(&node, &["create", "H100-80"]);
    assert!(!node.join("cuda.conf").exists());

    std::fs::write(&record, file.replace("1989.6", "\"long\"")).unwrap();
    let refused = fails(&node, &["create", "--record", path, "H100-80"]);
    assert!(refused.contains(path) && refused.contains("fact time_slices"), "{refused}");
}

#[test]
fn errors_name_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    assert!(fails(dir.path(), &["show"]).contains("node.json"));
    assert!(fails(dir.path(), &["create", "H101"]).contains("H101"));
    assert!(fails(dir.path(), &["create", "--spec", "/no/such/file"]).contains("/no/such/file"));
    ok(dir.path(), &["create", "T4"]);
    assert!(fails(dir.path(), &["xid", "7", "13"]).contains("no GPU has this index"));
    assert!(fails(dir.path(), &["dance"]).contains("usage:"));
}

#[test]
fn a_container_sees_the_gpus_of_its_nodes_and_a_host_is_none_for_what_real_libraries_left_there() {
    let run = |major: u32, then: &str| {
        let dir = tempfile::tempdir().unwrap();
        ok(dir.path(), &["create", "A30", "T4"]);
        let smi = dir.path().join("root/usr/bin/nvidia-smi");
        let make = |name: &str, minor: u32| format!("mknod /dev/{name} c {major} {minor}");
        let (control, gpu) = (make("nvidiactl", 255), make("nvidia1", 1));
        let script = format!("mount -t tmpfs none /dev && {control} && {gpu} && {then}");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).arg(smi).env("ALIQUOT_SIM_NODE", dir.path());
        command.env_remove("ALIQUOT_SIM_ROOT").output().unwrap()
    };
    if !run(120, "true").status.success() {
        eprintln!("skipped: this machine lets nobody make devices");
        return;
    }
    let listed = |major| String::from_utf8(run(major, "\"$0\" -L").stdout).unwrap();
    let (container, host) = (listed(120), listed(195));
    assert!(container.lines().count() == 1 && container.contains("T4"), "{container}");
    assert_eq!(host.lines().count(), 2, "{host}");
}

#[test]
fn it_plays_nvidia_smi_from_the_driver_root() {
    let dir = tempfile::tempdir().unwrap();
    ok(dir.path(), &["create", "A100-40:mig", "T4"]);
    let smi = dir.path().join("root/usr/bin/nvidia-smi");
    let run = |words: &[&str]| {
        Command::new(&smi)
            .env_remove("ALIQUOT_SIM_NODE")
            .env("ALIQUOT_SIM_ROOT", dir.path().join("root"))
            .args(words)
            .output()
            .unwrap()
    };
    let node = Node::open(dir.path()).unwrap();
    let gi = node.create_gi(0, 9, None).unwrap();
    node.create_ci(0, gi.id, gi.serial, 2, None).unwrap();
    let listed = String::from_utf8(run(&["-L"]).stdout).unwrap();
    assert!(listed.contains(&node.gpus()[1].uuid) && listed.contains("MIG 3g.20gb"), "{listed}");
    assert!(listed.contains(&node.mig_devices(0).unwrap()[0].uuid));
    assert!(run(&["compute-policy", "-i", &node.gpus()[1].uuid, "--set-timeslice=2"]).status.success());
    assert_eq!((node.settings(0).unwrap().timeslice, node.settings(1).unwrap().timeslice), (0, 2));
    assert!(run(&["-i", "1", "-c", "EXCLUSIVE_PROCESS"]).status.success());
    assert_eq!(node.settings(1).unwrap().compute_mode, 3);
    assert!(!run(&["--query-gpu=name"]).status.success(), "it needs a format");
    assert!(!run(&["--query-gpu=pstate", "--format=csv"]).status.success(), "it knows no such property");
}
