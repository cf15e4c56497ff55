//! What users are told, and how often.

pub mod reasons;

use super::{Core, Effect};
use crate::index::{Claim, ObjectKey, Pod, Uid};
use aliquot_model::event::{self, About};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The object that an event is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Regarding {
    /// A pod.
    Pod(ObjectKey, Uid),
    /// A claim.
    Claim(ObjectKey, Uid),
    /// A node.
    Node(Arc<str>),
    /// A budget.
    Budget(ObjectKey, Uid),
}

impl Regarding {
    /// The kind of object.
    pub const fn about(&self) -> About {
        match self {
            Self::Pod(..) => About::Pod,
            Self::Claim(..) => About::ResourceClaim,
            Self::Node(_) => About::Node,
            Self::Budget(..) => About::GpuBudget,
        }
    }

    /// The namespace of its events; those of nodes are kept in the namespace `default`.
    pub fn namespace(&self) -> Arc<str> {
        match self {
            Self::Pod(key, _) | Self::Claim(key, _) | Self::Budget(key, _) => key.namespace.clone(),
            Self::Node(_) => "default".into(),
        }
    }
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// About what.
    pub regarding: Regarding,
    /// Whether something is wrong.
    pub warning: bool,
    /// One of [`reasons`].
    pub reason: &'static str,
    /// For people.
    pub note: String,
}

impl Report {
    /// Whether it is what the table of reasons, from which operators read, says of its reason.
    pub fn is_as_listed(&self) -> bool {
        let listed = event::is_as_listed(reasons::REASONS, self.reason, self.warning, self.regarding.about());
        listed == Some(true)
    }
}

/// What pods and claims were told last.
#[derive(Debug, Default)]
pub(super) struct Told {
    pods: HashMap<ObjectKey, (&'static str, Said)>,
    /// By reason, as one look at a claim can have several.
    claims: HashMap<Uid, HashMap<&'static str, Said>>,
}

/// Words, and when they were said.
#[derive(Debug)]
struct Said(String, Instant);

impl Said {
    /// Whether it is too soon for words with the same reason.
    fn stands(&self, note: &str, now: Instant) -> bool {
        let Self(words, at) = self;
        now.saturating_duration_since(*at) < if words == note { REPEAT } else { REFRESH }
    }
}

/// The same words are said again after this long.
const REPEAT: Duration = Duration::from_secs(300);
/// Other words with the same reason, after this long: on a busy cluster the counts in them change all
/// the time.
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

    /// The same for a claim. What was done is news, unless in the very same words, and so is all that follows.
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

impl Core {
    pub(super) fn tell(&mut self, report: Report) {
        debug_assert!(report.is_as_listed(), "{report:?}");
        self.effects.push(Effect::Tell(report));
    }

    /// A warning about a pod, unless it has just been given; whether it was news.
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

    /// Something about a claim, unless it has just been said.
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
