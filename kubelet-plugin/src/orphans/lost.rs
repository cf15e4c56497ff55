//! Resolves the loss of a checkpoint. It asks the API which claims there should be, has records made anew
//! where CDI specs and hardware agree with the API, and gives back claims that nothing can be using.

use super::known::{Known, devices_of, reference};
use super::pace::Pace;
use super::{API_TIMEOUT, Collector};
use crate::claim;
use crate::ledger::{Cause, Ledger, Running};
use crate::pages::{self, ListError};
use crate::prepare::{Conclusion, Overview, Unaccounted};
use crate::reasons;
use aliquot_api::Lean;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimSpec};
use kube::Api;
use kube::api::ListParams;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::time::Instant;

/// The state that is remembered between two looks.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// The times since which nothing can be using a claim, by UID.
    unused: BTreeMap<String, Instant>,
    /// The UIDs of claims that the API does not have, or not with a device of this node.
    gone: BTreeSet<String>,
    /// The last note about each claim, by UID.
    told: BTreeMap<String, String>,
    /// The pace at which the API is asked.
    pace: Pace<Question>,
}

/// The subject of a question to the API.
#[derive(Debug, PartialEq)]
struct Question {
    /// The UIDs of claims, and whether their specs can be read.
    claims: Vec<(String, bool)>,
    /// The cause of the loss.
    cause: Option<Cause>,
}

impl Collector {
    /// Makes one look, if there is anything to look for. Returns the UIDs of claims that are gone although it
    /// is not certain that they are not in use.
    pub(super) async fn check_lost(&self, overview: &Overview, memory: &mut Memory) -> BTreeSet<String> {
        let unaccounted = &overview.unaccounted;
        memory.unused.retain(|uid, _| unaccounted.iter().any(|lost| lost.uid == *uid));
        memory.gone.retain(|uid| unaccounted.iter().any(|lost| lost.uid == *uid));
        self.metrics.unaccounted_claims.set(i64::try_from(unaccounted.len()).unwrap_or(i64::MAX));
        let lost = overview.ledger.lost.as_ref();
        let asks = !unaccounted.is_empty() || lost.is_some();
        let claims = unaccounted.iter().map(|lost| (lost.uid.clone(), lost.unreadable.is_none()));
        let about = Question { claims: claims.collect(), cause: lost.map(|lost| lost.cause) };
        // A claim that is about to be given back is looked at until its time has come.
        let soon = self.grace.saturating_add(self.interval);
        let waits = memory.unused.values().any(|since| since.elapsed() < soon);
        if asks && !memory.pace.take_turn(about, self.interval, Instant::now()) && !waits {
            return memory.gone.clone();
        }
        let mut reasons = BTreeMap::new();
        let mut unknown = None;
        if asks {
            let asked = std::time::Instant::now();
            match self.ask().await {
                Ok(known) => {
                    let gone = unaccounted.iter().filter(|lost| {
                        let object = known.by_uid(&lost.uid);
                        object.is_none_or(|object| devices_of(object, &self.driver, &self.pool).is_empty())
                    });
                    memory.gone = gone.map(|lost| lost.uid.clone()).collect();
                    let running = known.running(&self.driver, &self.pool);
                    for lost in unaccounted {
                        let reason = self.account_for(lost, &known, &overview.ledger, memory).await;
                        reasons.extend(reason.map(|reason| (lost.uid.clone(), reason)));
                    }
                    self.conclude(running, asked).await;
                }
                Err(error) => {
                    memory.pace.forget();
                    let why = || format!("the API server cannot be asked: {error}");
                    reasons.extend(unaccounted.iter().map(|lost| (lost.uid.clone(), why())));
                    unknown = overview.ledger.lost.as_ref().filter(|lost| lost.is_loss()).map(|_| why());
                }
            }
        }
        self.notes.set("not asked", unknown.into_iter().collect());
        self.tell(unaccounted, reasons, memory);
        memory.gone.clone()
    }

    pub(super) async fn ask(&self) -> Result<Known, ListError> {
        let claims: Api<Lean<ResourceClaim>> = Api::all(self.client.clone());
        let pods: Api<Lean<Pod>> = Api::all(self.client.clone());
        let here = ListParams::default().fields(&format!("spec.nodeName={}", self.node_name));
        // Pods come first: a claim that a pod names was made before the pod.
        let pods = pages::all(&pods, here, API_TIMEOUT, Some).await?;
        // Of claims elsewhere only the existence matters.
        let keep = |claim: ResourceClaim| match devices_of(&claim, &self.driver, &self.pool).is_empty() {
            true => Some(ResourceClaim { spec: ResourceClaimSpec::default(), ..claim }),
            false => Some(claim),
        };
        let claims = pages::all(&claims, ListParams::default(), API_TIMEOUT, keep).await?;
        Ok(Known { pods, claims })
    }

    /// Has a claim's record made anew, or gives the claim back. Returns the reason if neither is possible
    /// yet.
    async fn account_for(
        &self,
        lost: &Unaccounted,
        known: &Known,
        ledger: &Ledger,
        memory: &mut Memory,
    ) -> Option<String> {
        let Some(object) = known.by_uid(&lost.uid) else {
            return self.give_back(lost, "the API does not have it", known, ledger, memory).await;
        };
        if let Some(standing) = known.is_over(object, lost.has_spec(), &self.driver, &self.pool) {
            return self.give_back(lost, standing, known, ledger, memory).await;
        }
        memory.unused.remove(&lost.uid);
        let claim = reference(object)?;
        let request = match claim::decode(&claim, object, &self.driver, &self.pool) {
            Ok(request) => request,
            Err(error) => return Some(error.to_string()),
        };
        let node = Arc::clone(&self.node);
        match tokio::task::spawn_blocking(move || node.rebuild(&request, Timestamp::now())).await {
            Ok(Ok(false)) => None,
            Ok(Ok(true)) => {
                self.metrics.rebuilt_claims.inc();
                self.events.node_normal(
                    reasons::CLAIM_REBUILT,
                    format!("made the lost record of claim {claim} anew: API, CDI spec and hardware agree"),
                );
                self.changed.notify_one();
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(format!("making its record anew ended abnormally: {error}")),
        }
    }

    /// Gives back a claim that the API does not have, or that is unused according to the API. It waits until
    /// nothing can be using the claim and the grace period is over. Returns the reason if the claim is not
    /// given back yet.
    async fn give_back(
        &self,
        lost: &Unaccounted,
        standing: &str,
        known: &Known,
        ledger: &Ledger,
        memory: &mut Memory,
    ) -> Option<String> {
        let doubt = if known.is_in_doubt(lost.name.as_ref()) {
            // The pod that uses the claim is not known; only the claim's UID is.
            Some("a pod of this node uses a claim that the API does not have")
        } else {
            let (node, unaccounted) = (Arc::clone(&self.node), lost.clone());
            let others = known.known_pods(ledger);
            let busy = tokio::task::spawn_blocking(move || node.has_strangers(&unaccounted, &others));
            busy.await.unwrap_or(true).then_some(match lost.unreadable {
                None => "processes run on its GPU",
                Some(_) => "processes run on GPUs that it may be using",
            })
        };
        if let Some(doubt) = doubt {
            memory.unused.remove(&lost.uid);
            return Some(format!("{standing}, and {doubt}"));
        }
        if memory.unused.entry(lost.uid.clone()).or_insert_with(Instant::now).elapsed() < self.grace {
            return Some(format!("{standing}; it is given back soon"));
        }
        let (node, uid) = (Arc::clone(&self.node), lost.uid.clone());
        match tokio::task::spawn_blocking(move || node.give_up(&uid, Timestamp::now())).await {
            Ok(Ok(_)) => {
                self.metrics.collected_claims.inc();
                self.events.node_normal(
                    reasons::CLAIM_COLLECTED,
                    format!(
                        "released the files of the claim with UID {}, which is gone, used by no pod of this node, \
                         and of which the checkpoint has no record",
                        lost.uid
                    ),
                );
                self.changed.notify_one();
                None
            }
            Ok(Err(error)) => Some(format!("it cannot be given back: {error}")),
            Err(error) => Some(format!("giving it back ended abnormally: {error}")),
        }
    }

    async fn conclude(&self, running: BTreeMap<String, Running>, asked: std::time::Instant) {
        let node = Arc::clone(&self.node);
        match tokio::task::spawn_blocking(move || node.conclude(running, asked)).await {
            Ok(Ok(Conclusion::Unchanged)) => {}
            Ok(Ok(Conclusion::Nothing)) => self.changed.notify_one(),
            Ok(Ok(Conclusion::Found { reason, orphans })) => {
                for orphan in &orphans {
                    tracing::info!(%orphan, "removed what no claim has");
                }
                self.events.node_normal(
                    reasons::LEDGER_REBUILT,
                    format!("everything is accounted for after the checkpoint was lost ({reason})"),
                );
                self.changed.notify_one();
            }
            Ok(Err(error)) => tracing::warn!(%error, "cannot look after a lost checkpoint, trying again"),
            Err(error) => tracing::error!(%error, "looking after a lost checkpoint ended abnormally"),
        }
    }

    /// Reports once for each claim why it is unaccounted for.
    fn tell(&self, unaccounted: &[Unaccounted], reasons: BTreeMap<String, String>, memory: &mut Memory) {
        let notes = unaccounted.iter().filter_map(|lost| {
            let devices: Vec<String> = lost.devices.iter().map(ToString::to_string).collect();
            let (uid, reason) = (&lost.uid, reasons.get(&lost.uid)?);
            let note = match &lost.unreadable {
                None => format!(
                    "the checkpoint has no record of the claim with UID {uid} ({}): {reason}; its pods go on, and its \
                     GPUs take no other claim until they have ended",
                    devices.join(", ")
                ),
                Some(spec) => format!(
                    "the checkpoint has no record of the claim with UID {uid}: {reason}; its pods go on, and as nobody \
                     knows what they use, only GPUs that another claim holds whole are safe from them and no other GPU \
                     takes a new claim. Once they have ended, delete {}",
                    spec.file.display()
                ),
            };
            Some((uid.clone(), note))
        });
        let notes: BTreeMap<String, String> = notes.collect();
        for (uid, note) in notes.iter().filter(|(uid, note)| memory.told.get(*uid) != Some(note)) {
            tracing::debug!(claim.uid = %uid, "unaccounted for");
            self.events.node_warning(reasons::CLAIMS_UNACCOUNTED, note.clone());
        }
        self.notes.set("unaccounted", notes.values().cloned().collect());
        memory.told = notes;
    }
}
