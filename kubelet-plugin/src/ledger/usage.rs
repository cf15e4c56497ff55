//! Tells the controller's budgets which claims hold hardware of this node, and which released it. Pure: it does
//! no I/O.
//!
//! A record of a release comes into the ledger with the same write that removes the claim from it, so a kill can
//! neither lose nor repeat it. It is removed when the controller has acknowledged its number.

use super::{Charge, Ledger, Record, State};
use aliquot_model::charge::HeldClaim;

fn held(record: &Record, charge: Charge) -> HeldClaim {
    HeldClaim {
        namespace: record.claim.namespace.clone(),
        name: record.claim.name.clone(),
        uid: record.claim.uid.clone(),
        micro_gpus: charge.micro_gpus,
        asked_micro_gpus: charge.asked,
        since: charge.since,
    }
}

impl Ledger {
    /// Records that a claim released its hardware, if the kubelet asked for it and the claim is charged.
    pub(super) fn count_release(&mut self, record: &Record) {
        let (Some(charge), Some(until)) = (record.charge, record.ended) else { return };
        self.releases.push(held(record, charge), until);
    }

    /// Returns the claims that hold hardware, as the controller is to know, ascending by UID.
    pub(crate) fn held_claims(&self) -> Vec<HeldClaim> {
        // A parked claim is charged by what the API says of it.
        let holds =
            |record: &&Record| record.confirmed && record.state != State::Unpreparing && !record.is_parked();
        let records = self.claims.values().filter(holds);
        records.filter_map(|record| Some(held(record, record.charge?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use aliquot_model::MicroGpus;

    fn record(uid: &str, ended: Option<i64>) -> Record {
        Record {
            claim: testing::claim(uid),
            state: State::Completed,
            boot_id: "boot".into(),
            since: 10,
            devices: Vec::new(),
            indexed_env: false,
            metadata: None,
            charge: Some(Charge { micro_gpus: MicroGpus::WHOLE, asked: None, since: 5 }),
            ended,
            retention: None,
            confirmed: true,
            steps: Vec::new(),
            numbers: Default::default(),
            extra: Default::default(),
        }
    }

    #[test]
    fn only_what_the_kubelet_gave_back_is_recorded() {
        let mut ledger = Ledger::default();
        ledger.count_release(&record("a", None));
        ledger.count_release(&Record { charge: None, ..record("b", Some(20)) });
        assert!(ledger.releases.is_unused());
    }

    #[test]
    fn what_is_held_is_what_the_kubelet_was_told_and_did_not_give_back() {
        let mut ledger = Ledger::default();
        for (uid, state, confirmed) in [
            ("a", State::Completed, true),
            ("b", State::Lost, true),
            ("c", State::Unpreparing, true),
            ("d", State::Started, false),
        ] {
            ledger.claims.insert(uid.to_owned(), Record { state, confirmed, ..record(uid, None) });
        }
        let uids: Vec<String> = ledger.held_claims().into_iter().map(|claim| claim.uid).collect();
        assert_eq!(uids, [testing::claim("a").uid, testing::claim("b").uid]);
    }
}
