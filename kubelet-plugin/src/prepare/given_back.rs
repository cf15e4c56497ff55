//! Remembers claims that were unprepared while the checkpoint counts as lost.
//!
//! In this state the API is asked which claims pods run with. The API shows a pod for a while after the
//! kubelet had its claims unprepared, and its answer is used a while after the question. A claim that was
//! unprepared has no record any more, but must not be taken for one whose record was lost.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time for which the API may show a pod whose claims were unprepared. The kubelet unprepares them before
/// it reports that the pod has ended.
pub const SHOWN: Duration = Duration::from_secs(120);

/// The times at which claims were unprepared, by UID. Copies of a node share them.
#[derive(Debug, Clone, Default)]
pub struct GivenBack(Arc<Mutex<BTreeMap<String, Instant>>>);

impl GivenBack {
    /// Notes that a claim is unprepared now.
    pub(super) fn note(&self, uid: &str) {
        self.0.lock().insert(uid.to_owned(), Instant::now());
    }

    /// Forgets a claim that is prepared again.
    pub(super) fn forget(&self, uid: &str) {
        self.0.lock().remove(uid);
    }

    /// Returns true if the API's answer to a question at `asked` may show a claim that was unprepared.
    pub(super) fn may_be_shown(&self, uid: &str, asked: Instant) -> bool {
        self.0.lock().get(uid).is_some_and(|at| asked.saturating_duration_since(*at) < SHOWN)
    }

    /// Forgets claims that answers no longer show.
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
