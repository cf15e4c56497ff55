//! Budgets on a real cluster: what is charged, what happens beyond the limit, and that nobody but the
//! nodes and the controller says so.

use crate::support::{on_any_cluster, on_cluster};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_e2e::process;
use aliquot_model::names::ALLOCATION;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn kind(kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("aliquot.dev", "v1alpha1", kind), plural)
}

fn budgets(client: &Client, namespace: &str) -> Api<DynamicObject> {
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
    on_any_cluster(async |cluster: &Cluster| {
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
            .holds_for(Duration::from_secs(20), || async {
                ensure!((used(cluster, &namespace).await? - last).abs() < 0.0015, "used goes on");
                Ok(())
            })
            .await?;
        cluster.delete_namespace(&namespace).await
    })
}

fn example(cluster: &Cluster, file: &str) -> Result<()> {
    let path = cluster.repo().join("examples/08-budget").join(file);
    cluster.apply(&std::fs::read_to_string(&path).with_context(|| path.display().to_string())?)
}

#[test]
fn beyond_a_refusing_budget_pods_wait_with_the_reason_and_run_when_there_is_more() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = "budget";
        example(cluster, "08-budget.yaml")?;
        cluster.running(namespace, "training").await?;
        state(cluster, namespace, "Over").await?;
        cluster.event(namespace, "BudgetUsedUp").await?;
        example(cluster, "later.yaml")?;
        let said = cluster.event(namespace, "BudgetRefused").await?;
        for part in ["budget/gpu", "of 0.01 GPU-hours", "frees up at"] {
            ensure!(said.contains(part), "{part} is missing: {said}");
        }
        // What runs goes on.
        cluster.shell(namespace, "training", "main", "cuda-probe")?;
        let more = json!({"spec": {"gpuHours": 5}});
        budgets(&cluster.client, namespace)
            .patch("gpu", &PatchParams::default(), &Patch::Merge(&more))
            .await?;
        state(cluster, namespace, "Within").await?;
        cluster.running(namespace, "notebook").await?;
        cluster.delete_namespace(namespace).await
    })
}

/// Waits until as many GPUs are charged, and gives the projected end after that.
async fn projected(
    cluster: &Cluster,
    namespace: &str,
    gpus: std::ops::Range<f64>,
) -> Result<Option<Timestamp>> {
    cluster
        .wait_for(&format!("{gpus:?} GPUs to be charged"), || async {
            let charged: f64 = status(cluster, namespace, "gpus").await?.as_str().unwrap_or("0").parse()?;
            Ok(gpus.contains(&charged).then_some(()))
        })
        .await?;
    let end = status(cluster, namespace, "projectedEnd").await?;
    Ok(end.as_str().map(str::parse).transpose()?)
}

#[test]
fn the_projected_end_is_when_what_runs_will_have_used_the_budget_up() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("budget-end").await?;
        let hours = 2;
        cluster.create(&[
            budget(&namespace, json!({"gpuHours": hours, "window": {"rolling": "24h"}})),
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            objects::template(&namespace, "part", &[objects::partition_of("gpu", "3g.40gb", "H100")]),
            PodManifest::of_template(&namespace, "whole", "gpu").build(),
        ])?;
        cluster.running(&namespace, "whole").await?;
        let of = async |pod: &str| -> Result<Timestamp> {
            let claim = cluster.claim_of(&namespace, pod).await?;
            allocated_at(&cluster.claim(&namespace, &claim).await?.context("no claim")?)
        };
        let budget = f64::from(hours) * 3600.0;
        let began = of("whole").await?;
        let near = |end: Option<Timestamp>, seconds: f64| -> Result<()> {
            let end = end.context("no projected end")?.duration_since(began).as_secs_f64();
            ensure!((end - seconds).abs() < 5.0, "{end} s after the first pod, not {seconds}");
            Ok(())
        };
        near(projected(cluster, &namespace, 0.99..1.01).await?, budget)?;
        // With half a GPU more what is left lasts for two thirds of the time.
        cluster.create(&[PodManifest::of_template(&namespace, "half", "part").build()])?;
        cluster.running(&namespace, "half").await?;
        let second = of("half").await?.duration_since(began).as_secs_f64();
        let end = projected(cluster, &namespace, 1.4..1.6).await?;
        let rate: f64 = status(cluster, &namespace, "gpus").await?.as_str().context("no figure")?.parse()?;
        near(end, second + (budget - second) / rate)?;
        // Without the first it lasts for longer, and without both nothing will end.
        cluster.delete_pod(&namespace, "whole").await?;
        cluster.pod_gone(&namespace, "whole").await?;
        let end = projected(cluster, &namespace, 0.4..0.6).await?.context("no projected end")?;
        ensure!(end.duration_since(began).as_secs_f64() > budget * 1.5, "{end}");
        cluster.delete_pod(&namespace, "half").await?;
        cluster.pod_gone(&namespace, "half").await?;
        ensure!(projected(cluster, &namespace, -0.01..0.01).await?.is_none(), "nothing is used");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_pod_that_a_budget_refuses_is_not_let_through_by_the_next_leader() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("budget-refuse").await?;
        let terms = json!({"gpuHours": 0, "window": {"calendar": "Month"}, "enforcement": "Refuse"});
        cluster.create(&[
            budget(&namespace, terms),
            objects::template(&namespace, "share", &[objects::share("gpu", "1Gi", 5)]),
        ])?;
        state(cluster, &namespace, "Over").await?;
        cluster.create(&[PodManifest::of_template(&namespace, "late", "share").build()])?;
        cluster.event(&namespace, "late BudgetRefused").await?;
        for controller in cluster.system_pods("controller").await? {
            process::controller(&controller)?.kill()?;
        }
        // The next leader has decided when it has said so too.
        cluster
            .wait_for("the pod to be refused again", || async {
                let events = cluster.events(&namespace).await?;
                let pod = cluster.pod(&namespace, "late").await?.context("no pod")?;
                let let_through = !aliquot_e2e::look::gated(&pod);
                let times = events.lines().filter(|line| line.contains("late BudgetRefused")).count();
                Ok((let_through || times > 1).then_some(()))
            })
            .await?;
        let pod = cluster.pod(&namespace, "late").await?.context("no pod")?;
        ensure!(aliquot_e2e::look::gated(&pod), "it was given devices");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_budget_that_only_warns_says_so_once_and_pods_run() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("budget-warn").await?;
        cluster.create(&[
            budget(
                &namespace,
                json!({"gpuHours": "0.001", "window": {"rolling": "24h"}, "enforcement": "Warn"}),
            ),
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            objects::template(&namespace, "share", &[objects::share("gpu", "1Gi", 5)]),
            PodManifest::of_template(&namespace, "first", "gpu").build(),
        ])?;
        let first = cluster.running(&namespace, "first").await?;
        state(cluster, &namespace, "Over").await?;
        let said = cluster.event(&namespace, "gpu BudgetUsedUp").await?;
        ensure!(said.contains("of 0.001 GPU-hours are used (last 24h); pods go on as before"), "{said}");
        cluster.create(&[PodManifest::of_template(&namespace, "second", "share").build()])?;
        let second = cluster.running(&namespace, "second").await?;
        ensure!(priority(&second) == 0, "it got {}", priority(&second));
        cluster.event(&namespace, "second BudgetExceeded").await?;
        // Neither time nor another controller has it said again.
        for controller in cluster.system_pods("controller").await? {
            process::controller(&controller)?.kill()?;
        }
        cluster.ready().await?;
        cluster.create(&[PodManifest::of_template(&namespace, "third", "share").build()])?;
        cluster.running(&namespace, "third").await?;
        cluster.event(&namespace, "third BudgetExceeded").await?;
        let events = cluster.events(&namespace).await?;
        let times = events.lines().filter(|line| line.contains("BudgetUsedUp")).count();
        ensure!(times == 1, "said {times} times: {events}");
        let after = cluster.running(&namespace, "first").await?;
        ensure!(
            aliquot_e2e::look::containers(&first) == aliquot_e2e::look::containers(&after),
            "what runs goes on"
        );
        cluster.delete_namespace(&namespace).await
    })
}

/// When a claim was allocated: as 1.34 drops the time from the allocation, the controller writes it beside it.
fn allocated_at(claim: &ResourceClaim) -> Result<Timestamp> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let allocation = allocation.context("no allocation")?;
    if let Some(time) = &allocation.allocation_timestamp {
        return Ok(time.0);
    }
    let written = claim.metadata.annotations.as_ref().and_then(|all| all.get(ALLOCATION));
    let (seconds, _) = written.and_then(|text| text.split_once('.')).context("no time of allocation")?;
    Ok(Timestamp::from_second(seconds.parse()?)?)
}

#[test]
fn what_controllers_and_agents_are_killed_over_is_charged_once() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("budget-kill").await?;
        cluster.create(&[
            budget(&namespace, json!({"gpuHours": 10, "window": {"rolling": "24h"}})),
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            PodManifest::of_template(&namespace, "user", "gpu").build(),
        ])?;
        let began = Instant::now();
        cluster.running(&namespace, "user").await?;
        let claim = cluster.claim_of(&namespace, "user").await?;
        let since = allocated_at(&cluster.claim(&namespace, &claim).await?.context("no claim")?)?;
        cluster
            .wait_for("the GPU to be charged", || async {
                Ok((status(cluster, &namespace, "gpus").await? == json!("1")).then_some(()))
            })
            .await?;
        let uid = cluster.claim(&namespace, &claim).await?.and_then(|c| c.metadata.uid).context("no uid")?;
        held(cluster, &uid, true).await?;
        // Nobody leads, nobody reports: the pod ends in the meantime.
        for pod in cluster.system_pods("controller").await? {
            process::controller(&pod)?.kill()?;
        }
        cluster.delete_pod(&namespace, "user").await?;
        cluster.pod_gone(&namespace, "user").await?;
        let ended = Timestamp::now();
        process::agent()?.kill()?;
        cluster.ready().await?;
        cluster
            .wait_for("nothing to be charged any more", || async {
                Ok((status(cluster, &namespace, "claims").await? == json!(0)).then_some(()))
            })
            .await?;
        held(cluster, &uid, false).await?;
        acknowledged(cluster).await?;
        let first = used(cluster, &namespace).await? * 3600.0;
        let truth = ended.duration_since(since).as_secs_f64();
        ensure!(
            (first - truth).abs() < 15.0,
            "{first} s are charged, it was {truth} s (of {:?})",
            began.elapsed()
        );
        // Everything is seen anew by the next controllers.
        for pod in cluster.system_pods("controller").await? {
            process::controller(&pod)?.kill()?;
        }
        cluster.ready().await?;
        cluster
            .holds_for(Duration::from_secs(25), || async {
                let again = used(cluster, &namespace).await? * 3600.0;
                ensure!((again - first).abs() < 4.0, "{first} s were charged, now {again} s");
                Ok(())
            })
            .await?;
        cluster.renew_agent().await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// What the node says.
async fn usage(cluster: &Cluster) -> Result<Value> {
    let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &kind("NodeUsage", "nodeusages"));
    Ok(api.get(cluster.setting("NODE_NAME")?).await?.data)
}

/// Waits until the node says that it holds a claim, or does not.
async fn held(cluster: &Cluster, uid: &str, wanted: bool) -> Result<()> {
    cluster
        .wait_for(&format!("the node to say whether it holds the claim: {wanted}"), || async {
            let usage = usage(cluster).await?;
            let held = usage.pointer("/spec/held").and_then(Value::as_array).cloned().unwrap_or_default();
            Ok((held.iter().any(|claim| claim["uid"] == uid) == wanted).then_some(()))
        })
        .await
}

/// Waits until every release is acknowledged and forgotten.
async fn acknowledged(cluster: &Cluster) -> Result<()> {
    cluster
        .wait_for("the releases to be acknowledged", || async {
            let usage = usage(cluster).await?;
            let listed = usage.pointer("/spec/released").and_then(Value::as_array).map_or(0, Vec::len);
            let number = usage.pointer("/status/acknowledged").and_then(Value::as_u64).unwrap_or(0);
            Ok((listed == 0 && number > 0).then_some(()))
        })
        .await
}

#[test]
fn beyond_a_lowering_budget_new_pods_get_its_class_and_running_ones_go_first() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let (over, within) =
            (cluster.namespace("budget-over").await?, cluster.namespace("budget-within").await?);
        let class = format!("{over}-low");
        let terms = json!({
            "gpuHours": "0.001", "window": {"calendar": "Month"},
            "enforcement": "LowerPriority", "lowerPriorityClassName": class,
        });
        let lower = json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": {"name": class}, "value": -10, "globalDefault": false,
        });
        cluster.create(&[
            lower,
            budget(&over, terms),
            objects::template(&over, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            objects::template(&over, "share", &[objects::share("gpu", "1Gi", 5)]),
            objects::template(&within, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            PodManifest::of_template(&over, "first", "gpu").build(),
        ])?;
        let outcome = async {
            let first = cluster.running(&over, "first").await?;
            ensure!(priority(&first) == 0, "within its budget it has its own class: {}", priority(&first));
            state(cluster, &over, "Over").await?;
            new_pods_get(cluster, &over, -10).await?;
            cluster.create(&[PodManifest::of_template(&over, "second", "share").build()])?;
            let second = cluster.running(&over, "second").await?;
            ensure!(priority(&second) == -10, "it got {}", priority(&second));
            // Of the same priority, so only the budget makes the difference.
            cluster.create(&[PodManifest::of_template(&within, "other", "gpu").build()])?;
            cluster.running(&within, "other").await?;
            let said = cluster.event(&over, "Preempted").await?;
            ensure!(said.contains(&format!("budget {over}/gpu is used up")), "{said}");
            // Back within its budget, new pods get their own class again.
            let more = json!({"spec": {"gpuHours": 5}});
            budgets(&cluster.client, &over)
                .patch("gpu", &PatchParams::default(), &Patch::Merge(&more))
                .await?;
            state(cluster, &over, "Within").await?;
            new_pods_get(cluster, &over, 0).await?;
            cluster.create(&[PodManifest::of_template(&over, "third", "share").build()])?;
            let third = cluster.running(&over, "third").await?;
            ensure!(priority(&third) == 0, "it got {}", priority(&third));
            anyhow::Ok(())
        }
        .await;
        cluster.kubectl(&["delete", "priorityclass", &class])?;
        outcome?;
        cluster.delete_namespace(&over).await?;
        cluster.delete_namespace(&within).await
    })
}

/// Waits until whoever of the controllers is asked gives a new pod that priority: each learns of a budget's state by a
/// watch of its own.
async fn new_pods_get(cluster: &Cluster, namespace: &str, wanted: i32) -> Result<()> {
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), namespace);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let pod: Pod = serde_json::from_value(PodManifest::of_template(namespace, "dry", "share").build())?;
    cluster
        .wait_for(&format!("pods of priority {wanted}"), || async {
            for _ in 0..8 {
                if priority(&pods.create(&dry, &pod).await?) != wanted {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })
        .await
}

fn priority(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

#[test]
fn only_the_agent_of_a_node_says_what_it_used_and_only_the_controller_what_a_budget_did() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("budget-forge").await?;
        cluster.create(&[budget(&namespace, json!({"gpuHours": 1, "window": {"calendar": "Day"}}))])?;
        state(cluster, &namespace, "Within").await?;
        let node = cluster.setting("NODE_NAME")?;
        let agents = cluster.system_pods("kubelet-plugin").await?;
        let agent =
            cluster.client_of_pod("aliquot-kubelet-plugin", agents.first().context("no agent")?).await?;
        let unbound = cluster.client_of_account("aliquot-kubelet-plugin").await?;
        let say = async |client: &Client, node: &str| -> Result<Option<String>> {
            let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind("NodeUsage", "nodeusages"));
            let object = json!({
                "apiVersion": "aliquot.dev/v1alpha1", "kind": "NodeUsage", "metadata": {"name": node},
                "spec": {"ledger": "forged", "held": [], "released": []},
            });
            let params = PatchParams { dry_run: true, ..PatchParams::apply("e2e").force() };
            message(api.patch(node, &params, &Patch::Apply(&object)).await)
        };
        ensure!(say(&agent, node).await?.is_none(), "its own node");
        let words = "only the agent of node";
        for (who, client, node) in [
            ("the agent for another node", &agent, "elsewhere"),
            ("a token without a node", &unbound, node),
            ("an administrator", &cluster.client, node),
        ] {
            let said = say(client, node).await?.with_context(|| format!("{who} was let"))?;
            ensure!(said.contains(words), "{who}: {said}");
        }
        let forged = json!({"status": {"used": "0.000", "account": null}});
        let dry = PatchParams { dry_run: true, ..PatchParams::default() };
        let api = budgets(&cluster.client, &namespace);
        let said = message(api.patch_status("gpu", &dry, &Patch::Merge(&forged)).await)?;
        ensure!(said.as_deref().is_some_and(|said| said.contains("only the controller")), "{said:?}");
        cluster.delete_namespace(&namespace).await
    })
}

/// What the API server said against it.
fn message<T>(answer: kube::Result<T>) -> Result<Option<String>> {
    match answer {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) => Ok(Some(status.message.clone())),
        Err(error) => Err(error.into()),
    }
}
