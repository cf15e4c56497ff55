//! Makes one call after the other, on one thread.

use super::calls::{Calls, Subject};
use crate::{Cause, GpuError, Operation};
use parking_lot::{Condvar, Mutex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce() + Send>;

/// A function that is called with the time that the driver took for each call that came back.
pub(super) type Observer = Arc<dyn Fn(&'static str, Duration) + Send + Sync>;

/// The call that the thread is making.
#[derive(Debug, Clone)]
struct Running {
    id: u64,
    operation: String,
    since: Instant,
    stuck: bool,
}

#[derive(Default)]
struct State {
    subject: Subject,
    thread: Option<Sender<Job>>,
    running: Option<Running>,
}

/// The calls on one GPU, or those that concern no GPU in particular.
pub(super) struct Lane {
    shared: Arc<(Mutex<State>, Condvar)>,
    calls: Calls,
    observer: Observer,
}

impl Lane {
    pub(super) fn new(subject: Subject, calls: Calls, observer: Observer) -> Self {
        let state = State { subject, ..State::default() };
        Self { shared: Arc::new((Mutex::new(state), Condvar::new())), calls, observer }
    }

    /// Updates the lane's subject, when more is known of it.
    pub(super) fn set_subject(&self, subject: Subject) {
        self.shared.0.lock().subject = subject;
    }

    pub(super) fn subject(&self) -> Subject {
        self.shared.0.lock().subject.clone()
    }

    /// Makes a call and waits for its answer, in turn with others, for `limit` at most.
    ///
    /// # Errors
    /// Fails with [`Cause::Stuck`] if the call did not begin or did not end in time, or if an earlier call is
    /// stuck. A call that did not begin never runs.
    pub(super) fn call<T: Send + 'static>(
        &self,
        operation: &Operation,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GpuError> {
        let deadline = Instant::now() + limit;
        let (lock, free) = &*self.shared;
        let mut state = lock.lock();
        while let Some(running) = &state.running {
            if running.stuck {
                return Err(refused(&state.subject, operation, running));
            }
            if free.wait_until(&mut state, deadline).timed_out()
                && let Some(running) = &state.running
            {
                return Err(refused(&state.subject, operation, running));
            }
        }
        let (answer, answered) = mpsc::sync_channel(1);
        let id = self.calls.begin(state.subject.clone(), operation);
        let job: Job = {
            let (shared, calls) = (Arc::clone(&self.shared), self.calls.clone());
            let (observer, name) = (Arc::clone(&self.observer), operation.name());
            Box::new(move || {
                let began = Instant::now();
                let value = catch_unwind(AssertUnwindSafe(work)).ok();
                observer(name, began.elapsed());
                calls.end(id);
                shared.0.lock().running = None;
                shared.1.notify_all();
                // Nobody may be waiting any more.
                let _ = answer.send(value);
            })
        };
        if let Err(error) = start(&mut state, job) {
            self.calls.end(id);
            let cause = Cause::Unexpected(format!("there is no thread for it: {error}"));
            return Err(error_of(&state.subject, operation, cause));
        }
        let since = Instant::now();
        state.running = Some(Running { id, operation: operation.to_string(), since, stuck: false });
        drop(state);
        let value = match answered.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {
                let mut state = lock.lock();
                match &mut state.running {
                    Some(running) if running.id == id => {
                        running.stuck = true;
                        self.calls.mark_late(id);
                        free.notify_all();
                        let cause = Cause::Stuck(format!("the driver has not answered within {limit:?}"));
                        return Err(error_of(&state.subject, operation, cause));
                    }
                    // The call came back just now.
                    _ => {
                        drop(state);
                        answered.recv().ok().flatten()
                    }
                }
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Ok(value) => value,
        };
        value.ok_or_else(|| {
            let cause = Cause::Unexpected("the call ended abnormally".to_owned());
            error_of(&self.subject(), operation, cause)
        })
    }
}

/// Gives the thread a job; starts the thread if there is none.
fn start(state: &mut State, job: Job) -> std::io::Result<()> {
    let job = match &state.thread {
        Some(thread) => match thread.send(job) {
            Ok(()) => return Ok(()),
            Err(mpsc::SendError(job)) => job,
        },
        None => job,
    };
    let (sender, jobs) = mpsc::channel::<Job>();
    let name = match state.subject.index {
        Some(index) => format!("nvml-{index}"),
        None => "nvml".to_owned(),
    };
    // The thread is never joined: the process may end while the driver keeps the thread.
    std::thread::Builder::new().name(name).spawn(move || jobs.into_iter().for_each(|job| job()))?;
    // The thread has just begun to listen.
    let _ = sender.send(job);
    state.thread = Some(sender);
    Ok(())
}

fn refused(subject: &Subject, operation: &Operation, running: &Running) -> GpuError {
    let waited = running.since.elapsed().as_secs();
    let cause = Cause::Stuck(format!("the driver has not answered \"{}\" for {waited} s", running.operation));
    error_of(subject, operation, cause)
}

fn error_of(subject: &Subject, operation: &Operation, cause: Cause) -> GpuError {
    match (&subject.gpu, subject.index) {
        (Some(gpu), _) => GpuError::on(gpu, operation.clone(), cause),
        (None, Some(index)) => GpuError::on_index(index, operation.clone(), cause),
        (None, None) => GpuError::of_library(operation.clone(), cause),
    }
}
