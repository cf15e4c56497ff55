//! Device metadata files of claims whose records were lost.

use super::common::{World, now};
use super::{everything, lose, records, world};
use aliquot_kubelet_plugin::claim::Request;
use aliquot_kubelet_plugin::prepare::{Conclusion, Node};
use std::collections::BTreeMap;
use std::time::Instant;

fn told(world: &World) -> Node {
    Node { device_metadata: true, ..world.node() }
}

/// The claims of which one was made from a template.
fn claims() -> Vec<Request> {
    let mut claims = everything();
    claims[0].pod_claim_name = Some("in-pod".into());
    claims
}

#[test]
fn a_record_that_is_made_anew_has_the_files_that_its_containers_have() {
    let world = world();
    let (first, others) =
        claims().split_first().map(|(first, others)| (first.clone(), others.to_vec())).unwrap();
    told(&world).prepare(&first, false, now()).unwrap();
    for claim in &others {
        world.node().prepare(claim, false, now()).unwrap();
    }
    let (before, files) = (records(&world), world.files());
    lose(&world);
    // It does not matter what new claims are to have.
    for node in [told(&world), world.node()] {
        node.recover().unwrap();
        assert_eq!(world.files(), files, "a pod may be running with these");
    }
    let node = world.node();
    for claim in claims() {
        assert!(node.rebuild(&claim, now()).unwrap());
    }
    assert_eq!((records(&world), world.files()), (before, files));
    assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Found { .. }));
    for claim in claims() {
        assert!(node.unprepare(&claim.claim.uid).unwrap());
    }
    world.assert_clean();
}

#[test]
fn a_claim_that_is_given_back_without_a_record_leaves_no_file() {
    let world = world();
    let claim = claims().remove(3);
    told(&world).prepare(&claim, false, now()).unwrap();
    assert_eq!(world.files().len(), 3);
    lose(&world);
    let node = world.node();
    node.recover().unwrap();
    assert!(node.unprepare(&claim.claim.uid).unwrap());
    world.assert_clean();
}
