//! Detects other drivers that give out GPUs of this node, or partition them.
//!
//! Kubernetes keeps no common account of extended resources, which device plugins publish, and of the devices
//! of each DRA driver: hardware that two drivers publish is given out twice. So this driver gives nothing out
//! while another one does; prepared claims go on. A driver that has ended leaves pods that go on with their
//! GPUs. So the publisher also asks for such pods: when the agent starts, and before its GPUs are given out
//! again.

use super::{PublishError, Publisher, Settings, pod_resources};
use crate::{notice, reasons};
use aliquot_model::layout::{Taint, TaintEffect};
use aliquot_model::names;
use k8s_openapi::api::core::v1::Node as ApiNode;
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// NVIDIA's DRA driver for GPUs. Its driver for ComputeDomains gives out no GPUs.
const DRA_DRIVER: &str = "gpu.nvidia.com";
/// The prefixes of extended resources that stand for GPUs, or parts of them: those of NVIDIA's device plugin
/// (`gpu`, `gpu.shared`, `mig-1g.10gb`), and of HAMi (`gpu`, `gpumem`, `gpucores`).
const RESOURCES: [&str; 2] = ["nvidia.com/gpu", "nvidia.com/mig-"];
/// The prefix of all of NVIDIA's resources. Its plugin for virtual machines appends the name of a GPU's chip
/// or of a type of vGPU, in capitals (`GA102GL_A10`, `NVIDIA_A10-12Q`). Its resources that are not GPUs are
/// in small letters (`hostdev`).
const NVIDIA: &str = "nvidia.com/";
/// The longest interval between questions whether pods have GPUs of a driver that has ended.
const ASK_AGAIN: Duration = Duration::from_secs(30);
/// The GPU operator's label for its MIG manager, which changes the partitions of a whole node when it is told
/// to.
const MIG_MANAGER: (&str, &str) = ("nvidia.com/gpu.deploy.mig-manager", "true");

fn is_gpu(resource: &str) -> bool {
    let capital = |name: &str| name.starts_with(|first: char| first.is_ascii_uppercase());
    RESOURCES.iter().any(|prefix| resource.starts_with(prefix))
        || resource.strip_prefix(NVIDIA).is_some_and(capital)
}

/// The other drivers that were seen to give GPUs out, also by an earlier process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Seen {
    by: Vec<String>,
    /// The time since which nothing shows them any more, in milliseconds of Unix time.
    gone_since: Option<u64>,
}

/// Returns the drivers to remember, and when to look again. A driver that is no longer seen has to stay away
/// for `grace`. A kubelet that starts reports that each plugin has nothing, and deletes all drivers' slices,
/// until they come back.
fn lasting(
    before: Option<Seen>,
    found: &[String],
    now: u64,
    grace: Duration,
) -> (Option<Seen>, Option<Duration>) {
    if !found.is_empty() {
        return (Some(Seen { by: found.to_vec(), gone_since: None }), None);
    }
    let Some(before) = before else { return (None, None) };
    // If the clock was set back, the time begins anew.
    let since = before.gone_since.unwrap_or(now).min(now);
    let left = grace.saturating_sub(Duration::from_millis(now.saturating_sub(since)));
    if left.is_zero() {
        return (None, None);
    }
    (Some(Seen { gone_since: Some(since), ..before }), Some(left))
}

/// The activity of other drivers on a node's GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Others {
    /// The things by which other drivers give the GPUs out.
    pub(super) give_out: Vec<String>,
    /// The label by which another program partitions the GPUs, as `name=value`.
    partition: Option<String>,
}

impl Others {
    /// Reads the activity from a Node and from the slices of all drivers for it.
    pub(super) fn of(node: &ApiNode, slices: &[ResourceSlice]) -> Self {
        // The allocatable amount is not used: it is 0 while a plugin is started anew. The capacity stays for
        // five minutes then (the kubelet's endpointStopGracePeriod), and is 0 afterwards.
        let capacity = node.status.iter().flat_map(|status| status.capacity.iter().flatten());
        let resources = capacity
            .filter(|(name, _)| is_gpu(name))
            .filter(|(_, quantity)| quantity.0 != "0")
            .map(|(name, quantity)| format!("{name}: {}", quantity.0));
        let theirs = slices.iter().filter(|slice| slice.spec.driver == DRA_DRIVER);
        let devices: usize = theirs.filter_map(|slice| Some(slice.spec.devices.as_ref()?.len())).sum();
        let devices = (devices > 0).then(|| format!("devices of the DRA driver {DRA_DRIVER}: {devices}"));
        let (name, value) = MIG_MANAGER;
        let label = node.metadata.labels.iter().flatten().any(|label| label == (&name.into(), &value.into()));
        Self {
            give_out: resources.chain(devices).collect(),
            partition: label.then(|| format!("{name}={value}")),
        }
    }

    /// Returns the taint that all devices have meanwhile.
    pub(super) fn taint(&self, driver: &str) -> Option<Taint> {
        let key = names::other_driver_taint(driver);
        (!self.give_out.is_empty()).then(|| Taint {
            key,
            value: String::new(),
            effect: TaintEffect::NoSchedule,
        })
    }
}

impl Publisher {
    /// Returns the present activity of other drivers, including those that ended a short while ago, and when
    /// to look again.
    pub(super) async fn others(
        &mut self,
        node: &ApiNode,
        theirs: &[ResourceSlice],
    ) -> Result<(Others, Option<Duration>), PublishError> {
        let mut others = Others::of(node, theirs);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let grace = self.settings.other_driver_grace;
        let (mut seen, mut again) = lasting(self.memory.others.clone(), &others.give_out, now, grace);
        if seen.is_none() && !self.nobody_else {
            let ours = &self.settings.driver;
            let theirs = |name: &str| is_gpu(name) || (name == DRA_DRIVER && name != ours);
            let Settings { pod_resources_socket, own_pod, .. } = &self.settings;
            let asked = pod_resources::holders(pod_resources_socket, own_pod.as_ref(), theirs).await;
            let by = match (asked, &self.memory.others) {
                (Ok(pods), _) => pods,
                // Devices that are held back stay so until the kubelet answers; the rest of publishing goes
                // on.
                (Err(error), Some(before)) => {
                    tracing::warn!(%error, "asking again");
                    before.by.clone()
                }
                (Err(error), None) => return Err(error),
            };
            if !by.is_empty() {
                seen = Some(Seen { by, gone_since: Some(0) });
                again = Some(grace.clamp(Duration::from_secs(1), ASK_AGAIN));
            }
        }
        self.nobody_else = seen.is_none();
        others.give_out = seen.iter().flat_map(|seen| seen.by.clone()).collect();
        if seen != self.memory.others {
            self.memory.others = seen;
            self.save_memory()?;
        }
        Ok((others, again))
    }

    /// Reports other drivers that came and went.
    pub(super) fn tell_others(&mut self, others: Others) {
        let before = std::mem::replace(&mut self.told_others, others);
        let Others { give_out, partition } = &self.told_others;
        let mut notes = Vec::new();
        if !give_out.is_empty() {
            notes.push(notice::other_driver(give_out));
        }
        self.readiness.notes.set("others", notes.clone());
        if before.give_out != *give_out {
            match notes.pop() {
                Some(note) => self.events.node_warning(reasons::OTHER_DRIVER, note),
                None => {
                    self.events.node_normal(reasons::OTHER_DRIVER_GONE, notice::OTHER_DRIVER_GONE.to_owned())
                }
            }
        }
        if let Some(label) = partition.as_deref().filter(|_| before.partition.is_none()) {
            self.events.node_warning(reasons::MIG_MANAGER, notice::mig_manager(label));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    fn others(capacity: Value, labels: Value, slices: Value) -> Others {
        let node = json!({"metadata": {"labels": labels}, "status": {"capacity": capacity}});
        let node: ApiNode = serde_json::from_value(node).unwrap();
        Others::of(&node, &serde_json::from_value::<Vec<_>>(slices).unwrap())
    }

    fn slice(driver: &str, devices: usize) -> Value {
        let devices: Vec<_> = (0..devices).map(|at| json!({"name": format!("gpu-{at}")})).collect();
        let pool = json!({"name": "n", "generation": 1, "resourceSliceCount": 1});
        json!({"metadata": {"name": "s"}, "spec": {"driver": driver, "pool": pool, "devices": devices}})
    }

    #[rstest]
    #[case::device_plugin(json!({"nvidia.com/gpu": "8", "cpu": "4"}), &["nvidia.com/gpu: 8"])]
    #[case::of_partitions(json!({"nvidia.com/mig-1g.10gb": "7"}), &["nvidia.com/mig-1g.10gb: 7"])]
    #[case::shared(json!({"nvidia.com/gpu.shared": "16"}), &["nvidia.com/gpu.shared: 16"])]
    #[case::for_virtual_machines(json!({"nvidia.com/GA102GL_A10": "2"}), &["nvidia.com/GA102GL_A10: 2"])]
    #[case::a_plugin_that_ended(json!({"nvidia.com/gpu": "0"}), &[])]
    #[case::other_hardware(json!({"nvidia.com/hostdev": "2", "amd.com/gpu": "1"}), &[])]
    fn whoever_has_extended_resources_of_gpus_gives_them_out(
        #[case] capacity: Value,
        #[case] expected: &[&str],
    ) {
        let found = others(capacity, json!({}), json!([]));
        assert_eq!(found.give_out, expected);
        assert_eq!(found.taint("d").is_some(), !expected.is_empty());
    }

    #[test]
    fn slices_of_nvidias_driver_for_gpus_give_them_out_and_others_do_not() {
        let slices = json!([
            slice("gpu.nvidia.com", 2),
            slice("gpu.nvidia.com", 1),
            slice("compute-domain.nvidia.com", 5)
        ]);
        let found = others(json!({}), json!({}), slices);
        assert_eq!(found.give_out, ["devices of the DRA driver gpu.nvidia.com: 3"]);
        assert_eq!(others(json!({}), json!({}), json!([slice("gpu.nvidia.com", 0)])), Others::default());
    }

    #[test]
    fn who_was_seen_counts_until_he_has_stayed_away_for_a_while() {
        let (grace, seconds) = (Duration::from_secs(10), |count: u64| count * 1000);
        let found = ["nvidia.com/gpu: 8".to_owned()];
        let (seen, again) = lasting(None, &found, seconds(1), grace);
        assert_eq!(again, None);
        let (seen, again) = lasting(seen, &[], seconds(2), grace);
        assert!(seen.is_some() && again == Some(grace));
        let (back, _) = lasting(seen.clone(), &found, seconds(3), grace);
        assert_eq!(lasting(back, &[], seconds(12), grace).1, Some(grace), "from when he went again");
        assert_eq!(lasting(seen.clone(), &[], seconds(11), grace).1, Some(Duration::from_secs(1)));
        assert_eq!(lasting(seen.clone(), &[], seconds(1), grace).1, Some(grace), "a clock that was set back");
        assert_eq!(lasting(seen, &[], seconds(12), grace), (None, None));
        assert_eq!(lasting(None, &[], 0, grace), (None, None));
    }

    #[test]
    fn a_mig_manager_is_told_of_and_keeps_nothing_back() {
        let found = others(json!({}), json!({"nvidia.com/gpu.deploy.mig-manager": "true"}), json!([]));
        assert_eq!(found.partition.as_deref(), Some("nvidia.com/gpu.deploy.mig-manager=true"));
        assert_eq!(found.taint("d"), None);
        let off = others(json!({}), json!({"nvidia.com/gpu.deploy.mig-manager": "false"}), json!([]));
        assert_eq!(off, Others::default());
    }
}
