//! What measurements lead to: what is charged for them, and what launches of their keys will cost.

use super::types::{Cost, Finding, NO_COST, Others, Pending, Seen, Single, Window};
use super::{
    BELIEVED, CLEAN_ENOUGH, CLEAN_FIRST, KEYS, LEAST_WEIGHT, Meter, OTHER_WORK, REACH, SOON_NS, SPARSE, VAGUE,
};
use crate::spans::{Span, Spans};

impl Meter {
    /// Takes in what the events showed: one span for each pair, relative to the reference (to the first event
    /// where there is none). `covered_from` is where a launch begins that still runs. `publish` is told each
    /// key whose cost has changed, and its cost if it is routine.
    pub fn finish(
        &mut self,
        pending: Pending,
        spans: &[Span],
        covered_from: Option<i64>,
        others: Others,
        now_ns: u64,
        publish: &mut dyn FnMut(u64, u64),
    ) -> Finding {
        let (pairs, count) = self.pairs(pending);
        let pairs = pairs.get(..count.min(spans.len())).unwrap_or_default();
        match pending {
            Pending::Single(place) => {
                let Some(single) = self.singles.get_mut(place).and_then(Option::take) else {
                    return Finding::default();
                };
                let span = spans.first().copied().unwrap_or_default();
                let (lead, is_vague) = self.lead(&single, span, now_ns);
                let span = Span { start: span.start.saturating_add(lead).min(span.end), end: span.end };
                let fresh = self.count(single.context, pairs, &[span], None, now_ns);
                let length = span.end.saturating_sub(span.start).unsigned_abs();
                let (taken, is_sure) = self.learn(&single, fresh, length, others, is_vague);
                if let Some(cost) = self.find(single.key) {
                    cost.note_wall(fresh);
                }
                publish(single.key, self.routine(single.key));
                let delta_ns =
                    i64::try_from(taken).unwrap_or(i64::MAX).saturating_sub_unsigned(single.charged_ns);
                // The reference may have become the end of this very span.
                let moved = if self.latest > 0 { self.latest } else { 0 };
                let wall = |at: i64| {
                    u64::try_from(self.zero_ns.saturating_add(at.saturating_sub(moved))).unwrap_or(0)
                };
                let seen = Some(Seen {
                    start_ns: wall(span.start),
                    end_ns: wall(span.end),
                    taken_ns: taken,
                    fresh_ns: fresh,
                    is_sure,
                    key: Self::short_key(single.key),
                });
                Finding { account: single.account, delta_ns, seen }
            }
            Pending::Window(at) => {
                let Some(window) = self.windows.get_mut(at).and_then(Option::take) else {
                    return Finding::default();
                };
                let mut union = Spans::new();
                let length: u64 = spans.iter().map(|span| union.add(*span)).sum();
                let host = window.last_ns.saturating_sub(window.first_ns);
                let fresh = self.count(window.context, pairs, spans, covered_from, now_ns);
                if length / 5 * 4 <= host || window.charged_ns == 0 {
                    // The GPU waited for the host.
                    self.sparse = SPARSE;
                    return Finding { account: window.account, ..Finding::default() };
                }
                let delta_ns = self.scale(&window, fresh, others, publish);
                Finding { account: window.account, delta_ns, seen: None }
            }
        }
    }

    /// Returns how long the GPU had nothing to do behind the first event, and whether that is vague. The lead
    /// is the time from when the event was reached, at the latest, to when the launch can have begun. It is
    /// vague if the thread was stopped while it launched. A launch taken to be shorter than it was would be
    /// believed for long, so the lead is the least that it can be. Where it is vague, the launch is taken to
    /// be as long as usual, and nothing is learned from it.
    fn lead(&mut self, single: &Single, span: Span, now_ns: u64) -> (i64, bool) {
        let host = |ns: u64| i64::try_from(ns).unwrap_or(i64::MAX);
        let length = span.end.saturating_sub(span.start);
        let before = self.reference.is_some_and(|(_, of)| of == single.context).then_some(self.zero_ns);
        let seen = host(now_ns).saturating_sub(span.end);
        let reached = before.map_or(seen, |zero| zero.min(seen)).saturating_add(span.start);
        let least = host(single.begins.from_ns).saturating_sub(reached).max(0);
        let most = host(single.begins.until_ns).saturating_sub(reached).max(least);
        match self.find(single.key).map(|cost| host(cost.low_ns)) {
            Some(usual) if most - least > usual / VAGUE => {
                (length.saturating_sub(usual).clamp(least, most), true)
            }
            _ => (least, false),
        }
    }

    /// Adds the spans, frees the events, and makes the latest end the reference. Returns the nanoseconds that
    /// were not charged yet.
    fn count(
        &mut self,
        context: u64,
        pairs: &[(usize, usize)],
        spans: &[Span],
        covered_from: Option<i64>,
        now_ns: u64,
    ) -> u64 {
        let before = self.reference.take();
        let is_same = before.is_some_and(|(_, of)| of == context);
        if !is_same {
            self.spans = Spans::new();
            self.zero_ns = i64::MAX;
        }
        let mut fresh = 0_u64;
        let mut latest = before.filter(|_| is_same).map(|(event, _)| (event, 0));
        for ((_, end), span) in pairs.iter().zip(spans) {
            let seen = covered_from.map_or(span.end, |from| span.end.min(from.max(span.start)));
            fresh = fresh.saturating_add(self.spans.add(Span { start: span.start, end: seen }));
            if latest.is_none_or(|(_, at)| span.end > at) {
                latest = Some((*end, span.end));
            }
        }
        for (start, end) in pairs {
            self.free_event(*start);
            self.free_event(*end);
        }
        if let Some((event, _)) = before {
            self.free_event(event);
        }
        self.latest = latest.map_or(0, |(_, at)| at);
        if let Some((event, at)) = latest {
            self.spans.rebase(at);
            // The clocks may drift apart by a little, so what is known of theirs is let go slowly.
            let moved = self.zero_ns.saturating_add(at).saturating_add(at.max(0) / 50_000);
            self.zero_ns = moved.min(i64::try_from(now_ns).unwrap_or(i64::MAX));
            self.reference = Some((event, context));
            if let Some(taken) = self.events.get_mut(event) {
                *taken = true;
            }
        }
        fresh
    }

    /// Learns from one launch, of whose `length_ns` the part `fresh_ns` was not charged to another. Returns
    /// what the launch is charged, and whether that is sure, that is, not an assumed part. From a launch
    /// whose length is vague nothing is learned.
    fn learn(
        &mut self,
        single: &Single,
        fresh_ns: u64,
        length_ns: u64,
        others: Others,
        is_vague: bool,
    ) -> (u64, bool) {
        let key = single.key;
        let Some(cost) = self.find(key) else {
            let home = Self::home(key);
            let free = (home..home + REACH)
                .map(|at| at % KEYS)
                .find(|at| self.costs.get(*at).is_some_and(|cost| cost.count == 0))
                .unwrap_or(home % KEYS);
            if let Some(cost) = self.costs.get_mut(free) {
                *cost = Cost { key, low_ns: length_ns, count: 1, clean: CLEAN_FIRST, ..NO_COST };
                cost.estimate(fresh_ns);
            }
            return (fresh_ns, false);
        };
        let is_doubted = cost.doubted_from != 0 && single.order >= cost.doubted_from;
        if is_doubted && !is_vague {
            cost.doubted_from = 0;
            if length_ns / OTHER_WORK >= cost.low_ns {
                *cost = Cost { low_ns: length_ns, dip_ns: 0, count: 1, clean: CLEAN_FIRST, ..*cost };
                cost.estimate(fresh_ns);
                return (fresh_ns, false);
            }
        }
        // A launch that is short against a slice has all of its time, or somebody's slices in between.
        let is_alone = others.own_permille == Some(1000);
        let is_clean =
            if is_vague { length_ns / 5 * 4 <= cost.low_ns } else { cost.note(length_ns, is_alone) };
        let part = |of: u64| {
            u64::try_from(u128::from(fresh_ns) * u128::from(of) / u128::from(length_ns.max(1)))
                .unwrap_or(fresh_ns)
        };
        let fits_slice = cost.low_ns <= others.slice_ns / 4 * 3;
        let is_sure = fits_slice && cost.clean >= CLEAN_ENOUGH && !is_doubted;
        let own = match others.own_permille {
            _ if is_alone => fresh_ns,
            _ if is_sure && is_clean => fresh_ns,
            // Charged as those that were alone.
            _ if is_sure => return (part(cost.estimate_ns.min(length_ns)), true),
            Some(own) => permille(fresh_ns, own),
            // No less than its part of two equal slices.
            None => part(cost.low_ns.clamp(length_ns / 2, length_ns.max(1))),
        };
        if is_vague {
            return (own, is_sure);
        }
        cost.count = (cost.count + 1).min(LEAST_WEIGHT);
        let weight = u64::from(cost.count);
        cost.estimate(cost.estimate_ns.saturating_mul(weight - 1).saturating_add(own) / weight);
        (own, is_sure)
    }

    /// Corrects the costs of a window's keys by what they took together. Returns what to charge on top, or to
    /// refund.
    fn scale(
        &mut self,
        window: &Window,
        fresh_ns: u64,
        others: Others,
        publish: &mut dyn FnMut(u64, u64),
    ) -> i64 {
        let charged = window.charged_ns.max(1);
        let mut own = fresh_ns;
        if others.own_permille != Some(1000) && fresh_ns / 4 * 3 > charged {
            // Most likely a slice of another process lies in it.
            if self.long == 0 {
                self.least_permille = u64::MAX;
            }
            self.long += 1;
            self.least_permille = self.least_permille.min(fresh_ns.saturating_mul(1000) / charged);
            if self.long < BELIEVED {
                // A further window will show more, soon.
                self.due_ns = SOON_NS / 2;
                return 0;
            }
            own = permille(charged, u32::try_from(self.least_permille).unwrap_or(u32::MAX));
        } else {
            self.long = 0;
        }
        let own = own.clamp(charged / 8, charged.saturating_mul(8));
        for (key, _) in window.keys.iter().filter(|(_, count)| *count > 0) {
            let believes = others.own_permille == Some(1000) || self.long >= BELIEVED;
            if let Some(cost) = self.find(*key) {
                // Part of another's slice may lie in what is longer than expected.
                let is_doubtful = own > charged && !believes;
                let weight = if cost.count < 4 { 2 } else { 4 } * if is_doubtful { 8 } else { 1 };
                cost.count = (cost.count + 1).min(LEAST_WEIGHT);
                let wanted = u128::from(cost.estimate_ns) * u128::from(own) / u128::from(charged);
                let wanted = u64::try_from(wanted).unwrap_or(u64::MAX);
                cost.estimate(cost.estimate_ns.saturating_mul(weight - 1).saturating_add(wanted) / weight);
                let routine = self.routine(*key);
                publish(*key, routine);
            }
        }
        self.long %= BELIEVED;
        i64::try_from(own).unwrap_or(i64::MAX).saturating_sub_unsigned(charged)
    }
}

fn permille(ns: u64, part: u32) -> u64 {
    u64::try_from(u128::from(ns) * u128::from(part) / 1000).unwrap_or(u64::MAX)
}
