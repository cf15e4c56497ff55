//! Finds the processes that have a GPU's device nodes open: clients of the driver that are in none of its
//! lists, such as monitoring and display servers.

use crate::devices::drm;
use aliquot_model::GpuInfo;
use std::fmt;
use std::fs;
use std::path::Path;

/// The largest number of clients that are named.
const MOST: usize = 8;

/// A process that has a device node open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// The process ID, as in this process's `/proc`.
    pub pid: u32,
    /// The name of the process, if the kernel reports it.
    pub name: String,
    /// The name of the node below `/dev`.
    pub node: String,
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

/// Formats processes, or clients, as one text.
pub(crate) fn list<T: fmt::Display>(all: &[T]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Formats which client has which node open, as one text.
pub fn text(clients: &[Client]) -> String {
    let open = clients.iter().map(|client| format!("/dev/{} is open in {client}", client.node));
    open.collect::<Vec<_>>().join(", ")
}

/// Returns the processes, other than this one, that have a node of a GPU open: the node that CUDA and NVML
/// use, or a DRM node.
pub fn of_gpu(proc_root: &Path, sys_root: &Path, gpu: &GpuInfo) -> Vec<Client> {
    let drm = drm::all(sys_root, gpu.pci_bus_id.as_deref());
    let drm = drm.iter().filter_map(|device| device.path.strip_prefix("/dev/").map(str::to_owned));
    let nodes: Vec<String> = [format!("nvidia{}", gpu.minor)].into_iter().chain(drm).collect();
    of(proc_root, &nodes)
}

/// Returns the processes, other than this one, that have one of `/dev/<node>` open, in a `/dev` of any root;
/// at most 8 of them. Processes that cannot be inspected are left out.
pub fn of(proc_root: &Path, nodes: &[String]) -> Vec<Client> {
    let own = std::process::id();
    let entries = fs::read_dir(proc_root).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let others = pids.filter(|pid: &u32| *pid != own);
    let holders = others.filter_map(|pid| {
        let node = opened(&proc_root.join(pid.to_string()), nodes)?;
        let name = fs::read_to_string(proc_root.join(format!("{pid}/comm"))).unwrap_or_default();
        Some(Client { pid, name: name.trim().to_owned(), node: node.to_owned() })
    });
    holders.take(MOST).collect()
}

/// Returns the first of these nodes that a process has open.
fn opened<'a>(process: &Path, nodes: &'a [String]) -> Option<&'a str> {
    let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let targets: Vec<_> = files.filter_map(|file| fs::read_link(file.path()).ok()).collect();
    let is_open = |node: &&String| {
        let end = format!("/dev/{node}");
        targets.iter().any(|target| target.to_string_lossy().ends_with(&end))
    };
    nodes.iter().find(is_open).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_that_has_the_node_open_is_named_and_this_one_is_not() {
        let root = tempfile::tempdir().unwrap();
        let dev = root.path().join("dev");
        fs::create_dir(&dev).unwrap();
        fs::write(dev.join("nvidia3"), "").unwrap();
        let _own = fs::File::open(dev.join("nvidia3")).unwrap();
        let file = fs::File::open(dev.join("nvidia3")).unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).stderr(Stdio::from(file)).spawn().unwrap();
        let found = of(Path::new("/proc"), &["nvidia33".to_owned(), "nvidia3".to_owned()]);
        let other = of(Path::new("/proc"), &["nvidia33".to_owned()]);
        child.kill().unwrap();
        child.wait().unwrap();
        let client = found.iter().find(|client| client.pid == child.id()).unwrap();
        assert_eq!((client.name.as_str(), client.node.as_str()), ("cat", "nvidia3"));
        assert!(found.iter().all(|client| client.pid != std::process::id()), "{found:?}");
        assert_eq!(other, []);
    }
}
