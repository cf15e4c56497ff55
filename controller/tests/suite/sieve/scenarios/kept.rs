//! Devices kept for whom they are meant.

use super::Scenario;
use crate::common::fixtures::{self, partition, request};
use aliquot_model::names::{BINDING, HOLD_FOR, RECLAIM};
use serde_json::json;

/// A pod ends, and the next one of its name gets the same devices although somebody else waits for them.
pub const SUCCESSORS: Scenario = Scenario {
    name: "successors",
    jolt: "b",
    // Whoever ends between its devices and its node leaves nothing, fault or not.
    bound_only: true,
    wait: &["late"],
    prepare: |world| {
        Box::pin(async move {
            let kept = json!({RECLAIM: "Retain", HOLD_FOR: "1h"});
            world.template(partition("r", "3g.40gb"), kept).await;
        })
    },
    play: |world| {
        Box::pin(async move {
            for name in ["a", "b"] {
                world.pod(world.templated(name)).await;
                world.bound(name).await;
            }
            world.lone("late", partition("r", "3g.40gb")).await;
            let before = world.devices("b").await;
            // Whose pod ends sooner leaves its devices only if a controller sees the end.
            world.retention_records(2).await;
            world.end("b").await;
            world.pod(world.templated("b")).await;
            assert_eq!(world.devices("b").await, before, "the successor gets what the pod before it had");
        })
    },
    ..Scenario::USUAL
};

/// A claim that keeps its devices from one pod to the next.
pub const RETAINED: Scenario = Scenario {
    name: "retained",
    jolt: "",
    play: |world| {
        Box::pin(async move {
            let whole = [request("r", "gpu.aliquot.dev", 1)];
            world.claim("notebook", &whole, json!({RECLAIM: "Retain", HOLD_FOR: "1h"})).await;
            world.pod(fixtures::pod("monday", &["notebook"])).await;
            let before = world.devices("monday").await;
            world.end("monday").await;
            world.pod(fixtures::pod("tuesday", &["notebook"])).await;
            assert_eq!(world.devices("tuesday").await, before);
        })
    },
    ..Scenario::USUAL
};

/// A claim that has devices before its pod, which somebody else wants too.
pub const EARLY: Scenario = Scenario {
    name: "early",
    wait: &["late"],
    play: |world| {
        Box::pin(async move {
            let whole = || request("r", "gpu.aliquot.dev", 1);
            world.claim("early", &[whole()], json!({BINDING: "Immediate"})).await;
            world.allocated("early").await;
            world.lone("late", whole()).await;
            world.pod(fixtures::pod("user", &["early"])).await;
            world.bound("user").await;
            world.end("user").await;
        })
    },
    ..Scenario::USUAL
};

/// A pod that needs much gets it although small ones come again and again.
pub const RESERVATION: Scenario = Scenario {
    name: "reservation",
    args: &["--reservation=true", "--reservation-after=300ms", "--reservation-percent=100"],
    nodes: &[("n1", 2)],
    jolt: "small",
    play: |world| {
        Box::pin(async move {
            for name in ["small", "small-1"] {
                world.lone(name, request("r", "gpu.aliquot.dev", 1)).await;
                world.bound(name).await;
            }
            world.lone("large", request("r", "gpu.aliquot.dev", 2)).await;
            world.told("large", "DevicesReserved").await;
            world.lone("small-3", partition("r", "1g.10gb")).await;
            for name in ["small", "small-1"] {
                world.end(name).await;
            }
            // Where nobody led for a moment, it had to begin to wait again.
            world.is_bound_of(&["large", "small-3"], "large").await;
            world.end("small-3").await;
            world.bound("large").await;
        })
    },
    ..Scenario::USUAL
};
