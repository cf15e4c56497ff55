//! Keeps numbered records of claims that released their hardware, until the controller has acknowledged their
//! numbers. Pure, except for the ledger's name.

use aliquot_model::charge::{HeldClaim, Release};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use uuid::Uuid;

/// The largest number of records that are listed in the API at a time; the others follow when these are
/// acknowledged.
const MOST_LISTED: usize = 500;
/// The largest number of records that are kept while no controller acknowledges them.
const MOST_KEPT: usize = 10_000;

/// The records that are not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Releases {
    /// The ledger's name, so that numbers of a lost ledger mean nothing.
    #[serde(default)]
    ledger: String,
    /// The number of the last record.
    #[serde(default)]
    last: u64,
    /// The records, ascending by number.
    #[serde(default)]
    list: Vec<Release>,
    /// Fields that a newer release wrote beside them.
    #[serde(flatten)]
    extra: BTreeMap<String, Value>,
}

impl Releases {
    /// Returns true if nothing was ever recorded.
    pub fn is_unused(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns true if there are no records.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the ledger's name; empty until [`Self::prepare`] gives it one.
    pub(crate) fn ledger(&self) -> &str {
        &self.ledger
    }

    /// Returns the records to list in the API now.
    pub(crate) fn listed(&self) -> Vec<Release> {
        self.list.iter().take(MOST_LISTED).cloned().collect()
    }

    /// Records that a claim released its hardware at a Unix time in seconds.
    pub(super) fn push(&mut self, claim: HeldClaim, until: i64) {
        self.last = self.last.saturating_add(1);
        self.list.push(Release { number: self.last, claim, until });
        let surplus = self.list.len().saturating_sub(MOST_KEPT);
        if surplus > 0 {
            tracing::error!(surplus, "nobody acknowledges releases: the oldest are dropped and not charged");
            self.list.drain(..surplus);
        }
    }

    /// Merges what was recorded while this could not be read. A record that is acknowledged already may be
    /// reported again, which charges nothing twice.
    pub(super) fn take_in(&mut self, meanwhile: Self) {
        let same = meanwhile.ledger == self.ledger;
        if self.is_unused() || (same && meanwhile.last >= self.last) {
            *self = meanwhile;
        } else if !same {
            meanwhile.list.into_iter().for_each(|release| self.push(release.claim, release.until));
        }
    }

    /// Gives the ledger a name and forgets the records up to the number that is acknowledged of a ledger of this name.
    /// Returns true if anything changed.
    pub(crate) fn prepare(&mut self, acknowledged: impl FnOnce(&str) -> u64) -> bool {
        let before = (self.ledger.is_empty(), self.list.len());
        if self.ledger.is_empty() {
            self.ledger = Uuid::new_v4().to_string();
        }
        let number = acknowledged(&self.ledger);
        self.list.retain(|release| release.number > number);
        before != (false, self.list.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_model::MicroGpus;

    fn held(uid: &str) -> HeldClaim {
        HeldClaim {
            namespace: "ns".into(),
            name: "c".into(),
            uid: uid.into(),
            micro_gpus: MicroGpus::WHOLE,
            asked_micro_gpus: None,
            since: 5,
        }
    }

    fn numbers(releases: &Releases) -> Vec<u64> {
        releases.list.iter().map(|release| release.number).collect()
    }

    #[test]
    fn records_are_numbered_without_gaps_and_go_when_they_are_acknowledged() {
        let mut releases = Releases::default();
        for uid in ["a", "b", "c"] {
            releases.push(held(uid), 20);
        }
        assert!(releases.prepare(|_| 0), "it got a name");
        assert!(!releases.prepare(|_| 0));
        assert!(releases.prepare(|_| 2));
        assert_eq!(numbers(&releases), [3]);
        releases.push(held("d"), 30);
        assert_eq!(numbers(&releases), [3, 4]);
        // An answer to another ledger means nothing here.
        let name = releases.ledger.clone();
        assert!(!releases.prepare(|ledger| if ledger == name { 0 } else { 9 }));
        assert_eq!(numbers(&releases), [3, 4]);
    }

    #[test]
    fn nobody_who_acknowledges_does_not_fill_the_disk() {
        let mut releases = Releases::default();
        for _ in 0..MOST_KEPT + 3 {
            releases.push(held("a"), 20);
        }
        assert_eq!((releases.len(), releases.list.first().map(|first| first.number)), (MOST_KEPT, Some(4)));
    }
}
