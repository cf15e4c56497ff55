//! Splits counter sets and devices over ResourceSlices within the API's limits.

use super::{CounterSet, Device, MAX_COUNTER_SETS_PER_SLICE, MAX_DEVICES_PER_SLICE, ServerFeatures, Slice};

/// Everything that one GPU publishes.
pub(super) struct PublishedGpu {
    pub(super) counters: Option<CounterSet>,
    pub(super) devices: Vec<Device>,
}

/// Splits GPUs into slices; the result is never empty.
pub(super) fn split(gpus: Vec<PublishedGpu>, server: ServerFeatures) -> Vec<Slice> {
    let mut slices = Vec::new();
    if server.separate_counter_slices {
        let sets: Vec<CounterSet> = gpus.iter().filter_map(|gpu| gpu.counters.clone()).collect();
        slices.extend(
            sets.chunks(MAX_COUNTER_SETS_PER_SLICE)
                .map(|sets| Slice { counter_sets: sets.to_vec(), devices: Vec::new() }),
        );
        for gpu in gpus {
            slices.extend(
                gpu.devices
                    .chunks(MAX_DEVICES_PER_SLICE)
                    .map(|devices| Slice { counter_sets: Vec::new(), devices: devices.to_vec() }),
            );
        }
    } else {
        // A counter set must be in the slice of its devices, so each slice is one GPU; no board has more
        // devices than a slice holds.
        slices.extend(
            gpus.into_iter()
                .filter(|gpu| !gpu.devices.is_empty())
                .map(|gpu| Slice { counter_sets: gpu.counters.into_iter().collect(), devices: gpu.devices }),
        );
    }
    if slices.is_empty() {
        slices.push(Slice::default());
    }
    slices
}
