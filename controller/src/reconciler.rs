//! The reconciler: inputs come in, jobs and reports go out, synchronously.
//!
//! Time is a parameter. Nothing here waits and nothing here talks to the API, so every race can be played
//! through in a test.

mod binding;
mod budgets;
mod claims;
mod clock;
mod compaction;
mod deciding;
mod decision_timeouts;
mod device_classes;
mod double_allocations;
mod elastic;
mod foreign_allocations;
mod gangs;
mod hand_over_from_scheduler;
mod hand_over_to_scheduler;
mod holds;
mod idle_claims;
mod namespaces_and_volumes;
mod no_fit_memory;
mod node_backoff;
mod outcomes;
mod preemption;
mod quotas;
mod reclaimable;
mod relists;
mod reports;
mod reservations;
mod reserved;
mod retention;
mod retention_records;
mod settings;
mod substitutes;
mod tolerated_taint;
mod unbindable;

pub use compaction::{Compacting, plan_compaction};
pub use namespaces_and_volumes::NamespaceOrVolume;
pub use relists::Part;
pub use reservations::Reserving;
pub use settings::Settings;

use crate::metrics::Metrics;
use crate::report::{Regarding, Report, reasons};
use crate::writer::GivesWay;
use crate::writer::object_backoff::Slow;
use crate::writer::{BudgetOutcome, Job, Look, Outcome};
use aliquot_allocator::budget::{Action, Book};
use aliquot_allocator::handover::HandOvers;
use aliquot_allocator::queue::account::Account;
use aliquot_allocator::queue::{Queue, Rank};
use aliquot_allocator::schedule::Matcher;
use aliquot_allocator::snapshot::{Change, ObjectKey, Pod, Snapshot, Sym, TaintRule, Uid};
use aliquot_api::v1alpha1::GpuQuota;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod as ApiPod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::DynamicObject;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

/// A change of objects of one kind.
#[derive(Debug)]
pub enum Seen<T> {
    /// The object is now as given.
    Apply(Box<T>),
    /// The object is gone.
    Delete(Box<T>),
    /// These are all objects of the kind.
    Reset(Vec<T>),
}

/// Something that happened.
#[derive(Debug)]
pub enum Input {
    /// A change of ResourceSlices.
    Slice(Seen<ResourceSlice>),
    /// A step of a fresh list of ResourceSlices.
    Slices(Part<ResourceSlice>),
    /// A change of DeviceClasses.
    Class(Seen<DeviceClass>),
    /// A change of ResourceClaims.
    Claim(Seen<ResourceClaim>),
    /// A step of a fresh list of ResourceClaims.
    Claims(Part<ResourceClaim>),
    /// A change of pods.
    Pod(Seen<ApiPod>),
    /// A step of a fresh list of pods.
    Pods(Part<ApiPod>),
    /// A change of nodes.
    Node(Seen<Node>),
    /// A change of PodGroups, with their API group.
    PodGroup(&'static str, Seen<DynamicObject>),
    /// A change of namespaces or volumes.
    NamespaceOrVolume(NamespaceOrVolume),
    /// A change of DeviceTaintRules: name and rule. The rule is `None` if it selects by something that the
    /// controller does not know.
    TaintRule(Seen<(String, Option<TaintRule>)>),
    /// A change of GpuQuotas.
    Quota(Seen<GpuQuota>),
    /// A change of GpuBudgets.
    Budget(Seen<DynamicObject>),
    /// A change of NodeUsages.
    NodeUsage(Seen<DynamicObject>),
    /// A change of NodeLimits.
    NodeLimits(Seen<DynamicObject>),
    /// The retention records of earlier leaders: which devices ended pods leave to the next.
    RetentionRecords(Vec<ConfigMap>),
    /// The outcome of a job.
    Done(Box<Outcome>),
    /// The moves that an hour allows and the moves that began, as they were recorded before this leadership.
    Moves(Option<Box<ConfigMap>>),
    /// The result of an action of the book of budgets.
    BudgetWritten(Box<BudgetOutcome>),
    /// The result of a look at what schedulers have under way.
    Looked(Box<Look>),
}

/// Something that the reconciler wants done.
#[derive(Debug)]
pub enum Effect {
    /// Do a job.
    Do(Job),
    /// Do an action of the book of budgets.
    WriteBudget(Action),
    /// Send an event.
    Tell(Report),
    /// Look at what schedulers have under way; the look is later than this time.
    Look(Instant),
}

/// A pod whose decision is being written.
#[derive(Debug)]
struct InFlight {
    pools: HashSet<Sym>,
    claims: Vec<(ObjectKey, Uid)>,
}

/// A node that kube-scheduler rejected for a pod after the allocation, so that the devices were given back.
#[derive(Debug, Clone)]
struct GivenBack {
    times: u32,
    until: Instant,
}

/// One piece of work that is done before anything else gets its turn, however many decisions it takes.
#[derive(Debug, Clone, Copy)]
struct Turn {
    began: Instant,
    until: Instant,
}

/// The reconciler.
#[derive(Debug)]
pub struct Reconciler {
    index: Snapshot,
    matcher: Matcher,
    queue: Queue,
    account: Account,
    settings: Settings,
    metrics: Arc<Metrics>,
    synced: HashSet<&'static str>,
    relists: relists::Relists,
    announced: bool,
    effects: Vec<Effect>,
    in_flight: HashMap<ObjectKey, InFlight>,
    /// Pods and claims whose allocations repeatedly could not be written.
    slow: Slow,
    deallocating: HashMap<Uid, &'static str>,
    idle: HashMap<Uid, (ObjectKey, Instant)>,
    foreign: HashMap<Uid, (ObjectKey, HashSet<Sym>)>,
    given_back: HashMap<(Uid, Arc<str>), GivenBack>,
    unbindable: unbindable::Unbindable,
    preemptions: preemption::Preemptions,
    reservations: reservations::Reservations,
    gangs: gangs::Gangs,
    holds: holds::Holds,
    retention_records: retention_records::RetentionRecords,
    compaction: compaction::Compaction,
    late: decision_timeouts::Late,
    verdicts: no_fit_memory::Verdicts,
    /// The current turn, in the machine's own time.
    turn: Option<Turn>,
    first_seen: HashMap<ObjectKey, Instant>,
    told: reports::Told,
    /// Pods that did not fit when they were decided.
    unmet: HashSet<ObjectKey>,
    quotas: quotas::Quotas,
    returns: substitutes::Returns,
    elastic: elastic::Elastic,
    acknowledging: HashMap<Arc<str>, i64>,
    hand_overs: HandOvers,
    looking: Option<hand_over_from_scheduler::Looking>,
    classes_written: Option<Vec<String>>,
    classes_failed: Option<Instant>,
    dirty_pools: HashSet<Sym>,
    book: Book,
    budgets: budgets::Looks,
}

impl Reconciler {
    /// Returns a reconciler that knows nothing yet.
    pub fn new(driver: &str, settings: Settings, metrics: Arc<Metrics>) -> Self {
        Self {
            index: Snapshot::new(driver),
            matcher: Matcher::new(),
            queue: Queue::new(settings.backoff.0, settings.backoff.1),
            account: Account::default(),
            holds: holds::Holds::new(settings.backoff),
            retention_records: retention_records::RetentionRecords::default(),
            compaction: compaction::Compaction::default(),
            settings,
            metrics,
            synced: HashSet::new(),
            relists: relists::Relists::default(),
            announced: false,
            effects: Vec::new(),
            in_flight: HashMap::new(),
            slow: Slow::default(),
            deallocating: HashMap::new(),
            idle: HashMap::new(),
            foreign: HashMap::new(),
            given_back: HashMap::new(),
            unbindable: unbindable::Unbindable::default(),
            preemptions: preemption::Preemptions::default(),
            reservations: reservations::Reservations::default(),
            gangs: gangs::Gangs::default(),
            late: decision_timeouts::Late::default(),
            verdicts: no_fit_memory::Verdicts::default(),
            turn: None,
            first_seen: HashMap::new(),
            told: reports::Told::default(),
            unmet: HashSet::new(),
            quotas: quotas::Quotas::default(),
            returns: substitutes::Returns::default(),
            elastic: elastic::Elastic::default(),
            acknowledging: HashMap::new(),
            hand_overs: HandOvers::default(),
            looking: None,
            classes_written: None,
            classes_failed: None,
            dirty_pools: HashSet::new(),
            book: Book::default(),
            budgets: budgets::Looks::default(),
        }
    }

    /// Returns the snapshot of the cluster.
    pub const fn index(&self) -> &Snapshot {
        &self.index
    }

    /// Takes the effects that are to be carried out now.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Returns the number of writes that have not returned.
    pub fn writes_under_way(&self) -> usize {
        self.in_flight.len()
            + self.deallocating.len()
            + self.holds.writes_under_way()
            + self.elastic.writes_under_way()
    }

    /// Returns true if everything that decisions depend on was listed once, no fresh list is half taken in,
    /// and no look at elastic shares is under way.
    pub fn is_synced(&self) -> bool {
        self.is_listed_whole() && !self.elastic.is_looking()
    }

    /// Returns true if everything was listed once, and no list is half taken in.
    fn is_listed_whole(&self) -> bool {
        self.relists.is_idle() && self.was_listed()
    }

    /// Returns true if everything that decisions depend on was listed once.
    pub(super) fn was_listed(&self) -> bool {
        let optional = [
            ("taintrules", self.settings.taint_rules),
            ("quotas", self.settings.quotas),
            ("budgets", self.settings.budgets),
            ("nodeusages", self.settings.budgets),
            ("nodelimits", self.settings.elastic),
            ("retention_records", self.settings.retention_namespace.is_some()),
        ];
        let needed = ["slices", "classes", "claims", "pods", "nodes"];
        let optional = optional.into_iter().filter_map(|(kind, watched)| watched.then_some(kind));
        let around =
            namespaces_and_volumes::KINDS.into_iter().filter(|_| self.settings.namespaces_and_volumes);
        let groups = self.settings.pod_groups.iter().copied();
        needed.into_iter().chain(optional).chain(around).chain(groups).all(|kind| self.synced.contains(kind))
    }

    /// Takes in an input.
    pub fn handle(&mut self, input: Input, now: Instant) {
        // A change of a pod or claim reports by itself whether it makes room, and a verdict is reused only
        // for pods that request the same. So these changes do not clear the verdicts.
        let is_about_pods = matches!(
            input,
            Input::Pod(_)
                | Input::Pods(_)
                | Input::Claim(_)
                | Input::Claims(_)
                | Input::Done(_)
                | Input::BudgetWritten(_)
        );
        let change = match input {
            Input::Slice(seen) => self.slices(seen),
            Input::Slices(part) => self.list_slices(part),
            Input::Class(seen) => {
                let change = match seen {
                    Seen::Apply(class) => self.index.apply_class(&class),
                    Seen::Delete(class) => {
                        self.index.delete_class(class.metadata.name.as_deref().unwrap_or_default())
                    }
                    Seen::Reset(classes) => {
                        self.synced.insert("classes");
                        self.index.reset_classes(&classes)
                    }
                };
                self.publish_classes(now);
                self.review_holds();
                change
            }
            Input::Claim(seen) => self.claims(seen, now),
            Input::Claims(part) => self.list_claims(part, now),
            Input::Pod(seen) => self.pods(seen, now),
            Input::Pods(part) => self.list_pods(part, now),
            Input::Node(seen) => {
                let change = match seen {
                    Seen::Apply(node) => {
                        self.budget_node(node.metadata.name.as_deref().unwrap_or_default());
                        self.index.apply_node(&node)
                    }
                    Seen::Delete(node) => {
                        let name = node.metadata.name.as_deref().unwrap_or_default();
                        self.budget_node(name);
                        self.index.delete_node(name)
                    }
                    Seen::Reset(nodes) => {
                        self.synced.insert("nodes");
                        self.budget_nodes();
                        self.index.reset_nodes(&nodes)
                    }
                };
                self.acknowledge_hand_overs();
                change
            }
            Input::PodGroup(api, seen) => self.pod_groups(api, seen),
            Input::NamespaceOrVolume(seen) => self.namespace_or_volume(seen),
            Input::TaintRule(seen) => match seen {
                Seen::Apply(rule) => self.index.apply_taint_rule(&rule.0, rule.1),
                Seen::Delete(rule) => self.index.delete_taint_rule(&rule.0),
                Seen::Reset(rules) => {
                    self.synced.insert("taintrules");
                    self.index.reset_taint_rules(rules.into_iter().filter_map(|(_, rule)| rule).collect())
                }
            },
            Input::Quota(seen) => self.quota(seen),
            Input::Budget(seen) => self.budget(seen),
            Input::NodeUsage(seen) => self.node_usage(seen),
            Input::NodeLimits(seen) => self.node_limits(seen),
            Input::RetentionRecords(maps) => {
                self.retention_records_found(&maps);
                Change::Nothing
            }
            Input::Moves(map) => {
                self.moves_found(map.as_deref());
                Change::Nothing
            }
            Input::Done(outcome) => self.done(*outcome, now),
            Input::BudgetWritten(outcome) => self.budget_written(*outcome),
            Input::Looked(look) => {
                self.looked(*look, now);
                Change::Nothing
            }
        };
        if !is_about_pods && change != Change::Nothing {
            self.verdicts.forget();
        }
        self.changed(change, now);
        self.announce(now);
    }

    fn announce(&mut self, now: Instant) {
        if !self.announced && self.is_synced() {
            self.announced = true;
            self.first_look(now);
        }
    }

    fn pods(&mut self, seen: Seen<ApiPod>, now: Instant) -> Change {
        match seen {
            Seen::Apply(pod) => {
                let change = self.index.apply_pod(&pod);
                if let Some(key) = key_of(&pod.metadata) {
                    self.relists.saw_pod(&key);
                    self.unbindable.note(&key, self.index.pod(&key), now);
                    let ends = self.index.pod(&key).filter(|pod| pod.deleting || pod.terminal).cloned();
                    if let Some(pod) = ends {
                        self.note_ended_pod(&pod, now);
                    }
                }
                change
            }
            Seen::Delete(pod) => {
                let Some(key) = key_of(&pod.metadata) else { return Change::Nothing };
                self.unbindable.note(&key, None, now);
                // The deleted object is the pod's last state, which may not have been seen before.
                self.index.apply_pod(&pod);
                if let Some(pod) = self.index.pod(&key).cloned() {
                    self.note_ended_pod(&pod, now);
                }
                self.index.delete_pod(&key)
            }
            Seen::Reset(pods) => {
                self.synced.insert("pods");
                let change = self.index.reset_pods(&pods);
                self.unbindable.note_all(self.index.pods(), now);
                change
            }
        }
    }

    fn slices(&mut self, seen: Seen<ResourceSlice>) -> Change {
        let mut touched = Vec::new();
        let change = match seen {
            Seen::Apply(slice) => {
                self.relists.saw_slice(slice.metadata.name.as_deref().unwrap_or_default());
                touched.push(slice.spec.pool.name.clone());
                self.index.apply_slice(&slice)
            }
            Seen::Delete(slice) => {
                touched.push(slice.spec.pool.name.clone());
                self.index.delete_slice(slice.metadata.name.as_deref().unwrap_or_default())
            }
            Seen::Reset(slices) => {
                self.synced.insert("slices");
                touched.extend(slices.iter().map(|slice| slice.spec.pool.name.clone()));
                self.index.reset_slices(&slices)
            }
        };
        self.dirty_pools.extend(touched.iter().filter_map(|name| self.index.sym(name)));
        self.acknowledge_hand_overs();
        change
    }

    fn claims(&mut self, seen: Seen<ResourceClaim>, now: Instant) -> Change {
        match seen {
            Seen::Apply(claim) => self.claim(&claim, now),
            Seen::Delete(claim) => {
                let Some(key) = key_of(&claim.metadata) else { return Change::Nothing };
                if let Some(known) = self.index.claim(&key).cloned()
                    && let Some(taken) = &known.allocation
                {
                    self.note_lost(&known, taken);
                }
                let change = self.index.delete_claim(&key, claim.metadata.uid.as_deref());
                if let Some(uid) = &claim.metadata.uid {
                    self.claim_gone(uid);
                }
                change
            }
            Seen::Reset(claims) => {
                let first = self.synced.insert("claims");
                if first {
                    let change = self.index.reset_claims(&claims);
                    let keys: Vec<ObjectKey> = self.index.claims().map(|claim| claim.key.clone()).collect();
                    for key in keys {
                        self.watch_claim(&key, now);
                    }
                    return change;
                }
                // The claims are compared one by one, so that changes during a break of the watch are
                // noticed.
                let kept: HashSet<(ObjectKey, &str)> = claims
                    .iter()
                    .filter_map(|claim| Some((key_of(&claim.metadata)?, claim.metadata.uid.as_deref()?)))
                    .collect();
                let gone: Vec<(ObjectKey, Uid)> = self
                    .index
                    .claims()
                    .filter(|claim| !kept.contains(&(claim.key.clone(), &*claim.uid)))
                    .map(|claim| (claim.key.clone(), claim.uid.clone()))
                    .collect();
                for (key, uid) in gone {
                    self.claim_missing(&key, &uid, now);
                }
                for claim in &claims {
                    let change = self.claim(claim, now);
                    self.changed(change, now);
                }
                Change::Room
            }
        }
    }

    fn changed(&mut self, change: Change, now: Instant) {
        let (pods, room) = match change {
            Change::Nothing => return,
            Change::Pods(pods) => (pods, false),
            Change::Room => (Vec::new(), true),
            Change::PodsAndRoom(pods) => (pods, true),
        };
        self.returns.look_again();
        for key in pods {
            self.offer(&key, now);
        }
        if room {
            self.offer_nominated(now);
            self.queue.wake(now);
            self.holds.wake(now);
            self.elastic.look_again();
        }
    }

    /// Puts a pod into the queue if a decision can do something for it.
    fn offer(&mut self, key: &ObjectKey, now: Instant) {
        let Some(pod) = self.index.pod(key) else {
            self.queue.remove(key);
            self.told.forget_pod(key);
            self.unmet.remove(key);
            self.first_seen.remove(key);
            self.end_nomination(key, now);
            self.budgets.forget(key);
            return;
        };
        if !self.wants_decision(pod) {
            self.queue.remove(key);
            if !self.in_flight.contains_key(key) {
                self.first_seen.remove(key);
                self.end_nomination(key, now);
            }
            return;
        }
        self.first_seen.entry(key.clone()).or_insert(now);
        let slowed = self.slow.until(&pod.uid, now);
        self.queue.offer(Rank::new(key.clone(), pod.priority, pod.created), now);
        if let Some(until) = slowed {
            self.queue.hold_back(key, until);
        }
    }

    /// Begins a turn: all its decisions together may take at most twice the time limit of one.
    fn begin_turn(&mut self) {
        let began = self.settings.clock.now();
        self.turn = Some(Turn { began, until: began + self.settings.deadline.saturating_mul(2) });
    }

    /// Returns the time at which a decision that begins now must end.
    fn until(&self) -> Instant {
        let own = self.settings.clock.now() + self.settings.deadline;
        self.turn.map_or(own, |turn| turn.until.min(own))
    }

    fn wants_decision(&self, pod: &Pod) -> bool {
        if pod.terminal || pod.deleting || self.in_flight.contains_key(&pod.key) {
            return false;
        }
        let unallocated = pod.claims.is_empty()
            || pod.claim_keys().any(|claim| self.index.effective_allocation(&claim).is_none());
        match &pod.node {
            // Someone who binds a pod by hand wants its claims allocated too; they are allocated on the pod's
            // node.
            Some(_) => unallocated && !pod.claims.is_empty() && !pod.started,
            None => pod.gated || (unallocated && !pod.claims.is_empty()),
        }
    }
}

fn key_of(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> Option<ObjectKey> {
    Some(ObjectKey::new(meta.namespace.as_deref()?, meta.name.as_deref()?))
}

#[cfg(test)]
mod tests;
