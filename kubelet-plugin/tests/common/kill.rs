//! Kills, as far as a test can do them: a panic at a chosen point.

use aliquot_kubelet_plugin::execute::Probe;
use aliquot_nvml::fake::Killed;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Panics at the n-th point it passes, as a kill would end the process there.
pub fn killer(at: usize) -> (Probe, Arc<AtomicUsize>) {
    let passed = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&passed);
    let probe = Probe::new(move |_| {
        if counter.fetch_add(1, Ordering::SeqCst) + 1 == at {
            std::panic::panic_any(Killed);
        }
    });
    (probe, passed)
}
