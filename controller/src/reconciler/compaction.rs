//! Compaction: fills gaps by moving pods. The controller carries out what [`aliquot_allocator::compaction`]
//! finds, one GPU after the other and one pod after the other, and gives up as soon as something differs from
//! the plan.
//!
//! While a GPU is being emptied nothing is placed on it, so that a moved pod does not come back. That ends at
//! once when a pod finds no other place.

use super::reserved::Reserved;
use super::{Effect, Reconciler, Regarding, Report, Settings, reasons};
use crate::metrics::Metrics;
use crate::writer::{Eviction, Job, MovesIn, WriteError};
use aliquot_allocator::compaction::{self, Allowance, Around, Move, Outline, Step, Terms};
use aliquot_allocator::queue::account::GIVES_WAY;
use aliquot_allocator::schedule::{Overlay, Situation, Strategy};
use aliquot_allocator::snapshot::{Holder, ObjectKey, Pod, Snapshot, Sym, Uid};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::jiff::Timestamp;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The settings of compaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compacting {
    /// The fragmentation, in thousandths, above which GPUs are emptied.
    pub threshold: i64,
    /// The limits of one plan.
    pub terms: Terms,
    /// The most moves in an hour, and where they are recorded.
    pub within: MovesIn,
    /// The time between two looks at the whole cluster.
    pub every: Duration,
    /// The time after which a GPU that is still not empty is given up.
    pub patience: Duration,
}

impl Default for Compacting {
    fn default() -> Self {
        Self {
            threshold: 300,
            terms: Terms::default(),
            within: MovesIn { namespace: "default".into(), per_hour: 20 },
            every: Duration::from_secs(30),
            patience: Duration::from_secs(600),
        }
    }
}

/// The time for which compaction has given way to pods that will be tried again later. It is limited, because
/// a pod may be tried again for ever. Only time in which nothing else was to be done counts.
#[derive(Debug, Default)]
struct GivingWay {
    passed: Duration,
    /// The time of the last look, if nothing else was to be done then.
    looked: Option<Instant>,
}

impl GivingWay {
    /// Returns true if compaction need not give way any longer; to be called at each look, with `busy` true
    /// if something else is to be done.
    fn is_over(&mut self, busy: bool, now: Instant) -> bool {
        let looked = std::mem::replace(&mut self.looked, (!busy).then_some(now));
        if let Some(looked) = looked.filter(|_| !busy) {
            self.passed = self.passed.saturating_add(now.saturating_duration_since(looked));
        }
        !busy && self.passed >= GIVES_WAY
    }
}

/// The state of compaction.
#[derive(Debug, Default)]
pub(super) struct Compaction {
    current: Option<Current>,
    /// The recorded moves that count. No pod is moved before they were read.
    pub(super) moves: Option<Allowance>,
    /// When the cluster is looked at next.
    next: Option<Instant>,
    giving_way: GivingWay,
    /// How many times in a row compaction was given up. The wait grows each time, so that pods are not moved
    /// to and fro.
    given_up: u32,
    /// The outcome of the last look that found nothing to do, as it was logged.
    idle: Option<&'static str>,
}

impl Compaction {
    /// Returns true if a GPU is being emptied.
    pub(super) const fn is_under_way(&self) -> bool {
        self.current.is_some()
    }
}

/// A GPU that is being emptied.
#[derive(Debug)]
struct Current {
    step: Step,
    since: Instant,
    left: VecDeque<Move>,
    /// The move whose eviction was requested, until the pod is gone.
    leaving: Option<Move>,
    closed: Vec<(Sym, Holder)>,
}

/// Returns the moves that a new leader would plan for a cluster as it was read. Devices that are kept for
/// others are respected as far as the API shows them.
pub fn plan_compaction(
    index: Snapshot,
    settings: Settings,
    terms: Terms,
    wall: Timestamp,
    expired: &mut dyn FnMut() -> bool,
) -> Outline {
    let now = Instant::now();
    let mut core = Reconciler { index, ..Reconciler::new("", settings, Arc::new(Metrics::new())) };
    core.holds.wall = wall.as_second();
    core.nominate_again(now, wall);
    core.hold_again(now);
    core.outline(terms, expired)
}

impl Reconciler {
    /// Takes in the moves that earlier leaders began.
    pub(super) fn moves_found(&mut self, map: Option<&ConfigMap>) {
        let Some(settings) = &self.settings.compaction else { return };
        let found = map.map(|map| Allowance::read(map).ok_or(()));
        if found == Some(Err(())) {
            tracing::warn!("what is written down about moves cannot be read: nothing counts");
        }
        let mut moves = found.and_then(Result::ok).unwrap_or_default();
        if std::mem::replace(&mut moves.per_hour, settings.within.per_hour) != settings.within.per_hour {
            self.effects.push(Effect::Do(Job::AllowMoves(settings.within.clone())));
        }
        self.compaction.moves = Some(moves);
    }

    /// Takes in the recorded moves, as a write of them returned them.
    pub(super) fn moves_counted(&mut self, moves: Option<Allowance>) {
        if moves.is_some() {
            self.compaction.moves = moves;
        }
    }

    /// Does what is due for compaction.
    pub(super) fn compact(&mut self, now: Instant, wall: i64) {
        let Some(settings) = self.settings.compaction.clone() else { return };
        let left = self.compaction.moves.as_ref().map_or(0, |moves| moves.left(wall));
        self.metrics.moves_left.set(i64::try_from(left).unwrap_or(i64::MAX));
        if self.compaction.current.is_some() {
            self.go_on(&settings, now);
        } else if left > 0 && self.compaction.next.is_none_or(|next| next <= now) {
            // The look is put off only for a moment, not by the whole interval.
            if self.gives_way(now) {
                self.metrics.compaction_look("pods_wait");
                return;
            }
            self.compaction.next = Some(now + settings.every);
            self.begin(&settings, left, now);
        } else {
            self.compaction.giving_way = GivingWay::default();
        }
    }

    /// Returns true if pods come first: pods that are ready, pods whose decision is being written, and for a
    /// limited time pods that are delayed.
    fn gives_way(&mut self, now: Instant) -> bool {
        let (ready, delayed, _) = self.queue.lengths();
        let busy = ready + self.writes_under_way() > 0;
        let is_over = self.compaction.giving_way.is_over(busy, now);
        let gives_way = busy || (delayed > 0 && !is_over);
        if !gives_way {
            self.compaction.giving_way = GivingWay::default();
        }
        gives_way
    }

    /// Chooses a GPU to empty, and begins with it.
    fn begin(&mut self, settings: &Compacting, left: usize, now: Instant) {
        let gaps = compaction::measure(&self.index, &HashMap::new());
        let found = format!("{} % of what is free lies in gaps", gaps.fragmentation() / 10);
        if gaps.fragmentation() <= settings.threshold {
            let above = settings.threshold / 10;
            self.stay_idle("below_threshold", &format!("{found}, and GPUs are emptied only above {above} %"));
            return;
        }
        let (clock, until) = (self.settings.clock.clone(), self.until());
        let terms = Terms { gpus: 1, in_all: settings.terms.in_all.min(left), ..settings.terms };
        let outline = self.outline(terms, &mut || clock.now() >= until);
        let Some(step) = outline.steps.into_iter().next() else {
            let most = terms.per_gpu.min(terms.in_all);
            let why = match self.settings.options.strategy {
                Strategy::BinPack => format!(
                    "{found}, but no GPU can be emptied by moving at most {most} pods; aliquot plan --compact tells \
                     what stands in the way on each"
                ),
                other => format!("pods are placed by {other:?}, which would undo what moving them gains"),
            };
            self.stay_idle("no_gain", &why);
            return;
        };
        self.metrics.compaction_look("begun");
        self.compaction.idle = None;
        let closed = compaction::closed(&mut self.index, (step.pool, step.gpu));
        let names: Vec<String> = step.moves.iter().map(|one| one.pod.to_string()).collect();
        tracing::info!(node = %step.node, gpu = step.gpu, pods = names.join(", "), "emptying a GPU");
        self.tell_node(
            &step,
            format!(
                "{found}: emptying gpu-{} by moving {} pod(s) into the gaps of other GPUs",
                step.gpu,
                names.len()
            ),
        );
        let left = step.moves.iter().cloned().collect();
        self.compaction.current = Some(Current { step, since: now, left, leaving: None, closed });
        self.go_on(settings, now);
    }

    /// Logs why nothing is moved, once for as long as the reason stays the same: an administrator who enabled
    /// compaction and sees no moves looks here first.
    fn stay_idle(&mut self, outcome: &'static str, why: &str) {
        self.metrics.compaction_look(outcome);
        if self.compaction.idle.replace(outcome) != Some(outcome) {
            tracing::info!(why, "no GPU is emptied");
        }
    }

    fn outline(&mut self, terms: Terms, expired: &mut dyn FnMut() -> bool) -> Outline {
        let stay = self.namespaces_that_stay();
        let Self { index, matcher, preemptions, book, returns, holds, settings, .. } = self;
        let keep = |index: &Snapshot, pod: &Pod, situation: &mut Situation| {
            let limits = settings.holds;
            Reserved { index, preemptions, book, returns, holds, limits, reservations: true }
                .keep(pod, situation);
        };
        let around = Around { may_move: &|pod| !stay.contains(&pod.key.namespace), keep: &keep };
        compaction::outline(index, matcher, settings.options, terms, around, expired)
    }

    /// Returns the namespaces whose pods would not get their devices back: those with used-up budgets or
    /// quotas.
    fn namespaces_that_stay(&mut self) -> HashSet<Arc<str>> {
        let movable = self.index.pods().filter(|pod| pod.movable);
        let namespaces: HashSet<Arc<str>> = movable.map(|pod| pod.key.namespace.clone()).collect();
        namespaces.into_iter().filter(|namespace| !self.gets_it_back(namespace)).collect()
    }

    fn go_on(&mut self, settings: &Compacting, now: Instant) {
        let Some(current) = &self.compaction.current else { return };
        if now.saturating_duration_since(current.since) >= settings.patience {
            self.end_compaction("it took too long", now);
            return;
        }
        let leaves = current.leaving.as_ref();
        if leaves.is_some_and(|one| self.index.pod(&one.pod).is_some_and(|pod| pod.uid == one.uid)) {
            return;
        }
        // The pod that replaces the evicted one is placed before the next eviction. A pod that does not fit
        // anyway keeps waiting: it may be meant for the GPU that is being emptied.
        if self.gives_way(now) {
            return;
        }
        let Some(current) = &self.compaction.current else { return };
        let id = (current.step.pool, current.step.gpu);
        let Some(pods) = compaction::pods_on(&self.index, id) else {
            self.end_compaction("somebody on it may not be moved", now);
            return;
        };
        let Some(one) = current.left.front().cloned() else {
            if pods.is_empty() {
                self.finish(now);
            }
            return;
        };
        let planned = current.left.iter().map(|one| &one.pod);
        let as_planned = planned.eq(pods.iter());
        let same = self.index.pod(&one.pod).is_some_and(|pod| pod.uid == one.uid && !pod.deleting);
        if !as_planned || !same {
            self.end_compaction("it is not as it was planned", now);
            return;
        }
        // The gap that was planned for the pod may be kept for another pod by now.
        if !self.fits_in_a_gap(&one.pod, now) {
            self.end_compaction(&format!("there is no room for pod {} elsewhere any more", one.pod), now);
            return;
        }
        if let Some(current) = &mut self.compaction.current {
            current.left.pop_front();
            current.leaving = Some(one.clone());
        }
        let note = format!(
            "evicted so that gpu-{} becomes free as a whole: node {} has room for it ({}), and its owner makes it \
             anew; it allows this by the annotation {}: Allow",
            id.1,
            one.to_node,
            one.to.join(", "),
            aliquot_model::names::COMPACTION
        );
        let regarding = Regarding::Pod(one.pod.clone(), one.uid.clone());
        let why = Report { regarding, warning: false, reason: reasons::MOVED, note };
        let within = settings.within.clone();
        self.effects.push(Effect::Do(Job::Move { pod: one.pod, uid: one.uid, why, within }));
    }

    fn fits_in_a_gap(&mut self, pod: &ObjectKey, now: Instant) -> bool {
        let Some(pod) = self.index.pod(pod).cloned() else { return false };
        let situation = self.situation(&pod, now);
        let until = self.until();
        let clock = &self.settings.clock;
        let mut expired = || clock.now() >= until;
        let (index, options) = (&self.index, self.settings.options);
        compaction::has_room(index, &mut self.matcher, options, &pod, situation, &mut expired)
    }

    fn finish(&mut self, now: Instant) {
        let Some(current) = self.compaction.current.take() else { return };
        // There may be more GPUs to empty.
        self.compaction.next = Some(now);
        self.compaction.given_up = 0;
        self.metrics.compaction("emptied");
        let note =
            format!("gpu-{} is free as a whole: {} pod(s) moved", current.step.gpu, current.step.moves.len());
        self.tell_node(&current.step, note);
        self.queue.wake(now);
    }

    /// Gives up the GPU that is being emptied; returns false if there is none.
    pub(super) fn end_compaction(&mut self, why: &str, now: Instant) -> bool {
        let Some(current) = self.compaction.current.take() else { return false };
        self.compaction.giving_way = GivingWay::default();
        tracing::info!(node = %current.step.node, gpu = current.step.gpu, why, "a GPU is not emptied");
        self.metrics.compaction("given_up");
        self.tell_node(&current.step, format!("gpu-{} is not emptied: {why}", current.step.gpu));
        let every = self.settings.compaction.as_ref().map_or(Duration::ZERO, |settings| settings.every);
        let times = 1u32.checked_shl(self.compaction.given_up.min(7)).unwrap_or(1);
        self.compaction.given_up = self.compaction.given_up.saturating_add(1);
        self.compaction.next = Some(now + every.saturating_mul(times));
        self.queue.wake(now);
        true
    }

    /// Returns the situation of a pod as if no GPU were being emptied; `None` if none is.
    pub(super) fn without_compaction(&self, pod: &Pod, now: Instant) -> Option<Situation> {
        self.compaction.current.as_ref().map(|_| self.beside_compaction(pod, now))
    }

    /// Keeps everything off the GPU that is being emptied.
    pub(super) fn close_compacted(&self, situation: &mut Situation) {
        let Some(current) = &self.compaction.current else { return };
        let node = &current.step.node;
        let stage = situation.stages.entry(node.clone()).or_insert_with(|| Overlay::new(&self.index, node));
        stage.hold(&self.index, &current.closed);
    }

    /// Takes in the result of an eviction.
    pub(super) fn moved_away(
        &mut self,
        pod: &ObjectKey,
        uid: &Uid,
        evictions: Vec<Eviction>,
        error: Option<WriteError>,
        now: Instant,
    ) {
        let leaving = self.compaction.current.as_ref().and_then(|current| current.leaving.as_ref());
        let asked = leaving.is_some_and(|one| one.pod == *pod && one.uid == *uid);
        let refused = self.count_evictions(evictions).or_else(|| error.map(|error| error.to_string()));
        if let (Some(message), true) = (refused, asked) {
            self.end_compaction(&format!("pod {pod} was not evicted: {message}"), now);
        }
    }

    fn tell_node(&mut self, step: &Step, note: String) {
        let regarding = Regarding::Node(step.node.clone());
        self.tell(Report { regarding, warning: false, reason: reasons::COMPACTION, note });
    }
}
