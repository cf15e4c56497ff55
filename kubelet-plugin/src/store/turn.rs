//! Orders the operations of this process. The node's lock works between processes and can only be polled;
//! within one process, each operation is woken when the one before it is done.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

/// The state of the turn: whether it is taken, and the operations that wait for it.
#[derive(Debug, Default)]
pub(super) struct Turns {
    taken: Mutex<bool>,
    free: Condvar,
}

/// The turn; the next operation gets it when this is dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Turns>);

impl Turns {
    /// Takes the turn. Blocks the thread until `until` at most, and returns `None` then.
    pub(super) fn take(self: &Arc<Self>, until: Instant) -> Option<Turn> {
        let mut taken = self.taken.lock();
        while *taken {
            if self.free.wait_until(&mut taken, until).timed_out() && *taken {
                return None;
            }
        }
        *taken = true;
        Some(Turn(Arc::clone(self)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.taken.lock() = false;
        self.0.free.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_who_waits_has_it_once_alone_and_whoever_waits_too_long_goes_without() {
        let turns: Arc<Turns> = Arc::default();
        let first = turns.take(Instant::now()).unwrap();
        assert!(turns.take(Instant::now()).is_none());
        let inside = Mutex::new(0);
        let forever = Instant::now() + std::time::Duration::from_secs(600);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let _turn = turns.take(forever).unwrap();
                    *inside.try_lock().unwrap() += 1;
                });
            }
            drop(first);
        });
        assert_eq!(inside.into_inner(), 8);
        assert!(turns.take(Instant::now()).is_some());
    }
}
