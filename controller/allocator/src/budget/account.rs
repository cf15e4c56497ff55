//! Computes what one budget has been charged. The result is a pure function of what was seen, and repeating
//! an observation is safe.
//!
//! Everything that is charged is in one [`Profile`] of bounded size. In addition, the account remembers for
//! each claim what it was charged for ([`uses`]). So an observation that is repeated changes nothing, and one
//! that comes late changes only what it reports. Only claims that have changed are looked at, so the cost of
//! a look depends on the changes since the previous one, not on the number of claims.
//!
//! What a node says about a claim counts only if the API showed the claim with devices of that node. So an
//! agent is believed only about its own claims, and for no larger part than the API allows.
//!
//! A claim is forgotten, and its charges stay, some time after its release was counted and the node no longer
//! lists it ([`LAG`]), or when it is older than the window. Of the other claims, at most [`MOST_CLAIMS`] uses
//! are kept individually where this has a cost: of those that ended and whose node never said when, and of
//! all of them in the stored form ([`stored`]). A use that is not kept individually is charged until the
//! account's *watermark*; anything that is reported about a claim that the account does not know counts from
//! there on. So nothing is charged twice, and no charge is taken back.

mod sight;
mod stored;
mod uses;

pub use sight::{Allocated, Released, Sight, Site, Taken};
pub use stored::MOST_BYTES;

use super::profile::{Profile, Spent, signed};
use aliquot_model::MicroGpus;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use uses::{Charge, Marks, Moment, Uses};

/// The most uses that are stored individually. The same number of uses that ended without a release are
/// remembered.
pub const MOST_CLAIMS: usize = 1000;

/// How far what the API or a node shows may lag behind what was seen before, in seconds, so that old
/// information is still told from new. Caches of API servers lag by seconds, or by a minute if one of them
/// was cut off.
pub const LAG: i64 = 300;
/// The most uses that ended within [`LAG`] and are remembered; those that ended last are kept.
pub const MOST_SETTLED: usize = 4096;
/// The most of these that are stored.
pub const MOST_STORED_SETTLED: usize = 300;

/// The claims that a look covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All claims that exist: any other claim is gone.
    All,
    /// The claims that have changed.
    Changed,
}

/// The account of a budget.
#[derive(Debug, Clone)]
pub struct Account {
    begun: i64,
    seen: i64,
    /// A use that began before this second and is not in `uses` is charged until it; the earliest second if
    /// all uses are kept.
    watermark: i64,
    uses: BTreeMap<Arc<str>, Uses>,
    charged: Profile,
    running: (usize, MicroGpus),
    /// Ends of uses whose node never said when they ended, with the UIDs of the claims.
    loose: BTreeSet<(i64, Arc<str>)>,
    /// Ends of uses that only a view that lags may still show, with the UIDs of the claims.
    settled: BTreeSet<(i64, Arc<str>)>,
    /// Claims that would lose most if they were not stored; see [`Marks`].
    delicate: BTreeSet<Arc<str>>,
    most: usize,
    visited: u64,
}

impl Account {
    /// Creates an account. What ended before `now` is not counted; what runs is counted from its allocation.
    pub fn new(now: i64) -> Self {
        Self {
            begun: now,
            seen: now,
            watermark: i64::MIN,
            uses: BTreeMap::new(),
            charged: Profile::default(),
            running: (0, MicroGpus(0)),
            loose: BTreeSet::new(),
            settled: BTreeSet::new(),
            delicate: BTreeSet::new(),
            most: MOST_CLAIMS,
            visited: 0,
        }
    }

    /// Returns the last second that is counted.
    pub const fn seen(&self) -> i64 {
        self.seen
    }

    /// Returns how many claims were looked at since the account was created or read, as a measure of cost.
    pub const fn visited(&self) -> u64 {
        self.visited
    }

    /// Returns how many claims are charged now, and the sum of their parts.
    pub const fn running(&self) -> (usize, MicroGpus) {
        self.running
    }

    /// Returns everything that is charged; a running claim has no end in it.
    pub const fn profile(&self) -> &Profile {
        &self.charged
    }

    /// Returns what was charged between two seconds, at most up to the last second that is counted.
    pub fn spent(&self, since: i64, until: i64) -> Spent {
        self.charged.spent(since, until.min(self.seen))
    }

    /// Takes in the current state of claims, each with everything that is seen of it. `keep` is the first
    /// second that is still of interest. Returns true if there is something new to store besides the time.
    pub fn observe(
        &mut self,
        sights: impl IntoIterator<Item = (Arc<str>, Sight)>,
        extent: Extent,
        keep: i64,
        now: i64,
    ) -> bool {
        // A clock that was set back must not undo charges.
        let now = now.max(self.seen);
        let at = Moment { before: self.seen, now, begun: self.begun, watermark: self.watermark };
        let mut changed = false;
        let mut present: HashSet<Arc<str>> = HashSet::new();
        for (uid, sight) in sights {
            changed |= self.look(&uid, &sight, at);
            if extent == Extent::All {
                present.insert(uid);
            }
        }
        if extent == Extent::All {
            let gone: Vec<Arc<str>> =
                self.uses.keys().filter(|uid| !present.contains(*uid)).cloned().collect();
            for uid in gone {
                changed |= self.look(&uid, &Sight::default(), at);
            }
        }
        self.seen = now;
        self.forget_loose(keep);
        self.forget_settled();
        self.charged.forget_before(keep);
        self.charged.coarsen(now);
        changed
    }

    /// Takes in everything that is seen of one claim.
    fn look(&mut self, uid: &Arc<str>, sight: &Sight, at: Moment) -> bool {
        self.change(uid, |uses| uses.look(sight, at), |_| ())
    }

    /// Changes what a claim is charged, then forgets uses of it; the charges of forgotten uses stay.
    fn change<T>(
        &mut self,
        uid: &Arc<str>,
        change: impl FnOnce(&mut Uses) -> T,
        forget: impl FnOnce(&mut Uses),
    ) -> T {
        self.visited = self.visited.saturating_add(1);
        let uses = self.uses.entry(uid.clone()).or_default();
        let (charges, marks) = (uses.charges(), uses.marks());
        let changed = change(uses);
        let charges_after = uses.charges();
        forget(uses);
        let marks_after = uses.marks();
        if uses.is_empty() {
            self.uses.remove(uid);
        }
        if charges != charges_after {
            self.charge(&charges, false);
            self.charge(&charges_after, true);
        }
        if marks != marks_after {
            self.mark(uid, &marks, &marks_after);
        }
        changed
    }

    /// Counts the charges of a claim in or out.
    fn charge(&mut self, charges: &[Charge], counts: bool) {
        for Charge { since, until, part } in charges {
            let part = signed(*part);
            self.charged.change_between(*since, *until, if counts { part } else { part.saturating_neg() });
        }
    }

    fn mark(&mut self, uid: &Arc<str>, before: &Marks, after: &Marks) {
        for end in &before.loose {
            self.loose.remove(&(*end, uid.clone()));
        }
        for end in &before.settled {
            self.settled.remove(&(*end, uid.clone()));
        }
        self.settled.extend(after.settled.iter().map(|end| (*end, uid.clone())));
        self.loose.extend(after.loose.iter().map(|end| (*end, uid.clone())));
        if after.delicate {
            self.delicate.insert(uid.clone());
        } else {
            self.delicate.remove(uid);
        }
        let (claims, part) = self.running;
        self.running = (
            claims.saturating_sub(before.running.0).saturating_add(after.running.0),
            MicroGpus(part.0.saturating_sub(before.running.1.0).saturating_add(after.running.1.0)),
        );
    }

    /// Forgets uses without a release that are older than the window, and the oldest if there are too many.
    fn forget_loose(&mut self, keep: i64) {
        let is_old = |(end, uid): &&(i64, Arc<str>)| {
            *end <= keep && self.uses.get(uid).is_some_and(|uses| !uses.is_listed())
        };
        let old: Vec<(i64, Arc<str>)> =
            self.loose.range(..(keep.saturating_add(1), Arc::default())).filter(is_old).cloned().collect();
        for (end, uid) in old {
            self.forget(&uid, end);
        }
        while self.loose.len() > self.most {
            let Some((end, uid)) = self.loose.first().cloned() else { break };
            self.forget(&uid, end);
            self.watermark = self.watermark.max(end);
        }
    }

    /// Forgets a use without a release; its charges stay.
    fn forget(&mut self, uid: &Arc<str>, end: i64) {
        self.loose.remove(&(end, uid.clone()));
        self.change(uid, |_| (), |uses| uses.forget(end));
    }

    /// Forgets settled uses that no view shows any more, and the oldest if there are too many.
    fn forget_settled(&mut self) {
        let last = self.seen.saturating_sub(LAG);
        while let Some((end, uid)) = self.settled.first().cloned()
            && (end <= last || self.settled.len() > MOST_SETTLED)
        {
            let now = self.seen;
            self.change(&uid, |uses| uses.believe(end, now), |uses| uses.forget_settled(end));
            // The use is over in any case, so its mark is removed.
            self.settled.remove(&(end, uid));
        }
    }
}

#[cfg(test)]
mod tests;
