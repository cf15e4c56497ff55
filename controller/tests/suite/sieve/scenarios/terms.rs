//! What namespaces may have, and shares that change while they run.

use super::Scenario;
use crate::common::eventually;
use crate::common::fixtures::{self, partition, released, request, share};
use crate::sieve::world::World;
use aliquot_allocator::budget::account::Site;
use aliquot_api::v1alpha1::{GpuBudget, GpuQuota, NodeLimits, NodeUsage, resource};
use aliquot_model::names::LIMITS;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::json;

const GIB: u64 = 1 << 30;

/// A share grows, shrinks and ends.
pub const ELASTIC: Scenario = Scenario {
    name: "elastic",
    args: &["--elastic-shares=true"],
    prepare: |world| Box::pin(async move { world.cluster.define::<NodeLimits>().await }),
    play: |world| {
        Box::pin(async move {
            world.lone("a", share("r", "10Gi", "30")).await;
            world.bound("a").await;
            for size in [20, 15] {
                world.annotate("a", json!({LIMITS: format!("memory={size}Gi")})).await;
                let limit = json!(size * GIB);
                world.field_is("nodelimits", "", "n1", "/spec/shares/0/memoryBytes", limit).await;
                eventually("that is reserved", async || (world.reserved() == size * GIB).then_some(())).await;
            }
            world.annotate("a", json!({LIMITS: null})).await;
            eventually("that is given back", async || (world.reserved() == 10 * GIB).then_some(())).await;
        })
    },
    ..Scenario::USUAL
};

async fn budget_kinds(world: &World) {
    world.cluster.define::<GpuBudget>().await;
    world.cluster.define::<NodeUsage>().await;
}

/// Says it of node n1.
async fn say(world: &World, numbers: &[u64], until: i64) {
    let api: Api<DynamicObject> = Api::all_with(world.cluster.client.clone(), &resource::<NodeUsage>());
    let apply = PatchParams::apply("agent").force();
    api.patch("n1", &apply, &Patch::Apply(&released(numbers, until))).await.expect("applied");
}

/// What an earlier controller stored: it saw the claims of these releases with a GPU of n1, and nothing more of them.
async fn were_seen(world: &World, numbers: &[u64], now: i64) {
    let account = fixtures::account_of_seen(numbers, now, &Site::of("n1").to_string());
    let budgets: Api<DynamicObject> =
        Api::namespaced_with(world.cluster.client.clone(), "default", &resource::<GpuBudget>());
    let patch = Patch::Merge(json!({"status": {"account": account}}));
    budgets.patch_status("gpu", &PatchParams::default(), &patch).await.expect("stored");
}

/// Releases that a node reports are charged once each.
pub const BUDGET: Scenario = Scenario {
    name: "budget",
    args: &["--budgets=true"],
    jolt: "a",
    prepare: |world| {
        Box::pin(async move {
            budget_kinds(&world).await;
            world.custom("GpuBudget", "default", json!({"gpuHours": 10, "window": {"rolling": "24h"}})).await;
            // Before all that the node tells.
            let before = k8s_openapi::jiff::Timestamp::now().as_second() - 10;
            were_seen(&world, &[1, 2, 3], before).await;
        })
    },
    play: |world| {
        Box::pin(async move {
            let acknowledged = async |number: u64| {
                world.field_is("nodeusages", "", "n1", "/status/acknowledged", json!(number)).await;
            };
            let used = || world.field("gpubudgets", "default", "gpu", "/status/used");
            world.field_is("gpubudgets", "default", "gpu", "/status/state", json!("Within")).await;
            let until = k8s_openapi::jiff::Timestamp::now().as_second() - 1;
            say(&world, &[1, 2], until).await;
            acknowledged(2).await;
            world.lone("a", partition("r", "1g.10gb")).await;
            world.bound("a").await;
            // The agent forgets what is acknowledged.
            say(&world, &[3], until).await;
            acknowledged(3).await;
            say(&world, &[], until).await;
            world.end("a").await;
            world.field_is("gpubudgets", "default", "gpu", "/status/claims", json!(0)).await;
            // An eighth of a GPU for some seconds is beside it.
            let hours: f64 = used().as_str().and_then(|text| text.parse().ok()).expect("hours");
            assert!((1.5..1.6).contains(&hours), "{hours} GPU-hours were charged for 1.5");
        })
    },
    ..Scenario::USUAL
};

/// Of a namespace whose budget is used up a pod is evicted for one of another that has none.
pub const OVER_BUDGET: Scenario = Scenario {
    name: "over-budget",
    args: &["--budgets=true"],
    jolt: "beyond",
    wait: &["beyond"],
    prepare: |world| {
        Box::pin(async move {
            budget_kinds(&world).await;
            let class = json!({"metadata": {"name": "low"}, "value": -10});
            world.cluster.create_global::<PriorityClass>(&fixtures::object(class)).await;
            let terms = json!({"gpuHours": 0, "window": {"calendar": "Day"}, "enforcement": "LowerPriority",
                "lowerPriorityClassName": "low"});
            world.custom("GpuBudget", "default", terms).await;
        })
    },
    play: |world| {
        Box::pin(async move {
            world.field_is("gpubudgets", "default", "gpu", "/status/state", json!("Over")).await;
            world.lone("beyond", request("r", "gpu.aliquot.dev", 1)).await;
            world.bound("beyond").await;
            world.elsewhere("free", "other").await;
            let other = || world.cluster.handle.object("", "pods", "free", "other");
            eventually("it has room", async || other()?["spec"]["nodeName"].is_string().then_some(())).await;
            // Its controller tries again.
            world.end("beyond").await;
            world.pod(fixtures::pod("beyond", &["beyond"])).await;
        })
    },
    ..Scenario::USUAL
};

/// The second pod waits for the first although there is a GPU.
pub const QUOTA: Scenario = Scenario {
    name: "quota",
    nodes: &[("n1", 2)],
    jolt: "a",
    wait: &["c"],
    prepare: |world| {
        Box::pin(async move {
            world.cluster.define::<GpuQuota>().await;
            world.custom("GpuQuota", "default", json!({"hard": {"gpus": 1}})).await;
        })
    },
    play: |world| {
        Box::pin(async move {
            for name in ["a", "b"] {
                world.lone(name, request("r", "gpu.aliquot.dev", 1)).await;
                if name == "a" {
                    world.bound(name).await;
                }
            }
            world.end("a").await;
            world.bound("b").await;
            world.lone("c", request("r", "gpu.aliquot.dev", 1)).await;
            world.field_is("gpuquotas", "default", "gpu", "/status/claims", json!(1)).await;
        })
    },
    ..Scenario::USUAL
};
