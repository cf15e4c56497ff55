//! Who has a device node open: clients of the driver that are in none of its lists, such as monitoring.

use std::fmt;
use std::fs;
use std::path::Path;

/// Most clients that are named.
const MOST: usize = 8;

/// A process that has a device node open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// Process id, as this process's `/proc` has it.
    pub pid: u32,
    /// Name, as far as the kernel tells.
    pub name: String,
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

/// Processes other than this one that have `/dev/<node>` open, in a `/dev` of whatever root; at most 8 of them. Those
/// that cannot be looked into are left out.
pub fn of(proc_root: &Path, node: &str) -> Vec<Client> {
    let own = std::process::id();
    let entries = fs::read_dir(proc_root).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let others = pids.filter(|pid: &u32| *pid != own);
    let holders = others.filter(|pid| has_open(&proc_root.join(pid.to_string()), &format!("/dev/{node}")));
    let clients = holders.map(|pid| {
        let name = fs::read_to_string(proc_root.join(format!("{pid}/comm"))).unwrap_or_default();
        Client { pid, name: name.trim().to_owned() }
    });
    clients.take(MOST).collect()
}

fn has_open(process: &Path, node: &str) -> bool {
    let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
    targets.any(|target| target.to_string_lossy().ends_with(node))
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
        let found = of(Path::new("/proc"), "nvidia3");
        let other = of(Path::new("/proc"), "nvidia33");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.iter().any(|client| client.pid == child.id()), "{found:?}");
        assert!(found.iter().all(|client| client.pid != std::process::id()), "{found:?}");
        assert_eq!(other, []);
    }
}
