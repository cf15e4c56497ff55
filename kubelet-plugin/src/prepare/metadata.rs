//! Finds claims that have device metadata files, and removes files that no claim has.

use super::{Node, Unaccounted};
use crate::claim::Request;
use crate::ledger::{Ledger, Metadata};
use crate::metadata::files;
use std::collections::BTreeSet;

/// Returns the data that the files of a claim depend on, besides its devices.
pub(super) fn metadata_of(request: &Request) -> Metadata {
    Metadata { pod_claim_name: request.pod_claim_name.clone() }
}

impl Node {
    fn with_metadata(&self) -> BTreeSet<String> {
        let machine = &self.machine;
        files::list(&machine.cdi, &machine.site.driver, &machine.data_dir)
    }

    /// Returns true if a claim has any such file: its containers were given them.
    pub(super) fn has_metadata(&self, uid: &str) -> bool {
        self.with_metadata().contains(uid)
    }

    /// Removes the files of claims that have no record and cannot have lost one. The node is locked, and
    /// `ledger` is its ledger. Returns descriptions of what was removed.
    pub(super) fn remove_stray_metadata(&self, ledger: &Ledger, unaccounted: &[Unaccounted]) -> Vec<String> {
        let is_known = |uid: &String| ledger.has(uid) || unaccounted.iter().any(|lost| lost.uid == *uid);
        let strays = self.with_metadata().into_iter().filter(|uid| !is_known(uid));
        strays
            .filter(|uid| self.machine.remove_metadata(uid))
            .map(|uid| format!("device metadata of claim {uid}"))
            .collect()
    }
}
