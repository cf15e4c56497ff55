//! Remembers which errors of a GPU were reported, and when. The same error is reported again after a while,
//! and until then only counted in the metrics.

use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// The time until the same error of a GPU is reported again.
const AGAIN: Duration = Duration::from_secs(10);

/// The GPU and the fault.
type Error = (String, String);

/// The times at which errors were last reported.
#[derive(Debug, Default)]
pub(super) struct Told(BTreeMap<Error, Instant>);

impl Told {
    /// Returns true if an error is to be reported now, and notes that it is.
    pub(super) fn is_due(&mut self, error: Error, now: Instant) -> bool {
        self.0.retain(|_, at| now.saturating_duration_since(*at) < AGAIN);
        let due = !self.0.contains_key(&error);
        if due {
            self.0.insert(error, now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_told_again_after_a_while_and_another_at_once() {
        let mut told = Told::default();
        let now = Instant::now();
        let error = |gpu: &str, fault: &str| (gpu.to_owned(), fault.to_owned());
        assert!(told.is_due(error("GPU-1", "xid-31"), now));
        assert!(!told.is_due(error("GPU-1", "xid-31"), now + AGAIN / 2));
        assert!(told.is_due(error("GPU-1", "xid-79"), now + AGAIN / 2));
        assert!(told.is_due(error("GPU-2", "xid-31"), now + AGAIN / 2));
        assert!(told.is_due(error("GPU-1", "xid-31"), now + AGAIN));
        assert_eq!(told.0.len(), 3, "what is over is forgotten");
    }
}
