//! Builds the notices about the node, for events and `/healthz`. A notice names the object, what is wrong
//! with it, what goes on meanwhile, and what to do. Text from elsewhere that may be long is cut, because an
//! event has room for 1 KiB and the advice comes last.

use crate::claim::ClaimRef;
use crate::device_number_reuse::Reach;
use crate::health::Verdict;
use crate::health::cause::Cause;
use crate::health::state::Told;
use crate::ledger::Lost;
use crate::lost_partitions::GonePartition;
use crate::partitioning::Unclaimed;
use crate::publish::PublishError;
use crate::selinux::{Denied, LabelError};
use crate::store::Damage;
use aliquot_model::acknowledge::Acknowledgement;
use aliquot_model::cordon::{self, Cordon};
use aliquot_model::layout::TaintEffect;
use aliquot_model::{DeviceName, GpuUuid, LiveMig};
use aliquot_nvml::{EventKind, GpuError, GpuEvent};
use aliquot_selinux::Label;
use std::fmt::Display;

/// The largest size in bytes of a reason that this driver did not write.
const REASON: usize = 480;
/// The advice for a call to the driver that does not come back.
const STUCK: &str = "nothing is read or changed there until the call comes back, other GPUs go on. See the kernel's log \
                     for NVRM and Xid messages; if it stays so, drain the node and reboot it";

/// The notice that the agent destroys a GPU instance.
const DESTROYS: &str =
    "The agent destroys it once nothing can be using it; if it stays, end the processes on it";

/// Says that the checkpoint was lost.
pub fn loss(lost: &Lost) -> String {
    let reason = cut(&lost.reason);
    if lost.is_beyond() {
        return format!(
            "the checkpoint is of a newer release and cannot be read ({reason}). Pods run on, nothing unknown is \
             removed, and no GPU takes a new claim. Run that release here again, or delete the file once no pod of \
             this node uses a GPU"
        );
    }
    format!(
        "the checkpoint was lost ({reason}). Pods run on, nothing unknown is removed, and GPUs of claims without a \
         record take no new claim. It ends by itself when API, CDI specs and hardware agree; the agent's /healthz and \
         events ClaimsWithoutRecord name what does not"
    )
}

/// Says that a copy of the checkpoint cannot be used.
pub fn damage(damage: &Damage) -> String {
    format!(
        "the checkpoint {} cannot be used ({}) and was kept as {}. The other copy is used; if there is none that can \
         be, event LedgerLost says so. Check this node's disk, and that nothing else writes there",
        damage.path.display(),
        cut(&damage.reason),
        damage.kept.display()
    )
}

/// Says that files of this driver in containers lack their SELinux label.
pub fn unlabelled(failed: &[LabelError]) -> String {
    let Some((first, others)) = failed.split_first() else { return String::new() };
    let more = if others.is_empty() { String::new() } else { format!(" ({} more)", others.len()) };
    format!("{first}{more}. Claims that need it are not prepared until it can be labelled")
}

/// Says that SELinux keeps containers from files of the driver.
pub fn driver_denied(container: &Label, denied: &[Denied]) -> String {
    let Some((first, others)) = denied.split_first() else { return String::new() };
    let more = if others.is_empty() { String::new() } else { format!(" ({} more)", others.len()) };
    format!(
        "SELinux keeps containers ({container}) from the driver's files: they may not {} {}, which is labelled {}{more}. \
         Programs in confined containers will not find the driver. Label the files lib_t (semanage fcontext and \
         restorecon), or install the driver under /usr; the agent labels nothing that is not its own. If confined \
         containers have another label here, say so with --selinux-container-label",
        first.permissions.join(", "),
        first.path.display(),
        first.label
    )
}

/// Says that a claim has gone while it is prepared.
pub fn vanished(claim: &ClaimRef, devices: &[&str]) -> String {
    format!(
        "claim {claim} is gone from the API or allocated otherwise, and {} is still prepared for it. It takes no other \
         claim until no pod and no process of this node uses it; then the agent releases it (--orphan-grace). If that \
         does not come, end the pods and processes that use it",
        cut(&devices.join(", "))
    )
}

/// Says that the devices of a claim have other numbers than its running containers know.
pub fn renumbered() -> String {
    "the NVIDIA driver of this node gives the claim's devices other numbers than before, or has lost them: it was \
     loaded anew, or a MIG mode was switched. Containers that run keep the numbers that they were started with, which \
     may mean nothing or somebody else's device by now; containers that start from now on get the claim's own. Delete \
     the pods that use the claim"
        .to_owned()
}

/// Says that a claim for administration was prepared without these devices.
pub fn left_out(devices: &[String]) -> String {
    format!(
        "prepared without {}: a virtual machine has the GPU, which is not with NVIDIA's driver meanwhile. Containers that \
         start once it is back have it: delete the pods that use the claim then",
        cut(&devices.join(", "))
    )
}

/// Says that a CDI spec may name other devices than it should.
pub fn not_renumbered(claim: &ClaimRef, error: &str) -> String {
    format!(
        "whether the CDI spec of claim {claim} names the claim's own devices cannot be told, or it cannot be written \
         anew ({}), so a container of it that starts now may get another device. It is tried again; delete the pods that \
         use the claim if it stays so",
        cut(error)
    )
}

/// Says that containers of a claim may open devices that are not the claim's.
pub fn reached(reach: &Reach, victims: &[&ClaimRef]) -> String {
    let users: Vec<String> = victims.iter().map(ToString::to_string).collect();
    let users = match users.as_slice() {
        [] => String::new(),
        users => format!(" It is prepared for claim {}.", cut(&users.join(", "))),
    };
    format!(
        "{reach}.{users} No other claim gets it until the first one is unprepared: delete the pods that use that one"
    )
}

/// Says that a partition of a prepared claim is gone.
pub fn partition_gone(gone: &GonePartition) -> String {
    let GonePartition { claim, device, gpu, placement } = gone;
    format!(
        "the partition at {placement} on GPU {gpu}, device {device} of claim {claim}, is gone: the driver was loaded anew, \
         or somebody destroyed it. Containers cannot use it any more. Delete the pods that use the claim; the partition \
         is made again when the claim is prepared next"
    )
}

/// Says that a GPU instance belongs to no claim and is given out as it is.
pub fn adopted(mig: &LiveMig, device: &DeviceName) -> String {
    format!(
        "GPU instance {} at {} on GPU {} belongs to no claim. Claims get it as it is, as device {device}, and it stays \
         when they end; nothing else that overlaps it is allocated. If it should go: kubeletPlugin.unclaimedMig: \
         destroy, or {}",
        mig.gpu_instance,
        mig.placement,
        mig.parent,
        removal(mig)
    )
}

/// Says how an administrator destroys an instance.
fn removal(mig: &LiveMig) -> String {
    let (instance, gpu) = (mig.gpu_instance, &mig.parent);
    format!("nvidia-smi mig -dci -gi {instance} -i {gpu}, then nvidia-smi mig -dgi -gi {instance} -i {gpu}")
}

/// Says that a GPU instance belongs to no claim and is in the way.
pub fn foreign(mig: &LiveMig, unclaimed: Unclaimed, left_over: bool) -> String {
    let (instance, gpu) = (mig.gpu_instance, &mig.parent);
    let advice = match unclaimed {
        Unclaimed::Destroy => DESTROYS.to_owned(),
        Unclaimed::Adopt if left_over => DESTROYS.to_owned(),
        Unclaimed::Leave => {
            format!(
                "The agent leaves it as it is (kubeletPlugin.unclaimedMig: leave). If nobody needs it: {}",
                removal(mig)
            )
        }
        Unclaimed::Adopt => format!(
            "It has no compute instance that takes all of it, so no claim can have it as it is. Make that (nvidia-smi mig \
             -cci -gi {instance} -i {gpu}), or, if nobody needs it: {}",
            removal(mig)
        ),
    };
    format!(
        "GPU instance {instance} at {} on GPU {gpu} belongs to no claim; nothing that overlaps it is allocated. {advice}",
        mig.placement
    )
}

/// Says that the driver reported an error, and what follows from it. `taints` is true if the API server keeps
/// taints.
pub fn fault(event: &GpuEvent, fault: &str, verdict: Verdict, taints: bool) -> String {
    let gpu = event.gpu.as_ref().map_or_else(|| "unknown".to_owned(), ToString::to_string);
    let advice = match (event.kind, verdict) {
        (_, Verdict::Taint(TaintEffect::NoExecute | TaintEffect::NoSchedule)) if !taints => {
            "It is not published any more, as the API server keeps no taints, and pods that use it are not evicted. See \
             the kernel's log for NVRM and Xid messages; drain the node, and reset or replace the GPU"
        }
        (_, Verdict::Taint(TaintEffect::NoExecute)) => {
            "Nothing on it can go on: its pods are evicted and it takes no other claim. See the kernel's log for NVRM \
             and Xid messages; drain the node, and reset or replace the GPU"
        }
        (_, Verdict::Taint(TaintEffect::NoSchedule)) => {
            "It takes no other claim, and pods that use it show it as unhealthy. See the kernel's log for NVRM and Xid \
             messages; drain the node, and reset or replace the GPU"
        }
        (_, Verdict::Taint(TaintEffect::None)) => {
            "The GPU goes on. See the kernel's log for NVRM and Xid messages, and the logs of the pods that use it"
        }
        (EventKind::Xid(_), Verdict::Ignore) => {
            "A program on the GPU caused it, and the GPU goes on. See the logs of the pods that use it"
        }
        (EventKind::EccSingleBit, _) => "It was corrected. If it comes often, have the GPU checked",
        _ => "See the kernel's log for NVRM messages",
    };
    format!("the driver reported {fault} on GPU {gpu}. {advice}")
}

/// Says that a GPU has a taint for its health. `taints` is true if the API server keeps taints.
pub fn tainted(gpu: &GpuUuid, told: &Told, taints: bool) -> String {
    let does = match told.taint.effect {
        TaintEffect::NoSchedule | TaintEffect::NoExecute if !taints => {
            "would keep it from claims; as the API server keeps no taints (feature gate DRADeviceTaints), the GPU is not \
             published, and pods that use it go on"
        }
        TaintEffect::None => "says so, and it is given out all the same",
        TaintEffect::NoSchedule => "keeps it from claims that do not tolerate it, and pods that use it go on",
        TaintEffect::NoExecute => {
            "keeps it from claims that do not tolerate it, and pods that use it are evicted"
        }
    };
    let detail = if told.detail.is_empty() { String::new() } else { format!(" ({})", cut(&told.detail)) };
    format!(
        "GPU {gpu}: {}{detail}. Taint {} on its devices {does}. What to do: {}",
        told.cause.text(),
        shown(told),
        told.cause.end()
    )
}

/// Says that a taint of a GPU is gone.
pub fn taint_gone(gpu: &GpuUuid, told: &Told) -> String {
    format!("GPU {gpu}: taint {} is gone, set for: {}", shown(told), told.cause.text())
}

/// Formats a taint as kubectl writes it: `gpu.example.com/xid=79:NoExecute`.
fn shown(told: &Told) -> String {
    let taint = &told.taint;
    let value = if taint.value.is_empty() { String::new() } else { format!("={}", taint.value) };
    format!("{}{value}:{}", taint.key, taint.effect.as_str())
}

/// Says that the driver as a whole does not answer.
pub fn no_driver(error: &GpuError) -> String {
    format!(
        "the node's GPUs cannot be read; what is published stays, with a taint that keeps claims off it, and nothing new \
         is prepared until the driver answers. It is tried again, and the library opened anew if the driver was \
         exchanged. If it stays so, see the kernel's log for NVRM messages, and load the driver: {}",
        cut(&error.to_string())
    )
}

/// Says that the node has no GPU that NVML could show.
pub const NO_GPU: &str = "this node has no GPU of NVIDIA on its PCI bus, and nothing to publish; keep agents off such \
                          nodes with kubeletPlugin.gpuNodeLabels or nodeSelector";

/// Says that the GPUs that an earlier agent published are not there any more.
pub const WITHDRAWN: &str = "this node has no GPU of NVIDIA on its PCI bus any more, so its devices are no longer \
                             published; no claim has any. If it should have one, see the kernel's log, and look whether \
                             the board is seated and powered";

/// Says that NVML could not be opened since the agent's start.
pub fn no_driver_yet(error: &GpuError) -> String {
    format!(
        "NVML cannot be opened: {}. Until it can, this agent publishes and prepares no GPU, what was published stays, \
         and claims that are over are unprepared; it is tried every 5 s. Load the driver (modprobe nvidia), or, if it lies \
         elsewhere, set kubeletPlugin.driverRoot or nvmlLibrary",
        cut(&error.to_string())
    )
}

/// Says that a label of the Node asks for the driver to be unloaded.
pub fn driver_asked_for(label: &str, claims: usize) -> String {
    let then = match claims {
        0 => "now".to_owned(),
        1 => "when the claim that is prepared has ended".to_owned(),
        claims => format!("when the {claims} claims that are prepared have ended"),
    };
    format!(
        "label {label}: the driver is to be unloaded. No GPU of this node is given out, and NVML is closed {then}"
    )
}

/// Says that other drivers give out GPUs of the node; `by` names the things by which they do.
pub fn other_driver(by: &[String]) -> String {
    format!(
        "somebody else gives out GPUs of this node, too ({}): a GPU would be given out twice, so no claim gets one of them \
         until that ends. Stop the other one on this node, or keep this agent off it",
        by.join(", ")
    )
}

/// Says that no other driver gives out GPUs any more.
pub const OTHER_DRIVER_GONE: &str = "nobody else gives out GPUs of this node any more: claims get them again";

/// Says that the GPU operator has its MIG manager on the node, by this label.
pub fn mig_manager(label: &str) -> String {
    format!(
        "label {label}: the GPU operator's MIG manager runs here. When label nvidia.com/mig.config changes it destroys all \
         partitions, those of running claims, too"
    )
}

/// Says that NVML is closed and the kernel module is free of this agent.
pub fn driver_let_go(label: &str) -> String {
    format!(
        "label {label}: NVML is closed, so that the kernel module is free of this agent, until the label is gone; no GPU \
         of this node is given out until then"
    )
}

/// Says that NVML is closed, and something still uses it.
pub fn driver_held(label: &str) -> String {
    format!(
        "label {label}: NVML is closed, but a call of it has not come back, and the kernel module cannot be unloaded \
         before it does. /healthz of the agent names such calls; if it does not end, delete the agent's pod"
    )
}

/// Says that the label was removed before NVML was closed.
pub fn driver_kept() -> String {
    "the label that asked for the driver is gone, and NVML was not closed: GPUs are given out again"
        .to_owned()
}

/// Says that the label was removed.
pub fn driver_resumed() -> String {
    "the label that asked for the driver is gone: NVML is opened again, and GPUs are given out once the driver answers"
        .to_owned()
}

/// Says that an administrator took a GPU out of service.
pub fn cordoned(gpu: &GpuUuid, cordon: &Cordon, taints: bool) -> String {
    let does = match (taints, cordon.evict) {
        (true, true) => "claims that do not tolerate it do not get it, and pods that use it are evicted",
        (true, false) => "claims that do not tolerate it do not get it, and pods that use it go on",
        (false, _) => {
            "it is not published, as this API server keeps no device taints, and pods that use it go on"
        }
    };
    let reason = if cordon.reason.is_empty() { String::new() } else { format!(" ({})", cut(&cordon.reason)) };
    format!(
        "GPU {gpu} is out of service{reason}: {does}. `aliquot uncordon {gpu}` puts it into service again"
    )
}

/// Says that a GPU is in service again.
pub fn uncordoned(gpu: &GpuUuid) -> String {
    format!("GPU {gpu} is in service again: annotation {} is gone", cordon::key(gpu))
}

/// Says that an annotation that should take a GPU out of service names no GPU of this node.
pub fn cordon_ignored(annotation: &str, node: &str) -> String {
    let annotation = cut(annotation);
    format!(
        "annotation {annotation} takes no GPU out of service: its name does not end with the UUID of a GPU that node {node} \
         has (`nvidia-smi -L` shows them). Remove it: kubectl annotate node {node} {annotation}-"
    )
}

/// Says that errors of a GPU were cleared because an administrator acknowledged them.
pub fn acknowledged(gpu: &GpuUuid, said: &Acknowledgement, cleared: &[Cause]) -> String {
    let causes: Vec<String> = cleared.iter().map(|cause| cause.text()).collect();
    let reason = if said.reason.is_empty() { String::new() } else { format!(" ({})", cut(&said.reason)) };
    format!(
        "what happened to GPU {gpu} until {} is acknowledged{reason} and counts no more: {}",
        said.at,
        cut(&causes.join("; "))
    )
}

/// Says that an annotation that should clear the errors of a GPU cannot be understood.
pub fn acknowledgement_ignored(annotation: &str, node: &str) -> String {
    let annotation = cut(annotation);
    format!(
        "annotation {annotation} acknowledges nothing: its name must end with the UUID of a GPU (`nvidia-smi -L` shows \
         them) and its value begin with a time, as `date -u +%FT%TZ` prints it. A time ahead of this node's clock counts \
         once it has come, for all errors until then. Remove it: kubectl annotate node {node} {annotation}-"
    )
}

/// Says that a GPU that is out of service is not seen.
pub fn cordoned_and_not_seen(gpu: &GpuUuid, node: &str) -> String {
    format!(
        "GPU {gpu} is cordoned, and is not seen on node {node}: it stays out of service should it come back. If it was \
         taken out for good: aliquot uncordon {gpu}"
    )
}

/// Says that the API server refuses slices.
pub fn refused(error: &PublishError) -> String {
    format!(
        "{}. What was published before stays, and it is tried again. Check whether an admission policy or webhook \
         refuses ResourceSlices, whether the agent's role is as the chart has it, and whether this API server's version is one that this release supports",
        cut(&error.to_string())
    )
}

/// Says that publishing fails again and again.
pub fn not_published(error: &PublishError) -> String {
    format!(
        "{}. The ResourceSlices of this node are not as its GPUs are. What was published before stays, and it is tried \
         again. Check whether the API server answers, and whether the node's disk has room",
        cut(&error.to_string())
    )
}

/// Says that the API server does not keep all fields.
pub fn features_off(gates: &str, offer: &[&str]) -> String {
    format!(
        "the API server drops fields of feature gates that are off ({gates}), so less is offered: {}. Switch them on in \
         API server, controller manager, scheduler and kubelet; the agent sees it when it is restarted",
        offer.join("; ")
    )
}

/// Says that a call to the driver does not come back.
pub fn stuck(what: &impl Display) -> String {
    format!("{what}; {STUCK}")
}

/// Returns the start of a text that is too long for a note.
fn cut(text: &str) -> String {
    if text.len() <= REASON {
        return text.to_owned();
    }
    format!("{}…", text.get(..text.floor_char_boundary(REASON)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Cause;
    use rstest::rstest;
    use std::path::PathBuf;

    const LONG: &str = "a reason without end ";

    fn lost(cause: Cause) -> Lost {
        Lost { reason: LONG.repeat(100), cause, ..Lost::default() }
    }

    #[rstest]
    #[case::of_this_release(Cause::Unreadable, "ClaimsWithoutRecord")]
    #[case::of_a_newer_release(Cause::Newer, "delete the file")]
    fn a_loss_says_what_goes_on_and_what_ends_it_however_long_its_reason(
        #[case] cause: Cause,
        #[case] wanted: &str,
    ) {
        let note = loss(&lost(cause));
        assert!(note.len() <= 1000, "{}", note.len());
        for wanted in ["Pods run on", "nothing unknown is removed", "new claim", wanted] {
            assert!(note.contains(wanted), "{note}");
        }
    }

    #[test]
    fn advice_is_left_when_a_reason_is_long() {
        let path = || PathBuf::from("/var/lib/kubelet/plugins/gpu.example.com/checkpoint.json");
        let damaged = Damage { path: path(), reason: LONG.repeat(100), kept: path() };
        let note = damage(&damaged);
        assert!(note.len() <= 1000 && note.ends_with("writes there"), "{note}");
        let refusal = refused(&PublishError::NoNode(LONG.repeat(100)));
        assert!(refusal.len() <= 1000 && refusal.contains("admission policy"), "{refusal}");
        assert_eq!(cut("é".repeat(300).as_str()).chars().count(), 241);
    }

    #[rstest]
    #[case::of_a_program(EventKind::Xid(31), Verdict::Ignore, "pods that use it")]
    #[case::informational(EventKind::Xid(94), Verdict::Taint(TaintEffect::None), "goes on")]
    #[case::of_the_gpu(EventKind::Xid(48), Verdict::Taint(TaintEffect::NoSchedule), "drain the node")]
    #[case::for_good(EventKind::Xid(79), Verdict::Taint(TaintEffect::NoExecute), "pods are evicted")]
    #[case::corrected(EventKind::EccSingleBit, Verdict::Ignore, "was corrected")]
    fn an_error_of_a_gpu_says_whether_somebody_has_to_act(
        #[case] kind: EventKind,
        #[case] verdict: Verdict,
        #[case] wanted: &str,
    ) {
        let event = GpuEvent { kind, gpu: None, gpu_instance: None, compute_instance: None };
        let note = fault(&event, "xid-1", verdict, true);
        assert!(
            note.starts_with("the driver reported xid-1 on GPU unknown.") && note.contains(wanted),
            "{note}"
        );
    }
}
