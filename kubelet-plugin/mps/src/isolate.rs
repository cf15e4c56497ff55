//! What a daemon's process does before it becomes NVIDIA's program: it leaves for a root of its own, with the claim's
//! GPUs alone in `/dev` and the claim's directories in it.
//!
//! In its root the daemon has a small `/dev`, the claim's `shm/` at `/dev/shm`, and its sockets at `/tmp/nvidia-mps`, the
//! path at which the claim's containers have them. Everything is mounted in a mount namespace of the process's own, so
//! it is gone with the daemon. Files in `pipe/` and `shm/` are also the containers': no link in them is followed.

mod elf;
mod root;

use crate::contract::{Ask, ClaimDir, ContractError};
use crate::processes::MARK;
use aliquot_devices::{DeviceError, Majors};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::SigSet;
use nix::sys::stat::{Mode, SFlag, makedev, mknod, umask};
use nix::unistd::{chdir, chroot};
use root::Place;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The exit status of a daemon that cannot start where it is, however often it is tried (`EX_CONFIG`).
pub const HOPELESS: i32 = 78;

const PIPE: &str = "/tmp/nvidia-mps";
const LOG: &str = "/tmp/nvidia-mps-log";
/// `MS_NOSYMFOLLOW`, which Linux knows since 5.10.
const NO_LINKS: MsFlags = MsFlags::from_bits_retain(0x100);
/// Devices that every program expects: name, major, minor.
const USUAL: [(&str, u64, u64); 5] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9)];

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

/// Whether a daemon gets a root of its own.
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
    #[error("cannot {what} {}: {source}", path.display())]
    Step {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl IsolateError {
    /// Returns true if trying again soon will not help.
    pub fn is_hopeless(&self) -> bool {
        !matches!(self, Self::Nothing(_))
    }
}

/// Becomes NVIDIA's program for a claim; returns only if that fails.
pub fn become_program(claim: &ClaimDir, roots: &Roots, isolation: Isolation, role: Role) -> IsolateError {
    match prepare(claim, roots, isolation, role) {
        Ok(mut command) => {
            let path = command.get_program().into();
            IsolateError::Step { what: "run", path, source: command.exec() }
        }
        Err(error) => error,
    }
}

fn prepare(
    claim: &ClaimDir,
    roots: &Roots,
    isolation: Isolation,
    role: Role,
) -> Result<Command, IsolateError> {
    let ask = match role {
        Role::Daemon => Some(claim.ask()?.ok_or_else(|| IsolateError::Nothing(claim.uid().to_owned()))?),
        // The daemon is told to quit after the agent has taken back what it asked.
        Role::Control => None,
    };
    let place = Place::find(roots)?;
    // The supervisor reads its signals from a descriptor, and so blocks them.
    SigSet::all().thread_unblock().map_err(step("unblock signals of", Path::new("/proc/self")))?;
    let (program, pipe, log) = match isolation {
        Isolation::Full => {
            enter(claim, roots, &place, ask.as_ref())?;
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

/// Makes the daemon's root this process's.
fn enter(claim: &ClaimDir, roots: &Roots, place: &Place, ask: Option<&Ask>) -> Result<(), IsolateError> {
    let all = Path::new("/");
    // What is mounted below may lie over where it is.
    let majors = Majors::read(&roots.proc)?;
    unshare(CloneFlags::CLONE_NEWNS).map_err(step("leave the mount namespace of", all))?;
    // What is mounted from here on is this process's alone. What the host unmounts goes here too: file systems of
    // other claims would otherwise live as long as this daemon.
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    mount(None::<&Path>, all, None::<&Path>, slave, None::<&Path>)
        .map_err(step("detach the mounts of", all))?;
    // Held open, for the same reason.
    let [pipe, shm, log] = [claim.pipe(), claim.shm(), claim.log()].map(|path| hold(&path));
    let (pipe, shm, log) = (pipe?, shm?, log?);
    let within = |path: &str| place.root.join(relative(Path::new(path)));
    for (name, sign) in [("proc", "self"), ("sys", "class")] {
        let target = within(name);
        if target.is_dir() && !target.join(sign).exists() {
            bind_all(&Path::new("/").join(name), &target)?;
        }
    }
    small_tmpfs(&within("/tmp"), "1777")?;
    small_tmpfs(&within("/dev"), "0755")?;
    devices(&within("/dev"), &majors, ask)?;
    bind(&shm, &within("/dev/shm"))?;
    bind(&pipe, &within(PIPE))?;
    bind(&log, &within(LOG))?;
    chroot(&place.root).map_err(step("change the root to", &place.root))?;
    chdir("/").map_err(step("enter", all))
}

fn hold(path: &Path) -> Result<File, IsolateError> {
    let flags = nix::libc::O_PATH | nix::libc::O_DIRECTORY | nix::libc::O_NOFOLLOW;
    let held = OpenOptions::new().read(true).custom_flags(flags).open(path);
    held.map_err(|source| IsolateError::Step { what: "open", path: path.to_owned(), source })
}

fn small_tmpfs(target: &Path, mode: &str) -> Result<(), IsolateError> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let options = format!("mode={mode},size=256k,nr_inodes=64");
    mount(Some("tmpfs"), target, Some("tmpfs"), flags, Some(options.as_str()))
        .map_err(step("mount a tmpfs on", target))
}

fn bind_all(source: &Path, target: &Path) -> Result<(), IsolateError> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(source), target, None::<&Path>, flags, None::<&Path>).map_err(step("mount on", target))
}

/// Binds a directory that the claim's containers also have.
fn bind(source: &File, target: &Path) -> Result<(), IsolateError> {
    fs::create_dir(target).map_err(|source| IsolateError::Step {
        what: "create",
        path: target.to_owned(),
        source,
    })?;
    let source = PathBuf::from(format!("/proc/self/fd/{}", source.as_raw_fd()));
    mount(Some(&source), target, None::<&Path>, MsFlags::MS_BIND, None::<&Path>)
        .map_err(step("mount on", target))?;
    let safe = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let again = |flags: MsFlags| {
        let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
        mount(None::<&Path>, target, None::<&Path>, flags, None::<&Path>)
    };
    again(safe | NO_LINKS).or_else(|_| again(safe)).map_err(step("restrict", target))
}

/// Makes the device nodes: the usual ones, and those of the claim's GPUs.
fn devices(dev: &Path, majors: &Majors, ask: Option<&Ask>) -> Result<(), IsolateError> {
    // The modes below are meant.
    let before = umask(Mode::empty());
    let made = make_devices(dev, majors, ask);
    umask(before);
    made
}

fn make_devices(dev: &Path, majors: &Majors, ask: Option<&Ask>) -> Result<(), IsolateError> {
    for (name, major, minor) in USUAL {
        node(&dev.join(name), major, minor)?;
    }
    // Commands to a daemon need no GPU.
    let Some(ask) = ask else { return Ok(()) };
    let control = majors.control()?;
    let wanted = control.into_iter().filter(|device| !device.path.ends_with("modeset"));
    let gpus = ask.gpus.iter().map(|gpu| majors.gpu(gpu.minor)).collect::<Result<Vec<_>, _>>()?;
    for device in wanted.chain(gpus) {
        let name = device.path.trim_start_matches("/dev/");
        node(&dev.join(name), device.major.into(), device.minor.into())?;
    }
    Ok(())
}

fn node(path: &Path, major: u64, minor: u64) -> Result<(), IsolateError> {
    let everybody = Mode::from_bits_truncate(0o666);
    mknod(path, SFlag::S_IFCHR, everybody, makedev(major, minor)).map_err(step("make the device", path))
}

fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

fn step(what: &'static str, path: &Path) -> impl FnOnce(nix::errno::Errno) -> IsolateError {
    let path = path.to_owned();
    move |errno| IsolateError::Step { what, path, source: errno.into() }
}
