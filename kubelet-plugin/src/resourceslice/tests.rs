use super::*;
use crate::testing::{DRIVER, POOL, h100};
use aliquot_model::layout::{AllocatorMode, GpuState, Options, publish};
use rstest::rstest;

fn owner() -> Owner {
    Owner {
        driver: DRIVER.into(),
        pool: POOL.into(),
        node: "n1".into(),
        node_uid: "node-uid".into(),
        hand_over_until: None,
    }
}

fn layout_of(mode: AllocatorMode) -> Vec<Slice> {
    let gpus = [h100(0), h100(1)].map(|info| GpuState {
        info,
        live: Vec::new(),
        held: Vec::new(),
        standing: Vec::new(),
        taints: Vec::new(),
    });
    let options = Options {
        driver: DRIVER.into(),
        mode,
        slots: 10,
        mps: [0, 1].into(),
        mig_shares: false,
        passthrough: Default::default(),
    };
    publish(&gpus, ServerFeatures::all_of_minor(36), &options)
}

fn layout() -> Vec<Slice> {
    layout_of(AllocatorMode::Controller)
}

/// What the API would return: resource versions, taint times, quantities written otherwise.
fn stored(generation: i64) -> Vec<api::ResourceSlice> {
    let mut slices = objects(&layout(), &owner(), generation);
    for slice in &mut slices {
        slice.metadata.resource_version = Some("7".into());
        for device in slice.spec.devices.iter_mut().flatten() {
            device.allow_multiple_allocations.get_or_insert(false);
            for taint in device.taints.iter_mut().flatten() {
                let time: jiff::Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
                taint.time_added = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(time));
            }
        }
    }
    slices
}

#[test]
fn what_is_there_is_not_written_again() {
    assert!(writes(&stored(4), &layout(), &owner(), 4, false).is_empty());
}

#[test]
fn a_first_publication_creates_everything_above_all_earlier_generations() {
    let writes = writes(&[], &layout(), &owner(), 11, false);
    assert_eq!(writes.generation, 12);
    assert_eq!(writes.create.len(), layout().len());
    assert!(writes.create.iter().all(|slice| slice.spec.pool.generation == 12));
}

#[test]
fn one_missing_object_is_put_back_in_place() {
    let mut actual = stored(4);
    actual.remove(1);
    let writes = writes(&actual, &layout(), &owner(), 4, false);
    assert_eq!((writes.generation, writes.create.len(), writes.update.len()), (4, 1, 0));
}

#[test]
fn one_changed_object_is_repaired_in_place_and_keeps_its_taint_times() {
    let mut actual = stored(4);
    actual[1].spec.devices.as_mut().unwrap()[0].attributes = None;
    let writes = writes(&actual, &layout(), &owner(), 4, false);
    assert_eq!((writes.generation, writes.create.len(), writes.update.len()), (4, 0, 1));
    let update = &writes.update[0];
    assert_eq!(update.metadata.resource_version.as_deref(), Some("7"));
    let taint = &update.spec.devices.as_ref().unwrap()[0].taints.as_ref().unwrap()[0];
    assert!(taint.time_added.is_some());
}

#[test]
fn two_changes_bump_the_generation_of_all() {
    let mut actual = stored(4);
    actual.truncate(1);
    let writes = writes(&actual, &layout(), &owner(), 4, false);
    assert_eq!(writes.generation, 5);
    assert_eq!(writes.create.len() + writes.update.len(), layout().len());
}

#[test]
fn obsolete_objects_go_and_everything_gets_a_new_generation() {
    let mut actual = stored(4);
    let mut old = actual[0].clone();
    old.metadata.name = Some("99999-old".into());
    actual.push(old);
    let fewer = layout();
    let writes = writes(&actual, &fewer, &owner(), 4, false);
    assert_eq!(writes.delete, ["99999-old"]);
    assert!(writes.create.is_empty());
}

#[test]
fn a_change_of_mode_is_always_a_new_generation() {
    let writes = writes(&stored(4), &layout_of(AllocatorMode::HandOver), &owner(), 4, true);
    assert_eq!(writes.generation, 5);
    assert_eq!(writes.update.len(), layout().len());
}

#[test]
fn until_when_a_hand_over_lasts_is_noted_in_place_and_goes_with_it() {
    let hand_over = layout_of(AllocatorMode::HandOver);
    let until = Owner { hand_over_until: Some("2026-01-02T03:04:05.6Z".parse().unwrap()), ..owner() };
    let actual = objects(&hand_over, &owner(), 4);
    let noted = writes(&actual, &hand_over, &until, 4, false);
    assert_eq!((noted.generation, noted.create.len(), noted.update.len()), (4, 0, 1));
    let annotations = noted.update[0].metadata.annotations.as_ref().unwrap();
    assert_eq!(annotations[names::HAND_OVER_UNTIL], "2026-01-02T03:04:06Z", "rounded up");
    let mut actual = actual;
    actual[0].metadata.annotations = Some(annotations.clone());
    assert!(writes(&actual, &hand_over, &until, 4, false).is_empty());
    let over = writes(&actual, &layout(), &owner(), 4, true);
    assert!(over.update.iter().all(|slice| slice.metadata.annotations.is_none()));
}

#[test]
fn slices_without_devices_are_still_one_object() {
    let empty = publish(
        &[],
        ServerFeatures::all_of_minor(36),
        &Options {
            driver: DRIVER.into(),
            mode: AllocatorMode::Controller,
            slots: 1,
            mps: [0, 1].into(),
            mig_shares: false,
            passthrough: Default::default(),
        },
    );
    let objects = objects(&empty, &owner(), 1);
    assert_eq!(objects.len(), 1);
    assert_eq!(objects[0].spec.pool.resource_slice_count, 1);
}

#[rstest]
#[case("n1", "00003-gpu.aliquot.dev-n1")]
#[case("Node_1", "00003-gpu.aliquot.dev-node-1")]
fn names_sort_by_index_and_are_legal(#[case] node: &str, #[case] want: &str) {
    assert_eq!(slice_name(3, DRIVER, node), want);
    assert!(slice_name(3, DRIVER, &"n".repeat(300)).len() <= 253);
}

#[rstest]
#[case::nothing(|_: &mut api::ResourceSliceSpec| {}, Dropped::default())]
#[case::counters_of_devices(
    |spec: &mut api::ResourceSliceSpec| spec.devices.iter_mut().flatten().for_each(|d| d.consumes_counters = None),
    Dropped { counters: true, ..Dropped::default() })]
#[case::taints(
    |spec: &mut api::ResourceSliceSpec| spec.devices.iter_mut().flatten().for_each(|d| d.taints = None),
    Dropped { taints: true, ..Dropped::default() })]
#[case::multiple(
    |spec: &mut api::ResourceSliceSpec| spec.devices.iter_mut().flatten().for_each(|d| d.allow_multiple_allocations = None),
    Dropped { consumable_capacity: true, ..Dropped::default() })]
#[case::policies(
    |spec: &mut api::ResourceSliceSpec| spec.devices.iter_mut().flatten()
        .for_each(|d| d.capacity.iter_mut().flat_map(|c| c.values_mut()).for_each(|c| c.request_policy = None)),
    Dropped { consumable_capacity: true, ..Dropped::default() })]
fn dropped_fields_are_told_by_comparing(
    #[case] drop: fn(&mut api::ResourceSliceSpec),
    #[case] want: Dropped,
) {
    let sent = objects(&layout(), &owner(), 1).pop().unwrap().spec;
    let mut kept = sent.clone();
    drop(&mut kept);
    assert_eq!(dropped(&sent, &kept), want);
}

#[test]
fn dropped_counter_sets_are_noticed_in_their_own_slices() {
    let sent = objects(&layout(), &owner(), 1).remove(0).spec;
    assert!(sent.shared_counters.is_some());
    let mut kept = sent.clone();
    kept.shared_counters = None;
    assert!(dropped(&sent, &kept).counters);
}

#[test]
fn quantities_are_compared_by_value() {
    let mut actual = stored(4);
    for slice in &mut actual {
        for counter in slice.spec.shared_counters.iter_mut().flatten().flat_map(|s| s.counters.values_mut()) {
            if counter.value.0 == "80Gi" {
                counter.value.0 = (80u64 << 30).to_string();
            }
        }
    }
    assert!(writes(&actual, &layout(), &owner(), 4, false).is_empty());
}
