//! What comes of it, in virtual time and with the node agent, when somebody writes into a share's region whenever anybody
//! does anything.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use aliquot_limiter_sim::world::{Lie, Load, Tenant, VARIANTS, run, run_beside};
use aliquot_quota::gate::{Compute, LOG_LENGTH, Mark};
use aliquot_quota::own::OWN_BURST_NS;
use aliquot_quota::wall::WALL_SLACK_NS;
use std::sync::atomic::Ordering::Relaxed;

const SECOND: u64 = 1_000_000_000;

/// A share that never launched.
fn nothing(compute: &Compute, _: u64) {
    let words = [
        &compute.paid_until_ns,
        &compute.charged_ns,
        &compute.borrowed_until_ns,
        &compute.borrowed_ns,
        &compute.trued_ns,
        &compute.trued_borrowed_ns,
        &compute.leased_ns,
    ];
    words.iter().for_each(|word| word.store(0, Relaxed));
}

/// The same, and in the log eight processes that are always there and were charged all of it, so that next to nothing of
/// anybody's kernels seems to be its own, and much to be refunded.
fn crowd(compute: &Compute, now_ns: u64) {
    nothing(compute, now_ns);
    // A word without a meaning here: when this was written last.
    let before = compute.members.load(Relaxed);
    if now_ns - before.min(now_ns) < 10_000_000 {
        return;
    }
    compute.members.store(now_ns, Relaxed);
    for slot in 1..=8 {
        let entry = &compute.log[compute.logged.fetch_add(1, Relaxed) as usize % LOG_LENGTH];
        entry.start_ns.store(if before == 0 { now_ns - 10_000_000 } else { before }, Relaxed);
        entry.taken_ns.store(10_000_000, Relaxed);
        entry.mark.store(Mark { slot, key: u32::from(slot), ..Mark::default() }.word(), Relaxed);
        entry.end_ns.store(now_ns, Relaxed);
    }
}

/// Seconds of a minute that a share of 20 % has, whose kernels take so long, beside one of 40 % that asks for a tenth.
fn had(lie: Option<Lie>, kernel_ns: u64) -> f64 {
    let tenant = |percent, load| Tenant { percent, load, is_soft: false, priority: 0 };
    let quiet = Load { burst: 1, pause_ns: 9_000_000, ..Load::of(1_000_000) };
    let tenants = [tenant(20, Load::of(kernel_ns)), tenant(40, quiet)];
    let outcome = match lie {
        None => run(VARIANTS[0], &tenants, 60 * SECOND, 1, 1),
        Some(lie) => run_beside(lie, VARIANTS[0], &tenants, 60 * SECOND, 1, 1),
    };
    outcome.windows[0][0] * 60.0
}

#[test]
fn who_writes_the_account_away_gets_a_process_no_more_than_its_shares_part() {
    for kernel_ns in [20_000, 500_000, 5_000_000] {
        let (honest, got) = (had(None, kernel_ns), had(Some(nothing), kernel_ns));
        println!("kernels of {kernel_ns} ns: {honest:.2} s, {got:.2} s beside somebody who writes");
        // What the learner and the agent are mistaken by is in both, and half of it where its corrections get lost.
        let most = honest.max(12.0) + OWN_BURST_NS as f64 / 1e9 + 0.6;
        assert!(got <= most, "kernels of {kernel_ns} ns: {got} s of at most {most}");
    }
}

#[test]
fn who_forges_the_log_as_well_gets_a_process_what_its_share_and_its_neighbours_may_have() {
    for kernel_ns in [20_000, 500_000, 5_000_000, 50_000_000] {
        let got = had(Some(crowd), kernel_ns);
        // Its part, what the neighbours may have, a twentieth of the time, and what is let go in advance.
        let most = 12.0 + 24.0 + 3.0 + WALL_SLACK_NS as f64 / 1e9 + 0.5;
        println!("kernels of {kernel_ns} ns: {got:.2} s of at most {most:.2} s");
        assert!(got <= most, "kernels of {kernel_ns} ns: {got} s of at most {most}");
    }
}

/// A share that was charged nothing, whatever its log says.
fn uncharged(compute: &Compute, _: u64) {
    compute.charged_ns.store(0, Relaxed);
}

/// One that was charged ever more.
fn overcharged(compute: &Compute, now_ns: u64) {
    compute.charged_ns.store(now_ns << 8, Relaxed);
}

#[test]
fn an_honest_share_keeps_its_part_whatever_its_neighbour_says_that_it_was_charged() {
    for (liar, honest, kernel_ns) in [(50, 50, 5_000_000), (50, 50, 50_000_000), (30, 60, 50_000_000)] {
        let tenant = |percent| Tenant { percent, load: Load::of(kernel_ns), is_soft: false, priority: 0 };
        let tenants = [tenant(liar), tenant(honest)];
        let sound = run(VARIANTS[0], &tenants, 60 * SECOND, 2, 1).windows[1][1];
        for lie in [uncharged as Lie, overcharged, nothing] {
            let got = run_beside(lie, VARIANTS[0], &tenants, 60 * SECOND, 2, 1).windows[1][1];
            println!("{honest} % beside {liar} %, kernels of {kernel_ns} ns: {got:.3} instead of {sound:.3}");
            assert!(got >= sound - 0.02, "{honest} % beside {liar} %, {kernel_ns} ns: {got} of {sound}");
        }
    }
}
