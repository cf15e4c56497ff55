//! Reasons of events and conditions, CamelCase as Kubernetes wants them.

/// A GPU of the node cannot be read.
pub const GPU_UNREADABLE: &str = "GpuUnreadable";
/// A call to the driver about a GPU does not come back.
pub const GPU_STUCK: &str = "GpuStuck";
/// A call to the driver that was late came back.
pub const GPU_ANSWERS: &str = "GpuAnswersAgain";
/// NVML does not answer at all.
pub const NVML_UNAVAILABLE: &str = "NvmlUnavailable";
/// NVML answers again.
pub const NVML_ANSWERS: &str = "NvmlAnswersAgain";
/// The GPU operator asks for the driver, and nothing is given out.
pub const DRIVER_PAUSED: &str = "DriverPaused";
/// NVML is closed, so that the driver can be unloaded.
pub const DRIVER_LET_GO: &str = "DriverLetGo";
/// Something of the agent still uses the driver that it was asked to let go of.
pub const DRIVER_HELD: &str = "DriverHeld";
/// NVML may be opened again.
pub const DRIVER_RESUMED: &str = "DriverResumed";
/// The driver reported an error of a GPU.
pub const GPU_ERROR: &str = "GpuError";
/// A GPU has a taint for its health.
pub const GPU_TAINTED: &str = "GpuTainted";
/// A taint of a GPU for its health is gone.
pub const GPU_TAINT_GONE: &str = "GpuTaintGone";
/// The driver numbers the devices of a claim otherwise.
pub const DEVICE_NUMBERS_CHANGED: &str = "DeviceNumbersChanged";
/// A CDI spec may name other devices than those of its claim.
pub const SPEC_NOT_FOLLOWED: &str = "CdiSpecNotUpdated";
/// Containers of a claim may open what is not theirs, by a number that it had before.
pub const DEVICE_REACHED: &str = "DeviceReachable";
/// A partition of a claim that is prepared is gone.
pub const PARTITION_GONE: &str = "MigPartitionGone";
/// An administrator took a GPU out of service.
pub const GPU_CORDONED: &str = "GpuCordoned";
/// A GPU is in service again.
pub const GPU_UNCORDONED: &str = "GpuUncordoned";
/// An annotation that should take a GPU out of service names none of this node.
pub const CORDON_IGNORED: &str = "CordonIgnored";
/// An administrator has looked at the errors of a GPU, which are cleared.
pub const GPU_ACKNOWLEDGED: &str = "GpuAcknowledged";
/// An annotation that should clear the errors of a GPU cannot be understood.
pub const ACKNOWLEDGEMENT_IGNORED: &str = "AcknowledgementIgnored";
/// The API server drops fields; less is offered.
pub const FEATURES_OFF: &str = "ServerFeaturesOff";
/// The API server refuses our slices.
pub const PUBLISH_REFUSED: &str = "PublishRefused";
/// Our slices could not be written several times in a row.
pub const PUBLISH_FAILED: &str = "PublishFailed";
/// A GPU instance that no claim has is given out as it is.
pub const INSTANCE_ADOPTED: &str = "MigInstanceAdopted";
/// A GPU instance that no claim has.
pub const FOREIGN_INSTANCE: &str = "UnknownMigInstance";
/// A GPU instance that no claim had was destroyed.
pub const FOREIGN_DESTROYED: &str = "UnknownMigInstanceDestroyed";
/// A claim vanished while its hardware is held.
pub const CLAIM_VANISHED: &str = "ClaimVanished";
/// Hardware of a vanished claim was released.
pub const CLAIM_COLLECTED: &str = "VanishedClaimReleased";
/// A copy of the checkpoint was unreadable.
pub const CHECKPOINT_DAMAGED: &str = "CheckpointDamaged";
/// The checkpoint has records that only a newer release understands.
pub const CHECKPOINT_NEWER: &str = "CheckpointOfNewerRelease";
/// The checkpoint was lost, and not everything is accounted for.
pub const LEDGER_LOST: &str = "LedgerLost";
/// The record of a claim was lost, and was made anew.
pub const CLAIM_REBUILT: &str = "ClaimRecordRebuilt";
/// Everything is accounted for again.
pub const LEDGER_REBUILT: &str = "LedgerRebuilt";
/// Claims are prepared whose records the checkpoint has lost.
pub const CLAIMS_UNACCOUNTED: &str = "ClaimsWithoutRecord";
/// The node's mode setting is not a mode.
pub const MODE_INVALID: &str = "InvalidAllocatorMode";
/// A hand-over between allocators began.
pub const HAND_OVER_BEGAN: &str = "HandOverBegan";
/// A hand-over between allocators ended.
pub const HAND_OVER_DONE: &str = "HandOverDone";
/// A claim for administration does not have a GPU that a virtual machine has.
pub const DEVICE_LEFT_OUT: &str = "DeviceLeftOut";
/// A claim could not be prepared.
pub const PREPARE_FAILED: &str = "PrepareFailed";
/// A claim could not be prepared because another one holds the hardware.
pub const CONFLICT: &str = "DeviceConflict";
/// A limit that the controller granted does not fit beside what the node holds.
pub const LIMIT_REFUSED: &str = "ShareLimitRefused";
/// A claim is prepared.
pub const PREPARED: &str = "Prepared";
/// A claim could not be unprepared.
pub const UNPREPARE_FAILED: &str = "UnprepareFailed";
/// Something of ours that containers have could not be given its SELinux label.
pub const SELINUX_LABEL_REFUSED: &str = "SelinuxLabelRefused";
/// SELinux keeps containers from files of the driver.
pub const SELINUX_DRIVER_DENIED: &str = "SelinuxDeniesDriver";
/// Processes of a share use more memory than it may.
pub const OVER_MEMORY: &str = "ShareOverMemory";
/// Processes of a share take more GPU time than it may.
pub const OVER_TIME: &str = "ShareOverTime";
/// A share's account was damaged from inside a container.
pub const REGION_DAMAGED: &str = "ShareAccountDamaged";
/// A pod was evicted because it uses more than its share.
pub const AUDIT_EVICTED: &str = "EvictedOverShare";
/// A pod that uses more than its share could not be evicted.
pub const AUDIT_EVICTION_REFUSED: &str = "EvictionOverShareRefused";
/// The kubelet refused to register the plugin.
pub const REGISTRATION_REFUSED: &str = "RegistrationRefused";
