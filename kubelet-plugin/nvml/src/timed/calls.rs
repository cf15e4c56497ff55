//! Keeps the calls into the driver that are under way, and marks those that are late.

use crate::Operation;
use aliquot_model::GpuUuid;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The subject of a call: a GPU by UUID and NVML index, as far as they are known, or the library as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) gpu: Option<GpuUuid>,
    pub(super) index: Option<u32>,
}

/// A call that has not come back in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    /// The GPU, if its UUID is known.
    pub gpu: Option<GpuUuid>,
    /// The NVML index of the GPU; absent together with the GPU if the call is about the library as a whole.
    pub index: Option<u32>,
    /// The operation that was asked for.
    pub operation: String,
    /// The time since the call began.
    pub waited: Duration,
}

impl Stuck {
    /// Returns the UUID of the GPU, or what is known instead.
    pub fn name(&self) -> String {
        match (&self.gpu, self.index) {
            (Some(gpu), _) => gpu.to_string(),
            (None, Some(index)) => format!("index-{index}"),
            (None, None) => "driver".to_owned(),
        }
    }
}

impl Stuck {
    /// Returns a description without the time:
    /// `GPU GPU-… is stuck: the driver does not answer "read the facts"`.
    pub fn what(&self) -> String {
        let subject = match (&self.gpu, self.index) {
            (Some(gpu), _) => format!("GPU {gpu}"),
            (None, Some(index)) => format!("the GPU with index {index}"),
            (None, None) => "NVML as a whole".to_owned(),
        };
        format!("{subject} is stuck: the driver does not answer \"{}\"", self.operation)
    }
}

impl fmt::Display for Stuck {
    /// Writes the description followed by the time, such as ` for 35 s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {} s", self.what(), self.waited.as_secs())
    }
}

#[derive(Debug)]
struct Call {
    subject: Subject,
    operation: String,
    since: Instant,
    late: bool,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    calls: BTreeMap<u64, Call>,
}

/// The calls that are under way. Clones share the same list.
#[derive(Debug, Clone, Default)]
pub struct Calls(Arc<Mutex<State>>);

impl Calls {
    /// Returns the calls that are late, the longest first.
    pub fn stuck(&self) -> Vec<Stuck> {
        let state = self.0.lock();
        let late = state.calls.values().filter(|call| call.late).map(|call| Stuck {
            gpu: call.subject.gpu.clone(),
            index: call.subject.index,
            operation: call.operation.clone(),
            waited: call.since.elapsed(),
        });
        late.collect()
    }

    /// Runs work on a thread of its own, if it concerns no GPU in particular and may never come back, such as
    /// loading the library. The result is passed to `done`, which is called on that thread.
    ///
    /// # Errors
    /// Fails if no thread can be started.
    pub fn detached<T: Send + 'static>(
        &self,
        operation: &Operation,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
        done: impl FnOnce(T) + Send + 'static,
    ) -> std::io::Result<()> {
        let (id, calls) = (self.begin(Subject::default(), operation), self.clone());
        let watch = self.clone();
        std::thread::Builder::new().name("nvml-open".to_owned()).spawn(move || {
            let value = work();
            calls.end(id);
            done(value);
        })?;
        std::thread::Builder::new().name("nvml-open-late".to_owned()).spawn(move || {
            std::thread::sleep(limit);
            watch.mark_late(id);
        })?;
        Ok(())
    }

    pub(super) fn begin(&self, subject: Subject, operation: &Operation) -> u64 {
        let mut state = self.0.lock();
        state.last = state.last.saturating_add(1);
        let id = state.last;
        let call = Call { subject, operation: operation.to_string(), since: Instant::now(), late: false };
        state.calls.insert(id, call);
        id
    }

    /// Marks the call as late, if it is still under way.
    pub(super) fn mark_late(&self, id: u64) {
        if let Some(call) = self.0.lock().calls.get_mut(&id) {
            call.late = true;
        }
    }

    pub(super) fn end(&self, id: u64) {
        let ended = self.0.lock().calls.remove(&id);
        if let Some(call) = ended.filter(|call| call.late) {
            let took = call.since.elapsed();
            tracing::info!(gpu = ?call.subject.gpu, operation = call.operation, ?took, "a call came back late");
        }
    }
}
