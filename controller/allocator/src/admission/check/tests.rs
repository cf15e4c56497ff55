use super::*;
use crate::clock::{Clock, Deadline};
use crate::fixtures::{self, DRIVER, object, partition, request, share};
use aliquot_model::layout::AllocatorMode;
use rstest::rstest;
use serde_json::{Value, json};

fn index() -> Snapshot {
    let mut index = Snapshot::new(DRIVER);
    index.reset_slices(&fixtures::slices("n1", 2, AllocatorMode::Controller, 1));
    let mut classes = fixtures::classes();
    classes.push(fixtures::class("nic.example.com", r#"device.driver == "nic.example.com""#));
    classes.push(fixtures::class("any.example.com", "true"));
    for kind in ["mps", "timeslice"] {
        let expression =
            format!(r#"device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].type == "{kind}""#);
        classes.push(fixtures::class(&format!("{kind}.aliquot.dev"), &expression));
    }
    let mut open = classes
        .iter()
        .find(|c| c.metadata.name.as_deref() == Some("share.aliquot.dev"))
        .cloned()
        .expect("a class");
    open.metadata.name = Some("open.example.com".to_owned());
    open.spec.config =
        object(json!([{"opaque": opaque(json!({"kind": "ShareConfig", "failMode": "Open"}))}]));
    classes.push(open);
    index.reset_classes(&classes);
    index
}

/// Parameters for our driver; the apiVersion is ours unless given.
fn opaque(mut parameters: Value) -> Value {
    if parameters.get("apiVersion").is_none() {
        parameters["apiVersion"] = json!("aliquot.dev/v1alpha1");
    }
    json!({"driver": DRIVER, "parameters": parameters})
}

fn judge_with(spec: Value, quotas: &[Value], rules: Rules) -> Judgement {
    let index = index();
    let quotas = quotas.iter().map(|spec| {
        let quota = object(json!({"metadata": {"name": "limits", "namespace": "team-a"}, "spec": spec}));
        (ObjectKey::new("team-a", "limits"), quota)
    });
    let mut matcher = Matcher::new();
    let mut scene = Scene { index: &index, matcher: &mut matcher, rules, quotas: quotas.collect() };
    claim(&mut scene, &object(spec), "spec")
}

fn judge(spec: Value) -> Judgement {
    judge_with(spec, &[], Rules::default())
}

fn with_config(requests: &[Value], named: &[&str], parameters: Value) -> Value {
    let mut spec = fixtures::spec(requests);
    spec["devices"]["config"] = json!([{"requests": named, "opaque": opaque(parameters)}]);
    spec
}

fn selected(class: &str, expression: &str) -> Value {
    let mut request = request("r", class, 1);
    request["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    request
}

fn share_of(class: &str, capacity: Value) -> Value {
    let mut request = request("r", class, 1);
    request["exactly"]["capacity"] = json!({"requests": capacity});
    request
}

/// Two whole GPUs with the same of something.
fn constrained(attribute: &str) -> Value {
    let mut spec = fixtures::spec(&[request("r", "gpu.aliquot.dev", 2)]);
    spec["devices"]["constraints"] = json!([{"matchAttribute": attribute}]);
    spec
}

const LEGAL: &str =
    "legal are NVIDIA H100 80GB HBM3: 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb";

#[rstest]
#[case::unknown_field(
    with_config(&[share("r", "4Gi", "10")], &[], json!({"kind": "ShareConfig", "priorty": 5})),
    "spec.devices.config[0].opaque.parameters: ShareConfig.priorty: unknown field `priorty`, expected one of `computePolicy`, `priority`, `failMode`, `oversubscribe`, `driverCapabilities`"
)]
#[case::out_of_range(
    with_config(&[share("r", "4Gi", "10")], &["r"], json!({"kind": "ShareConfig", "priority": 101})),
    "spec.devices.config[0].opaque.parameters: ShareConfig.priority: must be from -100 to 100"
)]
#[case::unknown_kind(
    with_config(&[share("r", "4Gi", "10")], &[], json!({"kind": "ShareConf"})),
    "spec.devices.config[0].opaque.parameters: unknown kind \"ShareConf\" of apiVersion \"aliquot.dev/v1alpha1\"; known are"
)]
#[case::kind_of_another_device(
    with_config(&[share("r", "4Gi", "10")], &["r"], json!({"kind": "MigConfig"})),
    "spec.devices.config[0]: MigConfig is for devices of type mig, but request r is for devices of type share"
)]
#[case::kind_that_fits_no_request(
    with_config(&[partition("r", "1g.10gb"), request("s", "gpu.aliquot.dev", 1)], &[], json!({"kind": "ShareConfig"})),
    "spec.devices.config[0]: ShareConfig is for devices of type share or mig-share, but request r is for devices of type mig"
)]
#[case::mps_config(
    with_config(&[request("r", "gpu.aliquot.dev", 1)], &[], json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {"strategy": "MPS"}})),
    "spec.devices.config[0]: MpsConfig is for devices of type mps, but request r is for devices of type gpu"
)]
#[case::part_of_a_gpu_through_mps(
    fixtures::spec(&[share_of("mps.aliquot.dev", json!({"cores": "10"}))]),
    "spec.devices.requests[0].exactly.capacity.requests.cores: devices of class mps.aliquot.dev are given as they are"
)]
#[case::open_from_a_tenant(
    with_config(&[share("r", "4Gi", "10")], &[], json!({"kind": "ShareConfig", "failMode": "Open"})),
    "spec.devices.config[0].opaque.parameters: ShareConfig.failMode: Open may only be set in a DeviceClass"
)]
#[case::managed_memory_where_it_is_off(
    with_config(&[share("r", "4Gi", "10")], &[], json!({"kind": "ShareConfig", "oversubscribe": "1Gi"})),
    "spec.devices.config[0].opaque.parameters: ShareConfig.oversubscribe: 1Gi is more managed memory beyond a share than the nodes give, 0 at most"
)]
#[case::strategy_from_a_tenant(
    with_config(&[partition("r", "2g.20gb")], &[], json!({"kind": "AllocationPolicy", "nodeStrategy": "Spread"})),
    "spec.devices.config[0].opaque.parameters: AllocationPolicy.nodeStrategy and gpuStrategy may only be set in a DeviceClass"
)]
#[case::admin_without_access(
    fixtures::spec(&[request("r", "admin.aliquot.dev", 1)]),
    "spec.devices.requests[0].exactly: devices of class admin.aliquot.dev are for monitoring and need adminAccess: true"
)]
#[case::too_many_devices(
    fixtures::spec(&[request("r", "mig.aliquot.dev", 33)]),
    "spec.devices.requests[0].exactly.count: 33 devices are more than the 32 that a claim can hold"
)]
#[case::unknown_profile(
    fixtures::spec(&[partition("r", "1g.11gb")]),
    "spec.devices.requests[0].exactly.selectors[0]: no board of this cluster has the MIG profile \"1g.11gb\"; legal are"
)]
#[case::unknown_profile_with_the_legal_ones(fixtures::spec(&[partition("r", "2g.10gb")]), LEGAL)]
#[case::unknown_profiles(
    fixtures::spec(&[selected("mig.aliquot.dev", &format!(r#"device.attributes["{DRIVER}"].profile in ["1g.5gb", "2g.10gb"]"#))]),
    "no board of this cluster has the MIG profile \"1g.5gb\" or \"2g.10gb\"; legal are"
)]
#[case::unknown_profile_of_an_alternative(
    json!({"devices": {"requests": [{"name": "r", "firstAvailable": [
        {"name": "a", "deviceClassName": "mig.aliquot.dev"},
        {"name": "b", "deviceClassName": "mig.aliquot.dev", "selectors": [{"cel": {"expression": format!(r#""9g.1gb" == device.attributes["{DRIVER}"].profile && true"#)}}]},
    ]}]}}),
    "spec.devices.requests[0].firstAvailable[1].selectors[0]: no board of this cluster has the MIG profile \"9g.1gb\""
)]
#[case::more_memory_than_any_board(
    fixtures::spec(&[share("r", "200Gi", "10")]),
    "spec.devices.requests[0].exactly.capacity.requests.memory: no device of this cluster gives 200Gi; the most is 80Gi"
)]
#[case::more_cores_than_any_board(
    fixtures::spec(&[share("r", "2Gi", "101")]),
    "spec.devices.requests[0].exactly.capacity.requests.cores: no device of this cluster gives 101; the most is 100"
)]
fn tenants_are_told_what_is_wrong_and_what_to_do(#[case] spec: Value, #[case] want: &str) {
    let judgement = judge(spec);
    assert!(judgement.errors.iter().any(|error| error.contains(want)), "{judgement:#?}");
    assert_eq!(judgement.errors.len(), 1, "{judgement:#?}");
}

#[rstest]
#[case::share(fixtures::spec(&[share("r", "4Gi", "10")]))]
#[case::share_without_memory_takes_all_of_it(fixtures::spec(&[request("r", "share.aliquot.dev", 1)]))]
#[case::whole(fixtures::spec(&[request("r", "gpu.aliquot.dev", 8)]))]
#[case::partition(fixtures::spec(&[partition("r", "2g.20gb")]))]
#[case::one_legal_profile_of_two(fixtures::spec(&[selected("mig.aliquot.dev", &format!(r#"device.attributes["{DRIVER}"].profile == "9g.1gb" || device.attributes["{DRIVER}"].profile == "2g.20gb""#))]))]
#[case::a_profile_that_is_not_wanted(fixtures::spec(&[selected("mig.aliquot.dev", &format!(r#"device.attributes["{DRIVER}"].profile != "9g.1gb""#))]))]
#[case::admin(json!({"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "admin.aliquot.dev", "adminAccess": true}}]}}))]
#[case::config_for_some_of_several(with_config(&[share("r", "4Gi", "10"), partition("s", "1g.10gb")], &[], json!({"kind": "ShareConfig", "priority": 3})))]
#[case::open_where_the_class_is(with_config(&[share_of("open.example.com", json!({"memory": "4Gi"}))], &[], json!({"kind": "ShareConfig", "failMode": "Open"})))]
#[case::mps(with_config(&[request("r", "mps.aliquot.dev", 2)], &["r"], json!({"kind": "MpsConfig", "activeThreadPercentage": 50})))]
#[case::another_driver(fixtures::spec(&[request("r", "nic.example.com", 40)]))]
#[case::a_class_that_is_not_there_yet(fixtures::spec(&[request("r", "later.example.com", 40)]))]
#[case::the_name_of_a_capacity_with_its_domain(fixtures::spec(&[share_of("share.aliquot.dev", json!({"gpu.aliquot.dev/memory": "4Gi"}))]))]
#[case::at_least_so_much_memory_of_a_whole_gpu(fixtures::spec(&[share_of("gpu.aliquot.dev", json!({"memory": "40Gi"}))]))]
#[case::a_memory_slice(fixtures::spec(&[selected("mig.aliquot.dev", &format!(r#"has(device.capacity["{DRIVER}"].memorySlice0)"#))]))]
#[case::a_standard_attribute(fixtures::spec(&[selected("gpu.aliquot.dev", r#"device.attributes["resource.kubernetes.io"].numaNode == 0"#)]))]
#[case::names_of_another_driver_where_it_may_give(fixtures::spec(&[selected("any.example.com", r#"device.attributes["nic.example.com"].?speed.orValue(0) > 1"#)]))]
#[case::a_capacity_of_another_driver_where_it_may_give(fixtures::spec(&[share_of("any.example.com", json!({"bandwidth": "1G"}))]))]
#[case::one_root(constrained("resource.kubernetes.io/pcieRoot"))]
fn what_may_be_right_is_accepted(#[case] spec: Value) {
    assert_eq!(judge(spec), Judgement::default());
}

/// Names that no device has: nothing would ever come of them.
#[rstest]
#[case::capacity(
    fixtures::spec(&[share_of("share.aliquot.dev", json!({"mem": "10Gi"}))]),
    "spec.devices.requests[0].exactly.capacity.requests.mem: no device of class share.aliquot.dev has it; did you mean memory? legal are cores, memory, slots"
)]
#[case::capacity_of_an_alternative(
    json!({"devices": {"requests": [{"name": "r", "firstAvailable": [
        {"name": "a", "deviceClassName": "gpu.aliquot.dev"},
        {"name": "b", "deviceClassName": "share.aliquot.dev", "capacity": {"requests": {"gpu.aliquot.dev/core": "10"}}},
    ]}]}}),
    "spec.devices.requests[0].firstAvailable[1].capacity.requests.gpu.aliquot.dev/core: no device of class share.aliquot.dev has it; did you mean cores? legal are cores, memory, slots"
)]
#[case::capacity_of_another_domain(
    fixtures::spec(&[share_of("share.aliquot.dev", json!({"nic.example.com/bandwidth": "1G"}))]),
    "capacity.requests.nic.example.com/bandwidth: no device of class share.aliquot.dev has it; legal are cores, memory, slots"
)]
#[case::capacity_of_partitions(
    fixtures::spec(&[share_of("mig.aliquot.dev", json!({"decoder": "1"}))]),
    "capacity.requests.decoder: no device of class mig.aliquot.dev has it; did you mean decoders? legal are copyEngines, decoders, encoders, jpegEngines, memory, multiprocessors, ofaEngines"
)]
#[case::an_attribute_is_no_capacity(
    fixtures::spec(&[share_of("mig.aliquot.dev", json!({"profile": "1"}))]),
    "capacity.requests.profile: no device of class mig.aliquot.dev has it; legal are copyEngines"
)]
#[case::a_capacity_is_no_attribute(
    constrained("gpu.aliquot.dev/memory"),
    "matchAttribute: gpu.aliquot.dev/memory: no device of driver gpu.aliquot.dev has it; legal are architecture"
)]
#[case::cores_of_whole_gpus(
    fixtures::spec(&[share_of("gpu.aliquot.dev", json!({"cores": "50"}))]),
    "spec.devices.requests[0].exactly.capacity.requests.cores: devices of class gpu.aliquot.dev are given as they are, and only shares of a GPU have cores; leave it out, or use class share.aliquot.dev for a part of a GPU"
)]
#[case::cores_of_partitions(
    fixtures::spec(&[share_of("mig.aliquot.dev", json!({"cores": "50"}))]),
    "capacity.requests.cores: devices of class mig.aliquot.dev are given as they are, and only shares"
)]
#[case::constraint(
    constrained("gpu.aliquot.dev/pcieRoot"),
    "spec.devices.constraints[0].matchAttribute: gpu.aliquot.dev/pcieRoot: no device of driver gpu.aliquot.dev has it; did you mean resource.kubernetes.io/pcieRoot?"
)]
fn names_that_nothing_has_are_refused_with_those_that_there_are(#[case] spec: Value, #[case] want: &str) {
    let judgement = judge(spec);
    assert!(judgement.errors.iter().any(|error| error.contains(want)), "{judgement:#?}");
    assert_eq!(judgement.errors.len(), 1, "{judgement:#?}");
}

/// A selector may be meant for devices that come later, or guard what it reads.
#[rstest]
#[case::attribute(
    "gpu.aliquot.dev", r#"device.attributes["gpu.aliquot.dev"].productNme.contains("H100")"#,
    r#"spec.devices.requests[0].exactly.selectors[0]: device.attributes["gpu.aliquot.dev"].productNme: no device of class gpu.aliquot.dev has it; did you mean device.attributes["gpu.aliquot.dev"].productName? legal are architecture, brand, "#
)]
#[case::nothing_like_it(
    "gpu.aliquot.dev", r#"device.attributes["gpu.aliquot.dev"].later == "x""#,
    r#"device.attributes["gpu.aliquot.dev"].later: no device of class gpu.aliquot.dev has it; legal are architecture, "#
)]
#[case::capacity(
    "mig.aliquot.dev", r#"device.capacity["gpu.aliquot.dev"].mem.isGreaterThan(quantity("10Gi"))"#,
    r#"device.capacity["gpu.aliquot.dev"].mem: no device of class mig.aliquot.dev has it; did you mean device.capacity["gpu.aliquot.dev"].memory? legal are copyEngines, "#
)]
#[case::attribute_that_is_a_capacity(
    "gpu.aliquot.dev",
    r#"device.attributes["gpu.aliquot.dev"].memory > 5"#,
    r#"did you mean device.capacity["gpu.aliquot.dev"].memory? legal are architecture, "#
)]
#[case::standard_attribute_in_our_domain(
    "gpu.aliquot.dev",
    r#"device.attributes["gpu.aliquot.dev"].numaNode == 0"#,
    r#"did you mean device.attributes["resource.kubernetes.io"].numaNode?"#
)]
#[case::another_domain(
    "gpu.aliquot.dev", r#"device.attributes["gpu.nvidia.com"].productName == "H100""#,
    r#"device.attributes["gpu.nvidia.com"].productName: no device of class gpu.aliquot.dev has it; did you mean device.attributes["gpu.aliquot.dev"].productName?"#
)]
#[case::attribute_of_another_kind(
    "share.aliquot.dev", r#"device.attributes["gpu.aliquot.dev"].profile == "1g.10gb""#,
    r#"device.attributes["gpu.aliquot.dev"].profile: no device of class share.aliquot.dev has it; legal are "#
)]
#[case::guarded("gpu.aliquot.dev", r#"has(device.attributes["gpu.aliquot.dev"].brnd)"#, "].brand? legal")]
#[case::optional(
    "gpu.aliquot.dev",
    r#"device.attributes["gpu.aliquot.dev"].?brnd.orValue("") == """#,
    "].brand? legal"
)]
#[case::optional_domain(
    "gpu.aliquot.dev",
    r#"device.attributes[?"gpu.aliquot.dev"].brnd.orValue("") == """#,
    "].brand? legal"
)]
#[case::listed("gpu.aliquot.dev", r#""brnd" in device.attributes["gpu.aliquot.dev"]"#, "].brand? legal")]
#[case::bound(
    "gpu.aliquot.dev",
    r#"cel.bind(a, device.attributes["gpu.aliquot.dev"], a.brnd == "x")"#,
    "].brand? legal"
)]
#[case::our_domain_where_others_may_give(
    "any.example.com",
    r#"device.attributes["gpu.aliquot.dev"].brnd == "x""#,
    "].brand? legal"
)]
fn selectors_that_read_what_no_device_has_are_warned_of(
    #[case] class: &str,
    #[case] expression: &str,
    #[case] want: &str,
) {
    let judgement = judge(fixtures::spec(&[selected(class, expression)]));
    assert_eq!(judgement.errors, Vec::<String>::new());
    assert!(judgement.warnings.iter().any(|warning| warning.contains(want)), "{judgement:#?}");
    assert_eq!(judgement.warnings.len(), 1, "{judgement:#?}");
}

/// A node's agent may be newer than the controller.
#[test]
fn what_nodes_publish_is_no_mistake_whatever_its_name() {
    let mut slices = fixtures::slices("n1", 1, AllocatorMode::Controller, 1);
    for device in slices.iter_mut().flat_map(|slice| slice.spec.devices.iter_mut().flatten()) {
        let attributes = device.attributes.get_or_insert_default();
        attributes.insert("later".to_owned(), object(json!({"string": "x"})));
        device.capacity.get_or_insert_default().insert("much".to_owned(), object(json!({"value": "5"})));
    }
    let mut index = index();
    index.reset_slices(&slices);
    let mut request = selected("gpu.aliquot.dev", &format!(r#"device.attributes["{DRIVER}"].later == "x""#));
    request["exactly"]["capacity"] = json!({"requests": {"much": "1"}});
    let mut matcher = Matcher::new();
    let mut scene =
        Scene { index: &index, matcher: &mut matcher, rules: Rules::default(), quotas: Vec::new() };
    assert_eq!(claim(&mut scene, &object(fixtures::spec(&[request])), "spec"), Judgement::default());
}

#[test]
fn classes_that_read_what_no_device_has_are_warned_of() {
    let judge = |expression: String| {
        let spec = object(json!({"selectors": [{"cel": {"expression": expression}}]}));
        class(&index(), &mut Matcher::new(), Rules::default(), &spec)
    };
    let read = |name: &str| {
        judge(format!(r#"device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].{name} == "x""#))
    };
    assert_eq!(read("productName"), Judgement::default());
    let judgement = read("productNme");
    assert_eq!(judgement.errors, Vec::<String>::new());
    let want = r#"spec.selectors[0]: device.attributes["gpu.aliquot.dev"].productNme: no device of such a class has it; did you mean"#;
    assert!(judgement.warnings.len() == 1 && judgement.warnings[0].starts_with(want), "{judgement:?}");
    let foreign = r#"device.driver == "nic.example.com" && device.attributes["nic.example.com"].speed > 10"#;
    assert_eq!(judge(foreign.to_owned()), Judgement::default());
}

#[test]
fn configuration_of_other_drivers_is_not_looked_at() {
    let mut spec = fixtures::spec(&[request("r", "nic.example.com", 1)]);
    spec["devices"]["config"] =
        json!([{"opaque": {"driver": "nic.example.com", "parameters": {"kind": "Odd"}}}]);
    assert_eq!(judge(spec), Judgement::default());
}

#[test]
fn every_mistake_is_named_at_once() {
    let requests = [partition("r", "1g.11gb"), share("s", "200Gi", "5")];
    let spec = with_config(&requests, &[], json!({"kind": "MigConfig", "x": 1}));
    assert_eq!(judge(spec).errors.len(), 3);
}

#[rstest]
#[case::refuse(Unknown::Refuse, (1, 0))]
#[case::warn(Unknown::Warn, (0, 1))]
#[case::allow(Unknown::Allow, (0, 0))]
fn the_administrator_says_what_becomes_of_unknown_profiles(
    #[case] unknown: Unknown,
    #[case] want: (usize, usize),
) {
    let got =
        judge_with(fixtures::spec(&[partition("r", "9g.1gb")]), &[], Rules { unknown, ..Rules::default() });
    assert_eq!((got.errors.len(), got.warnings.len()), want);
}

/// A node publishes devices for MPS only while a supervisor runs there.
#[test]
fn who_asks_for_mps_is_told_when_no_node_serves_it() {
    let mut index = index();
    index.reset_slices(&[]);
    let mut matcher = Matcher::new();
    let mut scene =
        Scene { index: &index, matcher: &mut matcher, rules: Rules::default(), quotas: Vec::new() };
    let spec = object(fixtures::spec(&[request("r", "mps.aliquot.dev", 1)]));
    let judgement = claim(&mut scene, &spec, "spec");
    assert_eq!(judgement.errors, [""; 0]);
    assert!(
        judgement.warnings.iter().any(|warning| warning.contains("kubeletPlugin.mps.enabled")),
        "{judgement:?}"
    );
}

#[test]
fn without_published_partitions_no_profile_is_unknown() {
    let mut index = index();
    index.reset_slices(&[]);
    let mut matcher = Matcher::new();
    let mut scene =
        Scene { index: &index, matcher: &mut matcher, rules: Rules::default(), quotas: Vec::new() };
    let spec = object(fixtures::spec(&[partition("r", "9g.1gb")]));
    assert_eq!(claim(&mut scene, &spec, "spec"), Judgement::default());
}

#[rstest]
#[case::share_memory(fixtures::spec(&[share("r", "41Gi", "10")]), json!({"perClaim": {"memory": "40Gi"}}),
    Some("spec.devices: asks for at least 41Gi of GPU memory, but one claim may have 40Gi (GpuQuota team-a/limits)"))]
#[case::within(fixtures::spec(&[share("r", "40Gi", "10")]), json!({"perClaim": {"memory": "40Gi"}}), None)]
#[case::share_without_memory(fixtures::spec(&[request("r", "share.aliquot.dev", 1)]), json!({"perClaim": {"memory": "40Gi"}}),
    Some("asks for at least 80Gi of GPU memory, but one claim may have 40Gi"))]
#[case::cores(fixtures::spec(&[share("r", "4Gi", "60"), share("s", "4Gi", "50")]), json!({"perClaim": {"cores": 100}}),
    Some("asks for at least 110 of cores (percent of a GPU), but one claim may have 100"))]
#[case::devices(fixtures::spec(&[request("r", "mig.aliquot.dev", 5)]), json!({"perClaim": {"devices": 4}}),
    Some("asks for at least 5 of devices, but one claim may have 4"))]
#[case::partitions_count_their_profile(fixtures::spec(&[partition("r", "3g.40gb")]), json!({"perClaim": {"memory": "20Gi"}}),
    Some("asks for at least 40Gi of GPU memory"))]
#[case::any_partition_may_be_the_smallest(fixtures::spec(&[request("r", "mig.aliquot.dev", 2)]), json!({"perClaim": {"memory": "20Gi"}}), None)]
#[case::the_smallest_twice(fixtures::spec(&[request("r", "mig.aliquot.dev", 3)]), json!({"perClaim": {"memory": "20Gi"}}),
    Some("asks for at least 30Gi of GPU memory"))]
#[case::whole_gpus(fixtures::spec(&[request("r", "gpu.aliquot.dev", 3)]), json!({"hard": {"gpus": 2}}),
    Some("asks for at least 3 of whole GPUs, but the whole namespace may have 2 (GpuQuota team-a/limits)"))]
#[case::never_within_hard(fixtures::spec(&[share("r", "41Gi", "10")]), json!({"hard": {"memory": "40Gi"}}),
    Some("but the whole namespace may have 40Gi"))]
#[case::a_smaller_alternative_may_do(json!({"devices": {"requests": [{"name": "r", "firstAvailable": [
        {"name": "a", "deviceClassName": "gpu.aliquot.dev"},
        {"name": "b", "deviceClassName": "share.aliquot.dev", "capacity": {"requests": {"memory": "8Gi"}}},
    ]}]}}), json!({"perClaim": {"memory": "40Gi"}, "hard": {"gpus": 0}}), None)]
#[case::monitoring_takes_nothing(json!({"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "admin.aliquot.dev", "adminAccess": true, "allocationMode": "All"}}]}}),
    json!({"hard": {"memory": "0", "cores": 0, "gpus": 0}}), None)]
#[case::other_drivers_take_nothing(fixtures::spec(&[request("r", "nic.example.com", 5)]), json!({"perClaim": {"devices": 1}}), None)]
fn more_than_a_namespace_may_have_is_refused(
    #[case] spec: Value,
    #[case] quota: Value,
    #[case] want: Option<&str>,
) {
    let judgement = judge_with(spec, &[quota], Rules::default());
    match want {
        None => assert_eq!(judgement, Judgement::default()),
        Some(want) => {
            assert!(judgement.errors.iter().any(|error| error.contains(want)), "{judgement:#?}");
        }
    }
}

#[test]
fn classes_are_checked_for_their_configuration() {
    let judge = |parameters: Value| {
        let rules = Rules { oversubscribe_at_most: 8 << 30, ..Rules::default() };
        class(
            &index(),
            &mut Matcher::new(),
            rules,
            &object(json!({"config": [{"opaque": opaque(parameters)}]})),
        )
        .errors
    };
    assert_eq!(judge(json!({"kind": "ShareConfig", "failMode": "Open"})), Vec::<String>::new());
    assert_eq!(judge(json!({"kind": "ShareConfig", "oversubscribe": "8Gi"})), Vec::<String>::new());
    let errors = judge(json!({"kind": "ShareConfig", "oversubscribe": "9Gi"}));
    let want = "spec.config[0].opaque.parameters: ShareConfig.oversubscribe: 9Gi is more managed memory";
    assert!(errors.len() == 1 && errors[0].starts_with(want), "{errors:?}");
    let errors = judge(json!({"kind": "GpuConfig", "timeSlice": "Longest"}));
    assert_eq!(errors.len(), 1);
    assert!(
        errors[0]
            .starts_with("spec.config[0].opaque.parameters: GpuConfig.timeSlice: unknown variant `Longest`"),
        "{errors:?}"
    );
}

/// A claim is judged while its creator waits, so it must not take longer the more nodes there are.
#[test]
fn of_nodes_of_one_make_one_is_looked_at() {
    let mut index = index();
    for mode in [AllocatorMode::Controller, AllocatorMode::Scheduler] {
        for node in ["n1", "n2", "n3"] {
            fixtures::slices(node, 2, mode, 1).iter().for_each(|slice| drop(index.apply_slice(slice)));
        }
        fixtures::slices("small", 1, mode, 1).iter().for_each(|slice| drop(index.apply_slice(slice)));
        assert_eq!(index.makes_published().count(), 2, "{mode:?}");
    }
}

#[test]
fn a_selector_for_one_gpu_is_judged_by_that_gpu() {
    let mut index = index();
    fixtures::slices("n2", 2, AllocatorMode::Controller, 1)
        .iter()
        .for_each(|slice| drop(index.apply_slice(slice)));
    let quota = object(json!({"metadata": {"name": "limits"}, "spec": {"perClaim": {"memory": "40Gi"}}}));
    let quotas = vec![(ObjectKey::new("team-a", "limits"), quota)];
    for node in ["n1", "n2"] {
        let uuid = fixtures::h100(node, 1).uuid;
        let spec = fixtures::spec(&[selected(
            "gpu.aliquot.dev",
            &format!(r#"device.attributes["{DRIVER}"].uuid == "{uuid}""#, uuid = uuid.as_str()),
        )]);
        let mut matcher = Matcher::new();
        let quotas = quotas.clone();
        let mut scene = Scene { index: &index, matcher: &mut matcher, rules: Rules::default(), quotas };
        let judgement = claim(&mut scene, &object(spec), "spec");
        assert!(
            judgement.errors.iter().any(|error| error.contains("at least 80Gi")),
            "{node}: {judgement:?}"
        );
    }
}

/// The same claim with and without the selector for a GPU: what its partitions have is known either way.
#[test]
fn a_partition_of_a_named_gpu_is_estimated_by_the_pools_with_that_gpu_alone() {
    let mut index = index();
    for node in 2..50 {
        let slices = fixtures::slices(&format!("n{node}"), 2, AllocatorMode::Controller, 1);
        drop(index.apply_slices(&slices));
    }
    let uuid = fixtures::h100("n7", 1).uuid;
    let of = |condition: &str| {
        let mut request = partition("r", "3g.40gb");
        let expression = format!(r#"device.attributes["{DRIVER}"].parentUUID {condition}"#);
        let selectors = request["exactly"]["selectors"].as_array_mut().expect("selectors");
        selectors.push(json!({"cel": {"expression": expression}}));
        request
    };
    let pools = |request: &Value| {
        let selectors = request["exactly"]["selectors"].as_array().expect("selectors");
        let text = |s: &Value| Arc::from(s["cel"]["expression"].as_str().expect("text"));
        let expressions: Vec<Arc<str>> = selectors.iter().map(text).collect();
        Matcher::new().layouts(&index, &expressions).len()
    };
    assert_eq!(pools(&partition("r", "3g.40gb")), 1);
    assert_eq!(pools(&of(&format!("== {:?}", uuid.to_string()))), 1);
    assert_eq!(pools(&of(&format!("in [{:?}, \"GPU-none\"]", uuid.to_string()))), 1);
    assert_eq!(pools(&of("== \"GPU-none\"")), 0);
    // What cannot be told from a comparison is looked at everywhere.
    assert_eq!(pools(&of(&format!("!= {:?}", uuid.to_string()))), 49);
    let quota = object(json!({"metadata": {"name": "limits"}, "spec": {"perClaim": {"memory": "20Gi"}}}));
    let judge = |request: Value| {
        let quotas = vec![(ObjectKey::new("team-a", "limits"), GpuQuota::clone(&quota))];
        let mut matcher = Matcher::new();
        let mut scene = Scene { index: &index, matcher: &mut matcher, rules: Rules::default(), quotas };
        claim(&mut scene, &object(fixtures::spec(&[request])), "spec")
    };
    let want = judge(partition("r", "3g.40gb"));
    assert!(want.errors[0].contains("asks for at least 40Gi of GPU memory"), "{want:?}");
    assert_eq!(judge(of(&format!("== {:?}", uuid.to_string()))), want);
}

#[test]
fn what_is_not_looked_at_in_time_is_neither_refused_nor_passed_off_as_looked_at() {
    let index = index();
    let mut matcher = Matcher::new();
    let now = fixtures::some_moment();
    matcher.set_until(Some(Deadline::new(Clock::new(move || now), now)));
    let mut judge = |spec: Value| {
        let (rules, quotas) = (Rules::default(), Vec::new());
        claim(&mut Scene { index: &index, matcher: &mut matcher, rules, quotas }, &object(spec), "spec")
    };
    let open = json!({"kind": "ShareConfig", "failMode": "Open"});
    let mut spec = with_config(&[share("r", "200Gi", "5")], &[], open);
    spec["devices"]["requests"][0]["exactly"]["deviceClassName"] = json!("open.example.com");
    assert_eq!(judge(spec), Judgement::default());
    assert!(matcher.ran_out());
    matcher.set_until(None);
    assert!(!matcher.ran_out());
}

#[rstest]
#[case::as_others_take_it(json!({"memory": "4096", "cores": "10"}), Some("4096 is 4096 bytes, in which no CUDA program starts; 4096 MiB are 4096Mi"))]
#[case::qualified(json!({"gpu.aliquot.dev/memory": "8"}), Some("8 MiB are 8Mi"))]
#[case::little_with_a_unit(json!({"memory": "4Mi"}), Some("4Mi is 4194304 bytes, in which no CUDA program starts"))]
#[case::enough(json!({"memory": "64Mi"}), None)]
#[case::all_of_it(json!({"cores": "10"}), None)]
fn a_share_in_which_no_program_starts_is_warned_of(#[case] capacity: Value, #[case] want: Option<&str>) {
    // To others memory is no limit.
    let whole = judge(fixtures::spec(&[share_of("gpu.aliquot.dev", capacity.clone())]));
    assert_eq!(whole.warnings, Vec::<String>::new());
    let judgement = judge(fixtures::spec(&[share_of("share.aliquot.dev", capacity)]));
    assert_eq!(judgement.errors, Vec::<String>::new());
    match want {
        Some(want) => {
            assert!(judgement.warnings.len() == 1 && judgement.warnings[0].ends_with(want), "{judgement:?}")
        }
        None => assert_eq!(judgement.warnings, Vec::<String>::new()),
    }
}
