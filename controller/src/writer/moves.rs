//! Moves of pods that fill gaps. Each move is recorded before the eviction, in an object that counts the
//! moves of the last hour for whichever controller leads.

use super::{Eviction, Fate, Outcome, Verdict, WriteError, Writer};
use crate::field_manager::creation;
use crate::report::Report;
use aliquot_allocator::compaction::{ALLOWANCE, Allowance};
use aliquot_allocator::snapshot::{ObjectKey, Uid};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use std::sync::Arc;

/// Where moves are recorded, and how many an hour allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovesIn {
    /// Namespace of the controller.
    pub namespace: Arc<str>,
    /// The most moves that may begin within an hour.
    pub per_hour: usize,
}

impl Writer {
    /// Evicts a pod, whose owner recreates it, if the hour allows one more move.
    pub(super) async fn fill_gap(
        &self,
        pod: &ObjectKey,
        uid: &Uid,
        why: &Report,
        within: &MovesIn,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let mut fate = self.evict(pod, uid, true).await?;
        if fate == Fate::Evicted {
            let begin = |moves: &mut Allowance| {
                let now = Timestamp::now().as_second();
                let enough = WriteError::Enough {
                    per_hour: within.per_hour,
                    more_at: moves.more_at(now).unwrap_or(now),
                };
                moves.begin(uid, now).then_some(()).ok_or(enough)
            };
            self.change_moves(within, begin, outcome).await?;
            fate = self.carry_out(pod, uid, why).await?;
            // An eviction that was not answered may still happen, so it counts.
            if matches!(fate, Fate::Refused(_)) {
                let stays = |moves: &mut Allowance| {
                    moves.call_off(uid);
                    Ok(())
                };
                // If that cannot be written, the move counts for an hour.
                if let Err(error) = self.change_moves(within, stays, outcome).await {
                    tracing::warn!(%pod, %error, "a move that was refused counts as one");
                }
            }
        }
        outcome.evictions.push(Eviction { pod: pod.clone(), uid: uid.clone(), fate });
        Ok(())
    }

    /// Records how many moves an hour allows, for those who plan moves.
    pub(super) async fn allow_moves(
        &self,
        within: &MovesIn,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        self.change_moves(within, |_| Ok(()), outcome).await
    }

    /// Changes the record, with the version that was read as a precondition.
    async fn change_moves(
        &self,
        within: &MovesIn,
        change: impl Fn(&mut Allowance) -> Result<(), WriteError>,
        outcome: &mut Outcome,
    ) -> Result<(), WriteError> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &within.namespace);
        let what = || format!("config map {}/{ALLOWANCE}", within.namespace);
        let mut last = String::new();
        for attempt in 0..Self::ATTEMPTS {
            let written = match self.send("get", api.get_opt(ALLOWANCE)).await? {
                Ok(found) => {
                    let mut moves = found.as_ref().and_then(Allowance::read).unwrap_or_default();
                    moves.per_hour = within.per_hour;
                    let changed = change(&mut moves);
                    outcome.moves = Some(moves.clone());
                    changed?;
                    let known = found.is_some();
                    let map = moves.write(found.unwrap_or_default());
                    let map = map
                        .map_err(|error| WriteError::Refused { what: what(), message: error.to_string() })?;
                    let written = async {
                        if known {
                            api.replace(ALLOWANCE, &creation(), &map).await
                        } else {
                            api.create(&creation(), &map).await
                        }
                    };
                    self.send("update", written).await?.map(drop)
                }
                Err(verdict) => Err(verdict),
            };
            match written {
                Ok(()) => return Ok(()),
                Err(Verdict::Never(message)) => return Err(WriteError::Refused { what: what(), message }),
                // Somebody deleted it meanwhile.
                Err(Verdict::NotFound) => last = "it is gone".to_owned(),
                Err(Verdict::Again(message) | Verdict::Unsure(_, message)) => last = message,
            }
            Self::pause(attempt).await;
        }
        Err(WriteError::Exhausted { what: what(), attempts: Self::ATTEMPTS, last })
    }
}
