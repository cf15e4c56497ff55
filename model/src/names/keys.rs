//! Labels, annotations and gates, each with what it is for: the constants and the reference are made from one table.

/// What a name is given to an object as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A label.
    Label,
    /// An annotation.
    Annotation,
    /// A label, or an annotation where there is no label.
    LabelOrAnnotation,
    /// A scheduling gate.
    Gate,
}

impl Form {
    /// As people call it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Label => "label",
            Self::Annotation => "annotation",
            Self::LabelOrAnnotation => "label or annotation",
            Self::Gate => "scheduling gate",
        }
    }
}

/// A name that objects of the API have from us, or for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// The name; one that ends with a slash goes on with the UUID of a GPU.
    pub name: &'static str,
    /// What it is.
    pub form: Form,
    /// Kinds of objects that have it.
    pub of: &'static str,
    /// Who writes it.
    pub by: &'static str,
    /// What it means, in lines.
    pub about: &'static [&'static str],
}

macro_rules! keys {
    ($($(#[doc = $about:literal])+ $form:ident of $of:literal by $by:literal: $constant:ident = $name:literal;)+) => {
        $($(#[doc = $about])+ pub const $constant: &str = $name;)+

        /// All of them.
        pub const KEYS: &[Key] =
            &[$(Key { name: $name, form: Form::$form, of: $of, by: $by, about: &[$($about),+] }),+];
    };
}

keys! {
    /// Whether pods may be evicted so that gaps on GPUs can be filled: `Allow`.
    Annotation of "Pod" by "users": COMPACTION = "aliquot.dev/compaction";
    /// Group of pods that get all their devices or none: the group's name.
    Label of "Pod" by "users": GANG = "aliquot.dev/gang";
    /// How many pods the pod's group needs.
    Annotation of "Pod" by "users": GANG_SIZE = "aliquot.dev/gang-size";
    /// The same as `aliquot.dev/gang`, of Kubernetes' coscheduling; the size is in a PodGroup or in
    /// `aliquot.dev/gang-size`.
    Label of "Pod" by "users": COSCHEDULING = "scheduling.x-k8s.io/pod-group";
    /// The same, of earlier releases of coscheduling.
    Label of "Pod" by "users": EARLIER_COSCHEDULING = "pod-group.scheduling.sigs.k8s.io";
    /// When a claim gets its devices: `Immediate`, or `WaitForFirstConsumer` (the default).
    Annotation of "ResourceClaim, DeviceClass" by "users": BINDING = "aliquot.dev/binding";
    /// What becomes of a claim's devices after its last pod: `Delete` (the default) or `Retain`.
    Annotation of "ResourceClaim, DeviceClass" by "users": RECLAIM = "aliquot.dev/reclaim";
    /// How long devices are kept without a pod, for example `30m`.
    Annotation of "ResourceClaim, DeviceClass" by "users": HOLD_FOR = "aliquot.dev/hold-for";
    /// Where the claim stands while it keeps devices without a pod, a number of at most 0 (the default). Pods of higher
    /// priority may be given its devices.
    Annotation of "ResourceClaim, DeviceClass" by "users": HOLD_PRIORITY = "aliquot.dev/hold-priority";
    /// What the claim's shares may use from now on, for example `memory=20Gi,cores=40`. A wish: the controller grants
    /// it, or says why not.
    Annotation of "ResourceClaim" by "users": LIMITS = "aliquot.dev/limits";

    /// That the node has GPUs, and gets an agent (`kubeletPlugin.gpuNodeLabels`): `true`.
    Label of "Node" by "administrators": GPU_NODE = "aliquot.dev/gpu-node";
    /// Who allocates the node's devices: `controller` or `scheduler`. Without it the value `mode` of the chart holds.
    LabelOrAnnotation of "Node" by "administrators": ALLOCATOR_MODE = "aliquot.dev/allocator-mode";
    /// Takes the GPU out of service: an effect (`NoSchedule`, `NoExecute`), a reason, or both with `: ` between;
    /// `aliquot cordon` writes it.
    Annotation of "Node" by "administrators": CORDON_PREFIX = "cordon.aliquot.dev/";
    /// Clears the errors that the GPU had until then: a time (RFC 3339), and after a space a reason;
    /// `aliquot acknowledge` writes it.
    Annotation of "Node" by "administrators": ACKNOWLEDGE_PREFIX = "acknowledge.aliquot.dev/";
    /// What requests for shares have to state in the namespace, in place of the value `governance.shareRequires`:
    /// `memory`, `cores`, both with a comma between, or nothing.
    Annotation of "Namespace" by "administrators": SHARE_REQUIRES = "aliquot.dev/share-requires";
    /// An AllocationPolicy for the claims of the namespace: its fields as a JSON object.
    Annotation of "Namespace" by "administrators": ALLOCATION_POLICY = "aliquot.dev/allocation-policy";

    /// Keeps kube-scheduler off the pod until its claims have devices; the controller lifts it.
    Gate of "Pod" by "the webhook": SCHEDULING_GATE = "aliquot.dev/allocation";
    /// The PodGroup of a pod whose `spec.schedulingGroup` names one.
    Annotation of "Pod" by "the webhook": POD_GROUP = "aliquot.dev/pod-group";
    /// The priority class that a pod would have if the GpuBudget of its namespace were not used up.
    Annotation of "Pod" by "the webhook": PRIORITY_CLASS = "aliquot.dev/priority-class";
    /// What was asked for before the claim's requests were expanded to larger profiles. It grants nothing: the claim's
    /// spec says what may be given.
    Annotation of "ResourceClaim" by "the webhook": SUBSTITUTION = "aliquot.dev/substitution";
    /// By this the controller knows an allocation of its own again; begins with its time in seconds and a dot. A policy
    /// lets nobody else change it.
    Annotation of "ResourceClaim" by "the controller": ALLOCATION = "aliquot.dev/allocation";
    /// Of a claim with which the controller keeps devices: which, and for whom. A policy lets nobody else write it.
    Annotation of "ResourceClaim" by "the controller": HOLD_OF = "aliquot.dev/hold-of";
    /// Of a claim that the controller made for another one whose share grew: `<name>/<uid>/<share id>` of that one. The
    /// policy `aliquot-companions` lets nobody else write it.
    Annotation of "ResourceClaim" by "the controller": COMPANION_OF = "aliquot.dev/companion-of";
    /// Of ConfigMaps in the release's namespace, in which the controller writes down what running pods will leave to the
    /// next.
    Label of "ConfigMap" by "the controller": RETENTION_RECORD = "aliquot.dev/retention-record";
    /// The place that is held for a pod that goes back to the profile it asked for.
    Annotation of "Node" by "the controller": GOING_BACK = "aliquot.dev/going-back";
    /// The hand-over from the controller that it has acknowledged, by the generation of the node's pool.
    Annotation of "Node" by "the controller": HAND_OVER_ACKNOWLEDGED = "aliquot.dev/hand-over-acknowledged";
    /// The hand-over to the controller, by the generation of the node's pool, of which it has seen that kube-scheduler
    /// has nothing under way any more that could take devices of the pool.
    Annotation of "Node" by "the controller": SCHEDULER_IDLE = "aliquot.dev/scheduler-idle";
    /// Name of the pod whose controller may write the status of claims. Policies read it.
    Annotation of "ServiceAccount" by "the controller": WRITER = "aliquot.dev/writer";
    /// The DeviceClasses that can select our devices, with commas between. Policies read it.
    Annotation of "ServiceAccount" by "the controller": DEVICE_CLASSES = "aliquot.dev/device-classes";
    /// When the webhook's certificate was made.
    Annotation of "Secret" by "the controller": CERTIFICATE_MADE = "aliquot.dev/made";
    /// When the webhook's certificate expires.
    Annotation of "Secret" by "the controller": CERTIFICATE_EXPIRES = "aliquot.dev/expires";
    /// Names that the webhook's certificate is for.
    Annotation of "Secret" by "the controller": CERTIFICATE_NAMES = "aliquot.dev/names";
    /// Of the first slice of a pool that is handed over from kube-scheduler to the controller: when that ends at the
    /// latest, by the node's clock (RFC 3339).
    Annotation of "ResourceSlice" by "the node agent": HAND_OVER_UNTIL = "aliquot.dev/hand-over-until";
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_object_has_one_name_for_two_things() {
        let all: BTreeSet<_> = KEYS.iter().map(|key| (key.name, key.form.as_str(), key.of)).collect();
        assert_eq!(all.len(), KEYS.len());
    }
}
