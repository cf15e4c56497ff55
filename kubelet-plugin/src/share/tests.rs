use super::*;
use crate::testing;

/// The cap that a best-effort share, capped at 50 before, has after a look.
fn cap_beside(newer: Option<crate::ledger::NewerRecord>) -> u8 {
    let dir = tempfile::tempdir().unwrap();
    let gpu = testing::h100(0);
    let device = Device { result_id: "b".into(), ..testing::share_of(&gpu, 1 << 30, 0) };
    let mut file = quota(&device, device.share.as_ref().unwrap(), 1).unwrap();
    file.cores_percent = 50;
    let quota_dir = dir.path().join("b/quota");
    fs::create_dir_all(&quota_dir).unwrap();
    fs::write(quota_dir.join("quota"), file.encode()).unwrap();
    let mut ledger = testing::ledger_of(&[("b", device.clone())]);
    ledger.newer.extend(newer.map(|record| ("a".to_owned(), record)));
    rebalance(dir.path(), &Labels::default(), &ledger).unwrap();
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
