//! Counter sets, which make the devices of one GPU exclude each other.

use super::{CounterSet, Holding};
use crate::{GpuInfo, MigProfile};
use std::collections::BTreeMap;

/// The prefix of the names of memory slices' counters, as in NVIDIA's driver; their values are 1.
pub const MEMORY_SLICE: &str = "memory-slice-";

fn slice_name(slice: u32) -> String {
    format!("{MEMORY_SLICE}{slice}")
}

/// Returns the counters of a GPU. Boards without MIG have one slice, so that their modes exclude each other
/// too.
pub(super) fn of_gpu(info: &GpuInfo) -> CounterSet {
    CounterSet { name: format!("gpu-{}", info.minor), counters: totals(info) }
}

/// Returns the totals. Every legal set of partitions stays within them, and the whole GPU consumes all of
/// them.
fn totals(info: &GpuInfo) -> BTreeMap<String, u64> {
    let mut totals: BTreeMap<String, u64> =
        (0..info.memory_slices().max(1)).map(|slice| (slice_name(slice), 1)).collect();
    totals.insert("memory".to_owned(), info.memory_bytes);
    totals.insert("multiprocessors".to_owned(), info.multiprocessors.into());
    for profile in info.profiles() {
        for (name, value) in amounts(profile) {
            let most = value.saturating_mul(profile.max_instances.max(1).into());
            let total = totals.entry(name).or_default();
            *total = (*total).max(most);
        }
    }
    totals
}

/// Returns what one instance of a profile takes in addition to its memory slices.
fn amounts(profile: &MigProfile) -> Vec<(String, u64)> {
    let engines = profile.engines;
    [
        ("memory", profile.memory_bytes),
        ("multiprocessors", profile.multiprocessors.into()),
        ("copy-engines", engines.copy.into()),
        ("decoders", engines.decoders.into()),
        ("encoders", engines.encoders.into()),
        ("jpeg-engines", engines.jpeg.into()),
        ("ofa-engines", engines.ofa.into()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

/// Returns what a device consumes of its GPU's counters.
pub(super) fn consumed(
    info: &GpuInfo,
    profile: Option<&MigProfile>,
    holding: Holding,
) -> BTreeMap<String, u64> {
    match (holding.placement(), profile) {
        (Some(placement), Some(profile)) => {
            let slices = placement.slices().map(|slice| (slice_name(slice), 1));
            slices.chain(amounts(profile).into_iter().filter(|(_, value)| *value > 0)).collect()
        }
        _ => totals(info),
    }
}
