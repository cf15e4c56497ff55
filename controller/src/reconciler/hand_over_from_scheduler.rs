//! Hand-overs of nodes from kube-scheduler to this driver: checks whether they can end, and reports what they
//! wait for. The decision is made in [`aliquot_allocator::handover`].
//!
//! The result of a look is as long as a list, so it is taken in step by step: first all claims, then the
//! pods, which are judged by them. Other pods are decided in between. A claim that changes meanwhile is
//! judged as it is then, because its devices are in the API by then. No other look begins before all is taken
//! in.

use super::relists::MOST;
use super::{Effect, Reconciler, Regarding, Report, reasons};
use crate::writer::{Job, Look};
use aliquot_allocator::api_time::time;
use aliquot_allocator::handover::{UnderWay, under_way};
use aliquot_allocator::snapshot::{ObjectKey, Uid};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;
use std::vec::IntoIter;

/// The most pods that an event names.
const NAMED: usize = 5;

/// A look that is being taken in.
#[derive(Debug)]
pub(super) struct Looking {
    began: Instant,
    claims: IntoIter<ResourceClaim>,
    /// The pods to judge once all claims are taken in.
    pods: IntoIter<ApiPod>,
    found: UnderWay,
}

impl Reconciler {
    /// Notes which nodes wait for kube-scheduler, and begins a look if one is due.
    pub(super) fn keep_hand_overs(&mut self, now: Instant) {
        let waiting: HashMap<Arc<str>, i64> = self
            .index
            .pools()
            .filter(|pool| pool.hand_over_until.is_some())
            .filter_map(|pool| {
                let layout = pool.layout.as_ref()?;
                let owners = layout.owners;
                let node = pool.node.clone().filter(|_| !owners.controller && !owners.scheduler)?;
                let said = self.index.node(&node)?.scheduler_idle.as_deref();
                (owners.hand_over && said != Some(&*layout.generation.to_string()))
                    .then_some((node, layout.generation))
            })
            .collect();
        self.hand_overs.note(&waiting, now);
        if self.hand_overs.begin_look(now, self.settings.scheduler_settle) {
            self.effects.push(Effect::Look(now));
        }
        self.metrics.hand_overs(self.hand_overs.counts());
    }

    /// Stores the result of a look for [`Self::take_in_look`].
    pub(super) fn looked(&mut self, look: Look, now: Instant) {
        match look.seen {
            Ok(pending) => {
                self.looking = Some(Looking {
                    began: look.began,
                    claims: pending.claims.into_iter(),
                    pods: pending.pods.into_iter(),
                    found: UnderWay::new(),
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot see what kube-scheduler has under way; looking again");
                self.hand_overs.not_looked(now);
            }
        }
    }

    /// Takes in the next objects of a look. After the last of them, acts on the result.
    pub(super) fn take_in_look(&mut self, now: Instant) {
        let Some(mut looking) = self.looking.take() else { return };
        self.settings.pulse.doing("taking in what kube-scheduler has under way");
        let claims = looking.claims.by_ref().take(MOST);
        let mut left = MOST;
        for claim in claims {
            let change = self.claim(&claim, now);
            self.changed(change, now);
            left -= 1;
        }
        for pod in looking.pods.by_ref().take(left) {
            if let (Some(key), Some(uid)) = (super::key_of(&pod.metadata), &pod.metadata.uid)
                && under_way(&self.index, &mut self.matcher, &pod)
            {
                looking.found.insert(Uid::from(uid.as_str()), key);
            }
        }
        if looking.claims.len() + looking.pods.len() > 0 {
            self.looking = Some(looking);
            return;
        }
        let settle = self.settings.scheduler_settle;
        let news = self.hand_overs.looked(looking.began, now, &looking.found, settle);
        for (node, generation) in news.idle {
            tracing::info!(%node, generation, "kube-scheduler has nothing under way for the node");
            self.effects.push(Effect::Do(Job::SchedulerIdle { node, generation }));
        }
        for (node, pods) in news.held_up {
            self.tell_held_up(node, &pods);
        }
    }

    fn tell_held_up(&mut self, node: Arc<str>, pods: &[ObjectKey]) {
        let until = self.index.pools_of_node(&node).filter_map(|pool| pool.hand_over_until).max();
        let names: Vec<String> = pods.iter().take(NAMED).map(ToString::to_string).collect();
        let more = match pods.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let note = format!(
            "the hand-over to the controller waits for pods that kube-scheduler may be giving devices: {}{more}. It \
             ends when they have them or are gone, and at {} at the latest",
            names.join(", "),
            time(until.unwrap_or_default())
        );
        self.tell(Report {
            regarding: Regarding::Node(node),
            warning: false,
            reason: reasons::HAND_OVER_WAITS,
            note,
        });
    }
}
