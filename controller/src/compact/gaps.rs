//! GPUs that are partly held, who holds them, and how much is free where it is of little use.

use crate::decide::Stage;
use crate::decide::policy::thousandths;
use crate::hold::is_hold;
use crate::index::{Claim, Gpu, Holder, Index, Layout, ObjectKey, Pool, Sym, Uid};
use crate::quantity::Quantity;
use aliquot_model::DeviceName;
use aliquot_model::names::COMPACTION;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// A GPU: its pool and number.
pub(crate) type GpuId = (Sym, u32);

/// What is free in a cluster, in thousandths of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gaps {
    /// On GPUs of which nothing is held.
    pub whole: i64,
    /// On GPUs that are partly held.
    pub partial: i64,
}

impl Gaps {
    /// The part of what is free that lies on partly held GPUs, in thousandths; of nothing, nothing.
    pub fn fragmentation(self) -> i64 {
        let all = self.whole.saturating_add(self.partial);
        if all == 0 { 0 } else { self.partial.saturating_mul(1000) / all }
    }
}

/// A GPU that could be emptied.
#[derive(Debug, Clone)]
pub(super) struct Occupied {
    pub(super) node: Arc<str>,
    pub(super) id: GpuId,
    /// Everybody on it.
    pub(super) pods: Vec<ObjectKey>,
    /// All claims of these pods: a pod moves with all that it has.
    pub(super) claims: HashSet<Uid>,
    /// How many holders it has.
    pub(super) holders: usize,
    held: i64,
}

impl Occupied {
    /// Devices that a pod has on this GPU.
    pub(super) fn devices_of(&self, index: &Index, pod: &ObjectKey) -> Vec<String> {
        let claims = index.pod(pod).into_iter().flat_map(|pod| pod.claim_keys());
        let held = claims.filter_map(|key| index.effective_allocation(&key));
        held.flat_map(|allocation| &allocation.held).map(|held| index.name(held.device).to_owned()).collect()
    }
}

/// Measures with some nodes as they would be.
pub fn measure(index: &Index, stages: &HashMap<Arc<str>, Stage>) -> Gaps {
    let mut gaps = Gaps::default();
    for node in index.nodes_with_pools() {
        let staged = stages.get(node);
        let pools: Vec<&Pool> = match staged {
            Some(stage) => stage.pools().collect(),
            None => index.pools_of_node(node).collect(),
        };
        for pool in pools {
            let Some(layout) = &pool.layout else { continue };
            for gpu in layout.gpus.iter().filter(|gpu| gpu.alone) {
                match free(index, pool, layout, gpu) {
                    (true, part) => gaps.whole = gaps.whole.saturating_add(part),
                    (false, part) => gaps.partial = gaps.partial.saturating_add(part),
                }
            }
        }
    }
    gaps
}

/// Whether nothing of a GPU is held, and how much is free, in thousandths.
fn free(index: &Index, pool: &Pool, layout: &Layout, gpu: &Gpu) -> (bool, i64) {
    let usage = &pool.usage;
    if usage.blocked.contains_key(&gpu.number) {
        return (false, 0);
    }
    let uses = || gpu.devices.iter().filter_map(|at| Some((at, usage.devices.get(at)?)));
    let used = uses().filter(|(_, used)| used.exclusive > 0 || used.shares > 0);
    let mut untouched = true;
    let mut shared: Option<i64> = None;
    for (at, used) in used {
        untouched = false;
        let Some(device) = layout.devices.get(*at as usize) else { continue };
        // A shared partition takes its counters as any other does.
        let of_whole =
            DeviceName::parse(index.name(device.name)).is_none_or(|name| name.partition().is_none());
        if used.shares > 0 && of_whole {
            let capacities = &index.shape(device).capacities;
            let parts = capacities.iter().zip(&used.consumed).filter_map(|((name, capacity), consumed)| {
                let counts = !index.name(*name).ends_with("/slots");
                counts.then(|| thousandths(*consumed, capacity.value))
            });
            shared = Some(1000 - parts.max().unwrap_or_default());
        }
    }
    if untouched {
        return (true, 1000);
    }
    if let Some(left) = shared {
        return (false, left.max(0));
    }
    // On the whole, as each memory slice is a counter of its own.
    let sets = gpu.sets.iter().filter_map(|set| layout.sets.get(usize::from(*set)));
    let parts: Vec<i64> = sets
        .flat_map(|set| {
            let left = usage.free.iter().skip(set.offset);
            set.counters.iter().zip(left).filter(|((_, total), _)| *total > Quantity::ZERO)
        })
        .map(|((_, total), left)| thousandths(*left, *total))
        .collect();
    let count = i64::try_from(parts.len()).unwrap_or(i64::MAX);
    (false, parts.iter().sum::<i64>().checked_div(count).unwrap_or(0).max(0))
}

/// How many hold something of a GPU on a node as it would be.
pub(super) fn holders(index: &Index, stage: &Stage, (pool, gpu): GpuId) -> usize {
    let pools = stage.pools().filter(|of| of.name == pool);
    pools
        .map(|pool| pool.holders.iter().filter(|holder| gpu_of(index, pool, holder) == Some(gpu)).count())
        .sum()
}

fn gpu_of(index: &Index, pool: &Pool, holder: &Holder) -> Option<u32> {
    if holder.admin {
        return None;
    }
    let layout = pool.layout.as_ref()?;
    let device = layout.position(holder.device).and_then(|at| layout.devices.get(at as usize));
    device.map(|device| device.gpu).or_else(|| crate::index::gpu_of_name(index.name(holder.device)))
}

/// The pods on a GPU, if each of them may be moved; none if nothing of it is held.
pub(crate) fn pods_on(index: &Index, (pool, gpu): GpuId) -> Option<BTreeSet<ObjectKey>> {
    let by_uid: HashMap<&Uid, &Claim> = index.claims().map(|claim| (&claim.uid, claim)).collect();
    let pool = index.pool(pool)?;
    let held = pool.holders.iter().filter(|holder| gpu_of(index, pool, holder) == Some(gpu));
    movers(index, &by_uid, &held.collect::<Vec<_>>())
}

/// Partly held GPUs on which everybody may be moved, those with the fewest pods and the least held first.
pub(super) fn occupied(index: &Index) -> Vec<Occupied> {
    let by_uid: HashMap<&Uid, &Claim> = index.claims().map(|claim| (&claim.uid, claim)).collect();
    let mut found = Vec::new();
    for pool in index.pools() {
        let (Some(layout), Some(node)) = (&pool.layout, &pool.node) else { continue };
        let mut gpus: BTreeMap<u32, Vec<&Holder>> = BTreeMap::new();
        for holder in &pool.holders {
            if let Some(gpu) = gpu_of(index, pool, holder) {
                gpus.entry(gpu).or_default().push(holder);
            }
        }
        for (number, held) in gpus {
            let Some(gpu) = layout.gpus.iter().find(|gpu| gpu.number == number && gpu.alone) else {
                continue;
            };
            let (_, left) = free(index, pool, layout, gpu);
            let Some(pods) = movers(index, &by_uid, &held).filter(|_| left > 0) else { continue };
            let claims = pods.iter().filter_map(|pod| index.pod(pod)).flat_map(|pod| pod.claim_keys());
            let claims = claims.filter_map(|key| index.claim(&key)).map(|claim| claim.uid.clone());
            found.push(Occupied {
                node: node.clone(),
                id: (pool.name, number),
                claims: claims.collect(),
                pods: pods.into_iter().collect(),
                holders: held.len(),
                held: 1000 - left,
            });
        }
    }
    found.sort_by(|a, b| {
        (a.pods.len(), a.held, &a.node, a.id.1).cmp(&(b.pods.len(), b.held, &b.node, b.id.1))
    });
    found
}

/// The pods that hold these, if each may be moved and has all its claims for itself.
fn movers(index: &Index, claims: &HashMap<&Uid, &Claim>, held: &[&Holder]) -> Option<BTreeSet<ObjectKey>> {
    held.iter().map(|holder| mover(index, claims, holder).ok()).collect()
}

/// Why what somebody holds of a GPU stays where it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stays {
    /// Nobody knows whose it is.
    Unknown,
    /// A share grew by it, which nobody can promise it elsewhere.
    Grown(ObjectKey),
    /// No pod uses the claim.
    Kept(ObjectKey),
    /// The pod does not allow it.
    Forbids(ObjectKey),
    /// Nobody makes the pod anew.
    Lonely(ObjectKey),
    /// It is ending.
    Ends(ObjectKey),
    /// A claim of the pod is also used or kept by others, or not allocated by the controller.
    Tied(ObjectKey),
}

impl std::fmt::Display for Stays {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown => write!(f, "a claim that cannot be found has something of it"),
            Self::Grown(claim) => write!(f, "claim {claim} is what a share grew by"),
            Self::Kept(claim) => write!(f, "claim {claim} is kept without a pod"),
            Self::Forbids(pod) => write!(f, "pod {pod} does not allow it (annotation {COMPACTION}: Allow)"),
            Self::Lonely(pod) => write!(f, "pod {pod} has no owner that would make it anew"),
            Self::Ends(pod) => write!(f, "pod {pod} is ending"),
            Self::Tied(pod) => {
                write!(
                    f,
                    "pod {pod} has a claim that others use or keep, or that the controller did not allocate"
                )
            }
        }
    }
}

/// The pod that holds this, if it may be moved and has all its claims for itself.
fn mover(index: &Index, claims: &HashMap<&Uid, &Claim>, holder: &Holder) -> Result<ObjectKey, Stays> {
    let claim = claims.get(&holder.claim).ok_or(Stays::Unknown)?;
    if claim.companion.is_some() {
        return Err(Stays::Grown(claim.key.clone()));
    }
    let kept = || Stays::Kept(claim.key.clone());
    let user = claim.reserved_for.iter().find(|consumer| consumer.resource == "pods").ok_or_else(kept)?;
    let key = ObjectKey { namespace: claim.key.namespace.clone(), name: user.name.as_str().into() };
    let pod = index.pod(&key).filter(|pod| *pod.uid == *user.uid).ok_or_else(kept)?;
    let alone = pod.claim_keys().filter_map(|key| index.claim(&key)).all(|claim| {
        claim.is_only_for(&pod.uid)
            && !claim.reserved_for.iter().any(is_hold)
            && claim.allocation.as_ref().is_some_and(|allocation| allocation.by_us)
    });
    match () {
        () if pod.deleting || pod.terminal => Err(Stays::Ends(key)),
        () if pod.maker.is_none() => Err(Stays::Lonely(key)),
        () if !pod.movable => Err(Stays::Forbids(key)),
        () if !alone => Err(Stays::Tied(key)),
        () => Ok(key),
    }
}

/// GPUs that are partly held, with what stays where it is: nothing where everybody may be moved.
pub fn in_the_way(index: &Index) -> BTreeMap<(Arc<str>, u32), BTreeSet<Stays>> {
    let by_uid: HashMap<&Uid, &Claim> = index.claims().map(|claim| (&claim.uid, claim)).collect();
    let mut found: BTreeMap<_, BTreeSet<Stays>> = BTreeMap::new();
    for pool in index.pools() {
        let (Some(layout), Some(node)) = (&pool.layout, &pool.node) else { continue };
        for holder in &pool.holders {
            let number = gpu_of(index, pool, holder);
            let Some(gpu) = layout.gpus.iter().find(|gpu| Some(gpu.number) == number && gpu.alone) else {
                continue;
            };
            if free(index, pool, layout, gpu).1 > 0 {
                let here = found.entry((node.clone(), gpu.number)).or_default();
                here.extend(mover(index, &by_uid, holder).err());
            }
        }
    }
    found
}
