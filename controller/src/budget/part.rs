//! The part of GPUs that an allocation is charged for, from what nodes publish.

use crate::index::{Allocation, Claim, Held, Index};
use crate::quantity::Quantity;
use aliquot_model::usage::MicroGpus;
use aliquot_model::{DeviceKind, DeviceName};

/// All devices of an allocation together; `None` while one of them is not published.
pub fn of_allocation(index: &Index, allocation: &Allocation) -> Option<MicroGpus> {
    let parts = allocation.held.iter().filter(|held| !held.admin).map(|held| of_device(index, held));
    parts.sum::<Option<Sum>>().map(|sum| sum.0)
}

/// When a claim was allocated: its `allocationTimestamp`, else what we wrote into its annotation, as
/// servers of 1.34 drop the former. Whoever may change the claim may change the annotation; what is in
/// the account already does not follow it, so that helps only where no controller saw the allocation.
pub fn allocated_at(claim: &Claim) -> Option<i64> {
    let allocation = claim.allocation.as_ref()?;
    let written = || {
        let (seconds, _) = allocation.mark.split_once('.').filter(|_| allocation.by_us)?;
        seconds.parse().ok().filter(|seconds| *seconds > 0)
    };
    // Nothing was allocated before it was there.
    allocation.timestamp.or_else(written).map(|at| at.max(claim.created))
}

struct Sum(MicroGpus);

impl std::iter::Sum for Sum {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        Self(parts.fold(MicroGpus(0), |sum, part| sum.plus(part.0)))
    }
}

fn of_device(index: &Index, held: &Held) -> Option<Sum> {
    let name = DeviceName::parse(index.name(held.device))?;
    let part = match name.kind() {
        DeviceKind::Admin | DeviceKind::Gpu => MicroGpus::of_kind(name.kind()),
        DeviceKind::Mig => {
            let of = |device: &str, what: &str| capacity(index, held, device, what);
            let own = index.name(held.device).to_owned();
            // The whole GPU is not published while the board is in MIG mode; the one for administrators is.
            let whole = format!("gpu-{}", name.minor());
            let admin = format!("{whole}-admin");
            let total = |what: &str| of(&whole, what).or_else(|| of(&admin, what));
            MicroGpus::larger(
                (of(&own, "memory")?, total("memory")?),
                (of(&own, "multiprocessors").unwrap_or(0), total("multiprocessors").unwrap_or(0)),
            )
        }
        DeviceKind::Share | DeviceKind::TimeSlice | DeviceKind::Mps => {
            let own = index.name(held.device);
            let consumed = |what: &str| {
                let (_, amount) = held.consumed.iter().find(|(name, _)| is_called(index, *name, what))?;
                amount.to_u64()
            };
            MicroGpus::larger(
                (consumed("memory").unwrap_or(0), capacity(index, held, own, "memory")?),
                (consumed("cores").unwrap_or(0), 100),
            )
        }
    };
    Some(Sum(part))
}

/// A capacity of a device of the same pool, by its name without domain.
fn capacity(index: &Index, held: &Held, device: &str, what: &str) -> Option<u64> {
    let layout = index.pool(held.pool)?.layout.as_ref()?;
    let position = layout.position(index.sym(device)?)?;
    let shape = index.shape(layout.devices.get(position as usize)?);
    let found = shape.capacities.iter().find(|(name, _)| is_called(index, *name, what));
    found.and_then(|(_, capacity)| Quantity::to_u64(capacity.value))
}

fn is_called(index: &Index, name: crate::index::Sym, what: &str) -> bool {
    let name = index.name(name);
    name.rsplit('/').next() == Some(what) || name == what
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{self, DRIVER};
    use aliquot_model::layout::AllocatorMode;
    use aliquot_model::names::pool_name;
    use k8s_openapi::api::resource::v1::AllocationResult;
    use rstest::rstest;
    use serde_json::{Value, json};

    fn part(results: Value) -> Option<MicroGpus> {
        let mut index = Index::new(DRIVER);
        index.reset_slices(&fixtures::slices("n1", 2, AllocatorMode::Controller, 1));
        let allocation: AllocationResult = fixtures::object(json!({"devices": {"results": results}}));
        let allocation = index.read_allocation("uid", None, &allocation);
        of_allocation(&index, &allocation)
    }

    fn result(device: &str) -> Value {
        json!({"request": "r", "driver": DRIVER, "pool": pool_name(DRIVER, "n1"), "device": device})
    }

    fn share(device: &str, memory: &str, cores: &str) -> Value {
        let mut result = result(device);
        result["shareID"] = json!("0d5f5f9e-0b6c-4e0d-8a44-6c1d0d4f3f00");
        result["consumedCapacity"] = json!({"memory": memory, "cores": cores, "slots": "1"});
        result
    }

    #[rstest]
    #[case::whole(json!([result("gpu-0")]), 1_000_000)]
    #[case::partition(json!([result("gpu-0-mig-1g20gb-15-0")]), 250_000)]
    #[case::larger_partition(json!([result("gpu-0-mig-3g40gb-9-0")]), 500_000)]
    #[case::share_by_memory(json!([share("gpu-0-share", "20Gi", "10")]), 250_000)]
    #[case::share_by_compute(json!([share("gpu-0-share", "20Gi", "60")]), 600_000)]
    #[case::two(json!([result("gpu-0"), share("gpu-1-share", "8Gi", "0")]), 1_100_000)]
    #[case::admin(json!([{"request": "r", "driver": DRIVER, "pool": pool_name(DRIVER, "n1"),
        "device": "gpu-0-admin", "adminAccess": true}]), 0)]
    fn an_allocation_is_charged_by_the_larger_fraction_of_each_device(
        #[case] results: Value,
        #[case] micro: u64,
    ) {
        assert_eq!(part(results), Some(MicroGpus(micro)));
    }

    #[test]
    fn what_is_not_published_is_not_known_yet() {
        assert_eq!(part(json!([result("gpu-7-mig-1g10gb-19-0")])), None);
    }

    #[test]
    fn the_node_comes_to_the_same_part() {
        let gpu = fixtures::h100("n1", 0);
        for profile in gpu.profiles() {
            for at in &profile.placements {
                let device = DeviceName::mig(0, &profile.name, profile.id, *at).to_string();
                assert_eq!(part(json!([result(&device)])), Some(MicroGpus::of_partition(profile, &gpu)));
            }
        }
        for (memory, cores) in [(1u64, 1u64), (33, 7), (80, 0), (3, 100)] {
            let results = json!([share("gpu-0-share", &format!("{memory}Gi"), &cores.to_string())]);
            assert_eq!(part(results), Some(MicroGpus::of_share(memory << 30, cores, &gpu)));
        }
    }

    /// A claim with this time in its status, if any, and this annotation, if any; made at second 50.
    fn claim(stamped: Option<&str>, annotation: Option<&str>) -> Option<i64> {
        let mut index = Index::new(DRIVER);
        let mut status = json!({"allocation": {"devices": {"results": [result("gpu-0")]}}});
        if let Some(stamped) = stamped {
            status["allocation"]["allocationTimestamp"] = json!(stamped);
        }
        let mut metadata = json!({
            "name": "c", "namespace": "ns", "uid": "uid", "creationTimestamp": "1970-01-01T00:00:50Z",
        });
        if let Some(annotation) = annotation {
            metadata["annotations"] = json!({crate::index::FINGERPRINT: annotation});
        }
        let claim = fixtures::object(json!({"metadata": metadata, "spec": {}, "status": status}));
        index.apply_claim(&claim);
        allocated_at(index.claim(&crate::index::ObjectKey::new("ns", "c")).expect("a claim"))
    }

    #[test]
    fn a_server_that_drops_the_time_of_allocation_leaves_it_to_our_annotation() {
        let results: Vec<_> = vec![fixtures::object(result("gpu-0"))];
        let ours = crate::index::fingerprint("uid", 100, &results);
        assert_eq!(claim(Some("1970-01-01T00:01:40Z"), None), Some(100));
        assert_eq!(claim(None, Some(&ours)), Some(100));
        assert_eq!(claim(None, None), None);
        // Whatever a tenant writes there is not the name of this allocation.
        for forged in ["900.00000000-0000-0000-0000-000000000000", "900", "", &ours.replace("100.", "900.")] {
            assert_eq!(claim(None, Some(forged)), None, "{forged}");
        }
        let early = crate::index::fingerprint("uid", 7, &results);
        assert_eq!(claim(None, Some(&early)), Some(50), "not before the claim was made");
    }
}
