//! Reasons of the agent's events and conditions, CamelCase as Kubernetes wants them.

/// Reason of condition `Prepared` of a claim's device that is prepared; the others are of [`REASONS`].
pub const PREPARED: &str = "Prepared";

aliquot_model::event_reasons! {
    /// A GPU of the node cannot be read, and takes no other claim until it can.
    Warning of [Node] GPU_UNREADABLE = "GpuUnreadable", "see the kernel's log for NVRM and Xid messages";
    /// The node had GPUs when the agent ran before, and none is on its PCI bus now; no claim had any.
    Warning of [Node] GPUS_WITHDRAWN = "GpusWithdrawn", "if it should have one, see the kernel's log";
    /// A call to the driver about a GPU does not come back; other GPUs go on.
    Warning of [Node] GPU_STUCK = "GpuStuck", "if it stays so, drain the node and reboot it";
    /// A call to the driver that was late came back.
    Normal of [Node] GPU_ANSWERS = "GpuAnswersAgain", "–";
    /// NVML does not answer at all, or cannot be opened; nothing new is prepared.
    Warning of [Node] NVML_UNAVAILABLE = "NvmlUnavailable",
        "load the driver; [the driver reloaded or upgraded](../health.md#the-driver-reloaded-or-upgraded)";
    /// NVML answers again, and GPUs are given out.
    Normal of [Node] NVML_ANSWERS = "NvmlAnswersAgain", "–";
    /// The driver reported an error of a GPU; the text says what is made of it.
    Warning of [Node] GPU_ERROR = "GpuError", "as it says; [XIDs](../health.md#xids)";
    /// A GPU has a taint for its health.
    Warning of [Node] GPU_TAINTED = "GpuTainted", "as it says; [health](../health.md)";
    /// A taint of a GPU for its health is gone.
    Normal of [Node] GPU_TAINT_GONE = "GpuTaintGone", "–";
    /// An administrator has looked at the errors of a GPU, which are cleared.
    Normal of [Node] GPU_ACKNOWLEDGED = "GpuAcknowledged", "–";
    /// An annotation that should clear the errors of a GPU cannot be understood.
    Warning of [Node] ACKNOWLEDGEMENT_IGNORED = "AcknowledgementIgnored",
        "remove it, and use `aliquot acknowledge`";
    /// An administrator took a GPU out of service.
    Normal of [Node] GPU_CORDONED = "GpuCordoned", "`aliquot uncordon` puts it back";
    /// A GPU is in service again.
    Normal of [Node] GPU_UNCORDONED = "GpuUncordoned", "–";
    /// An annotation that should take a GPU out of service names none of this node.
    Warning of [Node] CORDON_IGNORED = "CordonIgnored", "correct or remove it, and use `aliquot cordon`";

    /// Somebody else gives out GPUs of the node, too; nothing of ours is given out there.
    Warning of [Node] OTHER_DRIVER = "OtherDriver",
        "stop the other one on this node, or keep the agent off it; \
         [beside other software](../coexistence.md#what-aliquot-notices)";
    /// Nobody else gives out GPUs of the node any more.
    Normal of [Node] OTHER_DRIVER_GONE = "OtherDriverGone", "–";
    /// The GPU operator's MIG manager runs on the node.
    Warning of [Node] MIG_MANAGER = "MigManager",
        "label the node `nvidia.com/gpu.deploy.mig-manager=false`; [MIG manager](../coexistence.md#mig-manager)";

    /// The GPU operator asks for the driver, and nothing of the node is given out.
    Normal of [Node] DRIVER_PAUSED = "DriverPaused",
        "end the pods that use GPUs; [when the GPU operator asks for it](../health.md#when-the-gpu-operator-asks-for-it)";
    /// NVML is closed, so that the driver can be unloaded.
    Normal of [Node] DRIVER_LET_GO = "DriverLetGo", "–";
    /// A call to the driver that the agent was asked to let go of has not come back.
    Warning of [Node] DRIVER_HELD = "DriverHeld", "if it does not end, delete the agent's pod";
    /// The label that asked for the driver is gone, and GPUs are given out again.
    Normal of [Node] DRIVER_RESUMED = "DriverResumed", "–";
    /// The driver numbers the devices of a claim otherwise than its running containers know.
    Warning of [ResourceClaim] DEVICE_NUMBERS_CHANGED = "DeviceNumbersChanged", "delete the pods that use the claim";
    /// A CDI spec may name other devices than those of its claim; it is tried again.
    Warning of [Node] SPEC_NOT_FOLLOWED = "CdiSpecNotUpdated", "if it stays so, delete the pods that use the claim";
    /// Containers of a claim may open what is not theirs, by a number that it had before.
    Warning of [Node, ResourceClaim] DEVICE_REACHED = "DeviceReachable",
        "delete the pods that the text names; \
         [loaded anew](../health.md#loaded-anew-while-claims-are-prepared)";
    /// A partition of a claim that is prepared is gone.
    Warning of [ResourceClaim] PARTITION_GONE = "MigPartitionGone",
        "delete the pods that use the claim: it is made again with the next";

    /// The API server drops fields; less is offered.
    Warning of [Node] FEATURES_OFF = "ServerFeaturesOff", "switch on the feature gates that the text names";
    /// The API server refuses the node's ResourceSlices.
    Warning of [Node] PUBLISH_REFUSED = "PublishRefused", "look at the agent's rights, and at policies for ResourceSlices";
    /// The node's ResourceSlices could not be written several times in a row.
    Warning of [Node] PUBLISH_FAILED = "PublishFailed", "look at the API server, and the node's way to it";
    /// The kubelet refused to register the plugin.
    Warning of [Node] REGISTRATION_REFUSED = "RegistrationRefused", "as it says; the kubelet's log";
    /// SELinux labels of what containers have of ours could not be given.
    Warning of [Node] SELINUX_LABEL_REFUSED = "SelinuxLabelRefused", "[SELinux](../security.md#selinux)";
    /// SELinux keeps containers from files of the driver.
    Warning of [Node] SELINUX_DRIVER_DENIED = "SelinuxDeniesDriver",
        "label the files that the text names; [SELinux](../security.md#selinux)";

    /// The node's label or annotation `aliquot.dev/allocator-mode` is no mode, and the agent's own setting counts.
    Warning of [Node] MODE_INVALID = "InvalidAllocatorMode", "`controller` or `scheduler`";
    /// The node goes from one allocator to the other; nobody allocates there meanwhile.
    Normal of [Node] HAND_OVER_BEGAN = "HandOverBegan", "wait; the text says until when at the latest";
    /// The node has gone from one allocator to the other.
    Normal of [Node] HAND_OVER_DONE = "HandOverDone", "–";

    /// A GPU instance that no claim has is given out as it is.
    Normal of [Node] INSTANCE_ADOPTED = "MigInstanceAdopted",
        "nothing, or remove it as the text says; [coexistence](../coexistence.md#what-aliquot-notices)";
    /// A GPU instance that no claim has, and nothing that overlaps it is given out.
    Warning of [Node] FOREIGN_INSTANCE = "UnknownMigInstance",
        "as it says; [coexistence](../coexistence.md#what-aliquot-notices)";
    /// A GPU instance that no claim had was destroyed (`kubeletPlugin.unclaimedMig`).
    Normal of [Node] FOREIGN_DESTROYED = "UnknownMigInstanceDestroyed", "–";

    /// A claim is gone from the API, or was allocated otherwise, while its hardware is held.
    Warning of [Node] CLAIM_VANISHED = "ClaimVanished",
        "wait; if it stays, end the pods and processes that use it";
    /// Hardware or files of a claim that is gone were released.
    Normal of [Node] CLAIM_COLLECTED = "VanishedClaimReleased", "–";
    /// A copy of the checkpoint was unreadable; the other one is used.
    Warning of [Node] CHECKPOINT_DAMAGED = "CheckpointDamaged", "check the node's disk";
    /// The checkpoint has records that only a newer release understands, which are kept.
    Warning of [Node] CHECKPOINT_NEWER = "CheckpointOfNewerRelease",
        "[back to an older release](../upgrade.md#back-to-an-older-release)";
    /// The checkpoint was lost, and not everything is accounted for. Pods run on.
    Warning of [Node] LEDGER_LOST = "LedgerLost", "wait; `/healthz` of the agent names what is not accounted for";
    /// Claims are prepared whose records the checkpoint has lost; their GPUs take no other claim.
    Warning of [Node] CLAIMS_UNACCOUNTED = "ClaimsWithoutRecord", "as it says, or end their pods";
    /// The record of a claim was lost, and was made anew.
    Normal of [Node] CLAIM_REBUILT = "ClaimRecordRebuilt", "–";
    /// Everything is accounted for again after the checkpoint was lost.
    Normal of [Node] LEDGER_REBUILT = "LedgerRebuilt", "–";

    /// A claim could not be prepared; the kubelet tries again.
    Warning of [ResourceClaim] PREPARE_FAILED = "PrepareFailed",
        "[the texts](../pending.md#the-node-does-not-prepare-the-claim)";
    /// A claim could not be prepared because another one holds the hardware.
    Warning of [ResourceClaim] CONFLICT = "DeviceConflict", "wait until that one is unprepared";
    /// A claim for administration does not have a GPU that a virtual machine has.
    Warning of [ResourceClaim] DEVICE_LEFT_OUT = "DeviceLeftOut", "once the GPU is back, delete the pods that use the claim";
    /// A claim could not be unprepared; the kubelet tries again, and its pod stays `Terminating`.
    Warning of [ResourceClaim] UNPREPARE_FAILED = "UnprepareFailed", "as it says";
    /// A limit that the controller granted does not fit beside what the node holds; the share keeps the one that it has.
    Warning of [ResourceClaim] LIMIT_REFUSED = "ShareLimitRefused", "ask for less";

    /// Processes of a share use more memory than it may.
    Warning of [Pod] OVER_MEMORY = "ShareOverMemory",
        "stop programs that go past the limiter, or give them a partition or a whole GPU";
    /// Processes of a share take more GPU time than it may.
    Warning of [Pod] OVER_TIME = "ShareOverTime", "as `ShareOverMemory`";
    /// A share's account was damaged from inside a container.
    Warning of [Pod] REGION_DAMAGED = "ShareAccountDamaged", "start the pod anew";
    /// A pod is evicted because it went on using more than its share (`kubeletPlugin.audit.evict`).
    Warning of [Pod] AUDIT_EVICTED = "EvictedOverShare", "a larger share, or a program that the limiter binds";
    /// A pod that uses more than its share could not be evicted.
    Warning of [Pod] AUDIT_EVICTION_REFUSED = "EvictionOverShareRefused", "look at the API server's answer, and end the pod";
}
