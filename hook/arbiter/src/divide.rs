//! The division of a stretch of wall time between the shares that had the GPU.
//!
//! A process whose kernels always take about as long while it is alone is known: each of its kernels had that
//! much time. The part of a process that was sure of itself is known too, and so are short launches, which
//! are not logged. The GPU serves all others for equal parts of what is left. Where there are only known and
//! sure processes, what is left is what the sure ones had.

use crate::Stretch;
use crate::habits::Habits;
use std::collections::{BTreeMap, BTreeSet};

/// A process: its share and slot.
pub(crate) type Process = (String, u64);

/// Rates below this count as zero.
const NOTHING: f64 = 1e-6;
/// The most short launches that disturb nobody, as a part of all time.
const QUIET: f64 = 0.005;

/// A stretch that is kept until all of it is settled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub(crate) stretch: Stretch,
    /// GPU time that is settled already, in nanoseconds.
    pub(crate) given: f64,
}

/// The part of a stretch between two instants.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    process: &'a Process,
    kept: &'a Kept,
    start: u64,
    end: u64,
    /// GPU time of the whole stretch, if it is known, in nanoseconds.
    known: Option<f64>,
    /// Time in which no other process had a stretch, in nanoseconds.
    free: f64,
    /// True if the process had another stretch at the same time.
    overlaps: bool,
    /// True if no other share had more short launches than disturb nobody.
    is_quiet: bool,
    given: f64,
}

/// The result for a piece.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// GPU time that the stretch is taken to have had here, in nanoseconds.
    pub(crate) given: f64,
    /// Whether no other process had anything meanwhile; `None` if not all of the stretch was looked at.
    pub(crate) is_alone: Option<bool>,
}

/// The time of a share, all its processes together, where it was divided, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Part {
    /// GPU time that the share had.
    pub(crate) own: f64,
    /// The part of that time that was borrowed.
    pub(crate) lent: f64,
    /// GPU time that its quota was charged for the same.
    pub(crate) taken: f64,
    /// GPU time that was charged as borrowed.
    pub(crate) lent_taken: f64,
    /// Wall time of its kernels.
    pub(crate) wall: f64,
}

/// The division of the time between two instants.
#[derive(Debug, Default)]
pub(crate) struct Parts<'a> {
    pub(crate) shares: BTreeMap<&'a str, Part>,
    /// GPU time that each share (the first) had while another's part (the second) followed from it, in
    /// nanoseconds.
    pub(crate) beside: BTreeMap<(&'a str, &'a str), f64>,
}

impl Kept {
    /// Returns true if any of the stretch lies between two instants.
    pub(crate) fn is_in(&self, from: u64, to: u64) -> bool {
        self.stretch.start_ns.max(from) < self.stretch.end_ns.min(to)
    }
}

impl<'a> Piece<'a> {
    /// Returns the part of a stretch between two instants, if there is one.
    pub(crate) fn of(process: &'a Process, kept: &'a Kept, from: u64, to: u64) -> Option<Self> {
        kept.is_in(from, to).then_some(Self {
            process,
            kept,
            start: kept.stretch.start_ns.max(from),
            end: kept.stretch.end_ns.min(to),
            known: None,
            free: 0.0,
            overlaps: false,
            is_quiet: true,
            given: 0.0,
        })
    }

    fn share(&self) -> &'a str {
        &self.process.0
    }

    fn wall(&self) -> f64 {
        (self.end - self.start) as f64
    }

    /// Returns the charge as a part of the stretch's time.
    fn taken(&self) -> f64 {
        let rate = self.kept.stretch.taken_ns as f64 / self.kept.stretch.length();
        if self.kept.stretch.is_sure { rate.min(1.0) } else { rate }
    }

    /// Returns the piece's part of the GPU while it is not alone, if that is known.
    fn rate(&self) -> Option<f64> {
        let behind = self.kept.stretch.end_ns.saturating_sub(self.start) as f64 - self.free;
        let rate = (self.known? - self.kept.given - self.free) / behind.max(1.0);
        Some(rate.clamp(0.0, 1.0))
    }

    pub(crate) fn outcome(&self) -> Outcome {
        let is_whole = self.wall() >= self.kept.stretch.length();
        let is_alone = !self.overlaps && self.is_quiet && self.free >= self.wall();
        Outcome { given: self.given, is_alone: is_whole.then_some(is_alone) }
    }
}

/// Stretches of one kind: their number, and the sum of their charges as parts of their time.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    count: u32,
    taken: f64,
    /// The number of those that borrowed.
    lent: u32,
    lent_taken: f64,
}

impl Tally {
    fn count(&mut self, piece: &Piece<'_>, begins: bool) {
        let (sign, part) = if begins { (1, piece.taken()) } else { (-1, -piece.taken()) };
        self.count = self.count.saturating_add_signed(sign);
        self.taken += part;
        if piece.kept.stretch.is_borrowed {
            self.lent = self.lent.saturating_add_signed(sign);
            self.lent_taken += part;
        }
    }
}

/// One process at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct Now {
    unsure: Tally,
    sure: Tally,
    /// The only stretch of the process, if its rate is known.
    known: Option<(f64, Tally)>,
}

impl Now {
    /// Counts a piece that begins or ends.
    fn count(&mut self, piece: &Piece<'_>, begins: bool) {
        if let Some(rate) = piece.rate() {
            let mut tally = Tally::default();
            tally.count(piece, true);
            self.known = begins.then_some((rate, tally));
        } else if piece.kept.stretch.is_sure {
            self.sure.count(piece, begins);
        } else {
            self.unsure.count(piece, begins);
        }
    }

    fn is_idle(&self) -> bool {
        self.unsure.count + self.sure.count == 0 && self.known.is_none()
    }
}

/// The processes of one share at one moment, and which of them borrowed.
#[derive(Clone, Copy, Debug, Default)]
struct Crowd {
    unsure: u32,
    sure: u32,
    known: u32,
    sure_rate: f64,
    known_rate: f64,
    /// The charges of all but the sure processes, as parts of their time.
    taken: f64,
    lent_unsure: f64,
    lent_sure_rate: f64,
    lent_known: u32,
    lent_known_rate: f64,
    lent_taken: f64,
}

impl Crowd {
    /// Adds a process (`sign` 1), or takes it away (-1).
    fn count(&mut self, now: &Now, sign: i8) {
        let sign_f = f64::from(sign);
        let step = |count: &mut u32| *count = count.saturating_add_signed(i32::from(sign));
        let mut charge = |tally: &Tally| {
            self.taken += sign_f * tally.taken;
            self.lent_taken += sign_f * tally.lent_taken;
        };
        if let Some((rate, tally)) = now.known {
            charge(&tally);
            step(&mut self.known);
            self.known_rate += sign_f * rate;
            if tally.lent > 0 {
                step(&mut self.lent_known);
                self.lent_known_rate += sign_f * rate;
            }
            return;
        }
        if now.unsure.count > 0 {
            charge(&now.unsure);
            step(&mut self.unsure);
            self.lent_unsure += sign_f * f64::from(now.unsure.lent) / f64::from(now.unsure.count);
        }
        if now.sure.count > 0 {
            step(&mut self.sure);
            let scale = 1.0 / now.sure.taken.max(1.0);
            self.sure_rate += sign_f * now.sure.taken * scale;
            self.lent_sure_rate += sign_f * now.sure.lent_taken * scale;
        }
    }

    fn is_empty(&self) -> bool {
        self.unsure + self.sure + self.known == 0
    }
}

/// Divides the time from `from` on between the pieces. `short` has the rates at which shares have short
/// launches, which have no stretches.
pub(crate) fn divide<'a>(
    pieces: &mut [Piece<'a>],
    short: &BTreeMap<&str, f64>,
    habits: &Habits,
    from: u64,
) -> Parts<'a> {
    let mut corners: Vec<(u64, bool, usize)> = Vec::new();
    for (at, piece) in pieces.iter().enumerate() {
        corners.push((piece.start, true, at));
        corners.push((piece.end, false, at));
    }
    corners.sort_unstable();
    mark(pieces, &corners);
    for piece in pieces.iter_mut() {
        let others = || short.iter().filter(|(id, _)| **id != piece.process.0).map(|(_, rate)| *rate);
        piece.is_quiet = others().all(|rate| rate < QUIET);
        // For a stretch that goes on, it is not known yet how much of it will be alone.
        if !piece.overlaps && piece.end == piece.kept.stretch.end_ns {
            piece.known = habits.length(piece.share(), &piece.kept.stretch);
        }
    }
    let mut parts = Parts::default();
    let mut processes: BTreeMap<&Process, Now> = BTreeMap::new();
    let mut crowds: BTreeMap<&str, Crowd> = BTreeMap::new();
    let mut before = from;
    // The time that an unsure stretch would have had if it had been there all the time, and the same for a
    // sure one, in terms of its rate.
    let mut had = (0.0, 0.0);
    for (at, begins, piece) in corners {
        if at > before {
            let length = (at - before) as f64;
            let (each, scale) = share_out(length, processes.len() == 1, &crowds, short, &mut parts);
            had = (had.0 + each * length, had.1 + scale * length);
        }
        before = at;
        let Some(piece) = pieces.get_mut(piece) else { continue };
        let so_far = if piece.kept.stretch.is_sure { had.1 * piece.taken() } else { had.0 };
        piece.given = match piece.rate() {
            Some(rate) => piece.free + rate * (piece.wall() - piece.free),
            None if begins => -so_far,
            None => piece.given + so_far,
        };
        let now = processes.entry(piece.process).or_default();
        let crowd = crowds.entry(piece.share()).or_default();
        crowd.count(now, -1);
        now.count(piece, begins);
        crowd.count(now, 1);
        if crowd.is_empty() {
            crowds.remove(piece.share());
        }
        if now.is_idle() {
            processes.remove(piece.process);
        }
    }
    parts
}

/// Notes for each piece how long it was alone, and whether it overlaps with another of its process.
fn mark(pieces: &mut [Piece<'_>], corners: &[(u64, bool, usize)]) {
    // By process: how many are open, how many have begun, and how long it has been alone.
    let mut open: BTreeMap<&Process, (u32, u32, f64)> = BTreeMap::new();
    let mut there: BTreeSet<&Process> = BTreeSet::new();
    let mut begun = vec![(0_u32, 0.0); pieces.len()];
    let mut before = 0;
    for (at, begins, index) in corners {
        if there.len() == 1
            && let Some(alone) = there.first().and_then(|process| open.get_mut(*process))
        {
            alone.2 += (at - before) as f64;
        }
        before = *at;
        let (Some(piece), Some(begun)) = (pieces.get_mut(*index), begun.get_mut(*index)) else { continue };
        let (count, starts, alone) = open.entry(piece.process).or_default();
        if *begins {
            (*count, *starts) = (*count + 1, starts.saturating_add(1));
            *begun = (*starts, *alone);
            piece.overlaps = *count > 1;
            there.insert(piece.process);
        } else {
            *count = count.saturating_sub(1);
            piece.free = *alone - begun.1;
            piece.overlaps |= *starts != begun.0;
            if *count == 0 {
                there.remove(piece.process);
            }
        }
    }
}

/// Divides one span between the processes that are there. Returns the part of each unsure process, and the
/// factor for the rates of the sure ones.
fn share_out<'a>(
    length: f64,
    is_alone: bool,
    crowds: &BTreeMap<&'a str, Crowd>,
    short: &BTreeMap<&str, f64>,
    parts: &mut Parts<'a>,
) -> (f64, f64) {
    if crowds.is_empty() {
        return (0.0, 1.0);
    }
    let sum = |of: fn(&Crowd) -> f64| crowds.values().map(of).sum::<f64>();
    let (unsure, sure) = (sum(|c| f64::from(c.unsure)), sum(|c| f64::from(c.sure)));
    let (known, known_rate) = (sum(|c| f64::from(c.known)), sum(|c| c.known_rate).max(0.0));
    let sure_rate = sum(|c| c.sure_rate).max(0.0);
    // Short launches of shares that have no stretch here.
    let strangers = || short.iter().filter(|(id, _)| !crowds.contains_key(*id)).map(|(_, rate)| *rate);
    let (strange, strange_rate) = (strangers().count() as f64, strangers().sum::<f64>());
    let equal = 1.0 / (unsure + known + sure + strange);
    // At what rate each unsure process is served, and by how much what the sure say is changed.
    let others = (sure_rate + strange_rate).min(1.0 - equal * (unsure + known));
    let each = (1.0 - known_rate - others).max(0.0) / unsure.max(1.0);
    let flexes = unsure == 0.0 && known > 0.0 && sure_rate > NOTHING;
    let scale = if flexes { (1.0 - known_rate - strange_rate).max(0.0) / sure_rate } else { 1.0 };
    let alone = (1.0 - strange_rate).clamp(0.0, 1.0);
    for (id, crowd) in crowds {
        let alone = |count: u32, rate: f64| if is_alone { alone * f64::from(count) } else { rate };
        let known = alone(crowd.known, crowd.known_rate);
        let lent_known = alone(crowd.lent_known, crowd.lent_known_rate);
        let part = parts.shares.entry(id).or_default();
        part.own += length * (known + each * f64::from(crowd.unsure));
        part.lent += length * (lent_known + each * crowd.lent_unsure);
        part.taken += length * (crowd.taken - crowd.lent_taken);
        part.lent_taken += length * crowd.lent_taken;
        part.wall += length * f64::from(crowd.known + crowd.unsure);
        if flexes {
            part.own += length * crowd.sure_rate * scale;
            part.lent += length * crowd.lent_sure_rate * scale;
            part.taken += length * (crowd.sure_rate - crowd.lent_sure_rate);
            part.lent_taken += length * crowd.lent_sure_rate;
            part.wall += length * f64::from(crowd.sure);
        }
        let had = length * (known + each * f64::from(crowd.unsure) + crowd.sure_rate.clamp(0.0, 1.0));
        // The processes whose part follows from what this share had.
        let rest = |crowd: &Crowd| f64::from(crowd.unsure + if flexes { crowd.sure } else { 0 });
        let others = || crowds.iter().filter(|(other, _)| *other != id);
        let count: f64 = others().map(|(_, crowd)| rest(crowd)).sum();
        for (other, crowd) in others().filter(|(_, crowd)| rest(crowd) > 0.0) {
            *parts.beside.entry((id, other)).or_default() += had * rest(crowd) / count;
        }
    }
    (each, scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 2] = ["a", "b"];

    /// Stretches of `a` and of `b`, and the parts of both between 0 and `to`; what is charged is a hundredth.
    fn divided(
        stretches: [&[(u64, u64)]; 2],
        habits: &Habits,
        sure: bool,
        to: u64,
    ) -> ([f64; 2], Vec<Outcome>) {
        let kept = |(start_ns, end_ns): &(u64, u64)| Kept {
            stretch: Stretch {
                slot: 0,
                key: 7,
                start_ns: *start_ns,
                end_ns: *end_ns,
                taken_ns: (end_ns - start_ns) / 100,
                is_sure: sure,
                is_borrowed: false,
            },
            given: 0.0,
        };
        let processes = NAMES.map(|name| (name.to_owned(), 0));
        let kept = stretches.map(|all| all.iter().map(kept).collect::<Vec<_>>());
        let all = processes.iter().zip(&kept).flat_map(|(p, kept)| kept.iter().map(move |kept| (p, kept)));
        let mut pieces: Vec<_> = all.filter_map(|(p, kept)| Piece::of(p, kept, 0, to)).collect();
        let parts = divide(&mut pieces, &BTreeMap::new(), habits, 0);
        let own = NAMES.map(|name| parts.shares.get(name).map_or(0.0, |part| part.own.round()));
        (own, pieces.iter().map(Piece::outcome).collect())
    }

    /// Kernels of `b` take this long.
    fn known(length: u64) -> Habits {
        let mut habits = Habits::default();
        let stretch = Stretch {
            slot: 0,
            key: 7,
            start_ns: 0,
            end_ns: length,
            taken_ns: 0,
            is_sure: false,
            is_borrowed: false,
        };
        (0..20).for_each(|_| habits.note("b", &stretch, true));
        habits
    }

    #[test]
    fn without_more_knowledge_parts_are_equal() {
        let (own, _) = divided([&[(0, 800)], &[(0, 1000)]], &Habits::default(), false, 2000);
        assert_eq!(own, [400.0, 600.0]);
    }

    #[test]
    fn a_process_whose_kernels_always_take_as_long_had_that_much() {
        // 300 of 800 together with a, and what is left is a's.
        let (own, _) = divided([&[(0, 800)], &[(0, 800)]], &known(300), false, 2000);
        assert_eq!(own, [500.0, 300.0]);
        // 200 of them alone, so 100 of the 600 that a was there as well.
        let (own, _) = divided([&[(200, 800)], &[(0, 800)]], &known(300), false, 2000);
        assert_eq!(own, [500.0, 300.0]);
        // More than there is.
        let (own, _) = divided([&[(0, 800)], &[(0, 800)]], &known(900), false, 2000);
        assert_eq!(own, [0.0, 800.0]);
    }

    #[test]
    fn the_sure_are_believed_unless_somebody_else_is_known_better() {
        let (own, _) = divided([&[(0, 800)], &[(0, 800)]], &Habits::default(), true, 2000);
        assert_eq!(own, [0.0, 0.0], "nothing is corrected");
        let (own, _) = divided([&[(0, 800)], &[(0, 800)]], &known(300), true, 2000);
        assert_eq!(own, [500.0, 300.0]);
    }

    #[test]
    fn a_process_with_several_kernels_at_once_is_not_known() {
        let (own, _) = divided([&[(0, 800)], &[(0, 800), (0, 800)]], &known(300), false, 2000);
        assert_eq!(own, [400.0, 400.0]);
    }

    #[test]
    fn what_goes_on_is_divided_equally_until_its_end_is_settled() {
        let (own, outcomes) = divided([&[(0, 800)], &[(0, 800)]], &known(300), false, 200);
        assert_eq!(own, [100.0, 100.0]);
        let given: Vec<f64> = outcomes.iter().map(|outcome| outcome.given).collect();
        assert_eq!(given, [100.0, 100.0], "remembered for the rest");
        let rest = Kept {
            stretch: Stretch {
                slot: 0,
                key: 7,
                start_ns: 0,
                end_ns: 800,
                taken_ns: 0,
                is_sure: false,
                is_borrowed: false,
            },
            given: 100.0,
        };
        let processes = NAMES.map(|name| (name.to_owned(), 0));
        let mut pieces: Vec<_> = processes.iter().filter_map(|p| Piece::of(p, &rest, 200, 900)).collect();
        let parts = divide(&mut pieces, &BTreeMap::new(), &known(300), 200);
        assert_eq!(NAMES.map(|name| parts.shares[name].own.round()), [400.0, 200.0]);
    }

    #[test]
    fn only_whole_stretches_with_nobody_else_are_alone() {
        let alone = |to| {
            let (_, outcomes) =
                divided([&[(0, 500), (1500, 2000)], &[(400, 1000)]], &Habits::default(), false, to);
            outcomes.iter().map(|outcome| outcome.is_alone).collect::<Vec<_>>()
        };
        assert_eq!(alone(1900), [Some(false), None, Some(false)], "the second goes on behind");
        assert_eq!(alone(2000), [Some(false), Some(true), Some(false)]);
    }

    #[test]
    fn all_of_the_time_is_divided_whoever_is_there() {
        // Any stretches that leave no gap.
        let a = [(0, 300), (250, 700), (900, 1000)];
        let b = [(100, 1000), (200, 600)];
        for habits in [Habits::default(), known(200), known(900)] {
            let (own, outcomes) = divided([&a, &b], &habits, false, 1000);
            assert_eq!(own[0] + own[1], 1000.0);
            assert!(outcomes.iter().all(|outcome| outcome.given >= 0.0), "{outcomes:?}");
        }
    }
}
