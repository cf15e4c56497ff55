//! Control groups of the run's containers. A runtime that is killed before it has written down what it made, or that
//! refuses a container, leaves its group behind, and perhaps what runs in it.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io;
use std::path::Path;
use std::time::Duration;

/// Where the kernel shows them.
const ROOT: &str = "/sys/fs/cgroup";

/// What the names of all containers of a run begin with: the name of the run's own folder, which no other run has.
pub(super) fn name_of(folder: &Path) -> String {
    let names = folder.ancestors().filter_map(|folder| folder.file_name()?.to_str());
    let own = names.into_iter().find(|name| name.starts_with("gpu-check-"));
    own.map_or_else(|| format!("gpu-check-{}", std::process::id()), str::to_owned)
}

/// Removes the groups of a run's containers, and ends what still runs in them.
pub(super) fn remove(folder: &Path) {
    remove_below(Path::new(ROOT), &format!("{}-", name_of(folder)));
}

fn remove_below(folder: &Path, prefix: &str) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        remove_below(&entry.path(), prefix);
        if entry.file_name().to_string_lossy().starts_with(prefix)
            && let Err(error) = end(&entry.path())
        {
            eprintln!("gpu-check: control group {} stays: {error}", entry.path().display());
        }
    }
}

fn end(group: &Path) -> io::Result<()> {
    let mut removed = std::fs::remove_dir(group);
    for _ in 0..500 {
        if !matches!(&removed, Err(error) if error.kind() == io::ErrorKind::ResourceBusy) {
            break;
        }
        let inside = std::fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        for pid in inside.lines().filter_map(|pid| pid.parse().ok()).filter(|pid| *pid > 0) {
            // It may have ended meanwhile.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(10));
        removed = std::fs::remove_dir(group);
    }
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;

    #[test]
    fn groups_of_the_run_go_wherever_they_are_and_those_of_others_stay() {
        let root = tempfile::tempdir().unwrap();
        let run = Path::new("/tmp/gpu-check-Ab12Cd/node/containers");
        let prefix = format!("{}-", name_of(run));
        let (own, other) = (format!("cpu/user/{prefix}2/inner"), "cpu/gpu-check-Ab12C-2");
        for group in [own.as_str(), other] {
            std::fs::create_dir_all(root.path().join(group)).unwrap();
        }
        std::fs::remove_dir(root.path().join(&own)).unwrap();
        remove_below(root.path(), &prefix);
        assert!(!root.path().join(format!("cpu/user/{prefix}2")).exists());
        assert!(root.path().join(other).exists());
    }
}
