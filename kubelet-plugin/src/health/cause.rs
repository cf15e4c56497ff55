//! Defines the faults that a GPU can have, and the taint for each. Pure: it does no I/O.

use super::xid::{Verdict, Xids};
use aliquot_model::layout::{Taint, TaintEffect};
use aliquot_model::names;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A cause of bad health of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Cause {
    /// The GPU has fallen off the bus.
    Lost,
    /// The driver reported an error by this number.
    Xid(u64),
    /// The GPU has memory errors that could not be corrected.
    Ecc,
    /// A row of memory could not be replaced.
    RowRemapFailure,
    /// A row of memory is replaced with the next reset.
    RowRemapPending,
    /// The driver wants a recovery action; the value is NVML's number of the action.
    Recovery(u64),
    /// A call to the driver about the GPU does not return.
    Stuck,
    /// The GPU is there and cannot be read.
    Unreadable,
    /// The driver does not answer, or the agent has let go of it.
    NoDriver,
    /// The errors of the GPU are not listened for.
    NoEvents,
}

/// NVML's number of the action "drain P2P traffic": the GPU works, but not with others.
const DRAIN_P2P: u64 = 3;

impl Cause {
    /// Returns true if only a reset ends the cause: it is kept over restarts of the agent.
    pub const fn lasts(self) -> bool {
        matches!(self, Self::Lost | Self::Xid(_) | Self::Ecc)
    }

    /// Returns true if an administrator's acknowledgement ends the cause ([`aliquot_model::acknowledge`]). Of
    /// the causes that last, these are the errors of the past; a lost GPU is not one.
    pub const fn can_be_acknowledged(self) -> bool {
        matches!(self, Self::Xid(_) | Self::Ecc)
    }

    /// Returns the effect of the taint; `None` for no taint.
    pub fn effect(self, xids: &Xids) -> Option<TaintEffect> {
        match self {
            Self::Lost => Some(TaintEffect::NoExecute),
            Self::Xid(number) => match xids.verdict(number) {
                Verdict::Ignore => None,
                Verdict::Taint(effect) => Some(effect),
            },
            Self::RowRemapPending | Self::NoEvents | Self::Recovery(DRAIN_P2P) => Some(TaintEffect::None),
            Self::Ecc
            | Self::RowRemapFailure
            | Self::Recovery(_)
            | Self::Stuck
            | Self::Unreadable
            | Self::NoDriver => Some(TaintEffect::NoSchedule),
        }
    }

    /// Returns the taint of a driver; `None` for no taint.
    pub fn taint(self, driver: &str, xids: &Xids) -> Option<Taint> {
        let (key, value) = match self {
            Self::Lost => ("gpu-lost", String::new()),
            Self::Xid(number) => ("xid", number.to_string()),
            Self::Ecc => ("ecc", String::new()),
            Self::RowRemapFailure => ("row-remap", "failure".to_owned()),
            Self::RowRemapPending => ("row-remap", "pending".to_owned()),
            Self::Recovery(action) => ("recovery", action_name(action)),
            Self::Stuck => ("unmonitored", "stuck".to_owned()),
            Self::Unreadable => ("unmonitored", "unreadable".to_owned()),
            Self::NoDriver => ("unmonitored", "driver".to_owned()),
            Self::NoEvents => ("unmonitored", "events".to_owned()),
        };
        Some(Taint { key: names::condition_taint(driver, key), value, effect: self.effect(xids)? })
    }

    /// Returns the cause in words, for people.
    pub fn text(self) -> String {
        match self {
            Self::Lost => "it has fallen off the bus".to_owned(),
            Self::Xid(number) => match Xids::meaning(number) {
                Some(meaning) => format!("XID {number}, {meaning}"),
                None => format!("XID {number}"),
            },
            Self::Ecc => "memory errors that could not be corrected".to_owned(),
            Self::RowRemapFailure => "a row of its memory could not be replaced".to_owned(),
            Self::RowRemapPending => "a row of its memory is replaced with the next reset".to_owned(),
            Self::Recovery(action) => format!("the driver asks for recovery: {}", action_name(action)),
            Self::Stuck => "a call to the driver about it does not come back".to_owned(),
            Self::Unreadable => "it cannot be read".to_owned(),
            Self::NoDriver => "the driver does not answer".to_owned(),
            Self::NoEvents => "its errors are not listened for".to_owned(),
        }
    }

    /// Returns what ends the cause, in words.
    pub const fn end(self) -> &'static str {
        match self {
            Self::Lost => "drain the node and reboot it; if it is lost again, replace it",
            Self::Xid(_) | Self::Ecc => {
                "drain it, then reset it, reload the driver or reboot the node; see the kernel's log for NVRM and Xid \
                 messages. If it stays although the GPU was reset: aliquot acknowledge"
            }
            Self::RowRemapFailure => "drain it and have it replaced",
            Self::RowRemapPending => "reset it when nothing uses it",
            Self::Recovery(_) => "do what the driver asks for: nvidia-smi -q shows it as GPU Recovery Action",
            Self::Stuck => "it ends when the call comes back; if it does not, drain the node and reboot it",
            Self::Unreadable => "it ends when it can be read; see the kernel's log for NVRM messages",
            Self::NoDriver => "it ends when the driver answers",
            Self::NoEvents => "it ends when they are listened for; some boards have none",
        }
    }
}

fn action_name(action: u64) -> String {
    match action {
        1 => "gpu-reset".to_owned(),
        2 => "node-reboot".to_owned(),
        DRAIN_P2P => "drain-p2p".to_owned(),
        4 => "drain-and-reset".to_owned(),
        other => other.to_string(),
    }
}

impl fmt::Display for Cause {
    /// Writes the cause as one word, for metrics and for the file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("gpu-lost"),
            Self::Xid(number) => write!(f, "xid-{number}"),
            Self::Ecc => f.write_str("ecc"),
            Self::RowRemapFailure => f.write_str("row-remap-failure"),
            Self::RowRemapPending => f.write_str("row-remap-pending"),
            Self::Recovery(action) => write!(f, "recovery-{action}"),
            Self::Stuck => f.write_str("stuck"),
            Self::Unreadable => f.write_str("unreadable"),
            Self::NoDriver => f.write_str("no-driver"),
            Self::NoEvents => f.write_str("no-events"),
        }
    }
}

impl From<Cause> for String {
    fn from(cause: Cause) -> Self {
        cause.to_string()
    }
}

/// The error of a text that is not the word of a cause.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no cause that is known here")]
pub struct UnknownCause(String);

impl TryFrom<String> for Cause {
    type Error = UnknownCause;

    fn try_from(text: String) -> Result<Self, UnknownCause> {
        let unknown = || UnknownCause(text.clone());
        if let Some(number) = text.strip_prefix("xid-") {
            return number.parse().map(Self::Xid).map_err(|_| unknown());
        }
        if let Some(action) = text.strip_prefix("recovery-") {
            return action.parse().map(Self::Recovery).map_err(|_| unknown());
        }
        let plain = [
            Self::Lost,
            Self::Ecc,
            Self::RowRemapFailure,
            Self::RowRemapPending,
            Self::Stuck,
            Self::Unreadable,
            Self::NoDriver,
            Self::NoEvents,
        ];
        plain.into_iter().find(|cause| cause.to_string() == text).ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_model::acknowledge;

    /// `aliquot acknowledge` waits for the taints that the model names.
    #[test]
    fn what_can_be_acknowledged_lasts_and_has_the_taints_that_the_model_names() {
        let all = [
            Cause::Lost,
            Cause::Xid(48),
            Cause::Ecc,
            Cause::RowRemapFailure,
            Cause::RowRemapPending,
            Cause::Recovery(1),
            Cause::Stuck,
            Cause::Unreadable,
            Cause::NoDriver,
            Cause::NoEvents,
        ];
        let cleared = acknowledge::CLEARED.map(|key| names::condition_taint("d", key));
        for cause in all {
            let taint = cause.taint("d", &Xids::default()).expect("each of these has one");
            assert_eq!(cause.can_be_acknowledged(), cleared.contains(&taint.key), "{cause}");
            assert!(cause.lasts() || !cause.can_be_acknowledged(), "{cause}");
        }
        assert_eq!(all.iter().filter(|cause| cause.can_be_acknowledged()).count(), cleared.len());
    }
}
