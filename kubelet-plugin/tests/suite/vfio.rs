//! GPUs for virtual machines, on a bus that does what the kernel would: prepared and given back, killed at every point,
//! and everything that can be in the way.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;
mod lost;
mod persistence;
mod scene;

use aliquot_kubelet_plugin::claim::Settings;
use aliquot_kubelet_plugin::ledger::{DeviceNumber, State};
use aliquot_kubelet_plugin::status::data::DeviceData;
use aliquot_model::config::{Iommu, IommuBackend, VfioConfig};
use aliquot_nvml::fake::until_killed;
use aliquot_nvml::{GpuProcess, Gpus, ProcessKind};
use common::kill::killer;
use common::{now, request};
use scene::{GPU, NEIGHBOUR, Scene};
use serde_json::Value;
use std::fs;
use std::time::Duration;

/// A GPU for a virtual machine, and a share of another one.
fn wanted() -> aliquot_kubelet_plugin::claim::Request {
    request("c-1", &[("vm", "gpu-0-vfio"), ("share", "gpu-1-share")])
}

fn only_vm(uid: &str) -> aliquot_kubelet_plugin::claim::Request {
    request(uid, &[("vm", "gpu-0-vfio")])
}

fn spec(scene: &Scene, uid: &str) -> Value {
    let name = scene.world.cdi().join(format!("gpu.aliquot.dev-claim-{uid}.json"));
    serde_json::from_slice(&fs::read(name).unwrap()).unwrap()
}

#[test]
fn a_gpu_goes_to_vfio_with_its_sound_and_comes_back() {
    let scene = Scene::new();
    let node = scene.node();
    let prepared = node.prepare(&wanted(), false, now()).unwrap();
    assert_eq!(scene.drivers(), [Some("vfio-pci".into()), Some("vfio-pci".into()), Some("nvidia".into())]);
    // The container of the machine gets the group and nothing of the driver; the other one is served as usual.
    assert_eq!(prepared[0].cdi.len(), 1, "{prepared:?}");
    assert!(prepared[1].cdi.iter().any(|id| id.ends_with("-common")), "{prepared:?}");
    let spec = spec(&scene, "c-1");
    let own = |id: &str| {
        let name = id.rsplit_once('=').unwrap().1;
        let devices = spec["devices"].as_array().unwrap();
        devices.iter().find(|device| device["name"] == name).unwrap()["containerEdits"].clone()
    };
    let edits = own(&prepared[0].cdi[0]);
    let nodes: Vec<&str> =
        edits["deviceNodes"].as_array().unwrap().iter().map(|node| node["path"].as_str().unwrap()).collect();
    assert_eq!(nodes, ["/dev/vfio/vfio", "/dev/vfio/15"]);
    assert_eq!((&edits["mounts"], &edits["hooks"]), (&Value::Null, &Value::Null));
    assert!(edits["env"].to_string().contains("NVIDIA_VISIBLE_DEVICES=void"), "{edits}");
    // The same answer again, without touching anything.
    assert_eq!(scene.node().prepare(&wanted(), false, now()).unwrap(), prepared);
    assert!(node.unprepare("c-1").unwrap());
    scene.assert_clean();
}

#[test]
fn a_claim_of_a_gpu_alone_needs_nothing_of_the_driver() {
    let scene = Scene::new();
    // As where only virtual machines run: nobody has loaded nvidia-uvm.
    fs::write(scene.world.proc().join("devices"), "Character devices:\n195 nvidia\n").unwrap();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    let common = &spec(&scene, "c-1")["devices"][0]["containerEdits"];
    assert_eq!(common["deviceNodes"], Value::Null, "{common}");
    assert!(scene.node().unprepare("c-1").unwrap());
    scene.assert_clean();
}

#[test]
fn a_gpu_that_a_virtual_machine_has_is_still_there_and_nobody_elses() {
    let scene = Scene::new();
    let before = scene.node().overview().unwrap().0;
    let offered: Vec<bool> = before.offers.values().map(Result::is_ok).collect();
    assert_eq!(offered, [true, false], "the second GPU shares its group");
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    assert_eq!(scene.world.gpus.inventory().unwrap().gpus.len(), 1, "NVML does not list it");
    // After a restart as well.
    let (overview, error) = scene.node().overview().unwrap();
    assert_eq!(error, None);
    let inventory = overview.inventory.as_ref().unwrap();
    assert_eq!(inventory.gpus[0], before.inventory.as_ref().unwrap().gpus[0]);
    assert_eq!((inventory.gpus.len(), inventory.unreadable.len()), (2, 0));
    assert_eq!(overview.passed.iter().collect::<Vec<_>>(), [&inventory.gpus[0].uuid]);
    assert_eq!(overview.offers, before.offers);
    for device in ["gpu-0", "gpu-0-share", "gpu-0-vfio", "gpu-0-mig-1g10gb-19-0"] {
        let refused = scene.node().prepare(&request("c-2", &[("r", device)]), false, now()).unwrap_err();
        assert!(refused.to_string().contains("overlaps gpu-0-vfio"), "{device}: {refused}");
    }
    // What KubeVirt reads of it.
    let record = scene.node().record("c-1").unwrap().unwrap();
    let data = DeviceData::of(&record.devices[0], &(inventory.gpus[0].clone(), Vec::new()));
    let data = serde_json::to_value(data).unwrap();
    assert_eq!((&data["type"], &data["pciBusID"]), (&"vfio".into(), &GPU.into()), "{data}");
    assert!(scene.node().unprepare("c-1").unwrap());
    scene.assert_clean();
    let after = scene.node().overview().unwrap().0;
    assert_eq!((after.inventory, after.passed.len()), (before.inventory, 0));
}

#[test]
fn iommufd_is_given_where_it_is_asked_for() {
    let scene = Scene::new();
    let mut request = only_vm("c-1");
    let iommu = Iommu { backend: IommuBackend::IommuFd, api_device: true };
    request.devices[0].settings = Settings::Vfio(VfioConfig { iommu });
    scene.node().prepare(&request, false, now()).unwrap();
    let spec = spec(&scene, "c-1").to_string();
    assert!(spec.contains("/dev/vfio/devices/vfio15") && spec.contains("/dev/iommu"), "{spec}");
}

#[test]
fn a_kill_at_any_point_of_prepare_converges() {
    let expected = Scene::new().node().prepare(&wanted(), false, now()).unwrap();
    let mut points = 0;
    for at in 1.. {
        let scene = Scene::new();
        let (probe, _) = killer(at);
        let node = scene.node_with(probe);
        if until_killed(|| node.prepare(&wanted(), false, now())).is_some() {
            break;
        }
        points += 1;
        let what = format!("killed at point {at}");
        let node = scene.node();
        let recovery = node.recover().unwrap();
        assert!(recovery.failed.is_empty(), "{what}: {recovery:?}");
        if scene.world.ledger().claims.is_empty() {
            scene.assert_clean();
        }
        assert_eq!(node.prepare(&wanted(), false, now()).unwrap(), expected, "{what}");
        assert!(node.unprepare("c-1").unwrap(), "{what}");
        scene.assert_clean();
    }
    // Write-ahead, three steps and completion, each with a point before and after, a note and six writes to sysfs.
    assert_eq!(points, 17);
}

#[test]
fn a_kill_at_any_point_of_unprepare_converges() {
    let mut points = 0;
    for at in 1.. {
        let scene = Scene::new();
        scene.node().prepare(&wanted(), false, now()).unwrap();
        let (probe, _) = killer(at);
        let node = scene.node_with(probe);
        if until_killed(|| node.unprepare("c-1")).is_some() {
            scene.assert_clean();
            break;
        }
        points += 1;
        let node = scene.node();
        node.recover().unwrap();
        node.unprepare("c-1").unwrap();
        scene.assert_clean();
    }
    assert_eq!(points, 16);
}

#[test]
fn what_uses_the_gpu_is_named_and_nothing_is_changed() {
    let scene = Scene::new();
    let uuid = scene.world.gpus.inventory().unwrap().gpus[0].uuid.clone();
    let process = GpuProcess {
        pid: 4711,
        name: Some("python3".into()),
        kind: ProcessKind::Compute,
        memory_bytes: None,
        gpu_instance: None,
        compute_instance: None,
    };
    scene.world.gpus.start_process(&uuid, process);
    let refused = scene.node().prepare(&only_vm("c-1"), false, now()).unwrap_err().to_string();
    assert!(refused.contains("4711"), "{refused}");
    scene.world.gpus.stop_process(4711);
    let monitor = scene.open("4712", "nv-hostengine", "/dev/nvidia0");
    let refused = scene.node().prepare(&only_vm("c-1"), false, now()).unwrap_err().to_string();
    assert!(refused.contains("process 4712 (nv-hostengine)") && refused.contains("-pm 0"), "{refused}");
    scene.assert_clean();
    fs::remove_dir_all(monitor).unwrap();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
}

#[test]
fn what_is_missing_is_said() {
    let scene = Scene::new();
    let refusal = |device: &str, change: &dyn Fn(&mut aliquot_kubelet_plugin::prepare::Node)| {
        let mut node = scene.node();
        change(&mut node);
        node.prepare(&request("c-1", &[("vm", device)]), false, now()).unwrap_err().to_string()
    };
    let off = refusal("gpu-0-vfio", &|node| node.machine.vfio.on = false);
    assert!(off.contains("--vfio"), "{off}");
    let shared = refusal("gpu-1-vfio", &|_| {});
    assert!(shared.contains(NEIGHBOUR) && shared.contains("mlx5_core"), "{shared}");
    fs::rename(scene.sys().join("bus/pci/drivers/vfio-pci"), scene.sys().join("aside")).unwrap();
    let module = refusal("gpu-0-vfio", &|_| {});
    assert!(module.contains("modprobe vfio-pci"), "{module}");
    scene.assert_clean();
}

/// A kernel module that holds a GPU is in no list.
#[test]
fn a_driver_that_does_not_let_go_keeps_the_gpu_held_until_it_does() {
    let scene = Scene::new();
    scene.set_in_use(true);
    let error = scene.node().prepare(&only_vm("c-1"), false, now()).unwrap_err().to_string();
    assert!(error.contains(GPU), "{error}");
    // On its way from one driver to the other it is nobody's, and is neither given out nor called lost.
    let node = scene.node();
    assert_eq!(node.recover().unwrap().failed.len(), 1);
    let refused = node.prepare(&request("c-2", &[("r", "gpu-0")]), false, now()).unwrap_err().to_string();
    assert!(refused.contains("overlaps gpu-0-vfio"), "{refused}");
    assert_eq!(node.overview().unwrap().0.inventory.unwrap().gpus.len(), 2);
    scene.set_in_use(false);
    node.prepare(&only_vm("c-1"), false, now()).unwrap();
    assert!(node.unprepare("c-1").unwrap());
    scene.assert_clean();
}

#[test]
fn a_gpu_is_not_taken_from_a_machine_that_runs() {
    let scene = Scene::new();
    let node = scene.node();
    node.prepare(&only_vm("c-1"), false, now()).unwrap();
    let record = node.record("c-1").unwrap().unwrap();
    assert!(!node.has_processes(&record));
    let machine = scene.open("4713", "qemu-system-x86", "/dev/vfio/15");
    assert!(node.has_processes(&record));
    let error = node.unprepare("c-1").unwrap_err().to_string();
    assert!(error.contains("process 4713 (qemu-system-x86)"), "{error}");
    assert_eq!(scene.drivers()[0].as_deref(), Some("vfio-pci"));
    fs::remove_dir_all(machine).unwrap();
    assert!(node.unprepare("c-1").unwrap());
    scene.assert_clean();
}

#[test]
fn a_gpu_that_its_driver_does_not_take_back_stays_held_and_is_tried_again() {
    let scene = Scene::new();
    let node = scene.node();
    node.prepare(&only_vm("c-1"), false, now()).unwrap();
    scene.bus.refuse("nvidia", true);
    for _ in 0..2 {
        let error = node.unprepare("c-1").unwrap_err().to_string();
        assert!(
            error.contains("with no driver and not with nvidia") && error.contains("modprobe"),
            "{error}"
        );
        assert_eq!(scene.world.ledger().claims["c-1"].state, State::Unpreparing);
    }
    let refused = node.prepare(&request("c-2", &[("r", "gpu-0")]), false, now()).unwrap_err().to_string();
    assert!(refused.contains("being unprepared"), "{refused}");
    scene.bus.refuse("nvidia", false);
    assert!(node.unprepare("c-1").unwrap());
    scene.assert_clean();
}

#[test]
fn a_driver_that_refuses_the_gpu_leaves_it_with_its_own() {
    let scene = Scene::new();
    scene.bus.refuse("vfio-pci", true);
    let error = scene.node().prepare(&only_vm("c-1"), false, now()).unwrap_err().to_string();
    assert!(error.contains("with no driver and not with vfio-pci"), "{error}");
    scene.assert_clean();
}

#[test]
fn after_a_reboot_the_gpu_is_given_anew_or_is_free() {
    let mut scene = Scene::new();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    scene.reboot();
    assert_eq!(scene.drivers()[0].as_deref(), Some("nvidia"));
    assert!(scene.node().overview().unwrap().0.passed.is_empty());
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    assert_eq!(scene.drivers()[0].as_deref(), Some("vfio-pci"));
    scene.reboot();
    // Given back without being prepared again: the address may mean another card by now, which is left alone.
    assert!(scene.node().unprepare("c-1").unwrap());
    scene.assert_clean();
}

#[test]
fn with_the_checkpoint_lost_a_gpu_comes_back_when_its_claim_is_given_back() {
    let scene = Scene::new();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    scene.lose_checkpoint();
    let node = scene.node();
    let recovery = node.recover().unwrap();
    let [lost] = recovery.unaccounted.as_slice() else { panic!("{recovery:?}") };
    let machine = scene.open("4713", "qemu-system-x86", "/dev/vfio/15");
    assert!(node.has_strangers(lost, &Default::default()));
    assert!(node.unprepare("c-1").unwrap_err().to_string().contains("qemu-system-x86"));
    fs::remove_dir_all(machine).unwrap();
    assert!(!node.has_strangers(lost, &Default::default()));
    assert!(node.unprepare("c-1").unwrap());
    scene.assert_clean();
}

/// Its number opens nothing of it meanwhile, whoever was started with it.
#[test]
fn a_gpu_that_a_virtual_machine_has_is_reached_by_no_number_of_the_driver() {
    let scene = Scene::new();
    let node = scene.node();
    node.prepare(&request("c-2", &[("share", "gpu-1-share")]), false, now()).unwrap();
    node.prepare(&only_vm("c-1"), false, now()).unwrap();
    {
        // As after the driver was loaded anew and exchanged the numbers.
        let mut locked = node.store.lock(Duration::from_secs(1)).unwrap();
        let mut ledger = locked.load().unwrap().ledger;
        ledger.claims.get_mut("c-2").unwrap().numbers.insert(DeviceNumber { major: 195, minor: 0 });
        locked.save(&ledger).unwrap();
    }
    assert_eq!(node.overview().unwrap().0.reached, []);
    assert!(node.unprepare("c-1").unwrap());
    let reached = node.overview().unwrap().0.reached;
    assert_eq!(reached.len(), 1, "back with the driver it can be opened: {reached:?}");
    assert!(node.unprepare("c-2").unwrap());
    scene.assert_clean();
}

#[test]
fn a_spec_that_names_nothing_of_the_driver_does_not_follow_its_numbers() {
    let scene = Scene::new();
    scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    let before = spec(&scene, "c-1");
    let listed = scene.world.proc().join("devices");
    let devices = fs::read_to_string(&listed).unwrap();
    // The driver is gone, and so is what the kernel says of the group.
    fs::write(&listed, "Character devices:\n").unwrap();
    let number = scene.sys().join("class/vfio/15/dev");
    let text = fs::read(&number).unwrap();
    fs::remove_file(&number).unwrap();
    let done = scene.node().renumber().unwrap();
    assert_eq!((done.rewritten, done.failed), (Vec::new(), Vec::new()));
    assert_eq!(spec(&scene, "c-1"), before);
    fs::write(&number, text).unwrap();
    fs::write(&listed, devices).unwrap();
    assert!(scene.node().unprepare("c-1").unwrap());
    scene.assert_clean();
}

#[test]
fn administration_is_given_what_there_is_beside_a_gpu_that_a_virtual_machine_has() {
    let scene = Scene::new();
    let mut node = scene.node();
    node.device_metadata = true;
    node.prepare(&only_vm("c-1"), false, now()).unwrap();
    let all = request("c-2", &[("all", "gpu-0-admin"), ("all", "gpu-1-admin")]);
    let prepared = node.prepare(&all, false, now()).unwrap();
    assert_eq!(prepared.len(), 2, "{prepared:?}");
    let (first, second) = ("\"/dev/nvidia0\"", "\"/dev/nvidia1\"");
    let text = spec(&scene, "c-2").to_string();
    assert!(text.contains(second) && !text.contains(first), "{text}");
    assert_eq!(node.left_out("c-2").unwrap(), ["gpu-0-admin"]);
    // Also one that asks for nothing else.
    node.prepare(&request("c-3", &[("r", "gpu-0-admin")]), false, now()).unwrap();
    // Containers that start when it is back have it.
    node.unprepare("c-1").unwrap();
    assert_eq!(node.left_out("c-2").unwrap(), Vec::<String>::new());
    assert_eq!(node.prepare(&all, false, now()).unwrap(), prepared);
    let text = spec(&scene, "c-2").to_string();
    assert!(text.contains(second) && text.contains(first), "{text}");
    for uid in ["c-2", "c-3"] {
        assert!(node.unprepare(uid).unwrap());
    }
    scene.assert_clean();
}

/// The claim's first step switched the mode off, and that is not to be done to a GPU that is away.
#[test]
fn a_board_that_was_in_mig_mode_is_prepared_again_while_it_is_away() {
    let scene = Scene::new();
    scene.world.gpus.set_mig_mode(&Scene::gpu(), true).unwrap();
    let prepared = scene.node().prepare(&only_vm("c-1"), false, now()).unwrap();
    assert_eq!(scene.node().prepare(&only_vm("c-1"), false, now()).unwrap(), prepared);
    assert!(scene.node().unprepare("c-1").unwrap());
    scene.assert_clean();
}

#[test]
fn a_gpu_on_nvswitches_is_given_away_only_where_somebody_sees_to_its_fabric() {
    let scene = Scene::with(|gpu| gpu.nvswitch = true);
    let mut node = scene.node();
    let reason = |node: &aliquot_kubelet_plugin::prepare::Node| {
        node.overview().unwrap().0.offers[&Scene::gpu()].clone().unwrap_err().to_string()
    };
    assert!(reason(&node).contains("Fabric Manager"), "{}", reason(&node));
    let refused = node.prepare(&only_vm("c-1"), false, now()).unwrap_err().to_string();
    assert!(refused.contains("--vfio-on-nvswitch"), "{refused}");
    scene.assert_clean();
    node.machine.vfio.on_nvswitch = true;
    node.prepare(&only_vm("c-1"), false, now()).unwrap();
    assert!(scene.node().unprepare("c-1").unwrap(), "what is out comes back, whatever is switched on");
    scene.assert_clean();
}
