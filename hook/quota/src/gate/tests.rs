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
        enter(&compute, &Own::new(), now, Ask { cost_ns, is_known: true, ahead_ns, ..Ask::default() }, terms)
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
    true_up(&compute, &Own::new(), now, &grant(0, 8 * MS as i64), 50);
    assert_eq!(compute.borrowed_until_ns.load(Relaxed), 0, "nothing is lent now");
    for _ in 0..2 {
        true_up(&compute, &Own::new(), now, &grant(80, 8 * MS as i64), 50);
        assert_eq!(compute.borrowed_until_ns.load(Relaxed), now + 10 * MS);
    }
    // Lent less since: a refund is worth its GPU time all the same.
    true_up(&compute, &Own::new(), now, &grant(10, 0), 50);
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
        let Entrance::Own(lease) = enter(&compute, &Own::new(), now, ask, terms) else { panic!("open") };
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

/// What somebody writes over the words of a share.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// A share that never launched.
    Zeros,
    /// One that is in debt for ever.
    Ones,
    /// Corrections by the agent that were never taken.
    Refunds,
    /// Anything.
    Garbage(u64),
}

impl Lie {
    fn write(self, compute: &Compute, step: u64) {
        let words = [
            &compute.paid_until_ns,
            &compute.borrowed_until_ns,
            &compute.charged_ns,
            &compute.borrowed_ns,
            &compute.leased_ns,
        ];
        let value = match self {
            Self::Zeros | Self::Refunds => 0,
            Self::Ones => u64::MAX,
            Self::Garbage(seed) => (seed ^ step).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(step as u32),
        };
        for word in words {
            word.store(value, Relaxed);
        }
        let trued = if let Self::Refunds = self { u64::MAX - step } else { value };
        for word in [&compute.trued_ns, &compute.trued_borrowed_ns] {
            word.store(trued, Relaxed);
        }
    }
}

const LIES: [Lie; 4] = [Lie::Zeros, Lie::Ones, Lie::Refunds, Lie::Garbage(7)];

/// What one process launches in ten seconds, as fast as it may, while somebody writes into the region before each call:
/// on its own quota, and borrowed.
fn used_beside(lie: Lie, cost_ns: u64, terms: Terms, borrows: bool) -> (u64, u64) {
    let (compute, own) = (fresh(), Own::new());
    let from = 1_000_000 * MS;
    let (mut now, mut used, mut step) = (from, (0, 0), 0);
    let room = Room { allowance_ns: 4 * MS, held_ns: 0 };
    let ask = Ask { cost_ns, is_known: true, is_short: true, room, ..Ask::default() };
    let grant = Grant { borrow_percent: terms.borrow_percent, ..Grant::default() };
    // Ten times what there is in that time is enough to fail.
    while now < from + 10_000 * MS && used.0 + used.1 < 100_000 * MS {
        step += 1;
        lie.write(&compute, step);
        true_up(&compute, &own, now, &grant, terms.percent);
        lie.write(&compute, step);
        if borrows {
            compute.paid_until_ns.store(now + 1000 * MS, Relaxed);
        }
        match enter(&compute, &own, now, ask, terms) {
            Entrance::Own(lease) => used.0 += cost_ns + lease,
            Entrance::Borrowed(lease) => used.1 += cost_ns + lease,
            Entrance::Wait(until) => now = until.clamp(now + 1, now + 5 * MS),
        }
    }
    used
}

#[test]
fn whatever_is_written_into_a_region_all_the_while_a_process_has_no_more_than_its_shares_part() {
    for lie in LIES {
        for percent in [1, 10, 50, 100] {
            for cost in if cfg!(miri) { &[50 * MS][..] } else { &[20_000, MS, 50 * MS] } {
                let terms = Terms { percent, borrow_percent: 0 };
                let (got, _) = used_beside(lie, *cost, terms, false);
                // What may be left of a lease, and the last launch.
                let most = 100 * MS * u64::from(percent) + crate::own::OWN_BURST_NS + cost + 4 * MS;
                assert!(got <= most, "{lie:?}: {percent} % of {cost} ns: {got} of {most}");
            }
        }
    }
}

#[test]
fn whatever_is_written_into_a_region_all_the_while_a_process_borrows_no_more_than_is_lent() {
    for lie in [Lie::Zeros, Lie::Refunds, Lie::Garbage(7)] {
        for borrow_percent in [1, 40, 90] {
            for cost in if cfg!(miri) { &[MS][..] } else { &[20_000, MS, 3 * MS] } {
                let terms = Terms { percent: 10, borrow_percent };
                let (_, got) = used_beside(lie, *cost, terms, true);
                // A hundred milliseconds of the clock in advance, and the last launch.
                let most = 101 * MS * u64::from(borrow_percent) + cost + 4 * MS;
                assert!(got <= most, "{lie:?}: {borrow_percent} % of {cost} ns: {got} of {most}");
            }
        }
    }
}

#[test]
fn a_launch_that_is_overdue_waits_for_its_own_process_and_for_nobody_else() {
    let (compute, own) = (fresh(), Own::new());
    let now = 1_000_000 * MS;
    compute.paid_until_ns.store(u64::MAX, Relaxed);
    let terms = Terms { percent: 10, borrow_percent: 0 };
    let ask = Ask { cost_ns: 200 * MS, ..Ask::default() };
    assert!(matches!(enter(&compute, &own, now, ask, terms), Entrance::Wait(_)));
    assert_eq!(enter_overdue(&compute, &own, now, ask, terms), Entrance::Own(0));
    // Twenty milliseconds were saved up.
    assert_eq!(enter_overdue(&compute, &own, now, ask, terms), Entrance::Wait(now + 1800 * MS));
    assert_eq!(enter_overdue(&compute, &own, now + 1800 * MS, ask, terms), Entrance::Own(0));
}

/// Processes of one share that launch, lease, are corrected and give back at random, without anybody who writes into its
/// region: the gate answers as if there were no accounts of their own.
#[test]
fn in_a_sound_region_a_processs_own_account_holds_nobody_up() {
    let mut random = 0x1234_5678_9abc_def1_u64;
    let mut next = |end: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % end
    };
    for (percent, borrow_percent) in [(1, 0), (10, 80), (30, 40), (70, 0), (100, 0)] {
        let terms = Terms { percent, borrow_percent };
        let (with, without) = (fresh(), fresh());
        let owns: [Own; 3] = Default::default();
        let mut now = 1_000_000 * MS;
        let mut grant = Grant { borrow_percent, ..Grant::default() };
        for _ in 0..if cfg!(miri) { 100 } else { 30_000 } {
            now += [next(100_000), next(5 * MS), next(50 * MS)][next(3) as usize];
            let at = next(3) as usize;
            let own = &owns[at];
            let cost_ns = 1 + [next(50_000), next(5 * MS), next(80 * MS)][next(3) as usize];
            let room = Room { allowance_ns: 4 * MS, held_ns: 0 };
            let ask =
                Ask { slot: usize::MAX, cost_ns, is_known: next(4) > 0, is_short: false, room, ahead_ns: 0 };
            true_up(&with, own, now, &grant, percent);
            true_up(&without, &Own::new(), now, &grant, percent);
            let entrance = enter(&with, own, now, ask, terms);
            assert_eq!(entrance, enter(&without, &Own::new(), now, ask, terms), "at {now}");
            let (lease, is_borrowed) = match entrance {
                Entrance::Own(ns) => (ns, false),
                Entrance::Borrowed(ns) => (ns, true),
                Entrance::Wait(_) => continue,
            };
            // What is not spent of the lease goes back, at once or taken by others first.
            let back = Lease { ns: next(lease + 1), is_borrowed };
            for compute in [&with, &without] {
                give_back(compute, now, back, percent);
            }
            own.give_back(now, back, percent);
            // It took up to twice as long, or was shorter.
            let taken = next(2 * cost_ns);
            let delta = taken as i64 - cost_ns as i64;
            let seen = Seen { start_ns: now, end_ns: now + 2 * taken, taken_ns: taken, ..Seen::default() };
            own.note(is_borrowed, &seen);
            for compute in [&with, &without] {
                match is_borrowed {
                    true => correct_borrowed(compute, now, delta, borrow_percent),
                    false => correct(compute, now, delta, percent),
                }
            }
            match is_borrowed {
                true => own.correct_borrowed(now, delta, borrow_percent),
                false => own.correct(now, delta, percent),
            }
            let found = taken as i64 / 2 - next(taken + 1) as i64;
            if is_borrowed {
                grant.borrowed_true_up_ns += found;
            } else {
                grant.true_up_ns += found;
            }
        }
    }
}
