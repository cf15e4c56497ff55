//! GPUs that an administrator takes out of service, by annotations of their Node: `cordon.aliquot.dev/<GPU
//! UUID>: [NoSchedule|NoExecute][: <reason>]`. A value that begins with neither effect is a reason, so that
//! `kubectl annotate` does what is meant without any knowledge of the format.

use crate::layout::{Taint, TaintEffect};
use crate::{GpuUuid, annotation, names};
use std::collections::BTreeMap;

/// The prefix of the annotations' names. It does not begin with `aliquot.dev/`, so the policy that limits the
/// controller to annotations with that prefix keeps it from these.
pub const PREFIX: &str = names::CORDON_PREFIX;

/// The cordon of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cordon {
    /// True if pods that use the GPU are evicted as well.
    pub evict: bool,
    /// The reason, in the administrator's words; may be empty.
    pub reason: String,
}

impl Cordon {
    /// Reads an annotation's value. Every value is a cordon: its author wants the GPU out of service, and a
    /// refusal for its spelling would not help.
    pub fn read(value: &str) -> Self {
        let (word, rest) = value.split_once(':').unwrap_or((value, ""));
        let (evict, reason) = match TaintEffect::parse(word.trim()) {
            Some(TaintEffect::NoExecute) => (true, rest),
            Some(TaintEffect::NoSchedule) => (false, rest),
            Some(TaintEffect::None) | None => (false, value),
        };
        Self { evict, reason: annotation::reason(reason) }
    }

    /// Returns the annotation's value.
    pub fn value(&self) -> String {
        let effect = self.effect().as_str();
        if self.reason.is_empty() { effect.to_owned() } else { format!("{effect}: {}", self.reason) }
    }

    /// Returns the effect on claims and pods.
    pub const fn effect(&self) -> TaintEffect {
        if self.evict { TaintEffect::NoExecute } else { TaintEffect::NoSchedule }
    }

    /// Returns the taint that a driver puts on the GPU's devices. The taint does not contain the reason,
    /// because a taint's value is as short as a label's.
    pub fn taint(&self, driver: &str) -> Taint {
        Taint { key: names::cordoned_taint(driver), value: String::new(), effect: self.effect() }
    }
}

/// Returns the name of the annotation for a GPU.
pub fn key(gpu: &GpuUuid) -> String {
    annotation::key(PREFIX, gpu)
}

/// The cordons in a Node's annotations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cordons {
    /// Cordons by GPU.
    pub gpus: BTreeMap<GpuUuid, Cordon>,
    /// Names of annotations with this prefix that name no GPU by its UUID.
    pub not_understood: Vec<String>,
}

impl Cordons {
    /// Reads all cordons.
    pub fn read(annotations: &BTreeMap<String, String>) -> Self {
        let (gpus, not_understood) = annotation::read(annotations, PREFIX, |value| Some(Cordon::read(value)));
        Self { gpus, not_understood }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cordon(evict: bool, reason: &str) -> Cordon {
        Cordon { evict, reason: reason.into() }
    }

    #[test]
    fn a_value_is_an_effect_and_a_reason_or_a_reason_alone() {
        for (value, want) in [
            ("", cordon(false, "")),
            ("NoSchedule", cordon(false, "")),
            ("NoExecute", cordon(true, "")),
            ("NoExecute: fan is loud", cordon(true, "fan is loud")),
            ("NoSchedule:see INC-7: fan", cordon(false, "see INC-7: fan")),
            (" NoExecute : x ", cordon(true, "x")),
            ("fan is loud", cordon(false, "fan is loud")),
            ("noexecute", cordon(false, "noexecute")),
            ("None: looks fine", cordon(false, "None: looks fine")),
            ("two\nlines", cordon(false, "two lines")),
        ] {
            assert_eq!(Cordon::read(value), want, "{value:?}");
        }
        assert_eq!(Cordon::read(&"x".repeat(100_000)).reason.len(), annotation::REASON);
    }

    #[test]
    fn the_taint_has_no_value_and_the_effect_of_the_cordon() {
        let taint = cordon(true, "fan is loud").taint("gpu.example.com");
        assert_eq!((taint.key.as_str(), taint.value.as_str()), ("gpu.example.com/cordoned", ""));
        assert_eq!(taint.effect, TaintEffect::NoExecute);
        assert_eq!(cordon(false, "").taint("d").effect, TaintEffect::NoSchedule);
    }

    #[test]
    fn an_annotation_that_names_no_gpu_spoils_no_other() {
        let gpu = GpuUuid::parse("GPU-00000001").expect("legal");
        let annotations = [
            (key(&gpu), "NoExecute"),
            (format!("{PREFIX}gpu-0"), ""),
            (format!("{PREFIX}MIG-00000001"), ""),
            (PREFIX.to_owned(), ""),
            ("aliquot.dev/allocator-mode".to_owned(), "scheduler"),
        ];
        let cordons = Cordons::read(&annotations.map(|(name, value)| (name, value.to_owned())).into());
        assert_eq!(cordons.gpus, [(gpu, cordon(true, ""))].into());
        let not_understood =
            ["cordon.aliquot.dev/", "cordon.aliquot.dev/MIG-00000001", "cordon.aliquot.dev/gpu-0"];
        assert_eq!(cordons.not_understood, not_understood);
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_again(evict: bool, reason in "[a-zA-Z:]{0,20}( [a-z:]{1,9}){0,3}") {
            let read = Cordon::read(&reason);
            prop_assert_eq!(Cordon::read(&Cordon { evict, ..read.clone() }.value()), Cordon { evict, ..read });
        }
    }
}
