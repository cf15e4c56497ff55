//! How often an event is sent.

use super::{Effect, Reconciler};
use crate::report::{Regarding, Report};
use aliquot_allocator::snapshot::{Claim, ObjectKey, Pod, Uid};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What pods and claims were told last.
#[derive(Debug, Default)]
pub(super) struct Told {
    pods: HashMap<ObjectKey, (&'static str, Said)>,
    /// By reason, because one look at a claim can have several.
    claims: HashMap<Uid, HashMap<&'static str, Said>>,
}

/// A text, and when it was sent.
#[derive(Debug)]
struct Said(String, Instant);

impl Said {
    /// Returns true if it is too early for this text with the same reason.
    fn stands(&self, note: &str, now: Instant) -> bool {
        let Self(words, at) = self;
        now.saturating_duration_since(*at) < if words == note { REPEAT } else { REFRESH }
    }
}

/// The time after which the same text is sent again.
const REPEAT: Duration = Duration::from_secs(300);
/// The time after which another text with the same reason is sent: on a busy cluster the counts in the text
/// change all the time.
const REFRESH: Duration = Duration::from_secs(15);

impl Told {
    pub(super) fn forget_pod(&mut self, pod: &ObjectKey) {
        self.pods.remove(pod);
    }

    fn is_news(&mut self, pod: &ObjectKey, reason: &'static str, note: &str, now: Instant) -> bool {
        if self.pods.get(pod).is_some_and(|(before, said)| *before == reason && said.stands(note, now)) {
            return false;
        }
        self.pods.insert(pod.clone(), (reason, Said(note.to_owned(), now)));
        true
    }

    pub(super) fn forget_claim(&mut self, claim: &str) {
        self.claims.remove(claim);
    }

    /// Returns true if an event is news for a claim. An event that is no warning is news unless the text is
    /// the same, and makes all later events news.
    fn is_news_of_claim(
        &mut self,
        claim: &Uid,
        (reason, warning): (&'static str, bool),
        note: &str,
        now: Instant,
    ) -> bool {
        let before = self.claims.entry(claim.clone()).or_default();
        if before.get(reason).is_some_and(|said| said.stands(note, now) && (warning || said.0 == note)) {
            return false;
        }
        if !warning {
            before.clear();
        }
        before.insert(reason, Said(note.to_owned(), now));
        true
    }
}

impl Reconciler {
    pub(super) fn tell(&mut self, report: Report) {
        debug_assert!(report.is_as_listed(), "{report:?}");
        self.effects.push(Effect::Tell(report));
    }

    /// Sends a warning about a pod, unless the same was sent lately; returns true if it was sent.
    pub(super) fn tell_pod(&mut self, pod: &Pod, reason: &'static str, note: &str, now: Instant) -> bool {
        let news = self.told.is_news(&pod.key, reason, note, now);
        if news {
            tracing::debug!(pod = %pod.key, reason, note, "told");
            self.tell(Report {
                regarding: Regarding::Pod(pod.key.clone(), pod.uid.clone()),
                warning: true,
                reason,
                note: note.to_owned(),
            });
        }
        news
    }

    /// Sends an event about a claim, unless the same was sent lately.
    pub(super) fn tell_claim(
        &mut self,
        claim: &Claim,
        warning: bool,
        reason: &'static str,
        note: &str,
        now: Instant,
    ) {
        if self.told.is_news_of_claim(&claim.uid, (reason, warning), note, now) {
            self.tell(Report {
                regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
                warning,
                reason,
                note: note.to_owned(),
            });
        }
    }
}
