//! The compute gate: when a share's next launch may go to the GPU.
//!
//! A share of `percent` pays for GPU time at that rate. Its state is one word in the region, the instant of
//! the monotonic clock at which everything charged so far is paid for. A launch may go once that instant has
//! come, and moves it on by its cost divided by the rate; at most [`BURST_NS`] of GPU time can be saved up.
//! What a launch really took is charged or refunded later, by [`correct`].
//!
//! One word cannot be half written: a process that is killed at any time leaves at most the charge of launches
//! that the GPU has or will have run, and time pays for that. Nobody holds anything, so nobody waits for anyone.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// GPU time in nanoseconds that a share can save up: a fifth of what the promise over a window allows, so
/// that windows of ten seconds are off by 0.2 percentage points at the most for it.
pub const BURST_NS: u64 = 20_000_000;

/// No debt lasts longer than this many nanoseconds of the clock: beyond it, the word cannot be (kernels of
/// six seconds at one percent come to it), and it is read as this much.
pub const LONGEST_DEBT_NS: u64 = 600_000_000_000;

/// The compute side of a region; zeros are a share that has never launched.
#[repr(C, align(64))]
pub struct Compute {
    /// Nanoseconds of the monotonic clock at which everything charged is paid for.
    pub paid_until_ns: AtomicU64,
    /// GPU time charged so far, corrections included, in nanoseconds; wraps.
    pub charged_ns: AtomicU64,
    /// Launches that had to wait.
    pub delayed: AtomicU64,
    reserved: [AtomicU64; 16381],
}

const _: () = assert!(size_of::<Compute>() == 131_072);

/// What the gate answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The launch may go and is charged.
    Go,
    /// It may be asked again at this time. Refunds can make it earlier.
    Wait(u64),
}

/// Clock time in which `percent` of the GPU pays for `cost_ns`, rounded up.
fn price(cost_ns: u64, percent: u8) -> u64 {
    cost_ns.saturating_mul(100).div_ceil(u64::from(percent.clamp(1, 100)))
}

/// Moves `paid_until` on by a cost, from what can be saved up at the earliest.
fn charged(paid_until: u64, now_ns: u64, cost_ns: u64, percent: u8) -> u64 {
    let earliest = now_ns.saturating_sub(price(BURST_NS, percent));
    let latest = now_ns.saturating_add(LONGEST_DEBT_NS);
    paid_until.clamp(earliest, latest).saturating_add(price(cost_ns, percent)).min(latest)
}

/// Asks for a launch of `cost_ns` at the rate of `percent` (1 to 100), and charges it if it may go.
pub fn admit(compute: &Compute, now_ns: u64, cost_ns: u64, percent: u8) -> Admission {
    let mut found = compute.paid_until_ns.load(Acquire);
    loop {
        if found > now_ns {
            return Admission::Wait(found.min(now_ns.saturating_add(LONGEST_DEBT_NS)));
        }
        let next = charged(found, now_ns, cost_ns, percent);
        match compute.paid_until_ns.compare_exchange_weak(found, next, AcqRel, Acquire) {
            Ok(_) => {
                compute.charged_ns.fetch_add(cost_ns, Relaxed);
                return Admission::Go;
            }
            Err(other) => found = other,
        }
    }
}

/// Charges what launches took beyond their estimate, or refunds what they did not take.
pub fn correct(compute: &Compute, now_ns: u64, delta_ns: i64, percent: u8) {
    if delta_ns == 0 {
        return;
    }
    let amount = delta_ns.unsigned_abs();
    let mut found = compute.paid_until_ns.load(Acquire);
    loop {
        let next = if delta_ns > 0 {
            charged(found, now_ns, amount, percent)
        } else {
            found.saturating_sub(price(amount, percent))
        };
        match compute.paid_until_ns.compare_exchange_weak(found, next, AcqRel, Acquire) {
            Ok(_) => break,
            Err(other) => found = other,
        }
    }
    compute.charged_ns.fetch_add(delta_ns as u64, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn fresh() -> Box<Compute> {
        Box::new(Compute {
            paid_until_ns: AtomicU64::new(0),
            charged_ns: AtomicU64::new(0),
            delayed: AtomicU64::new(0),
            reserved: [const { AtomicU64::new(0) }; 16381],
        })
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
            for cost in [5_000, MS, 50 * MS] {
                let got = used(&fresh(), 1_000_000 * MS, 10_000 * MS, cost, percent);
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
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for tick in 0..10_000 {
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
}
