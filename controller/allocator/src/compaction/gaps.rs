//! Finds GPUs that are partly held and the pods that hold them, and measures how much of the free capacity
//! lies on such GPUs, where it is of little use.

use crate::hold::is_hold;
use crate::quantity::Quantity;
use crate::schedule::Overlay;
use crate::snapshot::worth::thousandths;
use crate::snapshot::{Claim, Gpu, Holder, Layout, ObjectKey, Pool, Snapshot, Sym, Uid};
use aliquot_model::DeviceName;
use aliquot_model::names::COMPACTION;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// A GPU: its pool and its number.
pub(crate) type GpuId = (Sym, u32);

/// The free capacity of a cluster, in thousandths of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gaps {
    /// The free capacity on GPUs of which nothing is held.
    pub whole: i64,
    /// The free capacity on GPUs that are partly held.
    pub partial: i64,
}

impl Gaps {
    /// Returns the part of the free capacity that lies on partly held GPUs, in thousandths; 0 if nothing is
    /// free.
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
    /// All pods on the GPU.
    pub(super) pods: Vec<ObjectKey>,
    /// All claims of these pods: a pod moves with all that it has.
    pub(super) claims: HashSet<Uid>,
    /// The number of holders on the GPU.
    pub(super) holders: usize,
    held: i64,
}

/// Returns the names of all devices that the pod's claims hold.
pub(super) fn devices_of(index: &Snapshot, pod: &ObjectKey) -> Vec<String> {
    let claims = index.pod(pod).into_iter().flat_map(|pod| pod.claim_keys());
    let held = claims.filter_map(|key| index.effective_allocation(&key));
    held.flat_map(|allocation| &allocation.held).map(|held| index.name(held.device).to_owned()).collect()
}

/// Measures the free capacity; nodes in `stages` are measured in their planned state.
pub fn measure(index: &Snapshot, stages: &HashMap<Arc<str>, Overlay>) -> Gaps {
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

/// Returns whether nothing of a GPU is held, and how much of the GPU is free, in thousandths.
fn free(index: &Snapshot, pool: &Pool, layout: &Layout, gpu: &Gpu) -> (bool, i64) {
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
        // A shared partition draws on its counters like any other partition.
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
    // The mean over all counters is used, as each memory slice has its own counter.
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

/// Returns the number of holders on a GPU, on a node in its planned state.
pub(super) fn holders(index: &Snapshot, stage: &Overlay, (pool, gpu): GpuId) -> usize {
    let pools = stage.pools().filter(|of| of.name == pool);
    pools
        .map(|pool| pool.holders.iter().filter(|holder| gpu_of(index, pool, holder) == Some(gpu)).count())
        .sum()
}

fn gpu_of(index: &Snapshot, pool: &Pool, holder: &Holder) -> Option<u32> {
    if holder.admin {
        return None;
    }
    let layout = pool.layout.as_ref()?;
    let device = layout.position(holder.device).and_then(|at| layout.devices.get(at as usize));
    device.map(|device| device.gpu).or_else(|| crate::snapshot::gpu_of_name(index.name(holder.device)))
}

/// Returns the pods on a GPU; `None` if one of them may not be moved. The set is empty if nothing of the GPU
/// is held.
pub fn pods_on(index: &Snapshot, (pool, gpu): GpuId) -> Option<BTreeSet<ObjectKey>> {
    let by_uid: HashMap<&Uid, &Claim> = index.claims().map(|claim| (&claim.uid, claim)).collect();
    let pool = index.pool(pool)?;
    let held = pool.holders.iter().filter(|holder| gpu_of(index, pool, holder) == Some(gpu));
    movers(index, &by_uid, &held.collect::<Vec<_>>())
}

/// Returns the partly held GPUs whose pods may all be moved, those with the fewest pods and the least held
/// capacity first.
pub(super) fn occupied(index: &Snapshot) -> Vec<Occupied> {
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

/// Returns the pods of these holders; `None` unless each pod may be moved and uses all its claims alone.
fn movers(index: &Snapshot, claims: &HashMap<&Uid, &Claim>, held: &[&Holder]) -> Option<BTreeSet<ObjectKey>> {
    held.iter().map(|holder| mover(index, claims, holder).ok()).collect()
}

/// The reason why a holder stays on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stays {
    /// The claim is not known.
    Unknown,
    /// A share grew by this claim, and nothing ensures that it could grow elsewhere.
    Grown(ObjectKey),
    /// No pod uses the claim.
    Kept(ObjectKey),
    /// The pod does not allow moves.
    Forbids(ObjectKey),
    /// The pod has no controller that would create it again.
    Lonely(ObjectKey),
    /// The pod is ending.
    Ends(ObjectKey),
    /// A claim of the pod is also used or kept by others, or was not allocated by the controller.
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

/// Returns the pod of a holder, if the pod may be moved and uses all its claims alone.
///
/// # Errors
/// The reason why the pod stays.
fn mover(index: &Snapshot, claims: &HashMap<&Uid, &Claim>, holder: &Holder) -> Result<ObjectKey, Stays> {
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

/// Returns the partly held GPUs, each with the reasons why its holders stay. The set is empty if all pods on
/// the GPU may be moved.
pub fn in_the_way(index: &Snapshot) -> BTreeMap<(Arc<str>, u32), BTreeSet<Stays>> {
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
