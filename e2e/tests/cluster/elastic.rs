//! Limits of shares that are raised and lowered while their programs run.

use crate::support::{GIB, on_cluster};
use aliquot_api::v1alpha1::NodeLimitsSpec;
use aliquot_api::v1alpha1::node_limits::ShareLimit;
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::look::device_names;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_model::names::{COMPANION_OF, LIMITS};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const NAMESPACE: &str = "resize";
const CLAIM: &str = "notebook";

fn limits(client: kube::Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("aliquot.dev", "v1alpha1", "NodeLimits");
    Api::all_with(client, &ApiResource::from_gvk_with_plural(&kind, "nodelimits"))
}

/// What the cluster's node is told of a claim's shares.
async fn told(cluster: &Cluster, claim: &str) -> Result<Vec<ShareLimit>> {
    let object = limits(cluster.client.clone()).get_opt(cluster.setting("NODE_NAME")?).await?;
    let spec = object.and_then(|object| object.data.get("spec").cloned());
    let spec: NodeLimitsSpec = spec.map(serde_json::from_value).transpose()?.unwrap_or_default();
    Ok(spec.shares.into_iter().filter(|limit| limit.name == claim).collect())
}

/// Claims that hold what a share grew by, with what they have.
async fn companions(cluster: &Cluster, namespace: &str) -> Result<Vec<BTreeMap<String, String>>> {
    let claims = cluster.claims().await?;
    let ours = claims.into_iter().filter(|claim| {
        claim.namespace().as_deref() == Some(namespace) && claim.annotations().contains_key(COMPANION_OF)
    });
    Ok(ours
        .map(|claim| {
            let devices = claim.status.and_then(|status| status.allocation).and_then(|a| a.devices);
            let results = devices.and_then(|devices| devices.results).unwrap_or_default();
            let consumed = results.into_iter().filter_map(|result| result.consumed_capacity).flatten();
            consumed.map(|(name, amount)| (name, amount.0)).collect()
        })
        .collect())
}

fn consumed(memory: &str, cores: &str) -> BTreeMap<String, String> {
    [("memory", memory), ("cores", cores), ("slots", "0")]
        .into_iter()
        .map(|(name, amount)| (name.to_owned(), amount.to_owned()))
        .collect()
}

fn ask(cluster: &Cluster, namespace: &str, wish: &str) -> Result<String> {
    let annotation = format!("{LIMITS}={wish}");
    cluster.kubectl(&["-n", namespace, "annotate", "--overwrite", "resourceclaim", CLAIM, &annotation])
}

/// Figures of memory that the running program has printed, each once until it is another.
async fn seen(cluster: &Cluster, wanted: &[u64]) -> Result<()> {
    let path = format!("a program that sees {wanted:?} GiB one after the other");
    cluster
        .wait_for(&path, || async {
            let log = cluster.kubectl(&["-n", NAMESPACE, "logs", "notebook"])?;
            let mut figures: Vec<&str> = log.lines().collect();
            figures.dedup();
            let shown: Vec<String> = wanted.iter().map(|gib| format!("{} MiB", gib << 10)).collect();
            // Of one process, whose CUDA was there before the limit changed.
            let watched = cluster.shell(NAMESPACE, "notebook", "main", "cat /tmp/watched")?;
            let watched: Vec<u64> = watched
                .lines()
                .filter_map(|line| serde_json::from_str::<Value>(line).ok()?.get("total_bytes")?.as_u64())
                .collect();
            let bytes: Vec<u64> = wanted.iter().map(|gib| gib * GIB).collect();
            Ok((figures == shown && watched == bytes).then_some(()))
        })
        .await
}

async fn settled(cluster: &Cluster, namespace: &str, wanted: &[BTreeMap<String, String>]) -> Result<()> {
    cluster
        .wait_for(&format!("companions {wanted:?}"), || async {
            Ok((companions(cluster, namespace).await? == wanted).then_some(()))
        })
        .await
}

#[test]
fn a_running_program_sees_a_larger_and_then_a_smaller_limit_without_a_restart() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let path = cluster.repo().join("examples/13-resize/13-resize.yaml");
        cluster.apply(&std::fs::read_to_string(&path).with_context(|| path.display().to_string())?)?;
        cluster.running(NAMESPACE, "notebook").await?;
        let watch = "setsid cuda-probe --watch </dev/null >/tmp/watched 2>&1 &";
        cluster.shell(NAMESPACE, "notebook", "main", watch)?;
        seen(cluster, &[10]).await?;
        ask(cluster, NAMESPACE, "memory=20Gi,cores=50")?;
        seen(cluster, &[10, 20]).await?;
        settled(cluster, NAMESPACE, &[consumed("10Gi", "20")]).await?;
        cluster.event(NAMESPACE, "may use 20Gi of memory and 50 percent of compute").await?;
        // The next controller goes on where this one was, and so does the next agent.
        cluster.kubectl(&["-n", SYSTEM, "rollout", "restart", "deployment/aliquot-controller"])?;
        cluster.renew_agent().await?;
        cluster.ready().await?;
        ask(cluster, NAMESPACE, "memory=12Gi,cores=30")?;
        seen(cluster, &[10, 20, 12]).await?;
        settled(cluster, NAMESPACE, &[consumed("2Gi", "0")]).await?;
        ask(cluster, NAMESPACE, "memory=4Gi,cores=10")?;
        seen(cluster, &[10, 20, 12, 4]).await?;
        settled(cluster, NAMESPACE, &[]).await?;
        let shares = told(cluster, CLAIM).await?;
        let figures: Vec<_> = shares.iter().map(|limit| (limit.memory_bytes, limit.cores_percent)).collect();
        ensure!(figures == [(4 * GIB, 10)], "below the allocation only the limit sinks: {figures:?}");
        let whole = cluster.allocation(NAMESPACE, CLAIM).await?;
        let results = whole.devices.and_then(|devices| devices.results).unwrap_or_default();
        let reserved = results.iter().find_map(|result| result.consumed_capacity.as_ref()?.get("memory"));
        ensure!(reserved.is_some_and(|memory| memory.0 == "10Gi"), "the reservation stays: {reserved:?}");
        ask(cluster, NAMESPACE, "cores=90")?;
        seen(cluster, &[10, 20, 12, 4, 10]).await?;
        settled(cluster, NAMESPACE, &[consumed("0", "60")]).await?;
        // The pod ends while the share is larger: nothing of it may stay.
        cluster.delete_pod(NAMESPACE, "notebook").await?;
        settled(cluster, NAMESPACE, &[]).await?;
        ensure!(told(cluster, CLAIM).await?.is_empty(), "the node is told nothing any more");
        cluster.delete_namespace(NAMESPACE).await
    })
}

#[test]
fn what_a_share_still_uses_is_given_to_nobody_else() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("shrink").await?;
        cluster.create(&[
            objects::claim(&namespace, CLAIM, &[objects::share("gpu", "2Gi", 10)]),
            PodManifest::of_claim(&namespace, "user", CLAIM).build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        ask(cluster, &namespace, "memory=20Gi")?;
        settled(cluster, &namespace, &[consumed("18Gi", "0")]).await?;
        cluster
            .wait_for("a share of 20 GiB", || async {
                let shell = "cuda-probe --occupy 1";
                let out = cluster.shell(&namespace, "user", "main", shell)?;
                Ok(out.contains(&format!("\"total_bytes\":{}", 20 * GIB)).then_some(()))
            })
            .await?;
        let occupy = format!(
            "cuda-probe --hold --occupy {} >/tmp/out 2>&1 </dev/null & echo $! >/tmp/pid; sleep 2; cat /tmp/out",
            15 * GIB
        );
        let out = cluster.shell(&namespace, "user", "main", &occupy)?;
        ensure!(out.contains("allocated_bytes"), "{out}");
        ask(cluster, &namespace, "memory=2Gi")?;
        let node = cluster.setting("NODE_NAME")?;
        cluster
            .wait_for("a node that says that more is used", || async {
                let object = limits(cluster.client.clone()).get(node).await?;
                let used = object.data.pointer("/status/beyond/0/usedBytes").and_then(Value::as_u64);
                Ok(used.filter(|used| *used > 15 * GIB))
            })
            .await?;
        // What runs goes on, and gets no more.
        let more = cluster.shell(
            &namespace,
            "user",
            "main",
            &format!("cuda-probe --occupy {}; kill -0 $(cat /tmp/pid)", 1 << 20),
        );
        let more = more.unwrap_or_else(|error| format!("{error:#}"));
        ensure!(
            more.contains("out of memory") || more.contains("OUT_OF_MEMORY") || more.contains("error"),
            "{more}"
        );
        ensure!(companions(cluster, &namespace).await? == [consumed("18Gi", "0")], "it is still reserved");
        cluster.shell(&namespace, "user", "main", "kill $(cat /tmp/pid)")?;
        settled(cluster, &namespace, &[]).await?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_share_of_a_template_grows_for_programs_that_start_later_too() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("grow").await?;
        cluster.create(&[
            objects::template(&namespace, "share", &[objects::share("gpu", "2Gi", 10)]),
            PodManifest::of_template(&namespace, "user", "share").build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        let claim = cluster.claim_of(&namespace, "user").await?;
        let annotation = format!("{LIMITS}=memory=6Gi");
        cluster.kubectl(&["-n", &namespace, "annotate", "resourceclaim", &claim, &annotation])?;
        // The environment still says 2 GiB, as the node wrote it.
        cluster
            .wait_for("a new program that sees 6 GiB", || async {
                let out = cluster.shell(&namespace, "user", "main", "env | grep MEMORY_LIMIT; cuda-probe")?;
                ensure!(out.contains("CUDA_DEVICE_MEMORY_LIMIT_0=2048m"), "{out}");
                Ok(out.contains(&format!("\"total_bytes\":{}", 6 * GIB)).then_some(()))
            })
            .await?;
        let lower = cluster.shell(&namespace, "user", "main", "CUDA_DEVICE_MEMORY_LIMIT_0=1g cuda-probe")?;
        ensure!(
            lower.contains(&format!("\"total_bytes\":{GIB}")),
            "it can still be lowered by hand: {lower}"
        );
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn only_the_controller_grants_and_mistakes_are_answered_at_once() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("wishes").await?;
        cluster.create(&[
            objects::claim(&namespace, CLAIM, &[objects::share("gpu", "2Gi", 10)]),
            objects::claim(&namespace, "whole", &[objects::request("gpu", "gpu.aliquot.dev")]),
            PodManifest::of_claim(&namespace, "user", CLAIM).build(),
            PodManifest::of_claim(&namespace, "other", "whole").build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        cluster.running(&namespace, "other").await?;
        for (claim, wish, words) in [
            (CLAIM, "memory=lots", "is no quantity"),
            (CLAIM, "cores=0", "from 1 to 100"),
            (CLAIM, "model: memory=3Gi", "names request model, which the claim does not have; it has gpu"),
            (CLAIM, "memory=4000Gi", "asks for 4000Gi of memory, but its device"),
            ("whole", "memory=3Gi", "only shares"),
        ] {
            let annotation = format!("{LIMITS}={wish}");
            let answer =
                cluster.kubectl(&["-n", &namespace, "annotate", "resourceclaim", claim, &annotation]);
            let said = answer.map_or_else(|error| format!("{error:#}"), |out| format!("accepted: {out}"));
            ensure!(said.contains("limits.aliquot.dev") && said.contains(words), "{wish}: {said}");
        }
        let refused = |what: &str, answer: kube::Result<()>, words: &str| match answer {
            Ok(()) => anyhow::bail!("{what} was accepted"),
            Err(kube::Error::Api(status)) => {
                ensure!(status.message.contains(words), "{what}: {}", status.message);
                Ok(())
            }
            Err(other) => Err(other).context(what.to_owned()),
        };
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let claims = Api::<ResourceClaim>::namespaced(cluster.client.clone(), &namespace);
        let forged = serde_json::from_value(json!({
            "metadata": {"name": "forged", "annotations": {COMPANION_OF: "notebook/uid/share"}},
            "spec": objects::claim(&namespace, "x", &[objects::share("gpu", "2Gi", 10)])["spec"],
        }))?;
        let answer = claims.create(&dry, &forged).await.map(drop);
        refused("a companion by a tenant", answer, "only the controller may set the annotation")?;
        let patch = Patch::Merge(json!({"metadata": {"annotations": {COMPANION_OF: "notebook/uid/share"}}}));
        let answer = claims.patch(CLAIM, &PatchParams::default(), &patch).await.map(drop);
        refused("a claim that becomes a companion", answer, "cannot be changed")?;
        let node = cluster.setting("NODE_NAME")?;
        let object: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "NodeLimits", "metadata": {"name": "elsewhere"},
            "spec": {"shares": []},
        }))?;
        let answer = limits(cluster.client.clone()).create(&dry, &object).await.map(drop);
        refused("limits by an administrator", answer, "only the controller may write what shares of node")?;
        let controllers = cluster.system_pods("controller").await?;
        let controller =
            cluster.client_of_pod("aliquot-controller", controllers.first().context("none")?).await?;
        let theirs = Api::<ResourceClaim>::namespaced(controller, &namespace);
        let answer = theirs.delete(CLAIM, &kube::api::DeleteParams::default().dry_run()).await.map(drop);
        refused("a claim's deletion by the controller", answer, "deletes no claims but companions")?;
        // And one that exists answers only to its own node's agent.
        ask(cluster, &namespace, "memory=1Gi")?;
        cluster
            .wait_for("limits", || async { Ok((!told(cluster, CLAIM).await?.is_empty()).then_some(())) })
            .await?;
        let patch = Patch::Merge(json!({"status": {"observedGeneration": 99}}));
        let answer = limits(cluster.client.clone()).patch_status(node, &PatchParams::default(), &patch).await;
        refused("an answer by an administrator", answer.map(drop), "may answer for its limits")?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_share_that_does_not_fit_any_larger_waits_and_says_so() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("full").await?;
        cluster.create(&[
            objects::claim(&namespace, CLAIM, &[objects::share("gpu", "2Gi", 60)]),
            PodManifest::of_claim(&namespace, "user", CLAIM).build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        let device = device_names(&cluster.allocation(&namespace, CLAIM).await?);
        let uuid = cluster.shell(&namespace, "user", "main", "cuda-probe --occupy 1")?;
        let uuid: Value = serde_json::from_str(uuid.lines().next().context("no line")?)?;
        let uuid = uuid.pointer("/devices/0/uuid").and_then(Value::as_str).context("no uuid")?;
        let beside = {
            let mut request = objects::share("gpu", "1Gi", 30);
            let expression = format!("device.attributes[\"gpu.aliquot.dev\"].uuid == \"{uuid}\"");
            request["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
            request
        };
        cluster.create(&[
            objects::claim(&namespace, "beside", &[beside]),
            PodManifest::of_claim(&namespace, "beside", "beside").build(),
        ])?;
        cluster.running(&namespace, "beside").await?;
        ensure!(device_names(&cluster.allocation(&namespace, "beside").await?) == device);
        ask(cluster, &namespace, "cores=80")?;
        cluster.event(&namespace, "does not have 0 and 20 percent of compute left").await?;
        ensure!(companions(cluster, &namespace).await?.is_empty());
        cluster.delete_pod(&namespace, "beside").await?;
        settled(cluster, &namespace, &[consumed("0", "20")]).await?;
        cluster.delete_namespace(&namespace).await
    })
}
