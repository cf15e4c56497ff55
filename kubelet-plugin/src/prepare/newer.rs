//! Handles claims whose records only a newer release understands ([`NewerRecord`]).
//!
//! Their pods run on, and their hardware stays taken. The kubelet gets the same answer again if everything
//! that the answer needs is understood. At the end the claim's files are removed, so that its pod can end. If
//! every step is understood, everything is undone. If a step is not understood, the record stays, and with it
//! the hardware, until the newer release runs here again and undoes it. No pod hangs because of this.

use super::ask::same_results;
use super::attempt::hardware;
use super::{Node, PrepareError, Prepared, UnprepareError};
use crate::claim::Request;
use crate::edits;
use crate::execute::Machine;
use crate::ledger::{Ledger, NewerRecord};
use crate::metadata::files;
use jiff::Timestamp;

impl Node {
    /// Gives the answer that the kubelet was given for a claim, if it can be given again. `request` is `None`
    /// if the API could not be asked.
    ///
    /// # Errors
    /// Fails with [`PrepareError::Newer`].
    pub(super) fn prepare_newer(
        &self,
        record: &NewerRecord,
        ledger: &Ledger,
        request: Option<&Request>,
        boot_id: &str,
    ) -> Result<Vec<Prepared>, PrepareError> {
        let same = request.is_none_or(|request| same_results(&record.keys(), request));
        let devices = record.answerable(boot_id).filter(|_| same);
        let devices = devices.filter(|devices| {
            let name = edits::spec_name(&self.machine.site.driver, &record.claim.uid);
            let spec = self.machine.cdi.read(&name).ok().flatten();
            let has = |id: &str| {
                spec.iter().flat_map(|spec| &spec.devices).any(|device| device.name.to_string() == id)
            };
            devices.iter().all(|device| has(&device.result_id))
        });
        match devices {
            Some(devices) => {
                let uid = &record.claim.uid;
                let Machine { cdi, site, .. } = &self.machine;
                Ok(self.answer_for(uid, devices, |request| files::has_spec(cdi, &site.driver, uid, request)))
            }
            None => Err(PrepareError::Newer {
                claim: Box::new(record.claim.clone()),
                release: ledger.beside.release_or_unknown().to_owned(),
                why: record.why().to_owned(),
            }),
        }
    }

    /// Releases as much of a claim as is understood. The claim is reserved.
    ///
    /// # Errors
    /// Fails with [`UnprepareError`]; the call can be repeated.
    pub(super) fn release_newer(&self, record: &NewerRecord, now: Timestamp) -> Result<(), UnprepareError> {
        let uid = &record.claim.uid;
        let Some(undoable) = record.undoable() else {
            self.remove_files(uid)?;
            tracing::warn!(
                claim.uid = uid,
                why = record.why(),
                "the record of a newer release stays, and with it what it holds, until that release runs here again"
            );
            return Ok(());
        };
        let boot_id = self.boot_id().map_err(|error| UnprepareError::Boot(Box::new(error)))?;
        let _gpus = self.reserve_gpus(&hardware(&undoable))?;
        self.release_at(undoable, &boot_id, now)
    }
}
