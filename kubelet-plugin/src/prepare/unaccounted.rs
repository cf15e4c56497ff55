//! Handles claims that pods may be using and that the checkpoint does not know.
//!
//! An intact checkpoint knows every claim with a spec: a record is written before the spec, and removed after
//! it. A spec without a record therefore shows that the checkpoint was lost, and that a pod may be running
//! with the devices that the spec names. Specs are in a directory that a reboot empties, and a reboot also
//! ends all pods. So the specs themselves are the state that is kept until it is resolved, over any number of
//! restarts:
//!
//! - files that such a spec names are not removed;
//! - no other claim is prepared on a GPU that it names;
//! - its own claim may be prepared again, which makes the record anew if the claim has what the spec names,
//!   and unprepared, which removes the files;
//! - the collector has the record made anew from the API's data ([`super::rebuild`]), or unprepares the claim
//!   once the API does not have it and nothing can be using it.
//!
//! A claim that, according to the API, pods are running with, and that has no spec either, is recorded with
//! the loss ([`Lost::running`](crate::ledger::Lost)) and keeps its GPU in the same way.
//!
//! While the checkpoint is lost, a spec that cannot be read may name anything. Then no GPU takes a new claim,
//! except a GPU that a claim with a record holds whole, because the other claim cannot have any of it.

use super::named::{named, unknown};
use super::{Named, Node, UnprepareError};
use crate::claim::{ClaimRef, Request};
use crate::device_number_reuse::{self, Meaning, Reach};
use crate::edits;
use crate::ledger::{DeviceNumber, Ended, Ledger};
use crate::plan::{PlanError, Refusal};
use crate::share;
use crate::store::StoreError;
use crate::vfio::note::{self, Note};
use aliquot_cdi::Spec;
use aliquot_model::{DeviceKind, DeviceName, GpuUuid};
use jiff::Timestamp;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// A claim that has no record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unaccounted {
    /// The UID of the claim.
    pub uid: String,
    /// The devices that the claim's CDI spec names; empty if only the API knows the claim.
    pub named: Vec<Named>,
    /// The names of the claim's devices.
    pub devices: Vec<DeviceName>,
    /// The claim's CDI spec, if it cannot be read: then the claim may have any device.
    pub unreadable: Option<Unreadable>,
    /// The namespace and name of the claim, if anything says so.
    pub name: Option<(String, String)>,
    /// The numbers of the devices that the claim's CDI spec gives containers.
    pub numbers: BTreeSet<DeviceNumber>,
}

/// A CDI spec that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// The file.
    pub file: PathBuf,
    /// The reason.
    pub reason: String,
}

impl Unaccounted {
    /// Returns the claim of a spec, or `None` if the spec names no device of this driver and so gives
    /// containers nothing.
    fn of(uid: &str, spec: &Spec) -> Option<Self> {
        let named = named(spec);
        let devices = named.iter().map(|named| named.device.clone()).collect();
        let (name, numbers) = (edits::claim_name(spec), device_number_reuse::named(spec));
        let uid = uid.to_owned();
        (!named.is_empty()).then_some(Self { uid, named, devices, unreadable: None, name, numbers })
    }

    /// Returns true if the claim's CDI spec is here.
    pub fn has_spec(&self) -> bool {
        !self.named.is_empty() || self.unreadable.is_some()
    }

    /// Returns true if a pod that uses the claim may be using the GPU with this minor number: the GPU that
    /// has the number now, or the one that had it when the claim was prepared.
    fn uses(&self, minor: u32, gpu: Option<&GpuUuid>) -> bool {
        let has = |named: &Named| gpu.is_some_and(|gpu| named.uuid == gpu.as_str());
        let by_name = self.devices.iter().filter(|device| device.minor() == minor);
        let by_uuid = self.named.iter().filter(|named| has(named)).map(|named| &named.device);
        by_name.chain(by_uuid).any(|device| device.kind() != DeviceKind::Admin)
    }

    /// Returns the devices that containers of the claim may open and that are not known to be the claim's
    /// own. No record says which are its own, so only the UUIDs in its spec count.
    pub(super) fn reaches(&self, meanings: &[Meaning]) -> Vec<Reach> {
        let is_own = |gpu: &GpuUuid| self.named.iter().any(|named| named.uuid == gpu.as_str());
        let reached = meanings.iter().filter(|meaning| self.numbers.contains(&meaning.number));
        let (namespace, name) = self.name.clone().unwrap_or_default();
        let claim = ClaimRef { namespace, name, uid: self.uid.clone() };
        let others = reached.filter(|meaning| !is_own(&meaning.gpu));
        let reach = |meaning: &Meaning| Reach {
            gpu: meaning.gpu.clone(),
            partition: meaning.partition,
            claim: claim.clone(),
            number: meaning.number,
        };
        others.map(reach).collect()
    }
}

/// Returns true if a claim with a record holds the whole GPU with this minor number.
fn is_held_whole(ledger: &Ledger, minor: u32) -> bool {
    ledger.bindings.get(&minor).is_some_and(|binding| ledger.is_held_whole(&binding.gpu))
}

impl Node {
    /// Returns the UIDs of the claims that have a CDI spec. The caller lists the specs before it reads the
    /// ledger. A spec that is written in between has a record, and the claim of one that is removed in
    /// between is gone from the ledger.
    ///
    /// # Errors
    /// Fails if the directory cannot be listed.
    pub(super) fn specs(&self) -> Result<BTreeSet<String>, StoreError> {
        let prefix = edits::spec_prefix(&self.machine.site.driver);
        let names = self.machine.cdi.list(&prefix).map_err(|error| StoreError::Io {
            action: "list",
            path: self.machine.cdi.path().to_owned(),
            source: std::io::Error::other(error),
        })?;
        Ok(names.iter().filter_map(|name| Some(name.strip_prefix(&prefix)?.to_owned())).collect())
    }

    /// Returns true if a claim has a CDI spec.
    pub(super) fn has_spec(&self, uid: &str) -> bool {
        self.machine.cdi.file(&edits::spec_name(&self.machine.site.driver, uid)).exists()
    }

    /// Returns the claims that may be in use and have no record. Only their specs are read. With an intact
    /// checkpoint, a spec that cannot be read is ignored.
    pub(super) fn unaccounted(&self, specs: &BTreeSet<String>, ledger: &Ledger) -> Vec<Unaccounted> {
        let driver = &self.machine.site.driver;
        let by_spec = specs.iter().filter(|uid| !ledger.has(uid)).filter_map(|uid| {
            let name = edits::spec_name(driver, uid);
            let reason = match self.machine.cdi.read(&name) {
                Ok(spec) => {
                    let spec = spec?;
                    match unknown(&spec).filter(|_| ledger.lost.is_some()) {
                        Some(device) => format!("it gives {device}, which only a newer release knows"),
                        None => return Unaccounted::of(uid, &spec),
                    }
                }
                Err(error) => error.to_string(),
            };
            ledger.lost.is_some().then(|| Unaccounted {
                uid: uid.clone(),
                named: Vec::new(),
                devices: Vec::new(),
                unreadable: Some(Unreadable { file: self.machine.cdi.file(&name), reason }),
                name: None,
                numbers: BTreeSet::new(),
            })
        });
        let mut found: Vec<Unaccounted> = by_spec.collect();
        for (uid, running) in ledger.lost.iter().flat_map(|lost| &lost.running) {
            if !ledger.has(uid) && found.iter().all(|found| found.uid != *uid) {
                let devices = running.names().collect();
                let (uid, named) = (uid.clone(), Vec::new());
                let name = Some((running.claim.namespace.clone(), running.claim.name.clone()));
                let numbers = BTreeSet::new();
                found.push(Unaccounted { uid, named, devices, unreadable: None, name, numbers });
            }
        }
        found
    }

    /// Refuses a claim that would share a GPU with one that the checkpoint does not know. `known` says that
    /// the claim had its devices before.
    ///
    /// # Errors
    /// Fails with [`Refusal::Unaccounted`], [`Refusal::Unreadable`] or [`Refusal::Beyond`].
    pub(super) fn refuse_beside_unaccounted(
        &self,
        request: &Request,
        specs: &BTreeSet<String>,
        ledger: &Ledger,
        known: bool,
    ) -> Result<(), PlanError> {
        let unaccounted = self.unaccounted(specs, ledger);
        for wanted in request.devices.iter().filter(|wanted| wanted.device.kind() != DeviceKind::Admin) {
            if let Some(lost) = ledger.lost.as_ref().filter(|lost| lost.is_beyond() && !known) {
                let refusal = Refusal::Beyond { device: wanted.device.clone(), reason: lost.reason.clone() };
                return Err(PlanError::new(&wanted.request, refusal));
            }
            let minor = wanted.device.minor();
            let gpu = ledger.bindings.get(&minor).map(|binding| &binding.gpu);
            let mut others = unaccounted.iter().filter(|other| other.uid != request.claim.uid);
            let other = others.find(|other| other.uses(minor, gpu));
            if let Some(other) = other {
                let spec = edits::spec_name(&self.machine.site.driver, &other.uid);
                let refusal = Refusal::Unaccounted {
                    device: wanted.device.clone(),
                    uid: other.uid.clone(),
                    spec: other.has_spec().then(|| self.machine.cdi.file(&spec)),
                };
                return Err(PlanError::new(&wanted.request, refusal));
            }
            let others = unaccounted.iter().filter(|other| other.uid != request.claim.uid);
            let unreadable = others.filter_map(|other| Some((other, other.unreadable.as_ref()?))).next();
            if let Some((other, spec)) = unreadable.filter(|_| !known && !is_held_whole(ledger, minor)) {
                let refusal = Refusal::Unreadable {
                    device: wanted.device.clone(),
                    uid: other.uid.clone(),
                    spec: spec.file.clone(),
                    reason: spec.reason.clone(),
                };
                return Err(PlanError::new(&wanted.request, refusal));
            }
        }
        Ok(())
    }

    /// Removes the files of a claim that has no record. Its GPU instances then belong to no claim, and are
    /// removed as such. Returns true if there was anything to remove. The caller has reserved the claim.
    ///
    /// # Errors
    /// Fails with [`UnprepareError`]; the spec is still there, and the call can be repeated.
    pub(super) fn release_unaccounted(&self, uid: &str, now: Timestamp) -> Result<bool, UnprepareError> {
        // This comes first: while the spec is there, the GPU is kept.
        self.end_unrecorded_daemon(uid, &self.ledger()?)?;
        let removed = self.remove_files(uid)?;
        let mut locked = self.store.lock(self.lock_timeout)?;
        let mut ledger = locked.load()?.ledger;
        let before = ledger.lost.clone();
        let running = ledger.lost.as_mut().and_then(|lost| lost.running.remove(uid)).is_some();
        ledger.note_ended(uid, Ended { at: now.as_second(), recorded: false });
        if ledger.lost != before {
            locked.save_releasing(&ledger)?;
        }
        Ok(removed || running)
    }

    /// Removes a claim's CDI spec, the shares that the spec names, and the claim's device metadata, and takes
    /// back the GPUs of virtual machines that the spec names. Returns true if there was a spec.
    ///
    /// # Errors
    /// Fails with [`UnprepareError`]; the spec is still there, and the call can be repeated.
    pub(super) fn remove_files(&self, uid: &str) -> Result<bool, UnprepareError> {
        let name = edits::spec_name(&self.machine.site.driver, uid);
        let spec = self.machine.cdi.read(&name).ok().flatten();
        // Every boot begins with NVIDIA's driver, and an address may mean another card in it.
        let boot_id = self.boot_id().map_err(|error| UnprepareError::Boot(Box::new(error)))?;
        let now = spec.as_ref().and_then(edits::boot_id).is_some_and(|of_spec| of_spec == boot_id);
        let mut noted = note::all(&self.machine.data_dir, &boot_id);
        noted.retain(|note| note.claim == uid);
        for named in spec.iter().flat_map(named) {
            share::discard(&self.machine.site.shares_dir, &named.result_id)?;
            let passed = GpuUuid::parse(&named.uuid).zip(named.passed).filter(|_| now);
            // The GPUs with a note are taken back below, because the note says more.
            let passed = passed.filter(|(gpu, _)| noted.iter().all(|note| note.passed.info.uuid != *gpu));
            if let Some((gpu, address)) = passed {
                self.take_back(&gpu, &address, false)?;
            }
        }
        for Note { passed, .. } in &noted {
            self.take_back(&passed.info.uuid, &passed.address, passed.persistence)?;
        }
        self.machine.remove_metadata(uid);
        // This comes last: while the spec is there, the GPU is kept.
        self.machine.cdi.remove(&name).map_err(|error| UnprepareError::Undo {
            undo: format!("remove CDI spec {name}"),
            source: error.into(),
        })
    }
}
