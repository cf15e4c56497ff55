//! Checks just before the first eviction, with the API server, whether the victims of one decision may go
//! together.

use super::{Victim, WriteError, Writer};
use crate::writer::Verdict;
use aliquot_allocator::preempt::disruptions::{Budget, Leaver, too_many};
use aliquot_allocator::snapshot::ObjectKey;
use aliquot_api::{Lean, lean};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use kube::api::ListParams;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;

impl Writer {
    /// Returns the victims, by index, that disruption budgets do not let go together with the others, and the
    /// reasons. Each victim passed a dry run by itself, but a dry run uses up nothing of a budget.
    pub(super) async fn kept_together(
        &self,
        pod: &ObjectKey,
        victims: &[Victim],
    ) -> Result<BTreeMap<usize, String>, WriteError> {
        let mut namespaces: BTreeMap<&Arc<str>, Vec<(usize, &Victim)>> = BTreeMap::new();
        for (at, victim) in victims.iter().enumerate() {
            namespaces.entry(&victim.pod.namespace).or_default().push((at, victim));
        }
        let mut kept = BTreeMap::new();
        for (namespace, victims) in namespaces.into_iter().filter(|(_, victims)| victims.len() > 1) {
            let budgets = self.budgets(namespace).await?;
            if budgets.is_empty() {
                continue;
            }
            let (mut places, mut leavers) = (Vec::new(), Vec::new());
            for (at, victim) in victims {
                if let Some(leaver) = self.leaver(victim).await? {
                    places.push(at);
                    leavers.push(leaver);
                }
            }
            for (at, budget, count) in too_many(&budgets, &leavers) {
                // The pod's owner must not learn the names of another namespace.
                let why = if *namespace == pod.namespace {
                    budget.refusal(count)
                } else {
                    "its disruption budget does not let it go together with others".to_owned()
                };
                kept.extend(places.get(at).map(|at| (*at, why)));
            }
        }
        Ok(kept)
    }

    async fn budgets(&self, namespace: &str) -> Result<Vec<Budget>, WriteError> {
        let api: Api<PodDisruptionBudget> = Api::namespaced(self.client.clone(), namespace);
        let what = format!("the disruption budgets of namespace {namespace}");
        let all = ListParams::default();
        let listed = self.ask("list", what, || api.list(&all)).await?;
        Ok(listed.iter().flatten().map(Budget::read).collect())
    }

    /// Reads the pod of a victim; `None` if it is gone.
    async fn leaver(&self, victim: &Victim) -> Result<Option<Leaver>, WriteError> {
        let api: Api<Lean<Pod>> = Api::namespaced(self.client.clone(), &victim.pod.namespace);
        let found =
            self.ask("get", format!("pod {}", victim.pod), || lean(api.get(&victim.pod.name))).await?;
        let same = |pod: &Pod| pod.metadata.uid.as_deref() == Some(&*victim.uid);
        Ok(found.filter(same).map(|pod| Leaver::read(&pod)))
    }

    /// Repeats a request until it is answered; returns `None` if the object does not exist.
    async fn ask<T, R>(
        &self,
        verb: &'static str,
        what: String,
        mut request: impl FnMut() -> R,
    ) -> Result<Option<T>, WriteError>
    where
        R: Future<Output = Result<T, kube::Error>>,
    {
        let mut last = String::new();
        for attempt in 0..Self::ATTEMPTS {
            match self.send(verb, request()).await? {
                Ok(found) => return Ok(Some(found)),
                Err(Verdict::NotFound) => return Ok(None),
                Err(Verdict::Never(message)) => return Err(WriteError::Unread { what, message }),
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => last = message,
            }
            Self::pause(attempt).await;
        }
        Err(WriteError::Exhausted { what, attempts: Self::ATTEMPTS, last })
    }
}
