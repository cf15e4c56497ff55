//! Our edits under real container runtimes, with an image and a tenant that mean harm.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

use crate::common;

use aliquot_kubelet_plugin::prepare::Node;
use aliquot_model::GpuInfo;
use aliquot_nvml::fake::{FakeGpus, h100_80};
use common::container::{Bundle, edits, runcs, with_limiter};
use common::{World, now, request};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What runs when a loader takes it: a file on the host that says so. The path is not in the container.
const EVIL: &str = r#"
#include <fcntl.h>
#include <unistd.h>
static void mark(void) {
    int fd = open(MARKER, O_CREAT | O_WRONLY, 0644);
    if (fd >= 0) close(fd);
}
__attribute__((constructor)) static void loaded(void) { mark(); }
unsigned la_version(unsigned version) { mark(); return version; }
"#;

/// A container with a share, of an image that sets every variable and file that could make a program of the host
/// run its code; and the file that appears on the host if one does.
fn hostile(world: &World, uid: &str) -> (Bundle, PathBuf) {
    let mut bundle = Bundle::new(&["cat"]);
    let marker = bundle.folder.path().join("marker");
    let source = bundle.folder.path().join("evil.c");
    std::fs::write(&source, EVIL).unwrap();
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(bundle.at("evil.so"))
        .arg(format!("-DMARKER={:?}", marker.display().to_string()))
        .arg(&source)
        .status();
    assert!(built.unwrap().success());
    // The last is one that a dynamic Rust program needs and the container's own program does not.
    for name in ["work/evil.so", "aliquot-oci-hook", "work/aliquot-oci-hook", "libgcc_s.so.1"] {
        bundle.copy(&bundle.at("evil.so"), name);
    }
    let evil = "/proc/self/cwd/evil.so";
    bundle.env = vec![
        format!("LD_PRELOAD={evil}"),
        format!("LD_AUDIT={evil}"),
        "LD_LIBRARY_PATH=/proc/self/cwd".into(),
        "GLIBC_TUNABLES=glibc.malloc.check=3:glibc.rtld.nns=1:glibc.rtld.optional_static_tls=0".into(),
        "PATH=/proc/self/cwd:.".into(),
    ];
    // A line of the image's own, which only the hook keeps.
    bundle.write("/etc/ld.so.preload", "/lib/mine.so\n");
    let node = with_limiter(world.node(), bundle.folder.path());
    let prepared = node.prepare(&request(uid, &[("s", "gpu-0-share")]), false, now()).unwrap();
    bundle.edits = edits(&node, uid, &prepared);
    let tasks: Vec<&String> = bundle.edits.hooks.iter().map(|hook| &hook.args[1]).collect();
    assert_eq!(tasks, ["create-container"], "there is no driver in this node's root");
    (bundle, marker)
}

/// What the container prints when the hook has run to its end.
fn merged(bundle: &Bundle) -> String {
    let stub = &bundle.edits.hooks[0].args[3];
    format!("/lib/mine.so\n{stub}\n")
}

#[test]
fn the_loader_of_a_container_is_told_of_the_drivers_libraries() {
    let world = World::new(FakeGpus::new([h100_80(0)]));
    let version = "535.261.03";
    let arch = std::env::consts::ARCH;
    for (number, runc) in runcs("the loader's cache").iter().enumerate() {
        let mut bundle = Bundle::new(&["cat"]);
        bundle.copy(Path::new("/sbin/ldconfig"), "/sbin/ldconfig");
        bundle.write("/etc/hostname", "c\n");
        let node = with_limiter(world.node(), bundle.folder.path());
        // The driver is there by now, which the agent finds when it prepares.
        let library = world.root().join(format!("usr/lib/{arch}-linux-gnu/libcuda.so.{version}"));
        std::fs::create_dir_all(library.parent().unwrap()).unwrap();
        std::fs::copy(
            bundle.folder.path().join("limiter").join(env!("CARGO_PKG_VERSION")).join("libaliquot_core.so"),
            &library,
        )
        .unwrap();
        let uid = format!("c-{number}");
        let prepared = node.prepare(&request(&uid, &[("r", "gpu-0")]), false, now()).unwrap();
        bundle.edits = edits(&node, &uid, &prepared);
        for read_only in [false, true] {
            bundle.read_only = read_only;
            let output = bundle.run(runc, &["/sbin/ldconfig", "-p"], "/");
            assert!(output.status.success(), "{runc:?}: {output:?}");
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            for name in ["libcuda.so.1", "libcuda.so", "libcuda.so.535.261.03"] {
                let path = format!("=> /usr/lib/{arch}-linux-gnu/{name}");
                assert!(said.lines().any(|line| line.ends_with(&path)), "{runc:?}: {said}");
            }
            let _ = std::fs::remove_file(bundle.at("/etc/ld.so.cache"));
        }
        node.unprepare(&uid).unwrap();
    }
}

#[test]
fn libraries_of_the_image_never_come_first_on_gpus_on_which_cuda_refuses_them() {
    let told = |brand: &str| {
        let world = World::new(FakeGpus::new([GpuInfo { brand: brand.into(), ..h100_80(0) }]));
        let mut node = world.node();
        node.machine.site.oci_hook = Some("/hook".into());
        let dir = world.root().join("usr/lib64");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("libcuda.so.535.261.03"), "").unwrap();
        let prepared = node.prepare(&request("c", &[("r", "gpu-0")]), false, now()).unwrap();
        let hooks = edits(&node, "c", &prepared).hooks;
        hooks[0].args.iter().any(|arg| arg == "--without-compat")
    };
    assert_eq!(
        ["Nvidia", "Tesla", "NvidiaRTX", "GeForce", "Titan"].map(told),
        [false, false, false, true, true]
    );
}

#[test]
fn a_container_reads_its_device_metadata_and_cannot_write_it() {
    let world = World::new(FakeGpus::new([h100_80(0)]));
    for (number, runc) in runcs("device metadata").iter().enumerate() {
        let mut bundle = Bundle::new(&["cat", "cp"]);
        let uid = format!("c-{number}");
        let node = Node { device_metadata: true, ..world.node() };
        let prepared = node.prepare(&request(&uid, &[("r", "gpu-0")]), false, now()).unwrap();
        bundle.edits = edits(&node, &uid, &prepared);
        let dir = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims";
        let file = format!("{dir}/claim-{uid}/r/gpu.aliquot.dev-metadata.json");
        let host = world.data().join("dra-device-metadata").join(&uid).join("r/metadata.json");
        let there = std::fs::read(&host).unwrap();
        let output = bundle.run(runc, &["/bin/cat", &file], "/");
        assert!(output.status.success(), "{runc:?}: {output:?}");
        assert_eq!(output.stdout, there, "{runc:?}");
        bundle.write("/work/other", "{}");
        let output = bundle.run(runc, &["/bin/cp", "/work/other", &file], "/");
        assert!(!output.status.success(), "{runc:?}: {output:?}");
        assert_eq!(std::fs::read(&host).unwrap(), there, "{runc:?}");
        node.unprepare(&uid).unwrap();
    }
}

const LIST: [&str; 2] = ["/bin/cat", "/etc/ld.so.preload"];

#[test]
fn no_variable_and_no_file_of_an_image_makes_the_hook_run_its_code() {
    let world = World::new(FakeGpus::new([h100_80(0)]));
    for (number, runc) in runcs("a hostile image").iter().enumerate() {
        let (bundle, marker) = hostile(&world, &format!("c-{number}"));
        for cwd in ["/", "/work"] {
            let output = bundle.run(runc, &LIST, cwd);
            assert!(output.status.success(), "{runc:?}: {output:?}");
            assert_eq!(String::from_utf8_lossy(&output.stdout), merged(&bundle), "{runc:?}: {output:?}");
            assert!(!marker.exists(), "{runc:?} in {cwd}: the image's code ran on the host");
        }
    }
}

#[test]
fn a_hook_without_environment_or_a_dynamic_one_with_it_would_not_have_been_enough() {
    let name = "what the image's variables do without our defences";
    let world = World::new(FakeGpus::new([h100_80(0)]));
    let Some(old) = runcs(name).into_iter().find(|runc| runc.gives_hooks_the_containers_environment()) else {
        println!("SKIPPED: {name}: needs runc 1.2 or older, which gives hooks the container's environment");
        return;
    };
    let (mut bundle, marker) = hostile(&world, "c");
    let ours = bundle.edits.hooks[0].clone();
    let mut run = |path: &Path, env: &[String]| {
        let _ = std::fs::remove_file(&marker);
        bundle.edits.hooks[0].path = path.display().to_string();
        bundle.edits.hooks[0].env = env.to_vec();
        let output = bundle.run(&old, &LIST, "/");
        assert!(output.status.success(), "{output:?}");
        marker.exists()
    };
    // Any dynamic program of the host stands for a dynamic hook.
    let (dynamic, fixed) = (Path::new("/bin/true"), Path::new(&ours.path));
    assert!(run(dynamic, &[]), "the image's code did not run: this test shows nothing");
    assert!(!run(dynamic, &ours.env), "the environment alone keeps it out");
    assert!(!run(fixed, &[]), "being static alone keeps it out");
}
