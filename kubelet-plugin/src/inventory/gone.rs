//! Reports to claims that their partitions are gone.

use super::Watcher;
use crate::notice;
use crate::prepare::Overview;
use crate::reasons;
use std::collections::BTreeSet;

impl Watcher {
    /// Reports each partition once, and names all of them in `/healthz`.
    pub(super) fn say_gone(
        &self,
        reported: &BTreeSet<String>,
        seen: &mut BTreeSet<String>,
        overview: &Overview,
    ) {
        let mut notes = Vec::new();
        for gone in &overview.gone {
            let note = notice::partition_gone(gone);
            if !reported.contains(&note) {
                tracing::warn!(claim = %gone.claim, "{note}");
                self.events.claim_warning(&gone.claim, reasons::PARTITION_GONE, note.clone());
            }
            seen.insert(note.clone());
            notes.push(note);
        }
        self.readiness.notes.set("partitions", notes);
    }
}
