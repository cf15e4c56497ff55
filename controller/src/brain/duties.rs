//! What has to be done besides deciding: claims that nobody uses, devices given out twice,
//! allocations by others, hand-overs, and the list of classes.

use super::{Core, Effect, GivenBack, Regarding, Report, key_of, reasons};
use crate::act::{Consumers, Job};
use crate::decide::overlap;
use crate::index::{Allocation, Change, Claim, ObjectKey, Sym, Taint, Uid, tolerated};
use k8s_openapi::api::resource::v1::{DeviceToleration, ResourceClaim};
use k8s_openapi::jiff::Timestamp;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Failed attempts to publish the classes are repeated after this long.
const CLASSES_RETRY: Duration = Duration::from_secs(10);
/// What is remembered of nodes that were given back, at most so long after they may be used again.
const GIVEN_BACK_MEMORY: Duration = Duration::from_secs(600);

impl Core {
    /// A claim as the API has it.
    pub(super) fn claim(&mut self, claim: &ResourceClaim, now: Instant) -> Change {
        let Some(key) = key_of(&claim.metadata) else { return Change::Nothing };
        let before = self.index.effective_allocation(&key).cloned();
        let observed_before = self.index.claim(&key).map(|known| known.allocation.is_some());
        let change = self.index.apply_claim(claim);
        if matches!(change, Change::Nothing) && before == self.index.effective_allocation(&key).cloned() {
            self.watch_claim(&key, now);
            return change;
        }
        let after = self.index.effective_allocation(&key).cloned();
        if let Some(known) = self.index.claim(&key).cloned() {
            let appeared = observed_before == Some(false) || (observed_before.is_none() && self.was_listed());
            if let (true, Some(allocation)) = (appeared, &known.allocation)
                && !allocation.by_us
            {
                self.judge_foreign(&known, allocation);
            }
            if let (true, Some(allocation)) = (appeared, &known.allocation) {
                self.tell_substituted(&known, allocation);
            }
            if after.is_none() {
                self.claim_gone_foreign(&known.uid);
            }
            if let (Some(true), Some(taken), None) = (observed_before, &before, &after) {
                self.note_given_back(&known, taken, now);
                self.note_lost(&known, taken);
            }
        }
        for allocation in before.iter().chain(&after) {
            self.dirty_pools.extend(allocation.pools());
        }
        self.watch_claim(&key, now);
        change
    }

    /// Notes since when a claim of ours has no consumer.
    pub(super) fn watch_claim(&mut self, key: &ObjectKey, now: Instant) {
        self.holds.note(key);
        self.note_elastic(key);
        let Some(claim) = self.index.claim(key) else { return };
        // What a hold claim keeps needs no word of ours any more, also before the answer to the write that made it.
        if let Some(bequest) = &claim.bequest {
            self.holds.endings.remove(bequest.claim_uid.as_str());
        }
        let idle = claim.reserved_for.is_empty()
            && claim.companion.is_none()
            && claim.allocation.as_ref().is_some_and(|allocation| self.index.is_ours(allocation));
        let uid = claim.uid.clone();
        if idle {
            self.idle.entry(uid).or_insert_with(|| (key.clone(), now));
        } else {
            self.idle.remove(&uid);
        }
    }

    /// Drops what is kept for a claim.
    pub(super) fn claim_gone(&mut self, uid: &str) {
        self.idle.remove(uid);
        self.elastic.gone(uid);
        self.hold_gone(uid);
        self.claim_gone_foreign(uid);
    }

    /// kube-scheduler took the only claim of a pod that still waits back: it did not like the node.
    fn note_given_back(&mut self, claim: &Claim, taken: &Allocation, now: Instant) {
        let Some(node) = taken.node.clone().filter(|_| taken.by_us) else { return };
        if self.deallocating.contains_key(&claim.uid) {
            return;
        }
        let pods: Vec<_> = self
            .index
            .pods_of_claim(&claim.key)
            .filter(|pod| pod.is_pending() && !pod.gated)
            .map(|pod| pod.uid.clone())
            .collect();
        for pod in pods {
            self.give_back(&pod, &node, now);
        }
    }

    /// Notes that a pod could not be bound to a node.
    pub(super) fn give_back(&mut self, pod: &Uid, node: &Arc<str>, now: Instant) {
        let key = (pod.clone(), node.clone());
        let entry = self.given_back.entry(key).or_insert(GivenBack { times: 0, until: now });
        entry.times = entry.times.saturating_add(1);
        let doubled = 1u32.checked_shl(entry.times.saturating_sub(1).min(10)).unwrap_or(1024);
        entry.until = now + self.settings.left_out.saturating_mul(doubled);
    }

    /// An allocation of what is ours to give, by somebody else: the pool stops until it is gone.
    fn judge_foreign(&mut self, claim: &Claim, allocation: &Allocation) {
        let mut pools = HashSet::new();
        for held in allocation.held.iter().filter(|held| !held.admin) {
            if self.index.is_ours_to_give(held) {
                pools.insert(held.pool);
            }
        }
        if pools.is_empty() {
            return;
        }
        for pool in &pools {
            let name = self.index.name(*pool).to_owned();
            let note = format!(
                "claim {} was given devices of pool {name} by somebody else, although they carry the taint {}; \
                 nothing is allocated from the pool until the claim is deleted or deallocated. Find out who writes \
                 claim allocations beside the controller",
                claim.key,
                self.index.controller_taint(),
            );
            tracing::error!(claim = %claim.key, pool = name, "foreign allocation: the pool is stopped");
            let stop = format!("claim {} was allocated by somebody else", claim.key);
            self.index.stop_pool(*pool, Some(stop));
            if let Some(node) = self.index.pool(*pool).and_then(|pool| pool.node.clone()) {
                self.tell(Report {
                    regarding: Regarding::Node(node),
                    warning: true,
                    reason: reasons::FOREIGN,
                    note: note.clone(),
                });
            }
            self.tell(Report {
                regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
                warning: true,
                reason: reasons::FOREIGN,
                note,
            });
        }
        self.foreign.insert(claim.uid.clone(), (claim.key.clone(), pools));
        self.count_stopped();
    }

    fn claim_gone_foreign(&mut self, uid: &str) {
        let Some((claim, pools)) = self.foreign.remove(uid) else { return };
        for pool in pools {
            let still = self.foreign.values().find(|(_, others)| others.contains(&pool));
            let reason = still.map(|(claim, _)| format!("claim {claim} was allocated by somebody else"));
            if reason.is_none() {
                tracing::info!(%claim, pool = self.index.name(pool), "the pool goes on");
            }
            self.index.stop_pool(pool, reason);
        }
        self.count_stopped();
    }

    fn count_stopped(&self) {
        let stopped: HashSet<&Sym> = self.foreign.values().flat_map(|(_, pools)| pools).collect();
        self.metrics.stopped_pools.set(i64::try_from(stopped.len()).unwrap_or(i64::MAX));
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Instant, wall: Timestamp) {
        if !self.is_synced() {
            return;
        }
        self.begin_turn();
        self.late.tidy(now);
        self.resolve_overlaps();
        self.acknowledge_hand_overs();
        self.keep_hand_overs(now);
        let due: Vec<ObjectKey> = self
            .idle
            .values()
            .filter(|(_, since)| now.saturating_duration_since(*since) >= self.settings.idle)
            .map(|(key, _)| key.clone())
            .collect();
        for key in due {
            if let Some(claim) = self.index.claim(&key).cloned()
                && !self.deallocating.contains_key(&claim.uid)
            {
                self.tell(Report {
                    regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
                    warning: false,
                    reason: reasons::IDLE,
                    note: format!(
                        "no pod has used this claim for {:?}, so its devices are free again; it is allocated anew \
                         when a pod needs it",
                        self.settings.idle
                    ),
                });
                self.deallocate(&key, Consumers::Nobody, "idle");
            }
        }
        self.tidy_lost(now);
        self.tidy_wills();
        self.release_stranded(now);
        self.write_quotas(now);
        self.look_back(now);
        self.tidy_preemptions(now);
        self.compact(now, wall.as_second());
        self.given_back.retain(|_, given| now < given.until + GIVEN_BACK_MEMORY);
        if self.classes_failed.is_some_and(|at| now.saturating_duration_since(at) >= CLASSES_RETRY) {
            self.publish_classes(now);
        }
        let (ready, delayed, parked) = self.queue.lengths();
        self.metrics.queue(ready, delayed, parked);
        self.metrics.objects(&self.index.sizes());
        self.metrics.selector_evaluations.set(i64::try_from(self.matcher.evaluations()).unwrap_or(i64::MAX));
        self.metrics.selector_cache.set(i64::try_from(self.matcher.selectors().bytes()).unwrap_or(i64::MAX));
    }

    /// When there is something to do by itself.
    pub fn next_due(&self) -> Option<Instant> {
        let idle = self
            .idle
            .iter()
            .filter(|(uid, _)| !self.deallocating.contains_key(*uid))
            .map(|(_, (_, since))| *since + self.settings.idle)
            .min();
        let classes = self.classes_failed.map(|at| at + CLASSES_RETRY);
        let stranded = self.stranded.next(self.settings.idle);
        let look = self.hand_overs.next_look(self.settings.scheduler_settle);
        [idle, classes, stranded, look, self.queue.next(), self.holds.next()].into_iter().flatten().min()
    }

    /// Takes back what was given out twice, and says so.
    fn resolve_overlaps(&mut self) {
        for pool in std::mem::take(&mut self.dirty_pools) {
            self.move_off_held_hardware(pool);
            let Some(entry) = self.index.pool(pool) else { continue };
            let conflicts = self.index.conflicts(entry);
            if conflicts.is_empty() {
                continue;
            }
            let losers = overlap::losers(&self.index, entry, &conflicts);
            let name = self.index.name(pool).to_owned();
            for loser in losers {
                if self.deallocating.contains_key(&loser.uid) || self.index.is_assumed(&loser.uid) {
                    // A write is under way; its answer makes the pool dirty again.
                    continue;
                }
                self.metrics.overlaps.inc();
                let running = self.index.pods_of_claim(&loser.key).any(|pod| pod.started);
                let fate = if running {
                    "its pod runs, so it is left alone: delete the pod"
                } else {
                    "it is the younger one, so it is taken back and decided anew"
                };
                let note = format!(
                    "devices of pool {name} that claim {} has are given to another claim as well; {fate}",
                    loser.key
                );
                tracing::error!(claim = %loser.key, pool = name, running, "overlapping allocations");
                self.tell(Report {
                    regarding: Regarding::Claim(loser.key.clone(), loser.uid.clone()),
                    warning: true,
                    reason: reasons::OVERLAP,
                    note,
                });
                if !running {
                    self.deallocate(&loser.key, Consumers::Anybody, "overlap");
                }
            }
        }
    }

    /// Takes back what was given out just before the node said that the hardware is held for a claim that
    /// is gone: prepare refuses it for as long as that lasts. A share may have been prepared beside the
    /// one that is held, so shares stay. What a hold claim has is never prepared, and it may be its own ended
    /// pod's claim that is gone, so it stays too.
    fn move_off_held_hardware(&mut self, pool: Sym) {
        let held_key = aliquot_model::names::held_taint(self.index.driver());
        let Some(entry) = self.index.pool(pool) else { return };
        let Some(layout) = &entry.layout else { return };
        let stuck: HashSet<Uid> = entry
            .holders
            .iter()
            .filter(|holder| !holder.admin && holder.share.is_none())
            .filter(|holder| {
                let device = layout.position(holder.device).and_then(|at| layout.devices.get(at as usize));
                device.is_some_and(|d| self.index.taints(d).iter().any(|taint| *taint.key == *held_key))
            })
            .map(|holder| holder.claim.clone())
            .collect();
        if stuck.is_empty() {
            return;
        }
        let name = self.index.name(pool).to_owned();
        let claims: Vec<Claim> = self
            .index
            .claims()
            .filter(|claim| stuck.contains(&claim.uid) && !self.deallocating.contains_key(&claim.uid))
            .filter(|claim| claim.bequest.is_none())
            .filter(|claim| {
                claim.allocation.as_ref().is_some_and(|allocation| self.index.is_ours(allocation))
            })
            .filter(|claim| !self.index.pods_of_claim(&claim.key).any(|pod| pod.started))
            .cloned()
            .collect();
        for claim in claims {
            self.tell(Report {
                regarding: Regarding::Claim(claim.key.clone(), claim.uid.clone()),
                warning: true,
                reason: reasons::HELD,
                note: format!(
                    "devices of pool {name} that the claim has are still held for a claim that is gone; it is taken \
                     back and decided anew"
                ),
            });
            self.deallocate(&claim.key, Consumers::Anybody, "held");
        }
    }

    /// Answers every hand-over for whose pool no write is under way.
    pub(super) fn acknowledge_hand_overs(&mut self) {
        if !self.is_synced() {
            return;
        }
        let busy: HashSet<Sym> =
            self.in_flight.values().flat_map(|flight| flight.pools.iter().copied()).collect();
        let due: Vec<(Arc<str>, i64)> = self
            .index
            .pools()
            .filter(|pool| !busy.contains(&pool.name))
            .filter_map(|pool| {
                let layout = pool.layout.as_ref().filter(|layout| layout.owners.hand_over)?;
                // A generation of which a part is still ours to give is not handed over.
                if layout.owners.controller {
                    return None;
                }
                let node = pool.node.clone()?;
                let done = self.index.node(&node).and_then(|node| node.acknowledged.clone());
                (done.as_deref() != Some(&*layout.generation.to_string()))
                    .then_some((node, layout.generation))
            })
            .collect();
        for (node, generation) in due {
            if self.acknowledging.get(&node) == Some(&generation) {
                continue;
            }
            tracing::info!(%node, generation, "acknowledging the hand-over");
            self.acknowledging.insert(node.clone(), generation);
            self.effects.push(Effect::Do(Job::Acknowledge { node, generation }));
        }
    }

    /// Lists the classes that can select our devices for the policy on tolerations.
    pub(super) fn publish_classes(&mut self, _now: Instant) {
        if !self.is_synced() {
            return;
        }
        let driver = self.index.driver().to_owned();
        let mut names: Vec<String> = self
            .index
            .classes()
            .filter(|class| self.matcher.may_select(&driver, class))
            .map(|class| class.name.to_string())
            .collect();
        names.sort();
        if self.classes_written.as_ref() != Some(&names) {
            self.classes_failed = None;
            self.classes_written = Some(names.clone());
            self.effects.push(Effect::Do(Job::Classes { names }));
        }
    }

    /// After the first lists: what was left over, and what should not be.
    pub(super) fn first_look(&mut self, now: Instant) {
        tracing::info!(sizes = ?self.index.sizes(), "in the picture");
        self.publish_classes(now);
        self.acknowledge_hand_overs();
        let ended: Vec<_> = self.index.pods().filter(|pod| pod.deleting || pod.terminal).cloned().collect();
        for pod in ended {
            self.note_ending(&pod, now);
        }
        self.open_wills();
        self.dirty_pools.extend(self.index.pools().map(|pool| pool.name).collect::<Vec<_>>());
        // Whose devices they are was not known before the slices were.
        let claims: Vec<ObjectKey> = self.index.claims().map(|claim| claim.key.clone()).collect();
        for claim in claims {
            self.watch_claim(&claim, now);
        }
        let ours = Taint {
            key: self.index.controller_taint().into(),
            value: "".into(),
            effect: "NoSchedule".into(),
        };
        let driver = self.index.driver().to_owned();
        let suspects: Vec<(ObjectKey, Uid, String)> = self
            .index
            .claims()
            .flat_map(|claim| {
                let requests =
                    claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
                requests.flat_map(move |request| {
                    let exact = request.exactly.iter().map(|e| (&e.device_class_name, &e.tolerations));
                    let subs = request.first_available.iter().flatten();
                    exact
                        .chain(subs.map(|sub| (&sub.device_class_name, &sub.tolerations)))
                        .map(move |(class, tolerations)| (claim, request.name.clone(), class, tolerations))
                })
            })
            .filter(|(_, _, _, tolerations)| {
                tolerations.as_deref().is_some_and(|t: &[DeviceToleration]| tolerated(&ours, t))
            })
            .filter(|(_, _, class, _)| {
                self.index.class(class).is_none_or(|class| self.matcher.may_select(&driver, class))
            })
            .map(|(claim, request, _, _)| (claim.key.clone(), claim.uid.clone(), request))
            .collect();
        for (key, uid, request) in suspects {
            tracing::warn!(claim = %key, request, "tolerates the controller's taint");
            self.tell(Report {
                regarding: Regarding::Claim(key, uid),
                warning: true,
                reason: reasons::TOLERATES,
                note: format!(
                    "request {request} tolerates the taint {}, so kube-scheduler could give it devices that the \
                     controller gives to others; make the claim anew without that toleration, and keep nodes in \
                     scheduler mode until then",
                    ours.key
                ),
            });
        }
    }
}
