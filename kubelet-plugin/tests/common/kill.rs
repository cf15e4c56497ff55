//! Kills, as far as a test can do them: a panic at a chosen point.

use aliquot_kubelet_plugin::execute::Probe;
use aliquot_nvml::fake::Killed;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};

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

/// Runs until killed; `None` when it was. Only simulated deaths are quiet.
pub fn until_killed<T>(work: impl FnOnce() -> T) -> Option<T> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !info.payload().is::<Killed>() {
                loud(info);
            }
        }));
    });
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => Some(value),
        Err(death) if death.is::<Killed>() => None,
        Err(other) => std::panic::resume_unwind(other),
    }
}
