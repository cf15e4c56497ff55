//! Updates the hooks in CDI specs of earlier releases at start.
//!
//! A spec is read again for each container that starts, and is otherwise written only when the kubelet asks
//! again. Running containers do not notice.

use super::Node;
use crate::edits;
use crate::execute::identity;
use crate::ledger::Ledger;
use crate::reservation;
use std::time::Duration;

impl Node {
    /// Gives this driver's hooks their current environment, path and timeout, and the description of the
    /// mounts. Returns the specs that were changed. A claim that another instance works on is left to that
    /// instance, and a newer release's claim to that release.
    pub(super) fn renew_hooks(&self, ledger: &Ledger) -> Vec<String> {
        let specs = self.specs().unwrap_or_default();
        let mut renewed = Vec::new();
        for uid in specs.iter().filter(|uid| !ledger.newer.contains_key(*uid)) {
            let Ok(_claim) = reservation::claim(self.store.dir(), uid, Duration::ZERO) else { continue };
            let name = edits::spec_name(&self.machine.site.driver, uid);
            let Ok(Some(mut spec)) = self.machine.cdi.read(&name) else { continue };
            let mut changed = edits::renew_hooks(&mut spec, self.machine.site.oci_hook.as_deref());
            match edits::tell_mounts(&mut spec, identity) {
                Ok(told) => changed |= told,
                Err(error) => {
                    tracing::warn!(claim.uid = %uid, %error, "the hooks of its CDI spec say what they said of its mounts")
                }
            }
            if !changed {
                continue;
            }
            match self.machine.cdi.write(&name, &spec) {
                Ok(_) => renewed.push(name),
                Err(error) => {
                    tracing::warn!(claim.uid = %uid, %error, "the hooks of its CDI spec stay as they were")
                }
            }
        }
        renewed
    }
}
