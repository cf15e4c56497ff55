//! Shares of MIG partitions: they grow within their partition as others do within their GPU.

use super::*;

#[test]
fn a_share_of_a_partition_grows_within_its_partition() {
    let mut world = World::new(&[("n1", 1)]);
    world.core.settings.elastic = true;
    world.handle(Input::Class(Seen::Reset(fixtures::classes_with_mig_shares())));
    world.jobs.clear();
    world.handle(Input::Slice(Seen::Reset(fixtures::slices_with_mig_shares("n1", 1))));
    world.handle(Input::NodeLimits(Seen::Reset(Vec::new())));
    let base = [fixtures::mig_share("r", "2g.20gb", "8Gi", "30")];
    world.one("a", &base);
    world.succeed("a", &base);
    world.runs("a");
    let mut api = Api::default();
    world.wish(Some("memory=16Gi, cores=90"));
    assert_eq!(world.settle(&mut api), ["make", "grow", "limit"]);
    assert_eq!(world.standing(&api), (Some(size(16, 90)), size(16, 90)));
    // The GPU has 80 GiB; the partition has 20.
    world.wish(Some("memory=24Gi, cores=90"));
    assert!(!world.settle(&mut api).contains(&"grow"));
    assert_eq!(world.standing(&api).1, size(16, 90));
    world.wish(None);
    world.settle(&mut api);
    assert_eq!(world.standing(&api).1, size(8, 30));
}
