use super::*;
use crate::fixtures::{self, DRIVER, object, partition, request, share};
use crate::snapshot::{FINGERPRINT, TaintRule};
use aliquot_model::layout::{AllocatorMode, GpuState, Holding};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::jiff::Timestamp;
use rstest::rstest;
use serde_json::{Value, json};

mod around;
mod hardware;
mod levels;
mod mig_shares;
mod misses;
mod pods;
mod properties;
mod shortlist;
mod time_slices;

/// An index with a matcher, for playing a cluster through.
struct World {
    index: Snapshot,
    matcher: Matcher,
    version: u64,
}

impl World {
    fn new() -> Self {
        let mut index = Snapshot::new(DRIVER);
        index.reset_classes(&fixtures::classes());
        Self { index, matcher: Matcher::new(), version: 0 }
    }

    fn with_nodes(nodes: &[(&str, u32)]) -> Self {
        let mut world = Self::new();
        for (name, gpus) in nodes {
            world.node(name, *gpus, AllocatorMode::Controller);
        }
        world
    }

    fn node(&mut self, name: &str, gpus: u32, mode: AllocatorMode) {
        self.index.apply_node(&fixtures::node(name));
        for slice in fixtures::slices(name, gpus, mode, 1) {
            self.index.apply_slice(&slice);
        }
    }

    fn stamp(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    fn claim(&mut self, name: &str, spec: &Value) {
        let mut claim = fixtures::claim(name, spec);
        claim.metadata.uid = Some(format!("uid-{name}"));
        claim.metadata.resource_version = Some(self.stamp());
        self.index.apply_claim(&claim);
    }

    fn requests(&mut self, name: &str, requests: &[Value]) {
        self.claim(name, &fixtures::spec(requests));
    }

    fn pod_with(&mut self, name: &str, claims: &[&str], more: impl FnOnce(&mut ApiPod)) -> Pod {
        let mut pod = fixtures::pod(name, claims);
        pod.metadata.uid = Some(format!("uid-{name}"));
        pod.metadata.resource_version = Some(self.stamp());
        more(&mut pod);
        self.index.apply_pod(&pod);
        self.index.pod(&ObjectKey::new("default", name)).expect("kept").clone()
    }

    fn pod(&mut self, name: &str, claims: &[&str]) -> Pod {
        self.pod_with(name, claims, |_| {})
    }

    fn decide(&mut self, pod: &Pod) -> Decision {
        self.decide_with(pod, Options::default())
    }

    fn decide_with(&mut self, pod: &Pod, options: Options) -> Decision {
        decide(&self.index, &mut self.matcher, pod, &LeftOut::new(), options, &mut || false)
    }

    /// Decides, and lets the API show the result.
    fn place(&mut self, pod: &Pod) -> Placed {
        match self.decide(pod) {
            Decision::Placed(plan) => {
                self.show(&plan, pod);
                Placed(*plan)
            }
            other => panic!("expected a place, got {other:?}"),
        }
    }

    /// Lets the API show a decision.
    fn show(&mut self, plan: &Plan, pod: &Pod) {
        for draft in &plan.drafts {
            let mut share = 0;
            let allocation = draft.finish(Timestamp::from_second(1_000).expect("a time"), || {
                share += 1;
                format!("share-{}-{share}", draft.claim.name)
            });
            self.allocate(&draft.claim.name, &allocation, &[pod]);
        }
    }

    fn allocate(&mut self, name: &str, allocation: &AllocationResult, consumers: &[&Pod]) {
        let key = ObjectKey::new("default", name);
        let known = self.index.claim(&key).expect("a claim").clone();
        let seconds = allocation.allocation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
        let results = allocation.devices.as_ref().and_then(|d| d.results.clone()).unwrap_or_default();
        let mark = crate::snapshot::fingerprint(&known.uid, seconds, &results);
        let reserved: Vec<Value> = consumers.iter().map(|pod| json!(self.index.user_of(pod, &key))).collect();
        let claim: ResourceClaim = object(json!({
            "metadata": {
                "name": name, "namespace": "default", "uid": &*known.uid, "resourceVersion": self.stamp(),
                "annotations": {FINGERPRINT: mark},
            },
            "spec": *known.spec,
            "status": {"allocation": allocation, "reservedFor": reserved},
        }));
        self.index.apply_claim(&claim);
    }

    /// One claim with these requests for one pod.
    fn one(&mut self, name: &str, requests: &[Value]) -> Placed {
        self.requests(name, requests);
        let pod = self.pod(name, &[name]);
        self.place(&pod)
    }

    fn refused(&mut self, name: &str, requests: &[Value]) -> String {
        self.requests(name, requests);
        let pod = self.pod(name, &[name]);
        match self.decide(&pod) {
            Decision::NoFit(reason) => reason.to_string(),
            other => panic!("expected no fit, got {other:?}"),
        }
    }

    fn rejected(&mut self, name: &str, spec: &Value) -> String {
        self.claim(name, spec);
        let pod = self.pod(name, &[name]);
        match self.decide(&pod) {
            Decision::Rejected(rejection) => rejection.to_string(),
            other => panic!("expected a rejection, got {other:?}"),
        }
    }
}

struct Placed(Plan);

impl Placed {
    fn results(&self) -> Vec<DeviceRequestAllocationResult> {
        self.0
            .drafts
            .iter()
            .flat_map(|draft| draft.allocation().devices.clone().expect("devices").results.expect("results"))
            .collect()
    }

    fn devices(&self) -> Vec<String> {
        self.results().into_iter().map(|result| result.device).collect()
    }
}

#[test]
fn an_allocation_is_written_as_the_api_wants_it() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    let placed = world.one("c", &[share("s", "1000Mi", "20"), partition("never", "x")][..1]);
    let draft = &placed.0.drafts[0];
    let finished =
        draft.finish(Timestamp::from_millisecond(1_700_000_000_999).expect("a time"), || "id".to_owned());
    let json = serde_json::to_value(&finished).expect("JSON");
    assert_eq!(
        json,
        json!({
            "allocationTimestamp": "2023-11-14T22:13:20Z",
            "devices": {"results": [{
                "request": "s", "driver": DRIVER, "pool": format!("{DRIVER}/n1"), "device": "gpu-0-share",
                "shareID": "id", "consumedCapacity": {"memory": "1000Mi", "cores": "20", "slots": "1"},
            }]},
            "nodeSelector": {"nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
            ]},
        })
    );
}

#[test]
fn the_ways_to_use_a_gpu_exclude_each_other() {
    let ways = [request("r", "gpu.aliquot.dev", 1), partition("r", "1g.10gb"), share("r", "1Gi", "0")];
    for (first, taken) in ways.iter().enumerate() {
        for (second, wanted) in ways.iter().enumerate() {
            let mut world = World::with_nodes(&[("n1", 1)]);
            world.one("a", std::slice::from_ref(taken));
            world.requests("b", std::slice::from_ref(wanted));
            let pod = world.pod("b", &["b"]);
            let fits = matches!(world.decide(&pod), Decision::Placed(_));
            // Only partitions and shares go with their like.
            assert_eq!(fits, first == second && first != 0, "{first} then {second}");
        }
    }
}

#[test]
fn small_partitions_fill_one_gpu_from_the_top_before_the_next_is_opened() {
    let mut world = World::with_nodes(&[("n1", 2), ("n2", 2)]);
    let mut starts = Vec::new();
    for number in 0..7 {
        let placed = world.one(&format!("c{number}"), &[partition("p", "1g.10gb")]);
        let device = placed.devices().remove(0);
        assert!(device.starts_with("gpu-0-mig-1g10gb-19-"), "{device}");
        assert_eq!(&*placed.0.node, "n1");
        starts.push(device.rsplit('-').next().expect("a start").to_owned());
    }
    // Beside the last one a slice is left that only `1g.20gb` could have used.
    assert_eq!(starts.last().map(String::as_str), Some("6"));
    starts.sort();
    assert_eq!(starts, ["0", "1", "2", "3", "4", "5", "6"]);
    let device = world.one("c7", &[partition("p", "1g.10gb")]).devices().remove(0);
    assert!(device.starts_with("gpu-1-mig-1g10gb-19-"), "{device}");
}

#[test]
fn small_partitions_leave_the_places_of_large_ones() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    for (name, profile) in [("a", "1g.10gb"), ("b", "1g.10gb"), ("c", "1g.20gb")] {
        world.one(name, &[partition("p", profile)]);
    }
    // 4g needs the lower half; no slice is left.
    assert_eq!(world.one("d", &[partition("p", "4g.40gb")]).devices(), ["gpu-0-mig-4g40gb-5-0"]);
}

#[test]
fn no_place_is_kept_free_for_what_nobody_asks_for() {
    let start = |world: &mut World| -> u32 {
        let device = world.one("a", &[partition("p", "1g.10gb")]).devices().remove(0);
        device.rsplit('-').next().and_then(|start| start.parse().ok()).expect("a start")
    };
    // Slice 7 is of use to 1g.20gb beside a 1g.10gb that is not next to it.
    assert!((4..6).contains(&start(&mut World::with_nodes(&[("n1", 1)]))));
    // Where only 1g.10gb and 3g.40gb are asked for, it is of use to 3g.40gb alone.
    let mut world = World::with_nodes(&[("n1", 1)]);
    let layout =
        world.index.pools_of_node("n1").next().and_then(|pool| pool.layout.clone()).expect("a layout");
    let gpu = &layout.gpus[0];
    for profile in ["mig-1g10gb-19-0", "mig-3g40gb-9-0"].repeat(25) {
        let name = |position: &u32| world.index.name(layout.devices[*position as usize].name).to_owned();
        let place =
            gpu.devices.iter().position(|position| name(position).ends_with(profile)).expect("a place");
        world.index.note_asked(gpu.board, place);
    }
    assert!((0..4).contains(&start(&mut world)));
}

#[test]
fn spread_takes_what_is_least_used() {
    let mut world = World::with_nodes(&[("n1", 2), ("n2", 2)]);
    world.one("a", &[partition("p", "1g.10gb")]);
    world.requests("b", &[partition("p", "1g.10gb")]);
    let pod = world.pod("b", &["b"]);
    let options = Options { strategy: Strategy::Spread };
    let Decision::Placed(plan) = world.decide_with(&pod, options) else { panic!("fits") };
    assert_eq!(&*plan.node, "n2");
}

#[test]
fn shares_are_packed_until_a_capacity_is_used_up() {
    let mut world = World::with_nodes(&[("n1", 2)]);
    for number in 0..2 {
        assert_eq!(world.one(&format!("c{number}"), &[share("s", "40Gi", "10")]).devices(), ["gpu-0-share"]);
    }
    assert_eq!(world.one("c2", &[share("s", "1Mi", "0")]).devices(), ["gpu-1-share"]);
    // Compute is a capacity of its own.
    world.one("c3", &[share("s", "1Mi", "100")]);
    assert!(
        world.refused("c4", &[share("s", "1Mi", "1")]).contains("have not enough free devices for request s")
    );
}

#[test]
fn what_a_share_asks_too_much_of_is_told_with_what_the_nearest_gpu_has() {
    let mut world = World::with_nodes(&[("n1", 1), ("n2", 2)]);
    world.one("held", &[share("s", "60Gi", "10")]);
    world.one("more", &[share("s", "50Gi", "80")]);
    world.one("last", &[share("s", "70Gi", "10")]);
    let told = world.refused("memory", &[share("s", "35Gi", "5")]);
    assert!(
        told.contains(
            "which asks for 35Gi of memory: at most 30Gi is free on one now, of 80Gi; ask for that or less"
        ),
        "{told}"
    );
    let told = world.refused("cores", &[share("s", "1Gi", "95")]);
    assert!(
        told.contains(
            "which asks for 95 of cores: at most 90 is free on one now, of 100; ask for that or less"
        ),
        "{told}"
    );
    let told = world.refused("beyond", &[share("s", "900Gi", "5")]);
    let beyond = "which asks for 900Gi of memory: the largest has 80Gi, and at most 30Gi of that is free on one now; \
                  ask for 80Gi or less";
    assert!(told.contains(beyond), "{told}");
}

#[test]
fn two_shares_of_one_pod_may_be_on_one_gpu_unless_the_claim_forbids_it() {
    let requests = [share("a", "1Gi", "0"), share("b", "1Gi", "0")];
    let mut world = World::with_nodes(&[("n1", 2)]);
    assert_eq!(world.one("c", &requests).devices(), ["gpu-0-share", "gpu-0-share"]);
    let mut spec = fixtures::spec(&requests);
    spec["devices"]["constraints"] = json!([{"distinctAttribute": format!("{DRIVER}/uuid")}]);
    world.claim("d", &spec);
    let pod = world.pod("d", &["d"]);
    let mut devices = world.place(&pod).devices();
    devices.sort();
    assert_eq!(devices, ["gpu-0-share", "gpu-1-share"]);
}

#[test]
fn all_wants_every_matching_device_and_each_of_them_free() {
    let mut all = request("r", "gpu.aliquot.dev", 1);
    all["exactly"] = json!({"deviceClassName": "gpu.aliquot.dev", "allocationMode": "All"});
    let mut world = World::with_nodes(&[("n1", 2), ("n2", 3)]);
    world.one("a", &[partition("p", "1g.10gb")]);
    let placed = world.one("b", std::slice::from_ref(&all));
    assert_eq!((&*placed.0.node, placed.devices().len()), ("n2", 3));
    let reason = world.refused("c", &[all]);
    assert!(
        reason.contains("have matching devices that are in use, and request r wants all of them"),
        "{reason}"
    );
}

#[test]
fn admin_access_goes_beside_whoever_holds_the_gpu_and_holds_nothing() {
    let mut admin = request("r", "admin.aliquot.dev", 1);
    admin["exactly"]["adminAccess"] = json!(true);
    let mut world = World::with_nodes(&[("n1", 1)]);
    world.one("whole", &[request("r", "gpu.aliquot.dev", 1)]);
    for name in ["a", "b"] {
        let placed = world.one(name, std::slice::from_ref(&admin));
        assert_eq!(placed.devices(), ["gpu-0-admin"]);
        assert_eq!(placed.results()[0].admin_access, Some(true));
    }
}

#[rstest]
#[case::same_numa_node("matchAttribute", "resource.kubernetes.io/numaNode", 4, true)]
#[case::too_many_for_a_numa_node("matchAttribute", "resource.kubernetes.io/numaNode", 5, false)]
#[case::one_of_each_root("distinctAttribute", "resource.kubernetes.io/pcieRoot", 4, true)]
#[case::more_than_roots("distinctAttribute", "resource.kubernetes.io/pcieRoot", 5, false)]
#[case::own_name_needs_its_domain("matchAttribute", "gpu.aliquot.dev/productName", 8, true)]
#[case::attribute_that_nobody_has("matchAttribute", "gpu.aliquot.dev/nothing", 1, false)]
fn constraints_hold_over_all_devices(
    #[case] kind: &str,
    #[case] name: &str,
    #[case] count: u32,
    #[case] fits: bool,
) {
    let mut world = World::with_nodes(&[("n1", 8)]);
    let mut spec = fixtures::spec(&[request("r", "gpu.aliquot.dev", count)]);
    spec["devices"]["constraints"] = json!([{kind: name}]);
    world.claim("c", &spec);
    let pod = world.pod("c", &["c"]);
    assert_eq!(matches!(world.decide(&pod), Decision::Placed(_)), fits);
}

#[test]
fn constraints_of_some_requests_leave_the_others_alone() {
    let mut world = World::with_nodes(&[("n1", 8)]);
    let requests = [request("a", "gpu.aliquot.dev", 4), request("b", "gpu.aliquot.dev", 3)];
    let mut spec = fixtures::spec(&requests);
    spec["devices"]["constraints"] =
        json!([{"requests": ["a"], "matchAttribute": "resource.kubernetes.io/numaNode"}]);
    world.claim("c", &spec);
    let pod = world.pod("c", &["c"]);
    assert_eq!(world.place(&pod).devices().len(), 7);
}

#[test]
fn alternatives_are_taken_in_order_of_preference_also_between_nodes() {
    let first_available = json!({"name": "r", "firstAvailable": [
        {"name": "whole", "deviceClassName": "gpu.aliquot.dev"},
        {"name": "part", "deviceClassName": "mig.aliquot.dev", "selectors": [
            {"cel": {"expression": format!(r#"device.attributes["{DRIVER}"].profile == "3g.40gb""#)}}]},
    ]});
    let mut world = World::with_nodes(&[("n1", 1), ("n2", 1)]);
    world.one("x", &[partition("p", "1g.10gb")]);
    // n1 is fuller and could give the second choice; n2 has the first.
    let placed = world.one("a", std::slice::from_ref(&first_available));
    assert_eq!((placed.results()[0].request.as_str(), &*placed.0.node), ("r/whole", "n2"));
    let placed = world.one("b", &[first_available]);
    assert_eq!(placed.results()[0].request, "r/part");
}

#[test]
fn claims_of_a_pod_are_decided_jointly() {
    let mut world = World::with_nodes(&[("n1", 1), ("n2", 1)]);
    world.one("x", &[partition("p", "7g.80gb")]);
    world.one("y", &[partition("p", "4g.40gb")]);
    // Each alone fits on n2; together they do not.
    world.requests("a", &[partition("p", "3g.40gb")]);
    world.requests("b", &[partition("p", "2g.20gb")]);
    let pod = world.pod("p", &["a", "b"]);
    let Decision::NoFit(reason) = world.decide(&pod) else { panic!("must not fit") };
    assert!(reason.to_string().contains("1 (n2) can meet each request, but not all together"), "{reason}");
}

#[test]
fn backtracking_finds_what_greed_misses() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    // Any partition first would take a part of the lower half if it could.
    let any = json!({"name": "any", "exactly": {"deviceClassName": "mig.aliquot.dev", "selectors": [
        {"cel": {"expression": format!(r#"device.capacity["{DRIVER}"].memory.compareTo(quantity("40Gi")) >= 0"#)}}]}});
    let placed = world.one("c", &[any, partition("four", "4g.40gb")]);
    assert_eq!(placed.devices(), ["gpu-0-mig-3g40gb-9-4", "gpu-0-mig-4g40gb-5-0"]);
}

#[test]
fn configuration_comes_from_the_class_first_and_names_no_request_when_it_is_for_all() {
    let mut world = World::with_nodes(&[("n1", 2)]);
    let opaque = |value: &str| json!({"driver": DRIVER, "parameters": {"v": value}});
    let mut class: Value = serde_json::to_value(fixtures::class("with-config", "true")).expect("JSON");
    class["spec"]["selectors"] = json!([{"cel": {"expression":
        format!(r#"device.attributes["{DRIVER}"].type == "gpu""#)}}]);
    class["spec"]["config"] = json!([{"opaque": opaque("class")}]);
    world.index.apply_class(&object(class));
    let mut spec = fixtures::spec(&[request("a", "with-config", 1), request("b", "gpu.aliquot.dev", 1)]);
    spec["devices"]["config"] = json!([
        {"opaque": opaque("everything")},
        {"requests": ["b"], "opaque": opaque("b")},
        {"requests": ["a", "b"], "opaque": opaque("both")},
    ]);
    world.claim("c", &spec);
    let pod = world.pod("c", &["c"]);
    let placed = world.place(&pod);
    let config = placed.0.drafts[0].allocation().devices.clone().expect("devices").config;
    assert_eq!(
        serde_json::to_value(config).expect("JSON"),
        json!([
            {"source": "FromClass", "requests": ["a"], "opaque": opaque("class")},
            {"source": "FromClaim", "opaque": opaque("everything")},
            {"source": "FromClaim", "requests": ["b"], "opaque": opaque("b")},
            {"source": "FromClaim", "opaque": opaque("both")},
        ])
    );
}

#[rstest]
#[case::selector(
    json!([{"name": "r", "exactly": {"deviceClassName": "gpu.aliquot.dev", "selectors": [
        {"cel": {"expression": r#"device.attributes["gpu.aliquot.dev"].nothing == 1"#}}]}}]),
    r#"on device gpu.aliquot.dev/n1/gpu-0: the CEL expression "device.attributes[\"gpu.aliquot.dev\"].nothing == 1" fails: No such key: nothing; guard"#
)]
#[case::syntax(
    json!([{"name": "r", "exactly": {"deviceClassName": "gpu.aliquot.dev", "selectors": [
        {"cel": {"expression": "device.driver =="}}]}}]),
    "does not compile"
)]
#[case::class(
    request("r", "nothing", 1),
    "claim default/c, request r: DeviceClass nothing does not exist; create it"
)]
#[case::count(
    request("r", "gpu.aliquot.dev", 33),
    "asks for 33 devices, a claim can hold at most 32; split it"
)]
#[case::mixed(json!([request("r", "gpu.aliquot.dev", 1), request("nic", "nic.example.com", 1)]), "request nic (DeviceClass nic.example.com) is for another driver's devices")]
#[case::mode(
    json!([{"name": "r", "exactly": {"deviceClassName": "gpu.aliquot.dev", "allocationMode": "Some"}}]),
    "not supported: allocation mode Some"
)]
fn what_can_never_be_is_told_by_name(#[case] requests: Value, #[case] expected: &str) {
    let mut world = World::with_nodes(&[("n1", 1)]);
    world.index.apply_class(&fixtures::class("nic.example.com", r#"device.driver == "nic.example.com""#));
    let requests = if requests.is_array() { requests } else { json!([requests]) };
    let text = world.rejected("c", &json!({"devices": {"requests": requests}}));
    assert!(text.contains(expected), "{text}");
}

/// What both allocators could give out is never given: ours leaves such claims to kube-scheduler, which
/// gives only what is not tainted.
#[test]
fn a_claim_for_two_drivers_is_kube_schedulers_where_it_has_nodes_and_nobodys_where_it_has_none() {
    let requests = [request("r", "gpu.aliquot.dev", 1), request("nic", "nic.example.com", 1)];
    let mut world = World::with_nodes(&[("n1", 1)]);
    world.index.apply_class(&fixtures::class("nic.example.com", r#"device.driver == "nic.example.com""#));
    world.requests("c", &requests);
    let pod = world.pod("p", &["c"]);
    assert!(matches!(world.decide(&pod), Decision::Rejected(_)));
    world.node("native", 1, AllocatorMode::Scheduler);
    assert_eq!(world.decide(&pod), Decision::NotOurs, "n1 is free, and not given");
    // With a claim of ours beside it too: on that node kube-scheduler gives both.
    world.requests("d", &[request("r", "gpu.aliquot.dev", 1)]);
    let both = world.pod("q", &["d", "c"]);
    assert_eq!(world.decide(&both), Decision::NotOurs);
}

#[test]
fn a_broken_claim_does_not_stop_others() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    let mut broken = request("r", "gpu.aliquot.dev", 1);
    broken["exactly"]["selectors"] = json!([{"cel": {"expression": "device.nothing"}}]);
    world.rejected("a", &fixtures::spec(&[broken]));
    world.one("b", &[request("r", "gpu.aliquot.dev", 1)]);
}

#[test]
fn pods_without_anything_of_ours_are_told_apart() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    world.index.apply_class(&fixtures::class("nic.example.com", r#"device.driver == "nic.example.com""#));
    world.requests("nic", &[request("r", "nic.example.com", 1)]);
    let pod = world.pod("p", &["nic"]);
    assert_eq!(world.decide(&pod), Decision::NotOurs);
    // Beside one of ours, the other claim is left to others.
    world.requests("gpu", &[request("r", "gpu.aliquot.dev", 1)]);
    let pod = world.pod("q", &["nic", "gpu"]);
    let placed = world.place(&pod);
    assert_eq!(placed.0.drafts.iter().map(|draft| &*draft.claim.name).collect::<Vec<_>>(), ["gpu"]);
}

#[test]
fn claims_that_are_not_ready_are_waited_for() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    let pod = world.pod("p", &["missing"]);
    let Decision::Waiting(wait) = world.decide(&pod) else { panic!("must wait") };
    assert_eq!(wait.to_string(), "ResourceClaim default/missing does not exist; create it");
    let templated = world.pod_with("q", &[], |pod| {
        pod.spec.as_mut().expect("a spec").resource_claims =
            Some(vec![object(json!({"name": "gpu", "resourceClaimTemplateName": "t"}))]);
    });
    let Decision::Waiting(wait) = world.decide(&templated) else { panic!("must wait") };
    assert!(
        wait.to_string().contains("from ResourceClaimTemplate t; check that the template exists"),
        "{wait}"
    );
}

/// Each request fits one GPU, which leaves too little there for another, and there is one more of them than
/// GPUs; counting does not tell.
fn hard() -> Value {
    let requests: Vec<Value> = (0..5).map(|n| request(&format!("r{n}"), "mig.aliquot.dev", 4)).collect();
    let mut spec = fixtures::spec(&requests);
    let on_one = |n| json!({"requests": [format!("r{n}")], "matchAttribute": format!("{DRIVER}/parentUUID")});
    spec["devices"]["constraints"] = (0..5).map(on_one).collect();
    spec
}

/// The decision for a claim within so many looks at the clock.
fn decided_within(world: &mut World, name: &str, spec: &Value, most: usize) -> Decision {
    world.claim(name, spec);
    let pod = world.pod(name, &[name]);
    let mut looks = 0;
    let mut expired = || {
        looks += 1;
        looks > most
    };
    decide(&world.index, &mut world.matcher, &pod, &LeftOut::new(), Options::default(), &mut expired)
}

#[test]
fn running_out_of_time_is_not_a_no() {
    let mut world = World::with_nodes(&[("n1", 4)]);
    let decision = decided_within(&mut world, "c", &hard(), 4);
    let Decision::OutOfTime(reason) = decision else {
        panic!("expected to run out of time, got {decision:?}")
    };
    assert!(reason.to_string().contains("could not be searched in time"), "{reason}");
}

#[test]
fn a_decision_stops_within_one_evaluation_of_a_selector() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    let mut long = request("r", "gpu.aliquot.dev", 1);
    let expression = "lists.range(200000).all(i, i >= 0)";
    long["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    let spec = fixtures::spec(&[long]);
    // The clock is looked at some hundred times while this expression runs once.
    let decision = decided_within(&mut world, "c", &spec, 40);
    assert!(matches!(decision, Decision::OutOfTime(_)), "{decision:?}");
    assert_eq!(world.matcher.take_given_up().as_deref(), Some(expression));
    // What was given up is evaluated again, to its end.
    let decision = decided_within(&mut world, "c", &spec, usize::MAX);
    assert!(matches!(decision, Decision::Placed(_)), "{decision:?}");
}

fn on_one_gpu(requests: &[Value]) -> Value {
    let mut spec = fixtures::spec(requests);
    spec["devices"]["constraints"] = json!([{"matchAttribute": format!("{DRIVER}/parentUUID")}]);
    spec
}

/// A search to the end would look at the clock millions of times.
#[rstest]
#[case::partitions_of_one_gpu(
    on_one_gpu(&[request("r", "mig.aliquot.dev", 8)]),
    "hold at most 7 devices for request r on one GPU, even with nobody else there, and 8 are asked"
)]
#[case::of_two_requests(
    on_one_gpu(&[request("a", "mig.aliquot.dev", 5), request("b", "mig.aliquot.dev", 3)]),
    "hold at most 7 devices for request a, b on one GPU, even with nobody else there, and 8 are asked"
)]
#[case::large_and_small_ones_of_one_gpu(
    on_one_gpu(&[partition("a", "3g.40gb"), partition("b", "4g.40gb"), partition("c", "1g.10gb")]),
    "cannot hold all that is asked for on one GPU, even with nobody else there; ask for less"
)]
#[case::partitions_beside_all_gpus(
    fixtures::spec(&[request("parts", "mig.aliquot.dev", 24), request("all", "gpu.aliquot.dev", 8)]),
    "cannot hold all that is asked for on the whole node, even with nobody else there; ask for less"
)]
#[case::more_values_than_there_are({
    let mut spec = fixtures::spec(&[request("r", "mig.aliquot.dev", 9)]);
    spec["devices"]["constraints"] = json!([{"distinctAttribute": format!("{DRIVER}/parentUUID")}]);
    spec
}, "hold at most 8 devices for request r on the whole node, even with nobody else there, and 9 are asked")]
fn what_no_board_can_hold_is_refused_at_once_with_the_bound(#[case] spec: Value, #[case] words: &str) {
    let mut nodes: Vec<String> = (0..20).map(|n| format!("n{n}")).collect();
    nodes.sort();
    let of: Vec<(&str, u32)> = nodes.iter().map(|name| (name.as_str(), 8)).collect();
    let mut world = World::with_nodes(&of);
    // Nodes that differ in what is held of them.
    for number in 0..6 {
        world.one(&format!("x{number}"), &[partition("p", "1g.10gb")]);
    }
    let decision = decided_within(&mut world, "c", &spec, 400);
    let Decision::NoFit(reason) = decision else { panic!("{decision:?}") };
    assert!(reason.to_string().contains(words), "{reason}");
    assert!(reason.is_for_good(), "{reason}");
}

#[test]
fn what_is_only_held_by_others_is_not_said_to_be_impossible() {
    let mut world = World::with_nodes(&[("n1", 1)]);
    for number in 0..3 {
        world.one(&format!("x{number}"), &[partition("p", "1g.10gb")]);
    }
    let decision = decided_within(&mut world, "c", &on_one_gpu(&[request("r", "mig.aliquot.dev", 7)]), 400);
    let Decision::NoFit(reason) = decision else { panic!("{decision:?}") };
    assert!(!reason.to_string().contains("hold at most") && !reason.is_for_good(), "{reason}");
}

#[test]
fn equal_gpus_are_tried_once() {
    // Without symmetry breaking this would try every subset of 8 GPUs.
    let mut world = World::with_nodes(&[("n1", 8)]);
    let mut spec = fixtures::spec(&[
        request("a", "gpu.aliquot.dev", 4),
        request("b", "gpu.aliquot.dev", 4),
        partition("c", "1g.10gb"),
    ]);
    spec["devices"]["constraints"] = json!([{"matchAttribute": format!("{DRIVER}/productName")}]);
    world.claim("c", &spec);
    let pod = world.pod("p", &["c"]);
    let mut looks = 0u32;
    let decision =
        decide(&world.index, &mut world.matcher, &pod, &LeftOut::new(), Options::default(), &mut || {
            looks += 1;
            false
        });
    assert!(matches!(decision, Decision::NoFit(_)));
    assert!(looks < 40, "looked at the clock {looks} times");
}

#[test]
fn equal_nodes_share_what_selectors_answered() {
    let mut world = World::with_nodes(&[("n1", 8), ("n2", 8)]);
    world.one("a", &[partition("p", "1g.10gb")]);
    let before = world.matcher.evaluations();
    world.node("n3", 8, AllocatorMode::Controller);
    world.one("b", &[partition("p", "1g.10gb")]);
    assert_eq!(world.matcher.evaluations(), before);
    // 25 placements, four other kinds and the whole GPU: far fewer evaluations than devices.
    assert!(before < 100, "{before} evaluations");
}
