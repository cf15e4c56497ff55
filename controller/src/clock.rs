//! The clock by which decisions end, and by which it is told what they cost.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A clock: that of the machine, unless it is told another one.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Instant + Send + Sync>);

impl Clock {
    /// A clock that shows what this says.
    pub fn new(now: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// What time it is.
    pub fn now(&self) -> Instant {
        (self.0)()
    }

    /// How long ago that was.
    pub fn since(&self, began: Instant) -> Duration {
        self.now().saturating_duration_since(began)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new(Instant::now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clock").finish_non_exhaustive()
    }
}
