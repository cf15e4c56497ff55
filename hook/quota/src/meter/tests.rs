use super::*;
use crate::spans::Span;

const MS: u64 = 1_000_000;
const SOME: Others = Others { own_permille: Some(500), slice_ns: 2 * MS };

fn launch_of(key: u64, stream: u64) -> Launch {
    Launch { key, context: 1, stream, thread: 9, is_thread_stream: false, is_delicate: false }
}

/// Launches one kernel; its place if it is timed by itself.
fn start(meter: &mut Meter, key: u64, stream: u64) -> Option<usize> {
    let charged = meter.predict(key, 0).cost_ns;
    let plan = meter.launch(&launch_of(key, stream), 0, charged, 0);
    meter.launched(&plan, true, Begins::default());
    plan.single
}

fn end(meter: &mut Meter, place: usize, from: u64, to: u64, others: Others) -> Finding {
    // Relative to the newest end, which these tests count from zero themselves.
    let zero = if meter.reference(1).is_some() { meter.zero_ns } else { from as i64 };
    let span = Span { start: from as i64 - zero, end: to as i64 - zero };
    meter.finish(Pending::Single(place), &[span], None, others, to, &mut |_, _| {})
}

fn run(meter: &mut Meter, key: u64, from: u64, took: u64, others: Others) -> u64 {
    let charged = meter.predict(key, 0).cost_ns as i64;
    let place = start(meter, key, 0).expect("timed by itself");
    (charged + end(meter, place, from, from + took, others).delta_ns) as u64
}

#[test]
fn what_was_measured_is_charged_in_the_end() {
    let mut meter = Meter::new();
    for (at, took) in [5 * MS, MS, 9 * MS, 3 * MS].into_iter().enumerate() {
        assert_eq!(run(&mut meter, 7, 1000 * MS * (at as u64 + 1), took, Others::NONE), took);
    }
    assert!((MS..9 * MS).contains(&meter.predict(7, 0).cost_ns));
}

#[test]
fn an_unknown_launch_is_charged_more_while_the_first_one_runs() {
    let mut meter = Meter::new();
    assert_eq!(meter.predict(7, 10 * MS).cost_ns, PRIOR_NS);
    start(&mut meter, 7, 0).unwrap();
    assert_eq!(meter.predict(7, 11 * MS).cost_ns, DOUBTFUL_NS);
    assert_eq!(meter.predict(7, 510 * MS).cost_ns, 510 * MS);
    assert_eq!(meter.predict(8, 510 * MS).cost_ns, PRIOR_NS);
}

#[test]
fn an_unknown_launch_that_cannot_be_timed_is_charged_what_it_may_take() {
    let mut meter = Meter::new();
    assert_eq!(meter.predict_untimed(7, 10 * MS).cost_ns, DOUBTFUL_NS);
    start(&mut meter, 7, 0).unwrap();
    assert_eq!(meter.predict_untimed(7, 510 * MS).cost_ns, 510 * MS);
    run(&mut meter, 8, 1000 * MS, 3 * MS, Others::NONE);
    assert_eq!(meter.predict_untimed(8, 510 * MS), meter.predict(8, 510 * MS));
}

#[test]
fn short_launches_are_timed_one_by_one_now_and_then_where_there_can_be_no_window() {
    let mut meter = Meter::new();
    run(&mut meter, 7, 1000 * MS, MS / 10, Others::NONE);
    let mut timed = 0;
    for _ in 0..1000 {
        let plan = meter.launch_alone(&launch_of(7, 3), 0, MS / 10, 0);
        assert_eq!((plan.window, plan.closes), (None, None));
        timed += u32::from(plan.single.is_some());
        meter.launched(&plan, true, Begins::default());
        if let Some(place) = plan.single {
            end(&mut meter, place, 2000 * MS, 2000 * MS + MS / 10, Others::NONE);
        }
        meter.passed(MS / 10);
    }
    assert!((5..50).contains(&timed), "{timed}");
}

#[test]
fn a_capture_waits_for_a_window_that_is_being_closed_and_then_nothing_of_it_is_recorded() {
    let mut meter = Meter::new();
    run(&mut meter, 7, 1000 * MS, MS / 10, Others::NONE);
    let plan = meter.launch(&launch_of(7, 3), 0, MS / 10, 0);
    let at = plan.window.expect("a window");
    meter.launched(&plan, true, Begins::default());
    let last = meter.launch(&launch_of(7, 4), 0, MS / 10, 0);
    assert_eq!((last.closes, meter.lanes(at).1), (Some(at), 2));
    assert!(!meter.spoil_open());
    assert_eq!(meter.lanes(at).1, 0, "spoilt");
    meter.launched(&last, true, Begins::default());
    assert!(meter.spoil_open(), "it is gone");
    assert!(!meter.has_pending());
}

#[test]
fn work_that_may_have_changed_is_timed_again_by_itself() {
    let mut meter = Meter::new();
    for round in 1..20 {
        if meter.predict(7, 0).is_short {
            meter.doubt(7);
        }
        assert_eq!(run(&mut meter, 7, round * 1000 * MS, MS / 10, Others::NONE), MS / 10);
    }
    assert!(meter.predict(7, 0).is_short && meter.routine(7) > 0, "the same work");
    // One that was launched before tells nothing about what comes after.
    meter.doubt(7);
    let before = start(&mut meter, 7, 0).unwrap();
    meter.doubt(7);
    end(&mut meter, before, 30_000 * MS, 30_000 * MS + MS / 10, Others::NONE);
    assert!(!meter.predict(7, 0).is_short && meter.routine(7) == 0);
    assert_eq!(run(&mut meter, 7, 40_000 * MS, 20 * MS, Others::NONE), 20 * MS);
    assert_eq!(meter.predict(7, 0).cost_ns, 20 * MS, "other work: nothing is left of the old cost");
}

#[test]
fn the_backlog_is_what_is_to_come_of_what_was_launched() {
    let mut meter = Meter::new();
    assert_eq!(meter.backlog(MS), 0);
    run(&mut meter, 7, 1000 * MS, 20 * MS, Others::NONE);
    let launch = |meter: &mut Meter, now| {
        let plan = meter.launch(&launch_of(7, 0), 0, 20 * MS, now);
        meter.launched(&plan, true, Begins::default());
        plan.single.unwrap()
    };
    let first = launch(&mut meter, 1100 * MS);
    launch(&mut meter, 1101 * MS);
    assert_eq!(meter.backlog(1100 * MS), 40 * MS);
    assert_eq!(meter.backlog(1115 * MS), 25 * MS);
    assert_eq!(meter.backlog(1125 * MS), 20 * MS, "its end is seen a little late");
    assert_eq!(meter.backlog(1140 * MS), u64::MAX, "others have slices");
    end(&mut meter, first, 1100 * MS, 1120 * MS, Others::NONE);
    assert_eq!(meter.backlog(1130 * MS), 10 * MS);
}

/// A launch on an idle GPU: its first event is at `from`, and it begins between two instants. What it is charged.
fn run_idle(meter: &mut Meter, from: u64, took: u64, from_ns: u64, until_ns: u64) -> u64 {
    let charged = meter.predict(7, 0).cost_ns as i64;
    let plan = meter.launch(&launch_of(7, 0), 0, charged as u64, 0);
    meter.launched(&plan, true, Begins { from_ns, until_ns });
    (charged + end(meter, plan.single.unwrap(), from, from + took, Others::NONE).delta_ns) as u64
}

#[test]
fn a_thread_that_is_stopped_while_it_launches_makes_its_launch_neither_long_nor_short() {
    let mut meter = Meter::new();
    run(&mut meter, 7, 1000 * MS, 8 * MS, Others::NONE);
    // Stopped between the event and the call: the launch began behind it.
    assert_eq!(run_idle(&mut meter, 1100 * MS, 12 * MS, 1104 * MS, 1104 * MS), 8 * MS);
    // Stopped in the call, before the launch was made or behind it.
    assert_eq!(run_idle(&mut meter, 1200 * MS, 12 * MS, 1200 * MS, 1204 * MS), 8 * MS);
    assert_eq!(run_idle(&mut meter, 1300 * MS, 8 * MS, 1300 * MS, 1304 * MS), 8 * MS);
    assert_eq!(meter.predict(7, 0).cost_ns, 8 * MS);
}

#[test]
fn overlapping_launches_are_charged_once() {
    let mut meter = Meter::new();
    let places: Vec<_> = (0..8).map(|stream| start(&mut meter, 7, stream).unwrap()).collect();
    let charged = (PRIOR_NS + 7 * DOUBTFUL_NS) as i64;
    let deltas =
        places.iter().map(|place| end(&mut meter, *place, 100 * MS, 108 * MS, Others::NONE).delta_ns);
    assert_eq!(charged + deltas.sum::<i64>(), 8 * MS as i64);
}

#[test]
fn a_long_launch_under_short_ones_is_charged_for_all_its_time() {
    let mut meter = Meter::new();
    let long = start(&mut meter, 1, 0).unwrap();
    let short: i64 = (0..4)
        .map(|at| {
            let place = start(&mut meter, 100 + at, 1).unwrap();
            PRIOR_NS as i64
                + end(&mut meter, place, (105 + at) * MS, (105 + at) * MS + MS / 2, Others::NONE).delta_ns
        })
        .sum();
    let all = short + PRIOR_NS as i64 + end(&mut meter, long, 100 * MS, 120 * MS, Others::NONE).delta_ns;
    assert_eq!(all, 20 * MS as i64);
}

#[test]
fn slices_of_others_do_not_raise_what_a_launch_shorter_than_a_slice_is_charged() {
    let mut meter = Meter::new();
    let mut sum = 0;
    for round in 0..400_u64 {
        // One launch in three is alone; the others wait for a slice.
        let took = if round % 3 == 0 { MS } else { 3 * MS };
        sum += run(&mut meter, 7, round * 10 * MS + 1, took, SOME);
    }
    assert!((390 * MS..450 * MS).contains(&sum), "{sum}");
}

#[test]
fn a_launch_of_many_slices_is_charged_its_part() {
    let mut meter = Meter::new();
    run(&mut meter, 7, MS, 100 * MS, SOME);
    assert_eq!(run(&mut meter, 7, 500 * MS, 100 * MS, SOME), 50 * MS);
}

/// A meter that knows key 7 to cost 5 µs, with a window due.
fn knowing() -> Meter {
    let mut meter = Meter::new();
    run(&mut meter, 7, MS, 5_000, Others::NONE);
    meter.passed(LATER_NS);
    meter
}

/// Shows short launches to the meter until one closes a window; the window.
fn fill(meter: &mut Meter, streams: u64, step_ns: u64) -> usize {
    for at in 0..100 {
        let plan = meter.launch(&launch_of(7, at % streams), 0, 5_000, at * step_ns);
        assert_eq!(plan.before.is_some(), at < streams, "one event at the start of each stream");
        meter.launched(&plan, true, Begins::default());
        if let Some(window) = plan.closes {
            return window;
        }
    }
    panic!("the window stays open")
}

#[test]
fn short_launches_are_timed_in_windows() {
    let mut meter = knowing();
    let window = fill(&mut meter, 1, 100);
    assert_eq!(meter.closed(1), Some(Pending::Window(window)));
    // 32 launches took 6 µs each.
    let span = Span { start: 10_000, end: 202_000 };
    let finding = meter.finish(Pending::Window(window), &[span], None, Others::NONE, 2 * MS, &mut |_, _| {});
    assert_eq!(finding.delta_ns, 32_000);
    assert!((5_200..6_000).contains(&meter.predict(7, 0).cost_ns));
    assert!(!meter.is_watching() && meter.launch(&launch_of(7, 0), 0, 5_000, 0) == Plan::default());
}

#[test]
fn streams_of_a_window_count_once() {
    let mut meter = knowing();
    let window = fill(&mut meter, 4, 100);
    let spans = [Span { start: 10_000, end: 50_000 }; 4];
    let finding = meter.finish(Pending::Window(window), &spans, None, Others::NONE, 2 * MS, &mut |_, _| {});
    assert_eq!(finding.delta_ns, 40_000 - 160_000);
}

#[test]
fn a_window_that_waited_for_the_host_shows_nothing() {
    let mut meter = knowing();
    let window = fill(&mut meter, 1, 50_000);
    let span = Span { start: 10_000, end: 1_565_000 };
    let finding = meter.finish(Pending::Window(window), &[span], None, Others::NONE, 2 * MS, &mut |_, _| {});
    assert_eq!((finding.delta_ns, meter.predict(7, 0).cost_ns), (0, 5_000));
    meter.passed(LATER_NS);
    let plan = meter.launch(&launch_of(7, 0), 0, 5_000, 0);
    assert!(plan.single.is_some(), "the next one is timed alone");
}

#[test]
fn a_stream_that_goes_spoils_the_window_on_it() {
    let mut meter = knowing();
    let plan = meter.launch(&launch_of(7, 3), 0, 5_000, 0);
    assert!(plan.window.is_some() && meter.is_watching());
    assert!(meter.stream_gone(4) && meter.is_watching());
    assert!(meter.stream_gone(3) && !meter.is_watching());
}

#[test]
fn a_thread_stream_of_another_thread_spoils_the_window() {
    let mut meter = knowing();
    meter.launch(&launch_of(7, 3), 0, 5_000, 0);
    let other = Launch { thread: 10, is_thread_stream: true, ..launch_of(7, 2) };
    assert_eq!(meter.launch(&other, 0, 5_000, 0).window, None);
    assert!(!meter.is_watching());
}

#[test]
fn costs_are_forgotten_when_code_is_unloaded() {
    let mut meter = knowing();
    meter.forget_costs();
    assert!(!meter.predict(7, 0).is_known);
}

#[test]
fn full_tables_and_places_are_no_fault() {
    let mut meter = Meter::new();
    for key in 1..5000 {
        run(&mut meter, key, key * 10 * MS, MS, Others::NONE);
    }
    let timed = (0..200).filter(|_| start(&mut meter, 4999, 0).is_some()).count();
    assert_eq!(timed, PLACES);
    meter.context_gone(1);
    assert!(!meter.has_pending());
    assert_eq!(meter.events.iter().filter(|taken| **taken).count(), 0, "all events are free again");
}

/// Short launches of several streams in bursts, a capture open somewhere, on a GPU that has one after the other; what
/// one is charged in the end, of which the first ones were of another length.
fn in_bursts_on_streams(streams: u64, first_ns: u64, kernel_ns: u64, pause_ns: u64) -> u64 {
    let (mut meter, mut now, mut free) = (Meter::new(), MS, 0);
    let mut ends = [0_u64; 8];
    run(&mut meter, 7, now, first_ns, Others::NONE);
    for burst in 0..400 {
        let kernel_ns = if burst < 100 { first_ns } else { kernel_ns };
        now += pause_ns;
        for at in 0..16 {
            now += 5_000;
            // Leases are taken in the midst of bursts as well.
            meter.passed(if at == 5 { MS } else { 0 });
            let (stream, charged) = (at % streams, meter.predict(7, now).cost_ns);
            let plan = meter.launch_alone(&launch_of(7, stream), 0, charged, now);
            meter.launched(&plan, true, Begins::default());
            let last = &mut ends[stream as usize];
            let reached = now.max(*last);
            free = now.max(free) + kernel_ns;
            *last = free;
            if let Some(place) = plan.single {
                end(&mut meter, place, reached, free, Others::NONE);
            }
        }
    }
    meter.predict(7, now).cost_ns
}

#[test]
fn a_short_launch_is_not_taken_for_as_long_as_those_of_other_streams_before_it() {
    for streams in [1, 2, 4, 8] {
        let cost = in_bursts_on_streams(streams, MS / 10, MS / 10, 3 * MS);
        assert!((99_000..103_000).contains(&cost), "{streams} streams: {cost}");
    }
}

#[test]
fn a_gpu_that_streams_never_leave_idle_is_measured_too() {
    // Kernels turn out to be twenty times as long.
    let cost = in_bursts_on_streams(2, 50_000, MS, 0);
    assert!(cost >= MS / 100 * 99, "{cost}");
}
