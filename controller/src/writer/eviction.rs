//! Makes room for a pod of higher priority: notes the node on the pod, then evicts the pods in the way
//! through the eviction API, so that disruption budgets hold.

use super::{Outcome, Verdict, WriteError, Writer};
use crate::events;
use crate::field_manager::{creation, params};
use crate::lease::NotLeader;
use crate::report::{Report, reasons};
use aliquot_allocator::snapshot::{GOING_BACK, ObjectKey, Uid};
use aliquot_api::{Lean, lean};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::policy::v1::Eviction as ApiEviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::Api;
use kube::api::{Patch, PostParams};
use kube::core::Status;
use serde_json::json;

/// The result of an eviction of one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eviction {
    /// The pod.
    pub pod: ObjectKey,
    /// UID of the pod.
    pub uid: Uid,
    /// What became of the pod.
    pub fate: Fate,
}

/// What became of a pod that was to be evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// The API server is ending the pod, or it gave no answer and the pod ends or is gone.
    Evicted,
    /// The pod was gone already.
    Gone,
    /// The pod stays, for this reason.
    Refused(String),
    /// Unknown: the API server gave no answer in any attempt, for this reason.
    Unanswered(String),
}

impl Fate {
    /// Returns the one-word name that metrics use.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Gone => "gone",
            Self::Refused(_) => "refused",
            Self::Unanswered(_) => "unanswered",
        }
    }
}

/// A pod that is to be evicted.
#[derive(Debug, Clone)]
pub struct Victim {
    /// The pod.
    pub pod: ObjectKey,
    /// UID of the pod.
    pub uid: Uid,
    /// The event that is recorded before the eviction.
    pub why: Report,
}

/// Returns true if an answer comes from a disruption budget, not from an overloaded server.
pub(super) fn is_budget(status: &Status) -> bool {
    status.details.iter().flat_map(|details| &details.causes).any(|cause| cause.reason == "DisruptionBudget")
        || status.message.contains("disruption budget")
}

/// Returns true if an answer says that a namespace is being deleted, so that nothing can be created in it.
fn is_going(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 403
        && (causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
            || status.message.contains("because it is being terminated"))
}

impl Writer {
    /// Notes the node on the pod, then evicts the victims; the reason is recorded in an event before each
    /// eviction. All evictions are tried with a dry run first: nobody is evicted if it is known that one of
    /// the victims will be refused, by itself or together with the others.
    pub(super) async fn make_room(
        &self,
        pod: &ObjectKey,
        uid: &str,
        node: Option<&str>,
        victims: Vec<Victim>,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        outcome.pod = Some(self.nominate(pod, uid, node).await?);
        let mut there = Vec::new();
        for victim in victims {
            match self.evict(&victim.pod, &victim.uid, true).await? {
                Fate::Evicted => there.push(victim),
                fate => {
                    let refused = matches!(fate, Fate::Refused(_));
                    outcome.evictions.push(Eviction { pod: victim.pod, uid: victim.uid, fate });
                    if refused {
                        return Ok(());
                    }
                }
            }
        }
        let mut kept = self.kept_together(pod, &there).await?;
        if !kept.is_empty() {
            for (at, Victim { pod, uid, .. }) in there.into_iter().enumerate() {
                let fate = kept.remove(&at).map(Fate::Refused);
                outcome.evictions.extend(fate.map(|fate| Eviction { pod, uid, fate }));
            }
            return Ok(());
        }
        for Victim { pod, uid, why } in there {
            let fate = self.carry_out(&pod, &uid, &why).await?;
            let goes = matches!(fate, Fate::Evicted | Fate::Gone);
            outcome.evictions.push(Eviction { pod, uid, fate });
            if !goes {
                break;
            }
        }
        Ok(())
    }

    /// Notes the held place on its node, so that another controller holds it too, then evicts the pod.
    pub(super) async fn go_back(
        &self,
        pod: &ObjectKey,
        uid: &Uid,
        (node, place): (&str, &str),
        why: &Report,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        self.note_place(node, Some(place)).await?;
        self.move_away(pod, uid, why, outcome).await
    }

    /// Evicts one pod, whose owner recreates it.
    pub(super) async fn move_away(
        &self,
        pod: &ObjectKey,
        uid: &Uid,
        why: &Report,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let mut fate = self.evict(pod, uid, true).await?;
        if fate == Fate::Evicted {
            fate = self.carry_out(pod, uid, why).await?;
        }
        outcome.evictions.push(Eviction { pod: pod.clone(), uid: uid.clone(), fate });
        Ok(())
    }

    /// Records the reason in an event, then evicts a pod. If the eviction is refused although the dry run was
    /// not, or is not answered, a second event says so: the first one announced what may never come.
    pub(super) async fn carry_out(
        &self,
        pod: &ObjectKey,
        uid: &Uid,
        why: &Report,
    ) -> Result<Fate, WriteError> {
        self.record(why).await?;
        let fate = self.evict(pod, uid, false).await?;
        let note = match &fate {
            Fate::Evicted | Fate::Gone => None,
            Fate::Refused(message) => {
                Some(format!("it stays after all, as the API server refused its eviction: {message}"))
            }
            Fate::Unanswered(message) => Some(format!(
                "it may stay after all, as the API server did not answer its eviction: {message}"
            )),
        };
        if let Some(note) = note {
            // The result counts, even if the second event cannot be written.
            if let Err(error) =
                self.record(&Report { reason: reasons::NOT_EVICTED, note, ..why.clone() }).await
            {
                tracing::warn!(%pod, %error, "the pod was not told that it stays");
            }
        }
        Ok(fate)
    }

    /// Writes an event before something that cannot be undone, so that it is on record whatever becomes of
    /// the controller. Returns an error if it cannot be written; then the action is not done. The exception
    /// is a namespace that is being deleted, where no event can be written.
    async fn record(&self, why: &Report) -> Result<(), WriteError> {
        debug_assert!(why.is_as_listed(), "{why:?}");
        let event = events::event(why, &self.instance);
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let what = || format!("the events of namespace {namespace}");
        let mut last = String::new();
        for attempt in 0..Self::ATTEMPTS {
            let created = async {
                match api.create(&creation(), &event).await {
                    // An earlier attempt, whose answer was lost, created it.
                    Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
                    Err(kube::Error::Api(status)) if is_going(&status) => Ok(()),
                    answer => answer.map(drop),
                }
            };
            match self.send("record", created).await? {
                // The namespace is gone.
                Ok(()) | Err(Verdict::NotFound) => return Ok(()),
                Err(Verdict::Never(message)) => return Err(WriteError::Refused { what: what(), message }),
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => last = message,
            }
            Self::pause(attempt).await;
        }
        Err(WriteError::Exhausted { what: what(), attempts: Self::ATTEMPTS, last })
    }

    /// Writes or removes the note of a held place on a node.
    pub(super) async fn note_place(&self, node: &str, place: Option<&str>) -> Result<(), WriteError> {
        let api: Api<Node> = Api::all(self.client.clone());
        let patch = json!({"metadata": {"annotations": {GOING_BACK: place}}});
        self.patch_until_done(&format!("node {node}"), || {
            let (api, patch) = (api.clone(), patch.clone());
            async move { api.patch(node, &params(), &Patch::Merge(&patch)).await.map(drop) }
        })
        .await
    }

    /// Writes `status.nominatedNodeName` of a pod.
    async fn nominate(&self, key: &ObjectKey, uid: &str, node: Option<&str>) -> Result<Pod, WriteError> {
        let api: Api<Lean<Pod>> = Api::namespaced(self.client.clone(), &key.namespace);
        let what = format!("pod {key}");
        let patch = Patch::Merge(json!({"metadata": {"uid": uid}, "status": {"nominatedNodeName": node}}));
        let mut last = String::new();
        for attempt in 0..Self::ATTEMPTS {
            match self.send("nominate", lean(api.patch_status(&key.name, &params(), &patch))).await? {
                Ok(pod) => return Ok(pod),
                Err(Verdict::NotFound) => return Err(WriteError::Gone(key.clone())),
                Err(Verdict::Never(message)) => return Err(WriteError::Refused { what, message }),
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => last = message,
            }
            Self::pause(attempt).await;
        }
        Err(WriteError::Exhausted { what, attempts: Self::ATTEMPTS, last })
    }

    pub(super) async fn evict(
        &self,
        key: &ObjectKey,
        uid: &str,
        rehearsal: bool,
    ) -> Result<Fate, WriteError> {
        let api: Api<Lean<Pod>> = Api::namespaced(self.client.clone(), &key.namespace);
        let eviction = ApiEviction {
            metadata: ObjectMeta { name: Some(key.name.to_string()), ..ObjectMeta::default() },
            delete_options: Some(DeleteOptions {
                preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
                ..DeleteOptions::default()
            }),
        };
        let params = PostParams { dry_run: rehearsal, ..PostParams::default() };
        let verb = if rehearsal { "evict_rehearsal" } else { "evict" };
        // An eviction without an answer may have been carried out; if the pod is gone then, this controller
        // ended it.
        let (mut last, mut gone) = (String::new(), Fate::Gone);
        for attempt in 0..Self::ATTEMPTS {
            let request = api.create_subresource::<_, Status>("eviction", &key.name, &params, &eviction);
            let answer = match self.send(verb, request).await {
                Ok(answer) => answer,
                Err(NotLeader) if gone == Fate::Evicted => return Ok(gone),
                Err(error) => return Err(error.into()),
            };
            match answer {
                Ok(_) => return Ok(Fate::Evicted),
                Err(Verdict::NotFound) => return Ok(gone),
                Err(Verdict::Never(message)) => return Ok(Fate::Refused(message)),
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => {
                    if !rehearsal {
                        gone = Fate::Evicted;
                    }
                    // A conflict may mean another pod of the same name: then this one is gone. A pod that is
                    // being deleted counts as evicted, although it takes time to end.
                    let goes = |Lean(pod): Lean<Pod>| {
                        let other = pod.metadata.uid.as_deref() != Some(uid);
                        other || !rehearsal && pod.metadata.deletion_timestamp.is_some()
                    };
                    if let Ok(Ok(present)) = self.send("get", api.get_opt(&key.name)).await
                        && present.is_none_or(goes)
                    {
                        return Ok(gone);
                    }
                    last = message;
                }
            }
            Self::pause(attempt).await;
        }
        Ok(if rehearsal { Fate::Refused(last) } else { Fate::Unanswered(last) })
    }
}
