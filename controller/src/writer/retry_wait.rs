//! Waits between two requests. A waiting job is counted in a metric, reported in an event, and ends with the
//! leadership. It occupies no turn.

use super::object_backoff::LONGEST;
use super::{WriteError, Writer};
use crate::lease::NotLeader;
use crate::report::{Regarding, Report, reasons};
use aliquot_allocator::snapshot::{ObjectKey, Uid};
use std::time::{Duration, Instant};

/// Waits shorter than this are not reported.
const QUIET: Duration = Duration::from_secs(1);
/// The time after which a wait is reported again.
const REPEAT: Duration = Duration::from_secs(300);
/// The first wait; each wait is twice as long as the one before, up to [`LONGEST`].
const FIRST: Duration = Duration::from_millis(10);
/// The metric's reason for an object whose jobs fail again and again.
const FAILING: &str = "repeated_error";

/// An allocation that waits until its result is certain.
pub(super) struct Parked<'w> {
    writer: &'w Writer,
    claim: &'w ObjectKey,
    uid: Uid,
    reason: &'static str,
    since: Instant,
    pause: Duration,
    told: Option<Instant>,
}

impl<'w> Parked<'w> {
    pub(super) fn new(writer: &'w Writer, claim: &'w ObjectKey, uid: &str, reason: &'static str) -> Self {
        writer.metrics.parked(reason).inc();
        let (since, pause) = (Instant::now(), FIRST);
        Self { writer, claim, uid: uid.into(), reason, since, pause, told: None }
    }

    /// Waits before the next look; `said` is the last answer of the API server. Returns an error if the
    /// leadership ends.
    pub(super) async fn wait(&mut self, said: &str) -> Result<(), NotLeader> {
        let now = Instant::now();
        let news = self.told.is_none_or(|told| now.saturating_duration_since(told) >= REPEAT);
        if news && now.saturating_duration_since(self.since) >= QUIET {
            self.told = Some(now);
            self.tell(said);
        }
        let pause = self.pause;
        self.pause = pause.saturating_mul(2).min(LONGEST);
        self.writer.rest(pause).await
    }

    fn tell(&self, said: &str) {
        tracing::warn!(claim = %self.claim, said, "it is not certain yet that an allocation is not written: its devices wait");
        let note = format!(
            "the API server did not say whether it carried out the allocation of claim {}, so the devices stay reserved \
             for it until the allocation is seen or the claim was changed; it is looked again every {} s at most. The \
             API server's last answer: {said}. If this goes on, look at the API server, at etcd and at the admission \
             webhooks for ResourceClaims; deleting the claim frees the devices at once",
            self.claim,
            LONGEST.as_secs(),
        );
        let regarding = Regarding::Claim(self.claim.clone(), self.uid.clone());
        if let Some(reporter) = &self.writer.reporter {
            reporter.tell(Report { regarding, warning: true, reason: reasons::WRITE_UNCERTAIN, note });
        }
    }
}

impl Drop for Parked<'_> {
    fn drop(&mut self) {
        self.writer.metrics.parked(self.reason).dec();
    }
}

impl Writer {
    /// Waits for `pause`. Returns an error if the leadership ends first.
    async fn rest(&self, pause: Duration) -> Result<(), NotLeader> {
        tokio::select! {
            () = self.ending.cancelled() => Err(NotLeader),
            () = tokio::time::sleep(pause) => Ok(()),
        }
    }

    /// Delays the outcome of an object's job if the job before failed too.
    pub(super) async fn slow_down(&self, uid: &Uid, error: Option<&WriteError>) {
        let Some(error) = error.filter(|error| error.is_of_the_object()) else {
            self.slow.lock().forget(uid);
            return;
        };
        let now = Instant::now();
        let until = {
            let mut slow = self.slow.lock();
            let first = !slow.is_known(uid);
            let until = slow.failed(uid, now);
            if first { now } else { until }
        };
        let pause = until.saturating_duration_since(now);
        if pause.is_zero() {
            return;
        }
        tracing::warn!(%error, ?pause, "a write fails again and again: its object waits");
        let _waits = Waits::new(self);
        // The outcome is reported in any case.
        let _ended = self.rest(pause).await;
    }
}

/// Counts a waiting object in the metric for as long as the guard lives.
struct Waits<'w>(&'w Writer);

impl<'w> Waits<'w> {
    fn new(writer: &'w Writer) -> Self {
        writer.metrics.parked(FAILING).inc();
        Self(writer)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.metrics.parked(FAILING).dec();
    }
}
