use super::*;

const MS: u64 = 1_000_000;

fn fresh() -> Box<Compute> {
    Box::new(Compute::new())
}

/// Launches kernels of `cost_ns` as fast as the gate lets them; GPU time in `span_ns`.
fn used(compute: &Compute, from_ns: u64, span_ns: u64, cost_ns: u64, percent: u8) -> u64 {
    let (mut now, mut used) = (from_ns, 0);
    while now < from_ns + span_ns {
        match admit(compute, now, cost_ns, percent) {
            Admission::Go => used += cost_ns,
            Admission::Wait(until) => now = until,
        }
    }
    used
}

#[test]
fn a_window_gets_its_rate_plus_what_was_saved_up_and_one_kernel() {
    for percent in [1, 10, 30, 50, 70, 90, 100] {
        // Miri is a thousand times slower.
        for cost in if cfg!(miri) { &[50 * MS][..] } else { &[5_000, MS, 50 * MS] } {
            let got = used(&fresh(), 1_000_000 * MS, 10_000 * MS, *cost, percent);
            let rate = 100 * MS * u64::from(percent);
            assert!(
                (rate - rate / 10_000..=rate + BURST_NS + cost).contains(&got),
                "{percent} % of {cost} ns: {got}"
            );
        }
    }
}

#[test]
fn idle_time_saves_up_no_more_than_the_burst() {
    let compute = fresh();
    let _ = used(&compute, 1000 * MS, 1000 * MS, MS, 10);
    let got = used(&compute, 60_000 * MS, 1, MS, 10);
    assert_eq!(got, BURST_NS + MS);
}

#[test]
fn launches_that_are_long_against_what_is_lent_do_not_borrow() {
    let borrows = |cost, percent| borrow(&fresh(), 1_000_000 * MS, cost, percent) == Admission::Go;
    assert!(borrows(100 * MS, 80) && borrows(40 * MS, 10) && borrows(MS, 1));
    assert!(!borrows(101 * MS, 80) && !borrows(41 * MS, 10) && !borrows(MS, 0));
}

#[test]
fn who_has_much_queued_borrows_when_so_much_of_it_has_ended() {
    let now = 1_000_000 * MS;
    let terms = Terms { percent: 10, borrow_percent: 80 };
    let asked = |cost_ns, ahead_ns| {
        let compute = fresh();
        compute.paid_until_ns.store(now + 1000 * MS, Relaxed);
        enter(&compute, now, Ask { cost_ns, is_known: true, ahead_ns, ..Ask::default() }, terms)
    };
    assert_eq!(asked(20 * MS, 40 * MS), Entrance::Borrowed(0));
    assert_eq!(asked(20 * MS, 45 * MS), Entrance::Wait(now + 5 * MS));
    assert_eq!(asked(90 * MS, 0), Entrance::Borrowed(0), "alone");
    assert_eq!(asked(90 * MS, 7 * MS), Entrance::Wait(now + 7 * MS));
    assert_eq!(asked(20 * MS, u64::MAX), Entrance::Wait(now + 1000 * MS), "others have slices");
}

#[test]
fn what_was_borrowed_is_put_right_once_and_on_borrowed_time() {
    let (compute, now) = (fresh(), 1_000_000 * MS);
    let grant = |borrow_percent, borrowed| Grant {
        borrow_percent,
        borrowed_true_up_ns: borrowed,
        ..Grant::default()
    };
    true_up(&compute, now, &grant(0, 8 * MS as i64), 50);
    assert_eq!(compute.borrowed_until_ns.load(Relaxed), 0, "nothing is lent now");
    for _ in 0..2 {
        true_up(&compute, now, &grant(80, 8 * MS as i64), 50);
        assert_eq!(compute.borrowed_until_ns.load(Relaxed), now + 10 * MS);
    }
    // Lent less since: a refund is worth its GPU time all the same.
    true_up(&compute, now, &grant(10, 0), 50);
    assert_eq!(compute.borrowed_until_ns.load(Relaxed), now + 2 * MS);
    assert_eq!((compute.borrowed_ns.load(Relaxed), compute.paid_until_ns.load(Relaxed)), (0, 0));
}

#[test]
fn a_lease_is_long_where_much_is_saved_up_and_short_at_the_limit() {
    let now = 1_000_000 * MS;
    let room = Room { allowance_ns: 4 * MS, held_ns: 0 };
    let ask = Ask { cost_ns: 5_000, is_known: true, is_short: true, room, ..Ask::default() };
    let terms = Terms { percent: 50, borrow_percent: 0 };
    let lease = |paid_until_ns: u64| {
        let compute = fresh();
        compute.paid_until_ns.store(paid_until_ns, Relaxed);
        let Entrance::Own(lease) = enter(&compute, now, ask, terms) else { panic!("open") };
        for word in [&compute.charged_ns, &compute.leased_ns] {
            assert_eq!(word.load(Relaxed), lease + 5_000);
        }
        give_back(&compute, now, Lease { ns: lease, is_borrowed: false }, 50);
        assert_eq!((compute.charged_ns.load(Relaxed), compute.leased_ns.load(Relaxed)), (5_000, 5_000));
        lease
    };
    assert_eq!(lease(0), MS);
    // Ten milliseconds of the clock are five of the GPU; one more is below a quarter.
    assert_eq!(lease(now - 10 * MS), MS);
    assert_eq!(lease(now - 4 * MS), (2 * MS - 5_000) / 4);
    assert_eq!(lease(now), 250_000);
}

#[test]
fn a_mark_is_read_as_it_was_written() {
    for slot in [0, 7, u16::MAX] {
        for key in [0, 1, 0xff_ffff] {
            for (is_sure, is_borrowed) in [(false, false), (true, false), (false, true), (true, true)] {
                let mark = Mark { slot, is_sure, is_borrowed, key };
                assert_eq!(Mark::of(mark.word()), mark);
            }
        }
    }
}

#[test]
fn corrections_are_paid_and_refunded() {
    let compute = fresh();
    let now = 1_000_000 * MS;
    assert_eq!(admit(&compute, now, 0, 50), Admission::Go);
    correct(&compute, now, (BURST_NS + 10 * MS) as i64, 50);
    assert_eq!(admit(&compute, now, MS, 50), Admission::Wait(now + 20 * MS));
    correct(&compute, now, -(10 * MS as i64), 50);
    assert_eq!(admit(&compute, now, MS, 50), Admission::Go);
    assert_eq!(compute.charged_ns.load(Relaxed), BURST_NS + MS);
}

#[test]
fn a_word_that_cannot_be_stops_nobody_for_ever_and_lifts_no_limit() {
    let compute = fresh();
    let now = 1_000_000 * MS;
    compute.paid_until_ns.store(u64::MAX, Relaxed);
    assert_eq!(admit(&compute, now, MS, 10), Admission::Wait(now + LONGEST_DEBT_NS));
    correct(&compute, now, 1, 10);
    assert_eq!(compute.paid_until_ns.load(Relaxed), now + LONGEST_DEBT_NS, "the word is sound again");
    compute.paid_until_ns.store(0, Relaxed);
    assert_eq!(used(&compute, now, 1, MS, 10), BURST_NS + MS);
}

#[test]
fn threads_of_many_processes_share_one_rate() {
    let compute = fresh();
    let now = 1_000_000 * MS;
    let gone = AtomicU64::new(0);
    let ticks = if cfg!(miri) { 100 } else { 10_000 };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for tick in 0..ticks {
                    if admit(&compute, now + tick * MS / 10, 100_000, 30) == Admission::Go {
                        gone.fetch_add(100_000, Relaxed);
                    }
                }
            });
        }
    });
    // One second of the clock passes in each thread; a thread that lags sees the debt of the others.
    let gone = gone.load(Relaxed);
    assert!(gone <= 300 * MS + BURST_NS + 4 * 100_000, "{gone}");
    assert_eq!(gone, compute.charged_ns.load(Relaxed));
}
