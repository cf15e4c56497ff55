//! Fair turns: a limited number at a time, a limited part of them for each namespace, and round-robin among
//! the namespaces that wait. Requests are sent, and reviews are evaluated, in such turns.

use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::sync::oneshot;

/// The most that may wait for a turn, per namespace and in total.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// The most of one namespace.
    pub(crate) part: usize,
    /// The most in total, in addition to the first one of each namespace.
    pub(crate) all: usize,
}

/// The turns in use, and the queues of those who wait; a ticket represents one who waits.
#[derive(Debug)]
struct Turns<T> {
    free: usize,
    part: usize,
    busy: HashMap<Arc<str>, usize>,
    waiting: HashMap<Arc<str>, VecDeque<T>>,
    /// Lanes with waiting tickets, in the order in which they get a turn.
    order: VecDeque<Arc<str>>,
}

impl<T> Turns<T> {
    fn new(all: usize, part: usize) -> Self {
        Self { free: all, part, busy: HashMap::new(), waiting: HashMap::new(), order: VecDeque::new() }
    }

    /// Returns true if one more ticket of the lane may wait. The first ticket of a lane always may: however
    /// many others wait, it gets its turn before the second ticket of any of them.
    fn has_room(&self, lane: &Arc<str>, room: Room) -> bool {
        let own = self.waiting.get(lane).map_or(0, VecDeque::len);
        own == 0 || own < room.part && self.waiting.values().map(VecDeque::len).sum::<usize>() < room.all
    }

    /// Removes the tickets of those who do not wait any more.
    fn sweep(&mut self, waits: impl Fn(&T) -> bool) {
        self.waiting.retain(|_, tickets| {
            tickets.retain(&waits);
            !tickets.is_empty()
        });
        self.order.retain(|lane| self.waiting.contains_key(lane));
    }

    fn ask(&mut self, lane: &Arc<str>, ticket: T) {
        let tickets = self.waiting.entry(lane.clone()).or_default();
        if tickets.is_empty() {
            self.order.push_back(lane.clone());
        }
        tickets.push_back(ticket);
    }

    /// Takes a free turn for the next ticket; `None` if there is no free turn, or no ticket that may have
    /// one.
    fn next(&mut self) -> Option<(Arc<str>, T)> {
        if self.free == 0 {
            return None;
        }
        let busy = |lane: &Arc<str>| self.busy.get(lane).copied().unwrap_or_default();
        let at = self.order.iter().position(|lane| busy(lane) < self.part)?;
        let lane = self.order.remove(at)?;
        let tickets = self.waiting.get_mut(&lane)?;
        let ticket = tickets.pop_front()?;
        if tickets.is_empty() {
            self.waiting.remove(&lane);
        } else {
            self.order.push_back(lane.clone());
        }
        *self.busy.entry(lane.clone()).or_default() += 1;
        self.free -= 1;
        Some((lane, ticket))
    }

    /// Gives a turn back.
    fn leave(&mut self, lane: &Arc<str>) {
        self.free += 1;
        if let Some(count) = self.busy.get_mut(lane) {
            *count -= 1;
            if *count == 0 {
                self.busy.remove(lane);
            }
        }
    }
}

/// A gate that admits by turns. Clones share their state.
#[derive(Debug, Clone)]
pub(crate) struct Gate {
    turns: Arc<Mutex<Turns<oneshot::Sender<Pass>>>>,
}

/// A turn; it is given back when this value is dropped.
#[derive(Debug)]
pub(crate) struct Pass {
    gate: Gate,
    lane: Arc<str>,
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gate.turns.lock().leave(&self.lane);
        self.gate.admit();
    }
}

impl Gate {
    /// Returns a gate with `all` turns at a time, of which one namespace may have `part`.
    pub(crate) fn new(all: usize, part: usize) -> Self {
        Self { turns: Arc::new(Mutex::new(Turns::new(all, part))) }
    }

    /// Waits for a turn, however many others wait.
    pub(crate) async fn enter(&self, lane: &Arc<str>) -> Pass {
        loop {
            let (ticket, turn) = oneshot::channel();
            self.turns.lock().ask(lane, ticket);
            self.admit();
            // A ticket is only dropped together with the gate, and `self` keeps the gate alive.
            if let Ok(pass) = turn.await {
                return pass;
            }
        }
    }

    /// Returns the number of namespaces that wait for a turn.
    pub(crate) fn waiting(&self) -> usize {
        self.turns.lock().order.len()
    }

    /// Waits for a turn; returns `None` if too many wait already.
    pub(crate) async fn enter_within(&self, lane: &Arc<str>, room: Room) -> Option<Pass> {
        let (ticket, turn) = oneshot::channel();
        {
            let mut turns = self.turns.lock();
            if !turns.has_room(lane, room) {
                turns.sweep(|ticket| !ticket.is_closed());
            }
            if !turns.has_room(lane, room) {
                return None;
            }
            turns.ask(lane, ticket);
        }
        self.admit();
        turn.await.ok()
    }

    /// Gives free turns to those who wait. The turn of one who does not wait any more is given back when
    /// `unused` is dropped.
    fn admit(&self) {
        loop {
            let Some((lane, ticket)) = self.turns.lock().next() else { return };
            let unused = ticket.send(Pass { gate: self.clone(), lane });
            drop(unused);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(name: &str) -> Arc<str> {
        name.into()
    }

    #[test]
    fn one_namespace_gets_its_part_and_no_more() {
        let mut turns = Turns::new(64, 8);
        for ticket in 0..100 {
            turns.ask(&lane("bad"), ticket);
        }
        let given = std::iter::from_fn(|| turns.next()).count();
        assert_eq!(given, 8);
        turns.ask(&lane("good"), 1000);
        assert_eq!(turns.next().map(|(_, ticket)| ticket), Some(1000));
    }

    #[test]
    fn namespaces_that_wait_take_turns() {
        let mut turns = Turns::new(4, 4);
        let held: Vec<_> = (0..4)
            .filter_map(|ticket| {
                turns.ask(&lane("a"), ticket);
                turns.next()
            })
            .collect();
        for ticket in 10..14 {
            turns.ask(&lane("a"), ticket);
        }
        for ticket in 20..22 {
            turns.ask(&lane("b"), ticket);
        }
        turns.ask(&lane("c"), 30);
        assert!(turns.next().is_none());
        let mut order = Vec::new();
        let mut over = VecDeque::from(held);
        while let Some((lane, _)) = over.pop_front() {
            turns.leave(&lane);
            if let Some((lane, ticket)) = turns.next() {
                order.push(ticket);
                over.push_back((lane, ticket));
            }
        }
        assert_eq!(order, [10, 20, 30, 11, 21, 12, 13]);
        assert_eq!((turns.free, turns.busy.len(), turns.waiting.len()), (4, 0, 0));
    }

    #[tokio::test]
    async fn a_turn_that_nobody_waits_for_any_more_goes_to_the_next() {
        let gate = Gate::new(1, 1);
        let first = gate.enter(&lane("a")).await;
        let (second, third) = (gate.clone(), gate.clone());
        let waits = tokio::spawn(async move { drop(second.enter(&lane("a")).await) });
        tokio::task::yield_now().await;
        waits.abort();
        assert!(waits.await.is_err());
        let waits = tokio::spawn(async move { drop(third.enter(&lane("b")).await) });
        tokio::task::yield_now().await;
        drop(first);
        waits.await.unwrap();
    }

    #[tokio::test]
    async fn who_finds_too_many_waiting_is_told_at_once_and_who_left_does_not_count() {
        let gate = Gate::new(1, 1);
        let room = Room { part: 2, all: 3 };
        let held = gate.enter(&lane("a")).await;
        let waits = |name: &'static str| {
            let gate = gate.clone();
            tokio::spawn(async move { gate.enter_within(&lane(name), room).await.is_some() })
        };
        let waiting = [waits("a"), waits("a"), waits("b")];
        tokio::task::yield_now().await;
        assert!(gate.enter_within(&lane("a"), room).await.is_none(), "two of this namespace wait");
        assert!(gate.enter_within(&lane("b"), room).await.is_none(), "three wait in all");
        let newcomer = waits("c");
        tokio::task::yield_now().await;
        assert_eq!(gate.waiting(), 3, "the first of a namespace always may");
        newcomer.abort();
        assert!(newcomer.await.is_err());
        for one in &waiting {
            one.abort();
        }
        for one in waiting {
            assert!(one.await.is_err());
        }
        let last = waits("a");
        tokio::task::yield_now().await;
        drop(held);
        assert!(last.await.unwrap());
    }
}
