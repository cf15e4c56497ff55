//! The clock that decides when a decision must end, and that measures what a decision cost.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A clock: that of the machine (`Clock::new(Instant::now)`), or another one.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Instant + Send + Sync>);

impl Clock {
    /// Returns a clock that shows the time that `now` returns.
    pub fn new(now: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Returns the current time.
    pub fn now(&self) -> Instant {
        (self.0)()
    }

    /// Returns the time since `began`; zero if `began` is in the future.
    pub fn since(&self, began: Instant) -> Duration {
        self.now().saturating_duration_since(began)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clock").finish_non_exhaustive()
    }
}

/// A moment on a clock at which work must end.
#[derive(Debug, Clone)]
pub struct Deadline {
    clock: Clock,
    until: Instant,
}

impl Deadline {
    /// Creates a deadline at `until`, by this clock.
    pub const fn new(clock: Clock, until: Instant) -> Self {
        Self { clock, until }
    }

    /// Returns true from the moment of the deadline on.
    pub fn is_over(&self) -> bool {
        self.clock.now() >= self.until
    }
}
