//! A picture of a node, for people and as JSON.
#![expect(clippy::indexing_slicing, reason = "a key that a serde_json value lacks reads as null")]

use std::fmt::Write;

use aliquot_sim_node::{Gpu, Node, NodeError, Pool};
use serde_json::{Value, json};

/// Describes the node.
pub(crate) fn show(node: &Node, as_json: bool) -> Result<String, NodeError> {
    let gpus = node.gpus().iter().map(|g| describe(node, g)).collect::<Result<Vec<_>, _>>()?;
    let faults: Vec<Value> = node
        .faults()?
        .iter()
        .map(|rule| {
            json!({
                "id": rule.id, "function": rule.fault.function, "nth": rule.fault.nth,
                "times": (rule.fault.times != u64::MAX).then_some(rule.fault.times),
                "delayMs": rule.fault.delay.as_millis(), "code": rule.fault.code, "calls": rule.calls,
            })
        })
        .collect();
    let all = json!({
        "dir": node.dir(), "bootId": node.boot_id()?, "driverVersion": node.spec().driver_version,
        "gpus": gpus, "faults": faults,
    });
    if as_json {
        return Ok(format!("{all:#}\n"));
    }
    Ok(text(&all))
}

fn describe(node: &Node, gpu: &Gpu) -> Result<Value, NodeError> {
    let memory = node.memory(Pool::whole(gpu.index))?;
    let mut partitions = Vec::new();
    let mut mig = Value::Null;
    if gpu.board.has_mig() {
        let mode = node.mig_mode(gpu.index)?;
        mig = json!({ "current": mode.current, "pending": mode.pending });
        let devices = node.mig_devices(gpu.index)?;
        for gi in node.gis(gpu.index)? {
            let uuids: Vec<_> = devices.iter().filter(|d| d.gi.id == gi.id).map(|d| &d.uuid).collect();
            let used = node.memory(Pool::instance(gpu.index, gi.id))?.used;
            partitions.push(json!({
                "id": gi.id, "profile": gi.profile.name, "start": gi.start, "size": gi.size,
                "devices": uuids, "usedBytes": used,
            }));
        }
    }
    let processes: Vec<Value> = node
        .processes(gpu.index)?
        .iter()
        .map(|p| {
            json!({ "pid": p.visible_pid, "name": p.name, "gi": p.pool.gi, "ci": p.ci, "bytes": p.bytes })
        })
        .collect();
    Ok(json!({
        "index": gpu.index, "board": gpu.board.key, "uuid": gpu.uuid, "minor": node.minor(gpu.index)?, "pci": gpu.bdf(),
        "mig": mig, "totalBytes": memory.total, "usedBytes": memory.used,
        "lost": node.settings(gpu.index)?.lost, "partitions": partitions, "processes": processes,
    }))
}

fn text(all: &Value) -> String {
    let mib = |v: &Value| v.as_u64().unwrap_or(0) >> 20;
    let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let plain = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let mut out = String::new();
    // Writing to a String does not fail.
    let _ = writeln!(out, "node {}  boot {}", plain(&all["dir"]), plain(&all["bootId"]));
    for gpu in list(&all["gpus"]) {
        let mig = match (gpu["mig"]["current"].as_bool(), gpu["mig"]["pending"].as_bool()) {
            (Some(true), Some(true)) => "  MIG on",
            (Some(true), _) => "  MIG on, off pending",
            (Some(false), Some(true)) => "  MIG on pending",
            _ => "",
        };
        let lost = if gpu["lost"].as_bool() == Some(true) { "  LOST" } else { "" };
        let _ = writeln!(
            out,
            "gpu {}  {}  {}  {}  {}/{} MiB{mig}{lost}",
            gpu["index"],
            plain(&gpu["board"]),
            plain(&gpu["uuid"]),
            plain(&gpu["pci"]),
            mib(&gpu["usedBytes"]),
            mib(&gpu["totalBytes"]),
        );
        for gi in list(&gpu["partitions"]) {
            let devices: Vec<_> = list(&gi["devices"]).iter().map(plain).collect();
            let _ = writeln!(
                out,
                "  gi {}  {} {{{}}}:{}  {} MiB used  {}",
                gi["id"],
                plain(&gi["profile"]),
                gi["start"],
                gi["size"],
                mib(&gi["usedBytes"]),
                devices.join(" "),
            );
        }
        for process in list(&gpu["processes"]) {
            let _ = writeln!(
                out,
                "  pid {}  {}  gi {}  {} MiB",
                process["pid"],
                plain(&process["name"]),
                process["gi"],
                mib(&process["bytes"]),
            );
        }
    }
    for fault in list(&all["faults"]) {
        let _ = writeln!(out, "fault {fault}");
    }
    out
}
