//! Budgets on a real cluster: what is charged, what happens beyond the limit, and that nobody but the
//! nodes and the controller says so.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};

fn kind(kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("aliquot.dev", "v1alpha1", kind), plural)
}

fn budgets(client: &kube::Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &kind("GpuBudget", "gpubudgets"))
}

fn budget(namespace: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuBudget",
        "metadata": {"name": "gpu", "namespace": namespace}, "spec": spec,
    })
}

/// A field of the budget's status.
async fn status(cluster: &Cluster, namespace: &str, field: &str) -> Result<Value> {
    let budget = budgets(&cluster.client, namespace).get("gpu").await?;
    Ok(budget.data.pointer(&format!("/status/{field}")).cloned().unwrap_or_default())
}

/// GPU-hours used.
async fn used(cluster: &Cluster, namespace: &str) -> Result<f64> {
    let text = status(cluster, namespace, "used").await?;
    Ok(text.as_str().context("nothing is counted yet")?.parse()?)
}

async fn state(cluster: &Cluster, namespace: &str, wanted: &str) -> Result<()> {
    cluster
        .wait_for(&format!("the budget to be {wanted}"), || async {
            Ok((status(cluster, namespace, "state").await? == json!(wanted)).then_some(()))
        })
        .await
}

#[test]
fn a_malformed_budget_is_refused_with_the_field_named() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("budget-form").await?;
        let api = budgets(&cluster.client, &namespace);
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let create = async |spec: Value| -> Result<Option<String>> {
            let object: DynamicObject = serde_json::from_value(budget(&namespace, spec))?;
            match api.create(&dry, &object).await {
                Ok(_) => Ok(None),
                Err(kube::Error::Api(status)) => Ok(Some(status.message.clone())),
                Err(error) => Err(error.into()),
            }
        };
        let good = [
            json!({"gpuHours": 100, "window": {"calendar": "Month"}}),
            json!({"gpuHours": "2.5", "window": {"rolling": "24h"}, "enforcement": "Refuse"}),
            json!({"gpuHours": 0, "window": {"rolling": "744h"}, "enforcement": "LowerPriority", "lowerPriorityClassName": "low"}),
        ];
        for spec in good {
            let said = create(spec.clone()).await?;
            ensure!(said.is_none(), "{spec} was refused: {said:?}");
        }
        let bad = [
            (json!({"window": {"calendar": "Month"}}), "spec.gpuHours"),
            (json!({"gpuHours": -1, "window": {"calendar": "Month"}}), "spec.gpuHours"),
            (json!({"gpuHours": "many", "window": {"calendar": "Month"}}), "spec.gpuHours"),
            (json!({"gpuHours": 1, "window": {}}), "either rolling or calendar"),
            (
                json!({"gpuHours": 1, "window": {"calendar": "Day", "rolling": "1h"}}),
                "either rolling or calendar",
            ),
            (json!({"gpuHours": 1, "window": {"calendar": "Year"}}), "spec.window.calendar"),
            (json!({"gpuHours": 1, "window": {"rolling": "1000h"}}), "spec.window.rolling"),
            (json!({"gpuHours": 1, "window": {"rolling": "1d"}}), "spec.window.rolling"),
            (json!({"gpuHours": 1, "window": {"calendar": "Day"}, "enforcement": "Ask"}), "spec.enforcement"),
            (
                json!({"gpuHours": 1, "window": {"calendar": "Day"}, "enforcement": "LowerPriority"}),
                "spec.lowerPriorityClassName",
            ),
            (
                json!({"gpuHours": 1, "window": {"calendar": "Day"}, "lowerPriorityClassName": "low"}),
                "spec.lowerPriorityClassName",
            ),
        ];
        for (spec, field) in bad {
            let said = create(spec.clone()).await?.with_context(|| format!("{spec} was accepted"))?;
            ensure!(said.contains(field), "{spec}: {said}");
        }
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn used_grows_while_a_pod_runs_and_stops_when_it_ends() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("budget-use").await?;
        cluster.create(&[
            budget(&namespace, json!({"gpuHours": 10, "window": {"calendar": "Month"}})),
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            PodManifest::of_template(&namespace, "user", "gpu").build(),
        ])?;
        cluster.running(&namespace, "user").await?;
        cluster
            .wait_for("a whole GPU to be charged", || async {
                let charged = status(cluster, &namespace, "gpus").await? == json!("1");
                Ok((charged && used(cluster, &namespace).await? > 0.002).then_some(()))
            })
            .await?;
        let first = used(cluster, &namespace).await?;
        cluster
            .wait_for("more to be used", || async {
                Ok((used(cluster, &namespace).await? > first + 0.003).then_some(()))
            })
            .await?;
        let shown = cluster.kubectl(&["-n", &namespace, "get", "gpubudgets"])?;
        for column in ["LIMIT", "USED", "REMAINING", "WINDOW", "STATE", "PROJECTED END", "Month", "Within"] {
            ensure!(shown.contains(column), "{column} is missing: {shown}");
        }
        cluster.delete_pod(&namespace, "user").await?;
        cluster.pod_gone(&namespace, "user").await?;
        cluster
            .wait_for("nothing to be charged", || async {
                Ok((status(cluster, &namespace, "claims").await? == json!(0)).then_some(()))
            })
            .await?;
        let last = used(cluster, &namespace).await?;
        cluster
            .holds_for(std::time::Duration::from_secs(20), || async {
                ensure!((used(cluster, &namespace).await? - last).abs() < 0.0015, "used goes on");
                Ok(())
            })
            .await?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn beyond_a_refusing_budget_pods_wait_with_the_reason_and_run_when_there_is_more() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("budget-refuse").await?;
        // Nine seconds of a whole GPU.
        let terms = json!({"gpuHours": "0.0025", "window": {"rolling": "10m"}, "enforcement": "Refuse"});
        cluster.create(&[
            budget(&namespace, terms),
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            objects::template(&namespace, "share", &[objects::share("gpu", "1Gi", 5)]),
            PodManifest::of_template(&namespace, "first", "gpu").build(),
        ])?;
        cluster.running(&namespace, "first").await?;
        state(cluster, &namespace, "Over").await?;
        cluster.event(&namespace, "BudgetUsedUp").await?;
        cluster.create(&[PodManifest::of_template(&namespace, "second", "share").build()])?;
        let said = cluster.event(&namespace, "BudgetRefused").await?;
        for part in [format!("{namespace}/gpu"), "of 0.0025 GPU-hours".to_owned(), "frees up at".to_owned()] {
            ensure!(said.contains(&part), "{part} is missing: {said}");
        }
        // What runs goes on.
        cluster.shell(&namespace, "first", "main", "cuda-probe")?;
        let more = json!({"spec": {"gpuHours": 5}});
        budgets(&cluster.client, &namespace)
            .patch("gpu", &PatchParams::default(), &Patch::Merge(&more))
            .await?;
        state(cluster, &namespace, "Within").await?;
        cluster.running(&namespace, "second").await?;
        cluster.delete_namespace(&namespace).await
    })
}
