//! Compares what a share really uses, as the driver counts it, with what it may use.
//!
//! The limiter runs inside the tenant's processes and can be evaded by a tenant who sets out to
//! (`hook/README.md`); the driver's own figures cannot. Every look compares, for each share, the memory and
//! GPU time of its processes with its quota. A share that exceeds its quota beyond a tolerance for a set
//! number of looks in a row is reported. The measured values are also told to the shares themselves
//! ([`measured`]).
//!
//! This module makes the decision and is pure. [`process_owner`] decides whose a process is; [`task`] reads
//! and acts. Nothing that a tenant can write decides: quotas come from the node's own files, usage from NVML,
//! and the owner of a process from its cgroup. The share's region is only checked for being what it should
//! be, and quoted.

mod evict;
pub mod measured;
pub mod process_owner;
pub mod task;

use aliquot_quota::measured::Identity;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The result IDs of the shares that a group of processes may use: one, or several that cannot be told apart.
pub type Subject = BTreeSet<String>;

/// The tolerances of the audit.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Tolerated percent of the memory quota.
    pub memory_percent: u8,
    /// Tolerated bytes for each process: memory that no call of the driver asks for (lazily loaded code,
    /// local memory).
    pub memory_per_process: u64,
    /// Tolerated percent of the GPU's time.
    pub time_points: u8,
    /// GPU time beyond the quota and `time_points` that may come at once: a kernel cannot be split.
    pub time_burst: Duration,
    /// The number of looks in a row before a share is reported.
    pub looks: u32,
}

/// The largest number of processes whose allowance counts; a tenant could start any number.
const MOST_PROCESSES: u64 = 8;

/// The quota of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quota {
    /// Bytes of GPU memory; 0 is no limit.
    pub memory_bytes: u64,
    /// Percent of the GPU's time; 0 is no limit.
    pub cores_percent: u8,
    /// True if the share may borrow time.
    pub is_soft: bool,
}

impl Quota {
    /// Returns the quota of processes that may use both quotas.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let sum = |a: u64, b: u64| if a == 0 || b == 0 { 0 } else { a.saturating_add(b) };
        let cores = sum(self.cores_percent.into(), other.cores_percent.into());
        Self {
            memory_bytes: sum(self.memory_bytes, other.memory_bytes),
            cores_percent: u8::try_from(cores).ok().filter(|cores| *cores < 100).unwrap_or(0),
            is_soft: self.is_soft || other.is_soft,
        }
    }
}

/// The usage of a process at one look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measured {
    /// The process ID on the host.
    pub pid: u32,
    /// The name of the program.
    pub name: Option<String>,
    /// The UID of the process's pod.
    pub pod: String,
    /// Bytes of GPU memory; `None` where the driver does not count.
    pub memory_bytes: Option<u64>,
    /// Percent of the GPU's time.
    pub percent: u32,
    /// The identity of the process inside its container.
    pub identity: Option<Identity>,
}

/// The usage of a subject at one look.
#[derive(Debug, Clone, PartialEq)]
pub struct Look {
    /// The shares.
    pub subject: Subject,
    /// The quota of the shares.
    pub quota: Quota,
    /// The processes of the shares.
    pub processes: Vec<Measured>,
    /// The fault of the share's region, if there is one.
    pub region: Option<String>,
}

impl Look {
    /// Returns the bytes that all processes use; `None` where the driver counts none.
    pub fn memory_bytes(&self) -> Option<u64> {
        let counted: Vec<u64> = self.processes.iter().filter_map(|p| p.memory_bytes).collect();
        (!counted.is_empty()).then(|| counted.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes)))
    }

    /// Returns the percent of the GPU's time that all processes use, at most 100.
    pub fn percent(&self) -> u32 {
        self.processes.iter().fold(0, |sum: u32, process| sum.saturating_add(process.percent)).min(100)
    }
}

/// A breach of a share's quota.
#[derive(Debug, Clone, PartialEq)]
pub enum Breach {
    /// The share's processes use more memory than the quota.
    Memory {
        /// Bytes in use.
        used: u64,
        /// Quota in bytes, without tolerance.
        quota: u64,
    },
    /// The share's processes get more GPU time than the quota.
    Time {
        /// Percent on average since the share was last within its quota.
        percent: u32,
        /// Quota in percent, without tolerance.
        quota: u8,
    },
    /// The share's region is not what the agent made; the text says why.
    Region(String),
}

impl Breach {
    /// Returns the kind of the breach, for metrics.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "memory",
            Self::Time { .. } => "time",
            Self::Region(_) => "region",
        }
    }
}

/// A breach that is to be reported.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The shares.
    pub subject: Subject,
    /// The breach.
    pub breach: Breach,
    /// True if the breach was not reported at the look before.
    pub is_new: bool,
}

/// The state that is remembered between looks.
#[derive(Debug, Default)]
struct History {
    /// The memory quota in force, in bytes. A lowered quota is in force once usage has come below it.
    allowed_bytes: u64,
    memory: u32,
    time: u32,
    region: u32,
    /// GPU time in seconds beyond the allowed time.
    excess: f64,
    /// GPU time and wall-clock time, both in seconds, since there was no excess.
    served: f64,
    over: f64,
}

/// Decides for all shares of a node which to report.
#[derive(Debug)]
pub struct Auditor {
    settings: Settings,
    shares: BTreeMap<Subject, History>,
}

impl Auditor {
    /// Creates an auditor that has seen no looks.
    pub fn new(settings: Settings) -> Self {
        Self { settings, shares: BTreeMap::new() }
    }

    /// Returns true if no share's history is remembered.
    pub fn is_idle(&self) -> bool {
        self.shares.is_empty()
    }

    /// Evaluates one look, made `elapsed` after the look before. Returns the breaches that are to be
    /// reported.
    pub fn look(&mut self, elapsed: Duration, looks: &[Look]) -> Vec<Verdict> {
        self.shares.retain(|subject, _| looks.iter().any(|look| look.subject == *subject));
        let mut verdicts = Vec::new();
        for look in looks {
            let history = self.shares.entry(look.subject.clone()).or_default();
            let breaches = [
                history.memory(&self.settings, look),
                history.time(&self.settings, elapsed, look),
                history.region(look),
            ];
            for (breach, in_a_row) in breaches.into_iter().flatten() {
                if in_a_row >= self.settings.looks.max(1) {
                    let is_new = in_a_row == self.settings.looks.max(1);
                    verdicts.push(Verdict { subject: look.subject.clone(), breach, is_new });
                }
            }
        }
        verdicts
    }
}

impl History {
    fn memory(&mut self, settings: &Settings, look: &Look) -> Option<(Breach, u32)> {
        let quota = look.quota.memory_bytes;
        let used = look.memory_bytes().unwrap_or(0);
        let processes = (look.processes.len() as u64).min(MOST_PROCESSES);
        let forgiven = |bytes: u64| {
            let part = bytes / 100 * u64::from(settings.memory_percent);
            bytes.saturating_add(part).saturating_add(settings.memory_per_process.saturating_mul(processes))
        };
        // The limiter takes nothing back when a quota is lowered.
        if quota >= self.allowed_bytes || used <= forgiven(quota) {
            self.allowed_bytes = quota;
        }
        if quota == 0 || used <= forgiven(self.allowed_bytes) {
            self.memory = 0;
            return None;
        }
        self.memory = self.memory.saturating_add(1);
        Some((Breach::Memory { used, quota }, self.memory))
    }

    fn time(&mut self, settings: &Settings, elapsed: Duration, look: &Look) -> Option<(Breach, u32)> {
        let quota = look.quota.cores_percent;
        let burst = settings.time_burst.as_secs_f64();
        if quota == 0 || look.quota.is_soft {
            (self.time, self.excess) = (0, 0.0);
            return None;
        }
        let allowed = f64::from(quota.saturating_add(settings.time_points).min(100)) / 100.0;
        let (elapsed, rate) = (elapsed.as_secs_f64(), f64::from(look.percent()) / 100.0);
        // Beyond twice the burst nothing more is remembered, so that who stops is soon forgiven.
        self.excess = (self.excess + (rate - allowed) * elapsed).clamp(0.0, burst * 2.0 + elapsed);
        if self.excess > 0.0 {
            self.served += rate * elapsed;
            self.over += elapsed;
        } else {
            (self.served, self.over) = (0.0, 0.0);
        }
        if self.excess <= burst {
            self.time = 0;
            return None;
        }
        self.time = self.time.saturating_add(1);
        let percent = (self.served / self.over.max(f64::EPSILON) * 100.0).clamp(0.0, 100.0) as u32;
        Some((Breach::Time { percent, quota }, self.time))
    }

    fn region(&mut self, look: &Look) -> Option<(Breach, u32)> {
        let Some(what) = &look.region else {
            self.region = 0;
            return None;
        };
        self.region = self.region.saturating_add(1);
        Some((Breach::Region(what.clone()), self.region))
    }
}

#[cfg(test)]
mod tests;
