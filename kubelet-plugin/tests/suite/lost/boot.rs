//! A loss over a reboot that keeps the CDI directory: no container runs with what a spec from before gives.

use super::common::{now, request};
use super::{lose, parts, world};
use aliquot_kubelet_plugin::prepare::PrepareError;
use aliquot_nvml::Gpus;
use aliquot_nvml::fake::h100_80;

#[test]
fn a_partition_that_a_reboot_took_is_made_anew() {
    let world = world();
    let node = world.node();
    node.prepare(&parts(), false, now()).unwrap();
    let before = world.instances();
    lose(&world);
    world.gpus.reboot();
    world.boot("boot-2");
    assert!(world.instances().is_empty());
    let node = world.node();
    node.recover().unwrap();
    // Until then it keeps its GPU.
    node.prepare(&request("c-2", &[("x", "gpu-0")]), false, now()).unwrap_err();
    node.prepare(&parts(), false, now()).unwrap();
    assert_eq!(world.instances(), before);
    assert_eq!(world.ledger().claims["c-parts"].boot_id, "boot-2");
    assert!(node.unprepare("c-parts").unwrap());
    world.assert_clean();
}

#[test]
fn a_partition_that_went_in_this_boot_is_not() {
    let world = world();
    let node = world.node();
    node.prepare(&parts(), false, now()).unwrap();
    lose(&world);
    for mig in world.gpus.live_migs(&h100_80(0).uuid).unwrap() {
        world.gpus.destroy_mig(&mig).unwrap();
    }
    let error = node.prepare(&parts(), false, now()).unwrap_err();
    assert!(matches!(error, PrepareError::Disagrees { .. }), "{error}");
    assert!(world.instances().is_empty());
}

#[test]
fn a_whole_gpu_that_was_exchanged_over_the_reboot_is_not_given_in_place_of_the_one_from_before() {
    let world = world();
    let node = world.node();
    node.prepare(&request("c-1", &[("g", "gpu-1")]), false, now()).unwrap();
    lose(&world);
    super::rewrite(&world, "c-1", h100_80(1).uuid.as_str(), h100_80(2).uuid.as_str());
    world.boot("boot-2");
    let error = node.prepare(&request("c-1", &[("g", "gpu-1")]), false, now()).unwrap_err();
    assert!(matches!(error, PrepareError::Disagrees { .. }), "{error}");
}

#[test]
fn a_spec_that_does_not_say_its_boot_may_be_in_use() {
    let world = world();
    world.node().prepare(&parts(), false, now()).unwrap();
    lose(&world);
    super::rewrite(&world, "c-parts", "ALIQUOT_BOOT_ID", "OTHER");
    world.gpus.reboot();
    world.boot("boot-2");
    let error = world.node().prepare(&parts(), false, now()).unwrap_err();
    assert!(matches!(error, PrepareError::Disagrees { .. }), "{error}");
}
