//! No waiter sleeps more than 100 ms past its deadline: in every scenario, on every device, and when a process of the
//! same share is killed while it waits in line or when it was just let go.
#![allow(clippy::unwrap_used, reason = "tests")]

use aliquot_limiter_sim::scenarios::{PERCENTS, deadly_loads, loads, tenants};
use aliquot_limiter_sim::waits::Waits;
use aliquot_limiter_sim::world::{Load, VARIANTS, run};

const MOST_NS: u64 = 100_000_000;

/// All sleeps of these loads at all percentages on all devices. Kernels are at most two seconds long.
fn waits(loads: &[Load], percents: &[&[u8]]) -> Waits {
    let mut all = Waits::default();
    for variant in VARIANTS {
        for load in loads {
            for percents in percents {
                let mut tenants = tenants(percents, *load);
                // Every other one may borrow.
                tenants.iter_mut().step_by(2).for_each(|tenant| tenant.is_soft = true);
                let span = load.longest_ns().saturating_mul(10).clamp(1_500_000_000, 10_000_000_000);
                let found = run(variant, &tenants, span, 1, 1).waits;
                // So that nothing hides behind deadlines that never come: with a quota of its own, each waits.
                assert!(found.count > 0, "{} {percents:?} {load:?}: nobody waited", variant.name);
                all = all.and(found);
            }
        }
    }
    println!("{all:?}");
    all
}

fn nobody_is_late(waits: Waits) {
    assert!(waits.latest_ns <= MOST_NS, "somebody slept {} ns past its deadline", waits.latest_ns);
    // Whatever comes to bring a deadline forward, nobody sleeps through it.
    assert!(waits.longest_ns <= MOST_NS, "somebody slept for {} ns", waits.longest_ns);
}

#[test]
fn nobody_sleeps_past_its_deadline_in_any_scenario() {
    nobody_is_late(waits(&loads(), &PERCENTS));
}

#[test]
fn nobody_sleeps_past_its_deadline_when_one_of_its_share_is_killed() {
    nobody_is_late(waits(&deadly_loads(), &[&[10], &[30, 70], &[10, 30, 50]]));
}

#[test]
fn the_living_of_a_share_have_its_quota_after_one_is_killed() {
    for load in deadly_loads().into_iter().filter(|load| load.longest_ns() == 5_000_000) {
        let outcome = run(VARIANTS[0], &tenants(&[30], load), 1_000_000_000, 6, 1);
        // From the third second on the killed one is long gone.
        for window in &outcome.windows[2..] {
            let got = window.first().unwrap() * 100.0;
            assert!((27.0..33.0).contains(&got), "{:?}: {got} %", load.death);
        }
    }
}
