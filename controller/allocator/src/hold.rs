//! Claims that have devices without a pod: bound before their first pod (`aliquot.dev/binding: Immediate`),
//! or kept after their last pod (`aliquot.dev/reclaim: Retain`). The logic is pure: from what a claim wants,
//! what it has and the time, it computes one step.
//!
//! A claim that is kept carries a hold entry of the controller in `reservedFor`. kube-controller-manager
//! clears an allocation when it removes the last consumer, but it leaves alone consumers whose kind it does
//! not know, so the devices stay. The name of the entry says until when the devices are kept, because nothing
//! else in the claim is out of its owner's reach. So a hold always ends, even if the controller restarts.

pub mod retention;

use aliquot_model::duration::parse_duration;
pub use aliquot_model::hold::Hold;
use aliquot_model::names::{BINDING, HOLD_FOR, HOLD_GROUP, HOLD_PRIORITY, HOLD_RESOURCE, RECLAIM};
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use std::collections::BTreeMap;
use std::time::Duration;

/// What the annotations of a claim or a class ask for; `None` where they say nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wish {
    /// True if devices are given before the first pod.
    pub immediate: Option<bool>,
    /// True if devices are kept after the last pod.
    pub retain: Option<bool>,
    /// The time that devices are kept without a pod.
    pub hold_for: Option<Duration>,
    /// The priority of the claim while it has no pod; at most 0.
    pub priority: Option<i32>,
    /// The annotations that could not be understood, as messages for the user.
    pub mistakes: Vec<String>,
}

impl Wish {
    /// Reads the annotations of a claim or a class.
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

    /// Returns true if the annotations say nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The limits that the administrator sets for holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The time that devices are kept if the claim does not say.
    pub usual: Duration,
    /// The longest time that devices are kept; zero forbids holds.
    pub most: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { usual: Duration::from_secs(3600), most: Duration::from_secs(24 * 3600) }
    }
}

/// The policy that applies to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// True if the claim gets devices before its first pod.
    pub immediate: bool,
    /// True if the claim keeps devices after its last pod.
    pub retain: bool,
    /// The number of seconds that devices are kept without a pod.
    pub seconds: i64,
    /// The priority of the claim while it has no pod.
    pub priority: i32,
}

impl Policy {
    /// Returns the policy of a claim. The claim's own wish comes first, then those of its classes, in the
    /// order of its requests.
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

/// Returns the hold entry as it is written into the claim with this UID.
pub fn consumer(hold: Hold, claim_uid: &str) -> ResourceClaimConsumerReference {
    ResourceClaimConsumerReference {
        api_group: Some(HOLD_GROUP.to_owned()),
        resource: HOLD_RESOURCE.to_owned(),
        name: hold.name(),
        uid: claim_uid.to_owned(),
    }
}

/// Reads a consumer of a claim as a hold entry; `None` if it is not one.
pub fn read(consumer: &ResourceClaimConsumerReference) -> Option<Hold> {
    Hold::read(consumer.api_group.as_deref(), &consumer.resource, &consumer.name)
}

/// Returns true if a consumer of a claim is a pod.
pub fn is_pod(consumer: &ResourceClaimConsumerReference) -> bool {
    consumer.resource == "pods" && consumer.api_group.as_deref().is_none_or(str::is_empty)
}

/// Returns true if a consumer of a claim is a hold entry of the controller.
pub fn is_hold(consumer: &ResourceClaimConsumerReference) -> bool {
    read(consumer).is_some()
}

/// The facts about a claim that matter for holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// When the claim was created, in seconds of Unix time.
    pub created: i64,
    /// True if the claim is being deleted.
    pub deleting: bool,
    /// True if the claim was generated for one pod and is deleted with that pod.
    pub generated: bool,
    /// Set if the claim has devices; says whether the controller allocated them.
    pub allocated: Option<ByUs>,
    /// The hold entry of the controller in the claim.
    pub hold: Option<Hold>,
    /// The number of pods and other consumers that use the claim.
    pub consumers: usize,
    /// The number of consumers that are gone or have ended. Kubernetes up to 1.34 leaves them in
    /// `reservedFor` while the list has an entry that it does not know, such as a hold.
    pub gone: usize,
    /// True if some consumers are gone and all of those were evicted: another pod needs the room, so nothing
    /// is kept.
    pub evicted: bool,
}

/// True if the controller made the allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByUs(pub bool);

/// The reason why a hold ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The time of the hold is over.
    Expired,
    /// The claim does not ask for the hold, or no longer does.
    Withdrawn,
    /// The claim is being deleted.
    Deleted,
}

/// The next action of the controller for a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Do nothing; with a value, until that second of Unix time.
    Wait(Option<i64>),
    /// Allocate devices, and keep them until that second of Unix time.
    Bind(i64),
    /// Write this hold entry.
    Set(Hold),
    /// Remove the hold entry; others use the claim.
    Unset,
    /// Take the devices back: only the controller's entry holds them.
    Release(Ended),
}

/// Returns the next step for a claim; `now` is in seconds of Unix time.
pub fn step(policy: Policy, facts: Facts, now: i64) -> Step {
    let wanted = (policy.immediate || policy.retain) && !facts.generated;
    let end = |reason| match (facts.hold, facts.consumers) {
        (None, _) => Step::Wait(None),
        (Some(_), 0) => Step::Release(reason),
        (Some(_), _) => Step::Unset,
    };
    if facts.deleting {
        return end(Ended::Deleted);
    }
    if !wanted {
        return end(Ended::Withdrawn);
    }
    let unused_until = facts.created.saturating_add(policy.seconds);
    let bound_early = policy.immediate && now < unused_until;
    match facts.allocated {
        None if facts.hold.is_some() => Step::Unset,
        None if bound_early => Step::Bind(unused_until),
        None => Step::Wait(None),
        // The scheduler that gave the devices also takes care of them.
        Some(ByUs(false)) => end(Ended::Withdrawn),
        Some(ByUs(true)) if facts.evicted => match facts.hold {
            Some(_) => Step::Unset,
            None => Step::Wait(None),
        },
        Some(ByUs(true)) if facts.consumers > facts.gone => match facts.hold {
            Some(Hold::InUse) => Step::Wait(None),
            _ if policy.retain || bound_early => Step::Set(Hold::InUse),
            Some(Hold::Until(_)) => Step::Unset,
            None => Step::Wait(None),
        },
        Some(ByUs(true)) => match without_pods(policy, facts.hold, unused_until, now) {
            // Kubernetes takes the devices back once it can remove the pods.
            Step::Release(_) if facts.consumers > 0 => Step::Unset,
            // The same entry is written again, so that the pods are removed.
            Step::Wait(Some(_)) if facts.consumers > 0 => facts.hold.map_or(Step::Wait(None), Step::Set),
            step => step,
        },
    }
}

/// Returns the step for an allocation of the controller that no pod uses.
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
        // A claim without a hold is taken back like any other claim.
        None if until <= now => Step::Wait(None),
        Some(Hold::Until(second)) if second == until => Step::Wait(Some(until)),
        _ => Step::Set(Hold::Until(until)),
    }
}

#[cfg(test)]
mod tests;
