//! Shares of a partition: what a quota on a MIG device holds, whatever a program calls the device.

use crate::support::c::compile;
use crate::support::variant::make;
use crate::support::{Bench, GIB, Holder, MIB, answers, built};
use aliquot_sim_node::{MigDevice, Pool, ci_capability_minor, gi_capability_minor};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A GPU with these partitions.
struct Divided {
    bench: Bench,
    partitions: Vec<MigDevice>,
}

/// What a container has: a folder that it sees as `/run/aliquot`, and device nodes.
struct Container<'a> {
    node: &'a Divided,
    stub: PathBuf,
    devices: PathBuf,
}

impl Divided {
    fn new(profiles: &[&str]) -> Self {
        let bench = Bench::divided(["H100-80"]);
        for profile in profiles {
            make(&bench.node, 0, profile);
        }
        let partitions = bench.node.mig_devices(0).unwrap();
        Self { bench, partitions }
    }

    fn gpu(&self) -> &str {
        &self.bench.node.gpus()[0].uuid
    }

    /// Bytes that all processes hold on a partition.
    fn used(&self, partition: usize) -> u64 {
        self.bench.node.memory(Pool::instance(0, self.partitions[partition].gi.id)).unwrap().used
    }

    /// A container with shares by id, partition and bytes; it sees the partitions of its shares and those besides.
    fn container(&self, shares: &[(&str, usize, u64)], besides: &[usize]) -> Container<'_> {
        let name: String = shares.iter().map(|(id, _, _)| *id).collect();
        let root = self.bench.folder.path().join(format!("container-{name}"));
        for (order, (id, partition, bytes)) in (0..).zip(shares) {
            self.bench.share_of(id, &self.partitions[*partition].uuid, order, *bytes);
            for part in ["quota", "region"] {
                std::fs::create_dir_all(root.join(part)).unwrap();
                let target = self.bench.root().join(part).join(id);
                std::os::unix::fs::symlink(target, root.join(part).join(id)).unwrap();
            }
        }
        let stub = self.bench.copy_limiter(&built().limiter, &root, &format!("limiter-{name}"));
        let seen = shares.iter().map(|share| share.1).chain(besides.iter().copied());
        let devices = root.join("devices");
        self.lay_nodes(&devices.join("dev"), seen);
        Container { node: self, stub, devices }
    }

    /// The device nodes of partitions, as the runtime makes them of a CDI spec.
    fn lay_nodes(&self, dev: &Path, partitions: impl Iterator<Item = usize>) {
        let minor = self.bench.node.gpus()[0].minor;
        let mut names = vec!["nvidiactl".into(), "nvidia-uvm".into(), format!("nvidia{minor}")];
        for MigDevice { ci, .. } in partitions.map(|at| &self.partitions[at]) {
            let capabilities = [gi_capability_minor(minor, ci.gi), ci_capability_minor(minor, ci.gi, ci.id)];
            names.extend(capabilities.map(|capability| format!("nvidia-caps/nvidia-cap{capability}")));
        }
        std::fs::create_dir_all(dev.join("nvidia-caps")).unwrap();
        for name in names {
            std::fs::write(dev.join(name), []).unwrap();
        }
    }
}

impl Container<'_> {
    fn probe(&self, arguments: &[&str]) -> Command {
        let mut command = self.node.bench.probe(arguments);
        command.env("LD_PRELOAD", &self.stub).env("ALIQUOT_SIM_ROOT", &self.devices);
        command
    }

    fn run(&self, arguments: &[&str]) -> Vec<String> {
        answers(self.probe(arguments))
    }

    fn hold(&self, arguments: &[&str]) -> Holder {
        Holder::start(self.probe(arguments).arg("hold"))
    }
}

#[test]
fn two_shares_of_a_partition_hold_what_each_was_given_and_a_neighbour_has_its_own() {
    let node = Divided::new(&["2g.20gb", "1g.10gb"]);
    let (large, small) = (at(&node, "2g.20gb"), at(&node, "1g.10gb"));
    let shares = [("a", large, 6 * GIB), ("b", large, 3 * GIB), ("c", small, 2 * GIB)];
    let containers = shares.map(|share| node.container(&[share], &[]));
    let fill = ["init", "retain", "fill:linear:256M", "info"];
    let holders: Vec<Holder> = containers.iter().map(|container| container.hold(&fill)).collect();
    for (holder, (_, _, bytes)) in holders.iter().zip(shares) {
        assert_eq!(holder.before[2], format!("{} 2", bytes / (256 * MIB)));
        assert_eq!(holder.before[3], format!("0 0 {bytes}"));
    }
    assert_eq!((node.used(large), node.used(small)), (9 * GIB, 2 * GIB));
    // A second process of a share finds nothing left.
    assert_eq!(containers[0].run(&["init", "retain", "alloc:linear:2M", "alloc:vmm:2M"])[2..], ["2", "2"]);
    holders.into_iter().for_each(|holder| drop(holder.finish()));
}

fn at(node: &Divided, profile: &str) -> usize {
    node.partitions.iter().position(|device| device.name == profile).unwrap()
}

#[test]
fn a_share_is_never_more_than_its_partition() {
    let node = Divided::new(&["1g.10gb"]);
    let container = node.container(&[("a", 0, 30 * GIB)], &[]);
    let pool = node.bench.node.memory(Pool::instance(0, node.partitions[0].gi.id)).unwrap();
    let told = container.run(&["init", "retain", "total", "info", "nvml"]);
    let whole = told[2].strip_prefix("0 ").unwrap().parse::<u64>().unwrap();
    assert!(whole <= pool.total && whole > 9 * GIB, "{told:?}");
    assert_eq!(told[3].split(' ').next_back(), Some(whole.to_string().as_str()), "{told:?}");
    assert_eq!(told[4], format!("0 {} {} 0", pool.total, pool.free), "{told:?}");
}

#[test]
fn nvml_shows_a_share_as_its_mig_device_and_nobody_elses_processes() {
    let node = Divided::new(&["2g.20gb", "1g.10gb"]);
    let (large, small) = (at(&node, "2g.20gb"), at(&node, "1g.10gb"));
    let [ours, beside, apart] = [("a", large, 4 * GIB), ("b", large, 4 * GIB), ("c", small, 2 * GIB)]
        .map(|share| node.container(&[share], &[]));
    let hold = ["init", "retain", "alloc:linear:1G"];
    let others = [beside.hold(&hold), apart.hold(&hold)];
    let uuid = &node.partitions[large].uuid;
    let by_uuid = format!("nvml:{uuid}");
    let script = ["init", "retain", "alloc:linear:512M", "nvml", &by_uuid, "processes"];
    let told = ours.run(&script);
    let mine = format!("0 {} {} {}", 4 * GIB, 4 * GIB - 512 * MIB, 512 * MIB);
    assert_eq!(told[3..5], [mine.clone(), mine]);
    let (listed, pid) = told[5].rsplit_once(' ').unwrap();
    assert!([format!("[{pid}]").as_str(), "[]"].contains(&listed), "{told:?}");
    others.into_iter().for_each(|holder| drop(holder.finish()));
}

/// It has the capability to monitor all partitions too, so that the driver would tell it.
#[test]
fn of_the_gpu_of_its_partition_a_container_learns_nothing_as_a_whole() {
    const NO_PERMISSION: &str = "4";
    let node = Divided::new(&["2g.20gb", "1g.10gb"]);
    let (ours, other) = (node.container(&[("a", 0, GIB)], &[]), node.container(&[("b", 1, GIB)], &[]));
    std::fs::write(ours.devices.join("dev/nvidia-caps/nvidia-cap2"), []).unwrap();
    let other = other.hold(&["init", "retain", "alloc:linear:1G"]);
    let [memory, processes, busy] =
        ["nvml", "processes", "busy"].map(|what| format!("{what}:{}", node.gpu()));
    let told = ours.run(&["init", "retain", "alloc:linear:512M", &memory, &processes, &busy]);
    assert_eq!(told[3], format!("{NO_PERMISSION} 0 0 0"));
    assert!(told[4].starts_with(&format!("[{NO_PERMISSION}] ")), "{told:?}");
    assert!(told[5].starts_with(&format!("Err({NO_PERMISSION}) Err({NO_PERMISSION}) ")), "{told:?}");
    // Without the limiter the driver tells: it is not the simulated one that refuses here.
    let mut without = node.bench.unlimited(&built().probe);
    let told = {
        without.arg(&processes);
        answers(without)
    };
    assert!(!told[0].starts_with(&format!("[{NO_PERMISSION}] ")), "{told:?}");
    other.finish();
}

/// Whatever devices a program asks for, it has the limit of the partition that the driver gave it, or no device.
#[test]
fn no_name_of_a_device_leads_around_the_limit() {
    let node = Divided::new(&["2g.20gb", "1g.10gb"]);
    let containers = [
        (node.container(&[("a", 0, GIB)], &[]), vec![Some(GIB), None]),
        // Two partitions, each with a share of its own.
        (node.container(&[("b", 0, GIB), ("c", 1, 2 * GIB)], &[]), vec![Some(GIB), Some(2 * GIB)]),
    ];
    let (gpu, uuids) = (node.gpu(), [0, 1].map(|at| node.partitions[at].uuid.as_str()));
    let digits = gpu.strip_prefix("GPU-").unwrap();
    let old = [0, 1].map(|at| {
        let ci = &node.partitions[at].ci;
        format!("MIG-GPU-{digits}/{}/{}", ci.gi, ci.id)
    });
    let names = [
        None,
        Some("0".to_owned()),
        Some("1".to_owned()),
        Some("0,1".to_owned()),
        Some(gpu.to_owned()),
        Some(gpu[..12].to_owned()),
        Some(uuids[0].to_owned()),
        Some(uuids[1].to_owned()),
        Some(uuids[1][..12].to_owned()),
        Some(uuids.join(",")),
        Some([uuids[1], uuids[0]].join(",")),
        Some(format!("{gpu},{}", uuids[1])),
        Some(old[0].clone()),
        Some(old[1].clone()),
        Some(format!("MIG-{digits}")),
        Some(String::new()),
    ];
    let mut given = 0;
    for (container, limits) in &containers {
        for name in &names {
            let mut command = container.probe(&["init", "retain", "uuid", "total", "fill:linear:64M"]);
            command.envs(name.iter().map(|name| ("CUDA_VISIBLE_DEVICES", name)));
            let told = crate::support::values(&command.output().unwrap());
            if told[0] != "0" {
                assert_ne!(told[1], "0", "{name:?}: {told:?}");
                continue;
            }
            let is_given =
                |uuid: &&str| told[2] == format!("0 {}", uuid.replace("MIG-", "").replace('-', ""));
            let partition = uuids.iter().position(is_given).expect("a partition");
            let limit = limits[partition].expect("one that the container sees");
            assert_eq!(told[3..], [format!("0 {limit}"), format!("{} 2", limit / (64 * MIB))], "{name:?}");
            given += 1;
        }
    }
    assert!(given > 16, "{given}");
}

#[test]
fn a_partition_of_the_containers_own_beside_a_share_has_no_limit() {
    let node = Divided::new(&["2g.20gb", "1g.10gb"]);
    let container = node.container(&[("a", 0, GIB)], &[1]);
    for (partition, code) in [(0, "2"), (1, "0")] {
        let mut command = container.probe(&["init", "retain", "alloc:linear:2G"]);
        command.env("CUDA_VISIBLE_DEVICES", &node.partitions[partition].uuid);
        assert_eq!(answers(command)[2], code);
    }
}

/// As when another claim's share has made the partition anew: with another UUID, by the same nodes.
#[test]
fn a_quota_of_a_partition_that_the_container_does_not_have_lets_no_program_start() {
    let node = Divided::new(&["2g.20gb", "1g.10gb"]);
    let gone = "MIG-00000000-1111-2222-3333-444444444444";
    for (id, besides) in [("a", &[][..]), ("b", &[1])] {
        let container = node.container(&[(id, 0, GIB)], besides);
        for named in [gone, &node.partitions[1].uuid] {
            node.bench.share_of(id, named, 0, GIB);
            let output = container.probe(&["init"]).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            let is_had = named != gone && !besides.is_empty();
            // Of a partition that the container has too, the one quota is that one's.
            let code = if is_had { "0" } else { "802" };
            assert_eq!(crate::support::values(&output), [code], "{named}, {besides:?}: {said}");
            assert_eq!(said.contains(named) && said.contains("delete the pod"), !is_had, "{said}");
        }
        node.bench.share_of(id, &node.partitions[0].uuid, 0, GIB);
        assert_eq!(container.run(&["init"]), ["0"]);
    }
}

/// A driver before 470: it tells of each device only which GPU it is on.
const OLD_DRIVER: &str = "
    int cuInit(unsigned flags) { return 0; }
    int cuDeviceGetCount(int *count) { *count = 1; return 0; }
    int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
    int cuDeviceGetUuid(char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = 0x11; return 0; }";

#[test]
fn a_driver_that_cannot_tell_which_mig_device_it_gives_is_refused() {
    let bench = Bench::whole(["H100-80"]);
    let folder = bench.folder.path().join("old-driver");
    std::fs::create_dir(&folder).unwrap();
    let source = folder.join("driver.c");
    std::fs::write(&source, OLD_DRIVER).unwrap();
    compile(&source, &folder.join("libcuda.so.1"), &["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]);
    let nvml = "libnvidia-ml.so.1";
    std::os::unix::fs::symlink(built().driver.join(nvml), folder.join(nvml)).unwrap();
    let uuid = "11111111-1111-1111-1111-111111111111";
    for (prefix, code) in [("GPU", "0"), ("MIG", "802")] {
        bench.share_of("a", &format!("{prefix}-{uuid}"), 0, GIB);
        let output = bench.probe(&["init"]).env("LD_LIBRARY_PATH", &folder).output().unwrap();
        assert_eq!(crate::support::values(&output), [code]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said.contains("cuDeviceGetUuid_v2 is missing"), code != "0", "{said}");
    }
}
