//! Our CDI spec against NVIDIA's own (`nvidia-ctk cdi generate`), on the files of a real driver beside a simulated NVML.
//!
//! Both specs become lists of what a container gets, one line each. A line that only one of them has, or that says
//! something else in each, must stand in `ctk/differences.rs` with its reason; a reason that no line needs is stale.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail the test"
)]

mod differences;
mod layouts;

use crate::common;

use aliquot_cdi::{Hook, Spec};
use aliquot_kubelet_plugin::driver::{Driver, DriverFiles, Roots};
use aliquot_model::{DriverCapabilities, DriverCapability};
use aliquot_nvml::fake::{FakeGpus, h100_80};
use aliquot_sim_node::{NVML_LIBRARY, NodeSpec, built_library};
use common::{World, now, request};
use differences::{DIFFERENCES, Difference};
use layouts::{LAYOUTS, Layout};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What a container gets: what it is, and what of it.
type Lines = BTreeMap<String, String>;

/// The driver's device nodes on this machine.
fn device_nodes() -> BTreeSet<String> {
    let names = fs::read_dir("/dev").unwrap().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with("nvidia")).collect()
}

/// The output of a script under `tools/`, or why there is none.
fn tool(line: &[&str]) -> Result<PathBuf, String> {
    let (script, arguments) = line.split_first().unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools").join(script);
    let said = Command::new(path).args(arguments).output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if said.status.success() {
        Ok(text(&said.stdout).into())
    } else {
        Err(format!("tools/{script}: {}", text(&said.stderr)))
    }
}

/// Releases of Debian, with a driver each: 535 and 550.
const SUITES: [&str; 2] = ["bookworm", "trixie"];

/// The files of real drivers. Prints which are missing.
fn drivers(test: &str) -> Vec<PathBuf> {
    let files = SUITES.map(|suite| tool(&["real-driver", suite, "files"]));
    let told = |found: Result<PathBuf, String>| {
        found.inspect_err(|reason| println!("SKIPPED: a part of {test}: {reason}")).ok()
    };
    files.into_iter().filter_map(told).collect()
}

/// Names of the libraries that one is linked against.
fn needed(library: &Path) -> Vec<String> {
    let said = Command::new("readelf").arg("-d").arg(library).output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let lines = text.lines().filter(|line| line.contains("(NEEDED)"));
    lines.filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']').to_owned())).collect()
}

#[test]
fn what_a_library_is_linked_against_comes_with_it_whatever_the_capability() {
    let name = "libraries of single capabilities";
    if Command::new("readelf").arg("--version").output().is_err() {
        return println!("SKIPPED: {name}: needs readelf (binutils)");
    }
    for files in drivers(name) {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let root = real_root(dir.path(), &files, &LAYOUTS[0]);
        let roots = Roots { driver: root.clone(), host: root.clone(), proc: root.join("proc") };
        let all = Driver::new(roots).files();
        for capability in DriverCapability::ALL {
            let given = all.of(&capability.name().parse().unwrap());
            let names = |files: &DriverFiles| -> BTreeSet<String> {
                let paths = files.libraries.iter().flat_map(|file| &file.container);
                paths.map(|path| path.rsplit('/').next().unwrap().to_owned()).collect()
            };
            let (ours, there) = (names(&all), names(&given));
            for library in &given.libraries {
                let missing: Vec<String> = needed(&library.host)
                    .into_iter()
                    .filter(|name| ours.contains(name) && !there.contains(name))
                    .collect();
                let host = library.host.display();
                assert!(missing.is_empty(), "{} alone: {host} needs {missing:?}", capability.name());
            }
        }
    }
}

#[test]
fn every_difference_to_nvidias_own_spec_has_a_reason() {
    let name = "our CDI spec against NVIDIA's own";
    let ctk = match tool(&["nvidia-ctk"]) {
        Ok(ctk) => ctk,
        Err(reason) => return println!("SKIPPED: {name}: {reason}"),
    };
    let private = ["--mount", "setpriv", "true"];
    if !Command::new("unshare").args(private).output().is_ok_and(|said| said.status.success()) {
        return println!("SKIPPED: {name}: needs root, and unshare and setpriv of util-linux");
    }
    let before = device_nodes();
    let mut used = BTreeSet::new();
    let mut unexplained = Vec::new();
    let drivers = drivers(name);
    let all = drivers.iter().flat_map(|files| LAYOUTS.iter().map(move |layout| (files, layout)));
    for (files, layout) in all {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let root = real_root(dir.path(), files, layout);
        let theirs = theirs(&ctk, dir.path(), &root);
        let ours = ours(&root);
        for line in differences_of(&theirs, &ours) {
            let fits = |known: &Difference| !known.own_root || layout.is_own_root();
            match DIFFERENCES.iter().position(|known| fits(known) && explains(known, &line)) {
                Some(index) => drop(used.insert(index)),
                None => unexplained.push(format!("{} {}: {line}", layouts::version(files), layout.name)),
            }
        }
    }
    let made: Vec<_> = device_nodes().difference(&before).cloned().collect();
    assert!(made.is_empty(), "device nodes were made on this machine: {made:?}");
    assert!(
        unexplained.is_empty(),
        "{} differences without a reason:\n{}",
        unexplained.len(),
        unexplained.join("\n")
    );
    if drivers.len() < SUITES.len() {
        return;
    }
    let stale: Vec<&str> = (0..DIFFERENCES.len())
        .filter(|index| !used.contains(index))
        .map(|index| DIFFERENCES[index].what)
        .collect();
    assert!(stale.is_empty(), "these differences are gone, take them out of the table: {stale:?}");
}

/// A driver's root with the real files, the simulated NVML in place of the real one, and sockets of its daemons.
fn real_root(dir: &Path, files: &Path, layout: &Layout) -> PathBuf {
    let version = layouts::version(files);
    let spec = NodeSpec { driver_version: version.clone(), ..NodeSpec::new(["A100-40"]) };
    aliquot_sim_node::create(dir, &spec).unwrap();
    let root = dir.join("root");
    let nvml = built_library(NVML_LIBRARY).expect("cargo builds it beside this test");
    layouts::fill(layout, files, &root, &version, &nvml);
    // As the driver's installation does; without it NVIDIA's generator looks in the directories alone.
    let _ = Command::new("/sbin/ldconfig").arg("-r").arg(&root).output();
    root
}

fn theirs(ctk: &Path, node: &Path, root: &Path) -> Lines {
    let flag = |name: &str| format!("--{name}={}", root.display());
    // A real driver's libraries make device nodes of the machine's where they may; this can make none.
    let rights = ["--no-new-privs", "--bounding-set=-all"];
    // It asks the kernel of this machine for DRM nodes, wherever the driver's root is.
    let said = Command::new("unshare")
        .args(["--mount", "sh", "-c", "mount --bind \"$0\" /sys && exec \"$@\""])
        .arg(root.join("sys"))
        .arg("setpriv")
        .args(rights)
        .arg(ctk)
        .args(["cdi", "generate", "--mode=nvml", "--format=json", &flag("driver-root"), &flag("dev-root")])
        .env("ALIQUOT_SIM_NODE", node)
        .output()
        .unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let spec: Spec = serde_json::from_slice(&said.stdout).unwrap();
    lines(&spec, "0", root)
}

fn ours(root: &Path) -> Lines {
    let world = World::new(FakeGpus::new([h100_80(0)]));
    let mut node = world.node();
    node.machine.driver =
        Driver::new(Roots { driver: root.to_owned(), host: root.to_owned(), proc: root.join("proc") });
    node.machine.sys_root = root.join("sys");
    node.machine.site.capabilities = DriverCapabilities::all();
    node.machine.site.oci_hook = Some("/opt/aliquot/aliquot-oci-hook".into());
    node.prepare(&request("c-1", &[("r", "gpu-0")]), false, now()).unwrap();
    let name = aliquot_kubelet_plugin::edits::spec_name(&node.machine.site.driver, "c-1");
    let spec = node.machine.cdi.read(&name).unwrap().unwrap();
    let device = spec.devices.last().unwrap().name.as_str().to_owned();
    lines(&spec, &device, root)
}

/// What a container with one device gets.
fn lines(spec: &Spec, device: &str, root: &Path) -> Lines {
    let mut lines = Lines::new();
    let common = spec.devices.iter().filter(|known| {
        let name = known.name.as_str();
        name == device || name.ends_with("-common")
    });
    let edits = [&spec.container_edits].into_iter().chain(common.map(|device| &device.container_edits));
    for edits in edits {
        for (name, value) in edits.environment() {
            lines.insert(format!("env {name}"), value.to_owned());
        }
        for node in &edits.device_nodes {
            lines.insert(format!("node {}", node.path), node.permissions.clone().unwrap_or_default());
        }
        for mount in &edits.mounts {
            let host = Path::new(&mount.host_path).canonicalize().unwrap();
            let host = host.strip_prefix(root.canonicalize().unwrap()).unwrap().display().to_string();
            let value = format!("{host} {}", mount.options.join(","));
            let before = lines.insert(named(&mount.container_path), value.clone());
            assert!(before.is_none_or(|before| before == value), "{} is two files", mount.container_path);
        }
        for hook in &edits.hooks {
            lines.insert(format!("hook {}", hook.args[1]), String::new());
            lines.extend(links(hook, root));
        }
    }
    // A link is the file that it leads to.
    let resolved: Vec<(String, String)> = lines
        .iter()
        .filter(|(key, value)| key.starts_with("library") && value.starts_with("-> "))
        .map(|(key, _)| (key.clone(), follow(&lines, key)))
        .collect();
    lines.extend(resolved);
    lines
}

/// The links that a hook makes, by the key of each: libraries by names, others as they stand.
fn links(hook: &Hook, root: &Path) -> Lines {
    let (separator, prefix) = match hook.args[1].as_str() {
        "create-symlinks" => ("::", root.to_str().unwrap()),
        "link" => (":", ""),
        _ => return Lines::new(),
    };
    let all = hook.args.iter().filter_map(|arg| arg.split_once(separator));
    let named = all.map(|(target, path)| {
        let key = named(path.strip_prefix(prefix).unwrap_or(path));
        let target = if key.starts_with("library") { target.rsplit('/').next().unwrap() } else { target };
        (key, format!("-> {target}"))
    });
    named.collect()
}

fn follow(lines: &Lines, key: &str) -> String {
    let mut value = &lines[key];
    while let Some(target) = value.strip_prefix("-> ") {
        value = &lines[&format!("library {target}")];
    }
    value.clone()
}

/// Libraries go by their names, as the loader takes them from any directory that it searches.
fn named(path: &str) -> String {
    match path.rsplit_once('/') {
        Some((_, name)) if name.contains(".so") => format!("library {name}"),
        _ => format!("file {path}"),
    }
}

fn differences_of(theirs: &Lines, ours: &Lines) -> Vec<String> {
    let only = |whose: &str, these: &Lines, others: &Lines| -> Vec<String> {
        these.keys().filter(|key| !others.contains_key(*key)).map(|key| format!("{whose}: {key}")).collect()
    };
    let mut found = only("theirs", theirs, ours);
    found.extend(only("ours", ours, theirs));
    for (key, theirs) in theirs {
        match ours.get(key) {
            Some(ours) if ours != theirs => found.push(format!("both: {key}: {theirs} and {ours}")),
            _ => {}
        }
    }
    found
}

fn explains(known: &Difference, line: &str) -> bool {
    assert!(!known.why.is_empty());
    known.what.strip_suffix('*').map_or(line == known.what, |start| line.starts_with(start))
}
