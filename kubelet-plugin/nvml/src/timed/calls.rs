//! Calls into the driver that are under way, and which of them are late.

use crate::Operation;
use aliquot_model::GpuUuid;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whom a call is about: a GPU by identity and NVML index, as far as they are known, or the library as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) gpu: Option<GpuUuid>,
    pub(super) index: Option<u32>,
}

/// A call that has not come back in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    /// The GPU, if it has told who it is.
    pub gpu: Option<GpuUuid>,
    /// Its NVML index; absent with an absent GPU means the library as a whole.
    pub index: Option<u32>,
    /// What was asked.
    pub operation: String,
    /// How long ago.
    pub waited: Duration,
}

impl Stuck {
    /// The GPU's identity, or what is known instead.
    pub fn name(&self) -> String {
        match (&self.gpu, self.index) {
            (Some(gpu), _) => gpu.to_string(),
            (None, Some(index)) => format!("index-{index}"),
            (None, None) => "driver".to_owned(),
        }
    }
}

impl Stuck {
    /// What is stuck, at whatever time: `GPU GPU-… is stuck: the driver does not answer "read the facts"`.
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
    /// The same with ` for 35 s`.
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

/// Calls under way. Clones are the same list.
#[derive(Debug, Clone, Default)]
pub struct Calls(Arc<Mutex<State>>);

impl Calls {
    /// Calls that are late, the longest first.
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

    /// Runs something on a thread of its own that concerns no GPU in particular and may not come back, such as
    /// loading the library. What it comes to goes through `done`, which is called on that thread.
    ///
    /// # Errors
    /// If there is no thread to be had.
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

    /// The call is late, if it is still under way.
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
