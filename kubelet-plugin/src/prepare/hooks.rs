//! CDI specs of earlier releases whose hooks are not as they are to be: brought up to date at start.
//!
//! A spec is read again for each container that starts, and is otherwise written only when the kubelet asks again.
//! Containers that run do not notice.

use super::Node;
use crate::edits;
use crate::execute::identity;
use crate::ledger::Ledger;
use crate::reservation;
use std::time::Duration;

impl Node {
    /// Gives hooks of ours the environment, path and timeout that they have today, and has them say what is mounted.
    /// Returns the specs that were
    /// changed. A claim that another instance is at work on is left to it, and a newer release's to that.
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
