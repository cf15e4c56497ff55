//! A GPU has one time slice, so claims that ask for different ones do not get the same GPU.

use super::*;

fn world(nodes: &[(&str, u32)]) -> World {
    let mut world = World::with_nodes(nodes);
    let selector = format!(r#"device.attributes["{DRIVER}"].type == "timeslice""#);
    world.index.apply_class(&fixtures::class("timeslice.aliquot.dev", &selector));
    world
}

/// A small part of a time-sliced GPU.
fn slice(name: &str) -> Value {
    let mut wanted = request(name, "timeslice.aliquot.dev", 1);
    wanted["exactly"]["capacity"] = json!({"requests": {"memory": "1Gi"}});
    wanted
}

/// A claim of such requests, with an interval for each request that has one.
fn spec(requests: &[(&str, Option<&str>)]) -> Value {
    let mut spec = fixtures::spec(&requests.iter().map(|(name, _)| slice(name)).collect::<Vec<_>>());
    let config = requests.iter().filter_map(|(name, interval)| {
        let parameters =
            json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuConfig", "timeSlice": (*interval)?});
        Some(json!({"requests": [name], "opaque": {"driver": DRIVER, "parameters": parameters}}))
    });
    spec["devices"]["config"] = Value::from_iter(config);
    spec
}

fn place(world: &mut World, name: &str, requests: &[(&str, Option<&str>)]) -> Vec<String> {
    world.claim(name, &spec(requests));
    let pod = world.pod(name, &[name]);
    world.place(&pod).devices().iter().map(ToString::to_string).collect()
}

#[test]
fn claims_with_different_intervals_get_different_gpus() {
    let mut world = world(&[("n1", 2)]);
    assert_eq!(place(&mut world, "long", &[("r", Some("Long"))]), ["gpu-0-timeslice"]);
    assert_eq!(place(&mut world, "short", &[("r", Some("Short"))]), ["gpu-1-timeslice"]);
    assert_eq!(place(&mut world, "long-too", &[("r", Some("Long"))]), ["gpu-0-timeslice"]);
    // Who asks for none takes what there is.
    assert_eq!(place(&mut world, "any", &[("r", None)]), ["gpu-0-timeslice"]);
    world.claim("medium", &spec(&[("r", Some("Medium"))]));
    let pod = world.pod("medium", &["medium"]);
    let Decision::NoFit(reason) = world.decide(&pod) else { panic!("both GPUs have another interval") };
    assert!(reason.to_string().contains("not enough free"), "{reason}");
}

#[test]
fn requests_of_one_claim_with_different_intervals_get_different_gpus() {
    let mut world = world(&[("n1", 2)]);
    let devices = place(&mut world, "both", &[("a", Some("Long")), ("b", Some("Short"))]);
    assert_eq!(devices, ["gpu-0-timeslice", "gpu-1-timeslice"]);
}

#[test]
fn a_node_whose_gpus_are_taken_alike_but_sliced_otherwise_is_told_apart() {
    let mut world = world(&[("n1", 1), ("n2", 1), ("n3", 1)]);
    // Each node's GPU is taken by one claim of the same size; only the last has the interval that is wanted.
    for (node, interval) in [("n1", "Short"), ("n2", "Medium"), ("n3", "Long")] {
        world.claim(node, &spec(&[("r", Some(interval))]));
        let pod = world.pod_with(node, &[node], |pod| {
            pod.spec.as_mut().expect("a spec").node_selector =
                Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
        });
        assert_eq!(&*world.place(&pod).0.node, node);
    }
    world.claim("more", &spec(&[("r", Some("Long"))]));
    let pod = world.pod("more", &["more"]);
    assert_eq!(&*world.place(&pod).0.node, "n3");
}
