//! Claims whose records only a newer release understands ([`NewerRecord`]).
//!
//! Their pods run on, and what they hold stays taken. The kubelet gets what can be given: the same answer again
//! where everything that it needs is understood; at the end, the claim's files are removed, so that its pod can
//! end, and everything is undone where every step is understood. Where one is not, the record stays, and with it
//! the hardware, until the newer release runs here again and undoes it. No pod hangs for it.

use super::{Node, PrepareError, Prepared, UnprepareError, hardware, same_results};
use crate::claim::Request;
use crate::edits;
use crate::execute::Machine;
use crate::ledger::{Ledger, NewerRecord};
use crate::metadata::files;
use jiff::Timestamp;

impl Node {
    /// What the kubelet was told of a claim, if that can be told again. `request` is `None` where the API could not
    /// be asked.
    ///
    /// # Errors
    /// [`PrepareError::Newer`].
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

    /// Gives back what is understood of a claim. The claim is reserved.
    ///
    /// # Errors
    /// [`UnprepareError`]; it can be given back again.
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
