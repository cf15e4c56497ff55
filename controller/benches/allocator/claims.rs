//! What is asked for: the mix of the measurements.

use crate::cluster::{PRODUCTS, node_name};
use crate::fixtures::{DRIVER, request, share, spec};
use crate::random::Random;
use aliquot_model::names;
use k8s_openapi::api::resource::v1::AllocationResult;
use serde_json::{Value, json};

/// Memory slices of a GPU.
pub(crate) const SLICES: u32 = 8;

/// A profile of an H100.
#[derive(Debug)]
pub(crate) struct Profile {
    pub(crate) name: &'static str,
    pub(crate) id: u32,
    pub(crate) size: u32,
    pub(crate) starts: &'static [u32],
}

/// What is asked for; a partition of all slices stands for the whole GPU.
pub(crate) const PROFILES: [Profile; 6] = [
    Profile { name: "1g.10gb", id: 19, size: 1, starts: &[0, 1, 2, 3, 4, 5, 6] },
    Profile { name: "1g.20gb", id: 15, size: 2, starts: &[0, 2, 4, 6] },
    Profile { name: "2g.20gb", id: 14, size: 2, starts: &[0, 2, 4] },
    Profile { name: "3g.40gb", id: 9, size: 4, starts: &[0, 4] },
    Profile { name: "4g.40gb", id: 5, size: 4, starts: &[0] },
    Profile { name: "7g.80gb", id: 0, size: 8, starts: &[0] },
];

/// How often each profile is asked for, in percent.
pub(crate) type Mix = [u32; PROFILES.len()];

/// The mix of [`PROFILES`].
pub(crate) const USUAL: Mix = [40, 10, 25, 15, 5, 5];

/// A profile by a mix.
pub(crate) fn any_of_mix(mix: &Mix, random: &mut Random) -> usize {
    let mut at = u32::try_from(random.below(100)).expect("small");
    for (number, percent) in mix.iter().enumerate() {
        match at.checked_sub(*percent) {
            None => return number,
            Some(rest) => at = rest,
        }
    }
    0
}

/// A profile by the usual mix.
pub(crate) fn any_profile(random: &mut Random) -> usize {
    any_of_mix(&USUAL, random)
}

/// A request for a partition, by profile alone.
pub(crate) fn by_profile(profile: usize) -> Value {
    crate::fixtures::partition("r", PROFILES[profile].name)
}

/// Memory slices of a device, by its name; a share of the mix counts as one.
pub(crate) fn slices_of(device: &str) -> u32 {
    let profile = PROFILES
        .iter()
        .find(|profile| device.contains(&format!("-{}-{}-", profile.name.replace('.', ""), profile.id)));
    match profile {
        Some(profile) => profile.size,
        None if device.ends_with("-share") => 1,
        None => SLICES,
    }
}

/// An allocation of one partition.
pub(crate) fn partition_at(node: usize, gpu: u32, profile: &Profile, start: u32) -> AllocationResult {
    let node = node_name(node);
    let device = format!("gpu-{gpu}-mig-{}-{}-{start}", profile.name.replace('.', ""), profile.id);
    crate::fixtures::object(json!({
        "allocationTimestamp": "1970-01-01T00:16:40Z",
        "devices": {"results": [
            {"request": "r", "driver": DRIVER, "pool": names::pool_name(DRIVER, &node), "device": device},
        ]},
        "nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]},
        ]},
    }))
}

/// Distinct selectors.
const SELECTORS: usize = 200;

/// The profile of a selector: over all of them as often as the mix has it.
fn profile_of(number: usize) -> usize {
    let mut at = number % 20 * 5;
    for (profile, percent) in USUAL.iter().enumerate() {
        let percent = usize::try_from(*percent).expect("small");
        if at < percent {
            return profile;
        }
        at -= percent;
    }
    0
}

/// A selector whose profile is one of the first so many.
fn any_of(random: &mut Random, profiles: usize) -> usize {
    loop {
        let number = random.below(SELECTORS);
        if profile_of(number) < profiles {
            return number;
        }
    }
}

/// One of the selectors: a profile, and something of the make of a node.
fn selector(number: usize) -> String {
    let attribute = format!(r#"device.attributes["{DRIVER}"]"#);
    let profile = format!(r#"{attribute}.profile == "{}""#, PROFILES[profile_of(number)].name);
    let more = match number % 5 {
        0 => format!("{attribute}.minor >= 0 && {attribute}.minor < {}", 8 + number),
        1 => format!(r#"{attribute}.productName != "{} {number}""#, PRODUCTS[number % PRODUCTS.len()]),
        2 => {
            format!(r#"{attribute}.driverVersion.isGreaterThan(semver("{}.{number}.0"))"#, 500 + number % 60)
        }
        3 => format!(r#"device.capacity["{DRIVER}"].memory.compareTo(quantity("{}Mi")) >= 0"#, 1 + number),
        _ => format!(
            r#"{attribute}.productName.startsWith("NVIDIA") && {attribute}.driverVersion != semver("1.{number}.0")"#
        ),
    };
    format!("{profile} && {more}")
}

fn with(mut request: Value, selector: &str) -> Value {
    request["exactly"]["selectors"] = json!([{"cel": {"expression": selector}}]);
    request
}

/// A claim's spec by the mix: a tenth asks for several devices, a tenth has constraints, a tenth
/// fits nowhere; of the rest one in ten is a share of a GPU.
pub(crate) fn any_spec(random: &mut Random) -> (Value, bool) {
    let number = random.below(SELECTORS);
    let one = |name: &str, number: usize| with(request(name, "mig.aliquot.dev", 1), &selector(number));
    match random.below(100) {
        0..10 => match random.below(3) {
            0 => {
                let count = 2 + u32::try_from(random.below(3)).expect("small");
                let request = request("r", "mig.aliquot.dev", count);
                (spec(&[with(request, &selector(any_of(random, 3)))]), true)
            }
            1 => (spec(&[one("a", number), one("b", any_of(random, 3))]), true),
            _ => (spec(&[request("r", "gpu.aliquot.dev", 2)]), true),
        },
        10..20 => {
            let attribute = match random.below(3) {
                0 => "resource.kubernetes.io/pcieRoot".to_owned(),
                1 => format!("{DRIVER}/parentUUID"),
                _ => format!("{DRIVER}/minor"),
            };
            let mut spec = spec(&[one("a", any_of(random, 3)), one("b", any_of(random, 3))]);
            let kind = if random.below(4) == 0 { "distinctAttribute" } else { "matchAttribute" };
            spec["devices"]["constraints"] = json!([{"requests": ["a", "b"], kind: attribute}]);
            (spec, true)
        }
        20..30 => match random.below(3) {
            0 => (spec(&[request("r", "gpu.aliquot.dev", 9)]), false),
            1 => {
                let nothing = format!(r#"device.attributes["{DRIVER}"].productName == "none {number}""#);
                (spec(&[with(request("r", "gpu.aliquot.dev", 1), &nothing)]), false)
            }
            _ => {
                let newer = 600 + number;
                let nothing = format!(
                    r#"device.attributes["{DRIVER}"].driverVersion.isGreaterThan(semver("{newer}.0.0"))"#
                );
                (spec(&[with(request("r", "mig.aliquot.dev", 1), &nothing)]), false)
            }
        },
        30..37 => (spec(&[share("r", "10Gi", "10")]), true),
        _ => (spec(&[one("r", number)]), true),
    }
}

/// Specs that leave a search the most to try.
pub(crate) fn hardest() -> Vec<(&'static str, Value)> {
    let ours = |name: &str| format!("{DRIVER}/{name}");
    let matching = |requests: &[Value], attributes: [String; 4]| {
        let mut spec = spec(requests);
        let constraint = |attribute: &String| json!({"requests": [], "matchAttribute": attribute});
        spec["devices"]["constraints"] = attributes.iter().map(constraint).collect();
        spec
    };
    let root = "resource.kubernetes.io/pcieRoot".to_owned();
    let make = [ours("productName"), ours("driverVersion"), ours("architecture")];
    let [product, version, architecture] = make;
    let of_one_root = [root, product.clone(), version.clone(), architecture.clone()];
    let of_one_gpu = [ours("parentUUID"), product.clone(), version.clone(), architecture.clone()];
    let of_one_profile = [ours("profile"), product, version, architecture];
    let apart: Vec<Value> = (0..8).map(|n| request(&format!("r{n}"), "gpu.aliquot.dev", 1)).collect();
    let mixed: Vec<Value> = (0..4)
        .map(|n| request(&format!("r{n}"), "mig.aliquot.dev", 6))
        .chain([request("last", "gpu.aliquot.dev", 8)])
        .collect();
    vec![
        ("8 GPUs on one PCIe root", matching(&[request("r", "gpu.aliquot.dev", 8)], of_one_root.clone())),
        ("8 requests for a GPU on one PCIe root", matching(&apart, of_one_root)),
        ("8 partitions of one GPU", matching(&[request("r", "mig.aliquot.dev", 8)], of_one_gpu)),
        ("8 partitions of one profile", matching(&[request("r", "mig.aliquot.dev", 8)], of_one_profile)),
        ("24 partitions and all 8 GPUs beside them", spec(&mixed)),
    ]
}
