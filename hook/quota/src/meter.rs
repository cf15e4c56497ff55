//! The learner: it says what a launch will cost, which launches are timed, and what timed launches really
//! took.
//!
//! Launches are known by a key (function and grid, or graph, and context). A key's first launches are charged
//! [`PRIOR_NS`], and more while they run unmeasured; later ones are charged what was measured. Launches of
//! [`LONG_NS`] and more are all timed, as far as there are places. Shorter ones are timed now and then in a
//! *window*: one pair of events around some tens of launches on each stream. The costs of all keys in a
//! window are corrected together.
//!
//! A pair of events tells wall time, in which other streams of the process had their kernels and other
//! processes their slices. What was charged for one stream is not charged for another ([`crate::spans`]).
//! What the slices of other processes took is left out by the caller's [`Others`], which tell the part of the
//! measured time that was the process's own.
//!
//! The caller makes the driver calls; in this module events are known by number.

mod learn;
mod types;
mod windows;

use crate::spans::Spans;
pub use types::{ASSUMED_SLICE_NS, Begins, Finding, Launch, Others, Pending, Plan, Prediction, Seen};
use types::{Cost, NO_COST, Single, Window};

/// GPU time that a launch of an unknown key is charged, in nanoseconds.
pub const PRIOR_NS: u64 = 2_000_000;
/// GPU time that further launches of the key are charged until the first is measured, and each launch that
/// cannot be measured, in nanoseconds.
const DOUBTFUL_NS: u64 = 50_000_000;
/// The shortest launch that is timed by itself, in nanoseconds: a pair of events costs some microseconds.
pub const LONG_NS: u64 = 400_000;
/// The number of launches that can be timed one by one at the same time.
pub const PLACES: usize = 64;
/// The number of windows: one may be open while another waits for the GPU.
const WINDOWS: usize = 2;
/// The most streams of a window.
pub const STREAMS: usize = 8;
/// The most keys that a window corrects.
const MIXED: usize = 8;
/// The number of events that the caller may be asked to record: a pair for each place and each stream of a
/// window, and one that the newest measurement ends with.
pub const EVENTS: usize = 2 * PLACES + 2 * STREAMS * WINDOWS + 1;
/// A window ends after this many launches, or after the GPU time below with at least two: short against a
/// slice, so that most windows have no other process's slice in them.
const WINDOW: u32 = 32;
const WINDOW_NS: u64 = 200_000;
/// The number of windows in a row that must be long before costs are believed to have risen, where others
/// have slices.
const BELIEVED: u32 = 64;
/// GPU time between windows, in nanoseconds: at first, and once costs are known. Few launches cost many
/// nanoseconds each.
const SOON_NS: u64 = 250_000;
const LATER_NS: u64 = 10_000_000;
/// A launch this many times as long as before is taken to be other work.
const OTHER_WORK: u64 = 4;
/// One in this many delicate launches is timed.
const SELDOM: u32 = 64;
/// The number of launches timed one by one before windows are tried again, where the GPU waits for the host.
const SPARSE: u32 = 16;
/// The most launches in a row that are not timed because others are before them: so a GPU that is never idle
/// is measured, too.
const PUT_OFF: u32 = 256;
/// The number of keys that are remembered; where there is no room, a new key replaces an old one.
const KEYS: usize = 1024;
/// The number of places in the table in which a key can be.
const REACH: usize = 8;
/// How late the end of a launch may be seen, in nanoseconds.
const LATE_NS: u64 = 6_000_000;
/// Inverse of the weight that a measurement has in the end.
const LEAST_WEIGHT: u32 = 16;
/// The count for all measurements, and how much of it has to be without others' slices for those to count
/// alone.
const CLEAN_ALL: u32 = 4096;
const CLEAN_ENOUGH: u32 = CLEAN_ALL / 5;
const CLEAN_FIRST: u32 = CLEAN_ALL / 2;
/// When a launch began may be unknown by one in this many parts of its usual length.
const VAGUE: i64 = 16;
/// The least that a launch costs, in nanoseconds.
const LEAST_NS: u64 = 200;

/// The learner of one process.
pub struct Meter {
    costs: [Cost; KEYS],
    singles: [Option<Single>; PLACES],
    windows: [Option<Window>; WINDOWS],
    spans: Spans,
    /// The event at which `spans` has its zero, and its context.
    reference: Option<(usize, u64)>,
    /// The time of that event on the host's clock: no later than events showed so far.
    zero_ns: i64,
    /// By how much the reference was moved last.
    latest: i64,
    events: [bool; EVENTS],
    order: u64,
    /// GPU time of short launches since the last window, and the GPU time after which the next one is due.
    since_ns: u64,
    due_ns: u64,
    /// The number of launches still to be timed one by one because windows showed nothing.
    sparse: u32,
    /// The time until which the short launches that were shown keep the GPU busy, by their charges; the
    /// stream of the last one; and how often timing was put off because of them.
    busy_until_ns: u64,
    last_stream: u64,
    put_off: u32,
    /// Time that launches take the host, rather too little, in nanoseconds.
    call_ns: u64,
    calls: u32,
    /// The number of windows in a row that took much longer than charged, and the shortest of them, in
    /// thousandths of the charge.
    long: u32,
    least_permille: u64,
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

impl Meter {
    /// Returns a learner that knows nothing.
    pub const fn new() -> Self {
        Self {
            costs: [NO_COST; KEYS],
            singles: [None; PLACES],
            windows: [None; WINDOWS],
            spans: Spans::new(),
            reference: None,
            zero_ns: i64::MAX,
            latest: 0,
            events: [false; EVENTS],
            order: 0,
            since_ns: 0,
            due_ns: 0,
            sparse: 0,
            busy_until_ns: 0,
            last_stream: 0,
            put_off: 0,
            call_ns: 0,
            calls: 0,
            long: 0,
            least_permille: u64::MAX,
        }
    }

    fn home(key: u64) -> usize {
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize
    }

    /// Returns the number by which the log knows a key.
    fn short_key(key: u64) -> u32 {
        Self::home(key) as u32 & 0xff_ffff
    }

    fn find(&mut self, key: u64) -> Option<&mut Cost> {
        let home = Self::home(key);
        let at = (home..home + REACH)
            .map(|at| at % KEYS)
            .find(|at| self.costs.get(*at).is_some_and(|cost| cost.key == key && cost.count > 0))?;
        self.costs.get_mut(at)
    }

    /// Returns what a launch of `key` that is made now is charged.
    pub fn predict(&mut self, key: u64, now_ns: u64) -> Prediction {
        if let Some(cost) = self.find(key).copied() {
            // Work that has changed may take as long as it has run unmeasured.
            let since = self.singles.iter().flatten().filter(|single| {
                single.key == key && cost.doubted_from != 0 && single.order >= cost.doubted_from
            });
            let longest = since.map(|single| now_ns.saturating_sub(single.first_ns)).max().unwrap_or(0);
            let cost_ns = cost.estimate_ns.max(longest);
            return Prediction { cost_ns, is_known: true, is_short: cost.is_short() };
        }
        // Those that run unmeasured may each take as long as a kernel can.
        let running = self.singles.iter().flatten().filter(|single| single.key == key);
        let age = |single: &Single| now_ns.saturating_sub(single.first_ns).max(DOUBTFUL_NS);
        let cost_ns = running.map(age).max().unwrap_or(PRIOR_NS);
        Prediction { cost_ns, is_known: false, is_short: false }
    }

    /// Does what [`Meter::predict`] does for a launch that cannot be timed: nobody will ever know how long an
    /// unknown one took.
    pub fn predict_untimed(&mut self, key: u64, now_ns: u64) -> Prediction {
        let prediction = self.predict(key, now_ns);
        match prediction.is_known {
            true => prediction,
            false => Prediction { cost_ns: prediction.cost_ns.max(DOUBTFUL_NS), ..prediction },
        }
    }

    /// Returns the cost of launches of `key` that need not be shown to the learner one by one; 0 if they have
    /// to be.
    pub fn routine(&mut self, key: u64) -> u64 {
        self.find(key).filter(|cost| cost.is_short()).map_or(0, |cost| cost.estimate_ns)
    }

    /// Notes that short launches for `ns` of GPU time went by unseen.
    pub fn passed(&mut self, ns: u64) {
        self.since_ns = self.since_ns.saturating_add(ns);
    }

    fn take_event(&mut self) -> Option<usize> {
        let at = self.events.iter().position(|taken| !taken)?;
        if let Some(taken) = self.events.get_mut(at) {
            *taken = true;
        }
        Some(at)
    }

    fn free_event(&mut self, at: usize) {
        if self.reference.is_none_or(|(reference, _)| reference != at)
            && let Some(taken) = self.events.get_mut(at)
        {
            *taken = false;
        }
    }

    /// Decides how a launch that is charged to `account` is timed.
    pub fn launch(&mut self, launch: &Launch, account: u32, charged_ns: u64, now_ns: u64) -> Plan {
        self.plan(launch, account, charged_ns, now_ns, true)
    }

    /// Returns the wall time that launches of a key add on average to the process's others, as far as they
    /// were timed.
    pub fn usual_wall_ns(&mut self, key: u64) -> u64 {
        self.find(key).map_or(0, |cost| cost.wall_ns)
    }

    /// Does what [`Meter::launch`] does where no events may be recorded on other streams: short launches are
    /// timed one by one, now and then.
    pub fn launch_alone(&mut self, launch: &Launch, account: u32, charged_ns: u64, now_ns: u64) -> Plan {
        self.plan(launch, account, charged_ns, now_ns, false)
    }

    fn plan(&mut self, launch: &Launch, account: u32, charged_ns: u64, now_ns: u64, may_open: bool) -> Plan {
        let is_short = self.find(launch.key).is_some_and(|cost| cost.is_short());
        let plan = self.join(launch, account, charged_ns, now_ns, is_short);
        let is_behind_others = is_short && self.is_behind_others(launch.stream, charged_ns, now_ns);
        if plan.window.is_none() && is_short && !launch.is_delicate {
            if self.since_ns < self.due_ns || self.is_watching() {
                return plan;
            }
            // By itself it would be taken for as long as itself and what other streams have before it,
            // unmeasured.
            let is_alone = !may_open || self.sparse > 0;
            if is_alone && is_behind_others && self.put_off < PUT_OFF {
                self.put_off += 1;
                return plan;
            }
            self.put_off = 0;
            self.since_ns = 0;
            if !may_open {
                self.due_ns = (self.due_ns * 2).clamp(SOON_NS, LATER_NS);
            } else if self.sparse == 0 {
                return self.open(launch, account, charged_ns, now_ns);
            } else {
                self.sparse -= 1;
            }
        } else if is_short && !launch.is_delicate {
            return plan;
        }
        if launch.is_delicate
            && let Some(cost) = self.find(launch.key)
        {
            if cost.rest > 0 {
                cost.rest -= 1;
                return plan;
            }
            cost.rest = SELDOM;
        }
        if plan.before.is_some() {
            // The window's first event of this stream stands there already.
            return plan;
        }
        let Some(place) = self.singles.iter().position(Option::is_none) else { return plan };
        let Some(start) = self.take_event() else { return plan };
        let Some(end) = self.take_event() else {
            self.free_event(start);
            return plan;
        };
        self.order += 1;
        let single = Single {
            key: launch.key,
            context: launch.context,
            account,
            first_ns: now_ns,
            charged_ns,
            order: self.order,
            start,
            end,
            begins: Begins::default(),
            is_ready: false,
        };
        if let Some(free) = self.singles.get_mut(place) {
            *free = Some(single);
        }
        Plan { before: Some(start), single: Some(place), ..plan }
    }

    /// Counts a short launch. Returns true if launches of other streams are likely to run before it.
    fn is_behind_others(&mut self, stream: u64, charged_ns: u64, now_ns: u64) -> bool {
        let is_behind = self.busy_until_ns > now_ns && self.last_stream != stream;
        self.busy_until_ns = self.busy_until_ns.max(now_ns).saturating_add(charged_ns);
        self.last_stream = stream;
        is_behind
    }

    /// Returns the second event of a place.
    pub fn end_of(&self, place: usize) -> Option<usize> {
        self.singles.get(place).copied().flatten().map(|single| single.end)
    }

    /// Notes that a launch has been made and its events recorded (`is_good`), or not.
    pub fn launched(&mut self, plan: &Plan, is_good: bool, begins: Begins) {
        if let Some(place) = plan.single {
            match self.singles.get_mut(place) {
                Some(Some(single)) if is_good => (single.begins, single.is_ready) = (begins, true),
                _ => self.abandon(Pending::Single(place)),
            }
        }
        if let Some(at) = plan.closes {
            let is_spoilt = self.windows.get(at).copied().flatten().is_none_or(|window| window.is_spoilt);
            if let Some(Some(window)) = self.windows.get_mut(at) {
                window.is_ready = true;
            }
            if !is_good || is_spoilt {
                self.spoil(at);
            }
        } else if let Some(at) = plan.window.filter(|_| !is_good) {
            self.spoil(at);
        }
    }

    /// Returns how long a launch takes the host, given how long this one seems to have taken.
    pub fn call(&mut self, took_ns: u64) -> u64 {
        /// Launches that do work that later ones do not, such as loading code.
        const FIRST: u32 = 8;
        if took_ns < self.call_ns || self.calls < FIRST {
            self.call_ns = if self.calls == 0 { took_ns } else { took_ns.min(self.call_ns) };
        } else {
            self.call_ns += (took_ns - self.call_ns).min(self.call_ns) / 1024;
        }
        self.calls = self.calls.saturating_add(1);
        if self.calls <= FIRST { 0 } else { took_ns.min(self.call_ns) }
    }

    /// Returns how long something has been under way, which is the longest that its events can be apart.
    pub fn age(&self, pending: Pending, now_ns: u64) -> u64 {
        let first = match pending {
            Pending::Single(place) => self.singles.get(place).copied().flatten().map(|s| s.first_ns),
            Pending::Window(at) => self.windows.get(at).copied().flatten().map(|w| w.first_ns),
        };
        first.map_or(0, |first| now_ns.saturating_sub(first))
    }

    /// Returns the GPU time still to come of launches timed by themselves that may still run, in nanoseconds;
    /// `u64::MAX` if the one that runs should have ended, so that others have slices.
    pub fn backlog(&self, now_ns: u64) -> u64 {
        let all = || self.singles.iter().flatten();
        let Some(oldest) = all().min_by_key(|single| single.order) else { return 0 };
        let sum = all().fold(0_u64, |sum, single| sum.saturating_add(single.charged_ns));
        // The oldest launch began when the one before it ended, or was launched later.
        let before = if self.zero_ns == i64::MAX { 0 } else { u64::try_from(self.zero_ns).unwrap_or(0) };
        let runs = now_ns.saturating_sub(oldest.first_ns.max(before));
        if runs > oldest.charged_ns / 4 * 5 + LATE_NS {
            return u64::MAX;
        }
        sum.saturating_sub(runs.min(oldest.charged_ns))
    }

    /// Returns true if a launch that is timed by itself may still run.
    pub fn has_singles(&self) -> bool {
        self.singles.iter().any(Option::is_some)
    }

    /// Returns true if any measurement waits for the GPU.
    pub fn has_pending(&self) -> bool {
        self.singles.iter().any(Option::is_some) || self.windows.iter().any(Option::is_some)
    }

    /// Returns the earliest launch of a context that may have ended and that was made after the one of this
    /// order. Launches are looked at before windows, because a window ends behind the launches in it.
    pub fn next(&self, context: u64, after: u64) -> Option<(Pending, u64)> {
        let ready = self.singles.iter().enumerate().filter_map(|(place, single)| {
            let single = single.filter(|s| s.is_ready && s.context == context && s.order > after)?;
            Some((Pending::Single(place), single.order))
        });
        ready.min_by_key(|(_, order)| *order)
    }

    /// Returns the pairs of events to look at.
    pub fn pairs(&self, pending: Pending) -> ([(usize, usize); STREAMS], usize) {
        let mut out = [(0, 0); STREAMS];
        match pending {
            Pending::Single(place) => {
                let Some(single) = self.singles.get(place).copied().flatten() else { return (out, 0) };
                let [first, ..] = &mut out;
                *first = (single.start, single.end);
                (out, 1)
            }
            Pending::Window(at) => {
                let Some(window) = self.windows.get(at).copied().flatten() else { return (out, 0) };
                for (to, lane) in out.iter_mut().zip(&window.lanes) {
                    *to = (lane.start, lane.end);
                }
                (out, window.lane_count)
            }
        }
    }

    /// Returns the event that spans are measured from, if it is of this context.
    pub fn reference(&self, context: u64) -> Option<usize> {
        self.reference.filter(|(_, of)| *of == context).map(|(event, _)| event)
    }

    /// Returns the first event of the earliest launch that may still run.
    pub fn running(&self, context: u64) -> Option<usize> {
        let singles = self.singles.iter().flatten().filter(|s| s.is_ready && s.context == context);
        singles.min_by_key(|single| single.order).map(|single| single.start)
    }

    /// Forgets a measurement that was not launched, or whose events cannot be read. It stays charged.
    pub fn abandon(&mut self, pending: Pending) {
        match pending {
            Pending::Single(place) => {
                if let Some(single) = self.singles.get_mut(place).and_then(Option::take) {
                    self.free_event(single.start);
                    self.free_event(single.end);
                }
            }
            Pending::Window(at) => self.drop_window(at),
        }
    }

    /// Forgets what all keys cost, because the same handles may now be other functions.
    pub fn forget_costs(&mut self) {
        self.costs.fill(NO_COST);
        self.due_ns = 0;
    }

    /// Forgets what one key costs.
    pub fn forget(&mut self, key: u64) {
        if let Some(cost) = self.find(key) {
            *cost = NO_COST;
        }
    }

    /// Notes that launches of a key may be other work from now on; the next one is timed by itself.
    pub fn doubt(&mut self, key: u64) {
        let next = self.order + 1;
        if let Some(cost) = self.find(key) {
            cost.doubted_from = next;
        }
    }

    /// Forgets a context that is gone, and its events with it.
    pub fn context_gone(&mut self, context: u64) {
        for place in 0..PLACES {
            if self.singles.get(place).copied().flatten().is_some_and(|single| single.context == context) {
                self.abandon(Pending::Single(place));
            }
        }
        for at in 0..WINDOWS {
            if self.windows.get(at).copied().flatten().is_some_and(|window| window.context == context) {
                self.drop_window(at);
            }
        }
        if let Some((event, _)) = self.reference.take_if(|(_, of)| *of == context) {
            self.free_event(event);
            self.spans = Spans::new();
        }
    }

    /// Forgets everything, without a copy of the table on the stack.
    pub fn clear(&mut self) {
        self.costs.fill(NO_COST);
        self.singles.fill(None);
        self.windows.fill(None);
        self.events.fill(false);
        self.spans = Spans::new();
        self.reference = None;
        (self.order, self.since_ns, self.due_ns, self.sparse, self.long) = (0, 0, 0, 0, 0);
        (self.busy_until_ns, self.put_off) = (0, 0);
    }
}

#[cfg(test)]
mod tests;
