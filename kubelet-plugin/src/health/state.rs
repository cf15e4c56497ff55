//! Keeps the health of the node's GPUs: the causes that are known for each GPU, since when each is known, and
//! what ends it. Pure: it does no I/O.
//!
//! Errors come as events; everything else is found by a look at the hardware. A cause that only a reset ends
//! ([`Cause::lasts`]) is kept until there is evidence of a reset: another boot, another load of the kernel
//! module, a GPU that was lost and answers, or a driver that wanted a recovery and does not want it any more.
//! The table is in `docs/health.md`.

use super::cause::Cause;
use super::xid::{Verdict, Xids};
use aliquot_model::layout::{Taint, TaintEffect};
use aliquot_model::{GpuInfo, GpuUuid, LiveMig};
use aliquot_nvml::{EventKind, GpuEvent, GpuHealth, Inventory, Recovery, Unreadable};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The time for which an informational error is reported after its last occurrence.
pub const INFORMATIONAL: SignedDuration = SignedDuration::from_mins(10);

/// A cause and the times at which it was noted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    /// The first time.
    pub since: Timestamp,
    /// The latest time, for events.
    pub again: Timestamp,
    /// Details beside the cause itself.
    #[serde(default)]
    pub detail: String,
}

/// The facts that were last read of a GPU. The GPU is published from them while it cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastRead {
    /// The facts of the GPU.
    pub info: GpuInfo,
    /// The MIG instances on the GPU.
    pub live: Vec<LiveMig>,
}

/// The driver's volatile count of memory errors that could not be corrected. The count begins anew when the
/// driver starts the GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errors {
    /// The count at the last look.
    pub counted: u64,
    /// The part of the count that an administrator has acknowledged.
    pub acknowledged: u64,
}

/// The health of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OfGpu {
    /// The causes that are known now.
    pub causes: BTreeMap<Cause, Noted>,
    /// True if the driver has wanted a recovery action since the last reset.
    pub needed_recovery: bool,
    /// The count of memory errors that could not be corrected.
    pub errors: Errors,
    /// The time up to which an administrator has acknowledged the GPU's errors.
    pub acknowledged: Option<Timestamp>,
    /// The facts of the GPU from when it could last be read.
    pub last: Option<LastRead>,
    /// True if the GPU is there but could not be read at the last look.
    pub absent: bool,
}

impl OfGpu {
    /// Returns true if anything is known of the GPU.
    pub fn says_something(&self) -> bool {
        *self != Self::default()
    }

    fn note(&mut self, cause: Cause, detail: &str, now: Timestamp) {
        let new = || Noted { since: now, again: now, detail: detail.to_owned() };
        self.causes.entry(cause).or_insert_with(new);
    }

    fn set(&mut self, cause: Cause, there: bool, now: Timestamp) {
        if there {
            self.note(cause, "", now);
        } else {
            self.causes.remove(&cause);
        }
    }

    /// Notes that the GPU was reset.
    fn reset(&mut self) {
        self.causes.retain(|cause, _| !cause.lasts());
        self.needed_recovery = false;
        self.errors = Errors::default();
    }

    /// Notes that the kernel module was loaded anew. The new driver may never report what another driver
    /// reported of the GPU.
    fn loaded_anew(&mut self) {
        self.reset();
        self.causes.retain(|cause, _| {
            !matches!(cause, Cause::Recovery(_) | Cause::RowRemapPending | Cause::RowRemapFailure)
        });
    }

    /// Takes in the driver's count of memory errors. A count smaller than before is a new count, so the
    /// errors counted before are over. An error that was only reported as an event is in no count.
    fn count(&mut self, counted: u64, now: Timestamp) {
        if counted < self.errors.counted {
            self.causes.remove(&Cause::Ecc);
            self.errors = Errors::default();
        }
        if counted > self.errors.acknowledged {
            self.note(Cause::Ecc, "", now);
        }
        if counted > self.errors.counted {
            self.causes.entry(Cause::Ecc).and_modify(|noted| noted.again = now);
        }
        self.errors.counted = counted;
    }

    /// Takes in the health that the GPU reports of itself.
    fn judge(&mut self, said: GpuHealth, now: Timestamp) {
        // What it does not tell now stays as it was told last: an ill GPU may fail to answer.
        if let Some(recovery) = said.recovery {
            let action = match recovery {
                Recovery::Needed(action) => Some(Cause::Recovery(action)),
                Recovery::Nothing => None,
            };
            if action.is_none() && self.needed_recovery {
                self.reset();
            }
            self.needed_recovery |= action.is_some();
            self.causes.retain(|cause, _| !matches!(cause, Cause::Recovery(_)) || Some(*cause) == action);
            if let Some(cause) = action {
                self.note(cause, "", now);
            }
        }
        if let Some(counted) = said.uncorrected_errors {
            self.count(counted, now);
        }
        if let Some(rows) = said.rows {
            self.set(Cause::RowRemapPending, rows.pending && !rows.failed, now);
            self.set(Cause::RowRemapFailure, rows.failed, now);
        }
    }
}

/// The result of a look at the hardware.
#[derive(Debug)]
pub struct Look<'a> {
    /// The inventory that was found, or the reason why the driver as a whole does not answer.
    pub inventory: Result<&'a Inventory, &'a str>,
    /// The health that the GPUs report of themselves.
    pub said: &'a BTreeMap<GpuUuid, GpuHealth>,
    /// The GPUs whose errors are not listened for.
    pub unheard: &'a BTreeSet<GpuUuid>,
    /// The number of the load of the kernel module, if it can be told.
    pub module: Option<u64>,
    /// True if a GPU that is reported as lost counts as lost. It does not where all GPUs are reported as lost
    /// and the library may be the reason.
    pub lost_is_lost: bool,
    /// The time of the look.
    pub now: Timestamp,
}

/// The health of all GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health {
    /// The health by GPU, including GPUs that are not there any more.
    pub gpus: BTreeMap<GpuUuid, OfGpu>,
    /// The load of the kernel module that was seen last.
    pub module: Option<u64>,
}

/// A taint of a GPU and the reason for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// The cause.
    pub cause: Cause,
    /// The time since which the cause is known.
    pub since: Timestamp,
    /// Details beside the cause.
    pub detail: String,
    /// The taint.
    pub taint: Taint,
}

impl Health {
    /// Notes an event if it says something about the GPU's health.
    pub fn event(&mut self, event: &GpuEvent, xids: &Xids, now: Timestamp) {
        let cause = match event.kind {
            EventKind::Xid(number) if xids.verdict(number) != Verdict::Ignore => Cause::Xid(number),
            EventKind::EccDoubleBit => Cause::Ecc,
            _ => return,
        };
        let Some(gpu) = &event.gpu else { return };
        let of_gpu = self.gpus.entry(gpu.clone()).or_default();
        of_gpu.note(cause, "", now);
        of_gpu.causes.entry(cause).and_modify(|noted| noted.again = now);
    }

    /// Clears the errors of a GPU that occurred up to a time that an administrator has acknowledged. Each
    /// acknowledgement counts once: later errors count again. Returns the causes that were cleared
    /// ([`Cause::can_be_acknowledged`]).
    pub fn acknowledge(&mut self, gpu: &GpuUuid, at: Timestamp, now: Timestamp) -> Vec<Cause> {
        let Some(of_gpu) = self.gpus.get_mut(gpu) else { return Vec::new() };
        if of_gpu.acknowledged.is_some_and(|before| before >= at) {
            return Vec::new();
        }
        of_gpu.acknowledged = Some(at);
        let until = at.min(now);
        let is_known = |cause: &Cause, noted: &Noted| cause.can_be_acknowledged() && noted.again <= until;
        let cleared = of_gpu.causes.extract_if(.., |cause, noted| is_known(cause, noted));
        let cleared: Vec<Cause> = cleared.map(|(cause, _)| cause).collect();
        if cleared.contains(&Cause::Ecc) {
            of_gpu.errors.acknowledged = of_gpu.errors.counted;
        }
        cleared
    }

    /// Notes the GPUs that do not answer now, each by UUID or index, with the call that they do not answer.
    pub fn set_stuck(&mut self, stuck: &[(Option<GpuUuid>, Option<u32>, String)], now: Timestamp) {
        let index_of = |of_gpu: &OfGpu| of_gpu.last.as_ref().map(|last| last.info.index);
        for (gpu, ..) in stuck {
            if let Some(gpu) = gpu {
                self.gpus.entry(gpu.clone()).or_default();
            }
        }
        for (uuid, of_gpu) in &mut self.gpus {
            let of_this = |(gpu, index, _): &&(Option<GpuUuid>, Option<u32>, String)| match gpu {
                Some(gpu) => gpu == uuid,
                None => index.is_some() && *index == index_of(of_gpu),
            };
            match stuck.iter().find(of_this) {
                Some((.., what)) => of_gpu.note(Cause::Stuck, what, now),
                None => drop(of_gpu.causes.remove(&Cause::Stuck)),
            }
        }
    }

    /// Takes in the result of a look at the hardware.
    pub fn look(&mut self, look: &Look<'_>, xids: &Xids) {
        let now = look.now;
        match look.inventory {
            Ok(inventory) => self.found(inventory, look),
            Err(why) => {
                for of_gpu in self.gpus.values_mut().filter(|of_gpu| of_gpu.last.is_some()) {
                    of_gpu.absent = true;
                    of_gpu.causes.remove(&Cause::Unreadable);
                    of_gpu.note(Cause::NoDriver, why, now);
                }
            }
        }
        let over = |cause: &Cause, noted: &Noted| {
            matches!(cause, Cause::Xid(_))
                && cause.effect(xids).is_none_or(|effect| effect == TaintEffect::None)
                && now.duration_since(noted.again) >= INFORMATIONAL
        };
        for of_gpu in self.gpus.values_mut() {
            of_gpu.causes.retain(|cause, noted| !over(cause, noted));
        }
        // After a restart without the driver nothing can be read of a GPU, but the errors that were counted
        // and acknowledged are still known; such entries stay.
        self.gpus.retain(|_, of_gpu| of_gpu.says_something());
    }

    fn found(&mut self, inventory: &Inventory, look: &Look<'_>) {
        let now = look.now;
        if let Some(module) = look.module {
            if self.module.is_some_and(|before| before != module) {
                self.gpus.values_mut().for_each(OfGpu::loaded_anew);
            }
            self.module = Some(module);
        }
        for info in &inventory.gpus {
            let of_gpu = self.gpus.entry(info.uuid.clone()).or_default();
            let live = inventory.live_on(&info.uuid).cloned().collect();
            of_gpu.last = Some(LastRead { info: info.clone(), live });
            of_gpu.absent = false;
            if of_gpu.causes.contains_key(&Cause::Lost) {
                of_gpu.reset();
            }
            of_gpu.set(Cause::NoDriver, false, now);
            of_gpu.set(Cause::Unreadable, false, now);
            of_gpu.set(Cause::NoEvents, look.unheard.contains(&info.uuid), now);
            if let Some(said) = look.said.get(&info.uuid) {
                of_gpu.judge(*said, now);
            }
        }
        for (uuid, of_gpu) in &mut self.gpus {
            if inventory.gpu(uuid).is_some() {
                continue;
            }
            of_gpu.causes.remove(&Cause::NoDriver);
            of_gpu.causes.remove(&Cause::NoEvents);
            match unreadable(inventory, uuid, of_gpu) {
                Some(unreadable) if unreadable.error.is_lost() && look.lost_is_lost => {
                    of_gpu.absent = true;
                    of_gpu.causes.remove(&Cause::Unreadable);
                    of_gpu.note(Cause::Lost, &unreadable.error.to_string(), now);
                }
                // That is told by the call itself.
                Some(unreadable) if unreadable.error.is_stuck() => of_gpu.absent = true,
                Some(unreadable) => {
                    of_gpu.absent = true;
                    of_gpu.note(Cause::Unreadable, &unreadable.error.to_string(), now);
                }
                // A library that is opened anew does not list what is off the bus.
                None if of_gpu.causes.contains_key(&Cause::Lost) => of_gpu.absent = true,
                None => {
                    of_gpu.absent = false;
                    of_gpu.last = None;
                    of_gpu.causes.retain(|cause, _| cause.lasts());
                }
            }
        }
    }

    /// Returns the GPUs that are there and cannot be read, for which earlier facts are known.
    pub fn absent(&self) -> impl Iterator<Item = &LastRead> {
        self.gpus.values().filter(|of_gpu| of_gpu.absent).filter_map(|of_gpu| of_gpu.last.as_ref())
    }

    /// Returns the taints of a GPU, at most one for each key. The taint with the strongest effect is chosen,
    /// and of those the oldest, so that further errors change nothing.
    pub fn told(&self, gpu: &GpuUuid, driver: &str, xids: &Xids) -> Vec<Told> {
        let mut told: BTreeMap<String, Told> = BTreeMap::new();
        for (cause, noted) in self.gpus.get(gpu).iter().flat_map(|of_gpu| &of_gpu.causes) {
            let Some(taint) = cause.taint(driver, xids) else { continue };
            let new = Told { cause: *cause, since: noted.since, detail: noted.detail.clone(), taint };
            let rank = |told: &Told| (std::cmp::Reverse(told.taint.effect), told.since);
            match told.get(&new.taint.key) {
                Some(before) if rank(before) <= rank(&new) => {}
                _ => drop(told.insert(new.taint.key.clone(), new)),
            }
        }
        told.into_values().collect()
    }

    /// Returns the reason why a GPU is not to be used, for pods that use it.
    pub fn fault(&self, gpu: &GpuUuid, xids: &Xids) -> Option<String> {
        let causes = &self.gpus.get(gpu)?.causes;
        let effect = |cause: &Cause| cause.effect(xids).filter(|effect| *effect > TaintEffect::None);
        let (cause, noted) = causes
            .iter()
            .filter(|(cause, _)| effect(cause).is_some())
            .max_by_key(|(cause, noted)| (effect(cause), std::cmp::Reverse(noted.since)))?;
        Some(match noted.detail.as_str() {
            "" => format!("{} since {}", cause.text(), noted.since),
            detail => detail.to_owned(),
        })
    }
}

/// Returns the entry of a GPU among those that cannot be read: by UUID, or by index where the entry has no
/// UUID.
fn unreadable<'a>(inventory: &'a Inventory, gpu: &GpuUuid, of_gpu: &OfGpu) -> Option<&'a Unreadable> {
    let index = of_gpu.last.as_ref().map(|last| last.info.index);
    inventory.unreadable.iter().find(|unreadable| match &unreadable.uuid {
        Some(uuid) => uuid == gpu,
        None => Some(unreadable.index) == index,
    })
}

#[cfg(test)]
#[path = "state/tests.rs"]
mod tests;
