use super::*;
use crate::claim::Consumed;
use crate::ledger::{Held, Record};
use crate::testing;

fn best_effort(gpu: &aliquot_model::GpuInfo) -> Device {
    let consumed = Consumed { memory_bytes: 1 << 30, cores_percent: 0, slots: 1 };
    Device {
        result_id: "b".into(),
        request: "r".into(),
        pool: testing::POOL.into(),
        device: "gpu-0-share".into(),
        share_id: Some("s".into()),
        gpu: gpu.uuid.clone(),
        held: Some(Held::Share),
        partition: None,
        consumed: Some(consumed),
        share: Some(Share {
            consumed,
            granted: None,
            compute_policy: ComputePolicy::Hard,
            priority: 0,
            fail_mode: FailMode::Closed,
            oversubscribe_bytes: 0,
            order: 0,
        }),
        time_slice: None,
        mps: None,
    }
}

fn ledger_of(device: &Device) -> Ledger {
    let record = Record {
        claim: testing::claim("b"),
        state: State::Completed,
        boot_id: "boot".into(),
        since: 0,
        devices: vec![device.clone()],
        indexed_env: false,
        charge: None,
        ended: None,
        confirmed: true,
        retention: None,
        steps: Vec::new(),
        extra: Default::default(),
    };
    let mut ledger = Ledger::default();
    ledger.claims.insert("b".into(), record);
    ledger
}

/// The cap that a best-effort share, capped at 50 before, has after a look.
fn cap_beside(newer: Option<crate::ledger::NewerRecord>) -> u8 {
    let dir = tempfile::tempdir().unwrap();
    let gpu = testing::h100(0);
    let device = best_effort(&gpu);
    let mut file = quota(&device, device.share.as_ref().unwrap(), 1).unwrap();
    file.cores_percent = 50;
    let quota_dir = dir.path().join("b/quota");
    fs::create_dir_all(&quota_dir).unwrap();
    fs::write(quota_dir.join("quota"), file.encode()).unwrap();
    let mut ledger = ledger_of(&device);
    ledger.newer.extend(newer.map(|record| ("a".to_owned(), record)));
    rebalance(dir.path(), &ledger).unwrap();
    left(dir.path(), "b").unwrap().cores_percent
}

#[test]
fn a_cap_is_lifted_only_where_it_is_known_that_nothing_is_promised() {
    let (here, elsewhere) = (testing::h100(0).uuid, testing::h100(1).uuid);
    assert_eq!(cap_beside(None), 0);
    assert_eq!(cap_beside(Some(testing::newer("a", Some(&elsewhere)))), 0);
    assert_eq!(cap_beside(Some(testing::newer("a", Some(&here)))), 50);
    assert_eq!(cap_beside(Some(testing::newer("a", None))), 50);
}
