//! Simulates a node of GPUs for tests: boards with real tables, the life of MIG instances, processes, and
//! errors on request. It passes the same [`contract`](crate::contract) as the real library.
//!
//! Not modelled: time (nothing takes any), engines shared between profiles beyond their own maximum, several
//! compute instances in a GPU instance, graphics and MPS processes of their own, and the output of
//! nvidia-smi.
#![allow(clippy::panic, reason = "a death on request is a panic, for the test to catch")]

use crate::{
    Cause, ComputeMode, Destroyed, DriverInfo, EventKind, EventSource, GpuError, GpuEvent, GpuHealth,
    GpuProcess, Gpus, MemoryUse, MigMode, ModeChange, NvmlCode, Operation, ProcessTime, TimeSlice,
    Unreadable,
};
use aliquot_model::{GpuInfo, GpuUuid, LiveMig, MigCapability, MigUuid, Placement};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::panic;
use std::sync::Arc;
use std::time::{Duration, Instant};

mod boards;
pub use boards::{a30, a100_40, h100_80, t4};

/// The effect of a fault on the call that it hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// The call does nothing and returns this code.
    Fail(NvmlCode),
    /// The process dies before the call does anything: it panics with [`Killed`].
    KillBefore,
    /// The process dies after the call did its work.
    KillAfter,
}

/// The panic payload of a simulated death, for `catch_unwind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Killed;

/// Runs `work` until a simulated death; returns `None` if it died. Only simulated deaths print no panic
/// message.
pub fn until_killed<T>(work: impl FnOnce() -> T) -> Option<T> {
    static QUIET: std::sync::Once = std::sync::Once::new();
    QUIET.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !info.payload().is::<Killed>() {
                loud(info);
            }
        }));
    });
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(value) => Some(value),
        Err(death) if death.is::<Killed>() => None,
        Err(other) => std::panic::resume_unwind(other),
    }
}

/// The NVML functions that faults can name; the real library uses the same functions for these operations.
pub const FUNCTIONS: [&str; 14] = [
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceSetComputeMode",
    "nvmlDeviceSetPersistenceMode",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait_v2",
];

struct Fault {
    function: &'static str,
    /// The number of calls until the fault hits; 1 is the next call.
    countdown: u64,
    kind: FaultKind,
}

struct Board {
    info: GpuInfo,
    instances: Vec<LiveMig>,
    processes: Vec<GpuProcess>,
    times: Vec<ProcessTime>,
    compute_mode: ComputeMode,
    persistence: bool,
    time_slice: TimeSlice,
    lost: bool,
    /// True if a change of MIG mode waits for a reset, whatever the board is known for.
    waits_for_reset: bool,
    health: GpuHealth,
}

struct State {
    driver: DriverInfo,
    boards: Vec<Board>,
    /// The boards that another driver has.
    away: Vec<Board>,
    faults: Vec<Fault>,
    calls: Vec<&'static str>,
    events: VecDeque<GpuEvent>,
}

impl State {
    fn bring_back(&mut self, which: impl Fn(&GpuInfo) -> bool) {
        let Self { boards, away, .. } = self;
        let back = away.extract_if(.., |board| which(&board.info));
        // The driver starts a board that comes back as it did at first.
        boards.extend(back.map(|board| Board { persistence: false, ..board }));
        boards.sort_by(|a, b| a.info.pci_bus_id.cmp(&b.info.pci_bus_id));
        self.number();
    }

    /// Numbers the boards that are there, as NVML does.
    fn number(&mut self) {
        for (index, board) in (0..).zip(&mut self.boards) {
            board.info.index = index;
        }
    }
}

/// A fake node. Clones share the same node.
#[derive(Clone)]
pub struct FakeGpus {
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl FakeGpus {
    /// Creates a node with these GPUs, such as [`h100_80`]`(0)`.
    pub fn new(gpus: impl IntoIterator<Item = GpuInfo>) -> Self {
        let boards = gpus.into_iter().enumerate().map(|(index, info)| Board {
            info: GpuInfo { index: u32::try_from(index).unwrap_or(u32::MAX), ..info },
            instances: Vec::new(),
            processes: Vec::new(),
            times: Vec::new(),
            compute_mode: ComputeMode::Default,
            persistence: false,
            time_slice: TimeSlice::Default,
            lost: false,
            waits_for_reset: false,
            health: GpuHealth::default(),
        });
        let state = State {
            driver: DriverInfo { driver_version: "580.95.05".to_owned(), cuda_version: (13, 0) },
            boards: boards.collect(),
            away: Vec::new(),
            faults: Vec::new(),
            calls: Vec::new(),
            events: VecDeque::new(),
        };
        Self { shared: Arc::new((Mutex::new(state), Condvar::new())) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock()
    }

    /// Makes the `nth` call (from 1) of one of [`FUNCTIONS`] go wrong. Panics on an unknown name, because the
    /// test would then test nothing.
    pub fn fault(&self, function: &str, nth: u64, kind: FaultKind) {
        let known = FUNCTIONS.into_iter().find(|known| *known == function);
        assert!(known.is_some() && nth > 0, "no such fault: call {nth} of {function}");
        self.state().faults.extend(known.map(|function| Fault { function, countdown: nth, kind }));
    }

    /// Removes all faults that have not hit.
    pub fn clear_faults(&self) {
        self.state().faults.clear();
    }

    /// Returns the functions of [`FUNCTIONS`] that were called, in order.
    pub fn calls(&self) -> Vec<&'static str> {
        self.state().calls.clone()
    }

    /// Simulates a reboot: instances and processes are gone, and a pending mode is in force on boards that
    /// keep it.
    pub fn reboot(&self) {
        let mut state = self.state();
        state.bring_back(|_| true);
        for board in &mut state.boards {
            board.instances.clear();
            board.processes.clear();
            board.times.clear();
            board.compute_mode = ComputeMode::Default;
            board.time_slice = TimeSlice::Default;
            board.lost = false;
            board.health = GpuHealth::default();
            if let MigCapability::Supported { enabled, pending, needs_reset, .. } = &mut board.info.mig {
                // Only the boards that keep the mode in their InfoROM have it after a reboot.
                *pending &= *needs_reset;
                *enabled = *pending;
            }
        }
        state.events.clear();
    }

    /// Takes a GPU off the bus, and raises the error that the driver reports for it.
    pub fn lose(&self, gpu: &GpuUuid) {
        self.with_board(gpu, |board| board.lost = true);
        self.raise(gpu, EventKind::Xid(79), None);
    }

    /// Takes a GPU from the driver, which then no longer lists it. A real library that was opened before
    /// would still name it; tests do not ask the fake in between.
    pub fn take_away(&self, gpu: &GpuUuid) {
        let mut state = self.state();
        let State { boards, away, .. } = &mut *state;
        away.extend(boards.extract_if(.., |board| &board.info.uuid == gpu));
        state.number();
    }

    /// Gives a GPU back to the driver.
    pub fn bring_back(&self, gpu: &GpuUuid) {
        self.state().bring_back(|info| &info.uuid == gpu);
    }

    /// Sets the health that a GPU reports; a GPU that was lost is back on the bus.
    pub fn set_health(&self, gpu: &GpuUuid, health: GpuHealth) {
        self.with_board(gpu, |board| (board.health, board.lost) = (health, false));
    }

    /// Raises an event.
    pub fn raise(&self, gpu: &GpuUuid, kind: EventKind, gpu_instance: Option<u32>) {
        let event = GpuEvent { gpu: Some(gpu.clone()), gpu_instance, compute_instance: None, kind };
        self.state().events.push_back(event);
        self.shared.1.notify_all();
    }

    /// Makes every later change of MIG mode wait for a reset, as on a node where the driver cannot reset the
    /// GPU by itself.
    pub fn wait_for_reset(&self, gpu: &GpuUuid) {
        self.with_board(gpu, |board| board.waits_for_reset = true);
    }

    /// Starts a process on a GPU.
    pub fn start_process(&self, gpu: &GpuUuid, process: GpuProcess) {
        self.with_board(gpu, |board| board.processes.push(process));
    }

    /// Sets the GPU time that a process had in the last sample period.
    pub fn set_time(&self, gpu: &GpuUuid, time: ProcessTime) {
        self.with_board(gpu, |board| {
            board.times.retain(|known| known.pid != time.pid);
            board.times.push(time);
        });
    }

    /// Removes all processes with that ID from all GPUs.
    pub fn stop_process(&self, pid: u32) {
        for board in &mut self.state().boards {
            board.times.retain(|time| time.pid != pid);
            board.processes.retain(|process| process.pid != pid);
        }
    }

    /// Returns the time slice that was set.
    pub fn time_slice(&self, gpu: &GpuUuid) -> Option<TimeSlice> {
        self.state().boards.iter().find(|board| &board.info.uuid == gpu).map(|board| board.time_slice)
    }

    fn with_board(&self, gpu: &GpuUuid, change: impl FnOnce(&mut Board)) {
        if let Some(board) = self.state().boards.iter_mut().find(|board| &board.info.uuid == gpu) {
            change(board);
        }
    }

    /// Begins the call of a function: counts it, and applies a fault that hits it. The returned function must
    /// be called when the function has done its work.
    fn enter(state: &mut State, function: &'static str) -> Result<impl FnOnce() + use<>, NvmlCode> {
        state.calls.push(function);
        for fault in state.faults.iter_mut().filter(|fault| fault.function == function) {
            fault.countdown = fault.countdown.saturating_sub(1);
        }
        let hit = state.faults.iter().position(|fault| fault.countdown == 0);
        let kind = hit.map(|hit| state.faults.remove(hit).kind);
        match kind {
            Some(FaultKind::Fail(code)) => Err(code),
            Some(FaultKind::KillBefore) => panic::panic_any(Killed),
            _ => Ok(move || {
                if kind == Some(FaultKind::KillAfter) {
                    panic::panic_any(Killed);
                }
            }),
        }
    }

    /// Runs a function of the library on a GPU.
    fn on<T>(
        &self,
        gpu: &GpuUuid,
        operation: &Operation,
        function: &'static str,
        act: impl FnOnce(&mut Board) -> Result<T, NvmlCode>,
    ) -> Result<T, GpuError> {
        let failed = |code| GpuError::on(gpu, operation.clone(), code);
        let mut state = self.state();
        let done = Self::enter(&mut state, function).map_err(failed)?;
        let board = state.boards.iter_mut().find(|board| &board.info.uuid == gpu);
        let board = board.ok_or_else(|| failed(NvmlCode::NOT_FOUND))?;
        if board.lost {
            return Err(failed(NvmlCode::GPU_IS_LOST));
        }
        let value = act(board).map_err(failed)?;
        drop(state);
        done();
        Ok(value)
    }
}

impl Board {
    fn mode(&self) -> Result<MigMode, NvmlCode> {
        match self.info.mig {
            MigCapability::Unsupported => Err(NvmlCode::NOT_SUPPORTED),
            MigCapability::Supported { enabled, pending, .. } => Ok(MigMode { current: enabled, pending }),
        }
    }

    fn set_mode(&mut self, on: bool) -> Result<ModeChange, NvmlCode> {
        let busy = !self.processes.is_empty() || !self.instances.is_empty();
        let MigCapability::Supported { enabled, pending, needs_reset, .. } = &mut self.info.mig else {
            return Err(NvmlCode::NOT_SUPPORTED);
        };
        if *enabled == on {
            *pending = on;
            return Ok(ModeChange::InForce);
        }
        if *needs_reset || self.waits_for_reset {
            *pending = on;
            return Ok(ModeChange::AfterReset);
        }
        if busy {
            return Err(NvmlCode::IN_USE);
        }
        (*enabled, *pending) = (on, on);
        Ok(ModeChange::InForce)
    }

    fn create_instance(&mut self, profile_id: u32, placement: Placement) -> Result<u32, NvmlCode> {
        if !self.mode()?.current {
            return Err(NvmlCode::NOT_SUPPORTED);
        }
        let profile = self.info.profile(profile_id).ok_or(NvmlCode::INVALID_ARGUMENT)?;
        if !profile.placements.contains(&placement) {
            return Err(NvmlCode::INVALID_ARGUMENT);
        }
        let of_profile = self.instances.iter().filter(|mig| mig.profile_id == profile_id).count();
        let full = u32::try_from(of_profile).is_ok_and(|count| count >= profile.max_instances);
        if full || self.instances.iter().any(|mig| mig.placement.overlaps(placement)) {
            return Err(NvmlCode::INSUFFICIENT_RESOURCES);
        }
        // The IDs are as the driver numbers them: the whole axis is 0, its halves 1 and 2, its quarters 3 to
        // 6…
        let parts = self.info.memory_slices().checked_div(placement.size).unwrap_or(1).max(1);
        let id = (parts - 1..parts * 2 - 1)
            .find(|id| self.instances.iter().all(|mig| mig.gpu_instance != *id))
            .ok_or(NvmlCode::INSUFFICIENT_RESOURCES)?;
        self.instances.push(LiveMig {
            parent: self.info.uuid.clone(),
            profile_id,
            placement,
            gpu_instance: id,
            compute_instance: None,
            uuid: None,
        });
        self.instances.sort_by_key(|mig| mig.placement);
        Ok(id)
    }

    fn fill_instance(&mut self, id: u32) -> Result<LiveMig, NvmlCode> {
        let minor = self.info.minor;
        let mig = self.instances.iter_mut().find(|mig| mig.gpu_instance == id).ok_or(NvmlCode::NOT_FOUND)?;
        mig.compute_instance = Some(0);
        mig.uuid = MigUuid::parse(&format!("MIG-{minor:08x}-{id:04x}-5000-8000-000000000000"));
        Ok(mig.clone())
    }

    fn processes_in(&self, instance: u32) -> Vec<GpuProcess> {
        self.processes.iter().filter(|p| p.gpu_instance == Some(instance)).cloned().collect()
    }
}

impl Gpus for FakeGpus {
    fn driver(&self) -> Result<DriverInfo, GpuError> {
        Ok(self.state().driver.clone())
    }

    fn count(&self) -> Result<u32, GpuError> {
        let mut state = self.state();
        Self::enter(&mut state, "nvmlDeviceGetCount_v2")
            .map_err(|code| GpuError::of_library(Operation::Read("number of GPUs"), code))?();
        Ok(u32::try_from(state.boards.len()).unwrap_or(u32::MAX))
    }

    fn identify(&self, index: u32) -> Result<GpuUuid, GpuError> {
        let failed = |code| GpuError::on_index(index, Operation::Read("handle"), code);
        let state = self.state();
        let board = state.boards.get(usize::try_from(index).unwrap_or(usize::MAX));
        match board {
            None => Err(failed(NvmlCode::INVALID_ARGUMENT)),
            Some(board) if board.lost => Err(failed(NvmlCode::GPU_IS_LOST)),
            Some(board) => Ok(board.info.uuid.clone()),
        }
    }

    fn read(&self, index: u32, _: &DriverInfo) -> Result<(GpuInfo, Vec<LiveMig>), Unreadable> {
        let failed = |code| Unreadable {
            index,
            uuid: None,
            error: GpuError::on_index(index, Operation::Read("handle"), code),
        };
        let mut state = self.state();
        Self::enter(&mut state, "nvmlDeviceGetHandleByIndex_v2").map_err(failed)?();
        let board = state.boards.get(usize::try_from(index).unwrap_or(usize::MAX));
        match board {
            None => Err(failed(NvmlCode::INVALID_ARGUMENT)),
            Some(board) if board.lost => Err(failed(NvmlCode::GPU_IS_LOST)),
            Some(board) => Ok((board.info.clone(), board.instances.clone())),
        }
    }

    fn gpu(&self, gpu: &GpuUuid) -> Result<GpuInfo, GpuError> {
        self.on(gpu, &Operation::Read("handle"), "nvmlDeviceGetHandleByIndex_v2", |board| {
            Ok(board.info.clone())
        })
    }

    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.on(gpu, &Operation::Read("MIG mode"), "nvmlDeviceGetMigMode", |board| board.mode())
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<ModeChange, GpuError> {
        let operation = Operation::SetMigMode { on };
        self.on(gpu, &operation, "nvmlDeviceSetMigMode", |board| board.set_mode(on)).map_err(|error| {
            if !error.is_in_use() {
                return error;
            }
            error.blocked_by(self.processes(gpu).unwrap_or_default())
        })
    }

    fn live_migs(&self, gpu: &GpuUuid) -> Result<Vec<LiveMig>, GpuError> {
        let operation = Operation::Read("list of GPU instances");
        self.on(gpu, &operation, "nvmlDeviceGetMigMode", |board| Ok(board.instances.clone()))
    }

    fn create_mig(&self, gpu: &GpuUuid, profile_id: u32, placement: Placement) -> Result<LiveMig, GpuError> {
        let id = self.on(
            gpu,
            &Operation::CreateGpuInstance { profile_id, placement },
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            |board| board.create_instance(profile_id, placement),
        )?;
        let filled = self.on(
            gpu,
            &Operation::CreateComputeInstance { profile_id, placement },
            "nvmlGpuInstanceCreateComputeInstance",
            |board| board.fill_instance(id),
        );
        filled.map_err(|error| {
            let undo = Operation::DestroyGpuInstance { gpu_instance: id };
            let undone = self.on(gpu, &undo, "nvmlGpuInstanceDestroy", |board| {
                board.instances.retain(|mig| mig.gpu_instance != id);
                Ok(())
            });
            match undone {
                Ok(()) => error,
                Err(left) => {
                    error.leaving(format!("GPU instance {id}, because destroying it failed: {}", left.cause))
                }
            }
        })
    }

    fn destroy_mig(&self, mig: &LiveMig) -> Result<Destroyed, GpuError> {
        let meant = |live: &LiveMig| {
            (live.gpu_instance, live.profile_id, live.placement)
                == (mig.gpu_instance, mig.profile_id, mig.placement)
                && (live.uuid.is_none() || mig.uuid.is_none() || live.uuid == mig.uuid)
        };
        let Some(found) = self.live_migs(&mig.parent)?.into_iter().find(meant) else {
            return Ok(Destroyed::WasGone);
        };
        let gpu_instance = found.gpu_instance;
        if let Some(compute_instance) = found.compute_instance {
            let operation = Operation::DestroyComputeInstance { gpu_instance, compute_instance };
            let mut inside = Vec::new();
            self.on(&mig.parent, &operation, "nvmlComputeInstanceDestroy", |board| {
                inside = board.processes_in(gpu_instance);
                if !inside.is_empty() {
                    return Err(NvmlCode::IN_USE);
                }
                for live in board.instances.iter_mut().filter(|live| live.gpu_instance == gpu_instance) {
                    live.compute_instance = None;
                    live.uuid = None;
                }
                Ok(())
            })
            .map_err(|error| error.blocked_by(inside))?;
        }
        let operation = Operation::DestroyGpuInstance { gpu_instance };
        self.on(&mig.parent, &operation, "nvmlGpuInstanceDestroy", |board| {
            board.instances.retain(|live| live.gpu_instance != gpu_instance);
            Ok(Destroyed::Now)
        })
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        let operation = Operation::Read("list of processes");
        self.on(gpu, &operation, "nvmlDeviceGetComputeRunningProcesses_v3", |board| {
            let mut processes = board.processes.clone();
            processes.sort_by_key(|process| (process.pid, process.kind, process.gpu_instance));
            Ok(processes)
        })
    }

    fn utilization(&self, gpu: &GpuUuid, since_us: u64) -> Result<Vec<ProcessTime>, GpuError> {
        let operation = Operation::Read("GPU time of processes");
        self.on(gpu, &operation, "nvmlDeviceGetProcessUtilization", |board| {
            Ok(board.times.iter().filter(|time| time.at_us > since_us).copied().collect())
        })
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<MemoryUse, GpuError> {
        self.on(gpu, &Operation::Read("memory in use"), "nvmlDeviceGetHandleByIndex_v2", |board| {
            let used: u64 = board.processes.iter().filter_map(|process| process.memory_bytes).sum();
            let total = board.info.memory_bytes;
            Ok(MemoryUse { total, reserved: 0, free: total.saturating_sub(used), used })
        })
    }

    fn compute_mode(&self, gpu: &GpuUuid) -> Result<ComputeMode, GpuError> {
        let operation = Operation::Read("compute mode");
        self.on(gpu, &operation, "nvmlDeviceGetHandleByIndex_v2", |board| Ok(board.compute_mode))
    }

    fn set_compute_mode(&self, gpu: &GpuUuid, mode: ComputeMode) -> Result<(), GpuError> {
        self.on(gpu, &Operation::SetComputeMode, "nvmlDeviceSetComputeMode", |board| {
            board.compute_mode = mode;
            Ok(())
        })
    }

    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        let operation = Operation::Read("persistence mode");
        self.on(gpu, &operation, "nvmlDeviceGetHandleByIndex_v2", |board| Ok(board.persistence))
    }

    fn set_persistence_mode(&self, gpu: &GpuUuid, on: bool) -> Result<(), GpuError> {
        let operation = Operation::SetPersistenceMode { on };
        self.on(gpu, &operation, "nvmlDeviceSetPersistenceMode", |board| {
            board.persistence = on;
            Ok(())
        })
    }

    fn set_time_slice(&self, gpu: &GpuUuid, slice: TimeSlice) -> Result<(), GpuError> {
        let mut state = self.state();
        let board = state.boards.iter_mut().find(|board| &board.info.uuid == gpu && !board.lost);
        let missing = || Cause::Program("nvidia-smi finds no such GPU".to_owned());
        let board = board.ok_or_else(|| GpuError::on(gpu, Operation::SetTimeSlice, missing()))?;
        board.time_slice = slice;
        Ok(())
    }

    fn health(&self, gpu: &GpuUuid) -> Result<GpuHealth, GpuError> {
        self.on(gpu, &Operation::Read("health"), "nvmlDeviceGetHandleByIndex_v2", |board| Ok(board.health))
    }

    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, GpuError> {
        let mut unmonitored = Vec::new();
        let mut watched = Vec::new();
        for gpu in gpus {
            match self.on(gpu, &Operation::Watch, "nvmlDeviceRegisterEvents", |_| Ok(())) {
                Ok(()) => watched.push(gpu.clone()),
                Err(error) => unmonitored.push((gpu.clone(), error)),
            }
        }
        Ok(Box::new(FakeEvents { node: self.clone(), watched, unmonitored }))
    }
}

/// The events of a fake node. Only one listener gets each event.
struct FakeEvents {
    node: FakeGpus,
    watched: Vec<GpuUuid>,
    unmonitored: Vec<(GpuUuid, GpuError)>,
}

impl EventSource for FakeEvents {
    fn next(&mut self, timeout: Duration) -> Result<Option<GpuEvent>, GpuError> {
        let (lock, arrived) = &*self.node.shared;
        let deadline = Instant::now() + timeout;
        let mut state = lock.lock();
        FakeGpus::enter(&mut state, "nvmlEventSetWait_v2")
            .map_err(|code| GpuError::of_library(Operation::Watch, code))?();
        loop {
            let mine = |event: &GpuEvent| event.gpu.as_ref().is_none_or(|gpu| self.watched.contains(gpu));
            if let Some(position) = state.events.iter().position(mine) {
                return Ok(state.events.remove(position));
            }
            if arrived.wait_until(&mut state, deadline).timed_out() {
                return Ok(None);
            }
        }
    }

    fn unmonitored(&self) -> &[(GpuUuid, GpuError)] {
        &self.unmonitored
    }
}
