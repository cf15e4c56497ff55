//! The simple rule, which an account must come to as well: all uses in a list, all looked at at each look.

use super::{Look, Released, Taken};
use crate::budget::profile::{Profile, Spent};
use aliquot_model::MicroGpus;
use std::collections::{HashMap, HashSet};

const LINGER: i64 = 60;

#[derive(Debug, Clone, PartialEq)]
struct Use {
    uid: String,
    since: i64,
    claimed: i64,
    held: Option<i64>,
    released: Option<i64>,
    part: Option<MicroGpus>,
    open: bool,
}

impl Use {
    fn end(&self) -> i64 {
        self.released.or(self.held).map_or(self.claimed, |told| told.max(self.claimed)).max(self.since)
    }

    fn is_settled(&self) -> bool {
        !self.open && self.released.is_some_and(|released| released >= self.claimed - LINGER)
    }
}

/// An account that forgets nothing but what is settled.
#[derive(Debug, Default)]
pub(super) struct Simple {
    begun: i64,
    seen: i64,
    uses: Vec<Use>,
    /// Claims that the API showed.
    known: HashSet<String>,
    history: Profile,
}

impl Simple {
    pub(super) fn running(&self) -> (usize, MicroGpus) {
        let open = self.uses.iter().filter(|u| u.open);
        open.fold((0, MicroGpus(0)), |(count, sum), u| (count + 1, sum.plus(u.part.unwrap_or_default())))
    }

    pub(super) fn spent(&self, since: i64, until: i64) -> Spent {
        let running: Spent = self
            .intervals()
            .into_iter()
            .map(|(from, to, part)| {
                Spent::from(part.0) * Spent::from((to.min(until) - from.max(since)).max(0))
            })
            .sum();
        self.history.spent(since, until) + running
    }

    fn intervals(&self) -> Vec<(i64, i64, MicroGpus)> {
        let mut last: Option<(&str, i64)> = None;
        let one = |u| {
            let u: &Use = u;
            let taken = last.filter(|(uid, _)| *uid == u.uid).map_or(i64::MIN, |(_, end)| end);
            let since = u.since.max(taken);
            let end = u.end().max(since);
            last = Some((&u.uid, end));
            (since, end, u.part.unwrap_or_default())
        };
        self.uses.iter().map(one).collect()
    }

    pub(super) fn observe(&mut self, look: &Look, keep: i64, now: i64) {
        let now = now.max(self.seen);
        self.seen = now;
        let mut present: HashSet<&str> = HashSet::new();
        for (uid, claim) in &look.claims {
            present.insert(uid);
            self.known.insert(uid.clone());
            let at = self.open(uid, claim.since.filter(|since| *since <= now), claim.part, now);
            self.uses[at].claimed = now;
        }
        for (uid, held) in look.held.iter().filter(|(uid, _)| self.known.contains(uid)).collect::<Vec<_>>() {
            present.insert(uid);
            let at = self.open(uid, Some(held.since).filter(|since| *since <= now), None, now);
            self.uses[at].held = Some(now);
            self.uses[at].part.get_or_insert(held.part);
        }
        for (uid, release) in
            look.released.iter().filter(|(uid, _)| self.known.contains(uid)).collect::<Vec<_>>()
        {
            self.release(uid, release, now);
        }
        for u in self.uses.iter_mut().filter(|u| u.open && !present.contains(u.uid.as_str())) {
            u.open = false;
        }
        self.settle(look, keep);
    }

    fn open(&mut self, uid: &str, since: Option<i64>, part: Option<MicroGpus>, now: i64) -> usize {
        let mut start = since.unwrap_or(now);
        if let Some(at) = self.uses.iter().rposition(|u| u.uid == uid) {
            let last = &mut self.uses[at];
            if last.open {
                let other_part = part.is_some() && last.part.is_some() && part != last.part;
                if !other_part && since.is_none_or(|since| since <= last.end()) {
                    last.part = last.part.or(part);
                    return at;
                }
                last.open = false;
            }
            start = start.max(last.end());
        }
        let (uid, claimed) = (uid.to_owned(), start);
        self.insert(Use { uid, since: start, claimed, held: None, released: None, part, open: true })
    }

    fn insert(&mut self, new: Use) -> usize {
        let at = self.uses.partition_point(|u| (&u.uid, u.since) <= (&new.uid, new.since));
        self.uses.insert(at, new);
        at
    }

    fn release(&mut self, uid: &str, release: &Released, now: i64) {
        let Released { taken: Taken { since: told, part, .. }, until } = *release;
        let until = until.min(now);
        let own = |u: &Use| u.uid == uid;
        let found = self.uses.iter().rposition(|u| own(u) && u.since <= told);
        let found = found.or_else(|| self.uses.iter().position(|u| own(u) && u.since < until));
        if let Some(last) = found.map(|at| &mut self.uses[at])
            && ((last.open && last.released.is_none()) || told <= last.end())
        {
            last.released = last.released.max(Some(until));
            last.part.get_or_insert(part);
            return;
        }
        if until <= self.begun || until <= told {
            return;
        }
        let (before, after): (Vec<&Use>, Vec<&Use>) =
            self.uses.iter().filter(|u| own(u)).partition(|u| u.since <= told);
        let since = before.iter().map(|u| u.end()).max().map_or(told, |end| told.max(end));
        let until = after.iter().map(|u| u.since).min().map_or(until, |next| until.min(next)).max(since);
        let (uid, claimed) = (uid.to_owned(), since);
        let (released, part) = (Some(until), Some(part));
        self.insert(Use { uid, since, claimed, held: None, released, part, open: false });
    }

    fn settle(&mut self, look: &Look, keep: i64) {
        let ends = self.intervals();
        let mut taken: HashMap<String, i64> = HashMap::new();
        for (mut u, (since, end, part)) in std::mem::take(&mut self.uses).into_iter().zip(ends) {
            let listed = look.listed.contains(u.uid.as_str());
            if !u.open && !listed && (u.is_settled() || end <= keep) {
                self.history.add(since, end, part);
                taken.insert(u.uid, end);
                continue;
            }
            u.since = taken.get(&u.uid).map_or(u.since, |end| u.since.max(*end));
            self.uses.push(u);
        }
        self.history.forget_before(keep);
    }
}
