//! Containers in user namespaces (`hostUsers: false`), under a real runc: what they get of ours is there, and they use
//! it, though nothing of it belongs to any of their users.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::prepare::Node;
use aliquot_kubelet_plugin::share::RegionStorage;
use aliquot_nvml::fake::{FakeGpus, h100_80};
use aliquot_sim_node::NodeSpec;
use common::container::{Bundle, Runc, edits, runcs, with_limiter};
use common::{World, now, private_mounts, request};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The machine's user that containers' root is.
const ROOT_IS: u32 = 200_000;

/// Where containers find device metadata.
const METADATA: &str = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims";

/// A node with a file system for each region, whose containers draw and whose driver has files.
fn node(world: &World, folder: &Path) -> Node {
    let mut node = with_limiter(world.node(), folder);
    node.machine.regions = RegionStorage::Tmpfs;
    node.machine.site.capabilities = "all".parse().unwrap();
    node.device_metadata = true;
    // Hooks are run by the container's root, who reaches what everybody does. An installation's directories are such.
    let hook = node.machine.site.oci_hook.as_ref().unwrap();
    assert!(hook.starts_with(folder));
    let library = format!("usr/lib/{}-linux-gnu/libcuda.so.535.261.03", std::env::consts::ARCH);
    let library = world.root().join(library);
    fs::create_dir_all(library.parent().unwrap()).unwrap();
    fs::copy(hook.with_file_name("libaliquot_core.so"), library).unwrap();
    node
}

fn world() -> World {
    let world = World::new(FakeGpus::new([h100_80(0)]));
    let simulated = tempfile::tempdir_in(world.root().parent().unwrap()).unwrap();
    aliquot_sim_node::create(simulated.path(), &NodeSpec::new(["H100-80"])).unwrap();
    fs::rename(simulated.path().join("root/sys"), world.root().join("sys")).unwrap();
    world
}

/// Gives this thread's mount namespace a `/dev` with these nodes beside the machine's, as NVIDIA's driver makes them on
/// a node: the runtime mounts them, as nobody makes any in a user namespace. Each is the machine's `null`.
fn nodes_of_the_host(dir: &Path, paths: &[String]) {
    let (none, bind) = (None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC);
    mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    for name in ["null", "zero", "full", "random", "urandom", "tty"] {
        let at = dir.join(name);
        fs::write(&at, "").unwrap();
        mount(Some(&Path::new("/dev").join(name)), &at, none, bind, none).unwrap();
    }
    for name in ["pts", "shm"] {
        let at = dir.join(name);
        fs::create_dir(&at).unwrap();
        mount(Some(&Path::new("/dev").join(name)), &at, none, bind, none).unwrap();
    }
    std::os::unix::fs::symlink("/proc/self/fd", dir.join("fd")).unwrap();
    std::os::unix::fs::symlink("pts/ptmx", dir.join("ptmx")).unwrap();
    for path in paths {
        let at = dir.join(path.strip_prefix("/dev/").unwrap());
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        let made = Command::new("mknod").args(["-m", "666"]).arg(&at).args(["c", "1", "3"]).status();
        assert!(made.unwrap().success());
    }
    mount(Some(dir), "/dev", none, MsFlags::MS_MOVE, none).unwrap();
}

/// A container of a share in a user namespace, the share's directory, and the node.
fn container(world: &World, uid: &str) -> (Bundle, PathBuf, Node) {
    let mut bundle = Bundle::new(&["cat", "cp", "dd", "readlink"]);
    let node = node(world, bundle.folder.path());
    let prepared = node.prepare(&request(uid, &[("s", "gpu-0-share")]), false, now()).unwrap();
    bundle.edits = edits(&node, uid, &prepared);
    let tasks: Vec<&String> = bundle.edits.hooks.iter().map(|hook| &hook.args[1]).collect();
    assert_eq!(tasks, ["driver", "link", "create-container"]);
    bundle.write("/work/word", "written");
    bundle.map_users(ROOT_IS);
    let shares = fs::read_dir(world.data().join("shares")).unwrap();
    let share =
        shares.map(|entry| entry.unwrap().path()).find(|path| path.display().to_string().contains(uid));
    (bundle, share.unwrap(), node)
}

fn succeeds(bundle: &Bundle, runc: &Runc, args: &[&str]) -> Output {
    let output = bundle.run(runc, args, "/");
    assert!(output.status.success(), "{runc:?}: {args:?}: {output:?}");
    output
}

#[test]
fn a_share_in_a_user_namespace_reads_its_quota_and_writes_its_region_and_nothing_else() {
    let name = "a share in a user namespace";
    let runcs = runcs(name);
    if runcs.is_empty() || !private_mounts(name) {
        return;
    }
    for (number, runc) in runcs.iter().enumerate() {
        let world = world();
        let uid = format!("c-{number}");
        let (mut bundle, share, node) = container(&world, &uid);
        let paths: Vec<String> = bundle.edits.device_nodes.iter().map(|node| node.path.clone()).collect();
        let without = bundle.run(runc, &["/bin/cat", "/work/word"], "/");
        let said = String::from_utf8_lossy(&without.stderr).into_owned();
        assert!(!without.status.success() && said.contains("/dev/"), "{runc:?}: {without:?}");
        let dev = tempfile::tempdir().unwrap();
        nodes_of_the_host(dev.path(), &paths);
        let id = share.file_name().unwrap().to_str().unwrap();
        let quota = format!("/run/aliquot/quota/{id}/quota");
        let region = format!("/run/aliquot/region/{id}/region");
        for user in [0, 1000] {
            bundle.user = user;
            let read = succeeds(&bundle, runc, &["/bin/cat", &quota]);
            assert_eq!(read.stdout, fs::read(share.join("quota/quota")).unwrap());
            let into = format!("of={region}");
            succeeds(
                &bundle,
                runc,
                &["/bin/dd", "if=/work/word", &into, "conv=notrunc", "seek=4096", "bs=1"],
            );
            let written = fs::read(share.join("region/region")).unwrap();
            assert_eq!(&written[4096..4103], b"written", "{runc:?}");
            // Devices are opened, the limiter is in the list, the links lead to the nodes.
            for path in &paths {
                succeeds(&bundle, runc, &["/bin/cp", "/work/word", path]);
            }
            let list = succeeds(&bundle, runc, &["/bin/cat", "/etc/ld.so.preload"]);
            assert!(String::from_utf8_lossy(&list.stdout).contains("libaliquot_preload.so"), "{list:?}");
            let cache = succeeds(&bundle, runc, &["/bin/cat", "/etc/ld.so.cache"]);
            assert!(String::from_utf8_lossy(&cache.stdout).contains("libcuda.so.1"));
            let metadata = format!("{METADATA}/claim-{uid}/s/gpu.aliquot.dev-metadata.json");
            succeeds(&bundle, runc, &["/bin/cat", &metadata]);
            let link = "/dev/dri/by-path/pci-0000:0f:00.0-render";
            let link = succeeds(&bundle, runc, &["/bin/readlink", "-e", link]);
            assert_eq!(link.stdout, b"/dev/dri/renderD128\n");
            for ours in [&quota, "/etc/ld.so.preload"] {
                let output = bundle.run(runc, &["/bin/cp", "/work/word", ours], "/");
                assert!(!output.status.success(), "{runc:?}: {ours} is written: {output:?}");
            }
        }
        umount2("/dev", MntFlags::MNT_DETACH).unwrap();
        node.unprepare(&uid).unwrap();
    }
}
