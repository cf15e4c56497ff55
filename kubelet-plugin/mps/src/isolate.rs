//! What a daemon's process does before it becomes NVIDIA's program: it leaves for a file system of its own, with the
//! claim's GPUs alone in `/dev` and the claim's directories in it, and gives up root's rights.
//!
//! The daemon's `/dev/shm` is the claim's `shm/`, and its sockets are at the path at which the claim's containers have
//! them. Everything is mounted in a mount namespace of the process's own, so it is gone with the daemon. Files in `pipe/`
//! and `shm/` are also the containers': no link in them is followed.

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

/// The exit status of a daemon that cannot start where it is, however often it is tried (`EX_CONFIG`).
pub const HOPELESS: i32 = 78;

const LOG: &str = "/tmp/nvidia-mps-log";

/// Where the driver and the host are, as this process sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// Root of the file system with the driver's files.
    pub driver: PathBuf,
    /// The same as the host sees it.
    pub driver_on_host: PathBuf,
    /// Root of the host.
    pub host: Option<PathBuf>,
    /// `/proc`, for the numbers of devices.
    pub proc: PathBuf,
}

/// Whether a daemon gets a file system of its own, and gives up its rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// It gets one.
    Full,
    /// It runs where this process runs, which needs no rights: for tests.
    None,
}

/// What the process becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The control daemon.
    Daemon,
    /// A program that reads commands to it from its standard input.
    Control,
}

/// What a program of NVIDIA's is to become, and for whom.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// What it becomes.
    pub role: Role,
    /// The claim's group: see [`crate::groups`].
    pub group: u32,
}

/// Whether the driver has what a daemon needs.
///
/// # Errors
/// [`IsolateError`] that says what is missing.
pub fn find(roots: &Roots) -> Result<(), IsolateError> {
    Place::find(roots).map(drop)
}

/// Why a daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum IsolateError {
    /// There is nothing to run.
    #[error(
        "there is no nvidia-cuda-mps-control under the driver's root {}: install it with the driver (Debian's and \
         Ubuntu's package nvidia-cuda-mps or nvidia-compute-utils; NVIDIA's installer has it), or set \
         kubeletPlugin.driverRoot to the root that has it", root.display()
    )]
    NoProgram {
        /// Driver's root.
        root: PathBuf,
    },
    /// It cannot be run.
    #[error(
        "{} needs the loader {loader}, which {} does not have: set --host-root to the host's root file system", program.display(), root.display()
    )]
    NoLoader {
        /// Program.
        program: PathBuf,
        /// Path of the loader.
        loader: String,
        /// Where it was looked for last.
        root: PathBuf,
    },
    /// Something of the contract.
    #[error(transparent)]
    Contract(#[from] ContractError),
    /// The kernel's list of devices.
    #[error(transparent)]
    Devices(#[from] DeviceError),
    /// The claim asks for nothing any more.
    #[error("the claim {0} asks for no daemon")]
    Nothing(String),
    /// The system refused.
    #[error("cannot {what} {}: {error}", path.display())]
    Step {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
}

impl IsolateError {
    /// Returns true if trying again soon will not help.
    pub fn is_hopeless(&self) -> bool {
        !matches!(self, Self::Nothing(_))
    }
}

/// Becomes NVIDIA's program for a claim; returns only if that fails.
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

/// The device nodes of a daemon besides those that every program has.
///
/// # Errors
/// [`DeviceError`] if the driver's modules are not loaded.
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
