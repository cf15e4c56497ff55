use super::*;
use crate::fixtures::{self, DRIVER, object};
use aliquot_model::layout::AllocatorMode;
use k8s_openapi::api::resource::v1::ResourceClaim;
use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

fn index() -> Snapshot {
    let mut index = Snapshot::new(DRIVER);
    index.reset_slices(&fixtures::slices("n1", 2, AllocatorMode::Controller, 1));
    index
}

fn result(device: &str, consumed: Option<(&str, &str)>) -> Value {
    let mut result = json!({
        "request": "r", "driver": DRIVER, "device": device,
        "pool": aliquot_model::names::pool_name(DRIVER, "n1"),
    });
    if let Some((memory, cores)) = consumed {
        result["shareID"] = json!("00000000-0000-0000-0000-000000000001");
        result["consumedCapacity"] = json!({"memory": memory, "cores": cores, "slots": "1"});
    }
    result
}

fn allocation(results: &[Value]) -> AllocationResult {
    object(json!({"devices": {"results": results}}))
}

fn allocated(namespace: &str, name: &str, results: &[Value]) -> ResourceClaim {
    object(json!({
        "metadata": {"name": name, "namespace": namespace, "uid": format!("{namespace}-{name}"), "resourceVersion": "1"},
        "spec": {}, "status": {"allocation": allocation(results)},
    }))
}

fn quota(spec: Value) -> GpuQuota {
    object(json!({"metadata": {"name": "limits", "namespace": "team-a"}, "spec": spec}))
}

fn gib(n: u64) -> u64 {
    n << 30
}

#[test]
fn a_namespace_holds_the_sum_of_its_claims_and_nobody_elses() {
    let mut index = index();
    let mut ledger = Ledger::default();
    for claim in [
        allocated("team-a", "share", &[result("gpu-0-share", Some(("10Gi", "30")))]),
        allocated(
            "team-a",
            "part",
            &[result("gpu-1-mig-2g20gb-14-0", None), result("gpu-1-mig-1g10gb-19-6", None)],
        ),
        allocated("team-b", "whole", &[result("gpu-0", None)]),
    ] {
        index.apply_claim(&claim);
    }
    assert_eq!(ledger.used(&index, "team-a"), (Amount { memory: gib(40), cores: 30 + 25 + 13, gpus: 0 }, 2));
    assert_eq!(ledger.used(&index, "team-b"), (Amount { memory: gib(80), cores: 100, gpus: 1 }, 1));
    assert_eq!(ledger.used(&index, "team-c"), (Amount::default(), 0));
    // The node is gone; the claims still hold its devices.
    index.reset_slices(&[]);
    assert_eq!(ledger.used(&index, "team-a"), (Amount { memory: gib(40), cores: 68, gpus: 0 }, 2));
    index.delete_claim(&ObjectKey::new("team-a", "part"), None);
    assert_eq!(ledger.used(&index, "team-a"), (Amount { memory: gib(10), cores: 30, gpus: 0 }, 1));
}

#[test]
fn a_share_of_a_partition_counts_its_part_of_the_gpu() {
    let mut index = Snapshot::new(DRIVER);
    index.reset_slices(&fixtures::slices_with_mig_shares("n1", 1));
    let mut ledger = Ledger::default();
    for (name, device, cores) in
        [("half", "gpu-0-mig-2g20gb-14-4-share", "50"), ("best-effort", "gpu-0-mig-3g40gb-9-0-share", "0")]
    {
        index.apply_claim(&allocated("team-a", name, &[result(device, Some(("5Gi", cores)))]));
    }
    // 32 of 132 multiprocessors, half of them.
    let want = (Amount { memory: gib(10), cores: 13, gpus: 0 }, 2);
    assert_eq!(ledger.used(&index, "team-a"), want);
    // The node is gone; the claims still hold their shares.
    index.reset_slices(&[]);
    assert_eq!(ledger.used(&index, "team-a"), want);
}

#[test]
fn admin_access_holds_nothing() {
    let mut index = index();
    let mut admin = result("gpu-0-admin", None);
    admin["adminAccess"] = json!(true);
    index.apply_claim(&allocated("team-a", "watch", &[admin]));
    assert_eq!(Ledger::default().used(&index, "team-a"), (Amount::default(), 0));
}

#[rstest]
#[case::no_quota(None, None)]
#[case::fits(Some(json!({"hard": {"memory": "40Gi", "cores": "100", "gpus": "0"}})), None)]
#[case::memory(Some(json!({"hard": {"memory": "30Gi"}})), Some("GpuQuota team-a/limits is exceeded: memory: hard 30Gi, used 20Gi, asked 20Gi; the pod waits until"))]
#[case::cores(Some(json!({"hard": {"cores": 60}})), Some("cores: hard 60, used 25, asked 40; the pod waits"))]
#[case::per_claim(Some(json!({"perClaim": {"memory": "16Gi"}})), Some("memory of one claim: hard 16Gi, asked 20Gi; ask for less"))]
#[case::already_over(Some(json!({"hard": {"memory": "1Gi"}})), Some("memory: hard 1Gi, used 20Gi, asked 20Gi"))]
fn what_would_exceed_a_quota_is_named(#[case] spec: Option<Value>, #[case] want: Option<&str>) {
    let mut index = index();
    index.apply_claim(&allocated("team-a", "part", &[result("gpu-1-mig-2g20gb-14-0", None)]));
    let mut ledger = Ledger::default();
    ledger.reset(spec.into_iter().map(quota).collect());
    let asked = allocation(&[result("gpu-0-share", Some(("20Gi", "40")))]);
    let got = ledger.excess(&index, "team-a", std::iter::once(&asked)).map(|excess| excess.to_string());
    match (want, got) {
        (None, got) => assert_eq!(got, None),
        (Some(want), Some(got)) => assert!(got.contains(want), "{got}"),
        (Some(want), None) => panic!("nothing, expected {want}"),
    }
    assert_eq!(ledger.excess(&index, "team-b", std::iter::once(&asked)), None);
}

#[test]
fn a_status_is_stale_until_it_says_what_is_held() {
    let mut index = index();
    index.apply_claim(&allocated("team-a", "whole", &[result("gpu-0", None)]));
    let mut ledger = Ledger::default();
    let mut limits = quota(json!({}));
    ledger.apply(limits.clone());
    let stale = ledger.stale(&index);
    let (key, status) = stale.first().expect("one");
    assert_eq!(
        (key.to_string().as_str(), status.claims, status.used.memory.0),
        ("team-a/limits", 1, gib(80))
    );
    limits.status = Some(status.clone());
    ledger.apply(limits);
    assert_eq!(ledger.stale(&index), Vec::new());
}

proptest! {
    /// Whatever is asked in whatever order: what is let through never exceeds the quota.
    #[test]
    fn the_sum_of_what_is_allocated_stays_within_the_quota(
        asked in prop::collection::vec((1u64..30, 0u64..60), 1..20), memory in 1u64..80, cores in 1u64..200,
    ) {
        let mut index = index();
        let mut ledger = Ledger::default();
        ledger.apply(quota(json!({"hard": {"memory": format!("{memory}Gi"), "cores": cores}})));
        for (number, (gib_asked, cores_asked)) in asked.iter().enumerate() {
            let share = result("gpu-0-share", Some((&format!("{gib_asked}Gi"), &cores_asked.to_string())));
            let before = ledger.used(&index, "team-a").0;
            let excess = ledger.excess(&index, "team-a", std::iter::once(&allocation(std::slice::from_ref(&share))));
            let fits = before.memory + gib(*gib_asked) <= gib(memory)
                && (*cores_asked == 0 || before.cores + cores_asked <= cores);
            prop_assert_eq!(excess.is_none(), fits);
            if excess.is_none() {
                index.apply_claim(&allocated("team-a", &format!("c{number}"), &[share]));
            }
        }
        let used = ledger.used(&index, "team-a").0;
        prop_assert!(used.memory <= gib(memory) && used.cores <= cores);
    }
}
