//! Computes how much each namespace holds: the sum over its allocated claims, observed and assumed.
//!
//! Decisions that are being written count already. So if two pods are decided one after the other, the second
//! decision takes into account what the first pod was given.

use super::limit::limits;
use super::{Amount, Limit};
use crate::elastic::Size;
use crate::quantity::Quantity;
use crate::snapshot::{Allocation, Held, Layout, ObjectKey, Snapshot, Sym};
use aliquot_api::v1alpha1::{GpuQuota, GpuQuotaStatus};
use aliquot_model::{DeviceKind, DeviceName};
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceRequestAllocationResult};
use std::collections::HashMap;
use std::fmt;

/// A quota that a decision would exceed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excess {
    /// The quota.
    pub quota: ObjectKey,
    /// The limit of the quota that would be exceeded.
    pub limit: Limit,
    /// The value of the limit.
    pub hard: u64,
    /// The amount that the namespace's claims hold; `None` for a limit on one claim.
    pub used: Option<u64>,
    /// The figure that is asked for.
    pub asked: u64,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { quota, limit, hard, used, asked } = self;
        let (field, hard, asked) = (limit.field(), limit.show(*hard), limit.show(*asked));
        match used {
            Some(used) => write!(
                f,
                "GpuQuota {quota} is exceeded: {field}: hard {hard}, used {}, asked {asked}; the pod waits until \
                 claims of the namespace are released or the quota is raised",
                limit.show(*used)
            ),
            None => write!(
                f,
                "GpuQuota {quota} is exceeded: {field} of one claim: hard {hard}, asked {asked}; ask for less, or \
                 have spec.perClaim.{field} raised"
            ),
        }
    }
}

/// The GpuQuotas, and what devices count for.
#[derive(Debug, Default)]
pub struct Ledger {
    quotas: HashMap<ObjectKey, GpuQuota>,
    /// What devices counted for when they were last published: claims on a node that is gone still hold them.
    devices: HashMap<(Sym, Sym), Amount>,
    /// The same for partitions that claims have shares of: multiprocessors of the partition and of its GPU.
    parts: HashMap<(Sym, Sym), (u64, u64)>,
}

impl Ledger {
    /// Adds or replaces a quota.
    pub fn apply(&mut self, quota: GpuQuota) {
        if let Some(key) = crate::snapshot::key_of(&quota.metadata) {
            self.quotas.insert(key, quota);
        }
    }

    /// Removes a quota.
    pub fn delete(&mut self, quota: &GpuQuota) {
        if let Some(key) = crate::snapshot::key_of(&quota.metadata) {
            self.quotas.remove(&key);
        }
    }

    /// Replaces all quotas.
    pub fn reset(&mut self, quotas: Vec<GpuQuota>) {
        self.quotas.clear();
        for quota in quotas {
            self.apply(quota);
        }
    }

    /// Returns the quotas of a namespace, ordered by name.
    pub fn of_namespace(&self, namespace: &str) -> Vec<(&ObjectKey, &GpuQuota)> {
        let mut found: Vec<_> = self.quotas.iter().filter(|(key, _)| *key.namespace == *namespace).collect();
        found.sort_unstable_by_key(|(key, _)| *key);
        found
    }

    /// Returns what a namespace's claims hold, and the number of these claims.
    pub fn used(&mut self, index: &Snapshot, namespace: &str) -> (Amount, u64) {
        let mut sum = (Amount::default(), 0);
        for claim in index.claims().filter(|claim| *claim.key.namespace == *namespace) {
            let Some(allocation) = index.effective_allocation(&claim.key) else { continue };
            if allocation.held.iter().any(|held| !held.admin) {
                sum = (sum.0 + self.of_allocation(index, allocation), sum.1 + 1);
            }
        }
        sum
    }

    fn of_allocation(&mut self, index: &Snapshot, allocation: &Allocation) -> Amount {
        allocation.held.iter().fold(Amount::default(), |sum, held| sum + self.of_held(index, held))
    }

    fn of_held(&mut self, index: &Snapshot, held: &Held) -> Amount {
        let consumed = |name: &str| {
            let name = index.find_qualified(name)?;
            held.consumed.iter().find(|(known, _)| *known == name).map(|(_, amount)| *amount)
        };
        self.of_device(index, (held.pool, held.device), held.admin, consumed)
    }

    fn of_result(&mut self, index: &Snapshot, result: &DeviceRequestAllocationResult) -> Amount {
        let (Some(pool), Some(device)) = (index.sym(&result.pool), index.sym(&result.device)) else {
            return Amount::default();
        };
        let consumed = |name: &str| {
            let capacities = result.consumed_capacity.as_ref()?;
            let qualified = format!("{}/{name}", index.driver());
            capacities.get(name).or_else(|| capacities.get(&qualified))?.0.parse().ok()
        };
        self.of_device(index, (pool, device), result.admin_access == Some(true), consumed)
    }

    fn of_device(
        &mut self,
        index: &Snapshot,
        (pool, device): (Sym, Sym),
        admin: bool,
        consumed: impl Fn(&str) -> Option<Quantity>,
    ) -> Amount {
        let Some(kind) = DeviceName::parse(index.name(device)).map(|name| name.kind()) else {
            return Amount::default();
        };
        if admin {
            return Amount::default();
        }
        let units = |name: &str| consumed(name).and_then(Quantity::to_u64).unwrap_or_default();
        let layout = index.pool(pool).and_then(|pool| pool.layout.as_ref());
        if kind.shareable() {
            let part = layout.and_then(|layout| part_of_gpu(index, layout, device));
            if let Some(part) = part {
                self.parts.insert((pool, device), part);
            }
            let part = self.parts.get(&(pool, device)).copied().unwrap_or_default();
            return Amount::of_device(kind, units("memory"), part, units("cores"));
        }
        let published = layout.and_then(|layout| of_published(index, layout, layout.position(device)?, kind));
        match published {
            Some(amount) => {
                self.devices.insert((pool, device), amount);
                amount
            }
            None => self.devices.get(&(pool, device)).copied().unwrap_or_default(),
        }
    }

    /// Returns the first quota that would be exceeded if claims of a namespace got these allocations.
    pub fn excess<'a>(
        &mut self,
        index: &Snapshot,
        namespace: &str,
        allocations: impl Iterator<Item = &'a AllocationResult>,
    ) -> Option<Excess> {
        if self.of_namespace(namespace).is_empty() {
            return None;
        }
        let claims: Vec<(Amount, u64)> = allocations
            .map(|allocation| {
                let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
                let ours = results.filter(|result| result.driver == index.driver());
                ours.fold((Amount::default(), 0), |sum, result| {
                    (sum.0 + self.of_result(index, result), sum.1 + 1)
                })
            })
            .collect();
        let (used, _) = self.used(index, namespace);
        let quotas = self.of_namespace(namespace);
        quotas.into_iter().find_map(|(key, quota)| exceeded(key, quota, used, &claims))
    }

    /// Returns the first quota of a namespace that a single claim of this size would exceed.
    pub fn excess_of_one(&self, namespace: &str, whole: Size) -> Option<Excess> {
        self.of_namespace(namespace).into_iter().find_map(|(key, quota)| {
            let per_claim = &quota.spec.per_claim;
            let figures = [
                (Limit::Memory, per_claim.memory, whole.memory),
                (Limit::Cores, per_claim.cores, whole.cores),
            ];
            figures.into_iter().find_map(|(limit, most, asked)| {
                let hard = most?.0;
                (asked > hard).then(|| Excess { quota: key.clone(), limit, hard, used: None, asked })
            })
        })
    }

    /// Returns true if a namespace holds more than one of its quotas allows.
    pub fn is_exceeded(&mut self, index: &Snapshot, namespace: &str) -> bool {
        if self.of_namespace(namespace).is_empty() {
            return false;
        }
        let (used, _) = self.used(index, namespace);
        self.of_namespace(namespace).into_iter().any(|(_, quota)| {
            limits(&quota.spec)
                .into_iter()
                .any(|(limit, hard)| hard.is_some_and(|hard| limit.of(&used) > hard))
        })
    }

    /// Returns the quotas whose status differs from what is held now, with their new status.
    pub fn stale(&mut self, index: &Snapshot) -> Vec<(ObjectKey, GpuQuotaStatus)> {
        let mut namespaces: HashMap<std::sync::Arc<str>, GpuQuotaStatus> = HashMap::new();
        let keys: Vec<ObjectKey> = self.quotas.keys().cloned().collect();
        for key in &keys {
            if !namespaces.contains_key(&key.namespace) {
                let (used, claims) = self.used(index, &key.namespace);
                namespaces.insert(key.namespace.clone(), GpuQuotaStatus { used: used.into(), claims });
            }
        }
        let differs = |key: &ObjectKey, status: &GpuQuotaStatus| {
            self.quotas.get(key).is_some_and(|quota| quota.status.as_ref() != Some(status))
        };
        keys.into_iter()
            .filter_map(|key| {
                let status = namespaces.get(&key.namespace)?.clone();
                differs(&key, &status).then_some((key, status))
            })
            .collect()
    }
}

fn exceeded(key: &ObjectKey, quota: &GpuQuota, used: Amount, claims: &[(Amount, u64)]) -> Option<Excess> {
    let per_claim = &quota.spec.per_claim;
    for (amount, devices) in claims {
        let figures = [
            (Limit::Memory, per_claim.memory, amount.memory),
            (Limit::Cores, per_claim.cores, amount.cores),
            (Limit::Devices, per_claim.devices, *devices),
        ];
        for (limit, most, asked) in figures {
            if let Some(hard) = most.map(|given| given.0).filter(|hard| asked > *hard) {
                return Some(Excess { quota: key.clone(), limit, hard, used: None, asked });
            }
        }
    }
    let asked = claims.iter().fold(Amount::default(), |sum, (amount, _)| sum + *amount);
    limits(&quota.spec).into_iter().find_map(|(limit, hard)| {
        let (hard, used, asked) = (hard?, limit.of(&used), limit.of(&asked));
        // What takes nothing of this figure may always be allocated.
        (asked > 0 && used.saturating_add(asked) > hard).then(|| Excess {
            quota: key.clone(),
            limit,
            hard,
            used: Some(used),
            asked,
        })
    })
}

/// Returns what a published device that cannot be shared counts for.
pub fn of_published(index: &Snapshot, layout: &Layout, position: u32, kind: DeviceKind) -> Option<Amount> {
    let memory = capacity(index, layout, position, "memory")?;
    let part = capacity(index, layout, position, "multiprocessors").unwrap_or_default();
    let whole = most_multiprocessors(index, layout, position);
    Some(Amount::of_device(kind, memory, (part, whole.unwrap_or(part)), 0))
}

/// Returns the multiprocessors of the partition that a device is a share of, and those of its GPU; `None` if
/// they are not known, and for other devices.
pub fn part_of_gpu(index: &Snapshot, layout: &Layout, device: Sym) -> Option<(u64, u64)> {
    let partition = DeviceName::parse(index.name(device))?.whole_partition()?;
    let position = layout.position(index.sym(&partition.to_string())?)?;
    let part = capacity(index, layout, position, "multiprocessors")?;
    Some((part, most_multiprocessors(index, layout, position)?))
}

/// Returns the multiprocessors of a device's whole GPU: the most that any device of the GPU has.
fn most_multiprocessors(index: &Snapshot, layout: &Layout, position: u32) -> Option<u64> {
    let gpu = layout.devices.get(position as usize)?.gpu;
    let siblings = layout.gpus.iter().find(|other| other.number == gpu)?.devices.iter();
    siblings.filter_map(|sibling| capacity(index, layout, *sibling, "multiprocessors")).max()
}

fn capacity(index: &Snapshot, layout: &Layout, position: u32, name: &str) -> Option<u64> {
    let device = layout.devices.get(position as usize)?;
    let name = index.find_qualified(name)?;
    let capacities = &index.shape(device).capacities;
    let (_, capacity) = capacities.iter().find(|(known, _)| *known == name)?;
    capacity.value.to_u64()
}

#[cfg(test)]
#[path = "ledger/tests.rs"]
mod tests;
