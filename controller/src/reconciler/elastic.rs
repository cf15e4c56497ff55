//! Elastic shares: carries out what [`aliquot_allocator::elastic`] decides, one step at a time for each
//! claim.
//!
//! The state here comes from the API: claims with a wish, companions, and what nodes are told. A claim for
//! which a write is under way is looked at again when the write has returned.

mod state;
mod writes;

pub(super) use state::Elastic;
use state::Told;

use super::{Reconciler, Seen, reasons};
use crate::writer::{Consumers, Job};
use aliquot_allocator::elastic::{self, Companion, Share, Size, Step};
use aliquot_allocator::hold::is_hold;
use aliquot_allocator::quantity::Quantity;
use aliquot_allocator::queue::Rank;
use aliquot_allocator::schedule::Situation;
use aliquot_allocator::snapshot::{
    Allocation, Change, Claim, CompanionOf, Held, Holder, ObjectKey, Owner, Pod, Pool, Snapshot, Uid,
};
use aliquot_api::v1alpha1::node_limits::ShareName;
use aliquot_model::DeviceName;
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause after a failed write, and while a budget or quota is in the way.
const RETRY: Duration = Duration::from_secs(5);
/// The most claims that are looked at in one step; [`STEP`] is the longest time of a step before everything
/// else gets its turn.
pub(super) const MOST: usize = 64;
const STEP: Duration = Duration::from_millis(20);

impl Reconciler {
    /// Takes in a change of NodeLimits: what nodes are told, or what they answer.
    pub(super) fn node_limits(&mut self, seen: Seen<DynamicObject>) -> Change {
        match seen {
            Seen::Apply(object) => {
                if let Some((node, told)) = Told::read(&object) {
                    self.elastic.take_told(&self.index, node, Some(told));
                }
            }
            Seen::Delete(object) => {
                let node = object.metadata.name.as_deref().unwrap_or_default();
                self.elastic.take_told(&self.index, node.into(), None);
            }
            Seen::Reset(objects) => {
                self.synced.insert("nodelimits");
                let read: HashMap<Arc<str>, Told> = objects.iter().filter_map(Told::read).collect();
                let gone: Vec<Arc<str>> =
                    self.elastic.nodes.keys().filter(|node| !read.contains_key(*node)).cloned().collect();
                for node in gone {
                    self.elastic.take_told(&self.index, node, None);
                }
                for (node, told) in read {
                    self.elastic.take_told(&self.index, node, Some(told));
                }
            }
        }
        Change::Nothing
    }

    /// Notes a changed claim if it is elastic, was elastic, or is a companion.
    pub(super) fn note_elastic(&mut self, key: &ObjectKey) {
        let Some(claim) = self.index.claim(key) else { return };
        let elastic = &mut self.elastic;
        if let Some(of) = &claim.companion {
            elastic.keys.insert(claim.uid.clone(), key.clone());
            elastic.companions.entry(of.uid.clone()).or_default().insert(claim.uid.clone(), of.clone());
            elastic.look.insert(of.uid.clone());
        } else if claim.limits.is_some()
            || elastic.parents.contains_key(&claim.uid)
            || elastic.companions.contains_key(&claim.uid)
        {
            elastic.parents.insert(claim.uid.clone(), key.clone());
            elastic.look.insert(claim.uid.clone());
        }
    }

    /// Does the next step for some of the claims that changed or are due; inputs are taken in between, but no
    /// decision is made. Pods are decided when all claims have been looked at that were there when the look
    /// began or that changed since. A claim that only waits for room is left to the next look, so that pods
    /// get their turn however many claims wait.
    pub fn keep_elastic(&mut self, now: Instant, wall: Timestamp) {
        if !self.is_listed_whole() {
            return;
        }
        if !self.elastic.is_looking() {
            self.begin_looking(now);
        }
        let began = Instant::now();
        for done in 0.. {
            let Some(uid) = self.elastic.next_look() else { break };
            // A claim with a write under way is looked at again when the write has returned.
            if !self.elastic.writing.contains(&uid) {
                self.look_at(&uid, now, wall);
            }
            if done + 1 >= MOST || began.elapsed() >= STEP {
                self.elastic.last = Some(uid).filter(|_| !self.elastic.look.is_empty());
                return;
            }
        }
        self.elastic.last = None;
    }

    fn begin_looking(&mut self, now: Instant) {
        let next = std::mem::take(&mut self.elastic.next);
        self.elastic.look.extend(next);
        let due: Vec<Uid> =
            self.elastic.due.iter().filter(|(_, at)| **at <= now).map(|(uid, _)| uid.clone()).collect();
        for uid in due {
            self.elastic.due.remove(&uid);
            self.elastic.look.insert(uid);
        }
        while let Some((rank, _)) = self.elastic.behind.first()
            && !self.queue.is_ahead(rank, now)
        {
            self.elastic.look.extend(self.elastic.behind.pop_first().map(|(_, uid)| uid));
        }
    }

    fn look_at(&mut self, uid: &Uid, now: Instant, wall: Timestamp) {
        let companions: Vec<Claim> = self.companions_of(uid);
        let busy =
            |claim: &Claim| self.deallocating.contains_key(&claim.uid) || self.index.is_assumed(&claim.uid);
        if companions.iter().any(busy) {
            return;
        }
        let of = companions.iter().find_map(|claim| claim.companion.as_ref());
        let key = self.elastic.parents.get(uid).or_else(|| of.map(|of| &of.claim));
        let parent = key.and_then(|key| self.index.claim(key)).filter(|claim| claim.uid == *uid).cloned();
        let Some(parent) = parent else { return self.end_elastic(uid, &companions, now) };
        let Some(allocation) = parent.allocation.clone().filter(|taken| self.index.is_ours(taken)) else {
            self.end_elastic(uid, &companions, now);
            if parent.limits.is_none() && companions.is_empty() {
                self.elastic.parents.remove(uid);
            }
            return;
        };
        let users: Vec<_> =
            parent.reserved_for.iter().filter(|consumer| !is_hold(consumer)).cloned().collect();
        let unshared = companions.iter().find(|c| c.allocation.is_some() && c.reserved_for != users);
        if let Some((companion, of)) = unshared.and_then(|c| Some((c, c.companion.clone()?)))
            && !companion.deleting
        {
            return self.share_companion(of, companion, users);
        }
        if !self.settings.elastic {
            return;
        }
        self.step_shares(&parent, &allocation, &users, &companions, now, wall);
    }

    fn companions_of(&self, uid: &Uid) -> Vec<Claim> {
        let mut keys: Vec<&ObjectKey> = self
            .elastic
            .companions
            .get(uid)
            .into_iter()
            .flat_map(HashMap::keys)
            .filter_map(|uid| self.elastic.keys.get(uid))
            .collect();
        keys.sort_unstable();
        let claims = keys.into_iter().filter_map(|key| self.index.claim(key));
        claims.filter(|claim| claim.companion.as_ref().is_some_and(|of| of.uid == *uid)).cloned().collect()
    }

    /// Ends what the claim has: nodes are told nothing about it any more, and its companions are deallocated
    /// and deleted.
    fn end_elastic(&mut self, uid: &Uid, companions: &[Claim], now: Instant) {
        if let Some(node) = self.elastic.nodes_about(uid) {
            return self
                .say(&node, uid, None, now, |spec| spec.shares.retain(|limit| limit.share.uid != **uid));
        }
        if let Some(held) = companions.iter().find(|companion| companion.allocation.is_some()) {
            return self.release_companion(uid, &held.key.clone(), &held.uid.clone(), now);
        }
        if let Some(made) = companions.iter().find(|companion| !companion.deleting) {
            if let Some(of) = made.companion.clone() {
                self.delete_companion(of, made);
            }
            return;
        }
        if self.elastic.parents.get(uid).is_none_or(|key| self.index.claim(key).is_none_or(|c| c.uid != *uid))
        {
            self.elastic.parents.remove(uid);
            self.elastic.companions.remove(uid);
        }
    }

    fn step_shares(
        &mut self,
        parent: &Claim,
        allocation: &Allocation,
        users: &[ResourceClaimConsumerReference],
        companions: &[Claim],
        now: Instant,
        wall: Timestamp,
    ) {
        let Some(node) =
            allocation.node.clone().filter(|node| self.index.node(node).is_some_and(|n| n.known))
        else {
            return;
        };
        let asked = if users.is_empty() { None } else { self.elastic.wish_of(parent) };
        let wish = match asked {
            None => Some(Arc::default()),
            Some(Ok(wish)) => Some(wish),
            Some(Err(mistake)) => {
                let note = format!("{mistake}. Its shares keep the limits that they have");
                self.tell_claim(parent, true, reasons::ANNOTATION, &note, now);
                None
            }
        };
        let mut rests = true;
        let shares: Vec<&Held> = allocation.held.iter().filter(|held| is_share(&self.index, held)).collect();
        for held in shares {
            let Some(share_id) = held.share.clone() else { continue };
            let given = size_of(&self.index, held);
            let name = ShareName { uid: parent.uid.to_string(), share_id: share_id.to_string() };
            let told = self.elastic.nodes.get(&node);
            let said = told.and_then(|told| told.spec.shares.iter().find(|limit| limit.share == name));
            let limit = said.map_or(given, |said| Size {
                memory: said.memory_bytes,
                cores: u64::from(said.cores_percent),
            });
            let confirmed = told.is_some_and(|told| told.status.confirms(told.generation, &name));
            let own: Vec<&Claim> = companions
                .iter()
                .filter(|claim| claim.companion.as_ref().is_some_and(|of| of.share == share_id))
                .collect();
            let facts: Vec<Companion> =
                own.iter().filter_map(|claim| companion_of(&self.index, claim, held)).collect();
            let pool = self.pool_of(parent, &node, held, now);
            let wish = wish.as_ref().map_or(limit, |wish| wish.of(&held.request, given));
            let step = {
                let (index, pool) = (&self.index, pool.as_ref());
                elastic::step(&Share {
                    given,
                    wish,
                    limit,
                    confirmed,
                    companions: &facts,
                    fits: &|size| pool.is_some_and(|pool| fits(index, pool, held, size)),
                })
            };
            tracing::debug!(claim = %parent.key, share = %share_id, ?step, "elastic");
            let of = CompanionOf { claim: parent.key.clone(), uid: parent.uid.clone(), share: share_id };
            match step {
                Step::Rest => continue,
                Step::AwaitNode => {
                    rests = false;
                    // A node that was told nothing cannot confirm anything.
                    if told.is_none() {
                        return self.say(&node, &parent.uid, None, now, |_| {});
                    }
                }
                Step::AwaitRoom(wanted) => {
                    rests = false;
                    self.elastic.waiting.insert(parent.uid.clone());
                    let note = format!(
                        "its share on {} is to have {wish}, but that does not have {} and {} percent of compute left; \
                         it has {limit} until there is room. Delete other claims that have shares of it, or ask for less",
                        self.index.name(held.device),
                        aliquot_allocator::quantity::Bytes(wanted.memory),
                        wanted.cores,
                    );
                    self.tell_claim(parent, true, reasons::LIMIT_WAITS, &note, now);
                }
                Step::Limit(size) => return self.say_limit(parent, held, &node, name, (given, size), now),
                // A claim that is being deleted gets nothing new.
                Step::Make(_) | Step::Allocate(_) if parent.deleting => continue,
                Step::Make(_) | Step::Allocate(_)
                    if self.is_behind(parent, (given, wish), &facts, now, wall) =>
                {
                    return;
                }
                Step::Make(_) | Step::Allocate(_) => {
                    let held_back = match &step {
                        Step::Make(size) => self.make_companion(of, parent, held, *size, now, wall),
                        Step::Allocate(uid) => own
                            .iter()
                            .find(|claim| claim.uid == *uid)
                            .is_some_and(|claim| self.grow(of, claim, allocation, held, users, (now, wall))),
                        _ => false,
                    };
                    // Room that the share already gained must not lie idle for as long as a budget or quota
                    // is in the way.
                    let sizes =
                        facts.iter().filter(|companion| companion.held).map(|companion| companion.size);
                    let reached = wish.at_most(sizes.fold(given, Size::plus));
                    if held_back && limit != reached {
                        self.say_limit(parent, held, &node, name, (given, reached), now);
                    }
                    return;
                }
                Step::Release(uid) => {
                    if let Some(key) =
                        own.iter().find(|claim| claim.uid == uid).map(|claim| claim.key.clone())
                    {
                        self.release_companion(&parent.uid, &key, &uid, now);
                    }
                    return;
                }
                Step::Delete(uid) => {
                    if let Some(claim) = own.iter().find(|claim| claim.uid == uid && !claim.deleting) {
                        self.delete_companion(of, claim);
                    }
                    return;
                }
            }
        }
        if rests {
            self.elastic.since.remove(&parent.uid);
        }
        if rests && parent.limits.is_none() && companions.is_empty() {
            self.elastic.parents.remove(&parent.uid);
        }
    }

    /// Returns true if a share would grow while a pod is ready that is ahead of it: a pod of higher priority
    /// than the share's pods, or of the same priority and older than the wish. The share is looked at again
    /// once there is no such pod.
    fn is_behind(
        &mut self,
        parent: &Claim,
        (given, wish): (Size, Size),
        companions: &[Companion],
        now: Instant,
        wall: Timestamp,
    ) -> bool {
        let held = companions.iter().filter(|companion| companion.held);
        let has = held.fold(given, |sum, companion| sum.plus(companion.size));
        // A share that an exchange makes smaller does not grow, and its place goes to nobody else.
        if wish.beyond(has) == Size::ZERO {
            return false;
        }
        let since = *self.elastic.since.entry(parent.uid.clone()).or_insert_with(|| wall.as_second());
        let priority =
            self.index.pods_of_claim(&parent.key).map(|pod| pod.priority).max().unwrap_or_default();
        let rank = Rank::new(parent.key.clone(), priority, since);
        let behind = self.queue.is_ahead(&rank, now);
        if behind {
            self.elastic.behind.insert((rank, parent.uid.clone()));
        }
        behind
    }

    /// Returns the pool of a share as a decision for its pods would see it; `None` if the controller may not
    /// allocate from it.
    fn pool_of(&self, parent: &Claim, node: &Arc<str>, held: &Held, now: Instant) -> Option<Pool> {
        let entry = self.index.pool(held.pool).filter(|pool| pool.stopped.is_none())?;
        let layout = entry.layout.as_ref()?;
        let device = layout.devices.get(layout.position(held.device)? as usize)?;
        let held_taint = aliquot_model::names::held_taint(self.index.driver());
        let tainted = self.index.taints(device).iter().any(|taint| *taint.key == *held_taint);
        if device.owner != Owner::Controller || tainted {
            return None;
        }
        let user = self.index.pods_of_claim(&parent.key).next().cloned();
        let pod = user.unwrap_or_else(|| Pod::in_place_of(parent));
        let Situation { stages, .. } = self.situation(&pod, now);
        let staged = stages.get(node).and_then(|stage| stage.pools().find(|pool| pool.name == held.pool));
        Some(staged.unwrap_or(entry).without_slices())
    }
}

/// Returns true if an allocation result is a share that is used for work.
fn is_share(index: &Snapshot, held: &Held) -> bool {
    !held.admin
        && held.share.is_some()
        && DeviceName::parse(index.name(held.device)).is_some_and(|name| name.kind().limited())
}

/// Returns the capacity that an allocation result consumes.
fn size_of(index: &Snapshot, held: &Held) -> Size {
    let of = |name: &str| {
        let name = index.find_qualified(name)?;
        held.consumed.iter().find(|(known, _)| *known == name)?.1.to_u64()
    };
    Size { memory: of("memory").unwrap_or_default(), cores: of("cores").unwrap_or_default() }
}

/// Returns a companion as the decision sees it. A companion that is being deleted, or holds something else,
/// has size zero.
fn companion_of(index: &Snapshot, claim: &Claim, share: &Held) -> Option<Companion> {
    let (size, held) = match &claim.allocation {
        Some(allocation) => {
            let same = |held: &&Held| held.pool == share.pool && held.device == share.device;
            let size = match allocation.held.as_slice() {
                [held] if same(&held) && !claim.deleting => size_of(index, held),
                _ => Size::ZERO,
            };
            (size, true)
        }
        // It disappears by itself.
        None if claim.deleting => return None,
        None => (writes::asked(claim), false),
    };
    Some(Companion { uid: claim.uid.clone(), size, held })
}

/// Returns true if a device has this much capacity left.
fn fits(index: &Snapshot, pool: &Pool, share: &Held, size: Size) -> bool {
    let amounts = [("memory", size.memory), ("cores", size.cores)];
    let mut consumed: Vec<_> = amounts
        .into_iter()
        .filter_map(|(name, amount)| Some((index.find_qualified(name)?, Quantity::from_u64(amount))))
        .collect();
    consumed.sort_unstable_by_key(|(name, _)| *name);
    let holder = Holder {
        claim: "".into(),
        device: share.device,
        admin: false,
        share: Some("".into()),
        consumed: consumed.into(),
        time_slice: None,
    };
    let mut copy = pool.without_slices();
    index.count_in(&mut copy, &holder);
    !index.is_given_twice_in(&copy)
}
