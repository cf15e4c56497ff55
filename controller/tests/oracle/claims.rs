//! Random pods and claims.

use super::fixtures::{self, DRIVER};
use super::random::Random;
use super::scene::Features;
use serde_json::{Value, json};

/// A pod with claims that are to be allocated for it.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub pod: Value,
    pub claims: Vec<Value>,
    /// Claims of the pod for devices of another driver alone: not ours to allocate.
    pub others: Vec<Value>,
    /// What the case is about.
    pub features: Features,
}

/// A pod. `held` is a claim that is allocated already and that the pod may share.
pub fn wanted(
    random: &mut Random,
    number: usize,
    (boards, nics): (bool, bool),
    held: Option<&str>,
) -> Wanted {
    let mut features = Features::new();
    let count = if random.percent(25) { 2 } else { 1 };
    if count > 1 {
        features.insert("several claims");
    }
    let broken = random.within(0, 99);
    let mut claims = Vec::new();
    for claim in 0..count {
        let mut spec = spec(random, boards, &mut features);
        if claim == 0 {
            spoil(&mut spec, broken, random, &mut features);
            if nics && random.percent(16) {
                beside(&mut spec, random, &mut features);
            }
        }
        claims.push(claim_of(&format!("c{number}-{claim}"), &spec));
    }
    let mut others = Vec::new();
    if nics && random.percent(20) {
        features.insert("claim for another driver");
        let exactly = json!({"deviceClassName": "nic", "allocationMode": "ExactCount", "count": 1});
        let spec = json!({"devices": {"requests": [{"name": "nic", "exactly": exactly}]}});
        others.push(claim_of(&format!("c{number}-nic"), &spec));
    }
    let mut names: Vec<String> = claims
        .iter()
        .chain(&others)
        .map(|c| c["metadata"]["name"].as_str().expect("named").to_owned())
        .collect();
    if let Some(held) = held {
        features.insert("claim that is allocated already");
        names.push(held.to_owned());
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let name = format!("p{number}");
    let mut pod: Value = serde_json::to_value(fixtures::pod(&name, &names)).expect("a pod");
    pod["metadata"]["uid"] = json!(format!("uid-{name}"));
    pod["metadata"]["resourceVersion"] = json!("1");
    if random.percent(12) {
        features.insert("node selector");
        pod["spec"]["nodeSelector"] = json!({"zone": *random.of(&["a", "b"])});
    }
    Wanted { pod, claims, others, features }
}

fn claim_of(name: &str, spec: &Value) -> Value {
    let mut object: Value = serde_json::to_value(fixtures::claim(name, spec)).expect("a claim");
    object["metadata"]["uid"] = json!(format!("uid-{name}"));
    object["metadata"]["resourceVersion"] = json!("1");
    object
}

/// A request for a device of another driver in the same claim, mostly at the same PCIe root.
pub const MIXED: &str = "device of another driver in the same claim";

fn beside(spec: &mut Value, random: &mut Random, features: &mut Features) {
    features.insert(MIXED);
    let devices = &mut spec["devices"];
    let first = devices["requests"][0]["name"].clone();
    let exactly = json!({"deviceClassName": "nic", "allocationMode": "ExactCount", "count": 1});
    devices["requests"].as_array_mut().expect("a list").push(json!({"name": "nic", "exactly": exactly}));
    if random.percent(70) {
        features.insert("aligned with another driver's device");
        let aligned =
            json!({"matchAttribute": "resource.kubernetes.io/pcieRoot", "requests": [first, "nic"]});
        if devices.get("constraints").is_none() {
            devices["constraints"] = json!([]);
        }
        devices["constraints"].as_array_mut().expect("a list").push(aligned);
    }
}

/// What makes a claim wrong or too large.
fn spoil(spec: &mut Value, broken: u64, random: &mut Random, features: &mut Features) {
    let request = &mut spec["devices"]["requests"][0];
    let exact = match request.get("exactly") {
        Some(_) => &mut request["exactly"],
        None => &mut request["firstAvailable"][0],
    };
    match broken {
        0..=6 => {
            features.insert("selector that does not compile");
            exact["selectors"] = json!([{"cel": {"expression": "device.attributes[ == 1"}}]);
        }
        7..=14 => {
            features.insert("selector that fails at run time");
            let expression = format!(r#"device.attributes["{DRIVER}"].missing == "x""#);
            exact["selectors"] = json!([{"cel": {"expression": expression}}]);
        }
        15..=22 => {
            features.insert("limit on results");
            exact["allocationMode"] = json!("ExactCount");
            exact["count"] = json!(*random.of(&[17u32, 33, 40]));
        }
        _ => {}
    }
}

fn spec(random: &mut Random, boards: bool, features: &mut Features) -> Value {
    let count = if random.percent(45) { random.count(2, 3) } else { 1 };
    if count > 1 {
        features.insert("several requests");
    }
    let mut requests = Vec::new();
    let mut names = Vec::new();
    for number in 0..count {
        let name = format!("r{number}");
        if random.percent(22) {
            features.insert("firstAvailable");
            let subs: Vec<Value> = (0..random.count(2, 3))
                .map(|sub| {
                    let mut exact = exact(random, boards, features);
                    exact["name"] = json!(format!("s{sub}"));
                    exact
                })
                .collect();
            names.push(format!("{name}/s{}", random.count(0, subs.len() - 1)));
            requests.push(json!({"name": name, "firstAvailable": subs}));
        } else {
            let mut exact = exact(random, boards, features);
            if random.percent(9) {
                features.insert("admin access");
                exact["adminAccess"] = json!(true);
            }
            requests.push(json!({"name": name, "exactly": exact}));
        }
        names.push(name);
    }
    let mut spec = json!({"devices": {"requests": requests}});
    if random.percent(40) {
        let constraints: Vec<Value> =
            (0..random.count(1, 2)).map(|_| constraint(random, boards, &names, features)).collect();
        spec["devices"]["constraints"] = json!(constraints);
    }
    if random.percent(25) {
        features.insert("config");
        let configs: Vec<Value> = (0..random.count(1, 2))
            .map(|number| {
                let parameters = json!({"from": format!("claim-{number}")});
                let mut config = json!({"opaque": {"driver": DRIVER, "parameters": parameters}});
                if random.percent(60) {
                    config["requests"] = json!([random.of(&names)]);
                }
                config
            })
            .collect();
        spec["devices"]["config"] = json!(configs);
    }
    spec
}

fn constraint(random: &mut Random, boards: bool, names: &[String], features: &mut Features) -> Value {
    let own = |name: &str| format!("{DRIVER}/{name}");
    let attribute = if boards {
        let all = [own("minor"), own("profile"), own("type"), "resource.kubernetes.io/pcieRoot".to_owned()];
        random.of(&all).clone()
    } else {
        let all = [
            own("zone"),
            own("kind"),
            own("index"),
            "resource.kubernetes.io/pcieRoot".to_owned(),
            own("nothing"),
        ];
        random.of(&all).clone()
    };
    let kind = if random.percent(55) { "matchAttribute" } else { "distinctAttribute" };
    features.insert(kind);
    let mut constraint = json!({kind: attribute});
    if random.percent(40) {
        let one = random.of(names).clone();
        let other = random.of(names).clone();
        constraint["requests"] = if one == other { json!([one]) } else { json!([one, other]) };
    }
    constraint
}

fn exact(random: &mut Random, boards: bool, features: &mut Features) -> Value {
    features.insert("class selectors");
    let mut exact =
        if boards { board_request(random, features) } else { synthetic_request(random, features) };
    if random.percent(14) {
        features.insert("All");
        exact["allocationMode"] = json!("All");
    } else {
        let count = if random.percent(30) { random.within(2, 3) } else { 1 };
        if count > 1 {
            features.insert("several devices");
        }
        exact["allocationMode"] = json!("ExactCount");
        exact["count"] = json!(count);
    }
    if random.percent(30) {
        features.insert("tolerations");
        let all = [
            json!({"key": "sick", "operator": "Exists"}),
            json!({"operator": "Exists"}),
            json!({"key": "lost", "operator": "Equal", "value": "yes", "effect": "NoExecute"}),
            json!({"key": "lost", "operator": "Equal", "value": "no"}),
            json!({"key": "sick", "operator": "Exists", "effect": "NoExecute"}),
        ];
        exact["tolerations"] = json!([random.of(&all), random.of(&all)]);
    }
    exact
}

fn synthetic_request(random: &mut Random, features: &mut Features) -> Value {
    let class = *random.of(&["any", "any", "any", "kind-a", "shared"]);
    let mut exact = json!({"deviceClassName": class});
    let own = format!(r#"device.attributes["{DRIVER}"]"#);
    if random.percent(50) {
        features.insert("claim selectors");
        let (feature, expression) = match random.within(0, 9) {
            0 => ("optional syntax", format!(r#"{own}.?zone.orValue("none") == "x""#)),
            1 => ("optional syntax", format!(r#"{own}[?"zone"].hasValue()"#)),
            2 => ("cel.bind", format!(r#"cel.bind(a, {own}, a.kind == "b" || a.good)"#)),
            3 => ("cel.bind", format!("cel.bind(n, {own}.index, n > 0 && n < 3)")),
            4 => ("claim selectors", format!(r#"{own}.driverVersion.isGreaterThan(semver("1.9.0"))"#)),
            5 => ("claim selectors", format!(r#"has({own}.zone) && {own}.zone in ["x", "z"]"#)),
            6 => (
                "claim selectors",
                format!(
                    r#"has(device.capacity["{DRIVER}"].size) && device.capacity["{DRIVER}"].size.compareTo(quantity("6")) >= 0"#
                ),
            ),
            7 => ("claim selectors", format!(r#"{own}.kind.matches("^[ab]$") && {own}.good"#)),
            8 => ("claim selectors", "!device.allowMultipleAllocations".to_owned()),
            _ => ("claim selectors", format!(r#"{own}.kind == "a""#)),
        };
        features.insert(feature);
        exact["selectors"] = json!([{"cel": {"expression": expression}}]);
    }
    if random.percent(35) {
        features.insert("capacity requests");
        let amounts = ["0", "1", "2", "3", "1500m", "300m", "5", "7", "11"];
        let mut wanted = json!({"size": *random.of(&amounts)});
        if random.percent(15) {
            wanted["units"] = json!(*random.of(&amounts));
        }
        exact["capacity"] = json!({"requests": wanted});
    }
    exact
}

fn board_request(random: &mut Random, features: &mut Features) -> Value {
    let own = format!(r#"device.attributes["{DRIVER}"]"#);
    match random.within(0, 7) {
        0 => json!({"deviceClassName": "gpu.aliquot.dev"}),
        // Boards without shares of partitions have nothing for these.
        6 | 7 => {
            features.insert("shares of partitions");
            let memory = *random.of(&["1Gi", "5Gi", "9Gi", "12345678"]);
            let cores = *random.of(&["1", "10", "50", "100"]);
            let requests = json!({"requests": {"memory": memory, "cores": cores}});
            let mut request = json!({"deviceClassName": "mig-share.aliquot.dev", "capacity": requests});
            if random.percent(60) {
                let profile = *random.of(&["1g.10gb", "2g.20gb", "3g.40gb", "1g.6gb", "2g.12gb"]);
                let expression = format!(r#"{own}.profile == "{profile}""#);
                request["selectors"] = json!([{"cel": {"expression": expression}}]);
            }
            request
        }
        1 => {
            features.insert("capacity requests");
            let memory = *random.of(&["1Gi", "5Gi", "20Gi", "12345678", "79Gi"]);
            let cores = *random.of(&["1", "10", "33", "80"]);
            json!({"deviceClassName": "share.aliquot.dev", "capacity": {"requests": {"memory": memory, "cores": cores}}})
        }
        2 => json!({"deviceClassName": "share.aliquot.dev"}),
        _ => {
            features.insert("claim selectors");
            let profiles = ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "1g.6gb", "2g.12gb", "4g.24gb"];
            let profile = *random.of(&profiles);
            let expression = match random.within(0, 2) {
                0 => format!(r#"{own}.profile == "{profile}""#),
                1 => {
                    features.insert("optional syntax");
                    format!(r#"{own}.?profile.orValue("").startsWith("{}")"#, &profile[..2])
                }
                _ => {
                    features.insert("cel.bind");
                    format!(r#"cel.bind(p, {own}.profile, p == "{profile}" || p == "1g.6gb")"#)
                }
            };
            json!({"deviceClassName": "mig.aliquot.dev", "selectors": [{"cel": {"expression": expression}}]})
        }
    }
}
