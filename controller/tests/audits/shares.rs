//! Shares that grow and shrink: whether their limits ever were more than what was reserved.

use super::{consumed, results};
use aliquot_api::v1alpha1::node_limits::ShareName;
use aliquot_api::v1alpha1::{NodeLimitsSpec, NodeLimitsStatus};
use aliquot_control_plane::AuditEntry;
use aliquot_model::names::{COMPANION_OF, LIMITS};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Memory of a GPU.
pub const MEMORY: u64 = 80 << 30;

/// Memory and compute.
type Size = (u64, u64);

fn both(one: Size, other: Size, choose: impl Fn(u64, u64) -> u64) -> Size {
    (choose(one.0, other.0), choose(one.1, other.1))
}

/// A claim's shares.
struct Held {
    uid: String,
    /// By share id: the device, and what of it.
    shares: BTreeMap<String, (String, Size)>,
    users: Vec<String>,
    wish: Option<String>,
    /// For which share of which claim.
    companion_of: Option<ShareName>,
}

impl Held {
    fn read(claim: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let shares = results(claim).iter().filter(|result| !result["shareID"].is_null());
        let device = |r: &Value| format!("{}/{}", text(&r["pool"]), text(&r["device"]));
        let users = claim["status"]["reservedFor"].as_array().into_iter().flatten();
        let of = claim["metadata"]["annotations"][COMPANION_OF].as_str();
        Self {
            uid: text(&claim["metadata"]["uid"]),
            shares: shares.map(|r| (text(&r["shareID"]), (device(r), consumed(r)))).collect(),
            users: users.map(|user| text(&user["uid"])).collect(),
            wish: claim["metadata"]["annotations"][LIMITS].as_str().map(str::to_owned),
            companion_of: of.map(|of| {
                let parts: Vec<&str> = of.split('/').collect();
                ShareName { uid: parts[1].to_owned(), share_id: parts[2].to_owned() }
            }),
        }
    }
}

/// What a node was told and may still go by.
#[derive(Default)]
struct Told {
    /// From the generation that it confirmed on.
    generations: BTreeMap<i64, BTreeMap<ShareName, Size>>,
    used: BTreeMap<ShareName, u64>,
}

#[derive(Default)]
struct Now {
    claims: BTreeMap<(String, String), Held>,
    pods: BTreeSet<String>,
    nodes: BTreeMap<String, Told>,
}

impl Now {
    fn take(&mut self, entry: &AuditEntry) {
        let key = (entry.namespace.clone(), entry.name.clone());
        match entry.origin.resource.as_str() {
            "resourceclaims" => match &entry.after {
                Some(claim) => drop(self.claims.insert(key, Held::read(claim))),
                None => drop(self.claims.remove(&key)),
            },
            "pods" => {
                let object = entry.after.as_ref().or(entry.before.as_ref()).unwrap();
                let uid = object["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
                let there =
                    entry.after.as_ref().is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_null());
                if there {
                    self.pods.insert(uid)
                } else {
                    self.pods.remove(&uid)
                };
            }
            "nodelimits" => {
                let Some(object) = &entry.after else { return drop(self.nodes.remove(&entry.name)) };
                let spec: NodeLimitsSpec = serde_json::from_value(object["spec"].clone()).expect("a spec");
                let status: NodeLimitsStatus =
                    serde_json::from_value(object["status"].clone()).unwrap_or_default();
                let told = self.nodes.entry(entry.name.clone()).or_default();
                let limits = spec.shares.into_iter();
                let limits =
                    limits.map(|l| (l.share, (l.memory_bytes, u64::from(l.cores_percent)))).collect();
                told.generations
                    .insert(object["metadata"]["generation"].as_i64().unwrap_or_default(), limits);
                told.generations.retain(|generation, _| *generation >= status.observed_generation);
                told.used = status.beyond.into_iter().map(|b| (b.share, b.used_bytes)).collect();
            }
            _ => {}
        }
    }

    /// What all companions of a share reserve.
    fn companions(&self, share: &ShareName) -> Size {
        let own = self.claims.values().filter(|held| held.companion_of.as_ref() == Some(share));
        own.flat_map(|held| held.shares.values())
            .fold((0, 0), |sum, (_, size)| both(sum, *size, |a, b| a + b))
    }

    /// Shares of claims that a pod uses: name, what was allocated, what the node may go by, what is reserved.
    fn shares(&self) -> impl Iterator<Item = (ShareName, Size, Size, Size)> {
        let told: BTreeSet<&ShareName> =
            self.nodes.values().flat_map(|told| told.generations.values().flat_map(BTreeMap::keys)).collect();
        let used = |held: &&Held| held.users.iter().any(|user| self.pods.contains(user));
        let claims: HashMap<&str, &Held> =
            self.claims.values().filter(used).map(|held| (held.uid.as_str(), held)).collect();
        told.into_iter().filter_map(move |share| {
            let (_, own) = claims.get(share.uid.as_str())?.shares.get(&share.share_id)?;
            let mut limit = *own;
            for told in self.nodes.values() {
                for generation in told.generations.values() {
                    limit = both(limit, generation.get(share).copied().unwrap_or(*own), u64::max);
                }
                limit.0 = limit.0.max(told.used.get(share).copied().unwrap_or(0));
            }
            Some((share.clone(), *own, limit, both(*own, self.companions(share), |a, b| a + b)))
        })
    }

    /// What is given of each device in shares.
    fn devices(&self) -> BTreeMap<&str, Size> {
        let mut devices: BTreeMap<&str, Size> = BTreeMap::new();
        for (device, size) in self.claims.values().flat_map(|held| held.shares.values()) {
            let sum = devices.entry(device).or_default();
            *sum = both(*sum, *size, |a, b| a + b);
        }
        devices
    }
}

/// How many companions were given devices, and every moment at which a limit could be more than what was
/// reserved for it, or more of a device was given than it has.
pub fn judge(record: &[AuditEntry]) -> (usize, Vec<String>) {
    let mut now = Now::default();
    let mut beyond = Vec::new();
    let mut companions = BTreeSet::new();
    for entry in record {
        now.take(entry);
        if !["resourceclaims", "nodelimits"].contains(&entry.origin.resource.as_str()) {
            continue;
        }
        for (share, _, limit, reserved) in now.shares() {
            if limit.0 > reserved.0 || limit.1 > reserved.1 {
                beyond.push(format!("{} {share:?}: {limit:?} of {reserved:?}", entry.revision));
            }
        }
        for (device, (memory, cores)) in now.devices() {
            if memory > MEMORY || cores > 100 {
                beyond.push(format!("{} {device}: {memory} bytes, {cores} %", entry.revision));
            }
        }
        let key = (entry.namespace.clone(), entry.name.clone());
        if let Some(held) = now.claims.get(&key)
            && held.companion_of.is_some()
            && !held.shares.is_empty()
        {
            companions.insert(held.uid.clone());
        }
    }
    (companions.len(), beyond)
}

/// What a wish says.
fn size_of(wish: Option<&str>, own: Size) -> Size {
    wish.into_iter().flat_map(|text| text.split(',')).fold(own, |size, part| match part.split_once('=') {
        Some(("memory", gib)) => (gib.trim_end_matches("Gi").parse::<u64>().expect("GiB") << 30, size.1),
        Some((_, cores)) => (size.0, cores.parse().expect("percent")),
        None => panic!("what is {part}?"),
    })
}

/// How many shares have companions or a limit of their own now that nothing happens; fails if one has a limit
/// other than what it wishes for and has reserved, or a companion that is of no use for that. `unbound` are namespaces
/// without quotas and used-up budgets.
pub fn quiet(record: &[AuditEntry], unbound: &[&str]) -> usize {
    let mut now = Now::default();
    for entry in record {
        now.take(entry);
    }
    let limits: BTreeMap<ShareName, Size> = now.shares().map(|(share, _, limit, _)| (share, limit)).collect();
    let mut wrong = Vec::new();
    let mut shares = 0;
    let mut known = BTreeSet::new();
    let used = |held: &&Held| held.users.iter().any(|user| now.pods.contains(user));
    for ((namespace, _), held) in now.claims.iter().filter(|(_, held)| held.companion_of.is_none()) {
        for (share_id, (_, own)) in held.shares.iter().filter(|_| used(&held)) {
            let share = ShareName { uid: held.uid.clone(), share_id: share_id.clone() };
            let companions = now.claims.values().filter(|held| held.companion_of.as_ref() == Some(&share));
            let companions: Vec<Size> =
                companions.flat_map(|held| held.shares.values()).map(|(_, size)| *size).collect();
            let limit = limits.get(&share).copied().unwrap_or(*own);
            known.insert(share);
            shares += usize::from(limit != *own || !companions.is_empty());
            let wish = size_of(held.wish.as_deref(), *own);
            let need = both(wish, *own, u64::saturating_sub);
            let sum = companions.iter().fold((0, 0), |sum, size| both(sum, *size, |a, b| a + b));
            let reserved = both(*own, sum, |a, b| a + b);
            let use_of = |size: Size| both(size, need, u64::min);
            let useless = companions.iter().any(|size| use_of(both(sum, *size, |a, b| a - b)) == use_of(sum));
            // Quotas and budgets may keep a companion from being exchanged for a smaller one.
            let surplus = unbound.contains(&namespace.as_str()) && use_of(sum) == need && sum != need;
            if limit != both(*own, both(wish, reserved, u64::min), u64::max) || useless || surplus {
                wrong.push(format!(
                    "{namespace} {}: allocated {own:?}, wish {wish:?}, limit {limit:?}, companions {companions:?}",
                    held.uid
                ));
            }
        }
    }
    for held in now.claims.values().filter(|held| !held.shares.is_empty()) {
        if let Some(of) = held.companion_of.as_ref().filter(|of| !known.contains(of)) {
            wrong.push(format!("companion {} of {of:?}, which nobody uses", held.uid));
        }
    }
    if !wrong.is_empty() {
        let uids: BTreeSet<&str> = now
            .claims
            .values()
            .map(|held| held.uid.as_str())
            .filter(|uid| wrong.iter().any(|w| w.contains(uid)))
            .collect();
        show(record, &uids);
    }
    assert_eq!(wrong, Vec::<String>::new(), "what shares hold that wished for something");
    shares
}

/// Every write of these claims, of their companions and of limits that name them.
fn show(record: &[AuditEntry], uids: &BTreeSet<&str>) {
    for entry in record {
        let Some(object) = entry.after.as_ref().or(entry.before.as_ref()) else { continue };
        let about = match entry.origin.resource.as_str() {
            "resourceclaims" => {
                let of = object["metadata"]["annotations"][COMPANION_OF].as_str().unwrap_or_default();
                let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
                uids.iter().any(|known| uid == *known || of.contains(known))
            }
            "nodelimits" => uids.iter().any(|uid| object["spec"].to_string().contains(uid)),
            _ => false,
        };
        if about {
            let (origin, gone) = (&entry.origin, entry.after.is_none());
            let said = match entry.origin.resource.as_str() {
                "resourceclaims" => format!(
                    "{:?} {} {}",
                    results(object).iter().map(consumed).collect::<Vec<_>>(),
                    object["status"]["reservedFor"],
                    object["metadata"]["annotations"]
                ),
                _ => object["spec"].to_string(),
            };
            eprintln!(
                "{} {} {} {} {}/{} gone: {gone} {said}",
                entry.time, entry.revision, origin.user, origin.verb, entry.namespace, entry.name
            );
        }
    }
}
