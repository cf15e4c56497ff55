//! `aliquot uninstall`: removes the product from a cluster, in an order that never blocks a pod or a claim.
//!
//! First new pods get no gate any more, then nothing is allocated, then no gate is left. The node agents hand
//! over to [`farewell`] pods, and the product's files on the nodes are removed with them. Devices with their
//! taints, idle allocations, policies and classes follow. Running containers are not touched: their pods end
//! as usual, because a farewell pod unprepares their claims and completes when the last claim is gone.

mod farewell;
mod mps;

use crate::args::UninstallArgs;
use crate::client::connect;
use crate::snapshot;
use aliquot_allocator::compaction::ALLOWANCE;
use aliquot_allocator::hold::is_hold;
use aliquot_model::names::{CLAIM_FINALIZER, COMPANION_OF, HOLD_OF, KEYS, RETENTION_RECORD, SCHEDULING_GATE};
use anyhow::{Context, Result};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
    ValidatingWebhookConfiguration,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PropagationPolicy};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::fmt::Debug;
use std::time::{Duration, Instant};

const WEBHOOK: &str = "aliquot";
const CONTROLLER: &str = "aliquot-controller";
const AGENT: &str = "aliquot-kubelet-plugin";
const MPS: &str = "aliquot-mps";
/// The webhook's certificate, which the controllers make.
const CERTIFICATE: &str = "aliquot-webhook-tls";
const POLICIES: [&str; 20] = [
    "aliquot-node-slices",
    "aliquot-node-claims",
    "aliquot-node-pods",
    "aliquot-controller-pods",
    "aliquot-controller-nodes",
    "aliquot-controller-records",
    "aliquot-fenced-writes",
    "aliquot-tolerations",
    "aliquot-blanket-tolerations",
    "aliquot-finalizer",
    "aliquot-allocations",
    "aliquot-hold-claims",
    "aliquot-shares",
    "aliquot-share-demands",
    "aliquot-node-usage",
    "aliquot-node-limits",
    "aliquot-node-limits-status",
    "aliquot-limits",
    "aliquot-companions",
    "aliquot-budget-status",
];
const CLASSES: [&str; 8] = [
    "gpu.aliquot.dev",
    "mig.aliquot.dev",
    "mig-share.aliquot.dev",
    "share.aliquot.dev",
    "timeslice.aliquot.dev",
    "mps.aliquot.dev",
    "vfio.aliquot.dev",
    "admin.aliquot.dev",
];

/// An uninstallation, or a dry run of one.
struct Uninstall {
    client: Client,
    args: UninstallArgs,
}

/// Runs `aliquot uninstall`.
///
/// # Errors
/// If a step failed. The command can be run again, because every step is idempotent.
pub(crate) async fn run(args: UninstallArgs) -> Result<()> {
    let client = connect(&args.cluster).await?;
    let uninstall = Uninstall { client, args };
    uninstall.not_elsewhere().await?;
    uninstall.webhook().await.context("cannot remove the webhook")?;
    uninstall.controller().await.context("cannot stop the controller")?;
    uninstall.gates().await.context("cannot lift scheduling gates")?;
    farewell::hand_over(&uninstall).await.context("cannot hand running claims over to farewell pods")?;
    mps::leave(&uninstall).await.context("cannot stop the supervisors of MPS daemons")?;
    let kept = farewell::replace_agents(&uninstall).await.context("cannot stop the node agents")?;
    uninstall.devices().await.context("cannot withdraw devices")?;
    uninstall.allocations().await.context("cannot release idle claims")?;
    uninstall.policies().await.context("cannot remove policies")?;
    uninstall.classes().await.context("cannot remove DeviceClasses")?;
    uninstall.notes().await.context("cannot remove what the controllers wrote down")?;
    if !uninstall.args.yes {
        say!("nothing was changed; add --yes to do it");
    }
    for left in kept {
        say!("our files stay: {left}");
    }
    Ok(())
}

impl Uninstall {
    fn all<K: Resource<DynamicType = ()>>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }

    fn own<K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.args.namespace)
    }

    /// Returns an error if the controller is in another namespace: it would go on running, and the steps here
    /// would be out of order.
    async fn not_elsewhere(&self) -> Result<()> {
        let parts = ListParams::default().labels("app.kubernetes.io/name=aliquot");
        let deployments = self.all::<Deployment>().list(&parts).await.context("cannot list Deployments")?;
        let daemons = self.all::<DaemonSet>().list(&parts).await.context("cannot list DaemonSets")?;
        let controllers = deployments.iter().filter(|found| found.name_any() == CONTROLLER);
        let agents = daemons.iter().filter(|found| found.name_any() == AGENT);
        let found: Vec<String> = controllers
            .filter_map(ResourceExt::namespace)
            .chain(agents.filter_map(ResourceExt::namespace))
            .collect();
        let here = &self.args.namespace;
        match found.first().filter(|_| !found.contains(here)) {
            Some(other) => anyhow::bail!(
                "Aliquot is installed in namespace {other}, not in {here}; use --namespace {other}. Nothing was changed"
            ),
            None => Ok(()),
        }
    }

    /// Prints what is done; returns false in a dry run, in which it must not be done.
    fn act(&self, what: &str) -> bool {
        say!("{}{what}", if self.args.yes { "" } else { "would " });
        self.args.yes
    }

    /// Deletes an object and what it owns; a missing object is no error.
    async fn delete<K>(&self, api: &Api<K>, name: &str) -> Result<()>
    where
        K: Clone + DeserializeOwned + Debug + Resource<DynamicType = ()>,
    {
        if api.get_opt(name).await?.is_none() || !self.act(&format!("delete {} {name}", K::kind(&()))) {
            return Ok(());
        }
        let params = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Background),
            ..DeleteParams::default()
        };
        match api.delete(name, &params).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            result => result.map(drop).map_err(Into::into),
        }
    }

    async fn webhook(&self) -> Result<()> {
        self.delete(&self.all::<ValidatingWebhookConfiguration>(), WEBHOOK).await?;
        self.delete(&self.all::<MutatingWebhookConfiguration>(), WEBHOOK).await
    }

    async fn controller(&self) -> Result<()> {
        self.delete(&self.own::<Deployment>(), CONTROLLER).await?;
        self.wait_for_pods("controller").await
    }

    /// Waits until no pod of a component runs: two allocators or publishers must never run at the same time.
    async fn wait_for_pods(&self, component: &str) -> Result<()> {
        let of_component = ListParams::default()
            .labels(&format!("app.kubernetes.io/name=aliquot,app.kubernetes.io/component={component}"));
        if !self.args.yes {
            return Ok(());
        }
        let started = Instant::now();
        loop {
            let left = self.own::<Pod>().list(&of_component).await?.items;
            if left.is_empty() {
                return Ok(());
            }
            if started.elapsed() > self.args.timeout {
                let names: Vec<String> = left.iter().map(ResourceExt::name_any).collect();
                anyhow::bail!(
                    "still running after {} s: {}; run the command again",
                    self.args.timeout.as_secs(),
                    names.join(", ")
                );
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Removes the driver's gate from pods; the gates of others stay.
    async fn gates(&self) -> Result<()> {
        for pod in snapshot::lean::<Pod>(&self.client).await? {
            let gates = pod.spec.as_ref().and_then(|s| s.scheduling_gates.as_ref());
            let Some(position) = gates.and_then(|g| g.iter().position(|g| g.name == SCHEDULING_GATE)) else {
                continue;
            };
            let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
            if !self.act(&format!("lift the scheduling gate of pod {namespace}/{name}")) {
                continue;
            }
            // The test operation prevents that another gate is removed if the position has changed meanwhile.
            let path = format!("/spec/schedulingGates/{position}");
            let patch = serde_json::from_value(json!([
                {"op": "test", "path": path, "value": {"name": SCHEDULING_GATE}},
                {"op": "remove", "path": path},
            ]))?;
            let api = Api::<Pod>::namespaced(self.client.clone(), &namespace);
            let patched = api.patch(&name, &PatchParams::default(), &Patch::Json::<Pod>(patch)).await;
            ignore_absent(patched.map(drop)).with_context(|| format!("pod {namespace}/{name}"))?;
        }
        Ok(())
    }

    /// Deletes slices with their devices and taints; running containers keep their devices.
    async fn devices(&self) -> Result<()> {
        let of_driver = ListParams::default().fields(&format!("spec.driver={}", self.args.driver_name));
        let api = self.all::<ResourceSlice>();
        for slice in api.list(&of_driver).await? {
            self.delete(&api, &slice.name_any()).await?;
        }
        Ok(())
    }

    /// Releases claims with devices of this driver that no pod uses, because nobody else would release them.
    /// From a claim that is kept while a pod uses it, only the driver's own entry is removed, so that
    /// kube-controller-manager releases the claim after its last pod.
    async fn allocations(&self) -> Result<()> {
        for claim in snapshot::lean::<ResourceClaim>(&self.client).await? {
            if claim.annotations().contains_key(COMPANION_OF) {
                self.companion(&claim).await?;
                continue;
            }
            let status = claim.status.clone().unwrap_or_default();
            let results =
                status.allocation.and_then(|a| a.devices).and_then(|d| d.results).unwrap_or_default();
            let consumers = status.reserved_for.unwrap_or_default();
            let pods: Vec<_> = consumers.iter().filter(|consumer| !is_hold(consumer)).collect();
            let ours = results.iter().any(|r| r.driver == self.args.driver_name);
            if !ours || (!pods.is_empty() && pods.len() == consumers.len()) {
                continue;
            }
            let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
            let (what, after) = if pods.is_empty() {
                ("which nobody uses", json!({"allocation": null, "reservedFor": null}))
            } else {
                ("which is retained, once its pods have ended", json!({"reservedFor": pods}))
            };
            if !self.act(&format!("release claim {namespace}/{name}, {what}")) {
                continue;
            }
            let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &namespace);
            let patch = json!({"metadata": {"resourceVersion": claim.resource_version()}, "status": after});
            let written = match api.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Err(kube::Error::Api(status)) if status.code == 404 => continue,
                other => other.with_context(|| format!("claim {namespace}/{name}"))?,
            };
            if !pods.is_empty() {
                continue;
            }
            let kept: Vec<&String> = written.finalizers().iter().filter(|f| *f != CLAIM_FINALIZER).collect();
            let patch =
                json!({"metadata": {"resourceVersion": written.resource_version(), "finalizers": kept}});
            let patched = api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
            ignore_absent(patched.map(drop)).with_context(|| format!("claim {namespace}/{name}"))?;
        }
        self.hold_claims().await
    }

    /// Deletes the claims that the controller made to keep the devices of ended pods, and the controller's
    /// records for them.
    async fn hold_claims(&self) -> Result<()> {
        for claim in snapshot::lean::<ResourceClaim>(&self.client).await? {
            if claim.annotations().contains_key(HOLD_OF) {
                let namespace = claim.namespace().unwrap_or_default();
                let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &namespace);
                self.delete(&api, &claim.name_any()).await?;
            }
        }
        let config_maps = self.own::<ConfigMap>();
        for record in
            config_maps.list(&ListParams::default().labels(&format!("{RETENTION_RECORD}=true"))).await?
        {
            self.delete(&config_maps, &record.name_any()).await?;
        }
        self.delete(&config_maps, ALLOWANCE).await?;
        Ok(())
    }

    /// Deletes a claim that holds what a share grew by, because nobody else would delete it. The node goes on
    /// granting the share's limit as long as its pod runs.
    async fn companion(&self, claim: &ResourceClaim) -> Result<()> {
        let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
        if !self.act(&format!("delete claim {namespace}/{name}, which holds what a share grew by")) {
            return Ok(());
        }
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &namespace);
        let patch = json!({
            "metadata": {"uid": claim.metadata.uid}, "status": {"allocation": null, "reservedFor": null}});
        let patched = api.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
        ignore_absent(patched.map(drop)).with_context(|| format!("claim {namespace}/{name}"))?;
        let kept: Vec<&String> = claim.finalizers().iter().filter(|f| *f != CLAIM_FINALIZER).collect();
        let patch = json!({"metadata": {"uid": claim.metadata.uid, "finalizers": kept}});
        let patched = api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
        ignore_absent(patched.map(drop)).with_context(|| format!("claim {namespace}/{name}"))?;
        let deleted = api.delete(&name, &DeleteParams::default()).await;
        ignore_absent(deleted.map(drop)).with_context(|| format!("claim {namespace}/{name}"))
    }

    async fn policies(&self) -> Result<()> {
        for name in POLICIES {
            self.delete(&self.all::<ValidatingAdmissionPolicyBinding>(), name).await?;
            self.delete(&self.all::<ValidatingAdmissionPolicy>(), name).await?;
        }
        Ok(())
    }

    async fn classes(&self) -> Result<()> {
        for name in CLASSES {
            self.delete(&self.all::<DeviceClass>(), name).await?;
        }
        Ok(())
    }

    /// Deletes what controllers recorded for one another: their Lease, the webhook's certificate, and notes
    /// on Nodes. Annotations by administrators stay.
    async fn notes(&self) -> Result<()> {
        self.delete(&self.own::<Lease>(), CONTROLLER).await?;
        self.delete(&self.own::<Secret>(), CERTIFICATE).await?;
        let nodes = self.all::<Node>();
        for node in nodes.list_metadata(&ListParams::default()).await? {
            let name = node.name_any();
            for note in notes_on_nodes() {
                if !node.annotations().contains_key(note)
                    || !self.act(&format!("remove the annotation {note} of Node {name}"))
                {
                    continue;
                }
                let patch = json!({"metadata": {"annotations": {note: null}}});
                let patched =
                    nodes.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
                ignore_absent(patched.map(drop)).with_context(|| format!("Node {name}"))?;
            }
        }
        Ok(())
    }
}

/// The annotations of Nodes that the controller writes.
fn notes_on_nodes() -> impl Iterator<Item = &'static str> {
    KEYS.iter().filter(|key| key.of == "Node" && key.by == "the controller").map(|key| key.name)
}

fn ignore_absent(result: kube::Result<()>) -> kube::Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_note_of_the_controllers_on_a_node_is_removed() {
        use aliquot_model::names::{GOING_BACK, HAND_OVER_ACKNOWLEDGED, SCHEDULER_IDLE};
        let notes: Vec<_> = notes_on_nodes().collect();
        assert_eq!(notes, [GOING_BACK, HAND_OVER_ACKNOWLEDGED, SCHEDULER_IDLE]);
    }

    #[test]
    fn no_policy_and_no_class_of_the_chart_is_left_behind() {
        let manifests = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/manifests/aliquot.yaml");
        let manifests = std::fs::read_to_string(manifests).expect("the rendered chart");
        let names = |kind: &str| -> Vec<String> {
            let objects =
                manifests.split("\n---\n").filter(|object| object.contains(&format!("\nkind: {kind}\n")));
            let name = |object: &str| {
                let (_, metadata) = object.split_once("\nmetadata:\n").expect("metadata");
                metadata
                    .trim_start()
                    .strip_prefix("name: ")
                    .expect("a name")
                    .lines()
                    .next()
                    .map(str::to_owned)
            };
            let mut names: Vec<String> = objects.filter_map(name).collect();
            names.sort();
            names
        };
        let sorted = |names: &[&str]| {
            let mut names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            names.sort();
            names
        };
        assert_eq!(names("ValidatingAdmissionPolicy"), sorted(&POLICIES));
        assert_eq!(names("ValidatingAdmissionPolicyBinding"), sorted(&POLICIES));
        assert_eq!(classes(), sorted(&CLASSES));
    }

    /// Also those that the chart makes only where something is switched on.
    fn classes() -> Vec<String> {
        let templates = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/helm/aliquot/templates");
        let mut names = Vec::new();
        for entry in std::fs::read_dir(templates).expect("the chart").flatten() {
            let text = std::fs::read_to_string(entry.path()).expect("a template");
            if text.contains("\nkind: DeviceClass\n") {
                let name = text.lines().find_map(|line| line.strip_prefix("  name: ")).expect("a name");
                names.push(name.to_owned());
            }
        }
        names.sort();
        names
    }

    #[test]
    fn the_charts_hook_may_delete_whatever_the_command_deletes() {
        let hook =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/helm/aliquot/templates/hook-uninstall.yaml");
        let hook = std::fs::read_to_string(hook).expect("the hook");
        let names: Vec<&str> = hook.split([' ', ',', '[', ']', '\n']).collect();
        for name in POLICIES.iter().chain(&CLASSES).chain(&[WEBHOOK, CONTROLLER, AGENT, MPS]) {
            assert!(names.contains(name), "{name}");
        }
    }
}
