//! The reasons why pods wait.

use super::api;
use super::manifests::Document;
use super::workloads::Workloads;
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, ResourceExt};

/// A pod that waits.
pub(crate) struct Waiting {
    pod: Pod,
    /// The newest warning about the pod, which begins with its reason.
    reason: Option<String>,
}

/// Returns the newest warning of each waiting pod.
pub(crate) async fn reasons(client: &Client, pods: &[&Pod]) -> Vec<Waiting> {
    let mut all = Vec::new();
    for pod in pods {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        let reason = api::warning(client, &namespace, &name).await.ok().flatten();
        all.push(Waiting { pod: (*pod).clone(), reason });
    }
    all
}

impl Waiting {
    /// Returns true if the pod gets no devices in the current state of the cluster.
    pub(crate) fn is_refused(&self) -> bool {
        use aliquot_controller::report::reasons::{BUDGET_REFUSED, CLAIM_REJECTED, DOES_NOT_FIT, QUOTA};
        let said = self.reason.as_deref().unwrap_or_default();
        let refusals = [BUDGET_REFUSED, CLAIM_REJECTED, DOES_NOT_FIT, QUOTA];
        refusals.iter().any(|reason| said.starts_with(&format!("{reason}:")))
    }

    /// Returns a line with the pod's place in the files.
    pub(crate) fn line(&self, documents: &[Document], workloads: &Workloads) -> String {
        let (namespace, name) = (self.pod.namespace().unwrap_or_default(), self.pod.name_any());
        let own = documents.iter().find(|document| {
            document.text("/kind") == "Pod"
                && document.namespace() == namespace
                && document.text("/metadata/name") == name
        });
        let place = own.map(|document| &document.place).or_else(|| workloads.place_of(&self.pod));
        let place = place.map(|place| format!("{place}: ")).unwrap_or_default();
        let reason = self.reason.as_deref().unwrap_or("nobody said why");
        format!("{place}pod {namespace}/{name} cannot run: {reason}")
    }
}
