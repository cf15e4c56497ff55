//! Shares of partitions: several claims in one partition, beside partitions that one claim has alone.

use super::*;
use crate::fixtures::mig_share;

fn world(gpus: u32) -> World {
    let mut world = World::new();
    world.index.reset_classes(&fixtures::classes_with_mig_shares());
    world.index.apply_node(&fixtures::node("n1"));
    for slice in fixtures::slices_with_mig_shares("n1", gpus) {
        world.index.apply_slice(&slice);
    }
    world
}

fn half(name: &str) -> Value {
    mig_share(name, "2g.20gb", "10Gi", "50")
}

#[test]
fn shares_fill_a_partition_before_another_one_is_cut() {
    let mut world = world(2);
    let first = world.one("a", &[half("r")]).devices();
    assert_eq!(world.one("b", &[half("r")]).devices(), first);
    assert_eq!(world.one("c", &[mig_share("r", "2g.20gb", "20Gi", "0")]).devices().len(), 1);
    assert_ne!(world.one("d", &[half("r")]).devices(), first, "it is full");
}

#[test]
fn a_shared_partition_takes_its_place_of_the_gpu_once() {
    let mut world = world(1);
    for name in ["a", "b", "c"] {
        world.one(name, &[mig_share("r", "3g.40gb", "10Gi", "30")]);
    }
    // Four of eight memory slices are left, and nothing that needs all of the GPU.
    for request in [request("r", "gpu.aliquot.dev", 1), share("r", "1Gi", "1"), partition("r", "7g.80gb")] {
        let why = world.refused("whole", &[request]);
        assert!(!why.is_empty());
    }
    world.one("d", &[partition("r", "3g.40gb")]);
    world.one("e", &[mig_share("r", "3g.40gb", "10Gi", "10")]);
    let why = world.refused("f", &[mig_share("r", "3g.40gb", "1Gi", "1")]);
    assert!(!why.is_empty(), "no percent is left in the shared one, and no place for another");
}

#[test]
fn a_partition_is_not_given_whole_while_it_is_shared_nor_shared_while_it_is_whole() {
    let mut world = world(1);
    world.one("a", &[partition("r", "7g.80gb")]);
    assert!(!world.refused("b", &[mig_share("r", "7g.80gb", "1Gi", "1")]).is_empty());
    let mut world = self::world(1);
    world.one("a", &[mig_share("r", "7g.80gb", "1Gi", "1")]);
    assert!(!world.refused("b", &[partition("r", "7g.80gb")]).is_empty());
    world.one("c", &[mig_share("r", "7g.80gb", "1Gi", "1")]);
}

#[test]
fn a_partition_has_so_many_tenants_and_no_more() {
    let mut world = world(1);
    for tenant in 0..10 {
        world.one(&format!("t{tenant}"), &[mig_share("r", "7g.80gb", "1Gi", "0")]);
    }
    assert!(!world.refused("more", &[mig_share("r", "7g.80gb", "1Gi", "0")]).is_empty());
}
