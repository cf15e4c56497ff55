//! What one claim is charged for: a pure function of what was seen of it.
//!
//! A *use* is the time from a claim's allocation to its release. It is kept as an interval, so an observation
//! that is repeated changes nothing. A use goes on while the API shows the allocation or a node says that the
//! claim holds hardware. It ends with the later of
//! - the last moment at which the API showed the allocation, and
//! - the moment at which the node gave the devices back, from its numbered release; without a release, the
//!   last moment at which a node said that they are held.
//!
//! So an outage of the controller adds no charge if a node had prepared the claim: the release says when the
//! use ended. A claim that no node ever prepared and that vanished during an outage is charged up to the last
//! moment that was stored; see [`super::super::book::HEARTBEAT`].
//!
//! A use whose node said when it ended is *settled*. What the API and nodes show may be older than what they
//! showed before: another API server answers, or a watch restarts from a cache that lags. So a settled use is
//! kept for as long as views lag at most ([`super::LAG`]). During that time, what is shown of its claim is
//! doubted ([`Uses::doubts`]) until something shows that it is another use.

use super::sight::{Allocated, Released, Sight, Site, Taken};
use aliquot_model::MicroGpus;

/// The longest time that the API normally shows an allocation after the node's release, in seconds: the
/// kubelet has to report that the pod ended, and kube-controller-manager has to act on it.
const LINGER: i64 = 60;

/// The number of nodes that are remembered for a claim: those of its last allocations.
pub(super) const MOST_SITES: usize = 2;

/// The times that matter for a look.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    /// The time of the previous look.
    pub(super) before: i64,
    /// The current time.
    pub(super) now: i64,
    /// When the account was created: a use that had ended by then is not counted.
    pub(super) begun: i64,
    /// The second until which claims that are not known are charged.
    pub(super) watermark: i64,
}

/// A part of GPUs that is charged from one second to another, or without an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Charge {
    pub(super) since: i64,
    pub(super) until: Option<i64>,
    pub(super) part: MicroGpus,
}

/// The figures of a claim that an account adds up over all claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) running: (usize, MicroGpus),
    /// Ends of uses whose node never said when they ended.
    pub(super) loose: Vec<i64>,
    /// Ends of settled uses that a view that lags may still show, or shows now.
    pub(super) settled: Vec<i64>,
    /// True if more may still be reported about what is already charged: a late release, or a part that is
    /// not known. A claim that merely runs loses nothing if it is charged until a moment and then from there
    /// on.
    pub(super) delicate: bool,
}

/// One use of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) since: i64,
    /// The last second at which the API showed the use, unless it shows it now.
    pub(super) claimed: i64,
    /// The last second at which a node said that the use is held, unless a node says so now.
    pub(super) held: Option<i64>,
    /// When a node released the use.
    pub(super) released: Option<i64>,
    pub(super) part: Option<MicroGpus>,
    pub(super) open: bool,
    /// True if the API showed the use at the last look.
    shown: bool,
    /// True if a node held the use at the last look.
    on_node: bool,
}

impl Use {
    fn begin(since: i64, part: Option<MicroGpus>) -> Self {
        Self {
            since,
            claimed: since,
            held: None,
            released: None,
            part,
            open: true,
            shown: false,
            on_node: false,
        }
    }

    /// Restores a use from its stored form; nothing of it has been seen yet.
    pub(super) fn restored(
        (since, claimed): (i64, i64),
        (held, released): (Option<i64>, Option<i64>),
        part: Option<MicroGpus>,
        open: bool,
    ) -> Self {
        Self { since, claimed, held, released, part, open, shown: false, on_node: false }
    }

    /// Returns the use as it was seen at the look `at`.
    pub(super) fn at(&self, at: i64) -> Self {
        let mut seen = self.clone();
        seen.let_go(at);
        seen
    }

    /// Notes that neither the API nor a node has shown the use since the look `at`.
    fn let_go(&mut self, at: i64) {
        if std::mem::take(&mut self.shown) {
            self.claimed = at;
        }
        if std::mem::take(&mut self.on_node) {
            self.held = Some(at);
        }
    }

    /// Returns the end of the use, if it is as it was at the look `at`.
    pub(super) fn end(&self, at: i64) -> i64 {
        let claimed = if self.shown { at } else { self.claimed };
        let held = if self.on_node { Some(at) } else { self.held };
        self.released.or(held).map_or(claimed, |told| told.max(claimed)).max(self.since)
    }

    /// Returns true if the use grows with time.
    const fn grows(&self) -> bool {
        self.shown || (self.on_node && self.released.is_none())
    }

    /// Returns true if the node has said, for good, when the use ended.
    pub(super) fn is_settled(&self) -> bool {
        !self.open && self.released.is_some_and(|released| released >= self.claimed.saturating_sub(LINGER))
    }

    fn is_loose(&self) -> bool {
        !self.open && !self.is_settled()
    }
}

/// The observation of a claim whose last use is settled; it may be of that use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Doubt {
    shown: bool,
    on_node: bool,
    part: Option<MicroGpus>,
}

/// All uses of a claim, in the order in which they began.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Uses {
    list: Vec<Use>,
    listed: bool,
    doubt: Option<Doubt>,
    /// Nodes that the API has shown with devices of the claim; what any other node says about it is not
    /// believed.
    sites: Vec<Site>,
    /// The largest part that these nodes may report, and the first second that they may report.
    most: Option<MicroGpus>,
    born: Option<i64>,
}

impl Uses {
    pub(super) fn push(&mut self, restored: Use) {
        let at = self.list.partition_point(|u| u.since <= restored.since);
        self.list.insert(at, restored);
    }

    pub(super) fn list(&self) -> &[Use] {
        &self.list
    }

    pub(super) fn sites(&self) -> &[Site] {
        &self.sites
    }

    /// Notes that the API showed the claim with devices of this node.
    pub(super) fn was_at(&mut self, site: Site) {
        if self.sites.last() != Some(&site) {
            self.sites.retain(|known| *known != site);
            self.sites.push(site);
            let surplus = self.sites.len().saturating_sub(MOST_SITES);
            self.sites.drain(..surplus);
        }
    }

    fn learn(&mut self, allocated: &Allocated) {
        allocated.site.into_iter().for_each(|site| self.was_at(site));
        self.most = Some(allocated.most);
        self.born = Some(allocated.born);
    }

    /// Returns what a node says, as far as it is believed: only for claims that got devices of that node,
    /// nothing from before the claim was created, and no larger part than the API shows.
    fn believed(&self, taken: &Taken) -> Option<Taken> {
        let born = self.born.or_else(|| self.list.first().map(|first| first.since))?;
        let known = || self.list.iter().filter_map(|u| u.part).max();
        // The part is unknown only if the claim's devices were not published when a controller saw the claim,
        // and the claim was gone when the next controller came.
        let most = self.most.or_else(known).unwrap_or(MicroGpus::WHOLE);
        self.sites.contains(&taken.site).then(|| Taken {
            since: taken.since.max(born),
            part: taken.part.min(most),
            ..*taken
        })
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) const fn is_listed(&self) -> bool {
        self.listed
    }

    /// Returns the charges of the claim; the intervals never overlap.
    pub(super) fn charges(&self) -> Vec<Charge> {
        let mut taken = i64::MIN;
        let one = |u: &Use| {
            let since = u.since.max(taken);
            // The end of a use that does not grow is the same at any look.
            let until = (!u.grows()).then(|| u.end(since).max(since));
            taken = until.unwrap_or(i64::MAX);
            Charge { since, until, part: u.part.unwrap_or_default() }
        };
        self.list.iter().map(one).collect()
    }

    pub(super) fn marks(&self) -> Marks {
        let open = self.list.iter().filter(|u| u.open);
        let running = open.fold((0usize, MicroGpus(0)), |(count, sum), u| {
            (count.saturating_add(1), sum.plus(u.part.unwrap_or_default()))
        });
        let loose = self.list.iter().filter(|u| u.is_loose()).map(|u| u.end(u.since)).collect();
        let is_open_to_more = |u: &Use| u.part.is_none() || (!u.open && !self.is_over(u));
        let delicate = self.list.iter().any(is_open_to_more);
        let expires = !self.listed || self.doubt.is_some();
        let settled =
            self.list.iter().filter(|u| expires && u.is_settled()).map(|u| u.end(u.since)).collect();
        Marks { running, loose, settled, delicate }
    }

    /// Returns true if everything about a use was reported: it is kept only for views that lag.
    pub(super) fn is_over(&self, of: &Use) -> bool {
        !self.listed && of.is_settled()
    }

    /// Returns true if what is shown may be the last use, which is settled: it began before that use ended,
    /// or its beginning is not known.
    ///
    /// If the beginning is not known, it cannot be told from the last use for as long as a view may lag. It
    /// is charged only from the moment when it can be told: when a node holds it since a later time, or when
    /// it is shown for longer than a view may lag. Until then a tenant may be charged too little. That is
    /// corrected by the node's release, if a node prepared the claim, because the release says since when. If
    /// it were charged at once, it would be charged twice whenever a view lags, and nothing would take that
    /// charge back.
    fn doubts(&self, since: Option<i64>) -> bool {
        self.list.last().is_some_and(|last| {
            let is_later = |since: i64| since >= last.end(last.since) && since > last.since;
            last.is_settled() && !since.is_some_and(is_later)
        })
    }

    /// Takes in what is seen of the claim. Returns true if it says more than that time has passed.
    pub(super) fn look(&mut self, sight: &Sight, at: Moment) -> bool {
        sight.allocated.iter().for_each(|allocated| self.learn(allocated));
        self.listed = sight.listed.iter().any(|site| self.sites.contains(site));
        let all_held: Vec<Taken> = sight.held.iter().filter_map(|held| self.believed(held)).collect();
        let mut changed = false;
        // Until now everything is as it was at the previous look.
        for u in &mut self.list {
            if sight.allocated.is_none() && std::mem::take(&mut u.shown) {
                u.claimed = at.before;
            }
            if all_held.is_empty() && std::mem::take(&mut u.on_node) {
                u.held = Some(at.before);
            }
        }
        let mut doubt = Doubt::default();
        let mut seen = at.before;
        if let Some(allocated) = &sight.allocated
            && self.doubts(allocated.since)
        {
            doubt = Doubt { shown: true, part: allocated.part, ..doubt };
        } else if let Some(allocated) = &sight.allocated {
            changed |= self.open(allocated.since, allocated.part, seen, at);
            if let Some(last) = self.list.last_mut() {
                last.shown = true;
            }
            seen = at.now;
        }
        for held in &all_held {
            if self.doubts(Some(held.since)) {
                doubt = Doubt { on_node: true, part: doubt.part.or(Some(held.part)), ..doubt };
                continue;
            }
            // The part that the API shows has precedence.
            changed |= self.open(Some(held.since), None, seen, at);
            if let Some(last) = self.list.last_mut() {
                last.on_node = true;
                if last.part.is_none() {
                    last.part = Some(held.part);
                    changed = true;
                }
            }
            seen = at.now;
        }
        self.doubt = (doubt.shown || doubt.on_node).then_some(doubt);
        if self.list.last().is_some_and(|last| last.open) {
            // Another observation shows which use it is.
            self.resolve();
        }
        for Released { taken, until } in &sight.released {
            if let Some(taken) = self.believed(taken).filter(|taken| taken.since <= *until) {
                changed |= self.release(&Released { taken, until: *until }, at);
            }
        }
        for u in self.list.iter_mut().filter(|u| u.open && !u.shown && !u.on_node) {
            u.open = false;
            changed = true;
        }
        changed
    }

    /// Makes the last use an open one, and adds a new use if necessary. `seen` is the look up to which the
    /// last use is known.
    fn open(&mut self, since: Option<i64>, part: Option<MicroGpus>, seen: i64, at: Moment) -> bool {
        // A time in the future says nothing.
        let since = since.filter(|since| *since <= at.now);
        let mut start = since.unwrap_or(at.now);
        let mut changed = false;
        if let Some(last) = self.list.last_mut() {
            let end = last.end(seen);
            if last.open {
                // The devices may have been taken back and given again between two looks.
                let other_part = part.is_some() && last.part.is_some() && part != last.part;
                let later = since.is_some_and(|since| since > end);
                if !other_part && !later {
                    if last.part.is_none() && part.is_some() {
                        last.part = part;
                        changed = true;
                    }
                    return changed;
                }
                last.let_go(at.before);
                last.open = false;
            }
            start = start.max(end);
        }
        self.list.push(Use::begin(start.max(at.watermark), part));
        true
    }

    /// Counts a release. Returns true if it says anything new.
    fn release(&mut self, release: &Released, at: Moment) -> bool {
        let Released { taken, until } = *release;
        // The node's clock may be ahead.
        let until = until.min(at.now);
        let found = self.list.iter().rposition(|u| u.since <= taken.since);
        let found = found.or_else(|| self.list.iter().position(|u| u.since < until));
        if let Some(last) = found.and_then(|found| self.list.get_mut(found))
            // An allocation after a release is another use, whether or not the claim still counts as present.
            && ((last.open && last.released.is_none()) || taken.since <= last.end(at.now))
        {
            let mut changed = false;
            if last.released.is_none_or(|released| released < until) {
                last.released = Some(until);
                changed = true;
            }
            if last.part.is_none() {
                last.part = Some(taken.part);
                changed = true;
            }
            return changed;
        }
        if until <= at.begun || until <= taken.since || until <= at.watermark {
            return false;
        }
        // It lies between the uses before it and those after it: a release may be reported after the next use
        // has begun.
        let (before, after) = self.list.split_at(self.list.partition_point(|u| u.since <= taken.since));
        let since =
            before.iter().map(|u| u.end(at.now)).max().map_or(taken.since, |end| taken.since.max(end));
        let since = since.max(at.watermark);
        let until = after.iter().map(|u| u.since).min().map_or(until, |next| until.min(next));
        let ended =
            Use { released: Some(until.max(since)), open: false, ..Use::begin(since, Some(taken.part)) };
        self.push(ended);
        true
    }

    /// Takes what is shown as the last use.
    fn resolve(&mut self) {
        if let (Some(doubt), Some(last)) = (self.doubt.take(), self.list.last_mut()) {
            last.shown |= doubt.shown;
            last.on_node |= doubt.on_node;
            last.part = last.part.or(doubt.part);
        }
    }

    /// Notes that no view shows a settled use any more that ended at `end`: what is shown nevertheless is
    /// another use.
    pub(super) fn believe(&mut self, end: i64, now: i64) {
        if self.doubt.is_some() && self.list.last().is_some_and(|last| last.end(last.since) == end) {
            self.list.push(Use::begin(now, None));
            self.resolve();
        }
    }

    /// Forgets the settled uses that ended at `end`, if no node lists them.
    pub(super) fn forget_settled(&mut self, end: i64) {
        if !self.listed {
            self.drop_all(|u| u.is_settled() && u.end(u.since) == end);
        }
    }

    /// Forgets the uses without a release that ended at `end`.
    pub(super) fn forget(&mut self, end: i64) {
        self.drop_all(|u| u.is_loose() && u.end(u.since) == end);
    }

    /// Drops uses; the uses after a dropped one begin at its end at the earliest.
    fn drop_all(&mut self, goes: impl Fn(&Use) -> bool) {
        if !self.list.iter().any(&goes) {
            return;
        }
        let mut taken = i64::MIN;
        let charges = self.charges();
        for (mut u, charge) in std::mem::take(&mut self.list).into_iter().zip(charges) {
            if goes(&u) {
                taken = charge.until.unwrap_or(taken);
            } else {
                u.since = u.since.max(taken);
                self.list.push(u);
            }
        }
    }
}
