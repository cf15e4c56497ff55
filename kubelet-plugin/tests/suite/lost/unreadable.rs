//! A CDI spec that cannot be read: nobody knows which GPU its pods use.

use super::common::{World, now, request};
use super::{lose, share, spec, world};
use aliquot_kubelet_plugin::prepare::{Conclusion, Node};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

/// After a loss: gpu-1 has a share whose spec cannot be read, gpu-2 is held whole by a claim with a record.
fn unreadable() -> (World, Node, PathBuf) {
    let world = world();
    let node = world.node();
    let whole = request("c-whole", &[("g", "gpu-2")]);
    for claim in [&share("c-1"), &whole] {
        node.prepare(claim, false, now()).unwrap();
    }
    lose(&world);
    let file = world.cdi().join(format!("{}.json", spec("c-1")));
    fs::write(&file, "{").unwrap();
    let node = world.node();
    let recovery = node.recover().unwrap();
    assert_eq!(recovery.orphans, [""; 0]);
    assert!(recovery.unaccounted.iter().any(|lost| lost.uid == "c-1" && lost.has_spec()), "{recovery:?}");
    node.rebuild(&whole, now()).unwrap();
    (world, node, file)
}

#[test]
fn every_gpu_that_nobody_known_holds_whole_takes_no_new_claim() {
    let (_world, node, file) = unreadable();
    for device in ["gpu-0", "gpu-0-mig-1g10gb-19-6", "gpu-1-share"] {
        let error = node.prepare(&request("c-2", &[("x", device)]), false, now()).unwrap_err();
        let text = error.to_string();
        assert!(error.is_conflict() && text.contains(file.to_str().unwrap()), "{text}");
        assert!(text.contains("cannot be read") && text.contains("c-1"), "{text}");
    }
    let error = node.prepare(&request("c-2", &[("x", "gpu-2")]), false, now()).unwrap_err().to_string();
    assert!(error.contains("claim-c-whole"), "{error}");
    node.prepare(&request("c-3", &[("m", "gpu-0-admin")]), false, now()).unwrap();
}

#[test]
fn the_file_stays_until_the_operator_removes_it() {
    let (world, node, file) = unreadable();
    for _ in 0..2 {
        assert_eq!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Unchanged);
        assert!(world.node().recover().unwrap().orphans.is_empty());
        assert_eq!(fs::read(&file).unwrap(), b"{");
    }
    fs::remove_file(&file).unwrap();
    assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Found { .. }));
    node.prepare(&request("c-2", &[("x", "gpu-0")]), false, now()).unwrap();
}

#[test]
fn a_claim_that_has_a_record_is_prepared_again_beside_it() {
    let (world, node, _) = unreadable();
    world.boot("boot-2");
    node.prepare(&request("c-whole", &[("g", "gpu-2")]), false, now()).unwrap();
}

#[test]
fn its_own_pods_end_as_always() {
    let (world, node, file) = unreadable();
    assert!(node.unprepare("c-1").unwrap());
    assert!(!file.exists());
    assert!(matches!(node.conclude(BTreeMap::new(), Instant::now()).unwrap(), Conclusion::Found { .. }));
    assert!(node.unprepare("c-whole").unwrap());
    world.assert_clean();
}
