//! The part of GPUs that an allocation is charged for, from what nodes publish.

use crate::quantity::Quantity;
use crate::snapshot::{Allocation, Claim, Held, Snapshot, Sym};
use crate::substitution::asked_instead;
use aliquot_model::{DeviceKind, DeviceName, MicroGpus, ProfileName};

/// Returns the part of all devices of an allocation; `None` while one of them is not published.
pub fn of_allocation(index: &Snapshot, allocation: &Allocation) -> Option<MicroGpus> {
    let parts = allocation.held.iter().filter(|held| !held.admin).map(|held| of_device(index, held));
    parts.sum::<Option<Sum>>().map(|sum| sum.0)
}

/// Returns the most that all devices of an allocation can be worth, whatever is published about them.
pub fn at_most(allocation: &Allocation) -> MicroGpus {
    let devices = allocation.held.iter().filter(|held| !held.admin);
    devices.fold(MicroGpus(0), |sum, _| sum.plus(MicroGpus::WHOLE))
}

/// Returns the part that the allocation would have if every request had been given the profile that it asked
/// for; `None` if every request was, or if the part is not known. The result is never more than the part that
/// was given.
pub fn of_asked(index: &Snapshot, claim: &Claim, allocation: &Allocation) -> Option<MicroGpus> {
    let mut substituted = false;
    let mut parts = Vec::new();
    for held in allocation.held.iter().filter(|held| !held.admin) {
        let given = of_device(index, held)?;
        let asked = asked_instead(index.driver(), claim, &held.request)
            .and_then(|profile| of_profile(index, held, &ProfileName::new(&profile).slug()));
        substituted |= asked.is_some();
        parts.push(Sum(asked.map_or(given.0, |asked| asked.0.min(given.0))));
    }
    substituted.then(|| parts.into_iter().sum::<Sum>().0)
}

/// Returns when a claim was allocated, in seconds of Unix time. This is its `allocationTimestamp`, or else
/// the time that the controller wrote into the claim's annotation, because API servers of 1.34 drop the
/// timestamp. Only the controller may write the annotation (policy `aliquot-allocations`), and what is
/// already in the account does not follow it.
pub fn allocated_at(claim: &Claim) -> Option<i64> {
    let allocation = claim.allocation.as_ref()?;
    let written = || {
        let (seconds, _) = allocation.mark.split_once('.').filter(|_| allocation.by_us)?;
        seconds.parse().ok().filter(|seconds| *seconds > 0)
    };
    // A claim cannot have been allocated before it was created.
    allocation.timestamp.or_else(written).map(|at| at.max(claim.created))
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Sum(MicroGpus);

impl std::iter::Sum for Sum {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        Self(parts.fold(MicroGpus(0), |sum, part| sum.plus(part.0)))
    }
}

fn of_device(index: &Snapshot, held: &Held) -> Option<Sum> {
    let name = DeviceName::parse(index.name(held.device))?;
    let consumed = |what: &str| {
        let (_, amount) = held.consumed.iter().find(|(name, _)| is_called(index, *name, what))?;
        amount.to_u64()
    };
    let part = match name.kind() {
        DeviceKind::Admin | DeviceKind::Gpu | DeviceKind::Mps | DeviceKind::Vfio => {
            MicroGpus::of_kind(name.kind())
        }
        DeviceKind::Mig => return of_partition(index, held.pool, held.device, name.minor()),
        DeviceKind::MigShare => {
            let partition = name.whole_partition()?.to_string();
            let part = capacity(index, held.pool, &partition, "multiprocessors").unwrap_or(0);
            let total = |what: &str| total(index, held.pool, name.minor(), what);
            MicroGpus::of_part(
                (consumed("memory").unwrap_or(0), total("memory")?),
                consumed("cores").unwrap_or(0),
                (part, total("multiprocessors").unwrap_or(0)),
            )
        }
        DeviceKind::Share | DeviceKind::TimeSlice => {
            let own = index.name(held.device);
            MicroGpus::larger(
                (consumed("memory").unwrap_or(0), capacity(index, held.pool, own, "memory")?),
                (consumed("cores").unwrap_or(0), 100),
            )
        }
    };
    Some(Sum(part))
}

/// Returns a capacity of a whole GPU. While the board is in MIG mode, the whole GPU is not published, but the
/// device for administrators is.
fn total(index: &Snapshot, pool: Sym, minor: u32, what: &str) -> Option<u64> {
    let whole = format!("gpu-{minor}");
    let of = |device: &str| capacity(index, pool, device, what);
    of(&whole).or_else(|| of(&format!("{whole}-admin")))
}

fn of_partition(index: &Snapshot, pool: Sym, device: Sym, minor: u32) -> Option<Sum> {
    let of = |what: &str| capacity(index, pool, index.name(device), what);
    let total = |what: &str| total(index, pool, minor, what);
    Some(Sum(MicroGpus::larger(
        (of("memory")?, total("memory")?),
        (of("multiprocessors").unwrap_or(0), total("multiprocessors").unwrap_or(0)),
    )))
}

/// Returns the part of a partition with this profile: on the GPU of the held device, or, if that GPU has no
/// such profile, the largest on any GPU.
fn of_profile(index: &Snapshot, held: &Held, slug: &str) -> Option<Sum> {
    let minor = DeviceName::parse(index.name(held.device))?.minor();
    let here = of_profile_in(index, held.pool, slug, Some(minor));
    here.or_else(|| {
        let pools = index.pools().map(|pool| pool.name);
        pools.filter_map(|pool| of_profile_in(index, pool, slug, None)).max()
    })
}

fn of_profile_in(index: &Snapshot, pool: Sym, slug: &str, minor: Option<u32>) -> Option<Sum> {
    let layout = index.pool(pool)?.layout.as_ref()?;
    let parts =
        layout.devices.iter().filter_map(|device| match DeviceName::parse(index.name(device.name))? {
            DeviceName::Mig { minor: on, slug: own, .. }
                if own == slug && minor.is_none_or(|minor| minor == on) =>
            {
                of_partition(index, pool, device.name, on)
            }
            _ => None,
        });
    parts.max()
}

/// Returns a capacity of a device of a pool; `what` is its name without the domain.
fn capacity(index: &Snapshot, pool: Sym, device: &str, what: &str) -> Option<u64> {
    let layout = index.pool(pool)?.layout.as_ref()?;
    let position = layout.position(index.sym(device)?)?;
    let shape = index.shape(layout.devices.get(position as usize)?);
    let found = shape.capacities.iter().find(|(name, _)| is_called(index, *name, what));
    found.and_then(|(_, capacity)| Quantity::to_u64(capacity.value))
}

fn is_called(index: &Snapshot, name: crate::snapshot::Sym, what: &str) -> bool {
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
        let mut index = Snapshot::new(DRIVER);
        index.reset_slices(&fixtures::slices_with_mig_shares("n1", 2));
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
    #[case::share_of_a_partition_by_memory(json!([share("gpu-0-mig-1g20gb-15-0-share", "16Gi", "0")]), 200_000)]
    #[case::share_of_a_partition_by_compute(json!([share("gpu-0-mig-3g40gb-9-0-share", "1Gi", "100")]), 454_546)]
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
            let results = |device: &str| json!([share(device, &format!("{memory}Gi"), &cores.to_string())]);
            let profile = gpu.profile(0).expect("the largest");
            let want = MicroGpus::of_partition_share(memory << 30, cores, profile, &gpu);
            assert_eq!(part(results("gpu-0-mig-7g80gb-0-0-share")), Some(want));
        }
    }

    /// A claim whose request was given `given` of these alternatives; our annotation says that it asked for
    /// 1g.10gb.
    fn asked(alternatives: Value, given: &str, device: &str) -> Option<u64> {
        let record = r#"{"asked": {"r": "1g.10gb"}, "goBack": true}"#;
        asked_of(alternatives, given, device, json!({crate::substitution::ANNOTATION: record}))
    }

    fn asked_of(alternatives: Value, given: &str, device: &str, annotations: Value) -> Option<u64> {
        let mut index = Snapshot::new(DRIVER);
        index.reset_slices(&fixtures::slices("n1", 2, AllocatorMode::Controller, 1));
        let mut held = result(device);
        held["request"] = json!(format!("r/{given}"));
        let claim = fixtures::object(json!({
            "metadata": {"name": "c", "namespace": "ns", "uid": "uid", "annotations": annotations},
            "spec": fixtures::spec(&[json!({"name": "r", "firstAvailable": alternatives})]),
            "status": {"allocation": {"devices": {"results": [held]}}},
        }));
        index.apply_claim(&claim);
        let claim = index.claim(&crate::snapshot::ObjectKey::new("ns", "c")).expect("a claim");
        of_asked(&index, claim, claim.allocation.as_ref().expect("an allocation")).map(|part| part.0)
    }

    fn alternative(name: &str, expression: &str) -> Value {
        json!({"name": name, "deviceClassName": "mig.aliquot.dev", "selectors": [{"cel": {"expression": expression}}]})
    }

    fn profile(name: &str, profile: &str) -> Value {
        alternative(name, &format!(r#"device.attributes["{DRIVER}"].profile == "{profile}""#))
    }

    #[test]
    fn a_substitute_can_be_charged_as_what_was_asked() {
        let alternatives = || json!([profile("a", "1g.10gb"), profile("b", "3g.40gb")]);
        assert_eq!(
            asked(alternatives(), "b", "gpu-0-mig-3g40gb-9-0"),
            part(json!([result("gpu-1-mig-1g10gb-19-2")])).map(|part| part.0)
        );
        assert_eq!(asked(alternatives(), "a", "gpu-0-mig-1g10gb-19-0"), None, "it has what it asked for");
    }

    #[test]
    fn a_list_that_the_author_wrote_says_what_was_asked_by_its_first_alternative() {
        let alternatives = || json!([profile("a", "1g.10gb"), profile("b", "3g.40gb")]);
        let one_of_seven = part(json!([result("gpu-1-mig-1g10gb-19-2")])).map(|part| part.0);
        assert_eq!(asked_of(alternatives(), "b", "gpu-0-mig-3g40gb-9-0", json!({})), one_of_seven);
        let larger_first = json!([profile("a", "3g.40gb"), profile("b", "1g.10gb")]);
        assert_eq!(
            asked_of(larger_first, "b", "gpu-0-mig-1g10gb-19-2", json!({})),
            one_of_seven,
            "never more"
        );
    }

    #[rstest]
    #[case::another_class({
        let mut other = profile("b", "3g.40gb");
        other["deviceClassName"] = json!("gpu.aliquot.dev");
        json!([profile("a", "1g.10gb"), other])
    })]
    #[case::another_condition(json!([
        alternative("a", &format!(r#"device.attributes["{DRIVER}"].profile == "1g.10gb" && false"#)),
        profile("b", "3g.40gb"),
    ]))]
    #[case::another_count({
        let mut other = profile("b", "3g.40gb");
        other["count"] = json!(2);
        json!([profile("a", "1g.10gb"), other])
    })]
    #[case::not_what_is_noted(json!([profile("a", "2g.20gb"), profile("b", "3g.40gb")]))]
    fn a_list_that_substitution_does_not_make_is_charged_as_given(#[case] alternatives: Value) {
        assert_eq!(asked(alternatives, "b", "gpu-0-mig-3g40gb-9-0"), None);
    }

    /// A claim with this time in its status, if any, and this annotation, if any; made at second 50.
    fn claim(stamped: Option<&str>, annotation: Option<&str>) -> Option<i64> {
        let mut index = Snapshot::new(DRIVER);
        let mut status = json!({"allocation": {"devices": {"results": [result("gpu-0")]}}});
        if let Some(stamped) = stamped {
            status["allocation"]["allocationTimestamp"] = json!(stamped);
        }
        let mut metadata = json!({
            "name": "c", "namespace": "ns", "uid": "uid", "creationTimestamp": "1970-01-01T00:00:50Z",
        });
        if let Some(annotation) = annotation {
            metadata["annotations"] = json!({crate::snapshot::FINGERPRINT: annotation});
        }
        let claim = fixtures::object(json!({"metadata": metadata, "spec": {}, "status": status}));
        index.apply_claim(&claim);
        allocated_at(index.claim(&crate::snapshot::ObjectKey::new("ns", "c")).expect("a claim"))
    }

    #[test]
    fn a_server_that_drops_the_time_of_allocation_leaves_it_to_our_annotation() {
        let results: Vec<_> = vec![fixtures::object(result("gpu-0"))];
        let ours = crate::snapshot::fingerprint("uid", 100, &results);
        assert_eq!(claim(Some("1970-01-01T00:01:40Z"), None), Some(100));
        assert_eq!(claim(None, Some(&ours)), Some(100));
        assert_eq!(claim(None, None), None);
        // Whatever a tenant writes there is not the name of this allocation.
        for forged in ["900.00000000-0000-0000-0000-000000000000", "900", "", &ours.replace("100.", "900.")] {
            assert_eq!(claim(None, Some(forged)), None, "{forged}");
        }
        let early = crate::snapshot::fingerprint("uid", 7, &results);
        assert_eq!(claim(None, Some(&early)), Some(50), "not before the claim was made");
    }
}
