use super::*;
use crate::contract::{AskedGpu, ClaimRef};
use rstest::rstest;

const GONE: fn() -> Seen = || Seen::Ended(End { reason: "it crashed".into(), hopeless: false });

fn ask(percent: u32) -> Ask {
    Ask {
        version: Version,
        claim: ClaimRef { namespace: "ns".into(), name: "c".into(), uid: "u".into() },
        gpus: vec![AskedGpu { uuid: "GPU-0".into(), minor: 0 }],
        active_thread_percentage: Some(percent),
        pinned_device_memory_limit_bytes: None,
    }
}

/// A claim that asks, and a clock in seconds.
struct Story {
    keeper: Keeper,
    now: u64,
    asked: Asked,
}

impl Story {
    fn new() -> Self {
        Self { keeper: Keeper::new(Timing::default()), now: 0, asked: Asked::Daemon(ask(50)) }
    }

    fn ready() -> Self {
        let mut story = Self::new();
        assert_eq!(story.at(0, &GONE(), &Told::Nothing), ["start", "starting"]);
        assert_eq!(story.at(0, &Seen::Runs(7), &Told::Nothing), ["set limits", "starting 7"]);
        assert_eq!(story.at(0, &Seen::Runs(7), &Told::Taken), ["ready 7"]);
        story
    }

    /// What is done when so many seconds more have passed.
    fn at(&mut self, seconds: u64, seen: &Seen, told: &Told) -> Vec<String> {
        self.now += seconds;
        let now = Duration::from_secs(self.now);
        self.keeper.step(now, &self.asked, seen, told).iter().map(short).collect()
    }
}

fn short(action: &Action) -> String {
    match action {
        Action::Start(_) => "start".into(),
        Action::SetLimits(_) => "set limits".into(),
        Action::Quit => "quit".into(),
        Action::Kill => "kill".into(),
        Action::Forget => "forget".into(),
        Action::Say(state) => {
            let phase = format!("{:?}", state.state).to_lowercase();
            let pid = state.pid.map(|pid| format!(" {pid}")).unwrap_or_default();
            let reason = state.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            format!("{phase}{pid}{reason}")
        }
    }
}

#[test]
fn a_daemon_is_ready_when_its_limits_hold_and_is_said_to_be_once() {
    let mut story = Story::ready();
    assert_eq!(story.at(1, &Seen::Runs(7), &Told::Taken), [""; 0]);
}

#[test]
fn a_state_that_could_not_be_written_is_said_again() {
    let mut story = Story::ready();
    story.keeper.not_said();
    assert_eq!(story.at(1, &Seen::Runs(7), &Told::Taken), ["ready 7"]);
}

#[test]
fn an_ask_that_is_gone_ends_the_daemon_before_the_state_goes() {
    let mut story = Story::ready();
    story.asked = Asked::Nothing;
    assert_eq!(story.at(1, &Seen::Runs(7), &Told::Taken), ["quit", "starting 7"], "it is ready no more");
    assert_eq!(story.at(1, &Seen::Runs(7), &Told::Waiting), [""; 0]);
    assert_eq!(story.at(1, &GONE(), &Told::Taken), ["starting"]);
    assert_eq!(story.at(0, &GONE(), &Told::Taken), ["forget"]);
}

#[test]
fn a_daemon_that_hangs_at_quit_is_killed_until_it_is_gone() {
    let mut story = Story::ready();
    story.asked = Asked::Nothing;
    story.at(1, &Seen::Runs(7), &Told::Taken);
    assert!(!story.at(9, &Seen::Runs(7), &Told::Waiting).contains(&"kill".to_owned()));
    assert_eq!(story.at(1, &Seen::Runs(7), &Told::Waiting), ["kill"]);
    assert!(!story.at(9, &Seen::Runs(7), &Told::Waiting).contains(&"kill".to_owned()));
    assert_eq!(story.at(1, &Seen::Runs(7), &Told::Waiting), ["kill"]);
    let server = Seen::Lingers(End { reason: "killed".into(), hopeless: false });
    assert_eq!(story.at(0, &server, &Told::Waiting)[0], "kill");
    story.at(0, &GONE(), &Told::Waiting);
    assert_eq!(story.at(0, &GONE(), &Told::Waiting), ["forget"]);
}

#[test]
fn a_daemon_that_ends_by_itself_starts_again_after_pauses_that_grow_and_counts_as_failed_after_five() {
    let mut story = Story::ready();
    let mut pauses = Vec::new();
    for failure in 1..=8 {
        assert_eq!(story.at(0, &GONE(), &Told::Taken)[0], "kill");
        let said = story.keeper.said.clone().unwrap();
        let phase = if failure < MOST_FAILURES { Phase::Starting } else { Phase::Failed };
        assert_eq!((said.state, said.reason.as_deref()), (phase, Some("it crashed")), "failure {failure}");
        story.at(0, &GONE(), &Told::Taken);
        let before = story.now;
        while story.at(1, &GONE(), &Told::Nothing).first().is_none_or(|first| first != "start") {}
        pauses.push(story.now - before);
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
    assert_eq!(story.at(0, &Seen::Runs(9), &Told::Nothing)[0], "set limits");
    assert_eq!(story.at(0, &Seen::Runs(9), &Told::Taken), ["ready 9"], "it is never given up");
}

#[test]
fn failures_are_forgotten_after_a_calm_time() {
    let mut story = Story::ready();
    for _ in 0..3 {
        story.at(0, &GONE(), &Told::Taken);
        story.at(0, &GONE(), &Told::Taken);
        story.at(60, &GONE(), &Told::Nothing);
        story.at(0, &Seen::Runs(7), &Told::Taken);
        story.at(60, &Seen::Runs(7), &Told::Taken);
    }
    assert_eq!(story.keeper.failures, 0);
    assert_eq!(story.keeper.said.as_ref().unwrap().restarts, 3);
}

#[rstest]
#[case::silent(Told::Waiting, "it does not answer")]
#[case::refused(Told::Refused("no such limit".into()), "no such limit")]
fn a_daemon_that_is_never_ready_is_ended_with_the_reason(#[case] told: Told, #[case] reason: &str) {
    let mut story = Story::new();
    story.at(0, &GONE(), &Told::Nothing);
    assert!(!story.at(19, &Seen::Runs(7), &told).contains(&"kill".to_owned()));
    let said = story.at(1, &Seen::Runs(7), &told);
    assert_eq!(said[0], "kill");
    assert!(said[1].ends_with(reason), "{said:?}");
}

#[test]
fn a_daemon_that_cannot_start_has_failed_at_once_and_is_tried_slowly() {
    let mut story = Story::new();
    story.at(0, &GONE(), &Told::Nothing);
    let end = Seen::Ended(End { reason: "no program".into(), hopeless: true });
    assert_eq!(story.at(0, &end, &Told::Nothing), ["kill", "failed: no program"]);
    story.at(0, &end, &Told::Nothing);
    assert_eq!(story.at(59, &end, &Told::Nothing), [""; 0]);
    assert_eq!(story.at(1, &end, &Told::Nothing)[0], "start");
}

#[test]
fn an_ask_that_cannot_be_done_is_answered_and_starts_nothing() {
    let mut story = Story::new();
    story.asked = Asked::Unfit("it has version 2".into());
    assert_eq!(story.at(0, &GONE(), &Told::Nothing), ["failed: it has version 2"]);
    assert_eq!(story.at(100, &GONE(), &Told::Nothing), [""; 0]);
    story.asked = Asked::Daemon(ask(50));
    assert_eq!(story.at(0, &GONE(), &Told::Nothing), ["start", "starting"]);
}

#[test]
fn another_ask_for_the_claim_ends_the_daemon_and_starts_one_with_the_new_limits() {
    let mut story = Story::ready();
    story.asked = Asked::Daemon(ask(25));
    assert_eq!(story.at(0, &Seen::Runs(7), &Told::Taken), ["quit", "starting 7"]);
    story.at(0, &GONE(), &Told::Taken);
    let actions = story.keeper.step(Duration::from_secs(story.now), &story.asked, &GONE(), &Told::Taken);
    assert_eq!(actions[0], Action::Start(ask(25)));
}

#[test]
fn a_daemon_with_device_nodes_that_are_none_of_its_gpus_any_more_is_replaced_by_another() {
    let mut story = Story::ready();
    assert_eq!(story.at(0, &Seen::Outdated(7), &Told::Taken), ["quit", "starting 7"]);
    assert_eq!(story.at(1, &Seen::Outdated(7), &Told::Waiting), [""; 0]);
    story.at(0, &GONE(), &Told::Taken);
    assert_eq!(story.at(0, &GONE(), &Told::Taken)[0], "start");
    assert_eq!(story.keeper.failures, 0, "that was not its fault");
}

#[test]
fn what_a_predecessor_left_and_cannot_be_killed_keeps_its_claim_from_a_daemon_until_it_has_ended() {
    let mut story = Story::new();
    story.keeper = Keeper::with_leftovers(Timing::default(), "process 7 does not end".into());
    let left = Seen::Lingers(End { reason: String::new(), hopeless: false });
    assert_eq!(story.at(0, &left, &Told::Nothing), ["kill", "failed: process 7 does not end"]);
    story.asked = Asked::Nothing;
    assert_eq!(story.at(100, &left, &Told::Nothing), ["kill"], "nobody is told that it has ended");
    story.asked = Asked::Daemon(ask(50));
    story.at(0, &GONE(), &Told::Nothing);
    assert_eq!(story.at(0, &GONE(), &Told::Nothing), ["start", "starting"]);
}
