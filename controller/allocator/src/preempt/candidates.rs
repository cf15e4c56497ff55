//! Finds which pods hold devices of this driver on a node, which of them are already ending, and which could
//! be evicted.

use super::Terms;
use super::cheapest::{combinations, next};
use crate::budget::part;
use crate::hold;
use crate::snapshot::{Allocation, Claim, Held, ObjectKey, Pod, Snapshot, Sym, Uid, gpu_of_name};
use aliquot_model::MicroGpus;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// The number of seconds by which a deletion may be late and still count as ending: whatever delays the pod
/// for longer may delay it for ever.
const PATIENCE: i64 = 60;
/// The most choices of GPUs that are looked at on a node.
const MOST_CHOICES: usize = 2_000;

/// A GPU: its pool and its number.
pub(super) type GpuId = (Sym, u32);

/// A pod that could be evicted.
#[derive(Debug)]
pub(super) struct Candidate<'a> {
    pub(super) pod: &'a Pod,
    pub(super) standing: i32,
    /// GPU time that is lost, in seconds of a whole GPU.
    pub(super) lost: i64,
    gpus: BTreeSet<GpuId>,
}

/// A claim that becomes free once its candidates are gone.
#[derive(Debug)]
struct Removable {
    uid: Uid,
    users: HashSet<usize>,
}

/// A node on which devices could be freed.
#[derive(Debug)]
pub(super) struct Field<'a> {
    pub(super) node: Arc<str>,
    /// Pods that could be evicted.
    pub(super) candidates: Vec<Candidate<'a>>,
    /// Pods with devices that are already ending.
    pub(super) leaving: Vec<&'a Pod>,
    claims: Vec<Removable>,
}

impl Field<'_> {
    /// Returns the claims that hold nothing any more once these candidates are gone.
    pub(super) fn freed(&self, evicted: &HashSet<usize>) -> HashSet<Uid> {
        let free = self.claims.iter().filter(|claim| claim.users.is_subset(evicted));
        free.map(|claim| claim.uid.clone()).collect()
    }

    /// Returns the candidates that hold devices of these GPUs.
    pub(super) fn on(&self, gpus: &BTreeSet<GpuId>) -> Vec<usize> {
        let all = self.candidates.iter().enumerate();
        all.filter(|(_, candidate)| !candidate.gpus.is_disjoint(gpus)).map(|(at, _)| at).collect()
    }

    /// Returns every choice of `wanted` of the GPUs that could be freed; if there are too many choices, one
    /// choice with all of these GPUs.
    pub(super) fn choices_of_gpus(&self, wanted: usize) -> Vec<BTreeSet<GpuId>> {
        let all: BTreeSet<GpuId> = self.candidates.iter().flat_map(|c| &c.gpus).copied().collect();
        let gpus: Vec<GpuId> = all.iter().copied().collect();
        let size = wanted.min(gpus.len());
        if combinations(gpus.len(), size) > MOST_CHOICES {
            return vec![all];
        }
        let mut chosen: Vec<usize> = (0..size).collect();
        let mut choices = Vec::new();
        loop {
            choices.push(chosen.iter().filter_map(|at| gpus.get(*at)).copied().collect());
            if !next(&mut chosen, gpus.len()) {
                return choices;
            }
        }
    }
}

/// Returns the most devices that a pod still wants.
pub(super) fn devices_wanted(index: &Snapshot, pod: &Pod) -> usize {
    let open = pod.claim_keys().filter(|key| index.effective_allocation(key).is_none());
    let specs = open.filter_map(|key| index.claim(&key)).map(|claim| claim.spec.clone());
    let of = |mode: Option<&str>, count: Option<i64>| match mode {
        Some("All") => usize::MAX,
        _ => usize::try_from(count.unwrap_or(1)).unwrap_or(usize::MAX),
    };
    specs
        .flat_map(|spec| {
            spec.devices.iter().flat_map(|devices| devices.requests.clone()).flatten().collect::<Vec<_>>()
        })
        .map(|request| {
            let exact = request.exactly.iter().map(|e| of(e.allocation_mode.as_deref(), e.count));
            let subs = request.first_available.iter().flatten();
            exact.chain(subs.map(|sub| of(sub.allocation_mode.as_deref(), sub.count))).max().unwrap_or(1)
        })
        .fold(0, usize::saturating_add)
}

/// The role of a consumer of a claim.
enum Consumer<'a> {
    /// The consumer does not exist any more, or has ended.
    Gone,
    Leaving(&'a Pod),
    Candidate(&'a Pod),
    /// The consumer stays.
    Fixed,
}

struct Builder<'a, 't> {
    index: &'a Snapshot,
    pod: &'a Pod,
    standing: i32,
    terms: &'t Terms<'t>,
}

/// Returns the nodes on which devices become free soon or could be freed for a pod, the most promising first.
pub(super) fn fields<'a>(
    index: &'a Snapshot,
    pod: &'a Pod,
    terms: &Terms<'_>,
    only: Option<&Arc<str>>,
) -> Vec<Field<'a>> {
    let builder = Builder { index, pod, standing: (terms.standing)(pod), terms };
    let mut claims: HashMap<&Arc<str>, Vec<(&Claim, &Allocation)>> = HashMap::new();
    for claim in index.claims() {
        let Some(allocation) = claim.allocation.as_ref().filter(|allocation| index.is_ours(allocation))
        else {
            continue;
        };
        let Some(node) = &allocation.node else { continue };
        if only.is_none_or(|only| only == node) && allocation.held.iter().any(|held| !held.admin) {
            claims.entry(node).or_default().push((claim, allocation));
        }
    }
    let mut fields: Vec<Field<'a>> =
        claims.into_iter().filter_map(|(node, claims)| builder.field(node, &claims)).collect();
    fields.sort_by_key(|field| {
        let hope = field.candidates.iter().map(|candidate| candidate.standing).min();
        let nominated = pod.nominated.as_ref() == Some(&field.node);
        (!nominated, field.leaving.is_empty(), hope, field.node.clone())
    });
    fields
}

impl<'a> Builder<'a, '_> {
    fn field(&self, node: &Arc<str>, claims: &[(&'a Claim, &'a Allocation)]) -> Option<Field<'a>> {
        let mut field =
            Field { node: node.clone(), candidates: Vec::new(), leaving: Vec::new(), claims: Vec::new() };
        let mut known: BTreeMap<&'a ObjectKey, usize> = BTreeMap::new();
        let mut leaving: BTreeMap<&'a ObjectKey, &'a Pod> = BTreeMap::new();
        for (claim, allocation) in claims {
            let (holds, others): (Vec<_>, Vec<_>) =
                claim.reserved_for.iter().partition(|consumer| hold::is_hold(consumer));
            let stays = !holds.is_empty()
                && (allocation.others
                    || claim.companion.is_some()
                    || (self.terms.kept)(claim) >= self.standing);
            let consumers: Vec<Consumer<'a>> =
                others.into_iter().map(|consumer| self.consumer(claim, consumer)).collect();
            let fixed = consumers.iter().any(|consumer| matches!(consumer, Consumer::Fixed));
            // A claim without any consumer is taken back by the controller itself.
            if stays || fixed || claim.reserved_for.is_empty() {
                continue;
            }
            let mut users = HashSet::new();
            for consumer in consumers {
                match consumer {
                    Consumer::Gone | Consumer::Fixed => {}
                    Consumer::Leaving(pod) => {
                        leaving.insert(&pod.key, pod);
                    }
                    Consumer::Candidate(pod) => {
                        let at = *known.entry(&pod.key).or_insert_with(|| {
                            let (standing, gpus) = ((self.terms.standing)(pod), BTreeSet::new());
                            field.candidates.push(Candidate { pod, standing, lost: 0, gpus });
                            field.candidates.len() - 1
                        });
                        users.insert(at);
                        if let Some(candidate) = field.candidates.get_mut(at) {
                            candidate.gpus.extend(allocation.held.iter().filter_map(|held| self.gpu(held)));
                            candidate.lost = candidate.lost.saturating_add(self.lost(claim, allocation));
                        }
                    }
                }
            }
            field.claims.push(Removable { uid: claim.uid.clone(), users });
        }
        field.leaving = leaving.into_values().collect();
        (!field.claims.is_empty()).then_some(field)
    }

    fn consumer(
        &self,
        claim: &Claim,
        consumer: &k8s_openapi::api::resource::v1::ResourceClaimConsumerReference,
    ) -> Consumer<'a> {
        if consumer.resource != "pods" || consumer.api_group.as_deref().is_some_and(|group| !group.is_empty())
        {
            return Consumer::Fixed;
        }
        let key = ObjectKey { namespace: claim.key.namespace.clone(), name: consumer.name.as_str().into() };
        let Some(pod) = self.index.pod(&key).filter(|pod| *pod.uid == *consumer.uid) else {
            // kube-controller-manager removes it from the list.
            return Consumer::Gone;
        };
        if pod.terminal {
            Consumer::Gone
        } else if pod.key == self.pod.key {
            Consumer::Fixed
        } else if pod.deleting {
            let late = pod.ends_by.is_some_and(|by| self.terms.wall > by.saturating_add(PATIENCE));
            if late { Consumer::Fixed } else { Consumer::Leaving(pod) }
        } else if self.terms.evicted.contains(&pod.uid) {
            Consumer::Leaving(pod)
        } else if self.terms.spared.contains(&pod.uid) || (self.terms.standing)(pod) >= self.standing {
            Consumer::Fixed
        } else {
            Consumer::Candidate(pod)
        }
    }

    fn gpu(&self, held: &Held) -> Option<GpuId> {
        if held.admin {
            return None;
        }
        let layout = self.index.pool(held.pool).and_then(|pool| pool.layout.as_ref());
        let device = layout.and_then(|layout| layout.devices.get(layout.position(held.device)? as usize));
        let named = || gpu_of_name(self.index.name(held.device));
        Some((held.pool, device.map(|device| device.gpu).or_else(named).unwrap_or(u32::MAX)))
    }

    /// Returns the GPU time that a claim has used until now, in seconds of a whole GPU, as budgets charge it.
    fn lost(&self, claim: &Claim, allocation: &Allocation) -> i64 {
        let since = part::allocated_at(claim).unwrap_or(claim.created);
        let part = part::of_allocation(self.index, allocation).unwrap_or(MicroGpus::WHOLE);
        let seconds = u64::try_from(self.terms.wall.saturating_sub(since)).unwrap_or(0);
        i64::try_from(seconds.saturating_mul(part.0) / MicroGpus::WHOLE.0).unwrap_or(i64::MAX)
    }
}
