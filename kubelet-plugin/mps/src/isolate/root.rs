//! Finds the system that a daemon runs with. A driver that comes with a whole system, such as a driver
//! container, is its own system. A driver that consists of files alone, such as GKE's, runs in the host's
//! system, where its programs find their loader and libc.

use super::{IsolateError, Roots, elf};
use aliquot_devices::layout::{PROGRAM_DIRS, library_dirs};
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The name of NVIDIA's program.
const PROGRAM: &str = "nvidia-cuda-mps-control";
/// The largest number of bytes read; more than any release's program has.
const MOST_BYTES: u64 = 64 << 20;

/// The place to run the daemon in, and its program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// The system whose programs and libraries the daemon has, as this process sees it.
    pub(super) root: PathBuf,
    /// The path at which the driver's files must be in that system, if they do not belong to it.
    pub(super) driver: Option<PathBuf>,
    /// The program's path in that system.
    pub(super) program: PathBuf,
    /// The directories in which the daemon finds programs.
    pub(super) path: String,
    /// The directories in which the daemon finds libraries, besides those of the root's loader.
    pub(super) libraries: Option<String>,
}

impl Place {
    /// Finds the program, and the system that has its loader.
    pub(super) fn find(roots: &Roots) -> Result<Self, IsolateError> {
        let (program, content) = program(&roots.driver)?;
        let loader = elf::interpreter(&content);
        let is_there = |root: &Path| match &loader {
            // A script or a static program needs no loader, and runs in the driver's own root.
            None => true,
            Some(loader) => is_below(root, Path::new(loader.trim_start_matches('/'))),
        };
        if is_there(&roots.driver) {
            return Ok(Self::at(roots.driver.clone(), Path::new("/"), &program, false));
        }
        match &roots.host {
            Some(host) if is_there(host) => Ok(Self::at(host.clone(), &roots.driver_on_host, &program, true)),
            _ => Err(IsolateError::NoLoader {
                program: roots.driver.join(program),
                loader: loader.unwrap_or_default(),
                root: roots.host.clone().unwrap_or_else(|| roots.driver.clone()),
            }),
        }
    }

    fn at(root: PathBuf, driver: &Path, program: &Path, foreign: bool) -> Self {
        let joined = |dirs: &[String]| {
            let dirs: Vec<String> = dirs.iter().map(|dir| driver.join(dir).display().to_string()).collect();
            dirs.join(":")
        };
        let own = PROGRAM_DIRS.map(str::to_owned);
        let path = match foreign {
            true => format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", joined(&own)),
            false => joined(&own),
        };
        Self {
            root,
            driver: foreign.then(|| driver.to_owned()),
            program: driver.join(program),
            path,
            libraries: foreign.then(|| joined(&library_dirs())),
        }
    }
}

/// Returns the program's path below the driver's root, and its content.
fn program(driver: &Path) -> Result<(PathBuf, Vec<u8>), IsolateError> {
    for dir in PROGRAM_DIRS {
        let path = Path::new(dir).join(PROGRAM);
        let Ok(file) = open_below(driver, &path) else { continue };
        let mut content = Vec::new();
        let read = File::from(file).take(MOST_BYTES).read_to_end(&mut content);
        return match read {
            Ok(_) => Ok((path, content)),
            Err(error) => Err(IsolateError::Step { what: "read", path: driver.join(path), error }),
        };
    }
    Err(IsolateError::NoProgram { root: driver.to_owned() })
}

/// Returns true if a process that has `root` as its root finds something at `path`.
pub(super) fn is_below(root: &Path, path: &Path) -> bool {
    open_below(root, path).is_ok()
}

/// Opens a file as a process would that has `root` as its root: no link leads out of it.
fn open_below(root: &Path, path: &Path) -> nix::Result<OwnedFd> {
    let root = open(root, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let how = OpenHow::new().flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_IN_ROOT);
    openat2(root, path, how)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn roots(driver: &Path, host: Option<&Path>) -> Roots {
        Roots {
            driver: driver.to_owned(),
            driver_on_host: "/home/driver".into(),
            host: host.map(Path::to_owned),
            proc: "/proc".into(),
        }
    }

    /// A root with a dynamic program in the program's place.
    fn driver() -> tempfile::TempDir {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("usr/bin")).unwrap();
        fs::create_dir_all(temp.path().join("opt/driver")).unwrap();
        fs::copy("/proc/self/exe", temp.path().join("opt/driver/control")).unwrap();
        symlink("/opt/driver/control", temp.path().join("usr/bin").join(PROGRAM)).unwrap();
        temp
    }

    #[test]
    fn a_driver_with_a_system_around_it_runs_in_that_and_files_alone_in_the_hosts() {
        let driver = driver();
        let loader = elf::interpreter(&fs::read("/proc/self/exe").unwrap()).unwrap();
        let in_host = Place::find(&roots(driver.path(), Some(Path::new("/")))).unwrap();
        assert_eq!(in_host.root, Path::new("/"));
        assert_eq!(in_host.program, Path::new("/home/driver/usr/bin").join(PROGRAM));
        assert!(in_host.libraries.unwrap().contains("/home/driver/usr/lib64"));
        let there = driver.path().join(loader.trim_start_matches('/'));
        fs::create_dir_all(there.parent().unwrap()).unwrap();
        fs::copy(&loader, there).unwrap();
        let in_driver = Place::find(&roots(driver.path(), Some(Path::new("/")))).unwrap();
        assert_eq!(in_driver.root, driver.path());
        assert_eq!(in_driver.program, Path::new("/usr/bin").join(PROGRAM));
        assert_eq!(in_driver.libraries, None);
    }

    #[test]
    fn what_is_missing_is_named_with_where_and_what_to_do() {
        let empty = tempfile::tempdir().unwrap();
        let said = Place::find(&roots(empty.path(), None)).unwrap_err().to_string();
        let path = empty.path().display().to_string();
        assert!(said.contains(&path) && said.contains("install"), "{said}");
        let driver = driver();
        let said = Place::find(&roots(driver.path(), Some(empty.path()))).unwrap_err().to_string();
        assert!(said.contains("ld-linux") && said.contains("--host-root"), "{said}");
    }
}
