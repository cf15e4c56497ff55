//! The process's driver: the node it is on, its devices, and everything that it has made.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::Duration;

use aliquot_sim_node::{DEFAULT_DIR, Node, NodeError};

use crate::codes::{Code, Cu};
use crate::config::Config;
use crate::device::{self, Device};
use crate::log;
use crate::mps;
use crate::state::State;

/// CUDA version that is reported where there is no node to ask.
const DEFAULT_CUDA_VERSION: i32 = 13_000;

/// One per process, made by the first call.
pub(crate) struct Driver {
    pub(crate) config: Config,
    /// Missing where no node directory can be opened: a machine without GPUs.
    pub(crate) node: Option<Node>,
    /// The process that made this; a child of it has no driver.
    process: u32,
    exiting: AtomicBool,
    devices: OnceLock<Vec<Device>>,
    /// The MPS control daemon that this process is a client of, since `cuInit`.
    mps_daemon: OnceLock<Option<u32>>,
    state: Mutex<State>,
    /// Signalled when anything that somebody may wait for has changed.
    pub(crate) changed: Condvar,
    /// Signalled when the worker has to look again.
    work: Condvar,
    /// There is work that the driver's threads have to see to.
    needs_threads: AtomicBool,
    /// Done when those threads have been started.
    pub(crate) started: Once,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
static INITIALISED_BY: AtomicU32 = AtomicU32::new(0);

/// The process's driver.
pub(crate) fn get() -> &'static Driver {
    DRIVER.get_or_init(|| {
        let node = Node::discover(at_exit as *const () as usize).ok();
        let dir = node.as_ref().map(|n| n.dir().to_owned()).or_else(|| Some(DEFAULT_DIR.into()));
        Driver {
            config: Config::load(dir.as_deref()),
            node,
            process: std::process::id(),
            exiting: AtomicBool::new(false),
            devices: OnceLock::new(),
            mps_daemon: OnceLock::new(),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            work: Condvar::new(),
            needs_threads: AtomicBool::new(false),
            started: Once::new(),
        }
    })
}

extern "C" fn at_exit() {
    let Some(driver) = DRIVER.get().filter(|d| d.process == std::process::id()) else { return };
    driver.exiting.store(true, SeqCst);
    let lost = crate::backing::lost_writes();
    if lost > 0 {
        log::note(&format!("{lost} writes to device memory found no room and were lost"));
    }
    if let Some(node) = &driver.node {
        // What the process held is free at once; only a killed process leaves it to be found.
        let _ = node.detach_process();
    }
}

/// What the node's refusal is to a caller of the driver.
pub(crate) fn code_of(error: &NodeError) -> Code {
    match error {
        NodeError::OutOfMemory { .. } => Code::OUT_OF_MEMORY,
        NodeError::InvalidArgument(_) => Code::INVALID_VALUE,
        NodeError::NotFound(_) => Code::INVALID_HANDLE,
        NodeError::Full(_) => Code::OUT_OF_MEMORY,
        _ => Code::UNKNOWN,
    }
}

impl Driver {
    /// `cuInit`.
    pub(crate) fn initialise(&'static self, flags: u32) -> Cu {
        self.check_process()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if self.devices.get().is_some() {
            return Ok(());
        }
        let node = self.node.as_ref().ok_or(Code::NO_DEVICE)?;
        let mut state = self.lock();
        if self.devices.get().is_some() {
            return Ok(());
        }
        let devices = device::enumerate(node)?;
        node.attach_process().map_err(|e| code_of(&e))?;
        if let Some(daemon) = self.mps_daemon.get_or_init(mps::daemon) {
            node.join_mps(*daemon).map_err(|e| code_of(&e))?;
        }
        // SAFETY: a function of this library, which stays loaded: it is the driver of this process.
        unsafe { libc::atexit(at_exit) };
        state.start(devices.len());
        INITIALISED_BY.store(self.process, SeqCst);
        let _ = self.devices.set(devices);
        Ok(())
    }

    /// Fails in a child of the process that loaded the driver, and while the process exits.
    pub(crate) fn check_process(&self) -> Cu {
        if self.process != std::process::id() {
            return Err(Code::NOT_INITIALIZED);
        }
        if self.exiting.load(SeqCst) { Err(Code::DEINITIALIZED) } else { Ok(()) }
    }

    /// Fails where `cuInit` has not succeeded.
    pub(crate) fn check_ready(&self) -> Cu {
        self.check_process()?;
        if INITIALISED_BY.load(SeqCst) == self.process { Ok(()) } else { Err(Code::NOT_INITIALIZED) }
    }

    /// The node; only used where `cuInit` has succeeded.
    pub(crate) fn node(&self) -> Cu<&Node> {
        self.node.as_ref().ok_or(Code::NOT_INITIALIZED)
    }

    /// Version of the driver as `cuDriverGetVersion` gives it.
    pub(crate) fn cuda_version(&self) -> i32 {
        let node = self.node.as_ref().map(|n| n.spec().cuda_version);
        self.config.cuda_version.or(node).unwrap_or(DEFAULT_CUDA_VERSION)
    }

    pub(crate) fn devices(&self) -> &[Device] {
        self.devices.get().map_or(&[], Vec::as_slice)
    }

    /// The device with that ordinal.
    pub(crate) fn device(&self, ordinal: i32) -> Cu<&Device> {
        usize::try_from(ordinal).ok().and_then(|i| self.devices().get(i)).ok_or(Code::INVALID_DEVICE)
    }

    /// The MPS control daemon that this process is a client of.
    pub(crate) fn mps_daemon(&self) -> Option<u32> {
        self.mps_daemon.get().copied().flatten()
    }

    /// Whether the process is on its way out.
    pub(crate) fn is_exiting(&self) -> bool {
        self.exiting.load(SeqCst)
    }

    /// Sees to it that work happens which somebody could notice. Threads that are not there yet are started when the
    /// call into the driver ends.
    pub(crate) fn wake_worker(&self, state: &State) {
        if state.engine.needs_thread {
            self.needs_threads.store(true, SeqCst);
            self.work.notify_one();
            self.changed.notify_all();
        }
    }

    /// Whether there has been work that the driver's threads have to see to.
    pub(crate) fn needs_threads(&self) -> bool {
        self.needs_threads.load(SeqCst)
    }

    /// Sleeps until anything has changed, at the longest for that long.
    pub(crate) fn wait_changed<'s>(
        &self,
        state: MutexGuard<'s, State>,
        time: Duration,
    ) -> MutexGuard<'s, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Sleeps until there is something to do, at the longest for that long.
    pub(crate) fn wait_work<'s>(
        &self,
        state: MutexGuard<'s, State>,
        time: Duration,
    ) -> MutexGuard<'s, State> {
        self.work.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Everything that the process has made.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes device memory on the node.
    pub(crate) fn charge(&self, device: usize, bytes: u64) -> Cu {
        let pool = self.devices().get(device).ok_or(Code::INVALID_DEVICE)?.pool;
        self.node()?.charge(pool, bytes).map_err(|e| code_of(&e))
    }

    /// Gives device memory back.
    pub(crate) fn release(&self, device: usize, bytes: u64) {
        if let (Some(device), Some(node)) = (self.devices().get(device), &self.node) {
            // A node that was rebooted has nothing of ours any more.
            let _ = node.release(device.pool, bytes);
        }
    }
}
