//! Pods that are evicted to have something else, or to fill gaps, and made anew by their controllers.

use super::Scenario;
use crate::common::eventually;
use crate::common::fixtures::{self, DRIVER, partition};
use aliquot_allocator::substitution::ANNOTATION;
use aliquot_model::names::COMPACTION as MAY_MOVE;
use serde_json::{Value, json};

/// Of a GPU's media engines there is one: the second of these is free nowhere, a larger profile is.
const ASKED: &str = "1g.10gb+me";

fn alternative(name: &str, profile: &str) -> Value {
    let expression = format!(r#"device.attributes["{DRIVER}"].profile == "{profile}""#);
    json!({"name": name, "deviceClassName": "mig.aliquot.dev", "selectors": [{"cel": {"expression": expression}}]})
}

/// A pod has a larger profile than it asked for, and goes back when the asked one is free.
pub const SUBSTITUTION: Scenario = Scenario {
    name: "substitution",
    args: &["--go-back-after", "100ms"],
    jolt: "user",
    prepare: |world| {
        Box::pin(async move {
            let record = json!({"asked": {"r": ASKED}, "goBack": true}).to_string();
            let either = [alternative("asked", ASKED), alternative("larger", "1g.20gb")];
            world.template(json!({"name": "r", "firstAvailable": either}), json!({ANNOTATION: record})).await;
        })
    },
    play: |world| {
        Box::pin(async move {
            world.lone("filler", partition("r", ASKED)).await;
            world.bound("filler").await;
            world.remade(world.templated("user")).await;
            world.bound("user").await;
            world.end("filler").await;
            eventually("it has what it asked for", async || {
                let devices = world.held();
                devices.iter().any(|device| device.contains("1g10gb-me")).then_some(())
            })
            .await;
            world.bound("user").await;
        })
    },
    ..Scenario::USUAL
};

/// Two halves on two GPUs come together on one.
pub const COMPACTION: Scenario = Scenario {
    name: "compaction",
    args: &["--compaction=true", "--compaction-threshold=5"],
    nodes: &[("n1", 2)],
    jolt: "p0",
    prepare: |world| {
        Box::pin(async move {
            world.maker().await;
            // Laid out by a controller that moves nobody.
            let controller = world.cluster.controller_as("c0", "before", &[]).await;
            for name in ["p0", "p1", "p2", "p3"] {
                world.claim(name, &[partition("r", "3g.40gb")], Value::Null).await;
                let mut pod = world.owned(fixtures::pod(name, &[name]));
                pod.metadata.annotations = Some([(MAY_MOVE.to_owned(), "Allow".to_owned())].into());
                world.remade(pod).await;
                world.bound(name).await;
            }
            for name in ["p1", "p3"] {
                world.end(name).await;
            }
            eventually("two have devices", async || (world.held().len() == 2).then_some(())).await;
            controller.terminate().await;
        })
    },
    play: |world| {
        Box::pin(async move {
            eventually("both are on one GPU", async || {
                let held = world.held();
                let gpu = |device: &String| device.split("-mig").next().map(str::to_owned);
                (held.len() == 2 && gpu(&held[0]) == gpu(&held[1])).then_some(())
            })
            .await;
        })
    },
    ..Scenario::USUAL
};
