use super::*;
use crate::testing::{self, ledger_of as ledger, share_of as device};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

fn wants(uid: &str, memory_bytes: u64, cores_percent: u8) -> ShareLimit {
    ShareLimit {
        share: ShareName { uid: uid.into(), share_id: "s".into() },
        namespace: "ns".into(),
        name: uid.into(),
        device: "gpu-0-share".into(),
        memory_bytes,
        cores_percent,
    }
}

fn limit(ledger: &Ledger, uid: &str) -> (u64, u8) {
    let limit = ledger.claims[uid].devices[0].share.as_ref().unwrap().limit();
    (limit.memory_bytes, limit.cores_percent)
}

#[test]
fn a_share_has_what_is_said_and_its_allocation_when_nothing_is() {
    let gpu = testing::h100(0);
    let mut ledger = ledger(&[("a", device(&gpu, 10 * GIB, 30))]);
    let verdict = apply(&mut ledger, &[wants("a", 20 * GIB, 50)], std::slice::from_ref(&gpu));
    assert_eq!(verdict, Verdict { changed: true, ..Verdict::default() });
    assert_eq!(limit(&ledger, "a"), (20 * GIB, 50));
    // Said again, nothing happens.
    assert_eq!(apply(&mut ledger, &[wants("a", 20 * GIB, 50)], &[gpu]), Verdict::default());
    // And without the GPU: giving back needs no look at it.
    assert_eq!(apply(&mut ledger, &[], &[]), Verdict { changed: true, lowered: true, refused: vec![] });
    assert_eq!(limit(&ledger, "a"), (10 * GIB, 30));
}

#[test]
fn what_does_not_fit_beside_the_others_is_refused_and_the_old_limit_stays() {
    let gpu = testing::h100(0);
    let mut ledger = ledger(&[("a", device(&gpu, 10 * GIB, 30)), ("b", device(&gpu, 50 * GIB, 60))]);
    let gpus = [gpu];
    for (wanted, words) in [
        (wants("a", 31 * GIB, 30), "bytes of its"),
        (wants("a", 10 * GIB, 41), "101 percent"),
        (wants("a", 0, 30), "1 MiB"),
        (wants("a", GIB, 101), "101 percent"),
    ] {
        let verdict = apply(&mut ledger, std::slice::from_ref(&wanted), &gpus);
        assert!(!verdict.changed && verdict.refused.len() == 1, "{wanted:?}: {verdict:?}");
        assert!(verdict.refused[0].reason.contains(words), "{verdict:?}");
        assert_eq!(limit(&ledger, "a"), (10 * GIB, 30));
    }
    // What another gives back in the same breath counts, but never what it was allocated.
    let both = [wants("a", 35 * GIB, 30), wants("b", 45 * GIB, 60)];
    let verdict = apply(&mut ledger, &both, &gpus);
    assert_eq!((verdict.refused.len(), limit(&ledger, "b").0), (1, 45 * GIB));
    assert!(apply(&mut ledger, &[wants("a", 30 * GIB, 40)], &gpus).refused.is_empty());
}

#[test]
fn a_share_of_a_partition_is_granted_what_its_partition_has() {
    let gpu = testing::h100(0);
    let of = testing::share_of_partition;
    // What another partition's shares have is nothing to this one.
    let (a, b) = (of(&gpu, 10 * GIB, 30), of(&gpu, 5 * GIB, 30));
    let mut ledger = ledger(&[("a", a), ("b", b), ("c", device(&gpu, 70 * GIB, 90))]);
    let gpus = [gpu];
    assert!(apply(&mut ledger, &[wants("a", 15 * GIB, 70)], &gpus).refused.is_empty());
    assert_eq!(limit(&ledger, "a"), (15 * GIB, 70));
    for (wanted, words) in [
        (wants("a", 16 * GIB, 70), "the shares of 2g.20gb at {4}:2 on GPU"),
        (wants("a", 15 * GIB, 71), "101 percent"),
    ] {
        let verdict = apply(&mut ledger, std::slice::from_ref(&wanted), &gpus);
        assert!(verdict.refused.len() == 1 && verdict.refused[0].reason.contains(words), "{verdict:?}");
    }
}

#[test]
fn a_raise_and_what_pays_for_it_come_in_any_order() {
    let gpu = testing::h100(0);
    let mut ledger = ledger(&[("a", device(&gpu, GIB, 0)), ("b", device(&gpu, GIB, 0))]);
    let gpus = [gpu];
    assert!(apply(&mut ledger, &[wants("b", 70 * GIB, 0)], &gpus).refused.is_empty());
    let verdict = apply(&mut ledger, &[wants("a", 70 * GIB, 0), wants("b", 2 * GIB, 0)], &gpus);
    assert_eq!(verdict, Verdict { changed: true, lowered: true, refused: vec![] });
}

proptest! {
    #[test]
    fn the_ledger_never_holds_more_than_the_gpu(
        given in prop::collection::vec((1u64..30, 0u8..40), 1..4),
        rounds in prop::collection::vec(prop::collection::vec((0usize..4, 0u64..90, 0u8..120), 0..4), 1..8),
    ) {
        let gpu = testing::h100(0);
        let mut claims = Vec::new();
        let mut sum = (0, 0u32);
        for (at, (memory, cores)) in given.iter().enumerate() {
            if sum.0 + memory <= 80 && sum.1 + u32::from(*cores) <= 100 {
                sum = (sum.0 + memory, sum.1 + u32::from(*cores));
                claims.push((format!("c{at}"), device(&gpu, memory * GIB, *cores)));
            }
        }
        let named: Vec<(&str, Device)> = claims.iter().map(|(uid, d)| (uid.as_str(), d.clone())).collect();
        let mut ledger = ledger(&named);
        for round in rounds {
            let wanted: Vec<_> =
                round.iter().map(|(at, memory, cores)| wants(&format!("c{at}"), memory * GIB, *cores)).collect();
            let verdict = apply(&mut ledger, &wanted, std::slice::from_ref(&gpu));
            let reserved: Vec<_> =
                ledger.claims.values().flat_map(|r| &r.devices).filter_map(Device::reserved).collect();
            prop_assert!(reserved.iter().map(|r| r.memory_bytes).sum::<u64>() <= gpu.memory_bytes);
            prop_assert!(reserved.iter().map(|r| u32::from(r.cores_percent)).sum::<u32>() <= 100);
            prop_assert!(ledger.claims.keys().all(|uid| limit(&ledger, uid).0 > 0));
            // Nothing is left undone silently.
            for want in &wanted {
                let first = wanted.iter().find(|other| other.share == want.share).unwrap();
                let refused = verdict.refused.iter().any(|refused| refused.share == want.share);
                if ledger.claims.contains_key(&want.share.uid) && !refused {
                    let uid = &want.share.uid;
                    prop_assert_eq!(limit(&ledger, uid), (first.memory_bytes, first.cores_percent));
                }
            }
        }
    }
}

#[rstest::rstest]
#[case::device_not_understood(true)]
#[case::no_devices(false)]
fn nothing_is_raised_beside_what_a_newer_release_may_have_given(#[case] device_named: bool) {
    let gpu = testing::h100(0);
    let mut ledger = ledger(&[("b", device(&gpu, GIB, 10))]);
    ledger.newer.insert("a".into(), testing::newer("a", device_named.then_some(&gpu.uuid)));
    let gpus = [gpu];
    let verdict = apply(&mut ledger, &[wants("b", 2 * GIB, 20)], &gpus);
    assert!(!verdict.changed && verdict.refused.len() == 1, "{verdict:?}");
    assert!(verdict.refused[0].reason.contains("newer release"), "{verdict:?}");
    // Lowering needs nothing of it.
    let verdict = apply(&mut ledger, &[wants("b", GIB / 2, 5)], &gpus);
    assert!(verdict.changed && verdict.refused.is_empty(), "{verdict:?}");
}
