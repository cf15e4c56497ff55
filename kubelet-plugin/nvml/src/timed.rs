//! Makes calls with a deadline, in one lane for each GPU.
//!
//! A call into the driver blocks and cannot be taken back: a GPU that hangs keeps its caller for as long as
//! it likes, and no signal ends it. So each GPU has a thread of its own that makes the calls on it one after
//! the other, and the caller waits for the answer until a deadline. A call that has not come back by then is
//! *stuck*: its GPU is named in [`Calls::stuck`], and every other call on this GPU is refused at once, until
//! the stuck call comes back. Other GPUs go on. A call that did not begin before its caller's deadline never
//! runs.
//!
//! The threads are detached: a process that ends does not wait for them.

mod calls;
mod lane;

pub use calls::{Calls, Stuck};

use crate::{
    ComputeMode, Destroyed, DriverInfo, EventSource, GpuError, GpuHealth, GpuProcess, Gpus, Inventory,
    MemoryUse, MigMode, ModeChange, Operation, ProcessTime, TimeSlice, Unreadable,
};
use aliquot_model::{GpuInfo, GpuUuid, LiveMig, Placement};
use calls::Subject;
use lane::{Lane, Observer};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The longest times that the driver may take for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// The limit for reading all facts of one GPU.
    pub read: Duration,
    /// The limit for a change of a GPU: MIG mode, instances, time slice.
    pub change: Duration,
}

impl Default for Deadlines {
    /// Allows for a GPU that no program has open, which takes seconds to start; a change of MIG mode also
    /// resets it.
    fn default() -> Self {
        Self { read: Duration::from_secs(10), change: Duration::from_secs(30) }
    }
}

/// The result of reading a GPU.
type GpuRead = Result<(GpuInfo, Vec<LiveMig>), Unreadable>;

/// The subject of a lane.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// The library as a whole.
    Library,
    /// A GPU, by index.
    Index(u32),
    /// A GPU that was not listed yet, or is not listed any more.
    Gpu(GpuUuid),
}

/// The indexes of the GPUs, from the last time that they were read.
#[derive(Debug, Default)]
struct Known {
    indexes: BTreeMap<GpuUuid, u32>,
    minors: BTreeMap<u32, u32>,
}

/// GPUs whose calls have deadlines.
pub struct Timed {
    inner: Arc<dyn Gpus>,
    deadlines: Deadlines,
    calls: Calls,
    observer: Observer,
    lanes: Mutex<BTreeMap<Place, Arc<Lane>>>,
    known: Mutex<Known>,
}

impl Timed {
    /// Adds deadlines to the calls of `inner`; those under way are noted in `calls`.
    pub fn new(inner: Arc<dyn Gpus>, deadlines: Deadlines, calls: Calls) -> Self {
        let observer: Observer = Arc::new(|_, _| {});
        Self { inner, deadlines, calls, observer, lanes: Mutex::default(), known: Mutex::default() }
    }

    /// Adds an observer. It gets the name of each call that came back ([`Operation::name`]) and the time that
    /// the driver took for it, without the wait for its turn.
    #[must_use]
    pub fn observed(self, observer: impl Fn(&'static str, Duration) + Send + Sync + 'static) -> Self {
        Self { observer: Arc::new(observer), ..self }
    }

    fn lane(&self, place: &Place, subject: Subject) -> Arc<Lane> {
        let mut lanes = self.lanes.lock();
        let new = || Arc::new(Lane::new(subject, self.calls.clone(), Arc::clone(&self.observer)));
        Arc::clone(lanes.entry(place.clone()).or_insert_with(new))
    }

    fn of_library<T: Send + 'static>(
        &self,
        operation: Operation,
        work: impl FnOnce(&dyn Gpus) -> Result<T, GpuError> + Send + 'static,
    ) -> Result<T, GpuError> {
        let (inner, limit) = (Arc::clone(&self.inner), self.deadlines.read);
        self.lane(&Place::Library, Subject::default()).call(&operation, limit, move || work(&*inner))?
    }

    fn on<T: Send + 'static>(
        &self,
        gpu: &GpuUuid,
        operation: Operation,
        limit: Duration,
        work: impl FnOnce(&dyn Gpus, &GpuUuid) -> Result<T, GpuError> + Send + 'static,
    ) -> Result<T, GpuError> {
        let index = self.known.lock().indexes.get(gpu).copied();
        let place = index.map_or_else(|| Place::Gpu(gpu.clone()), Place::Index);
        let subject = Subject { gpu: Some(gpu.clone()), index };
        let lane = self.lane(&place, subject.clone());
        lane.set_subject(subject);
        let (inner, gpu) = (Arc::clone(&self.inner), gpu.clone());
        lane.call(&operation, limit, move || work(&*inner, &gpu))?
    }

    fn reads<T: Send + 'static>(
        &self,
        gpu: &GpuUuid,
        fact: &'static str,
        work: impl FnOnce(&dyn Gpus, &GpuUuid) -> Result<T, GpuError> + Send + 'static,
    ) -> Result<T, GpuError> {
        self.on(gpu, Operation::Read(fact), self.deadlines.read, work)
    }

    fn changes<T: Send + 'static>(
        &self,
        gpu: &GpuUuid,
        operation: Operation,
        work: impl FnOnce(&dyn Gpus, &GpuUuid) -> Result<T, GpuError> + Send + 'static,
    ) -> Result<T, GpuError> {
        self.on(gpu, operation, self.deadlines.change, work)
    }

    /// Reads a GPU on its lane. `work` returns `Err` if the library does not answer.
    fn read_with(
        &self,
        index: u32,
        work: impl FnOnce(&dyn Gpus) -> Result<GpuRead, GpuError> + Send + 'static,
    ) -> GpuRead {
        let lane = self.lane(&Place::Index(index), Subject { gpu: None, index: Some(index) });
        let mut uuid = lane.subject().gpu;
        if uuid.is_none() {
            // The UUID is read first, so that the GPU has a name if the rest does not come back.
            uuid = match self.identify(index) {
                Ok(gpu) => Some(gpu),
                Err(error) if error.is_stuck() => return Err(Unreadable { index, uuid: None, error }),
                // If something is wrong with the GPU, the call for its facts reports it.
                Err(_) => None,
            };
        }
        let inner = Arc::clone(&self.inner);
        let read = lane
            .call(&Operation::Read("facts"), self.deadlines.read, move || work(&*inner))
            .and_then(|read| read)
            .map_err(|error| Unreadable { index, uuid: uuid.clone(), error })?;
        let now = match &read {
            Ok((info, _)) => Some(&info.uuid),
            Err(gpu) => gpu.uuid.as_ref(),
        };
        if now.is_some() && now != uuid.as_ref() {
            // Another GPU has the index now.
            self.place(&lane, index, now.cloned());
        }
        if let Ok((info, _)) = &read {
            let mut known = self.known.lock();
            known.minors.retain(|_, other| *other != index);
            known.minors.insert(info.minor, index);
        }
        read
    }

    /// Reads one GPU, and the driver's versions, with one call.
    fn read_alone(&self, index: u32) -> Result<Inventory, GpuError> {
        let found = Arc::new(Mutex::new(None));
        let driver = Arc::clone(&found);
        let read = self.read_with(index, move |gpus| {
            let found = gpus.driver()?;
            let read = gpus.read(index, &found);
            *driver.lock() = Some(found);
            Ok(read)
        });
        let driver = found.lock().take();
        match driver {
            Some(driver) => Ok(Inventory::of(driver, [read])),
            // If the GPU's call did not return the versions, they are asked of the library as a whole.
            None => Ok(Inventory::of(self.driver()?, [read])),
        }
    }

    /// Notes the GPU that an index means.
    fn place(&self, lane: &Lane, index: u32, gpu: Option<GpuUuid>) {
        lane.set_subject(Subject { gpu: gpu.clone(), index: Some(index) });
        let mut known = self.known.lock();
        known.indexes.retain(|_, other| *other != index);
        known.indexes.extend(gpu.map(|gpu| (gpu, index)));
    }

    /// Reads GPUs, each on its lane and all at the same time.
    fn read_all(&self, driver: DriverInfo, indexes: impl Iterator<Item = u32>) -> Inventory {
        let all: Vec<_> = std::thread::scope(|scope| {
            let driver = &driver;
            let readers: Vec<_> =
                indexes.map(|index| (index, scope.spawn(move || self.read(index, driver)))).collect();
            let ended = readers.into_iter().map(|(index, reader)| {
                reader.join().unwrap_or_else(|_| {
                    let cause = crate::Cause::Unexpected("reading it ended abnormally".to_owned());
                    let error = GpuError::on_index(index, Operation::Read("facts"), cause);
                    Err(Unreadable { index, uuid: None, error })
                })
            });
            ended.collect()
        });
        Inventory::of(driver, all)
    }
}

impl Gpus for Timed {
    fn driver(&self) -> Result<DriverInfo, GpuError> {
        self.of_library(Operation::Read("driver version"), |gpus| gpus.driver())
    }

    fn count(&self) -> Result<u32, GpuError> {
        self.of_library(Operation::Read("number of GPUs"), |gpus| gpus.count())
    }

    fn identify(&self, index: u32) -> Result<GpuUuid, GpuError> {
        let lane = self.lane(&Place::Index(index), Subject { gpu: None, index: Some(index) });
        let inner = Arc::clone(&self.inner);
        let operation = Operation::Read("UUID");
        let gpu = lane.call(&operation, self.deadlines.read, move || inner.identify(index))??;
        self.place(&lane, index, Some(gpu.clone()));
        Ok(gpu)
    }

    fn read(&self, index: u32, driver: &DriverInfo) -> Result<(GpuInfo, Vec<LiveMig>), Unreadable> {
        let driver = driver.clone();
        self.read_with(index, move |gpus| Ok(gpus.read(index, &driver)))
    }

    fn inventory(&self) -> Result<Inventory, GpuError> {
        let driver = self.driver()?;
        Ok(self.read_all(driver, 0..self.count()?))
    }

    fn inventory_of(&self, minors: &BTreeSet<u32>) -> Result<Inventory, GpuError> {
        let indexes: Option<BTreeSet<u32>> = {
            let known = self.known.lock();
            minors.iter().map(|minor| known.minors.get(minor).copied()).collect()
        };
        if let Some(indexes) = indexes {
            let found = match indexes.first().filter(|_| indexes.len() == 1) {
                Some(index) => self.read_alone(*index)?,
                None => self.read_all(self.driver()?, indexes.into_iter()),
            };
            // A GPU that has another number now, or none, may have been replaced.
            let renumbered = found.gpus.iter().any(|gpu| !minors.contains(&gpu.minor));
            let gone = found.unreadable.iter().any(|gpu| !gpu.error.is_stuck());
            if !renumbered && !gone {
                return Ok(found);
            }
        }
        Ok(self.inventory()?.only(minors))
    }

    fn gpu(&self, gpu: &GpuUuid) -> Result<GpuInfo, GpuError> {
        self.reads(gpu, "facts", |gpus, gpu| gpus.gpu(gpu))
    }

    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.reads(gpu, "MIG mode", |gpus, gpu| gpus.mig_mode(gpu))
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<ModeChange, GpuError> {
        self.changes(gpu, Operation::SetMigMode { on }, move |gpus, gpu| gpus.set_mig_mode(gpu, on))
    }

    fn live_migs(&self, gpu: &GpuUuid) -> Result<Vec<LiveMig>, GpuError> {
        self.reads(gpu, "list of GPU instances", |gpus, gpu| gpus.live_migs(gpu))
    }

    fn create_mig(&self, gpu: &GpuUuid, profile_id: u32, placement: Placement) -> Result<LiveMig, GpuError> {
        let operation = Operation::CreateGpuInstance { profile_id, placement };
        self.changes(gpu, operation, move |gpus, gpu| gpus.create_mig(gpu, profile_id, placement))
    }

    fn destroy_mig(&self, mig: &LiveMig) -> Result<Destroyed, GpuError> {
        let operation = Operation::DestroyGpuInstance { gpu_instance: mig.gpu_instance };
        let target = mig.clone();
        self.changes(&mig.parent, operation, move |gpus, _| gpus.destroy_mig(&target))
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        self.reads(gpu, "list of processes", |gpus, gpu| gpus.processes(gpu))
    }

    fn utilization(&self, gpu: &GpuUuid, since_us: u64) -> Result<Vec<ProcessTime>, GpuError> {
        self.reads(gpu, "GPU time of processes", move |gpus, gpu| gpus.utilization(gpu, since_us))
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<MemoryUse, GpuError> {
        self.reads(gpu, "memory in use", |gpus, gpu| gpus.memory(gpu))
    }

    fn compute_mode(&self, gpu: &GpuUuid) -> Result<ComputeMode, GpuError> {
        self.reads(gpu, "compute mode", |gpus, gpu| gpus.compute_mode(gpu))
    }

    fn set_compute_mode(&self, gpu: &GpuUuid, mode: ComputeMode) -> Result<(), GpuError> {
        self.changes(gpu, Operation::SetComputeMode, move |gpus, gpu| gpus.set_compute_mode(gpu, mode))
    }

    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        self.reads(gpu, "persistence mode", |gpus, gpu| gpus.persistence_mode(gpu))
    }

    fn set_persistence_mode(&self, gpu: &GpuUuid, on: bool) -> Result<(), GpuError> {
        let operation = Operation::SetPersistenceMode { on };
        self.changes(gpu, operation, move |gpus, gpu| gpus.set_persistence_mode(gpu, on))
    }

    fn set_time_slice(&self, gpu: &GpuUuid, slice: TimeSlice) -> Result<(), GpuError> {
        self.changes(gpu, Operation::SetTimeSlice, move |gpus, gpu| gpus.set_time_slice(gpu, slice))
    }

    fn health(&self, gpu: &GpuUuid) -> Result<GpuHealth, GpuError> {
        self.reads(gpu, "health", |gpus, gpu| gpus.health(gpu))
    }

    /// Watches several GPUs with one call, so they wait for each other; call it for each GPU alone to avoid
    /// this.
    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, GpuError> {
        let wanted = gpus.to_vec();
        match gpus.first() {
            Some(first) => {
                let limit = self.deadlines.read;
                self.on(first, Operation::Watch, limit, move |gpus, _| gpus.watch(&wanted))
            }
            None => self.of_library(Operation::Watch, move |gpus| gpus.watch(&wanted)),
        }
    }
}
