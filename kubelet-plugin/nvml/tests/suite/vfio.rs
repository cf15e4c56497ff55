//! The real library on a simulated node whose GPUs can leave the driver: it has them open while it is, and lists those
//! that the driver had when it was opened.

use aliquot_nvml::{Gpus, NvmlGpus, Options, Pauses, Reopening};
use aliquot_sim_node::{NodeSpec, PciBus};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

const NONE: Pauses = Pauses { first: Duration::ZERO, longest: Duration::ZERO };

fn write(path: &Path, text: &str) {
    fs::OpenOptions::new().write(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

fn wait_for(bus: &PciBus, address: &str, driver: Option<&str>) {
    while bus.driver(address).as_deref() != driver {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_gpu_leaves_the_driver_when_the_library_is_let_go_of_and_is_listed_when_it_is_back() {
    let spec = NodeSpec {
        nvml_library: aliquot_sim_node::built_library(aliquot_sim_node::NVML_LIBRARY),
        ..NodeSpec::new(["H100-80", "H100-80"])
    };
    let folder = tempfile::tempdir().unwrap();
    let node = aliquot_sim_node::create(folder.path(), &spec).unwrap();
    let bus = node.pci_bus().unwrap();
    let root = folder.path().join("root");
    let open = {
        let root = root.clone();
        move || {
            let link = root.join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
            let library = link.canonicalize().unwrap();
            NvmlGpus::open(Options { library, sys_root: root.join("sys"), nvidia_smi: None })
                .map(NvmlGpus::opened)
        }
    };
    let gpus = Reopening::new(open().unwrap(), NONE, open);
    let all = gpus.inventory().unwrap().gpus;
    let address = all.first().and_then(|gpu| gpu.pci_bus_id.clone()).unwrap();
    let pci = root.join("sys/bus/pci");
    write(&pci.join("devices").join(&address).join("driver_override"), "vfio-pci");
    assert!(node.is_gpu_in_use(0).unwrap(), "the open library has it");
    let uuid = all.first().map(|gpu| gpu.uuid.clone()).unwrap();
    assert_eq!(gpus.persistence_mode(&uuid), Ok(true), "in which the driver does not give it away either");
    gpus.set_persistence_mode(&uuid, false).unwrap();
    write(&pci.join("devices").join(&address).join("driver/unbind"), &address);
    wait_for(&bus, &address, None);
    write(&pci.join("drivers_probe"), &address);
    assert_eq!(gpus.inventory().unwrap().gpus.len(), 2, "the driver waits for the library");
    gpus.let_go("a GPU changes its driver");
    wait_for(&bus, &address, Some("vfio-pci"));
    gpus.resume();
    let left = gpus.inventory().unwrap();
    assert_eq!((left.gpus.len(), left.unreadable.len()), (1, 0));
    assert_eq!(left.gpus.first().map(|gpu| &gpu.uuid), all.get(1).map(|gpu| &gpu.uuid));

    fs::write(pci.join("devices").join(&address).join("driver_override"), "\n").unwrap();
    write(&pci.join("devices").join(&address).join("driver/unbind"), &address);
    wait_for(&bus, &address, None);
    write(&pci.join("drivers_probe"), &address);
    wait_for(&bus, &address, Some("nvidia"));
    assert_eq!(gpus.inventory().unwrap().gpus.len(), 1, "a library lists what there was when it was opened");
    gpus.let_go("again");
    gpus.resume();
    assert_eq!(gpus.inventory().unwrap().gpus, all);
}
