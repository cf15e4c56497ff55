//! An administrator's statement that the errors of a GPU were looked at, as an annotation of the GPU's Node:
//! `acknowledge.aliquot.dev/<GPU UUID>: <time>[ <reason>]`, with the time in RFC 3339. It covers what had
//! happened by that time, and no more: a later error counts as if nothing had been stated.

use crate::{GpuUuid, annotation, names};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;

/// The prefix of the annotations' names; like that of cordons, it does not begin with `aliquot.dev/`.
pub const PREFIX: &str = names::ACKNOWLEDGE_PREFIX;
/// The taints that an acknowledgement clears, by the part of their keys after the driver's name: errors that
/// the driver reported.
pub const CLEARED: [&str; 2] = ["ecc", "xid"];
/// How far ahead the author's clock may be.
pub const AHEAD: SignedDuration = SignedDuration::from_mins(5);

/// The acknowledgement of one GPU's errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acknowledgement {
    /// The time until which errors were looked at.
    pub at: Timestamp,
    /// The reason, in the administrator's words; may be empty.
    pub reason: String,
}

impl Acknowledgement {
    /// Reads an annotation's value; `None` if it does not begin with a time.
    pub fn read(value: &str) -> Option<Self> {
        let (time, reason) =
            value.trim().split_once(char::is_whitespace).unwrap_or_else(|| (value.trim(), ""));
        Some(Self { at: time.parse().ok()?, reason: annotation::reason(reason) })
    }

    /// Returns the annotation's value.
    pub fn value(&self) -> String {
        if self.reason.is_empty() { self.at.to_string() } else { format!("{} {}", self.at, self.reason) }
    }
}

/// Returns the name of the annotation for a GPU.
pub fn key(gpu: &GpuUuid) -> String {
    annotation::key(PREFIX, gpu)
}

/// The acknowledgements in a Node's annotations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Acknowledgements {
    /// Acknowledgements by GPU.
    pub gpus: BTreeMap<GpuUuid, Acknowledgement>,
    /// Names of annotations with this prefix that name no GPU by its UUID, or whose value has no time that
    /// has come.
    pub not_understood: Vec<String>,
}

impl Acknowledgements {
    /// Reads all acknowledgements. One with a time in the future is about errors that have not happened yet:
    /// it is not understood until that time has come, with a tolerance of [`AHEAD`].
    pub fn read(annotations: &BTreeMap<String, String>, now: Timestamp) -> Self {
        let has_come = |said: &Acknowledgement| said.at.duration_since(now) <= AHEAD;
        let said = |value: &str| Acknowledgement::read(value).filter(has_come);
        let (gpus, not_understood) = annotation::read(annotations, PREFIX, said);
        Self { gpus, not_understood }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(text: &str) -> Timestamp {
        text.parse().expect("a time")
    }

    fn said(time: &str, reason: &str) -> Acknowledgement {
        Acknowledgement { at: at(time), reason: reason.into() }
    }

    #[test]
    fn a_value_is_a_time_and_a_reason() {
        for (value, want) in [
            ("2026-11-24T18:00:00Z", Some(said("2026-11-24T18:00:00Z", ""))),
            (
                " 2026-11-24T18:00:00.5Z  INC-7: was reset ",
                Some(said("2026-11-24T18:00:00.5Z", "INC-7: was reset")),
            ),
            ("2026-11-24T19:00:00+01:00 two\nlines", Some(said("2026-11-24T18:00:00Z", "two lines"))),
            ("", None),
            ("INC-7", None),
            ("1800000000", None),
        ] {
            assert_eq!(Acknowledgement::read(value), want, "{value:?}");
        }
        let long = format!("2026-11-24T18:00:00Z {}", "x".repeat(100_000));
        assert_eq!(Acknowledgement::read(&long).map(|said| said.reason.len()), Some(annotation::REASON));
    }

    #[test]
    fn what_names_no_gpu_or_has_not_come_yet_spoils_no_other() {
        let gpu = |text: &str| GpuUuid::parse(text).expect("legal");
        let (one, other) = (gpu("GPU-00000001"), gpu("GPU-00000002"));
        let annotations = [
            (key(&one), "2026-11-24T18:04:59Z"),
            (key(&other), "2026-11-24T18:05:01Z"),
            (key(&gpu("GPU-00000003")), "yesterday"),
            (format!("{PREFIX}gpu-0"), "2026-11-24T18:00:00Z"),
            ("aliquot.dev/allocator-mode".to_owned(), "scheduler"),
        ];
        let annotations = annotations.map(|(name, value)| (name, value.to_owned())).into();
        let read = Acknowledgements::read(&annotations, at("2026-11-24T18:00:00Z"));
        assert_eq!(read.gpus, [(one, said("2026-11-24T18:04:59Z", ""))].into());
        let not_understood = ["GPU-00000002", "GPU-00000003", "gpu-0"].map(|name| format!("{PREFIX}{name}"));
        assert_eq!(read.not_understood, not_understood);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(second in 0_i64..4_000_000_000, reason in "[a-zA-Z0-9:]{0,20}( [a-z]{1,9})?") {
            let reason = reason.trim().to_owned();
            let said = Acknowledgement { at: Timestamp::from_second(second).expect("in range"), reason };
            prop_assert_eq!(Acknowledgement::read(&said.value()), Some(said));
        }

        #[test]
        fn any_annotation_can_be_read(name in ".{0,40}", value in ".{0,200}") {
            let all = [(format!("{PREFIX}{name}"), value)].into();
            let read = Acknowledgements::read(&all, Timestamp::UNIX_EPOCH);
            prop_assert_eq!(read.gpus.len() + read.not_understood.len(), 1);
        }
    }
}
