//! The learner: what a launch will cost, which launches are timed, and what a timed one really took.
//!
//! Launches are known by a key (function or graph, and context). A key's first launches are charged
//! [`PRIOR_NS`], and more while the first one is still running; then what was measured. Kernels of
//! [`SMALL_NS`] and more are all timed, as far as there are places; smaller ones in batches of launches that
//! follow each other on a stream, now and then.
//!
//! A pair of events tells time on the wall, in which other processes had their slices and other streams their
//! kernels. So of a timed launch only what lies behind the last one's end counts, which charges overlapping
//! streams once. While other processes have contexts on the GPU, a measurement is an upper bound: between it
//! and its part of equal slices, the key's low measurements decide.
//!
//! Driver calls are the caller's: it records the events and tells what they showed.

/// GPU time that a launch of an unknown key is charged, in nanoseconds.
pub const PRIOR_NS: u64 = 2_000_000;

/// Launches below this many nanoseconds are timed in batches: a pair of events costs one or two microseconds.
pub const SMALL_NS: u64 = 50_000;

/// Launches that can be timed at once.
pub const PLACES: usize = 64;

/// Launches of a batch.
const BATCH: u32 = 16;
/// Small launches from one batch to the next.
const BETWEEN: u32 = 64;
/// Keys that are remembered; a new one takes the place of an old one where there is no other.
const KEYS: usize = 1024;
/// Places of the table in which a key can be.
const REACH: usize = 8;

#[derive(Clone, Copy)]
struct Cost {
    key: u64,
    /// What the next launch is charged.
    estimate_ns: u64,
    /// Low measurements: falls fast and rises slowly.
    low_ns: u64,
    /// Measurements so far, up to the inverse of the learning rate.
    count: u32,
    /// Launches until one is timed.
    rest: u32,
    /// The host was slower than the GPU, or other keys came between: batches show nothing.
    is_single: bool,
}

const NO_COST: Cost = Cost { key: 0, estimate_ns: 0, low_ns: 0, count: 0, rest: 0, is_single: false };

#[derive(Clone, Copy)]
struct Timed {
    key: u64,
    /// The caller's name for the context that the events are of.
    context: u64,
    /// When the first and the last launch were made.
    first_ns: u64,
    last_ns: u64,
    launches: u32,
    charged_ns: u64,
    order: u64,
}

/// What the caller does around a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// Nothing.
    None,
    /// Records this place's first event before, and its second one after the launch.
    Whole(usize),
    /// Records the first event before.
    Open(usize),
    /// Records the second event after.
    Close(usize),
}

#[derive(Clone, Copy)]
struct Batch {
    place: usize,
    stream: u64,
}

/// The learner of one process.
pub struct Meter {
    costs: [Cost; KEYS],
    places: [Option<Timed>; PLACES],
    batch: Option<Batch>,
    order: u64,
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

impl Meter {
    /// Knows nothing.
    pub const fn new() -> Self {
        Self { costs: [NO_COST; KEYS], places: [None; PLACES], batch: None, order: 0 }
    }

    fn home(key: u64) -> usize {
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize
    }

    fn find(&mut self, key: u64) -> Option<&mut Cost> {
        let home = Self::home(key);
        let at = (home..home + REACH)
            .map(|at| at % KEYS)
            .find(|at| self.costs.get(*at).is_some_and(|cost| cost.key == key && cost.count > 0))?;
        self.costs.get_mut(at)
    }

    /// GPU time to charge a launch of `key` that is made now.
    pub fn predict(&mut self, key: u64, now_ns: u64) -> u64 {
        if let Some(cost) = self.find(key) {
            return cost.estimate_ns;
        }
        // The first one runs at most since it was launched; the next ones may take as long.
        let running = self.places.iter().flatten().filter(|timed| timed.key == key);
        running.map(|timed| now_ns.saturating_sub(timed.first_ns)).max().unwrap_or_default().max(PRIOR_NS)
    }

    /// Decides how a launch that is charged `charged_ns` is timed. `context` and `stream` are the caller's
    /// names. Launches that events would slow down (`is_delicate`) are timed alone and seldom.
    pub fn launch(
        &mut self,
        key: u64,
        (context, stream): (u64, u64),
        now_ns: u64,
        charged_ns: u64,
        is_delicate: bool,
    ) -> Timing {
        if let Some(Batch { place, stream: of }) = self.batch {
            let timed = self.places.get_mut(place).and_then(Option::as_mut);
            let of_key = timed.as_ref().map(|timed| timed.key);
            if let Some(timed) =
                timed.filter(|timed| timed.key == key && timed.context == context && of == stream)
            {
                timed.launches += 1;
                timed.charged_ns = timed.charged_ns.saturating_add(charged_ns);
                timed.last_ns = now_ns;
                if timed.launches < BATCH {
                    return Timing::None;
                }
                self.batch = None;
                return Timing::Close(place);
            }
            self.abandon(place);
            if let Some(cost) = of_key.and_then(|key| self.find(key)) {
                (cost.is_single, cost.rest) = (true, 0);
            }
        }
        let (is_small, is_single) = match self.find(key) {
            None => (false, true),
            Some(cost) if cost.estimate_ns >= SMALL_NS && !is_delicate => (false, true),
            Some(cost) if cost.rest > 0 => {
                cost.rest -= 1;
                return Timing::None;
            }
            Some(cost) => {
                cost.rest = BETWEEN;
                // Batches are tried again: what came between may have ended.
                (true, core::mem::replace(&mut cost.is_single, false) || is_delicate)
            }
        };
        let Some(place) = self.places.iter().position(Option::is_none) else { return Timing::None };
        self.order += 1;
        let timed = Timed {
            key,
            context,
            first_ns: now_ns,
            last_ns: now_ns,
            launches: 1,
            charged_ns,
            order: self.order,
        };
        if let Some(free) = self.places.get_mut(place) {
            *free = Some(timed);
        }
        if is_small && !is_single {
            self.batch = Some(Batch { place, stream });
            return Timing::Open(place);
        }
        Timing::Whole(place)
    }

    /// The place of a context whose second event was recorded longest ago, behind `after` if given.
    pub fn oldest(&self, context: u64, after: Option<usize>) -> Option<usize> {
        let order = |place: usize| self.places.get(place).copied().flatten().map(|timed| timed.order);
        let behind = after.and_then(order).unwrap_or_default();
        let open = self.batch.map(|batch| batch.place);
        let ready = self.places.iter().enumerate().filter(|(place, timed)| {
            Some(*place) != open && timed.is_some_and(|t| t.context == context && t.order > behind)
        });
        ready.min_by_key(|(_, timed)| timed.map(|timed| timed.order)).map(|(place, _)| place)
    }

    /// Takes what a place's events showed: the time between them, and from the end of the launch that was
    /// taken last to the first of them (negative where they overlap). `processes` have contexts on the GPU.
    /// Returns what is to be charged on top, or refunded.
    pub fn finish(&mut self, place: usize, elapsed_ns: u64, gap_ns: Option<i64>, processes: u32) -> i64 {
        let Some(timed) = self.places.get_mut(place).and_then(Option::take) else { return 0 };
        let hidden = gap_ns.filter(|gap| *gap < 0).map_or(0, i64::unsigned_abs);
        let total = elapsed_ns.saturating_sub(hidden);
        let launches = u64::from(timed.launches.max(1));
        if launches > 1 && total / 5 * 4 <= timed.last_ns.saturating_sub(timed.first_ns) {
            // The GPU waited for the host between the launches.
            if let Some(cost) = self.find(timed.key) {
                (cost.is_single, cost.rest) = (true, 0);
            }
            return 0;
        }
        let taken = self.learn(timed.key, total / launches, processes).saturating_mul(launches);
        i64::try_from(taken).unwrap_or(i64::MAX).saturating_sub_unsigned(timed.charged_ns)
    }

    /// Learns from one measurement; what of it is charged.
    fn learn(&mut self, key: u64, measured_ns: u64, processes: u32) -> u64 {
        if let Some(cost) = self.find(key) {
            if measured_ns < cost.low_ns {
                cost.low_ns -= (cost.low_ns - measured_ns).div_ceil(2);
            } else {
                cost.low_ns += (measured_ns - cost.low_ns).min(cost.low_ns) / 64;
            }
            let taken = if processes > 1 {
                cost.low_ns.clamp(measured_ns / u64::from(processes), measured_ns)
            } else {
                measured_ns
            };
            cost.count = (cost.count + 1).min(16);
            let weight = u64::from(cost.count);
            cost.estimate_ns = (cost.estimate_ns.saturating_mul(weight - 1).saturating_add(taken)) / weight;
            return taken;
        }
        let home = Self::home(key);
        let free = (home..home + REACH)
            .map(|at| at % KEYS)
            .find(|at| self.costs.get(*at).is_some_and(|cost| cost.count == 0))
            .unwrap_or(home % KEYS);
        if let Some(cost) = self.costs.get_mut(free) {
            *cost = Cost { key, estimate_ns: measured_ns, low_ns: measured_ns, count: 1, ..NO_COST };
        }
        measured_ns
    }

    /// Forgets a launch that was not made, or whose events cannot be read. It stays charged.
    pub fn abandon(&mut self, place: usize) {
        if self.batch.is_some_and(|batch| batch.place == place) {
            self.batch = None;
        }
        if let Some(timed) = self.places.get_mut(place) {
            *timed = None;
        }
    }

    /// Forgets everything, without a copy of the table on the stack.
    pub fn clear(&mut self) {
        self.costs.fill(NO_COST);
        self.places.fill(None);
        (self.batch, self.order) = (None, 0);
    }

    /// A context is gone, and its events with it. `place` is told for each launch of it.
    pub fn context_gone(&mut self, context: u64, mut place: impl FnMut(usize)) {
        for at in 0..PLACES {
            if self.places.get(at).copied().flatten().is_some_and(|timed| timed.context == context) {
                self.abandon(at);
                place(at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Launches and measures one kernel; the correction.
    fn run(meter: &mut Meter, key: u64, took: u64, processes: u32) -> i64 {
        let charged = meter.predict(key, 0);
        match meter.launch(key, (1, 0), 0, charged, false) {
            Timing::Whole(place) => meter.finish(place, took, None, processes),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_was_measured_is_charged_in_the_end() {
        let mut meter = Meter::new();
        for took in [5 * MS, MS, 9 * MS, 3 * MS] {
            let charged = meter.predict(7, 0) as i64;
            assert_eq!(charged + run(&mut meter, 7, took, 1), took as i64);
        }
        assert!((3 * MS..6 * MS).contains(&meter.predict(7, 0)));
    }

    #[test]
    fn an_unknown_launch_is_charged_more_while_the_first_one_runs() {
        let mut meter = Meter::new();
        assert_eq!(meter.predict(7, 10 * MS), PRIOR_NS);
        assert!(matches!(meter.launch(7, (1, 0), 10 * MS, PRIOR_NS, false), Timing::Whole(_)));
        assert_eq!(meter.predict(7, 11 * MS), PRIOR_NS);
        assert_eq!(meter.predict(7, 510 * MS), 500 * MS);
        assert_eq!(meter.predict(8, 510 * MS), PRIOR_NS);
    }

    #[test]
    fn overlapping_launches_are_charged_once() {
        let mut meter = Meter::new();
        let places: Vec<_> = (0..8)
            .map(|stream| match meter.launch(7, (1, stream), 0, 0, false) {
                Timing::Whole(place) => place,
                other => panic!("{other:?}"),
            })
            .collect();
        // All run from 0 to 8 ms; the first is taken first.
        let sum: i64 = places
            .iter()
            .enumerate()
            .map(|(at, place)| meter.finish(*place, 8 * MS, (at > 0).then_some(-8 * MS as i64), 1))
            .sum();
        assert_eq!(sum, 8 * MS as i64);
    }

    #[test]
    fn slices_of_others_do_not_raise_what_is_charged() {
        let mut meter = Meter::new();
        for round in 0..400_u64 {
            // One launch in five is alone; the others take twice as long.
            run(&mut meter, 7, if round % 5 == 0 { 5 * MS } else { 10 * MS }, 2);
        }
        let charged = meter.predict(7, 0);
        assert!((5 * MS..=5 * MS + MS / 2).contains(&charged), "{charged}");
    }

    #[test]
    fn a_measurement_counts_for_no_less_than_its_part_of_equal_slices() {
        let mut meter = Meter::new();
        run(&mut meter, 7, MS, 2);
        let charged = meter.predict(7, 0) as i64;
        assert!(charged + run(&mut meter, 7, 100 * MS, 2) >= 50 * MS as i64);
    }

    #[test]
    fn small_kernels_are_timed_in_batches_now_and_then() {
        let mut meter = Meter::new();
        run(&mut meter, 7, 5_000, 1);
        let timings: Vec<_> = (0..160).map(|at| meter.launch(7, (1, 0), at * 100, 5_000, false)).collect();
        let Timing::Open(place) = timings[0] else { panic!("{:?}", timings[0]) };
        assert_eq!(timings[15], Timing::Close(place));
        assert_eq!(timings.iter().filter(|timing| **timing != Timing::None).count(), 4);
        assert_eq!(meter.oldest(1, None), Some(place));
        // 16 launches took 6 µs each.
        assert_eq!(meter.finish(place, 96_000, None, 1), 16_000);
        assert_eq!(meter.predict(7, 0), 5_500);
    }

    #[test]
    fn a_batch_that_waited_for_the_host_shows_nothing() {
        let mut meter = Meter::new();
        run(&mut meter, 7, 5_000, 1);
        for at in 0..16 {
            let _ = meter.launch(7, (1, 0), at * 50_000, 5_000, false);
        }
        assert_eq!(meter.finish(0, 755_000, None, 1), 0);
        assert_eq!(meter.predict(7, 0), 5_000);
        assert!(
            matches!(meter.launch(7, (1, 0), 0, 5_000, false), Timing::Whole(_)),
            "the next one is timed alone"
        );
    }

    #[test]
    fn a_full_table_and_full_places_are_no_fault() {
        let mut meter = Meter::new();
        for key in 1..5000 {
            run(&mut meter, key, MS, 1);
        }
        let timed = (0..200).filter(|_| meter.launch(4999, (1, 0), 0, MS, false) != Timing::None).count();
        assert_eq!(timed, PLACES);
        let mut dropped = 0;
        meter.context_gone(1, |_| dropped += 1);
        assert_eq!((dropped, meter.oldest(1, None)), (PLACES, None));
    }
}
