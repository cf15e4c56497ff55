//! Handles GPUs that an administrator took out of service. [`aliquot_model::cordon`] reads the Node's
//! annotations. This module puts the taints on the published devices, and reports the cordons.
//!
//! The published slices show which cordons were reported. After a restart, annotations that are ignored, and
//! cordons on servers without taints, are reported again.

use super::Publisher;
use crate::notice;
use crate::reasons;
use aliquot_model::cordon::{self, Cordons};
use aliquot_model::layout::{GpuState, ServerFeatures, Taint, TaintEffect};
use aliquot_model::{DeviceName, GpuUuid, names};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::collections::{BTreeMap, BTreeSet};

/// The cordons that were reported.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// The effects, by GPU; unknown before the first look at the published slices.
    cordoned: Option<BTreeMap<GpuUuid, TaintEffect>>,
    ignored: BTreeSet<String>,
}

/// Reads the cordons from a Node.
pub(super) fn read(node: &Node) -> Cordons {
    node.metadata.annotations.as_ref().map(Cordons::read).unwrap_or_default()
}

/// Puts the taints of the cordons on the GPUs.
pub(super) fn apply(gpus: &mut Vec<GpuState>, cordons: &Cordons, driver: &str, features: ServerFeatures) {
    let cordon = |gpu: &GpuState| cordons.gpus.get(&gpu.info.uuid).map(|cordon| cordon.taint(driver));
    close(gpus, cordon, features);
}

/// Puts a taint on the GPUs for which `taint` returns one. On a server that keeps no taints these GPUs are
/// removed: there is no other way to keep a claim off them.
pub(super) fn close(
    gpus: &mut Vec<GpuState>,
    taint: impl Fn(&GpuState) -> Option<Taint>,
    features: ServerFeatures,
) {
    gpus.retain_mut(|gpu| {
        let Some(taint) = taint(gpu) else { return true };
        gpu.taints.retain(|other| other.key != taint.key);
        gpu.taints.push(taint);
        features.taints
    });
}

/// Returns the GPUs that are out of service according to the slices in the API.
fn published(actual: &[ResourceSlice], driver: &str, gpus: &[GpuState]) -> BTreeMap<GpuUuid, TaintEffect> {
    let key = names::cordoned_taint(driver);
    let of_minor: BTreeMap<u32, &GpuUuid> = gpus.iter().map(|gpu| (gpu.info.minor, &gpu.info.uuid)).collect();
    let devices = actual.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let cordoned = devices.filter_map(|device| {
        let taint = device.taints.iter().flatten().find(|taint| taint.key == key)?;
        let gpu = of_minor.get(&DeviceName::parse(&device.name)?.minor())?;
        Some(((*gpu).clone(), TaintEffect::parse(&taint.effect)?))
    });
    cordoned.collect()
}

impl Publisher {
    /// Notes the cordons that were already reported, before anything else is published. `gpus` are all GPUs
    /// of the node.
    pub(super) fn note_told_cordons(&mut self, actual: &[ResourceSlice], gpus: &[GpuState]) {
        let driver = &self.settings.driver;
        self.told_cordons.cordoned.get_or_insert_with(|| published(actual, driver, gpus));
    }

    /// Reports cordons that came and went, once they are published.
    pub(super) fn tell_cordons(
        &mut self,
        cordons: &Cordons,
        gpus: &BTreeSet<GpuUuid>,
        features: ServerFeatures,
    ) {
        let here = || cordons.gpus.iter().filter(|(gpu, _)| gpus.contains(*gpu));
        self.metrics.cordoned_gpus.set(i64::try_from(here().count()).unwrap_or(i64::MAX));
        let now: BTreeMap<GpuUuid, TaintEffect> =
            here().map(|(gpu, cordon)| (gpu.clone(), cordon.effect())).collect();
        let before = self.told_cordons.cordoned.replace(now).unwrap_or_default();
        for (gpu, cordon) in here().filter(|(gpu, cordon)| before.get(*gpu) != Some(&cordon.effect())) {
            self.events.node_normal(reasons::GPU_CORDONED, notice::cordoned(gpu, cordon, features.taints));
        }
        for gpu in before.keys().filter(|gpu| !cordons.gpus.contains_key(*gpu)) {
            self.events.node_normal(reasons::GPU_UNCORDONED, notice::uncordoned(gpu));
        }
        let node = &self.settings.node;
        let unseen = cordons.gpus.keys().filter(|gpu| !gpus.contains(*gpu));
        let unseen = unseen.map(|gpu| (cordon::key(gpu), notice::cordoned_and_not_seen(gpu, node)));
        let malformed = cordons.not_understood.iter();
        let malformed = malformed.map(|name| (name.clone(), notice::cordon_ignored(name, node)));
        let notes: BTreeMap<String, String> = unseen.chain(malformed).collect();
        for (_, note) in notes.iter().filter(|(name, _)| !self.told_cordons.ignored.contains(*name)) {
            self.events.node_warning(reasons::CORDON_IGNORED, note.clone());
        }
        self.told_cordons.ignored = notes.keys().cloned().collect();
        self.readiness.notes.set("cordon", notes.into_values().collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::h100;
    use aliquot_model::cordon::Cordon;

    fn gpu(minor: u32) -> GpuState {
        let xid = Taint { key: "d/xid".into(), value: "48".into(), effect: TaintEffect::NoSchedule };
        GpuState {
            info: h100(minor),
            live: Vec::new(),
            held: Vec::new(),
            standing: Vec::new(),
            taints: vec![xid],
        }
    }

    fn keys(gpus: &[GpuState]) -> Vec<String> {
        let keys =
            |gpu: &GpuState| gpu.taints.iter().map(|taint| taint.key.clone()).collect::<Vec<_>>().join(" ");
        gpus.iter().map(|gpu| format!("gpu-{}: {}", gpu.info.minor, keys(gpu))).collect()
    }

    #[test]
    fn a_cordon_is_a_taint_beside_others_and_where_there_are_no_taints_the_gpu_is_not_shown() {
        let cordon = Cordon { evict: false, reason: String::new() };
        let cordons = Cordons { gpus: [(h100(1).uuid, cordon)].into(), ..Cordons::default() };
        let features = ServerFeatures::all_of_minor(36);
        let mut gpus = vec![gpu(0), gpu(1)];
        apply(&mut gpus, &cordons, "d", features);
        apply(&mut gpus, &cordons, "d", features);
        assert_eq!(keys(&gpus), ["gpu-0: d/xid", "gpu-1: d/xid d/cordoned"]);
        apply(&mut gpus, &cordons, "d", ServerFeatures { taints: false, ..features });
        assert_eq!(keys(&gpus), ["gpu-0: d/xid"]);
    }
}
