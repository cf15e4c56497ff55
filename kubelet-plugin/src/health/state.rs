//! The health of the node's GPUs: what is the matter with each, since when, and what ends it. Pure.
//!
//! Errors come as events, everything else with a look at the hardware. What only a reset ends ([`Cause::lasts`]) is
//! kept until there is evidence of one: another boot, another load of the kernel module, a GPU that was lost and
//! answers, a driver that wanted a recovery and does not any more. The table stands in `docs/health.md`.

use super::cause::Cause;
use super::xid::{Verdict, Xids};
use aliquot_model::layout::{Taint, TaintEffect};
use aliquot_model::{GpuInfo, GpuUuid, LiveMig};
use aliquot_nvml::{EventKind, GpuEvent, GpuHealth, Inventory, Recovery, Unreadable};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How long after its last occurrence an informational error is told.
pub const INFORMATIONAL: SignedDuration = SignedDuration::from_mins(10);

/// A cause as it was noted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    /// First time.
    pub since: Timestamp,
    /// Latest time, for events.
    pub again: Timestamp,
    /// What there is to say beside the cause itself.
    #[serde(default)]
    pub detail: String,
}

/// What was last read of a GPU: it is published from it while it cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastRead {
    /// Facts.
    pub info: GpuInfo,
    /// Instances.
    pub live: Vec<LiveMig>,
}

/// The driver's volatile count of memory errors that could not be corrected: it begins anew when the driver starts the GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errors {
    /// At the last look.
    pub counted: u64,
    /// Those of them that an administrator has looked at.
    pub acknowledged: u64,
}

/// One GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OfGpu {
    /// What is the matter.
    pub causes: BTreeMap<Cause, Noted>,
    /// Whether the driver wanted something done since the last reset.
    pub needed_recovery: bool,
    /// How the count of memory errors that could not be corrected stands.
    pub errors: Errors,
    /// Until when an administrator has looked at its errors.
    pub acknowledged: Option<Timestamp>,
    /// What it was when it could be read.
    pub last: Option<LastRead>,
    /// Whether it is there and could not be read at the last look.
    pub absent: bool,
}

impl OfGpu {
    /// Whether anything is known of it.
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

    /// The GPU was reset.
    fn reset(&mut self) {
        self.causes.retain(|cause, _| !cause.lasts());
        self.needed_recovery = false;
        self.errors = Errors::default();
    }

    /// The kernel module was loaded anew. What another driver told of the GPU, this one may never tell.
    fn loaded_anew(&mut self) {
        self.reset();
        self.causes.retain(|cause, _| {
            !matches!(cause, Cause::Recovery(_) | Cause::RowRemapPending | Cause::RowRemapFailure)
        });
    }

    /// What the driver counts. A smaller count than before is a new one, so what was counted is over; an error that was
    /// only told as an event is in none.
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

    /// What the GPU says of itself.
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

/// A look at the hardware.
#[derive(Debug)]
pub struct Look<'a> {
    /// What was found, or why the driver as a whole does not answer.
    pub inventory: Result<&'a Inventory, &'a str>,
    /// What the GPUs say of their health.
    pub said: &'a BTreeMap<GpuUuid, GpuHealth>,
    /// GPUs whose errors are not listened for.
    pub unheard: &'a BTreeSet<GpuUuid>,
    /// Which load of the kernel module it is, as far as that can be told.
    pub module: Option<u64>,
    /// Whether a GPU that is said to be lost is lost: not where all of them are and the library may be the reason.
    pub lost_is_lost: bool,
    /// When.
    pub now: Timestamp,
}

/// The health of all GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health {
    /// By identity; also of those that are not there any more.
    pub gpus: BTreeMap<GpuUuid, OfGpu>,
    /// Which load of the kernel module was seen last.
    pub module: Option<u64>,
}

/// A taint of a GPU and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// Why.
    pub cause: Cause,
    /// Since when.
    pub since: Timestamp,
    /// What there is to say beside the cause.
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

    /// Clears the errors of a GPU up to a time that an administrator has looked at, which counts once: what comes later
    /// counts again. Returns what was cleared ([`Cause::can_be_acknowledged`]).
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

    /// Notes which GPUs do not answer now, by identity or index, and to what.
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

    /// Notes what a look at the hardware showed.
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
        // After a restart without the driver there is nothing to be read of a GPU, and all the same what was counted and
        // acknowledged.
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

    /// The GPUs that are there and cannot be read, as far as it is known what they are.
    pub fn absent(&self) -> impl Iterator<Item = &LastRead> {
        self.gpus.values().filter(|of_gpu| of_gpu.absent).filter_map(|of_gpu| of_gpu.last.as_ref())
    }

    /// The taints of a GPU, at most one of a key: the one that does most, and of those the oldest, so that further
    /// errors change nothing.
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

    /// Why a GPU is not to be used, for pods that use it.
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

/// The entry of a GPU among those that cannot be read: by its identity, or by its place where it does not tell.
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
