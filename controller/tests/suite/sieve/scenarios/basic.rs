//! Devices given and taken back.

use super::Scenario;
use crate::common::fixtures::{self, partition, request, share};
use crate::sieve::world::World;
use aliquot_control_plane::PodDeletion;
use aliquot_model::names::{GANG as LABEL, GANG_SIZE};
use serde_json::Value;

/// Whole GPUs, partitions and shares; one waits for the GPU of another.
pub const PLAIN: Scenario = Scenario {
    name: "plain",
    nodes: &[("n1", 2)],
    jolt: "mig",
    play: |world| {
        Box::pin(async move {
            world.lone("whole", request("r", "gpu.aliquot.dev", 1)).await;
            world.bound("whole").await;
            world.lone("mig", partition("r", "2g.20gb")).await;
            world.claim("first", &[partition("r", "2g.20gb")], Value::Null).await;
            world.claim("second", &[partition("r", "1g.10gb")], Value::Null).await;
            world.pod(fixtures::pod("both", &["first", "second"])).await;
            for pod in ["mig", "both"] {
                world.bound(pod).await;
            }
            // Not before: what a short look does not decide goes behind it, and it would have the second GPU.
            world.lone("late", request("r", "gpu.aliquot.dev", 1)).await;
            world.end("whole").await;
            world.bound("late").await;
            world.end("late").await;
            world.lone("share", share("r", "10Gi", "30")).await;
            world.bound("share").await;
        })
    },
    ..Scenario::USUAL
};

/// Pods that come and go under their names, with claims from a template.
pub const TEMPLATES: Scenario = Scenario {
    name: "templates",
    jolt: "b",
    prepare: |world| Box::pin(async move { world.template(partition("r", "3g.40gb"), Value::Null).await }),
    play: |world| {
        Box::pin(async move {
            for name in ["a", "b"] {
                world.pod(world.templated(name)).await;
                world.bound(name).await;
            }
            world.pod(world.templated("c")).await;
            world.end("a").await;
            world.bound("c").await;
            world.pod(world.templated("a")).await;
            world.end("b").await;
            world.bound("a").await;
        })
    },
    ..Scenario::USUAL
};

/// Two groups, and room for one.
pub const GANG: Scenario = Scenario {
    name: "gang",
    args: &["--gang-timeout=2s"],
    jolt: "x-1",
    prepare: |world| Box::pin(async move { world.template(partition("r", "3g.40gb"), Value::Null).await }),
    play: |world| {
        Box::pin(async move {
            for group in ["x", "y"] {
                for at in 0..2 {
                    let mut pod = world.templated(&format!("{group}-{at}"));
                    pod.metadata.labels = Some([(LABEL.to_owned(), group.to_owned())].into());
                    pod.metadata.annotations = Some([(GANG_SIZE.to_owned(), "2".to_owned())].into());
                    world.pod(pod).await;
                }
                if group == "x" {
                    world.bound("x-0").await;
                    world.bound("x-1").await;
                }
            }
            for name in ["x-0", "x-1"] {
                world.end(name).await;
            }
            for name in ["y-0", "y-1"] {
                world.bound(name).await;
            }
        })
    },
    ..Scenario::USUAL
};

fn whole() -> Value {
    request("r", "gpu.aliquot.dev", 1)
}

/// The GPU is the pod's of low priority, and one of high priority comes.
async fn high_wants_what_low_has(world: &World) {
    world.ranked("low", whole(), 0).await;
    world.bound("low").await;
    world.ranked("high", whole(), 100).await;
}

/// A pod of high priority takes the GPU of a low one, before one between.
pub const PREEMPTION: Scenario = Scenario {
    name: "preemption",
    jolt: "high",
    wait: &["between"],
    play: |world| {
        Box::pin(async move {
            high_wants_what_low_has(&world).await;
            world.ranked("between", whole(), 50).await;
            world.bound("high").await;
        })
    },
    ..Scenario::USUAL
};

/// A pod for which somebody ends is overtaken by one of higher priority; what was noted for it goes.
pub const OVERTAKEN: Scenario = Scenario {
    name: "overtaken",
    deletion: PodDeletion::Graceful,
    jolt: "high",
    wait: &["high"],
    play: |world| {
        Box::pin(async move {
            high_wants_what_low_has(&world).await;
            world.ending("low").await;
            world.ranked("higher", whole(), 200).await;
            world.nominated("higher").await;
            world.end("low").await;
            world.bound("higher").await;
        })
    },
    ..Scenario::USUAL
};
