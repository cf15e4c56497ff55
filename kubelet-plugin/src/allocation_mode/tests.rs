use super::*;
use rstest::rstest;

const WAITS: Waits =
    Waits { scheduler: Duration::from_secs(610), absent_controller: Duration::from_secs(60) };

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn observed(target: Target, now: i64) -> Observed {
    Observed {
        target,
        now: time(now),
        acknowledged: None,
        scheduler_idle: None,
        controller_absent_since: None,
    }
}

fn hand_over(from: Option<Target>, published: Option<(i64, i64)>) -> Phase {
    let published = published.map(|(generation, at)| Published { generation, at: time(at) });
    Phase::HandOver { from, published }
}

use Target::{Controller, Scheduler};

#[test]
fn every_switch_passes_through_hand_over() {
    for (by, target) in [(Controller, Scheduler), (Scheduler, Controller)] {
        let (phase, _) = next(Phase::Settled { by }, &observed(target, 0), &WAITS);
        assert_eq!(phase, hand_over(Some(by), None));
        assert_eq!(phase.mode(), AllocatorMode::HandOver);
    }
}

#[test]
fn nothing_goes_on_before_the_hand_over_is_published() {
    let phase = hand_over(Some(Controller), None);
    let seen = Observed { acknowledged: Some(99), ..observed(Scheduler, 10_000) };
    assert_eq!(next(phase, &seen, &WAITS).0, phase);
}

#[rstest]
#[case::no_acknowledgement(None, false)]
#[case::of_an_earlier_generation(Some(6), false)]
#[case::of_this_generation(Some(7), true)]
#[case::of_a_later_generation(Some(8), true)]
fn the_scheduler_gets_the_pool_once_the_controller_acknowledged(
    #[case] ack: Option<i64>,
    #[case] done: bool,
) {
    let phase = hand_over(Some(Controller), Some((7, 100)));
    let seen = Observed { acknowledged: ack, ..observed(Scheduler, 101) };
    let want = if done { Phase::Settled { by: Scheduler } } else { phase };
    assert_eq!(next(phase, &seen, &WAITS).0, want);
}

#[test]
fn an_absent_controller_is_waited_for_only_so_long() {
    let phase = hand_over(Some(Controller), Some((7, 100)));
    let seen = |now| Observed { controller_absent_since: Some(time(10)), ..observed(Scheduler, now) };
    // Absence before the hand-over was published does not count: it may have acted until then.
    assert_eq!(next(phase, &seen(159), &WAITS), (phase, Some(time(160))));
    assert_eq!(next(phase, &seen(160), &WAITS).0, Phase::Settled { by: Scheduler });
}

#[test]
fn a_present_controller_is_waited_for_without_end() {
    let phase = hand_over(Some(Controller), Some((7, 100)));
    assert_eq!(next(phase, &observed(Scheduler, 1_000_000), &WAITS), (phase, None));
}

#[test]
fn the_controller_gets_the_pool_after_the_schedulers_time_outs() {
    let phase = hand_over(Some(Scheduler), Some((7, 100)));
    assert_eq!(next(phase, &observed(Controller, 709), &WAITS), (phase, Some(time(710))));
    assert_eq!(next(phase, &observed(Controller, 710), &WAITS).0, Phase::Settled { by: Controller });
}

#[rstest]
#[case::nobody_said_so(None, false)]
#[case::of_an_earlier_hand_over(Some(6), false)]
#[case::of_this_one(Some(7), true)]
#[case::of_this_one_published_anew_meanwhile(Some(8), true)]
fn the_controller_gets_the_pool_as_soon_as_kube_scheduler_is_idle(
    #[case] idle: Option<i64>,
    #[case] done: bool,
) {
    let phase = hand_over(Some(Scheduler), Some((7, 100)));
    let seen = Observed { scheduler_idle: idle, ..observed(Controller, 101) };
    let want = if done { Phase::Settled { by: Controller } } else { phase };
    assert_eq!(next(phase, &seen, &WAITS).0, want);
    // It says nothing about the controller, which may still be writing.
    let phase = hand_over(Some(Controller), Some((7, 100)));
    let seen = Observed { scheduler_idle: idle, ..observed(Scheduler, 101) };
    assert_eq!(next(phase, &seen, &WAITS).0, phase);
}

#[test]
fn what_was_said_before_the_hand_over_was_published_does_not_end_it() {
    let phase = hand_over(Some(Scheduler), None);
    let seen = Observed { scheduler_idle: Some(99), ..observed(Controller, 10_000) };
    assert_eq!(next(phase, &seen, &WAITS).0, phase);
}

#[test]
fn only_a_published_hand_over_that_waits_for_kube_scheduler_says_until_when() {
    let until = |phase: Phase| phase.until(&WAITS);
    assert_eq!(until(hand_over(Some(Scheduler), Some((7, 100)))), Some(time(710)));
    assert_eq!(until(hand_over(None, Some((7, 100)))), Some(time(710)));
    assert_eq!(until(hand_over(Some(Scheduler), None)), None);
    assert_eq!(until(hand_over(Some(Controller), Some((7, 100)))), None);
    assert_eq!(until(Phase::Settled { by: Controller }), None);
}

#[rstest]
#[case(Controller)]
#[case(Scheduler)]
fn a_change_of_mind_goes_straight_back(#[case] from: Target) {
    let phase = hand_over(Some(from), Some((7, 100)));
    assert_eq!(next(phase, &observed(from, 101), &WAITS).0, Phase::Settled { by: from });
}

#[test]
fn from_an_unknown_origin_both_sides_are_waited_for() {
    let phase = hand_over(None, Some((7, 100)));
    let acknowledged = |now| Observed { acknowledged: Some(7), ..observed(Scheduler, now) };
    assert_eq!(next(phase, &acknowledged(200), &WAITS).0, phase);
    assert_eq!(next(phase, &observed(Scheduler, 5000), &WAITS).0, phase);
    assert_eq!(next(phase, &acknowledged(710), &WAITS).0, Phase::Settled { by: Scheduler });
    let idle = Observed { scheduler_idle: Some(7), ..acknowledged(200) };
    assert_eq!(next(phase, &idle, &WAITS).0, Phase::Settled { by: Scheduler });
}

#[test]
fn a_restart_goes_on_where_it_was() {
    let stored = hand_over(Some(Controller), Some((7, 100)));
    assert_eq!(at_start(Some(stored), None, Scheduler), stored);
    assert_eq!(at_start(None, Some(AllocatorMode::HandOver), Scheduler), hand_over(None, None));
    assert_eq!(at_start(None, Some(AllocatorMode::Controller), Scheduler), Phase::Settled { by: Controller });
    assert_eq!(at_start(None, None, Scheduler), Phase::Settled { by: Scheduler });
}

#[test]
fn phases_survive_the_disk() {
    for phase in
        [Phase::Settled { by: Controller }, hand_over(None, None), hand_over(Some(Scheduler), Some((7, 100)))]
    {
        let text = serde_json::to_string(&phase).unwrap();
        assert_eq!(serde_json::from_str::<Phase>(&text).unwrap(), phase, "{text}");
    }
}

#[rstest]
#[case(None, None, Ok(Controller))]
#[case(Some("scheduler"), Some("controller"), Ok(Scheduler))]
#[case(None, Some("scheduler"), Ok(Scheduler))]
#[case(Some(""), None, Ok(Controller))]
#[case(Some("both"), None, Err(UnknownMode("both".to_owned())))]
fn the_label_counts_before_annotation_and_flag(
    #[case] label: Option<&str>,
    #[case] annotation: Option<&str>,
    #[case] want: Result<Target, UnknownMode>,
) {
    assert_eq!(target(label, annotation, Controller), want);
}

#[rstest]
#[case::none("", 5, None)]
#[case::a_generation("7", 5, Some(7))]
#[case::the_highest("9007199254740992", 5, Some(1 << 53))]
#[case::higher("9007199254740993", 5, None)]
#[case::higher_and_used("9007199254740993", (1 << 53) + 1, Some((1 << 53) + 1))]
#[case::where_the_next_one_saturates("9223372036854775807", 5, None)]
#[case::negative("-1", 5, None)]
fn a_generation_that_no_pool_reaches_was_said_by_nobody_who_saw_one(
    #[case] text: &str,
    #[case] used: i64,
    #[case] want: Option<i64>,
) {
    assert_eq!(generation_said(text, used), want);
}
