//! Claims that the checkpoint does not know although their CDI specs are here.
//!
//! An intact checkpoint knows every claim with a spec: a record is written before the spec, and removed after it.
//! A spec without a record therefore says that the checkpoint was lost, and that a pod may be running with what
//! the spec names. Specs lie in a directory that a reboot empties, as it ends all pods. So the specs themselves
//! are the state that is kept until it is resolved, over any number of restarts:
//!
//! - files that such a spec names are not removed;
//! - no other claim is prepared on a GPU that it names;
//! - its own claim may be prepared again, which makes the record anew, and unprepared, which removes the files;
//! - the collector gives it back once the API does not have the claim and no pod can be using it.

use super::{Node, UnprepareError};
use crate::claim::Request;
use crate::edits;
use crate::ledger::Ledger;
use crate::plan::{PlanError, Refusal};
use crate::share;
use aliquot_cdi::Spec;
use aliquot_model::{DeviceKind, DeviceName};

/// A claim of which only the CDI spec is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unaccounted {
    /// UID of the claim.
    pub uid: String,
    /// Ids of its allocation results.
    pub results: Vec<String>,
    /// Its devices.
    pub devices: Vec<DeviceName>,
}

impl Unaccounted {
    /// Reads what a spec says. A spec that names no device of ours gives no container anything.
    fn of(uid: &str, spec: &Spec) -> Option<Self> {
        let mut found = Self { uid: uid.to_owned(), results: Vec::new(), devices: Vec::new() };
        for device in &spec.devices {
            let named = device.container_edits.environment().into_iter().find_map(|(name, value)| {
                let (device, _) = value.split_once('=').filter(|_| name.starts_with(edits::DEVICE_ENV))?;
                DeviceName::parse(device)
            });
            if let Some(named) = named {
                found.results.push(device.name.to_string());
                found.devices.push(named);
            }
        }
        (!found.devices.is_empty()).then_some(found)
    }

    /// Returns true if a pod that uses it may be using the GPU with this minor number.
    fn uses(&self, minor: u32) -> bool {
        self.devices.iter().any(|device| device.minor() == minor && device.kind() != DeviceKind::Admin)
    }
}

impl Node {
    /// Claims whose CDI specs are here and whose records are not. Specs that cannot be read are none.
    pub(super) fn unaccounted(&self, ledger: &Ledger) -> Vec<Unaccounted> {
        let prefix = edits::spec_prefix(&self.machine.site.driver);
        let names = self.machine.cdi.list(&prefix).unwrap_or_default();
        let unknown = names.iter().filter_map(|name| {
            let uid = name.strip_prefix(&prefix).filter(|uid| !ledger.claims.contains_key(*uid))?;
            Unaccounted::of(uid, &self.machine.cdi.read(name).ok().flatten()?)
        });
        unknown.collect()
    }

    /// Refuses a claim that would share a GPU with one that the checkpoint does not know.
    ///
    /// # Errors
    /// [`Refusal::Unaccounted`].
    pub(super) fn refuse_beside_unaccounted(
        &self,
        request: &Request,
        ledger: &Ledger,
    ) -> Result<(), PlanError> {
        let unaccounted = self.unaccounted(ledger);
        for wanted in request.devices.iter().filter(|wanted| wanted.device.kind() != DeviceKind::Admin) {
            let minor = wanted.device.minor();
            let other = unaccounted.iter().find(|other| other.uid != request.claim.uid && other.uses(minor));
            if let Some(other) = other {
                let refusal = Refusal::Unaccounted {
                    device: wanted.device.clone(),
                    uid: other.uid.clone(),
                    spec: self.machine.cdi.file(&edits::spec_name(&self.machine.site.driver, &other.uid)),
                };
                return Err(PlanError::new(&wanted.request, refusal));
            }
        }
        Ok(())
    }

    /// Removes the files of a claim that has no record. Its GPU instances then belong to no claim, and go as
    /// such. Returns whether there were any files. The claim is reserved.
    ///
    /// # Errors
    /// [`UnprepareError`]; the spec is still there, and it can be tried again.
    pub(super) fn release_unaccounted(&self, uid: &str) -> Result<bool, UnprepareError> {
        let ledger = self.ledger()?;
        let Some(found) = self.unaccounted(&ledger).into_iter().find(|found| found.uid == uid) else {
            return Ok(false);
        };
        for id in &found.results {
            share::discard(&self.machine.shares, id)?;
        }
        // Last: while the spec is there the GPU is kept.
        let name = edits::spec_name(&self.machine.site.driver, uid);
        let removed = self.machine.cdi.remove(&name);
        removed.map_err(|error| UnprepareError::Undo {
            undo: format!("remove CDI spec {name}"),
            source: error.into(),
        })
    }
}
