use super::*;
use proptest::prelude::*;

const HOUR: i64 = 3600;
const IMMEDIATE: Policy = Policy { immediate: true, retain: false, seconds: HOUR, priority: 0 };
const RETAIN: Policy = Policy { immediate: false, retain: true, seconds: HOUR, priority: 0 };
const BOTH: Policy = Policy { immediate: true, retain: true, seconds: HOUR, priority: 0 };
const NEITHER: Policy = Policy { immediate: false, retain: false, seconds: HOUR, priority: 0 };

fn claim(allocated: bool, hold: Option<Hold>, consumers: usize) -> Facts {
    let allocated = allocated.then_some(ByUs(true));
    Facts {
        created: 1000,
        deleting: false,
        generated: false,
        allocated,
        hold,
        consumers,
        gone: 0,
        evicted: false,
    }
}

fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn steps() {
    use Hold::{InUse, Until};
    let end = 1000 + HOUR;
    let table = [
        ("bound at once", IMMEDIATE, claim(false, None, 0), 1001, Step::Bind(end)),
        ("not for ever", IMMEDIATE, claim(false, None, 0), end, Step::Wait(None)),
        ("waits for its pod", RETAIN, claim(false, None, 0), 1001, Step::Wait(None)),
        ("waits unused", IMMEDIATE, claim(true, Some(Until(end)), 0), 1500, Step::Wait(Some(end))),
        ("never used", IMMEDIATE, claim(true, Some(Until(end)), 0), end, Step::Release(Ended::Expired)),
        ("its pod came", IMMEDIATE, claim(true, Some(Until(end)), 1), 1500, Step::Set(InUse)),
        ("its pod came late", IMMEDIATE, claim(true, Some(Until(end)), 1), end, Step::Unset),
        ("its pod went", IMMEDIATE, claim(true, Some(InUse), 0), 1500, Step::Set(Until(end))),
        ("its pod went late", IMMEDIATE, claim(true, Some(InUse), 0), end, Step::Release(Ended::Expired)),
        ("kept from the first pod on", RETAIN, claim(true, None, 1), 1500, Step::Set(InUse)),
        ("in use", RETAIN, claim(true, Some(InUse), 2), 1500, Step::Wait(None)),
        ("kept after the last", RETAIN, claim(true, Some(InUse), 0), 9000, Step::Set(Until(9000 + HOUR))),
        ("kept", RETAIN, claim(true, Some(Until(9100)), 0), 9000, Step::Wait(Some(9100))),
        ("kept long enough", RETAIN, claim(true, Some(Until(9100)), 0), 9100, Step::Release(Ended::Expired)),
        ("used again", RETAIN, claim(true, Some(Until(9100)), 1), 9000, Step::Set(InUse)),
        ("both: the later end", BOTH, claim(true, Some(Until(1100)), 0), 1050, Step::Set(Until(end))),
        ("given up while used", NEITHER, claim(true, Some(InUse), 1), 1500, Step::Unset),
        ("given up", NEITHER, claim(true, Some(Until(9100)), 0), 9000, Step::Release(Ended::Withdrawn)),
        ("nothing to do", NEITHER, claim(true, None, 1), 1500, Step::Wait(None)),
    ];
    for (name, policy, claim, now, wanted) in table {
        assert_eq!(step(policy, claim, now), wanted, "{name}");
    }
}

#[test]
fn a_claim_that_is_being_deleted_or_made_for_one_pod_is_not_kept() {
    let deleting = Facts { deleting: true, ..claim(true, Some(Hold::Until(9999)), 0) };
    assert_eq!(step(RETAIN, deleting, 1500), Step::Release(Ended::Deleted));
    assert_eq!(step(RETAIN, Facts { consumers: 1, ..deleting }, 1500), Step::Unset);
    let generated = Facts { generated: true, ..claim(true, None, 1) };
    assert_eq!(step(RETAIN, generated, 1500), Step::Wait(None));
    assert_eq!(step(IMMEDIATE, Facts { allocated: None, ..generated }, 1500), Step::Wait(None));
}

#[test]
fn pods_that_are_gone_count_for_nothing_although_kubernetes_leaves_them_in_the_list() {
    let gone = |hold| Facts { gone: 1, ..claim(true, hold, 1) };
    assert_eq!(step(RETAIN, gone(Some(Hold::InUse)), 1500), Step::Set(Hold::Until(1500 + HOUR)));
    assert_eq!(step(RETAIN, gone(Some(Hold::Until(5000))), 1500), Step::Set(Hold::Until(5000)));
    // Without our entry Kubernetes can remove them, and takes the devices back with the last.
    assert_eq!(step(RETAIN, gone(Some(Hold::Until(1500))), 1500), Step::Unset);
    assert_eq!(step(NEITHER, gone(Some(Hold::InUse)), 1500), Step::Unset);
    let two = Facts { consumers: 2, ..gone(Some(Hold::InUse)) };
    assert_eq!(step(RETAIN, two, 1500), Step::Wait(None), "one is there");
}

#[test]
fn what_an_evicted_pod_leaves_behind_is_not_kept() {
    for policy in [RETAIN, IMMEDIATE, BOTH] {
        let evicted = |hold| Facts { evicted: true, ..claim(true, hold, 1) };
        assert_eq!(step(policy, evicted(Some(Hold::InUse)), 1500), Step::Unset);
        assert_eq!(step(policy, evicted(None), 1500), Step::Wait(None), "nor is it kept again");
    }
}

#[test]
fn what_kube_scheduler_gave_is_not_kept() {
    let native = Facts { allocated: Some(ByUs(false)), ..claim(true, None, 1) };
    assert_eq!(step(RETAIN, native, 1500), Step::Wait(None));
}

#[test]
fn the_claims_word_counts_before_its_classes_and_the_administrator_bounds_it() {
    let own = Wish::read(Some(&annotations(&[(RECLAIM, "Delete"), (HOLD_FOR, "48h")])));
    let class = Wish::read(Some(&annotations(&[(RECLAIM, "Retain"), (BINDING, "Immediate")])));
    let limits = Limits::default();
    let policy = Policy::of(limits, [&own, &class].into_iter());
    assert_eq!(policy, Policy { immediate: true, retain: false, seconds: 24 * HOUR, priority: 0 });
    let off = Policy::of(Limits { most: Duration::ZERO, ..limits }, [&own, &class].into_iter());
    assert!(!off.immediate && !off.retain);
}

#[test]
fn what_is_not_understood_is_named_and_counts_as_not_said() {
    let wish = Wish::read(Some(&annotations(&[(BINDING, "Now"), (RECLAIM, "retain"), (HOLD_FOR, "soon")])));
    assert_eq!((wish.immediate, wish.retain, wish.hold_for), (None, None, None));
    assert_eq!(
        wish.mistakes,
        [
            "annotation aliquot.dev/binding is \"Now\"; it can be Immediate or WaitForFirstConsumer",
            "annotation aliquot.dev/reclaim is \"retain\"; it can be Delete or Retain",
            "annotation aliquot.dev/hold-for: \"soon\" is not a duration, for example 15s or 1h30m",
        ]
    );
    assert!(Wish::read(None).is_empty());
}

#[test]
fn entries_are_read_as_they_were_written_and_pods_are_none() {
    for hold in [Hold::InUse, Hold::Until(1_763_740_000)] {
        assert_eq!(read(&consumer(hold, "u")), Some(hold));
    }
    let mut broken = consumer(Hold::InUse, "u");
    broken.name = "until-tomorrow".to_owned();
    assert_eq!(read(&broken), Some(Hold::Until(0)));
    let pod = ResourceClaimConsumerReference {
        api_group: None,
        resource: "pods".into(),
        name: "in-use".into(),
        uid: "u".into(),
    };
    assert_eq!(read(&pod), None);
}

proptest! {
    /// Whatever happens to a claim, without pods its devices are free after the time it may ask for.
    #[test]
    fn a_hold_without_pods_ends(
        immediate: bool, retain: bool, seconds in 0i64..5000, start in 1000i64..20_000,
        hold in prop_oneof![
            Just(None), Just(Some(Hold::InUse)), (0i64..100_000).prop_map(|s| Some(Hold::Until(s)))
        ],
    ) {
        let policy = Policy { immediate, retain, seconds, priority: 0 };
        let mut claim = Facts { created: 1000, ..claim(true, hold, 0) };
        let mut now = start;
        for _ in 0..10 {
            match step(policy, claim, now) {
                Step::Set(hold) => claim.hold = Some(hold),
                Step::Unset => claim.hold = None,
                Step::Wait(Some(until)) => {
                    prop_assert!(until > now);
                    now = until;
                }
                Step::Wait(None) => {
                    prop_assert!(claim.hold.is_none(), "an entry that nobody looks at again");
                    break;
                }
                Step::Release(_) => { claim.allocated = None; claim.hold = None; break; }
                Step::Bind(_) => prop_assert!(false, "it has devices"),
            }
        }
        prop_assert!(claim.hold.is_none(), "still held: {:?} {:?}", policy, claim);
        prop_assert!(now <= start.max(1000) + seconds.max(0));
        if claim.allocated.is_none() {
            prop_assert_eq!(step(policy, claim, now.max(1000 + seconds)), Step::Wait(None), "not bound again");
        }
    }
}

#[test]
fn a_hold_never_stands_above_a_pod_without_a_priority_class() {
    let wish = |text: &str| Wish::read(Some(&annotations(&[(HOLD_PRIORITY, text)])));
    assert_eq!(wish("-5").priority, Some(-5));
    for wrong in ["1", "1000000", "low"] {
        assert_eq!((wish(wrong).priority, wish(wrong).mistakes.len()), (None, 1), "{wrong}");
    }
    let policy = Policy::of(Limits::default(), [&wish("7"), &wish("-3")].into_iter());
    assert_eq!(policy.priority, -3, "what is not understood is not said");
    assert_eq!(Policy::of(Limits::default(), [&wish("7")].into_iter()).priority, 0);
}
