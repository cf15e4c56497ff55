//! Asks for the MPS daemon of a claim on this node, waits for it and ends it.
//!
//! The agent runs no daemon itself, because it is updated while pods run. A supervisor does (`aliquot-mps`);
//! [`aliquot_mps::contract`] defines what the two exchange. The agent makes and removes the directory of a
//! claim, with the two file systems that the claim's containers share with the daemon. Each operation is
//! right from any state that a kill of either side left, and waits for a bounded time.

use crate::holders::list;
use crate::probe::Probe;
use crate::selinux::{LabelError, Labels};
use crate::share::RegionStorage;
use crate::store::{StoreError, io_error};
use crate::tmpfs;
use crate::trash;
use aliquot_model::GpuUuid;
use aliquot_mps::contract::{Ask, ClaimDir, ContractError, MpsDir, Phase, State};
use aliquot_nvml::{GpuError, GpuProcess};
use nix::errno::Errno;
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::thread::sleep;
use std::time::{Duration, Instant};

mod follow;

/// The interval at which the agent looks for an answer of the supervisor.
const LOOK: Duration = Duration::from_millis(50);
/// The extension of a claim's directory that was renamed for removal; the rest of the name is the claim's
/// UID.
const ENDED: &str = "ended";
/// Mount options of the file system for the daemon's sockets; it leaves room for what a container puts beside
/// them.
const PIPE: &str = "size=1m,nr_inodes=256";
/// The largest number of files in shared memory: even empty files cost the kernel memory.
const SHM_FILES: u32 = 16384;

/// Lists the processes that compute on the GPUs of a claim. Only the servers and clients of the claim's
/// daemon may do that.
pub type Running<'a> = &'a dyn Fn() -> Result<Vec<GpuProcess>, GpuError>;

/// The reason why a daemon is not running, or has not ended.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    /// No supervisor runs daemons on this node.
    #[error(
        "no supervisor of MPS daemons runs on this node, as nobody holds {}: an administrator switches it on with the \
         chart value kubeletPlugin.mps.enabled; where it is on, look at the pod of DaemonSet aliquot-mps on this node", .0.display()
    )]
    NotServed(PathBuf),
    /// The supervisor has given up for now.
    #[error(
        "the MPS control daemon of the claim cannot be started: {0}; the supervisor's log says more (pod of DaemonSet \
         aliquot-mps on this node), and the kubelet tries again"
    )]
    Failed(String),
    /// The daemon was not ready in time.
    #[error(
        "the MPS control daemon of the claim was not ready within {within:?} ({said}); the supervisor's log says more (pod \
         of DaemonSet aliquot-mps on this node), and the kubelet tries again"
    )]
    Late {
        /// The time that was waited.
        within: Duration,
        /// The supervisor's last answer.
        said: String,
    },
    /// The daemon did not end in time.
    #[error(
        "the supervisor has not ended the MPS daemon of claim {uid}{} ({said}); it is tried again, and if this \
         lasts, delete the pod of DaemonSet aliquot-mps on this node, with which all of its daemons end",
        if within.is_zero() { " yet".to_owned() } else { format!(" within {within:?}") }
    )]
    NotEnded {
        /// The UID of the claim.
        uid: String,
        /// The time that was waited; zero for a caller that cannot wait.
        within: Duration,
        /// The supervisor's last answer.
        said: String,
    },
    /// Processes run on the claim's GPUs, and there is no supervisor that could end them.
    #[error(
        "the MPS daemon of claim {uid} may still be running: no supervisor is there to end it, and the driver lists {} on \
         the claim's GPUs; it is tried again, and a new supervisor ends them (pod of DaemonSet aliquot-mps on this node): \
         if this lasts, look at why that pod does not become ready, or end these processes on the node",
        list(processes)
    )]
    StillRunning {
        /// The UID of the claim.
        uid: String,
        /// The processes on the claim's GPUs.
        processes: Vec<GpuProcess>,
    },
    /// The driver does not report which processes run on the claim's GPUs.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The kernel refused to mount a file system.
    #[error(
        "cannot mount a file system ({options}) for MPS at {}: {source}; the agent needs CAP_SYS_ADMIN (the chart's pod is \
         privileged), and a context must be a label that the node's SELinux policy knows (--selinux-writable-label)", path.display()
    )]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// The mount options.
        options: String,
        /// The reason.
        source: Errno,
    },
    /// A SELinux label could not be set.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// The file system refused an operation.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file that agent and supervisor exchange cannot be read or written.
    #[error(transparent)]
    Contract(#[from] ContractError),
}

/// The node's directory for MPS, which the supervisor has at the same path.
#[derive(Debug, Clone)]
pub struct Mps {
    dir: MpsDir,
    storage: RegionStorage,
    shared_memory: u64,
    patience: Duration,
}

impl Mps {
    /// The default size in bytes of a claim's shared memory. It is that of a container's own `/dev/shm`,
    /// which it replaces.
    pub const SHARED_MEMORY: u64 = 64 << 20;

    /// Uses the directory at `dir`, which need not exist. The directories that containers share with a daemon
    /// lie in `storage`. A daemon has the time `patience` to start, and the same time to end.
    pub fn new(dir: impl Into<PathBuf>, storage: RegionStorage, patience: Duration) -> Self {
        Self { dir: MpsDir::new(dir), storage, shared_memory: Self::SHARED_MEMORY, patience }
    }

    /// Sets the bytes of shared memory for each claim whose daemon is asked for from now on. The size is
    /// enforced only in [`RegionStorage::Tmpfs`].
    #[must_use]
    pub fn with_shared_memory(self, bytes: u64) -> Self {
        Self { shared_memory: bytes, ..self }
    }

    /// Returns a copy for callers that cannot wait. A daemon that has not ended yet is told to end, and the
    /// call fails with [`MpsError::NotEnded`].
    #[must_use]
    pub fn without_waiting(&self) -> Self {
        Self { patience: Duration::ZERO, ..self.clone() }
    }

    /// Returns true while a supervisor runs daemons on this node.
    pub fn is_served(&self) -> bool {
        self.dir.is_served().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot tell whether MPS is served, and take it for not");
            false
        })
    }

    /// Asks for a daemon, unless it is already there, and waits until it is ready. Leftovers of an earlier
    /// attempt are ended as by [`Self::end`].
    ///
    /// # Errors
    /// Fails with [`MpsError`]; [`Self::end`] then removes what was made.
    pub fn start(
        &self,
        labels: &Labels,
        ask: &Ask,
        running: Running<'_>,
        probe: &Probe,
    ) -> Result<(), MpsError> {
        if !self.dir.is_served()? {
            return Err(MpsError::NotServed(self.dir.lock()));
        }
        let dir = self.dir.claim(&ask.claim.uid)?;
        if !self.is_asked(&dir, ask) {
            // What an earlier attempt or boot left.
            self.end(dir.uid(), running, probe)?;
            self.make(&dir, labels)?;
            probe.at("after an MPS directory");
            dir.write_ask(ask)?;
            probe.at("after asking for a daemon");
        }
        self.wait_until_ready(&dir)
    }

    /// Returns true if the daemon that is asked for is there and ready.
    pub fn is_ready(&self, ask: &Ask) -> bool {
        let Ok(dir) = self.dir.claim(&ask.claim.uid) else { return false };
        self.is_asked(&dir, ask)
            && self.is_served()
            && matches!(dir.state(), Ok(Some(State { state: Phase::Ready, .. })))
    }

    /// Ends a claim's daemon and removes its directory. Returns false if there was none.
    ///
    /// # Errors
    /// Fails with [`MpsError`]; the call can be repeated.
    pub fn end(&self, uid: &str, running: Running<'_>, probe: &Probe) -> Result<bool, MpsError> {
        self.stop(uid, running, probe)?;
        self.remove(uid, probe)
    }

    /// Ends a claim's daemon, and leaves its directory. A daemon counts as ended when the supervisor, if
    /// there is one, has said so and the driver lists no process on the claim's GPUs. A supervisor that was
    /// killed, or that is still cleaning up after its predecessor, has not ended the daemon.
    ///
    /// # Errors
    /// Fails with [`MpsError`]; the call can be repeated.
    pub fn stop(&self, uid: &str, running: Running<'_>, probe: &Probe) -> Result<(), MpsError> {
        // What cannot name a directory has none.
        let Ok(dir) = self.dir.claim(uid) else { return Ok(()) };
        if is_there(dir.path()) {
            dir.withdraw_ask()?;
            probe.at("after asking for no daemon");
            self.wait_until_ended(&dir, running)?;
        }
        Ok(())
    }

    /// Removes the directory of a claim whose daemon has ended. Returns false if there was none.
    ///
    /// # Errors
    /// Fails with [`MpsError`]; the call can be repeated.
    pub fn remove(&self, uid: &str, probe: &Probe) -> Result<bool, MpsError> {
        let Ok(dir) = self.dir.claim(uid) else { return Ok(false) };
        let ended = dir.path().with_extension(ENDED);
        let any = is_there(dir.path()) || is_there(&ended);
        if is_there(&ended) {
            remove_tree(&ended).map_err(io_error("remove", &ended))?;
        }
        if is_there(dir.path()) {
            for mounted in [dir.pipe(), dir.shm()] {
                tmpfs::remove(&mounted).map_err(io_error("unmount", &mounted))?;
            }
            // Out of the way of a supervisor that has read what was asked and answers only now.
            fs::rename(dir.path(), &ended).map_err(io_error("rename", dir.path()))?;
            probe.at("after renaming an MPS directory");
            remove_tree(&ended).map_err(io_error("remove", &ended))?;
        }
        Ok(any)
    }

    /// Writes the ask anew with values that change while a claim goes on, such as the minor numbers of its
    /// GPUs. Does nothing if no daemon was asked for before.
    ///
    /// # Errors
    /// Fails with [`MpsError`]; the earlier ask then still stands.
    pub fn ask_anew(&self, ask: &Ask) -> Result<(), MpsError> {
        let dir = self.dir.claim(&ask.claim.uid)?;
        if dir.ask()?.is_some_and(|before| before != *ask) {
            dir.write_ask(ask)?;
        }
        Ok(())
    }

    /// Returns the GPUs that a daemon is asked for, or was asked for until [`Self::stop`], as far as they can
    /// be read.
    pub fn asked_gpus(&self, uid: &str) -> BTreeSet<GpuUuid> {
        let Ok(dir) = self.dir.claim(uid) else { return BTreeSet::new() };
        let ask = dir.ask().ok().flatten().or_else(|| dir.withdrawn().ok().flatten());
        let gpus = ask.map(|ask| ask.gpus).unwrap_or_default();
        gpus.iter().filter_map(|gpu| GpuUuid::parse(&gpu.uuid)).collect()
    }

    /// Returns the directory of a claim.
    ///
    /// # Errors
    /// Fails with [`MpsError::Contract`] if the UID cannot name a directory.
    pub fn claim(&self, uid: &str) -> Result<ClaimDir, MpsError> {
        Ok(self.dir.claim(uid)?)
    }

    /// Returns the UIDs of claims that have a directory, also one that is being removed.
    ///
    /// # Errors
    /// Fails if the directory cannot be listed.
    pub fn uids(&self) -> Result<BTreeSet<String>, MpsError> {
        let there = self.dir.claims()?.into_iter().map(|claim| claim.uid().to_owned());
        let entries = fs::read_dir(self.dir.path()).into_iter().flatten().flatten();
        let ended = entries.filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (uid, extension) = name.split_once('.')?;
            (extension == ENDED).then(|| uid.to_owned())
        });
        Ok(there.chain(ended).collect())
    }

    fn is_asked(&self, dir: &ClaimDir, ask: &Ask) -> bool {
        matches!(dir.ask(), Ok(Some(asked)) if asked == *ask) && self.is_mounted(dir)
    }

    /// Returns true if the claim's file systems are mounted. They are not after a reboot, which leaves empty
    /// directories.
    fn is_mounted(&self, dir: &ClaimDir) -> bool {
        let device = |path: &Path| fs::symlink_metadata(path).map(|meta| meta.dev()).ok();
        let own = |path: &Path| device(path).is_some_and(|own| Some(own) != device(dir.path()));
        self.storage == RegionStorage::Directory || own(&dir.pipe()) && own(&dir.shm())
    }

    fn make(&self, dir: &ClaimDir, labels: &Labels) -> Result<(), MpsError> {
        let log = dir.log();
        fs::create_dir_all(&log).map_err(io_error("create", &log))?;
        // A server runs as the user of its clients, and makes its sockets there.
        self.make_shared(&dir.pipe(), 0o1777, PIPE, labels)?;
        let shm = format!("size={},nr_inodes={SHM_FILES}", self.shared_memory);
        self.make_shared(&dir.shm(), 0o1777, &shm, labels)
    }

    /// Makes a directory that is mounted into containers.
    fn make_shared(&self, path: &Path, mode: u32, options: &str, labels: &Labels) -> Result<(), MpsError> {
        fs::create_dir_all(path).map_err(io_error("create", path))?;
        match self.storage {
            RegionStorage::Directory => labels.writable(path)?,
            RegionStorage::Tmpfs => {
                let options = format!("{options},mode={mode:o}{}", labels.mount_option());
                tmpfs::make("aliquot-mps", path, &options).map_err(|source| MpsError::Mount {
                    path: path.to_owned(),
                    options,
                    source,
                })?;
            }
        }
        // Containers run as any user; the umask must not decide.
        Ok(fs::set_permissions(path, Permissions::from_mode(mode)).map_err(io_error("chmod", path))?)
    }

    fn wait_until_ready(&self, dir: &ClaimDir) -> Result<(), MpsError> {
        let deadline = Instant::now() + self.patience;
        loop {
            // This comes first: the state that a dead supervisor left must not be read.
            if !self.dir.is_served()? {
                return Err(MpsError::NotServed(self.dir.lock()));
            }
            let said = match dir.state()? {
                Some(State { state: Phase::Ready, .. }) => return Ok(()),
                Some(State { state: Phase::Failed, reason, .. }) => {
                    return Err(MpsError::Failed(reason.unwrap_or_else(|| "no reason is given".to_owned())));
                }
                Some(State { state: Phase::Starting, reason, .. }) => reason
                    .map_or_else(|| "it is starting".to_owned(), |reason| format!("it starts: {reason}")),
                None => "the supervisor has not answered".to_owned(),
            };
            if Instant::now() >= deadline {
                return Err(MpsError::Late { within: self.patience, said });
            }
            sleep(LOOK);
        }
    }

    fn wait_until_ended(&self, dir: &ClaimDir, running: Running<'_>) -> Result<(), MpsError> {
        let uid = || dir.uid().to_owned();
        let deadline = Instant::now() + self.patience;
        while self.dir.is_served()? {
            let said = match dir.state() {
                // A supervisor does not know a server that its predecessor killed. The driver still lists
                // that server until it has let go of the GPU.
                Ok(None) => match running()? {
                    processes if processes.is_empty() => return Ok(()),
                    processes => {
                        format!("the driver lists {} on the claim's GPUs", list(&processes))
                    }
                },
                Ok(Some(state)) => state.reason.unwrap_or_else(|| "it is ending".to_owned()),
                // A state that cannot be read still means that a daemon is there.
                Err(error) => error.to_string(),
            };
            if Instant::now() >= deadline {
                return Err(MpsError::NotEnded { uid: uid(), within: self.patience, said });
            }
            sleep(LOOK);
        }
        match running()? {
            processes if processes.is_empty() => Ok(()),
            processes => Err(MpsError::StillRunning { uid: uid(), processes }),
        }
    }
}

fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Removes a tree of any depth: with [`RegionStorage::Directory`] its content was made by a container.
fn remove_tree(path: &Path) -> io::Result<()> {
    match trash::sweep(path, &[], &AtomicBool::new(false))?.into_iter().next() {
        Some((_, error)) => Err(error),
        None => fs::remove_dir(path),
    }
}

#[cfg(test)]
mod tests;
