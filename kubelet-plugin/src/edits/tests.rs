use super::*;
use crate::claim::Consumed;
use crate::driver::DriverFile;
use crate::ledger::{Held, Partition};
use crate::testing::{DRIVER, POOL, claim, h100};
use aliquot_model::config::{ComputePolicy, FailMode, MpsConfig};
use aliquot_model::{DriverCapability, MigUuid, Placement, ProfileName};
use aliquot_mps::contract::MpsDir;
use std::collections::BTreeSet;

fn site() -> Site {
    Site {
        driver: DRIVER.into(),
        capabilities: DriverCapabilities::usual(),
        mounts: vec![ExtraMount { host: "/sim".into(), container: "/run/sim".into(), writable: true }],
        shares_dir: "/data/shares".into(),
        oci_hook: None,
    }
}

fn files() -> DriverFiles {
    let file = |host: &str, container: &str, capability| DriverFile {
        host: host.into(),
        container: vec![container.into()],
        capability,
        also: None,
        compat32: false,
    };
    DriverFiles {
        version: Some("580.65.06".into()),
        libraries: vec![
            file("/drv/usr/lib64/libcuda.so.580", "/usr/lib64/libcuda.so.1", DriverCapability::Compute),
            file("/drv/usr/lib64/libnvcuvid.so.580", "/usr/lib64/libnvcuvid.so.1", DriverCapability::Video),
        ],
        others: Vec::new(),
    }
}

fn device(tail: &str, name: &str) -> Device {
    Device {
        result_id: format!("u-1-{tail}"),
        request: "r".into(),
        pool: POOL.into(),
        device: name.into(),
        share_id: None,
        gpu: h100(0).uuid,
        held: Some(Held::Whole),
        partition: None,
        consumed: None,
        share: None,
        time_slice: None,
        mps: None,
        driver_capabilities: DriverCapabilities::default(),
        passed: None,
    }
}

fn share(tail: &str, order: u16) -> Device {
    let consumed = Consumed { memory_bytes: 4 << 30, cores_percent: 25, slots: 1 };
    Device {
        held: Some(Held::Share),
        consumed: Some(consumed),
        share: Some(Share {
            granted: None,
            consumed,
            compute_policy: ComputePolicy::Hard,
            priority: 0,
            fail_mode: FailMode::Closed,
            oversubscribe_bytes: 0,
            order,
            found: false,
        }),
        ..device(tail, "gpu-0-share")
    }
}

fn limiter() -> Limiter {
    Limiter {
        version: "0.1.0".into(),
        host_dir: "/opt/aliquot/limiter/0.1.0".into(),
        preload_file: "/data/limiter/0.1.0/ld.so.preload".into(),
    }
}

fn node(name: &str, major: u32, minor: u32) -> CharDevice {
    CharDevice { path: format!("/dev/{name}"), major, minor }
}

fn control() -> [CharDevice; 2] {
    [node("nvidiactl", 195, 255), node("nvidia-uvm", 510, 0)]
}

fn made(devices: &[(Device, Nodes)], indexed: bool) -> Spec {
    let daemon = MpsDir::new("/var/lib/kubelet/plugins/gpu.aliquot.dev/mps").claim("u-1").unwrap();
    let ours = Ours { limiter: Some(&limiter()), daemon: Some(&daemon) };
    let spec = spec(
        &site(),
        OfDriver { files: &files(), control: &control() },
        "boot-1",
        &claim("u-1"),
        devices,
        ours,
        indexed,
    )
    .unwrap();
    spec.validate().unwrap();
    spec
}

#[test]
fn each_result_is_a_device_beside_the_common_one() {
    let gpu =
        (device("0000000a", "gpu-0"), Nodes { devices: vec![node("nvidia0", 195, 0)], ..Nodes::default() });
    let mig = Device {
        partition: Some(Partition {
            profile_id: 19,
            profile: ProfileName::new("1g.10gb"),
            placement: Placement::new(6, 1),
            adopted: false,
            uuid: MigUuid::parse("MIG-00ff"),
        }),
        ..device("0000000b", "gpu-1-mig-1g10gb-19-6")
    };
    let devices = vec![
        node("nvidia1", 195, 1),
        node("nvidia-caps/nvidia-cap147", 235, 147),
        node("nvidia-caps/nvidia-cap148", 235, 148),
    ];
    let spec = made(&[gpu, (mig, Nodes { devices, ..Nodes::default() })], false);
    insta::assert_snapshot!(serde_json::to_string_pretty(&spec).unwrap());
}

#[test]
fn a_share_carries_the_limiter_its_own_quota_and_one_writable_file() {
    let spec = made(&[(share("0000000c", 0), Nodes::default())], false);
    let name = "u-1-0000000c".parse().unwrap();
    let edits = &spec.device(&name).unwrap().container_edits;
    let mounts: Vec<(&str, &str, bool)> = edits
        .mounts
        .iter()
        .map(|m| (m.host_path.as_str(), m.container_path.as_str(), m.options.iter().any(|o| o == "rw")))
        .collect();
    assert_eq!(
        mounts,
        [
            (
                "/opt/aliquot/limiter/0.1.0/libaliquot_preload.so",
                "/usr/local/lib/aliquot/0.1.0/libaliquot_preload.so",
                false
            ),
            (
                "/opt/aliquot/limiter/0.1.0/libaliquot_core.so",
                "/usr/local/lib/aliquot/0.1.0/libaliquot_core.so",
                false
            ),
            ("/data/limiter/0.1.0/ld.so.preload", "/etc/ld.so.preload", false),
            ("/data/shares/u-1-0000000c/quota", "/run/aliquot/quota/u-1-0000000c", false),
            ("/data/shares/u-1-0000000c/region/region", "/run/aliquot/region/u-1-0000000c/region", true),
        ]
    );
}

#[test]
fn a_gpu_through_mps_comes_with_the_sockets_and_the_shared_memory_of_the_claims_daemon() {
    let mps = |tail: &str, minor: u32| {
        let device = Device { mps: Some(MpsConfig::default()), ..device(tail, &format!("gpu-{minor}-mps")) };
        let devices = vec![node(&format!("nvidia{minor}"), 195, minor)];
        (device, Nodes { devices, ..Nodes::default() })
    };
    let whole = (device("0000000c", "gpu-2"), Nodes::default());
    let spec = made(&[mps("0000000a", 0), mps("0000000b", 1), whole], false);
    let edits = |name: &str| &spec.device(&name.parse().unwrap()).unwrap().container_edits;
    for (minor, name) in [(0, "u-1-0000000a"), (1, "u-1-0000000b")] {
        let edits = edits(name);
        let paths: Vec<_> =
            edits.mounts.iter().map(|m| (m.host_path.as_str(), m.container_path.as_str())).collect();
        let dir = "/var/lib/kubelet/plugins/gpu.aliquot.dev/mps/u-1";
        assert_eq!(
            paths,
            [
                (format!("{dir}/pipe").as_str(), "/tmp/nvidia-mps"),
                (format!("{dir}/shm").as_str(), "/dev/shm")
            ]
        );
        for mount in &edits.mounts {
            let has = |option: &&str| mount.options.iter().any(|other| other == option);
            assert!(["rw", "nosuid", "nodev", "noexec"].iter().all(has), "{mount:?}");
        }
        assert!(edits.environment().contains(&("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")));
        assert_eq!(edits.device_nodes[0].path, format!("/dev/nvidia{minor}"));
    }
    for other in ["u-1-0000000c", "u-1-common"] {
        assert!(!edits(other).mounts.iter().any(|mount| mount.container_path == "/dev/shm"), "{other}");
        assert!(!edits(other).environment().iter().any(|(name, _)| name.starts_with("CUDA_MPS")), "{other}");
    }
}

#[test]
fn every_hook_has_an_environment_that_nobody_else_writes_and_a_time_to_end() {
    let hooked = Site { oci_hook: Some("/opt/aliquot/limiter/0.1.0/aliquot-oci-hook".into()), ..site() };
    let devices = [
        (share("0000000c", 0), Nodes::default()),
        (share("0000000d", 1), Nodes::default()),
        (device("0000000a", "gpu-0"), Nodes::default()),
    ];
    let ours = Ours { limiter: Some(&limiter()), daemon: None };
    let spec = spec(
        &hooked,
        OfDriver { files: &files(), control: &control() },
        "boot-1",
        &claim("u-1"),
        &devices,
        ours,
        true,
    )
    .unwrap();
    spec.validate().unwrap();
    let edits = spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]);
    let hooks: Vec<&Hook> = edits.flat_map(|edits| &edits.hooks).collect();
    let tasks: Vec<&str> = hooks.iter().map(|hook| hook.args[1].as_str()).collect();
    assert_eq!(tasks, ["driver", "create-container", "create-container"], "one for each share");
    for hook in hooks {
        assert_eq!(hook.env, HOOK_ENV, "{hook:?}");
        assert_eq!(hook.timeout, Some(HOOK_TIMEOUT), "{hook:?}");
    }
}

#[test]
fn the_hook_of_every_share_alone_is_told_what_each_mount_of_it_is() {
    let hooked = Site { oci_hook: Some("/opt/aliquot/limiter/0.1.0/aliquot-oci-hook".into()), ..site() };
    let devices = [(share("0000000c", 0), Nodes::default()), (share("0000000d", 1), Nodes::default())];
    let mut spec = spec(
        &hooked,
        OfDriver { files: &files(), control: &control() },
        "boot-1",
        &claim("u-1"),
        &devices,
        Ours { limiter: Some(&limiter()), daemon: None },
        true,
    )
    .unwrap();
    let before = spec.clone();
    let of_driver = |spec: &Spec| spec.devices[0].container_edits.hooks.clone();
    assert_eq!(of_driver(&before)[0].args[1], "driver");
    assert_eq!(tell_mounts(&mut spec, |_| Err("gone")), Err("gone"));
    assert_eq!(spec, before);
    let identity = |path: &str| Ok::<_, ()>((7, path.len() as u64));
    assert_eq!(tell_mounts(&mut spec, identity), Ok(true));
    assert_eq!(of_driver(&spec), of_driver(&before), "mounts of the driver's files are compared by nobody");
    for device in &spec.devices[1..] {
        let edits = &device.container_edits;
        let told = edits.mounts.iter().flat_map(|mount| {
            ["--mounted".to_owned(), format!("7:{}:{}", mount.host_path.len(), mount.container_path)]
        });
        let args: Vec<String> = edits.hooks[0].args[..4].iter().cloned().chain(told).collect();
        assert_eq!(edits.hooks[0].args, args);
        assert_eq!(args.len(), 4 + 2 * 5);
    }
    assert_eq!(tell_mounts(&mut spec, identity), Ok(false));
    // An inode that is another one is told anew, in the former's place.
    let told = spec.clone();
    assert_eq!(tell_mounts(&mut spec, |path| Ok::<_, ()>((8, path.len() as u64))), Ok(true));
    assert_eq!(tell_mounts(&mut spec, identity), Ok(true));
    assert_eq!(spec, told);
}

#[test]
fn a_share_comes_with_the_library_that_its_limiter_asks_whatever_the_node_gives() {
    let with = |devices: &[Device]| {
        let site =
            Site { capabilities: "compute".parse().unwrap(), oci_hook: Some("/hook".into()), ..site() };
        let mut files = files();
        files.libraries[1].capability = DriverCapability::Utility;
        let devices: Vec<_> = devices.iter().map(|device| (device.clone(), Nodes::default())).collect();
        let driver = OfDriver { files: &files, control: &control() };
        let spec = spec(&site, driver, "boot-1", &claim("u-1"), &devices, Ours::default(), false).unwrap();
        let mounts = spec.devices[0].container_edits.mounts.iter();
        mounts
            .filter(|mount| mount.host_path.starts_with("/drv"))
            .map(|mount| &mount.host_path)
            .collect::<BTreeSet<_>>()
            .len()
    };
    assert_eq!(with(&[device("0000000a", "gpu-0")]), 1);
    assert_eq!(with(&[device("0000000a", "gpu-0"), share("a", 0)]), 2);
}

#[test]
fn containers_get_the_files_of_the_nodes_and_their_claims_capabilities_and_their_loader_is_told_of_them() {
    let with = |capabilities: &str, asked: &str| {
        let oci_hook = Some("/hook".into());
        let site = Site { capabilities: capabilities.parse().unwrap(), oci_hook, ..site() };
        let asks = Device { driver_capabilities: asked.parse().unwrap(), ..device("0000000b", "gpu-1") };
        let devices = [(device("0000000a", "gpu-0"), Nodes::default()), (asks, Nodes::default())];
        let mut files = files();
        for (library, name) in files.libraries.iter_mut().zip(["libcuda.so.1", "libnvcuvid.so.1"]) {
            library.container.push(format!("{}/{name}", container_library_dirs()[0]));
        }
        let spec = spec(
            &site,
            OfDriver { files: &files, control: &control() },
            "boot-1",
            &claim("u-1"),
            &devices,
            Ours::default(),
            false,
        )
        .unwrap();
        let common = &spec.devices[0].container_edits;
        let mounts = common.mounts.iter().filter(|mount| mount.host_path.starts_with("/drv"));
        let hosts: Vec<String> = mounts.map(|mount| mount.host_path.clone()).collect();
        (hosts, common.hooks[0].args[6..].join(" "))
    };
    let (cuda, video) = ("/drv/usr/lib64/libcuda.so.580", "/drv/usr/lib64/libnvcuvid.so.580");
    assert_eq!(with("compute,utility", ""), (vec![cuda.into(); 2], "--library libcuda.so.1".into()));
    let both = vec![cuda.into(), cuda.into(), video.into(), video.into()];
    let both = (both, "--library libcuda.so.1 --library libnvcuvid.so.1".to_owned());
    assert_eq!(with("all", ""), both);
    assert_eq!(with("compute,utility", "video"), both, "what one device of the claim asks for");
}

#[test]
fn a_hook_with_what_came_later_has_a_name_that_earlier_agents_leave_alone_and_today_is_renewed() {
    let site = Site { oci_hook: Some("/hook".into()), capabilities: DriverCapabilities::all(), ..site() };
    let mut files = files();
    files.libraries.push(DriverFile {
        host: "/drv/usr/lib/libcuda.so.580".into(),
        container: vec![format!("{CONTAINER_LIBRARY_DIR_32}/libcuda.so.1")],
        capability: DriverCapability::Compute,
        also: None,
        compat32: true,
    });
    let drm = crate::devices::drm::DrmNode {
        device: node("dri/card1", 226, 1),
        link: "/dev/dri/by-path/pci-0000:17:00.0-card".into(),
        target: "../card1".into(),
    };
    let devices = [(
        device("0000000a", "gpu-0"),
        Nodes { drm: vec![drm], own_libraries_only: true, ..Nodes::default() },
    )];
    let driver = OfDriver { files: &files, control: &control() };
    let mut spec = spec(&site, driver, "boot-1", &claim("u-1"), &devices, Ours::default(), false).unwrap();
    let lines = |spec: &Spec| -> Vec<String> {
        let hooks = spec.devices.iter().flat_map(|device| &device.container_edits.hooks);
        hooks.map(|hook| format!("{}: {}", hook.path, hook.args.join(" "))).collect()
    };
    let driver = "aliquot-hook-2 driver --version 580.65.06 --dir /usr/lib/x86_64-linux-gnu \
                  --without-compat --dir32 /usr/lib/i386-linux-gnu --library32 libcuda.so.1"
        .replace("x86_64", std::env::consts::ARCH);
    let link = "aliquot-hook-2 link --link ../card1:/dev/dri/by-path/pci-0000:17:00.0-card";
    assert_eq!(lines(&spec), [format!("/hook: {driver}"), format!("/hook: {link}")]);
    assert!(renew_hooks(&mut spec, Some(Path::new("/new"))));
    assert_eq!(lines(&spec), [format!("/new: {driver}"), format!("/new: {link}")]);
    assert!(!renew_hooks(&mut spec, Some(Path::new("/new"))));
}

#[test]
fn two_shares_in_one_container_do_not_overwrite_each_other() {
    let spec =
        made(&[(share("0000000c", 0), Nodes::default()), (share("0000000d", 1), Nodes::default())], true);
    let names: Vec<aliquot_cdi::QualifiedName> = ["u-1-common", "u-1-0000000c", "u-1-0000000d"]
        .map(|n| format!("{DRIVER}/claim={n}").parse().unwrap())
        .into();
    let edits = aliquot_cdi::resolve(std::slice::from_ref(&spec), &names).unwrap();
    let env = edits.environment();
    let names: Vec<&str> = env.iter().map(|(name, _)| *name).collect();
    assert_eq!(edits.env.len(), names.len(), "a variable is set twice: {names:?}");
    for name in ["CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_DEVICE_MEMORY_LIMIT_1", "CUDA_DEVICE_SM_LIMIT_1"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(env.contains(&("CUDA_DEVICE_MEMORY_LIMIT_0", "4096m")));
    assert!(env.contains(&("NVIDIA_VISIBLE_DEVICES", "void")));
}

#[test]
fn whole_gpus_get_no_limiter() {
    let spec = made(&[(device("0000000a", "gpu-0"), Nodes::default())], true);
    let text = serde_json::to_string(&spec).unwrap();
    assert!(!text.contains("ld.so.preload") && !text.contains("CUDA_DEVICE"), "{text}");
}

#[test]
fn nothing_about_a_device_is_left_for_the_host_to_say() {
    let devices =
        [(device("0000000a", "gpu-0"), Nodes { devices: vec![node("nvidia3", 195, 3)], ..Nodes::default() })];
    let spec = made(&devices, false);
    let nodes: Vec<_> = spec.devices.iter().flat_map(|device| &device.container_edits.device_nodes).collect();
    assert_eq!(nodes.len(), 3);
    for node in nodes {
        let complete =
            node.device_type.as_deref() == Some("c") && node.major.is_some() && node.minor.is_some();
        assert!(complete && node.host_path.is_none(), "{node:?}");
    }
}
