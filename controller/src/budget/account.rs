//! What one budget has been charged: a pure function of what was seen, and safe to repeat.
//!
//! A *use* is the time from a claim's allocation to its release. It is kept as an interval a claim, so
//! whatever is seen twice changes nothing. It goes on while the API shows the allocation or a node says
//! that the claim holds hardware, and ends with the later of
//! - the last moment at which the API showed the allocation, and
//! - the moment at which the node gave the devices back, from its numbered release; without one, the last
//!   moment at which a node said that they are held.
//!
//! So an outage of the controller costs nothing where a node had prepared the claim: the release says
//! when it ended. A claim that no node ever prepared and that vanished during an outage is charged up to
//! the last moment that was written down, see [`super::book::HEARTBEAT`].
//!
//! A use is moved into the [`Profile`] when its release was counted and the node lists it no more; a use
//! without a release stays by itself until the window has left it behind, so that a release that comes
//! very late still finds what was charged already.

use super::profile::{Profile, Spent};
use aliquot_model::usage::{HeldClaim, MicroGpus, Release};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The API shows an allocation for so long after the node's release, at most, when all is well: the
/// kubelet has to say that the pod ended, and kube-controller-manager to act on it.
const LINGER: i64 = 60;
/// Ended uses without a release that are kept by themselves, at most.
const MOST_OPEN_ENDED: usize = 2000;

/// A claim that the API shows as allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// Identity.
    pub uid: Arc<str>,
    /// Name.
    pub name: Arc<str>,
    /// When it was allocated, if anything says so.
    pub since: Option<i64>,
    /// Its part of GPUs, if its devices are published.
    pub part: Option<MicroGpus>,
}

/// What is seen of one namespace at one moment. Complete: what is not in it is not there.
#[derive(Debug, Clone, Default)]
pub struct Observed<'a> {
    /// Allocated claims.
    pub claims: &'a [AllocatedClaim],
    /// What nodes hold.
    pub held: &'a [&'a HeldClaim],
    /// What nodes released and nobody acknowledged.
    pub released: &'a [&'a Release],
    /// UIDs of claims of which a release is listed, acknowledged or not.
    pub listed: Option<&'a HashSet<&'a str>>,
}

/// One use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Use {
    uid: String,
    claim: String,
    since: i64,
    /// Last second at which the API showed it.
    claimed: i64,
    /// Last second at which a node said that it is held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    held: Option<i64>,
    /// When a node released it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    released: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    micro_gpus: Option<MicroGpus>,
    open: bool,
}

impl Use {
    fn end(&self) -> i64 {
        self.released.or(self.held).map_or(self.claimed, |told| told.max(self.claimed)).max(self.since)
    }

    /// Whether its node said for good when it ended.
    fn is_settled(&self) -> bool {
        !self.open && self.released.is_some_and(|released| released >= self.claimed.saturating_sub(LINGER))
    }
}

/// What is kept for a budget.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Account {
    begun: i64,
    seen: i64,
    uses: Vec<Use>,
    history: Profile,
}

/// An account as it is stored in the budget's status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stored {
    begun: i64,
    seen: i64,
    #[serde(default)]
    uses: Vec<Use>,
    #[serde(default)]
    history: String,
}

impl Account {
    /// A new account: what ended before is not counted, what runs is counted from its allocation.
    pub fn new(now: i64) -> Self {
        Self { begun: now, seen: now, ..Self::default() }
    }

    /// As it was stored; `None` if that cannot be read.
    pub fn restore(stored: &Stored) -> Option<Self> {
        let history = stored.history.parse().ok()?;
        let mut uses = stored.uses.clone();
        uses.sort_by(|a, b| (&a.uid, a.since).cmp(&(&b.uid, b.since)));
        Some(Self { begun: stored.begun, seen: stored.seen, uses, history })
    }

    /// To be stored.
    pub fn store(&self) -> Stored {
        Stored {
            begun: self.begun,
            seen: self.seen,
            uses: self.uses.clone(),
            history: self.history.to_string(),
        }
    }

    /// The last second that is counted.
    pub const fn seen(&self) -> i64 {
        self.seen
    }

    /// How many claims are charged now, and their parts together.
    pub fn running(&self) -> (usize, MicroGpus) {
        let open = self.uses.iter().filter(|u| u.open);
        open.fold((0, MicroGpus(0)), |(count, sum), u| {
            (count + 1, sum.plus(u.micro_gpus.unwrap_or_default()))
        })
    }

    /// Everything that is charged, up to what was seen last.
    pub fn profile(&self) -> Profile {
        let mut profile = self.history.clone();
        for (since, until, part) in self.intervals() {
            profile.add(since, until, part);
        }
        profile
    }

    /// What was charged between two seconds.
    pub fn spent(&self, since: i64, until: i64) -> Spent {
        let running: Spent = self
            .intervals()
            .map(|(from, to, part)| {
                Spent::from(part.0) * Spent::from(to.min(until).saturating_sub(from.max(since)).max(0))
            })
            .sum();
        self.history.spent(since, until).saturating_add(running)
    }

    /// The uses as intervals; of one claim they never overlap.
    fn intervals(&self) -> impl Iterator<Item = (i64, i64, MicroGpus)> {
        let mut last: Option<(&str, i64)> = None;
        self.uses.iter().map(move |u| {
            let taken = last.filter(|(uid, _)| *uid == &*u.uid).map_or(i64::MIN, |(_, end)| end);
            let since = u.since.max(taken);
            let end = u.end().max(since);
            last = Some((&u.uid, end));
            (since, end, u.micro_gpus.unwrap_or_default())
        })
    }

    /// Takes in what there is now; `keep` is the first second that is still of interest. Returns whether
    /// there is something new to store besides the time.
    pub fn observe(&mut self, observed: &Observed<'_>, keep: i64, now: i64) -> bool {
        // A clock that was set back must not undo anything.
        let now = now.max(self.seen);
        self.seen = now;
        let mut changed = false;
        let mut present: HashSet<&str> = HashSet::new();
        for claim in observed.claims {
            present.insert(&claim.uid);
            // A time that is still to come says nothing.
            let since = claim.since.filter(|since| *since <= now);
            let at = self.open(&claim.uid, &claim.name, since, claim.part, now, &mut changed);
            if let Some(found) = self.uses.get_mut(at) {
                found.claimed = now;
            }
        }
        for held in observed.held {
            present.insert(&held.uid);
            let since = Some(held.since).filter(|since| *since <= now);
            // The API's word on the part comes first.
            let at = self.open(&held.uid, &held.name, since, None, now, &mut changed);
            if let Some(found) = self.uses.get_mut(at) {
                found.held = Some(now);
                if found.micro_gpus.is_none() {
                    found.micro_gpus = Some(held.micro_gpus);
                    changed = true;
                }
            }
        }
        for release in observed.released {
            changed |= self.release(release, now);
        }
        for u in self.uses.iter_mut().filter(|u| u.open && !present.contains(u.uid.as_str())) {
            u.open = false;
            changed = true;
        }
        changed |= self.settle(observed, keep);
        changed
    }

    /// The open use of a claim, a new one if there is none. Its position.
    fn open(
        &mut self,
        uid: &str,
        name: &str,
        since: Option<i64>,
        part: Option<MicroGpus>,
        now: i64,
        changed: &mut bool,
    ) -> usize {
        let mut start = since.unwrap_or(now);
        if let Some(at) = self.uses.iter().rposition(|u| u.uid == uid)
            && let Some(last) = self.uses.get_mut(at)
        {
            if last.open {
                // Taken back and given again between two looks?
                let other_part = part.is_some() && last.micro_gpus.is_some() && part != last.micro_gpus;
                let later = since.is_some_and(|since| since > last.end());
                if !other_part && !later {
                    if last.micro_gpus.is_none() && part.is_some() {
                        last.micro_gpus = part;
                        *changed = true;
                    }
                    return at;
                }
                last.open = false;
            }
            start = start.max(last.end());
        }
        *changed = true;
        self.insert(Use {
            uid: uid.to_owned(),
            claim: name.to_owned(),
            since: start,
            claimed: start,
            held: None,
            released: None,
            micro_gpus: part,
            open: true,
        })
    }

    fn insert(&mut self, new: Use) -> usize {
        let at = self.uses.partition_point(|u| (&u.uid, u.since) <= (&new.uid, new.since));
        self.uses.insert(at, new);
        at
    }

    /// Counts a release. Returns whether it says anything new.
    fn release(&mut self, release: &Release, now: i64) -> bool {
        let claim = &release.claim;
        // The node's clock may be ahead.
        let until = release.until.min(now);
        let own = |u: &Use| u.uid == claim.uid;
        let found = self.uses.iter().rposition(|u| own(u) && u.since <= claim.since);
        let found = found.or_else(|| self.uses.iter().position(|u| own(u) && u.since < until));
        let last = found.and_then(|at| self.uses.get_mut(at));
        if let Some(last) = last
            // What was allocated after a release is another use, whether or not the claim still counts as there.
            && ((last.open && last.released.is_none()) || claim.since <= last.end())
        {
            let mut changed = false;
            if last.released.is_none_or(|released| released < until) {
                last.released = Some(until);
                changed = true;
            }
            if last.micro_gpus.is_none() {
                last.micro_gpus = Some(claim.micro_gpus);
                changed = true;
            }
            return changed;
        }
        if until <= self.begun || until <= claim.since {
            return false;
        }
        // Between the uses before it and those after it: it may be told of when the next has begun.
        let (before, after): (Vec<&Use>, Vec<&Use>) =
            self.uses.iter().filter(|u| own(u)).partition(|u| u.since <= claim.since);
        let since = before.iter().map(|u| u.end()).max().map_or(claim.since, |end| claim.since.max(end));
        let until = after.iter().map(|u| u.since).min().map_or(until, |next| until.min(next));
        self.insert(Use {
            uid: claim.uid.clone(),
            claim: claim.name.clone(),
            since,
            claimed: since,
            held: None,
            released: Some(until.max(since)),
            micro_gpus: Some(claim.micro_gpus),
            open: false,
        });
        true
    }

    /// Moves what is settled into the profile and drops what is of no interest any more.
    fn settle(&mut self, observed: &Observed<'_>, keep: i64) -> bool {
        let ends: Vec<(i64, i64, MicroGpus)> = self.intervals().collect();
        let surplus = {
            let loose = |u: &&Use| !u.open && !u.is_settled();
            self.uses.iter().filter(loose).count().saturating_sub(MOST_OPEN_ENDED)
        };
        let mut surplus = surplus;
        let mut taken: HashMap<String, i64> = HashMap::new();
        let mut kept = Vec::with_capacity(self.uses.len());
        let mut changed = false;
        for (u, (since, end, part)) in std::mem::take(&mut self.uses).into_iter().zip(ends) {
            let listed = observed.listed.is_some_and(|listed| listed.contains(u.uid.as_str()));
            let mut settled = u.is_settled();
            if !u.open && !settled && surplus > 0 {
                surplus = surplus.saturating_sub(1);
                settled = true;
            }
            if !u.open && !listed && (settled || end <= keep) {
                self.history.add(since, end, part);
                taken.insert(u.uid, end);
                changed = true;
                continue;
            }
            let mut u = u;
            if let Some(end) = taken.get(&u.uid) {
                u.since = u.since.max(*end);
            }
            kept.push(u);
        }
        self.uses = kept;
        self.history.forget_before(keep);
        changed | self.history.coarsen()
    }
}

#[cfg(test)]
#[path = "account/tests.rs"]
mod tests;
