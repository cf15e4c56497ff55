//! Reasons of the controller's events.

aliquot_model::event_reasons! {
    /// The claims of a pod have their devices, or a claim has them before its first pod.
    Normal of [Pod, ResourceClaim] ALLOCATED = "DevicesAllocated", "–";
    /// No node has what is asked for at the moment; the text counts nodes by reason.
    Warning of [Pod, ResourceClaim] DOES_NOT_FIT = "DevicesDoNotFit",
        "[the reasons](../pending.md#reasons-of-devicesdonotfit)";
    /// The claim can never be satisfied as it stands.
    Warning of [Pod, ResourceClaim] CLAIM_REJECTED = "ClaimRejected",
        "[the reasons](../pending.md#reasons-of-claimrejected); make the claim anew";
    /// The search for devices did not end in time; it is tried again, later each time.
    Warning of [Pod, ResourceClaim] OUT_OF_TIME = "AllocationOutOfTime",
        "fewer devices or constraints in one claim; where the text names an expression, simplify it";
    /// Something has to happen first: other pods of a group, or a claim that does not exist, is being deleted or was
    /// made for another pod.
    Warning of [Pod] WAITING = "AllocationWaiting", "as it says";
    /// Claims of a pod were taken back, because with them the rest of the pod or of its group does not fit.
    Warning of [Pod] UNDONE = "AllocationUndone", "nothing; it is decided anew";
    /// kube-scheduler did not bind the pod to the node where its devices were; they are free again.
    Warning of [Pod] UNBINDABLE = "UnboundAllocationReleased", "look at the pod's `FailedScheduling` events";
    /// Devices were found, and the API server refused to write the allocation.
    Warning of [Pod, ResourceClaim] WRITE_FAILED = "AllocationWriteFailed",
        "look at what its answer names: API server, policies, webhooks for ResourceClaims and Pods";
    /// The API server did not say whether it wrote the allocation; the devices stay reserved until that is known.
    Warning of [ResourceClaim] WRITE_UNCERTAIN = "AllocationUncertain",
        "look at the API server and etcd; deleting the claim frees the devices";
    /// No pod used the claim for a while (`--idle-timeout`), so its devices are free again.
    Normal of [ResourceClaim] IDLE = "UnusedAllocationReleased", "nothing; a next pod gets devices anew";
    /// A larger profile was given than the one that was asked for, as the allocation policy says.
    Normal of [Pod, ResourceClaim] SUBSTITUTED = "ProfileSubstituted", "–";
    /// A pod that has a larger profile is evicted, because what it asked for is free.
    Normal of [Pod] GOING_BACK = "GoingBackToAskedProfile", "nothing; its owner makes it anew";

    /// The devices would exceed a GpuQuota of the namespace; the text has the field, used and asked.
    Warning of [Pod, ResourceClaim] QUOTA = "GpuQuotaExceeded",
        "wait for claims of the namespace to end, ask for less, or have it raised";
    /// The pod waits, as the GPU time of its namespace is used up.
    Warning of [Pod] BUDGET_REFUSED = "BudgetRefused", "wait until the time that the text names, or have the budget raised";
    /// The GPU time of the namespace is used up, and the pod gets its devices all the same.
    Warning of [Pod] BUDGET_EXCEEDED = "BudgetExceeded", "–";
    /// The GPU time of the namespace is used up.
    Warning of [GpuBudget] BUDGET_USED_UP = "BudgetUsedUp", "end what need not run, or raise the budget";
    /// Something of the GPU time of the namespace is left again.
    Normal of [GpuBudget] BUDGET_BACK = "BudgetAvailable", "–";

    /// Pods of lower priority are evicted for this pod, and devices are kept for it until they have ended.
    Warning of [Pod] PREEMPTING = "PreemptionStarted", "wait";
    /// Devices are kept for the pod until those who have them end.
    Warning of [Pod] NOMINATED = "WaitingForNominatedDevices", "wait";
    /// Pods that would have to go for this one could not be evicted: a disruption budget keeps them.
    Warning of [Pod] PREEMPTION_REFUSED = "PreemptionRefused", "wait; others are looked for";
    /// The pod is evicted for one of higher priority, or a claim without a pod loses its devices to one.
    Warning of [Pod, ResourceClaim] PREEMPTED = "Preempted", "nothing, or a higher priority";
    /// A pod that was told that it is evicted stays after all: the API server refused, or did not answer.
    Either of [Pod] NOT_EVICTED = "EvictionCalledOff", "–";
    /// Devices are kept for a pod that has waited long for room (`controller.reservation`).
    Warning of [Pod] RESERVED = "DevicesReserved", "wait";
    /// Devices are no longer kept for a pod that has waited long, or it needs more than are kept for pods that wait.
    Warning of [Pod] RESERVATION_ENDED = "ReservationEnded", "ask for less, or raise `controller.reservation.percent`";
    /// A pod that allows it is evicted, so that a GPU becomes free as a whole.
    Normal of [Pod] MOVED = "MovedToFillGaps", "nothing; its owner makes it anew";
    /// A GPU is being emptied by moving pods, or that has ended.
    Normal of [Node] COMPACTION = "GpuCompaction", "–";

    /// A claim keeps its devices without a pod; the text says until when.
    Normal of [ResourceClaim] HELD_WITHOUT_POD = "DevicesRetained", "`aliquot release` frees them before";
    /// A claim that had devices without a pod keeps them no longer.
    Normal of [ResourceClaim] HOLD_ENDED = "RetainedDevicesReleased", "–";
    /// An annotation `aliquot.dev/…` of the claim is not understood, and counts as if it were not there.
    Warning of [ResourceClaim] ANNOTATION = "AnnotationNotUnderstood", "correct it";
    /// A share has another limit than before, as its claim asks for.
    Normal of [ResourceClaim] LIMIT_CHANGED = "ShareLimitChanged", "–";
    /// A share cannot have the limit that its claim asks for, not now.
    Warning of [ResourceClaim] LIMIT_WAITS = "ShareLimitWaiting", "wait for room, or ask for less";

    /// Devices were found given out twice. The younger claim is taken back if no pod of it runs.
    Warning of [ResourceClaim] OVERLAP = "OverlappingAllocation",
        "if no pod of it runs, nothing; else end the pods of one claim; find out who allocates beside the controller";
    /// Hardware was given out that is still held for a claim that is gone; the claim is taken back and decided anew.
    Warning of [ResourceClaim] HELD = "HardwareStillHeld", "nothing";
    /// Somebody else allocated what the controller gives; nothing is given out of that node until the claim is gone.
    Warning of [Node, ResourceClaim] FOREIGN = "ForeignAllocation",
        "find out who writes allocations, and delete the claim";
    /// The hand-over of a node from kube-scheduler waits for pods that may be given devices there.
    Normal of [Node] HAND_OVER_WAITS = "HandOverWaits", "wait; the text says until when at the latest";
    /// A claim tolerates the taint that keeps kube-scheduler off devices of the controller.
    Warning of [ResourceClaim] TOLERATES = "ClaimToleratesControllerTaint",
        "make the claim anew without that toleration; keep nodes in scheduler mode until then";
}
