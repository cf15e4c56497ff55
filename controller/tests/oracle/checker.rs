//! Whether an allocation is allowed, from scratch by the rules of the API: shares nothing with the
//! controller. Only selectors are not evaluated here; the oracle does that with Kubernetes' own CEL.

use super::fixtures::DRIVER;
use super::ours::Case;
use super::scene::Cluster;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Devices that each request selects, as "slice/device", by "claim/request" or
/// "claim/request/subrequest".
pub type Selected = BTreeMap<String, BTreeSet<String>>;

/// A device that exists now.
struct Found<'a> {
    slice: &'a str,
    node: &'a str,
    device: &'a Value,
}

/// Devices of complete pools' current generations and the totals of their counters.
struct World<'a> {
    devices: BTreeMap<(&'a str, &'a str), Found<'a>>,
    totals: BTreeMap<(&'a str, &'a str, &'a str), i128>,
    /// Nodes with a pool that is not complete.
    unsettled: BTreeSet<&'a str>,
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// A quantity in thousandths.
pub fn amount(value: &Value) -> i128 {
    let text = text(value);
    let digits = text.trim_end_matches(|c: char| c.is_alphabetic());
    let thousandths = match &text[digits.len()..] {
        "m" => 1,
        "" => 1_000,
        "k" => 1_000_000,
        "M" => 1_000_000_000,
        "G" => 1_000_000_000_000,
        "Ki" => 1_000 << 10,
        "Mi" => 1_000 << 20,
        "Gi" => 1_000 << 30,
        other => panic!("a quantity with the suffix {other:?}"),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let whole: i128 = whole.parse().expect("a number");
    let scale = 10i128.pow(u32::try_from(fraction.len()).expect("short"));
    let fraction: i128 = if fraction.is_empty() { 0 } else { fraction.parse().expect("a number") };
    whole * thousandths + fraction * thousandths / scale
}

fn world(cluster: &Cluster) -> World<'_> {
    let mut newest: BTreeMap<&str, u64> = BTreeMap::new();
    for slice in &cluster.slices {
        let pool = &slice["spec"]["pool"];
        let generation = newest.entry(text(&pool["name"])).or_default();
        *generation = (*generation).max(pool["generation"].as_u64().unwrap_or_default());
    }
    let mut world = World { devices: BTreeMap::new(), totals: BTreeMap::new(), unsettled: BTreeSet::new() };
    for (pool, generation) in newest {
        let current: Vec<&Value> = cluster
            .slices
            .iter()
            .map(|slice| &slice["spec"]["pool"])
            .zip(&cluster.slices)
            .filter(|(of, _)| of["name"] == json!(pool) && of["generation"].as_u64() == Some(generation))
            .map(|(_, slice)| slice)
            .collect();
        let wanted = current[0]["spec"]["pool"]["resourceSliceCount"].as_u64();
        if wanted != Some(current.len() as u64) {
            world.unsettled.insert(text(&current[0]["spec"]["nodeName"]));
            continue;
        }
        for slice in current {
            for set in list(&slice["spec"]["sharedCounters"]) {
                for (counter, total) in set["counters"].as_object().into_iter().flatten() {
                    world.totals.insert((pool, text(&set["name"]), counter), amount(&total["value"]));
                }
            }
            for device in list(&slice["spec"]["devices"]) {
                let found = Found {
                    slice: text(&slice["metadata"]["name"]),
                    node: text(&slice["spec"]["nodeName"]),
                    device,
                };
                world.devices.insert((pool, text(&device["name"])), found);
            }
        }
    }
    world
}

/// What an amount asked for becomes; `None` if the device cannot give it.
fn rounded(capacity: &Value, asked: Option<i128>) -> Option<i128> {
    let policy = &capacity["requestPolicy"];
    let total = amount(&capacity["value"]);
    let taken = match asked {
        None if policy["default"].is_string() => amount(&policy["default"]),
        None => total,
        Some(asked) if policy["validRange"].is_object() => {
            let range = &policy["validRange"];
            let least = amount(&range["min"]);
            let mut taken = least;
            if asked > least {
                taken = asked;
                if range["step"].is_string() {
                    let step = amount(&range["step"]);
                    let over = (asked - least) % step;
                    if over != 0 {
                        taken = asked + step - over;
                    }
                }
            }
            if range["max"].is_string() && taken > amount(&range["max"]) {
                return None;
            }
            taken
        }
        Some(asked) if policy["validValues"].is_array() => {
            list(&policy["validValues"]).iter().map(amount).find(|value| *value >= asked)?
        }
        Some(asked) => asked,
    };
    (taken <= total).then_some(taken)
}

/// What a request takes of each capacity of a device; `None` if it is not for it.
fn consumption(device: &Value, exact: &Value) -> Option<BTreeMap<String, i128>> {
    let asked = &exact["capacity"]["requests"];
    let capacities = device["capacity"].as_object().cloned().unwrap_or_default();
    if asked.as_object().into_iter().flatten().any(|(name, _)| !capacities.contains_key(name)) {
        return None;
    }
    capacities
        .iter()
        .map(|(name, capacity)| {
            let wanted = asked.get(name).map(amount);
            Some((name.clone(), rounded(capacity, wanted)?))
        })
        .collect()
}

fn tolerated(taint: &Value, tolerations: &[Value]) -> bool {
    let repels = matches!(text(&taint["effect"]), "NoSchedule" | "NoExecute");
    !repels
        || tolerations.iter().any(|toleration| {
            let unset_or = |name: &str| text(&toleration[name]).is_empty() || toleration[name] == taint[name];
            let value = text(&toleration["operator"]) == "Exists"
                || text(&toleration["value"]) == text(&taint["value"]);
            unset_or("key") && unset_or("effect") && value
        })
}

fn shareable(device: &Value) -> bool {
    device["allowMultipleAllocations"] == json!(true)
}

/// What devices are used for: every result that counts, of earlier claims and new ones.
#[derive(Default)]
struct Uses {
    devices: BTreeMap<(String, String), Vec<Value>>,
    share_ids: BTreeSet<String>,
}

impl Uses {
    fn add(&mut self, result: &Value) -> Result<(), String> {
        if let Some(id) = result["shareID"].as_str()
            && !self.share_ids.insert(id.to_owned())
        {
            return Err(format!("the share id {id} is used twice"));
        }
        if result["adminAccess"] != json!(true) {
            let device = (text(&result["pool"]).to_owned(), text(&result["device"]).to_owned());
            self.devices.entry(device).or_default().push(result.clone());
        }
        Ok(())
    }

    fn check(&self, world: &World<'_>) -> Result<(), String> {
        let mut drawn: BTreeMap<(&str, &str, &str), i128> = BTreeMap::new();
        for ((pool, name), results) in &self.devices {
            let Some(found) = world.devices.get(&(pool.as_str(), name.as_str())) else {
                return Err(format!("{pool}/{name} does not exist"));
            };
            if !shareable(found.device) && results.len() > 1 {
                return Err(format!("{name} is given out {} times", results.len()));
            }
            for (capacity, total) in found.device["capacity"].as_object().into_iter().flatten() {
                let used: i128 = results
                    .iter()
                    .filter(|_| shareable(found.device))
                    .map(|result| amount(&result["consumedCapacity"][capacity]))
                    .sum();
                if used > amount(&total["value"]) {
                    return Err(format!("{name} gives more {capacity} than it has"));
                }
            }
            for draw in list(&found.device["consumesCounters"]) {
                for (counter, value) in draw["counters"].as_object().into_iter().flatten() {
                    *drawn.entry((pool, text(&draw["counterSet"]), counter)).or_default() +=
                        amount(&value["value"]);
                }
            }
        }
        for (counter, drawn) in drawn {
            if world.totals.get(&counter).is_none_or(|total| drawn > *total) {
                return Err(format!("{drawn} thousandths are drawn of {counter:?}"));
            }
        }
        Ok(())
    }
}

/// Everything that can be wrong with allocations on a node, the first that is.
pub fn check(
    cluster: &Cluster,
    case: &Case,
    node: &str,
    allocations: &[Value],
    selected: &Selected,
) -> Result<(), String> {
    let world = world(cluster);
    let mut uses = Uses::default();
    for claim in &case.allocated {
        for result in list(&claim["status"]["allocation"]["devices"]["results"]) {
            uses.add(result)?;
        }
    }
    if allocations.len() != case.wanted.claims.len() {
        return Err(format!("{} allocations for {} claims", allocations.len(), case.wanted.claims.len()));
    }
    for (claim, allocation) in case.wanted.claims.iter().zip(allocations) {
        check_claim(&world, node, claim, allocation, selected)?;
        check_config(cluster, claim, allocation)?;
        for result in list(&allocation["devices"]["results"]) {
            uses.add(result)?;
        }
    }
    uses.check(&world)
}

fn check_claim(
    world: &World<'_>,
    node: &str,
    claim: &Value,
    allocation: &Value,
    selected: &Selected,
) -> Result<(), String> {
    let results = list(&allocation["devices"]["results"]);
    if results.len() > 32 {
        return Err(format!("{} results", results.len()));
    }
    let on_node = json!({"nodeSelectorTerms": [{"matchFields":
        [{"key": "metadata.name", "operator": "In", "values": [node]}]}]});
    if allocation["nodeSelector"] != on_node {
        return Err(format!("the node selector is {}", allocation["nodeSelector"]));
    }
    let mut known = 0;
    for request in list(&claim["spec"]["devices"]["requests"]) {
        let name = text(&request["name"]);
        let mine = |result: &&Value| text(&result["request"]).split('/').next() == Some(name);
        let of_request: Vec<&Value> = results.iter().filter(mine).collect();
        known += of_request.len();
        let Some(full) = of_request.first().map(|result| text(&result["request"])) else {
            return Err(format!("request {name} has nothing"));
        };
        if of_request.iter().any(|result| text(&result["request"]) != full) {
            return Err(format!("request {name} has devices of two alternatives"));
        }
        let exact = match full.split_once('/') {
            None => &request["exactly"],
            Some((_, sub)) => list(&request["firstAvailable"])
                .iter()
                .find(|candidate| text(&candidate["name"]) == sub)
                .unwrap_or(&Value::Null),
        };
        if !exact.is_object() {
            return Err(format!("there is no request {full}"));
        }
        let key = format!("{}/{full}", text(&claim["metadata"]["name"]));
        let selected = selected.get(&key).ok_or_else(|| format!("the oracle knows no {key}"))?;
        check_request(world, node, full, exact, &of_request, selected)?;
    }
    if known != results.len() {
        return Err("there are results for requests that do not exist".to_owned());
    }
    for constraint in list(&claim["spec"]["devices"]["constraints"]) {
        check_constraint(world, constraint, results)?;
    }
    Ok(())
}

fn check_request(
    world: &World<'_>,
    node: &str,
    name: &str,
    exact: &Value,
    results: &[&Value],
    selected: &BTreeSet<String>,
) -> Result<(), String> {
    let mut devices: BTreeSet<(&str, &str)> = BTreeSet::new();
    for result in results {
        let id = (text(&result["pool"]), text(&result["device"]));
        let Some(found) = world.devices.get(&id).filter(|_| text(&result["driver"]) == DRIVER) else {
            return Err(format!("{id:?} does not exist, or not now"));
        };
        if found.node != node {
            return Err(format!("{id:?} is on {}, not on {node}", found.node));
        }
        if !devices.insert(id) {
            return Err(format!("request {name} has {id:?} twice"));
        }
        if !selected.contains(&format!("{}/{}", found.slice, id.1)) {
            return Err(format!("request {name} does not select {id:?}"));
        }
        let repelled =
            list(&found.device["taints"]).iter().find(|t| !tolerated(t, list(&exact["tolerations"])));
        if let Some(taint) = repelled {
            return Err(format!("request {name} does not tolerate {taint} of {id:?}"));
        }
        if list(&result["tolerations"]) != list(&exact["tolerations"]) {
            return Err(format!("the tolerations of {name} are not written down"));
        }
        if result["adminAccess"].as_bool().unwrap_or_default()
            != exact["adminAccess"].as_bool().unwrap_or_default()
        {
            return Err(format!("admin access of {name} is not as asked for"));
        }
        let Some(expected) = consumption(found.device, exact) else {
            return Err(format!("{id:?} has not the capacity that {name} asks for"));
        };
        let shared = shareable(found.device);
        if result["shareID"].is_string() != shared {
            return Err(format!("{id:?} has the share id {}", result["shareID"]));
        }
        let expected = if shared { expected } else { BTreeMap::new() };
        let written: BTreeMap<String, i128> = result["consumedCapacity"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, value)| (name.clone(), amount(value)))
            .collect();
        if written != expected {
            return Err(format!("{name} consumes {written:?} thousandths of {id:?}, not {expected:?}"));
        }
    }
    if exact["allocationMode"] == json!("All") {
        if world.unsettled.contains(node) {
            return Err(format!("{name} asks for all devices while a pool is incomplete"));
        }
        let all: BTreeSet<(&str, &str)> = world
            .devices
            .iter()
            .filter(|(id, found)| {
                found.node == node && selected.contains(&format!("{}/{}", found.slice, id.1))
            })
            .filter(|(_, found)| consumption(found.device, exact).is_some())
            .map(|(id, _)| *id)
            .collect();
        if all != devices {
            return Err(format!("{name} asks for all: {all:?}, and has {devices:?}"));
        }
    } else if results.len() as u64 != exact["count"].as_u64().unwrap_or(1) {
        return Err(format!("{name} has {} devices", results.len()));
    }
    Ok(())
}

fn check_constraint(world: &World<'_>, constraint: &Value, results: &[Value]) -> Result<(), String> {
    let names = list(&constraint["requests"]);
    let kinds = ["matchAttribute", "distinctAttribute"];
    let kind = kinds.iter().find(|kind| constraint[**kind].is_string()).ok_or("no such constraint")?;
    let attribute = text(&constraint[*kind]);
    let unqualified = attribute.strip_prefix(&format!("{DRIVER}/"));
    let mut values: Vec<&Value> = Vec::new();
    for result in results {
        let full = text(&result["request"]);
        let main = full.split('/').next().unwrap_or_default();
        if !names.is_empty() && !names.iter().any(|name| text(name) == full || text(name) == main) {
            continue;
        }
        let id = (text(&result["pool"]), text(&result["device"]));
        let attributes = world.devices.get(&id).map(|found| &found.device["attributes"]);
        let value = attributes
            .and_then(|all| all.get(attribute).or_else(|| unqualified.and_then(|name| all.get(name))));
        values.push(value.ok_or_else(|| format!("{id:?} has no {attribute}"))?);
    }
    let same = |(position, value): (usize, &&Value)| {
        values.iter().skip(position + 1).filter(|v| *v == value).count()
    };
    let equal: usize = values.iter().enumerate().map(same).sum();
    let pairs = values.len() * values.len().saturating_sub(1) / 2;
    let fine = if *kind == "matchAttribute" { equal == pairs } else { equal == 0 };
    if fine { Ok(()) } else { Err(format!("{kind} {attribute} does not hold: {values:?}")) }
}

/// Each request gets its class's configuration and then the claim's, each in order.
fn check_config(cluster: &Cluster, claim: &Value, allocation: &Value) -> Result<(), String> {
    let fulls: BTreeSet<&str> =
        list(&allocation["devices"]["results"]).iter().map(|result| text(&result["request"])).collect();
    for full in fulls {
        let (main, sub) = full.split_once('/').unwrap_or((full, ""));
        let applies = |entry: &&Value| {
            let names = list(&entry["requests"]);
            names.is_empty() || names.iter().any(|name| text(name) == main || text(name) == full)
        };
        let request = list(&claim["spec"]["devices"]["requests"]).iter().find(|r| text(&r["name"]) == main);
        let exact = request.and_then(|request| match sub {
            "" => request.get("exactly"),
            sub => list(&request["firstAvailable"]).iter().find(|candidate| text(&candidate["name"]) == sub),
        });
        let class_name = exact.map(|exact| text(&exact["deviceClassName"])).unwrap_or_default();
        let class = cluster.classes.iter().find(|class| text(&class["metadata"]["name"]) == class_name);
        let of_class = class.map(|class| list(&class["spec"]["config"])).unwrap_or_default();
        let own = list(&claim["spec"]["devices"]["config"]).iter().filter(applies);
        let expected: Vec<(&str, &Value)> = of_class
            .iter()
            .map(|entry| ("FromClass", &entry["opaque"]))
            .chain(own.map(|entry| ("FromClaim", &entry["opaque"])))
            .collect();
        let written: Vec<(&str, &Value)> = list(&allocation["devices"]["config"])
            .iter()
            .filter(applies)
            .map(|entry| (text(&entry["source"]), &entry["opaque"]))
            .collect();
        if written != expected {
            return Err(format!("request {full} is configured with {written:?}, not {expected:?}"));
        }
    }
    Ok(())
}
