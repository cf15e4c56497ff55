//! What must hold whatever went wrong: at every moment, when everything has come to rest, and when everything is gone.

use super::world::World;
use crate::audits::evictions::evictions;
use crate::audits::{gangs, lost_under_a_pod, results, shares};
use crate::common::auditor;
use aliquot_allocator::snapshot::GOING_BACK;
use aliquot_api::v1alpha1;
use aliquot_control_plane::AuditEntry;
use aliquot_model::names::{BINDING, COMPANION_OF, HOLD_OF, RECLAIM, RETENTION_RECORD, SCHEDULING_GATE};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Objects of a kind.
fn objects(world: &World, group: &str, plural: &str) -> Vec<Arc<Value>> {
    world.cluster.handle.objects(group, plural, "")
}

fn claims(world: &World) -> Vec<Arc<Value>> {
    objects(world, "resource.k8s.io", "resourceclaims")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn name(object: &Value) -> String {
    text(&object["metadata"]["name"])
}

fn uids(objects: &[Arc<Value>]) -> BTreeSet<String> {
    objects.iter().map(|object| text(&object["metadata"]["uid"])).collect()
}

fn annotation(object: &Value, key: &str) -> Option<String> {
    object["metadata"]["annotations"][key].as_str().map(str::to_owned)
}

/// What is not as it should be when everything that can happen has happened; `wait` are pods for which there is no room.
pub fn at_rest(world: &World, wait: &[&str]) -> Vec<String> {
    let pods = objects(world, "", "pods");
    let mut wrong = Vec::new();
    for pod in &pods {
        let (name, bound) = (name(pod), pod["spec"]["nodeName"].is_string());
        let gates = pod["spec"]["schedulingGates"].as_array().into_iter().flatten();
        let gated = gates.into_iter().any(|gate| gate["name"] == SCHEDULING_GATE);
        if wait.contains(&name.as_str()) == bound {
            wrong.push(format!("pod {name} is bound: {bound}"));
        }
        if bound && gated {
            wrong.push(format!("pod {name} is bound and has our gate"));
        }
        if !bound && pod["status"]["nominatedNodeName"].is_string() {
            wrong.push(format!("pod {name} waits, and room is noted for it that nobody makes"));
        }
    }
    wrong.extend(of_claims(world, &uids(&pods)));
    let claims = uids(&claims(world));
    for record in retention_records(world) {
        let of = name(&record).replace("aliquot-retention-", "");
        if !claims.contains(&of) {
            wrong.push(format!("retention record {} is of no claim", name(&record)));
        }
    }
    wrong.extend(noted_places(world));
    wrong
}

fn retention_records(world: &World) -> Vec<Arc<Value>> {
    let mut maps = objects(world, "", "configmaps");
    maps.retain(|map| map["metadata"]["labels"][RETENTION_RECORD].is_string());
    maps
}

fn noted_places(world: &World) -> Vec<String> {
    let nodes = objects(world, "", "nodes");
    let noted = nodes.iter().filter_map(|node| annotation(node, GOING_BACK));
    noted.map(|place| format!("a place is noted to go back to: {place}")).collect()
}

/// Claims with devices that nobody uses, or whom others have forgotten.
fn of_claims(world: &World, pods: &BTreeSet<String>) -> Vec<String> {
    let claims = claims(world);
    let known = uids(&claims);
    let mut wrong = Vec::new();
    for claim in &claims {
        let name = name(claim);
        let users = claim["status"]["reservedFor"].as_array().cloned().unwrap_or_default();
        let is_allocated = claim["status"]["allocation"].is_object();
        let is_kept = [RECLAIM, BINDING, HOLD_OF].iter().any(|key| annotation(claim, key).is_some());
        if is_allocated && users.is_empty() {
            wrong.push(format!("claim {name} has devices that nobody uses"));
        }
        for user in &users {
            let is_pod = user["resource"] == "pods";
            if is_pod && !pods.contains(&text(&user["uid"])) {
                wrong.push(format!("claim {name} is reserved for pod {}, which is gone", user["name"]));
            }
            if !is_pod && !is_kept {
                wrong.push(format!("claim {name} is kept, and nobody asked for that"));
            }
        }
        let parent = annotation(claim, COMPANION_OF);
        if let Some(parent) = parent.as_deref().and_then(|of| of.split('/').nth(1))
            && !known.contains(parent)
        {
            wrong.push(format!("{name} is a companion of a claim that is gone"));
        }
    }
    wrong
}

/// What is there still although all that tenants made is gone.
pub fn left(world: &World) -> Vec<String> {
    let mut left: Vec<String> = claims(world).iter().map(|claim| format!("claim {}", name(claim))).collect();
    left.extend(retention_records(world).iter().map(|record| format!("retention record {}", name(record))));
    left.extend(noted_places(world));
    for limits in objects(world, v1alpha1::GROUP, "nodelimits") {
        if limits["spec"]["shares"].as_array().is_some_and(|shares| !shares.is_empty()) {
            left.push(format!("limits of node {}: {}", name(&limits), limits["spec"]));
        }
    }
    for budget in objects(world, v1alpha1::GROUP, "gpubudgets") {
        if budget["status"]["claims"].as_u64().unwrap_or(0) > 0 {
            left.push(format!("budget {} counts {}", name(&budget), budget["status"]["claims"]));
        }
    }
    left
}

/// What was wrong at any moment, in the record of all writes. Where the controller's view was stale, a group may have
/// begun of which a pod had left meanwhile: nobody can see that then, as it could have left a moment later.
pub fn ever(world: &World, is_stale: bool) -> Vec<String> {
    let record = world.cluster.handle.audit(0);
    let mut wrong = Vec::new();
    let mut note = |what: &str, found: Vec<String>| {
        wrong.extend(found.into_iter().map(|found| format!("{what}: {found}")));
    };
    note("hardware that two had", auditor::overlaps(&world.cluster.handle));
    note("devices lost under a running pod", lost_under_a_pod(&record));
    note("an eviction without a reason", evictions(&record).1);
    note("a limit beyond what is reserved", shares::judge(&record).1);
    if !is_stale {
        note("a group that began without all devices", gangs::judge(&record).1);
    }
    wrong
}

/// Every write, but for who leads.
pub fn story(world: &World) -> String {
    let record = world.cluster.handle.audit(0);
    let told = record.iter().filter(|entry| entry.origin.resource != "leases");
    let told = told.filter(|entry| {
        entry.origin.resource != "resourceslices" && entry.origin.resource != "deviceclasses"
    });
    let line = |entry: &AuditEntry| {
        let origin = &entry.origin;
        let object = entry.after.as_deref().unwrap_or(&Value::Null);
        let more = match origin.resource.as_str() {
            "events" => format!(
                "{}: {}",
                object["reason"],
                object["message"].as_str().or_else(|| object["note"].as_str()).unwrap_or_default()
            ),
            "resourceclaims" => {
                let devices =
                    results(object).iter().map(|result| text(&result["device"])).collect::<Vec<_>>();
                let users =
                    object["status"]["reservedFor"].as_array().into_iter().flatten().map(name_of_user);
                format!("{devices:?} for {:?}", users.collect::<Vec<_>>())
            }
            _ => String::new(),
        };
        format!(
            "{} {:6} {} {} {}/{} {} {more}",
            entry.time,
            entry.revision,
            origin.user,
            origin.verb,
            origin.resource,
            origin.subresource,
            entry.name
        )
    };
    told.map(line).collect::<Vec<_>>().join("\n")
}

/// Name, and how its identity begins.
fn name_of_user(user: &Value) -> String {
    format!("{} {}", text(&user["name"]), short(&user["uid"]))
}

fn short(uid: &Value) -> String {
    text(uid).chars().take(4).collect()
}
