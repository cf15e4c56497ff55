//! Claims that have devices without a pod: bound before their first pod (`aliquot.dev/binding:
//! Immediate`), or kept after their last (`aliquot.dev/reclaim: Retain`). Pure: what a claim wants,
//! what it has, the time in; one step out.
//!
//! A claim that is kept carries an entry of ours in `reservedFor`. kube-controller-manager clears an
//! allocation when it removes the last consumer, and leaves consumers alone whose kind it does not
//! know, so the devices stay. The name of the entry says until when, as nothing else in the claim is
//! out of its owner's reach: a hold always ends, also over restarts of ours.

pub mod heir;

use crate::args::parse_duration;
pub use aliquot_model::hold::Hold;
use aliquot_model::names::{BINDING, HOLD_FOR, HOLD_GROUP, HOLD_PRIORITY, HOLD_RESOURCE, RECLAIM};
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use std::collections::BTreeMap;
use std::time::Duration;

/// What annotations of a claim or a class say; nothing where they say nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wish {
    /// Whether devices are given before the first pod.
    pub immediate: Option<bool>,
    /// Whether devices are kept after the last pod.
    pub retain: Option<bool>,
    /// For how long.
    pub hold_for: Option<Duration>,
    /// Where it stands meanwhile; at most 0.
    pub priority: Option<i32>,
    /// What could not be understood, in words.
    pub mistakes: Vec<String>,
}

impl Wish {
    /// From annotations.
    pub fn read(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let mut wish = Self::default();
        let text = |name: &str| annotations.and_then(|all| all.get(name)).map(String::as_str);
        match text(BINDING) {
            None => {}
            Some("Immediate") => wish.immediate = Some(true),
            Some("WaitForFirstConsumer") => wish.immediate = Some(false),
            Some(other) => wish.mistakes.push(format!(
                "annotation {BINDING} is {other:?}; it can be Immediate or WaitForFirstConsumer"
            )),
        }
        match text(RECLAIM) {
            None => {}
            Some("Retain") => wish.retain = Some(true),
            Some("Delete") => wish.retain = Some(false),
            Some(other) => {
                wish.mistakes.push(format!("annotation {RECLAIM} is {other:?}; it can be Delete or Retain"));
            }
        }
        match text(HOLD_FOR).map(parse_duration) {
            None => {}
            Some(Ok(duration)) => wish.hold_for = Some(duration),
            Some(Err(reason)) => wish.mistakes.push(format!("annotation {HOLD_FOR}: {reason}")),
        }
        match text(HOLD_PRIORITY).map(|text| (text, text.parse::<i32>())) {
            None => {}
            Some((_, Ok(priority))) if priority <= 0 => wish.priority = Some(priority),
            Some((text, _)) => wish.mistakes.push(format!(
                "annotation {HOLD_PRIORITY} is {text:?}; it must be a number of at most 0, where pods without a \
                 priority class stand"
            )),
        }
        wish
    }

    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What the administrator allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long, unless a claim says.
    pub usual: Duration,
    /// How long at most; zero: not at all.
    pub most: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { usual: Duration::from_secs(3600), most: Duration::from_secs(24 * 3600) }
    }
}

/// What holds for a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Devices before the first pod.
    pub immediate: bool,
    /// Devices after the last pod.
    pub retain: bool,
    /// For so many seconds without a pod.
    pub seconds: i64,
    /// Where it stands without a pod.
    pub priority: i32,
}

impl Policy {
    /// The claim's own word counts, then that of its classes in the order of its requests.
    pub fn of<'a>(limits: Limits, wishes: impl Iterator<Item = &'a Wish> + Clone) -> Self {
        let allowed = !limits.most.is_zero();
        let immediate = wishes.clone().find_map(|wish| wish.immediate).unwrap_or(false);
        let retain = wishes.clone().find_map(|wish| wish.retain).unwrap_or(false);
        let asked = wishes.clone().find_map(|wish| wish.hold_for).unwrap_or(limits.usual);
        let seconds = i64::try_from(asked.min(limits.most).as_secs()).unwrap_or(i64::MAX);
        let priority = wishes.clone().find_map(|wish| wish.priority).unwrap_or(0);
        Self { immediate: immediate && allowed, retain: retain && allowed, seconds, priority }
    }
}

/// Our entry as it stands in the claim of that uid.
pub fn consumer(hold: Hold, claim_uid: &str) -> ResourceClaimConsumerReference {
    ResourceClaimConsumerReference {
        api_group: Some(HOLD_GROUP.to_owned()),
        resource: HOLD_RESOURCE.to_owned(),
        name: hold.name(),
        uid: claim_uid.to_owned(),
    }
}

/// Reads a consumer of a claim, if it is an entry of ours.
pub fn read(consumer: &ResourceClaimConsumerReference) -> Option<Hold> {
    Hold::read(consumer.api_group.as_deref(), &consumer.resource, &consumer.name)
}

/// Whether a consumer of a claim is a pod.
pub fn is_pod(consumer: &ResourceClaimConsumerReference) -> bool {
    consumer.resource == "pods" && consumer.api_group.as_deref().is_none_or(str::is_empty)
}

/// Whether a consumer of a claim is an entry of ours.
pub fn is_hold(consumer: &ResourceClaimConsumerReference) -> bool {
    read(consumer).is_some()
}

/// A claim, as far as holding goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// When it was made, in seconds of Unix time.
    pub created: i64,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// Whether it was made for one pod, with which it dies.
    pub generated: bool,
    /// Whether it has devices, and whether we gave them.
    pub allocated: Option<ByUs>,
    /// Our entry.
    pub hold: Option<Hold>,
    /// Pods (and whoever else) that use it.
    pub consumers: usize,
    /// Those of them that are gone or have ended. Kubernetes up to 1.34 leaves them in `reservedFor` while
    /// there is an entry that it does not know, such as ours.
    pub gone: usize,
    /// Whether there are such and all of them were evicted: somebody else needs the room, so nothing is kept.
    pub evicted: bool,
}

/// Whether an allocation is ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByUs(pub bool);

/// Why a hold ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Its time is over.
    Expired,
    /// The claim does not ask for it (any more).
    Withdrawn,
    /// The claim is being deleted.
    Deleted,
}

/// What is to be done for a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing, until that second if there is one.
    Wait(Option<i64>),
    /// Give it devices, kept until that second.
    Bind(i64),
    /// Have this entry.
    Set(Hold),
    /// Have none; others use the claim.
    Unset,
    /// Take the devices back: nobody but us holds them.
    Release(Ended),
}

/// The next step for a claim.
pub fn step(policy: Policy, claim: Claim, now: i64) -> Step {
    let wanted = (policy.immediate || policy.retain) && !claim.generated;
    let end = |reason| match (claim.hold, claim.consumers) {
        (None, _) => Step::Wait(None),
        (Some(_), 0) => Step::Release(reason),
        (Some(_), _) => Step::Unset,
    };
    if claim.deleting {
        return end(Ended::Deleted);
    }
    if !wanted {
        return end(Ended::Withdrawn);
    }
    let unused_until = claim.created.saturating_add(policy.seconds);
    let bound_early = policy.immediate && now < unused_until;
    match claim.allocated {
        None if claim.hold.is_some() => Step::Unset,
        None if bound_early => Step::Bind(unused_until),
        None => Step::Wait(None),
        // Whoever gave the devices sees to them.
        Some(ByUs(false)) => end(Ended::Withdrawn),
        Some(ByUs(true)) if claim.evicted => match claim.hold {
            Some(_) => Step::Unset,
            None => Step::Wait(None),
        },
        Some(ByUs(true)) if claim.consumers > claim.gone => match claim.hold {
            Some(Hold::InUse) => Step::Wait(None),
            _ if policy.retain || bound_early => Step::Set(Hold::InUse),
            Some(Hold::Until(_)) => Step::Unset,
            None => Step::Wait(None),
        },
        Some(ByUs(true)) => match without_pods(policy, claim.hold, unused_until, now) {
            // Kubernetes takes the devices back once it can remove the pods.
            Step::Release(_) if claim.consumers > 0 => Step::Unset,
            // The same entry again, for the pods to be removed.
            Step::Wait(Some(_)) if claim.consumers > 0 => claim.hold.map_or(Step::Wait(None), Step::Set),
            step => step,
        },
    }
}

/// An allocation of ours that no pod uses.
fn without_pods(policy: Policy, hold: Option<Hold>, unused_until: i64, now: i64) -> Step {
    let since_last_pod = match hold {
        Some(Hold::Until(second)) => second.min(now.saturating_add(policy.seconds)),
        _ => now.saturating_add(policy.seconds),
    };
    let until = match (policy.retain, policy.immediate) {
        (true, true) => since_last_pod.max(unused_until),
        (true, false) => since_last_pod,
        _ => unused_until,
    };
    match hold {
        Some(_) if until <= now => Step::Release(Ended::Expired),
        // A claim that nobody keeps is taken back as any other.
        None if until <= now => Step::Wait(None),
        Some(Hold::Until(second)) if second == until => Step::Wait(Some(until)),
        _ => Step::Set(Hold::Until(until)),
    }
}

#[cfg(test)]
mod tests;
