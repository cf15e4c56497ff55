//! Prepares a daemon's process before it becomes NVIDIA's program. The process moves to a file system of its
//! own, with only the claim's GPUs in `/dev` and the claim's directories in it, and gives up root's rights.
//!
//! The daemon's `/dev/shm` is the claim's `shm/`, and its sockets are at the path at which the claim's
//! containers have them. Everything is mounted in the process's own mount namespace, so the mounts are gone
//! with the daemon. Containers can also write files in `pipe/` and `shm/`, so no link in them is followed.

mod elf;
mod mounts;
mod rights;
mod root;

use crate::contract::{Ask, ClaimDir, ContractError, PIPE_DIR as PIPE};
use crate::processes::MARK;
use aliquot_devices::{CharDevice, DeviceError, Majors};
use nix::sys::signal::SigSet;
use root::Place;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The exit status of a daemon that cannot start on this node, however often it is tried (`EX_CONFIG`).
pub const HOPELESS: i32 = 78;

const LOG: &str = "/tmp/nvidia-mps-log";

/// The root directories of the driver and of the host, as this process sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// The root of the file system with the driver's files.
    pub driver: PathBuf,
    /// The driver's root as the host sees it.
    pub driver_on_host: PathBuf,
    /// The root of the host's file system.
    pub host: Option<PathBuf>,
    /// The path of `/proc`, for the numbers of devices.
    pub proc: PathBuf,
}

/// The isolation of a daemon: whether it gets a file system of its own and gives up its rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// The daemon gets its own file system and gives up its rights.
    Full,
    /// The daemon runs where this process runs, which needs no rights: for tests.
    None,
}

/// The program that the process becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The control daemon.
    Daemon,
    /// A program that reads commands to the daemon from its standard input.
    Control,
}

/// The role of a process that becomes NVIDIA's program, and the group that it runs in.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// The program that the process becomes.
    pub role: Role,
    /// The claim's group; see [`crate::groups`].
    pub group: u32,
}

/// Checks that the driver has the files that a daemon needs.
///
/// # Errors
/// Fails with [`IsolateError`], which says what is missing.
pub fn find(roots: &Roots) -> Result<(), IsolateError> {
    Place::find(roots).map(drop)
}

/// The reason why a daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum IsolateError {
    /// The driver has no control daemon program.
    #[error(
        "there is no nvidia-cuda-mps-control under the driver's root {}: install it with the driver (Debian's and \
         Ubuntu's package nvidia-cuda-mps or nvidia-compute-utils; NVIDIA's installer has it), or set \
         kubeletPlugin.driverRoot to the root that has it", root.display()
    )]
    NoProgram {
        /// The driver's root.
        root: PathBuf,
    },
    /// The program's loader is missing.
    #[error(
        "{} needs the loader {loader}, which {} does not have: set --host-root to the host's root file system", program.display(), root.display()
    )]
    NoLoader {
        /// The program.
        program: PathBuf,
        /// The path of the loader.
        loader: String,
        /// The root in which the loader was looked for last.
        root: PathBuf,
    },
    /// A file of the contract could not be read or written.
    #[error(transparent)]
    Contract(#[from] ContractError),
    /// The kernel's list of devices could not be used.
    #[error(transparent)]
    Devices(#[from] DeviceError),
    /// The claim does not ask for a daemon any more.
    #[error("the claim {0} asks for no daemon")]
    Nothing(String),
    /// The system refused a step.
    #[error("cannot {what} {}: {error}", path.display())]
    Step {
        /// The step that was tried.
        what: &'static str,
        /// The path of the step.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
}

impl IsolateError {
    /// Returns true if retrying soon will not help.
    pub fn is_hopeless(&self) -> bool {
        !matches!(self, Self::Nothing(_))
    }
}

/// Replaces this process with NVIDIA's program for a claim; returns only if that fails.
pub fn become_program(claim: &ClaimDir, roots: &Roots, isolation: Isolation, part: Part) -> IsolateError {
    match prepare(claim, roots, isolation, part) {
        Ok(mut command) => {
            let path = command.get_program().into();
            IsolateError::Step { what: "run", path, error: command.exec() }
        }
        Err(error) => error,
    }
}

fn prepare(
    claim: &ClaimDir,
    roots: &Roots,
    isolation: Isolation,
    part: Part,
) -> Result<Command, IsolateError> {
    let ask = match part.role {
        Role::Daemon => Some(claim.ask()?.ok_or_else(|| IsolateError::Nothing(claim.uid().to_owned()))?),
        // The daemon is told to quit after the agent has taken back what it asked.
        Role::Control => None,
    };
    let place = Place::find(roots)?;
    // The supervisor reads its signals from a descriptor, and so blocks them.
    SigSet::all().thread_unblock().map_err(step("unblock signals of", Path::new("/proc/self")))?;
    let (program, pipe, log) = match isolation {
        Isolation::Full => {
            // Commands to a daemon need no GPU.
            let devices = match &ask {
                Some(ask) => devices(&Majors::read(&roots.proc)?, ask)?,
                None => Vec::new(),
            };
            mounts::enter(claim, roots, &place, &devices)?;
            rights::give_up(part)?;
            (place.program.clone(), PIPE.into(), LOG.into())
        }
        Isolation::None => (place.root.join(relative(&place.program)), claim.pipe(), claim.log()),
    };
    let mut command = Command::new(program);
    command.env_clear();
    command.env(MARK, claim.path()).env("PATH", &place.path);
    command.env("CUDA_MPS_PIPE_DIRECTORY", pipe).env("CUDA_MPS_LOG_DIRECTORY", log);
    command.envs(place.libraries.iter().map(|dirs| ("LD_LIBRARY_PATH", dirs)));
    if let Some(ask) = ask {
        let uuids: Vec<&str> = ask.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        command.env("CUDA_VISIBLE_DEVICES", uuids.join(",")).arg("-f");
    }
    Ok(command)
}

/// Returns the device nodes of a daemon, besides those that every program has.
///
/// # Errors
/// Fails with [`DeviceError`] if the driver's modules are not loaded.
pub(crate) fn devices(majors: &Majors, ask: &Ask) -> Result<Vec<CharDevice>, DeviceError> {
    let control = majors.control()?;
    let control = control.into_iter().filter(|device| !device.path.ends_with("modeset")).map(Ok);
    control.chain(ask.gpus.iter().map(|gpu| majors.gpu(gpu.minor))).collect()
}

fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

fn step(what: &'static str, path: &Path) -> impl FnOnce(nix::errno::Errno) -> IsolateError {
    let path = path.to_owned();
    move |errno| IsolateError::Step { what, path, error: errno.into() }
}
