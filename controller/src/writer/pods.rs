//! Writes for pods: reservations of claims that are allocated already, and the scheduling gate.

use super::{Gates, Outcome, Verdict, WriteError, Writer};
use crate::field_manager::params;
use aliquot_allocator::schedule::Reservation;
use aliquot_allocator::snapshot::ObjectKey;
use aliquot_api::{Lean, PAGE, lean};
use aliquot_model::names::SCHEDULING_GATE;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ListParams, Patch};
use serde_json::json;

impl Writer {
    /// Reserves allocated claims for the pod, then removes the gate if there is one.
    pub(super) async fn settle(
        &self,
        pod: &ObjectKey,
        uid: &str,
        reserve: &[Reservation],
        gates: Option<Gates>,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        for Reservation { claim, user } in reserve {
            let claim = self.reserve(claim, user).await?;
            outcome.claims.push(*claim);
        }
        if let Some(gates) = gates {
            outcome.pod = self.lift(pod, uid, Some(gates)).await?;
        }
        Ok(())
    }

    /// Removes the driver's gate from a pod, first with the gates as they were seen. Returns `None` if the
    /// pod is gone.
    pub async fn lift(
        &self,
        key: &ObjectKey,
        uid: &str,
        mut seen: Option<Gates>,
    ) -> Result<Option<Pod>, WriteError> {
        let api: Api<Lean<Pod>> = Api::namespaced(self.client.clone(), &key.namespace);
        let what = format!("pod {key}");
        let mut last = String::new();
        for attempt in 0..Self::ATTEMPTS {
            let gates = match seen.take() {
                Some(gates) => gates,
                None => match self.send("get", lean(api.get(&key.name))).await? {
                    Ok(pod) if pod.metadata.uid.as_deref() == Some(uid) => {
                        let gates = gates_of(&pod);
                        if !gates.names.iter().any(|name| name == SCHEDULING_GATE) {
                            return Ok(Some(pod));
                        }
                        gates
                    }
                    Ok(_) | Err(Verdict::NotFound) => return Ok(None),
                    Err(Verdict::Never(message)) => return Err(WriteError::Refused { what, message }),
                    Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => {
                        last = message;
                        Self::pause(attempt).await;
                        continue;
                    }
                },
            };
            let kept: Vec<_> = gates
                .names
                .iter()
                .filter(|name| *name != SCHEDULING_GATE)
                .map(|name| json!({"name": name}))
                .collect();
            let patch = json!({
                "metadata": {"uid": uid, "resourceVersion": gates.version},
                "spec": {"schedulingGates": kept},
            });
            match self.send("lift", lean(api.patch(&key.name, &params(), &Patch::Merge(&patch)))).await? {
                Ok(pod) => return Ok(Some(pod)),
                Err(Verdict::NotFound) => return Ok(None),
                Err(Verdict::Never(message)) => return Err(WriteError::Refused { what, message }),
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => last = message,
            }
            Self::pause(attempt).await;
        }
        Err(WriteError::Exhausted { what, attempts: Self::ATTEMPTS, last })
    }

    /// Removes the driver's gate from every pod, for a controller that is switched off. Returns the number of
    /// pods and the failures; an error if the pods cannot be listed.
    pub async fn lift_all(&self) -> Result<(usize, Vec<WriteError>), kube::Error> {
        let api: Api<Lean<Pod>> = Api::all(self.client.clone());
        let mut lifted = 0;
        let mut failures = Vec::new();
        let mut page = ListParams::default().limit(PAGE);
        loop {
            let pods = api.list(&page).await?;
            for Lean(pod) in &pods.items {
                let gates = pod.spec.iter().flat_map(|spec| spec.scheduling_gates.iter().flatten());
                let gated = gates.into_iter().any(|gate| gate.name == SCHEDULING_GATE);
                let meta = &pod.metadata;
                let (Some(namespace), Some(name), Some(uid)) = (&meta.namespace, &meta.name, &meta.uid)
                else {
                    continue;
                };
                if gated {
                    match self.lift(&ObjectKey::new(namespace, name), uid, Some(gates_of(pod))).await {
                        Ok(_) => lifted += 1,
                        Err(error) => failures.push(error),
                    }
                }
            }
            match pods.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = ListParams::default().limit(PAGE).continue_token(&token),
                None => return Ok((lifted, failures)),
            }
        }
    }
}

fn gates_of(pod: &Pod) -> Gates {
    Gates {
        version: pod.metadata.resource_version.clone().unwrap_or_default(),
        names: pod
            .spec
            .iter()
            .flat_map(|spec| spec.scheduling_gates.iter().flatten())
            .map(|gate| gate.name.clone())
            .collect(),
    }
}
