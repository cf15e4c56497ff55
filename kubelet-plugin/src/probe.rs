//! Lets tests act between any two changes of the node.

use std::fmt;
use std::sync::Arc;

type Report = dyn Fn(&str) + Send + Sync;

/// A hook that is called between any two changes of the node; tests end the process here.
#[derive(Clone, Default)]
pub struct Probe(Option<Arc<Report>>);

impl Probe {
    /// Creates a probe that calls a function.
    pub fn new(probe: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(probe)))
    }

    /// Reports that a point was reached.
    pub fn at(&self, point: &str) {
        if let Some(probe) = &self.0 {
            probe(point);
        }
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Probe")
    }
}
