//! Which files of the driver there are, and whether the node agent's list has them all.

use super::line::Line;
use crate::life::{self, said};
use crate::stage::LONGEST;
use aliquot_cdi::{ContainerEdits, Spec};
use aliquot_kubelet_plugin::driver::{DriverFiles, Roots};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

const OF: &str = "driver";
/// Where installers and distributions have ever put libraries.
const FOLDERS: [&str; 8] = [
    "usr/lib",
    "usr/lib64",
    "usr/local",
    "opt",
    "lib",
    "lib64",
    "run/opengl-driver/lib",
    "home/kubernetes/bin",
];
/// How far below them it is looked.
const DEPTH: usize = 6;
/// Second byte behind the magic number of an ELF file of 64 bits.
const ELF: [u8; 4] = [0x7f, b'E', b'L', b'F'];
const BITS_64: u8 = 2;

/// The node agent's list against a search that knows nothing of the driver but its version.
pub(crate) fn lines(roots: &Roots) -> Vec<Line> {
    let found = DriverFiles::discover(roots);
    let what = "every library with the driver's version in its name is in the agent's list";
    let Some(version) = &found.version else {
        let reason = format!("no libcuda.so.<version> was found under {}", roots.driver.display());
        return vec![Line::unknown(OF, what, "yes", reason)];
    };
    let listed: BTreeSet<PathBuf> =
        found.libraries.iter().filter_map(|file| file.host.canonicalize().ok()).collect();
    let mut there = BTreeSet::new();
    for folder in FOLDERS {
        search(&roots.driver.join(folder), &format!(".so.{version}"), DEPTH, &mut there);
    }
    let missing: Vec<String> = there.difference(&listed).map(|path| path.display().to_string()).collect();
    let machine = if missing.is_empty() { "yes".to_owned() } else { format!("not {}", missing.join(", ")) };
    let mut lines = vec![Line::compare(OF, what, "yes", machine)];
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let ends = format!("/{name}");
        let has = found.libraries.iter().flat_map(|file| &file.container).any(|path| path.ends_with(&ends));
        lines.push(Line::compare(
            OF,
            &format!("{name} is in the agent's list"),
            "yes",
            if has { "yes" } else { "no" },
        ));
    }
    let smi = found.others.iter().flat_map(|file| &file.container).any(|path| path.ends_with("/nvidia-smi"));
    let what = "nvidia-smi is in the agent's list";
    lines.push(if smi {
        Line::compare(OF, what, "yes", "yes")
    } else {
        Line::unknown(OF, what, "yes", format!("there is none under {}", roots.driver.display()))
    });
    lines
}

/// Files of 64 bits whose name ends so; links are not followed, as what they lead to is found itself.
fn search(folder: &Path, ends: &str, depth: usize, found: &mut BTreeSet<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        let path = entry.path();
        if kind.is_dir() && depth > 0 {
            search(&path, ends, depth - 1, found);
        } else if kind.is_file()
            && path.to_str().is_some_and(|path| path.ends_with(ends))
            && is_of_64_bits(&path)
            && let Ok(path) = path.canonicalize()
        {
            found.insert(path);
        }
    }
}

/// Containers get no libraries of 32 bits.
fn is_of_64_bits(path: &Path) -> bool {
    let mut head = [0; 5];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut head));
    read.is_ok() && head.starts_with(&ELF) && head.ends_with(&[BITS_64])
}

/// `nvidia-ctk cdi generate` beside what the agent has for a whole GPU.
pub(crate) fn beside_ctk(roots: &Roots, ours: &ContainerEdits) -> Line {
    let what = "a container gets what `nvidia-ctk cdi generate` gives it";
    match theirs(&roots.driver) {
        Ok(spec) => compared(what, &spec, roots, ours),
        Err(reason) => Line::unknown(OF, what, "yes", reason),
    }
}

fn theirs(driver: &Path) -> Result<Spec, String> {
    let mut command = Command::new("nvidia-ctk");
    command.args(["cdi", "generate", "--mode=nvml", "--format=json"]);
    if driver != Path::new("/") {
        let flag = |name: &str| format!("--{name}={}", driver.display());
        command.args([flag("driver-root"), flag("dev-root")]);
    }
    let output = life::output(&mut command, LONGEST).map_err(|error| format!("{error:#}"))?;
    if !output.status.success() {
        return Err(said(&output));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("its spec cannot be read: {error}"))
}

fn compared(what: &str, spec: &Spec, roots: &Roots, ours: &ContainerEdits) -> Line {
    // Theirs is for all capabilities, so it is held against all that we found.
    let found = DriverFiles::discover(roots);
    let files = found.libraries.iter().chain(&found.others).flat_map(|file| &file.container);
    let has: BTreeSet<&str> = files.map(|path| base(path)).collect();
    let nodes: BTreeSet<&str> = ours.device_nodes.iter().map(|node| node.path.as_str()).collect();
    let all = std::iter::once(&spec.container_edits);
    let all = all.chain(spec.devices.iter().map(|device| &device.container_edits));
    let mut missing = BTreeSet::new();
    for edits in all {
        let mounts = edits.mounts.iter().map(|mount| mount.container_path.as_str());
        missing.extend(mounts.filter(|path| !has.contains(base(path))).map(str::to_owned));
    }
    let common = spec.container_edits.device_nodes.iter().map(|node| node.path.as_str());
    missing.extend(common.filter(|path| !nodes.contains(path)).map(str::to_owned));
    let machine = if missing.is_empty() {
        "yes".to_owned()
    } else {
        format!("not {}", missing.into_iter().collect::<Vec<_>>().join(", "))
    };
    let line = Line::compare(OF, what, "yes", machine);
    line.or_else("reasons for known differences are in kubelet-plugin/tests/suite/ctk/differences.rs")
}

fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]
mod tests {
    use super::super::line::Verdict;
    use super::*;

    fn library(path: PathBuf, bits: u8) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, [&ELF[..], &[bits, 0, 0]].concat()).unwrap();
    }

    #[test]
    fn a_library_that_the_agent_does_not_look_for_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let triple = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        library(root.join(&triple).join("libcuda.so.580.95.05"), 2);
        library(root.join(&triple).join("libnvidia-ml.so.580.95.05"), 2);
        library(root.join("usr/lib32/libcuda.so.580.95.05"), 1);
        library(root.join("usr/lib/i386/libcuda.so.580.95.05"), 1);
        let roots = Roots { driver: root.clone(), host: root.clone(), proc: root.join("proc") };
        assert_eq!(lines(&roots)[0].verdict, Verdict::Held, "{}", lines(&roots)[0]);
        library(root.join("opt/vendor/lib/libnvidia-new.so.580.95.05"), 2);
        let line = &lines(&roots)[0];
        assert_eq!(line.verdict, Verdict::Differs);
        assert!(line.machine.contains("opt/vendor/lib/libnvidia-new.so"), "{line}");
    }

    #[test]
    fn what_nvidias_own_spec_gives_beyond_ours_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_owned();
        let roots = Roots { driver: root.clone(), host: root.clone(), proc: root.join("proc") };
        let spec: Spec = serde_json::from_value(serde_json::json!({
            "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [],
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-new"}],
                "mounts": [{"hostPath": "/x/nvidia-new", "containerPath": "/usr/bin/nvidia-new"}],
            },
        }))
        .unwrap();
        let ours = ContainerEdits {
            device_nodes: vec![aliquot_cdi::DeviceNode::at("/dev/nvidiactl")],
            ..ContainerEdits::default()
        };
        let line = compared("what", &spec, &roots, &ours);
        assert_eq!(line.machine, "not /dev/nvidia-new, /usr/bin/nvidia-new");
    }
}
