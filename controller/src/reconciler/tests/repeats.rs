//! Pods that name one claim often, or many large claims.

use super::*;

/// A pod that names a claim so many times.
fn naming(world: &mut World, pod: &str, claim: &str, times: usize) {
    world.pod(pod, &[claim], |pod| {
        let claims = pod.spec.as_mut().expect("a spec").resource_claims.as_mut().expect("claims");
        claims
            .extend((1..times).map(|n| object(json!({"name": format!("a{n}"), "resourceClaimName": claim}))));
    });
}

fn given(world: &World) -> Vec<(String, Vec<String>)> {
    let of = |job: &Job| match job {
        Job::Allocate { plan, writes, .. } => {
            let results =
                writes.iter().flat_map(|write| write.allocation.devices.as_ref()?.results.as_ref()).flatten();
            Some((plan.pod.name.to_string(), results.map(|result| result.device.clone()).collect()))
        }
        _ => None,
    };
    world.jobs.iter().filter_map(of).collect()
}

#[test]
fn a_claim_that_a_pod_names_twice_has_one_plan_and_its_gpu_is_given_to_nobody_else() {
    let mut world = World::new(&[("n1", 2)]);
    world.claim("twice", &[request("r", "gpu.aliquot.dev", 1)]);
    naming(&mut world, "twice", "twice", 2);
    world.one("other", &[request("r", "gpu.aliquot.dev", 1)]);
    let mut devices: Vec<String> = given(&world).into_iter().flat_map(|(_, devices)| devices).collect();
    devices.sort();
    assert_eq!(devices, ["gpu-0", "gpu-1"]);
}

#[test]
fn a_claim_is_read_once_however_often_a_pod_names_it() {
    let mut world = World::new(&[("n1", 1)]);
    world.claim("c", &[request("r", "gpu.aliquot.dev", 1)]);
    naming(&mut world, "p", "c", 10_000);
    let pod = world.core.index.pod(&ObjectKey::new("default", "p")).expect("a pod");
    assert_eq!(pod.claims.len(), 1);
    world.work();
    assert_eq!(given(&world), [("p".to_owned(), vec!["gpu-0".to_owned()])]);
}
