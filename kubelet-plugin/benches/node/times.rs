//! Times that were measured, in milliseconds.

use std::time::Duration;

/// In order.
#[derive(Debug, Clone)]
pub(crate) struct Times(Vec<f64>);

impl Times {
    pub(crate) fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut times: Vec<f64> = times.into_iter().map(|time| time.as_secs_f64() * 1e3).collect();
        times.sort_by(f64::total_cmp);
        Self(times)
    }

    /// The one that so many percent do not exceed.
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        self.0[(self.0.len() * percent).div_ceil(100).saturating_sub(1)]
    }

    pub(crate) fn worst(&self) -> f64 {
        self.percentile(100)
    }
}
