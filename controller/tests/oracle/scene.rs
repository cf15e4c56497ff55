//! Random clusters: small devices that combine everything, and boards as our agent publishes them.

use super::fixtures::{self, DRIVER};
use super::random::Random;
use aliquot_model::layout::{AllocatorMode, GpuState};
use aliquot_model::{Architecture, MigCapability, MigProfile, Placement};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Names of what a case is about, for counting how often it occurs.
pub type Features = BTreeSet<&'static str>;

/// A driver of other devices, beside which ours are.
pub const OTHER_DRIVER: &str = "nic.example.com";

/// A cluster without pods. Slices are as kube-scheduler's allocator gets them: without our taint, and
/// with what DeviceTaintRules add.
#[derive(Debug, Clone)]
pub struct Cluster {
    pub nodes: Vec<Value>,
    pub slices: Vec<Value>,
    /// Slices as they are published.
    pub published: Vec<Value>,
    /// DeviceTaintRules.
    pub rules: Vec<Value>,
    pub classes: Vec<Value>,
    /// Whether devices are those of boards.
    pub boards: bool,
    pub features: Features,
}

/// A cluster.
pub fn cluster(random: &mut Random) -> Cluster {
    let boards = random.percent(25);
    let mut cluster = Cluster {
        nodes: Vec::new(),
        slices: Vec::new(),
        published: Vec::new(),
        rules: Vec::new(),
        classes: classes(),
        boards,
        features: Features::new(),
    };
    cluster.features.insert(if boards { "boards" } else { "synthetic devices" });
    let count = random.count(1, 3);
    let equal = random.percent(30);
    let seed = Random::new(random.within(0, u64::MAX - 1));
    for number in 0..count {
        let name = format!("n{number}");
        let zone = if number % 2 == 0 { "a" } else { "b" };
        let mut node: Value = serde_json::to_value(fixtures::node(&name)).expect("a node");
        node["metadata"]["labels"]["zone"] = json!(zone);
        cluster.nodes.push(node);
        let mut of_node = if equal { seed.clone() } else { Random::new(random.within(0, u64::MAX - 1)) };
        if boards {
            publish_boards(&mut cluster, &mut of_node, &name);
        } else {
            publish_synthetic(&mut cluster, &mut of_node, &name);
        }
    }
    if random.percent(60) {
        publish_others(&mut cluster, random);
    }
    cluster.published = cluster.slices.clone();
    if random.percent(25) {
        cluster.features.insert("DeviceTaintRules");
        for number in 0..random.count(1, 2) {
            let rule = rule(random, &cluster, number);
            cluster.slices.iter_mut().for_each(|slice| apply(&rule, slice));
            cluster.rules.push(rule);
        }
    }
    cluster
}

/// Network cards of another driver, beside GPUs or not.
fn publish_others(cluster: &mut Cluster, random: &mut Random) {
    cluster.features.insert("devices of another driver");
    let roots: &[&str] = if cluster.boards { &["pci0000:00", "pci0000:01"] } else { &["pci0", "pci1"] };
    for node in &cluster.nodes {
        let name = node["metadata"]["name"].as_str().expect("named");
        let devices: Vec<Value> = (0..random.count(1, 2))
            .map(|number| {
                json!({"name": format!("nic-{number}"), "attributes":
                    {"resource.kubernetes.io/pcieRoot": {"string": *random.of(roots)}, "good": {"bool": true}}})
            })
            .collect();
        cluster.slices.push(json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
            "metadata": {"name": format!("0-nic-{name}")},
            "spec": {"driver": OTHER_DRIVER, "nodeName": name, "devices": devices,
                "pool": {"name": name, "generation": 1, "resourceSliceCount": 1}}}));
    }
}

/// A rule about some of the devices that there are, or about none.
fn rule(random: &mut Random, cluster: &Cluster, number: usize) -> Value {
    let slice = &random.of(&cluster.slices)["spec"];
    let mut selector = json!({});
    if random.percent(40) {
        selector["driver"] = json!(*random.of(&[DRIVER, DRIVER, OTHER_DRIVER]));
    }
    if random.percent(50) {
        selector["pool"] = slice["pool"]["name"].clone();
    }
    if random.percent(40) {
        let devices = slice["devices"].as_array().filter(|devices| !devices.is_empty());
        selector["device"] =
            devices.map_or_else(|| json!("nothing"), |devices| random.of(devices)["name"].clone());
    }
    let effect = *random.of(&["NoSchedule", "NoSchedule", "NoExecute", "None"]);
    let mut taint = json!({"key": *random.of(&["sick", "lost", "ruled"]), "effect": effect});
    if random.percent(30) {
        taint["value"] = json!("yes");
    }
    let mut spec = json!({"taint": taint});
    // Without a selector a rule is about nothing.
    if random.percent(95) {
        spec["deviceSelector"] = selector;
    }
    json!({"metadata": {"name": format!("rule-{number}")}, "spec": spec})
}

/// What kube-scheduler makes of a rule before its allocator sees the slices.
fn apply(rule: &Value, slice: &mut Value) {
    let Some(selector) = rule["spec"].get("deviceSelector") else { return };
    let spec = &mut slice["spec"];
    let is = |name: &str, value: &Value| selector.get(name).is_none_or(|wanted| wanted == value);
    if !is("driver", &spec["driver"]) || !is("pool", &spec["pool"]["name"]) {
        return;
    }
    for device in spec["devices"].as_array_mut().into_iter().flatten() {
        if !is("device", &device["name"]) {
            continue;
        }
        if device.get("taints").is_none() {
            device["taints"] = json!([]);
        }
        device["taints"].as_array_mut().expect("a list").push(rule["spec"]["taint"].clone());
    }
}

fn classes() -> Vec<Value> {
    let own = format!(r#"device.driver == "{DRIVER}""#);
    let kind = format!(r#"{own} && device.attributes["{DRIVER}"].?kind.orValue("") == "a""#);
    let config = |value: &str| json!({"opaque": {"driver": DRIVER, "parameters": {"from": value}}});
    let class = |name: &str, expressions: &[&str]| {
        let selectors: Vec<Value> = expressions.iter().map(|e| json!({"cel": {"expression": e}})).collect();
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
            "metadata": {"name": name}, "spec": {"selectors": selectors}})
    };
    let mut all = vec![
        class("any", &[&own]),
        class("kind-a", &[&kind]),
        class("shared", &[&own, "device.allowMultipleAllocations"]),
        class("nic", &[&format!(r#"device.driver == "{OTHER_DRIVER}""#)]),
    ];
    all[1]["spec"]["config"] = json!([config("kind-a"), config("kind-a-again")]);
    all[2]["spec"]["config"] = json!([config("shared")]);
    all.extend(
        fixtures::classes_with_mig_shares().iter().map(|class| serde_json::to_value(class).expect("a class")),
    );
    all
}

/// A smaller board: four memory slices, four profiles.
fn a30(node: &str, minor: u32) -> aliquot_model::GpuInfo {
    let mut info = fixtures::h100(node, minor);
    info.product_name = "NVIDIA A30".to_owned();
    info.architecture = Architecture::Ampere;
    info.compute_capability = (8, 0);
    info.memory_bytes = 24 << 30;
    info.multiprocessors = 56;
    let MigCapability::Supported { profiles, .. } = &mut info.mig else { panic!("the H100 has partitions") };
    let all = [
        ("1g.6gb", 14, 6_u64, 14, 1, &[0, 1, 2, 3][..]),
        ("2g.12gb", 5, 12, 28, 2, &[0, 2]),
        ("4g.24gb", 0, 24, 56, 4, &[0]),
    ];
    let pattern = profiles[0].clone();
    *profiles = all
        .into_iter()
        .map(|(name, id, gib, sms, size, starts)| MigProfile {
            name: aliquot_model::ProfileName::new(name),
            id,
            nvml_profile: id,
            memory_bytes: gib << 30,
            multiprocessors: sms,
            compute_slices: size,
            max_instances: u32::try_from(starts.len()).expect("few"),
            placements: starts.iter().map(|start| Placement::new(*start, size)).collect(),
            ..pattern.clone()
        })
        .collect();
    info
}

fn publish_boards(cluster: &mut Cluster, random: &mut Random, node: &str) {
    let small = random.percent(50);
    let gpus: Vec<GpuState> = (0..u32::try_from(random.count(1, 2)).expect("small"))
        .map(|minor| fixtures::state(if small { a30(node, minor) } else { fixtures::h100(node, minor) }))
        .collect();
    let options = fixtures::options(AllocatorMode::Scheduler, random.percent(50));
    let slices = fixtures::slices_by(node, &gpus, &options, 1);
    cluster.slices.extend(slices.iter().map(|slice| serde_json::to_value(slice).expect("a slice")));
    cluster.features.extend(["counters", "shareable devices"]);
}

fn publish_synthetic(cluster: &mut Cluster, random: &mut Random, node: &str) {
    let pools = if random.percent(25) { 2 } else { 1 };
    if pools > 1 {
        cluster.features.insert("several pools on a node");
    }
    for pool in 0..pools {
        let name = if pool == 0 { format!("{DRIVER}/{node}") } else { format!("{DRIVER}/{node}/more") };
        publish_pool(cluster, random, node, &name);
    }
}

fn publish_pool(cluster: &mut Cluster, random: &mut Random, node: &str, pool: &str) {
    let gpus = random.count(1, 3);
    let mirrored = random.percent(40);
    let totals: Vec<(u64, u64)> = (0..gpus).map(|_| (random.within(1, 5), random.within(1, 5))).collect();
    let total = |gpu: usize| if mirrored { totals[0] } else { totals[gpu] };
    let sets: Vec<Value> = (0..gpus)
        .map(|gpu| {
            json!({"name": format!("gpu-{gpu}"), "counters": {
                "one": {"value": total(gpu).0.to_string()}, "two": {"value": total(gpu).1.to_string()}}})
        })
        .collect();
    let per_gpu = random.count(1, 4);
    let pattern: Vec<Value> = (0..per_gpu).map(|_| device(random, &mut cluster.features)).collect();
    let mut devices = Vec::new();
    for gpu in 0..gpus {
        for (number, pattern) in pattern.iter().enumerate() {
            let mut device = if mirrored && !random.percent(8) {
                pattern.clone()
            } else {
                self::device(random, &mut cluster.features)
            };
            device["name"] = json!(format!("dev-{gpu}-{number}"));
            draw(random, &mut cluster.features, &mut device, gpu, gpus, mirrored);
            devices.push(device);
        }
    }
    let generation = 3;
    if random.percent(6) && devices.len() > 1 {
        cluster.features.insert("invalid pool");
        if random.percent(50) {
            devices[1]["name"] = devices[0]["name"].clone();
        } else {
            devices[0]["consumesCounters"] =
                json!([{"counterSet": "nowhere", "counters": {"one": {"value": "1"}}}]);
        }
    }
    let stale = random.percent(20);
    let incomplete = random.percent(8);
    let halves = if random.percent(40) && devices.len() > 1 { 2 } else { 1 };
    let per_slice = devices.len().div_ceil(halves);
    let chunks: Vec<&[Value]> = devices.chunks(per_slice).collect();
    let count = chunks.len() + 1 + usize::from(incomplete);
    let slice = |name: String, generation: u64, count: usize| {
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
            "spec": {"driver": DRIVER, "nodeName": node,
                "pool": {"name": pool, "generation": generation, "resourceSliceCount": count}}})
    };
    let object = pool.replace(['/', '.'], "-");
    let mut counters = slice(format!("0-{object}"), generation, count);
    counters["spec"]["sharedCounters"] = json!(sets);
    cluster.slices.push(counters);
    for (number, chunk) in chunks.iter().enumerate() {
        let mut part = slice(format!("{}-{object}", number + 1), generation, count);
        part["spec"]["devices"] = json!(chunk);
        cluster.slices.push(part);
    }
    if stale {
        cluster.features.insert("older generation");
        let mut old = slice(format!("9-{object}"), generation - 1, 1);
        let mut left: Vec<Value> = devices.iter().take(2).cloned().collect();
        for device in &mut left {
            let fields = device.as_object_mut().expect("an object");
            fields.remove("consumesCounters");
            fields.remove("taints");
        }
        if left.len() > 1 {
            left[1]["name"] = json!("dev-0-99");
        }
        left[0]["name"] = json!("dev-0-98");
        old["spec"]["devices"] = json!(left);
        cluster.slices.push(old);
    }
    if incomplete {
        cluster.features.insert("incomplete pool");
    }
}

fn device(random: &mut Random, features: &mut Features) -> Value {
    let mut attributes = json!({
        "kind": {"string": *random.of(&["a", "b"])},
        "index": {"int": random.within(0, 2)},
        "good": {"bool": random.percent(70)},
        "driverVersion": {"version": *random.of(&["1.2.3", "2.0.0"])},
    });
    if random.percent(80) {
        attributes["zone"] = json!({"string": *random.of(&["x", "y"])});
    }
    if random.percent(50) {
        attributes["resource.kubernetes.io/pcieRoot"] = json!({"string": *random.of(&["pci0", "pci1"])});
    }
    let shared = random.percent(40);
    let mut object = json!({"attributes": attributes});
    let mut capacity = json!({});
    for name in ["size", "units"] {
        if random.percent(if name == "size" { 65 } else { 25 }) {
            capacity[name] = self::capacity(random, shared);
        }
    }
    object["capacity"] = capacity;
    if shared {
        features.insert("shareable devices");
        object["allowMultipleAllocations"] = json!(true);
    }
    let mut taints = Vec::new();
    if random.percent(12) {
        taints.push(json!({"key": "sick", "effect": "NoSchedule"}));
    }
    if random.percent(5) {
        taints.push(json!({"key": "lost", "value": "yes", "effect": "NoExecute"}));
    }
    if random.percent(5) {
        taints.push(json!({"key": "hint", "effect": "None"}));
    }
    if !taints.is_empty() {
        features.insert("device taints");
        object["taints"] = json!(taints);
    }
    object
}

/// A capacity with a policy that the API server accepts; only shared devices may have one.
fn capacity(random: &mut Random, shared: bool) -> Value {
    let value = random.within(4, 12);
    let mut capacity = json!({"value": value.to_string()});
    if !shared {
        return capacity;
    }
    match random.within(0, 3) {
        0 => {}
        1 => {
            let step = random.within(1, 3);
            let least = random.within(0, 2);
            let most = least + step * ((value - least) / step);
            capacity["requestPolicy"] = json!({"default": (least + step).to_string(),
                "validRange": {"min": least.to_string(), "max": most.to_string(), "step": step.to_string()}});
        }
        2 => {
            capacity["requestPolicy"] = json!({"default": "500m",
                "validRange": {"min": "500m", "step": "250m"}});
        }
        _ => {
            capacity["requestPolicy"] = json!({"default": "1", "validValues": ["1", "2", "4"]});
        }
    }
    capacity
}

fn draw(
    random: &mut Random,
    features: &mut Features,
    device: &mut Value,
    gpu: usize,
    gpus: usize,
    mirrored: bool,
) {
    if !mirrored && random.percent(25) {
        return;
    }
    features.insert("counters");
    let mut amounts = |gpu: usize| {
        json!({"counterSet": format!("gpu-{gpu}"), "counters": {
            "one": {"value": random.within(0, 2).to_string()}, "two": {"value": random.within(0, 3).to_string()}}})
    };
    let mut consumed = vec![amounts(gpu)];
    if gpus > 1 && !mirrored && gpu == 0 {
        consumed.push(amounts(1));
    }
    device["consumesCounters"] = json!(consumed);
}
