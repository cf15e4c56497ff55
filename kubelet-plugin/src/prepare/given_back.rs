//! Claims that were given back while the checkpoint counts as lost.
//!
//! The API is asked then which claims pods run with. It shows a pod for a while after the kubelet had its claims
//! unprepared, and what it answers is taken in a while after it was asked. A claim that was given back has no record any
//! more, and is none whose record was lost.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For how long the API may show a pod whose claims were given back. The kubelet unprepares them before it says that the
/// pod has ended.
pub const SHOWN: Duration = Duration::from_secs(120);

/// When claims were given back, by UID. Copies of a node have one.
#[derive(Debug, Clone, Default)]
pub struct GivenBack(Arc<Mutex<BTreeMap<String, Instant>>>);

impl GivenBack {
    /// Notes that a claim is given back now.
    pub(super) fn note(&self, uid: &str) {
        self.0.lock().insert(uid.to_owned(), Instant::now());
    }

    /// Forgets a claim that is prepared again.
    pub(super) fn forget(&self, uid: &str) {
        self.0.lock().remove(uid);
    }

    /// Whether an answer of the API that was asked then may show a claim that was given back.
    pub(super) fn may_be_shown(&self, uid: &str, asked: Instant) -> bool {
        self.0.lock().get(uid).is_some_and(|at| asked.saturating_duration_since(*at) < SHOWN)
    }

    /// Forgets what answers no longer show.
    pub(super) fn forget_old(&self, asked: Instant) {
        self.0.lock().retain(|_, at| asked.saturating_duration_since(*at) < SHOWN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_shows_what_was_given_back_before_and_after_it_was_asked_for_and_not_for_ever() {
        let given_back = GivenBack::default();
        let before = Instant::now();
        given_back.note("c-1");
        let after = Instant::now();
        for asked in [before, after] {
            assert!(given_back.may_be_shown("c-1", asked) && !given_back.may_be_shown("c-2", asked));
        }
        let later = after + SHOWN;
        assert!(!given_back.may_be_shown("c-1", later));
        given_back.forget_old(after);
        assert!(given_back.may_be_shown("c-1", after));
        given_back.forget_old(later);
        assert!(given_back.0.lock().is_empty());
        given_back.note("c-1");
        given_back.forget("c-1");
        assert!(!given_back.may_be_shown("c-1", after));
    }
}
