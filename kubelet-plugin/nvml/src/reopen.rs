//! Closes the library and opens it anew, below all its callers, when the driver went away or was exchanged.
//!
//! A library that was opened on a kernel module that is gone never works again, even if the module comes
//! back. A library is also of one version, which a module of another version refuses. So after a few looks in
//! which a caller was told that the driver is gone, the library is closed, and opened again from where it
//! then lies, after pauses that grow. A *look* begins with each question for the driver's versions, which
//! every inventory asks first.
//!
//! The library can also be let go of, so that the kernel module is free. It then stays closed until every
//! caller that asked for this says that it may be opened again. Event sets end with the library.
//!
//! While the library is closed, every call fails with the reason why it is closed.

use crate::{
    Cause, ComputeMode, Destroyed, DriverInfo, EventSource, GpuError, GpuEvent, GpuHealth, GpuProcess, Gpus,
    MemoryUse, MigMode, ModeChange, Operation, ProcessTime, TimeSlice, Unreadable,
};
use aliquot_model::{GpuInfo, GpuUuid, LiveMig, Placement};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The number of looks in a row in which a caller was told that the driver is gone, before the library is
/// closed.
const LOOKS: u32 = 2;

/// A library that was opened.
pub struct Opened {
    /// The library's GPUs.
    pub gpus: Arc<dyn Gpus>,
    /// Returns true if the library is still held. A held library is not opened anew: the loader would return
    /// the same one.
    pub held: Box<dyn Fn() -> bool + Send + Sync>,
}

/// The pauses between attempts to open the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pauses {
    /// The first pause.
    pub first: Duration,
    /// The longest pause; each pause is twice the one before.
    pub longest: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), longest: Duration::from_secs(5) }
    }
}

/// The longest time for which a library that is closed but still held keeps it from being opened again.
const HELD: Duration = Duration::from_secs(30);

type Open = dyn Fn() -> Result<Opened, GpuError> + Send + Sync;

/// GPUs whose library is opened anew when the driver changes.
pub struct Reopening {
    open: Box<Open>,
    pauses: Pauses,
    state: Mutex<State>,
    /// The number of times that the library was let go of.
    let_gos: Arc<AtomicU64>,
}

enum State {
    Open {
        library: Opened,
        /// The first error of this look that says that the driver is gone.
        told: Option<GpuError>,
        /// The number of looks in a row with such an error.
        looks: u32,
    },
    Closed {
        /// Tells whether the former library is still held; `None` once that no longer matters.
        former: Option<Box<dyn Fn() -> bool + Send + Sync>>,
        why: GpuError,
        /// The time at which the library was closed, or may be opened again.
        since: Instant,
        next: Instant,
        pause: Duration,
        /// The number of callers that want the library to stay closed until they call [`Reopening::resume`].
        let_go: u32,
    },
}

impl Reopening {
    /// Wraps a library that is open, with the function that opens it again.
    pub fn new(
        library: Opened,
        pauses: Pauses,
        open: impl Fn() -> Result<Opened, GpuError> + Send + Sync + 'static,
    ) -> Self {
        let state = Mutex::new(State::Open { library, told: None, looks: 0 });
        Self { open: Box::new(open), pauses, state, let_gos: Arc::default() }
    }

    /// Starts with a closed library. It is opened with the first look or, if it is not `wanted` yet, with the
    /// first look after [`Self::resume`]. Until then every call fails with the reason `why`.
    pub fn closed(
        why: &str,
        wanted: bool,
        pauses: Pauses,
        open: impl Fn() -> Result<Opened, GpuError> + Send + Sync + 'static,
    ) -> Self {
        let now = Instant::now();
        let state = State::Closed {
            former: None,
            why: GpuError::of_library(Operation::Use, Cause::LetGo(why.to_owned())),
            since: now,
            next: now,
            pause: pauses.first,
            let_go: u32::from(!wanted),
        };
        Self { open: Box::new(open), pauses, state: Mutex::new(state), let_gos: Arc::default() }
    }

    /// Closes the library, and keeps it closed until [`Self::resume`] was called as often as this function.
    /// Every call then fails with the reason `why`.
    pub fn let_go(&self, why: &str) {
        let why = GpuError::of_library(Operation::Use, Cause::LetGo(why.to_owned()));
        self.let_gos.fetch_add(1, Ordering::SeqCst);
        // Closing it calls the driver once more, so nobody waits for that.
        drop(self.close(why, 1));
    }

    /// Allows the library to be opened again at the next look, unless another caller wants it to stay closed.
    pub fn resume(&self) {
        if let State::Closed { since, next, pause, let_go, .. } = &mut *self.state.lock() {
            *let_go = let_go.saturating_sub(1);
            if *let_go == 0 {
                let now = Instant::now();
                (*since, *next, *pause) = (now, now, self.pauses.first);
            }
        }
    }

    /// Closes the library. Returns the GPUs that were open, to be dropped by the caller.
    fn close(&self, why: GpuError, let_go: u32) -> Option<Arc<dyn Gpus>> {
        let mut state = self.state.lock();
        let (now, pause) = (Instant::now(), self.pauses.first);
        let closed = State::Closed { former: None, why, since: now, next: now, pause, let_go };
        match std::mem::replace(&mut *state, closed) {
            State::Open { library: Opened { gpus, held }, .. } => {
                if let State::Closed { former, .. } = &mut *state {
                    *former = Some(held);
                }
                Some(gpus)
            }
            State::Closed { former: before, let_go: was, why: reason, .. } => {
                if let State::Closed { former, let_go, why, .. } = &mut *state {
                    *former = before;
                    // A caller that asked for the library to stay closed has not said otherwise.
                    if was > 0 {
                        (*let_go, *why) = (was + *let_go, reason);
                    }
                }
                None
            }
        }
    }

    /// Returns true if the library is open or is still held after it was closed, by an event set or a call
    /// that is under way. A held library also holds the kernel module.
    pub fn is_held(&self) -> bool {
        match &*self.state.lock() {
            State::Open { .. } => true,
            State::Closed { former, .. } => former.as_ref().is_some_and(|held| held()),
        }
    }

    /// Returns the library's GPUs, if it is open.
    fn gpus(&self) -> Result<Arc<dyn Gpus>, GpuError> {
        match &*self.state.lock() {
            State::Open { library, .. } => Ok(Arc::clone(&library.gpus)),
            State::Closed { why, .. } => Err(why.clone()),
        }
    }

    fn call<T>(&self, work: impl FnOnce(&dyn Gpus) -> Result<T, GpuError>) -> Result<T, GpuError> {
        let gpus = self.gpus()?;
        let answer = work(&*gpus);
        if let Err(error) = &answer {
            self.note(error);
        }
        answer
    }

    fn note(&self, error: &GpuError) {
        if !error.is_no_driver() {
            return;
        }
        if let State::Open { told, .. } = &mut *self.state.lock() {
            told.get_or_insert_with(|| error.clone());
        }
    }

    /// Begins a look: evaluates the look before, and closes or opens the library if it is time to.
    fn begin_look(&self) {
        // Closing it calls the driver once more, so nobody waits for that.
        drop(self.close_if_gone());
        if self.is_due() {
            let opened = (self.open)();
            // One that is not wanted any more is closed without the lock.
            drop(self.take(opened));
        }
    }

    fn close_if_gone(&self) -> Option<Arc<dyn Gpus>> {
        let mut state = self.state.lock();
        let State::Open { told, looks, .. } = &mut *state else { return None };
        let Some(why) = told.take() else {
            *looks = 0;
            return None;
        };
        *looks += 1;
        if *looks < LOOKS {
            return None;
        }
        tracing::warn!(error = %why, "the driver is gone or another one: closing NVML, to open it again");
        drop(state);
        self.close(why, 0)
    }

    /// Returns true if the library is to be opened now. The caller that gets true opens it; others are told
    /// meanwhile that it is closed.
    fn is_due(&self) -> bool {
        let mut state = self.state.lock();
        let State::Closed { former, since, next, pause, let_go, .. } = &mut *state else { return false };
        let now = Instant::now();
        if *let_go > 0 || *next > now {
            return false;
        }
        // A call that never comes back holds the library for good; the other callers do not wait for that.
        if former.as_ref().is_some_and(|held| held()) && now.duration_since(*since) < HELD {
            return false;
        }
        *former = None;
        *next = now + *pause;
        *pause = (*pause * 2).min(self.pauses.longest);
        true
    }

    /// Takes in the library that was opened. Returns it if it is not wanted any more.
    fn take(&self, opened: Result<Opened, GpuError>) -> Option<Opened> {
        let mut state = self.state.lock();
        match (opened, &mut *state) {
            // Let go of while it was opened.
            (opened, State::Closed { let_go: 1.., .. }) => opened.ok(),
            (Ok(library), State::Closed { .. }) => {
                tracing::info!("NVML is open again");
                *state = State::Open { library, told: None, looks: 0 };
                None
            }
            (Err(error), State::Closed { why, .. }) => {
                tracing::debug!(%error, "NVML cannot be opened yet");
                *why = error;
                None
            }
            // Somebody else was faster.
            (opened, State::Open { .. }) => opened.ok(),
        }
    }
}

impl Gpus for Reopening {
    fn driver(&self) -> Result<DriverInfo, GpuError> {
        self.begin_look();
        self.call(|gpus| gpus.driver())
    }

    fn count(&self) -> Result<u32, GpuError> {
        self.call(|gpus| gpus.count())
    }

    fn identify(&self, index: u32) -> Result<GpuUuid, GpuError> {
        self.call(|gpus| gpus.identify(index))
    }

    fn read(&self, index: u32, driver: &DriverInfo) -> Result<(GpuInfo, Vec<LiveMig>), Unreadable> {
        let gpus = self.gpus().map_err(|error| Unreadable { index, uuid: None, error })?;
        let read = gpus.read(index, driver);
        if let Err(unreadable) = &read {
            self.note(&unreadable.error);
        }
        read
    }

    fn gpu(&self, gpu: &GpuUuid) -> Result<GpuInfo, GpuError> {
        self.call(|gpus| gpus.gpu(gpu))
    }

    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.call(|gpus| gpus.mig_mode(gpu))
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<ModeChange, GpuError> {
        self.call(|gpus| gpus.set_mig_mode(gpu, on))
    }

    fn live_migs(&self, gpu: &GpuUuid) -> Result<Vec<LiveMig>, GpuError> {
        self.call(|gpus| gpus.live_migs(gpu))
    }

    fn create_mig(&self, gpu: &GpuUuid, profile_id: u32, placement: Placement) -> Result<LiveMig, GpuError> {
        self.call(|gpus| gpus.create_mig(gpu, profile_id, placement))
    }

    fn destroy_mig(&self, mig: &LiveMig) -> Result<Destroyed, GpuError> {
        self.call(|gpus| gpus.destroy_mig(mig))
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        self.call(|gpus| gpus.processes(gpu))
    }

    fn utilization(&self, gpu: &GpuUuid, since_us: u64) -> Result<Vec<ProcessTime>, GpuError> {
        self.call(|gpus| gpus.utilization(gpu, since_us))
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<MemoryUse, GpuError> {
        self.call(|gpus| gpus.memory(gpu))
    }

    fn compute_mode(&self, gpu: &GpuUuid) -> Result<ComputeMode, GpuError> {
        self.call(|gpus| gpus.compute_mode(gpu))
    }

    fn set_compute_mode(&self, gpu: &GpuUuid, mode: ComputeMode) -> Result<(), GpuError> {
        self.call(|gpus| gpus.set_compute_mode(gpu, mode))
    }

    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        self.call(|gpus| gpus.persistence_mode(gpu))
    }

    fn set_persistence_mode(&self, gpu: &GpuUuid, on: bool) -> Result<(), GpuError> {
        self.call(|gpus| gpus.set_persistence_mode(gpu, on))
    }

    fn set_time_slice(&self, gpu: &GpuUuid, slice: TimeSlice) -> Result<(), GpuError> {
        self.call(|gpus| gpus.set_time_slice(gpu, slice))
    }

    fn health(&self, gpu: &GpuUuid) -> Result<GpuHealth, GpuError> {
        self.call(|gpus| gpus.health(gpu))
    }

    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn EventSource>, GpuError> {
        let (let_gos, born) = (Arc::clone(&self.let_gos), self.let_gos.load(Ordering::SeqCst));
        let source = self.call(|library| library.watch(gpus))?;
        Ok(Box::new(Watched { source, let_gos, born }))
    }
}

/// An event source that ends when its library is let go of.
struct Watched {
    source: Box<dyn EventSource>,
    let_gos: Arc<AtomicU64>,
    born: u64,
}

impl EventSource for Watched {
    fn next(&mut self, timeout: Duration) -> Result<Option<GpuEvent>, GpuError> {
        if self.let_gos.load(Ordering::SeqCst) != self.born {
            let why = Cause::LetGo("the library was closed since".to_owned());
            return Err(GpuError::of_library(Operation::Watch, why));
        }
        self.source.next(timeout)
    }

    fn unmonitored(&self) -> &[(GpuUuid, GpuError)] {
        self.source.unmonitored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NvmlCode;
    use crate::fake::FakeGpus;

    fn opened() -> Opened {
        Opened { gpus: Arc::new(FakeGpus::new([])), held: Box::new(|| false) }
    }

    #[test]
    fn a_library_that_begins_closed_is_opened_with_the_first_look_once_it_is_wanted() {
        let library = Reopening::closed("not yet", true, Pauses::default(), || Ok(opened()));
        assert!(
            library.count().is_err_and(|error| error.is_let_go() && error.to_string().contains("not yet"))
        );
        assert!(!library.is_held() && library.driver().is_ok() && library.count().is_ok());
        let unwanted = Reopening::closed("not yet", false, Pauses::default(), || Ok(opened()));
        assert!(unwanted.driver().is_err_and(|error| error.is_let_go()));
        unwanted.resume();
        assert!(unwanted.driver().is_ok());
    }

    #[test]
    fn a_library_that_begins_closed_says_why_it_cannot_be_opened() {
        let gone = || Err(GpuError::of_library(Operation::Use, NvmlCode::DRIVER_NOT_LOADED));
        let library = Reopening::closed("not yet", true, Pauses::default(), gone);
        assert_eq!(library.driver().unwrap_err().code(), Some(NvmlCode::DRIVER_NOT_LOADED));
    }

    /// Whoever notices that the driver is gone may be later than who lets go of it.
    #[test]
    fn a_library_that_was_let_go_of_is_not_opened_because_its_driver_was_gone_as_well() {
        let library = Reopening::new(opened(), Pauses::default(), || Ok(opened()));
        library.let_go("asked for");
        let gone = GpuError::of_library(Operation::Use, NvmlCode::DRIVER_NOT_LOADED);
        assert!(library.close(gone, 0).is_none());
        assert!(library.driver().is_err_and(|error| error.is_let_go()), "it stays closed");
        library.resume();
        assert!(library.driver().is_ok());
    }

    #[test]
    fn a_library_that_two_let_go_of_stays_closed_until_both_say_that_it_may_be_opened() {
        let library = Reopening::new(opened(), Pauses::default(), || Ok(opened()));
        library.let_go("the first");
        library.let_go("the second");
        library.resume();
        assert!(library.driver().is_err_and(|error| error.is_let_go()), "one of them still needs it closed");
        library.resume();
        assert!(library.driver().is_ok());
        library.resume();
        library.let_go("again");
        assert!(library.driver().is_err(), "a surplus word opens nothing beforehand");
    }

    /// Its set holds the library, and through it every GPU.
    #[test]
    fn who_listens_is_told_that_the_library_was_let_go_of() {
        let library = Reopening::new(opened(), Pauses::default(), || Ok(opened()));
        let mut events = library.watch(&[]).unwrap();
        assert_eq!(events.next(Duration::ZERO), Ok(None));
        library.let_go("asked for");
        library.resume();
        assert!(library.driver().is_ok());
        assert!(events.next(Duration::ZERO).is_err_and(|error| error.is_let_go()));
        assert_eq!(library.watch(&[]).unwrap().next(Duration::ZERO), Ok(None));
    }
}
