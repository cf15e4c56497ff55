use super::*;
use crate::fixtures::{self, DRIVER, h100, object, partition, request};
use aliquot_model::layout::{AllocatorMode, GpuState};
use aliquot_model::{GpuInfo, MigCapability, MigProfile};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use proptest::prelude::*;
use rstest::rstest;

const LARGER: AllocationPolicy = AllocationPolicy {
    substitution: Substitution::Larger,
    max_growth_percent: 100,
    go_back: false,
    node_strategy: None,
    gpu_strategy: None,
};

fn index_of(gpus: &[GpuInfo]) -> Snapshot {
    let states: Vec<GpuState> = gpus
        .iter()
        .map(|info| GpuState {
            info: info.clone(),
            live: Vec::new(),
            held: Vec::new(),
            standing: Vec::new(),
            taints: Vec::new(),
        })
        .collect();
    let mut index = Snapshot::new(DRIVER);
    index.reset_slices(&fixtures::slices_of("n1", &states, AllocatorMode::Controller, 1));
    index.reset_classes(&fixtures::classes());
    index
}

fn index() -> Snapshot {
    index_of(&[h100("n1", 0)])
}

fn profiles_of(info: &mut GpuInfo) -> &mut Vec<MigProfile> {
    match &mut info.mig {
        MigCapability::Supported { profiles, .. } => profiles,
        MigCapability::Unsupported => panic!("no MIG"),
    }
}

fn claim(requests: &[Value]) -> Value {
    json!({"metadata": {"name": "c", "namespace": "default"}, "spec": fixtures::spec(requests)})
}

/// Adds a selector.
fn also(request: &mut Value, expression: &str) {
    let selectors = request["exactly"]["selectors"].as_array_mut().expect("selectors");
    selectors.push(json!({"cel": {"expression": expression}}));
}

fn of(index: &Snapshot, claim: &Value, policy: Option<&AllocationPolicy>) -> Expansion {
    expand(index, &mut Matcher::new(), claim, policy)
}

fn names(expansion: &Expansion, at: usize) -> Vec<String> {
    expansion
        .requests
        .get(&at)
        .into_iter()
        .flatten()
        .map(|a| a["name"].as_str().expect("a name").to_owned())
        .collect()
}

#[rstest]
#[case::up_to_twice("1g.10gb", 100, &["1g10gb", "1g20gb", "2g20gb"])]
#[case::whatever_is_larger("1g.10gb", 10_000, &["1g10gb", "1g20gb", "2g20gb", "3g40gb", "4g40gb", "7g80gb"])]
#[case::nothing_larger_allowed("1g.10gb", 0, &[])]
#[case::the_largest_has_no_substitute("7g.80gb", 10_000, &[])]
#[case::less_memory_is_no_substitute("2g.20gb", 100, &["2g20gb", "3g40gb", "4g40gb"])]
#[case::less_compute_is_no_substitute("1g.20gb", 120, &["1g20gb", "2g20gb"])]
#[case::engines_count_too("1g.10gb+me", 10_000, &["1g10gb-me", "7g80gb"])]
#[case::more_of_the_gpu_later("3g.40gb", 10, &["3g40gb", "4g40gb"])]
fn larger_profiles_follow_the_asked_one_least_waste_first(
    #[case] asked: &str,
    #[case] growth: u32,
    #[case] want: &[&str],
) {
    let policy = AllocationPolicy { max_growth_percent: growth, ..LARGER };
    assert_eq!(names(&of(&index(), &claim(&[partition("r", asked)]), Some(&policy)), 0), want);
}

#[test]
fn the_first_alternative_is_the_request_as_it_was_and_the_others_differ_in_the_profile_alone() {
    let mut asked = partition("r", "1g.10gb");
    asked["exactly"]["count"] = json!(2);
    asked["exactly"]["tolerations"] = json!([{"key": "example.com/slow", "operator": "Exists"}]);
    also(&mut asked, "true");
    let expansion = of(&index(), &claim(std::slice::from_ref(&asked)), Some(&LARGER));
    let alternatives = &expansion.requests[&0];
    assert_eq!(alternatives.len(), 3);
    for (alternative, profile) in alternatives.iter().zip(["1g.10gb", "1g.20gb", "2g.20gb"]) {
        let mut want = asked["exactly"].clone();
        want["name"] = json!(ProfileName::new(profile).slug());
        want["selectors"][0]["cel"]["expression"] =
            json!(format!(r#"device.attributes["{DRIVER}"].profile == "{profile}""#));
        assert_eq!(*alternative, want);
    }
    assert_eq!(expansion.record.asked, BTreeMap::from([("r".to_owned(), "1g.10gb".to_owned())]));
}

fn with(mut request: Value, field: &str, value: Value) -> Value {
    request["exactly"][field] = value;
    request
}

#[rstest]
#[case::whole_gpu(request("r", "gpu.aliquot.dev", 1))]
#[case::any_partition(request("r", "mig.aliquot.dev", 1))]
#[case::all(with(partition("r", "1g.10gb"), "allocationMode", json!("All")))]
#[case::admin(with(partition("r", "1g.10gb"), "adminAccess", json!(true)))]
#[case::a_field_of_a_newer_kubernetes(with(partition("r", "1g.10gb"), "derivedAttributes", json!([])))]
#[case::unknown_profile(partition("r", "1g.11gb"))]
#[case::unknown_class(request("r", "later.example.com", 1))]
#[case::already_a_list(json!({"name": "r", "firstAvailable": [{"name": "a", "deviceClassName": "mig.aliquot.dev"}]}))]
#[case::a_selector_that_fails(with(partition("r", "1g.10gb"), "selectors", json!([
    {"cel": {"expression": format!(r#"device.attributes["{DRIVER}"].profile == "1g.10gb""#)}},
    {"cel": {"expression": format!(r#"device.attributes["{DRIVER}"].later == 1"#)}},
])))]
#[case::a_place(with(partition("r", "1g.10gb"), "selectors", json!([
    {"cel": {"expression": format!(r#"device.attributes["{DRIVER}"].profile == "1g.10gb""#)}},
    {"cel": {"expression": format!(r#"device.capacity["{DRIVER}"].memory.compareTo(quantity("10Gi")) == 0"#)}},
])))]
fn what_cannot_be_widened_without_contradiction_is_left_alone(#[case] request: Value) {
    assert_eq!(of(&index(), &claim(&[request]), Some(&LARGER)), Expansion::default());
}

fn opaque(policy: Value) -> Value {
    let mut parameters = json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "AllocationPolicy"});
    parameters.as_object_mut().expect("an object").extend(policy.as_object().cloned().expect("an object"));
    json!({"driver": DRIVER, "parameters": parameters})
}

#[rstest]
#[case::nobody(None, None, None, false)]
#[case::namespace(Some("Larger"), None, None, true)]
#[case::class(None, Some("Larger"), None, true)]
#[case::claim(None, None, Some("Larger"), true)]
#[case::the_class_before_the_namespace(Some("Larger"), Some("Never"), None, false)]
#[case::the_claim_before_both(Some("Larger"), Some("Larger"), Some("Never"), false)]
fn who_is_nearest_to_the_request_decides(
    #[case] namespace: Option<&str>,
    #[case] class: Option<&str>,
    #[case] own: Option<&str>,
    #[case] want: bool,
) {
    let mut index = index();
    if let Some(substitution) = class {
        let mut classes: Vec<DeviceClass> = fixtures::classes();
        for class in &mut classes {
            class.spec.config = object(json!([{"opaque": opaque(json!({"substitution": substitution}))}]));
        }
        index.reset_classes(&classes);
    }
    let mut claim = claim(&[partition("r", "1g.10gb")]);
    if let Some(substitution) = own {
        claim["spec"]["devices"]["config"] =
            json!([{"requests": ["r"], "opaque": opaque(json!({"substitution": substitution}))}]);
    }
    let namespace: Option<AllocationPolicy> =
        namespace.map(|s| serde_json::from_value(json!({"substitution": s})).expect("a policy"));
    assert_eq!(!of(&index, &claim, namespace.as_ref()).requests.is_empty(), want);
}

#[test]
fn a_class_that_says_only_how_to_choose_leaves_substitution_to_the_namespace() {
    let mut index = index();
    let mut class = fixtures::classes()
        .into_iter()
        .find(|class| class.metadata.name.as_deref() == Some("mig.aliquot.dev"))
        .expect("a class");
    for (policy, substituted) in [
        (json!({"nodeStrategy": "Spread"}), true),
        (json!({"nodeStrategy": "Spread", "substitution": "Never"}), false),
    ] {
        class.spec.config =
            Some(serde_json::from_value(json!([{"opaque": opaque(policy)}])).expect("config"));
        index.apply_class(&class);
        let expansion = of(&index, &claim(&[partition("r", "1g.10gb")]), Some(&LARGER));
        assert_eq!(!expansion.requests.is_empty(), substituted);
    }
}

#[test]
fn a_policy_for_one_request_leaves_the_others_alone() {
    let mut claim =
        claim(&[partition("r", "1g.10gb"), partition("s", "1g.10gb"), request("t", "gpu.aliquot.dev", 1)]);
    claim["spec"]["devices"]["config"] =
        json!([{"requests": ["s"], "opaque": opaque(json!({"substitution": "Larger", "goBack": true}))}]);
    let expansion = of(&index(), &claim, None);
    assert_eq!(expansion.requests.keys().collect::<Vec<_>>(), [&1]);
    assert!(expansion.record.go_back);
}

#[test]
fn the_pod_goes_back_only_if_every_expanded_request_may() {
    let mut claim = claim(&[partition("r", "1g.10gb"), partition("s", "1g.10gb")]);
    claim["spec"]["devices"]["config"] = json!([
        {"opaque": opaque(json!({"substitution": "Larger", "goBack": true}))},
        {"requests": ["s"], "opaque": opaque(json!({"substitution": "Larger"}))},
    ]);
    let expansion = of(&index(), &claim, None);
    assert_eq!((expansion.requests.len(), expansion.record.go_back), (2, false));
}

/// Names in `constraints` and `config` mean the request with all its alternatives, so they stay.
#[test]
fn the_patched_claim_keeps_constraints_and_configuration() {
    let mut claim = claim(&[partition("r", "1g.10gb"), partition("s", "2g.20gb")]);
    claim["spec"]["devices"]["constraints"] =
        json!([{"requests": ["r", "s"], "matchAttribute": format!("{DRIVER}/parentUUID")}]);
    claim["spec"]["devices"]["config"] =
        json!([{"requests": ["r"], "opaque": opaque(json!({"substitution": "Larger"}))}]);
    let expansion = of(&index(), &claim, None);
    let patch = expansion.patch(&claim).expect("a patch");
    let operations: Vec<(&str, &str)> = patch
        .as_array()
        .expect("a list")
        .iter()
        .map(|operation| (operation["op"].as_str().expect("op"), operation["path"].as_str().expect("path")))
        .collect();
    assert_eq!(
        operations,
        [
            ("remove", "/spec/devices/requests/0/exactly"),
            ("add", "/spec/devices/requests/0/firstAvailable"),
            ("add", "/metadata/annotations"),
        ]
    );
    let record = Record::read(patch[2]["value"][ANNOTATION].as_str().map(str::to_owned).as_ref());
    assert_eq!(record, Some(expansion.record));
}

/// Of two boards with a profile of one name, the larger one says what was asked.
#[test]
fn a_substitute_suffices_on_whichever_board_it_is_given() {
    let mut small = h100("n1", 1);
    small.product_name = "Small".to_owned();
    for profile in profiles_of(&mut small) {
        if profile.name.as_str() == "1g.20gb" {
            profile.memory_bytes /= 2;
        }
    }
    let index = index_of(&[h100("n1", 0), small]);
    let all = of(&index, &claim(&[partition("r", "1g.10gb")]), Some(&LARGER));
    assert_eq!(names(&all, 0), ["1g10gb", "1g20gb", "2g20gb"], "10 GiB are still as much as asked");
    // 20 GiB is what was asked, as one of the boards has it: 1g.10gb does not suffice, on either.
    let policy = AllocationPolicy { max_growth_percent: 10_000, ..LARGER };
    let all = of(&index, &claim(&[partition("r", "1g.20gb")]), Some(&policy));
    assert_eq!(names(&all, 0), ["1g20gb", "2g20gb", "3g40gb", "4g40gb", "7g80gb"]);
    let none = AllocationPolicy { max_growth_percent: 99, ..LARGER };
    assert!(of(&index, &claim(&[partition("r", "1g.20gb")]), Some(&none)).requests.is_empty());
}

#[test]
fn a_request_for_one_product_is_widened_within_that_product() {
    let mut other = h100("n1", 1);
    other.product_name = "Other".to_owned();
    profiles_of(&mut other).retain(|profile| profile.name.as_str() != "2g.20gb");
    let index = index_of(&[h100("n1", 0), other]);
    let mut asked = partition("r", "1g.10gb");
    also(&mut asked, &format!(r#"device.attributes["{DRIVER}"].productName == "Other""#));
    assert_eq!(names(&of(&index, &claim(&[asked]), Some(&LARGER)), 0), ["1g10gb", "1g20gb"]);
}

/// Boards with any profiles whatever.
fn board() -> impl Strategy<Value = GpuInfo> {
    prop::collection::vec((1u64..16, 1u32..8, 0u32..3, 0u32..2), 1..14).prop_map(|kinds| {
        let mut info = h100("n1", 0);
        let template = profiles_of(&mut info)[0].clone();
        *profiles_of(&mut info) = kinds
            .into_iter()
            .enumerate()
            .map(|(number, (memory, compute, copy, media))| {
                let mut profile = template.clone();
                let id = u32::try_from(number).expect("few");
                profile.name = ProfileName::new(&format!("{compute}g.{}gb.{number}", memory * 5));
                (profile.id, profile.nvml_profile) = (id, id);
                (profile.memory_bytes, profile.multiprocessors) = ((memory * 5) << 30, compute * 16);
                (profile.engines.copy, profile.engines.jpeg) = (copy, media);
                profile
            })
            .collect();
        info
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 8))]
    /// Whatever the boards are: every alternative has at least what was asked, within the policy, the asked
    /// one is first, the rest are sorted by what they take, and there are at most eight.
    #[test]
    fn a_substitute_is_never_less_than_asked(board in board(), asked in 0usize..14, growth in 0u32..400) {
        let mut board = board;
        let profiles = profiles_of(&mut board).clone();
        let asked = &profiles[asked % profiles.len()];
        let index = index_of(&[board]);
        let policy = AllocationPolicy { max_growth_percent: growth, ..LARGER };
        let expansion = of(&index, &claim(&[partition("r", asked.name.as_str())]), Some(&policy));
        let covers = |profile: &MigProfile| {
            profile.memory_bytes >= asked.memory_bytes
                && profile.multiprocessors >= asked.multiprocessors
                && profile.engines.copy >= asked.engines.copy
                && profile.engines.jpeg >= asked.engines.jpeg
                && (profile.memory_bytes > asked.memory_bytes || profile.multiprocessors > asked.multiprocessors)
                && (profile.memory_bytes - asked.memory_bytes) * 100 / asked.memory_bytes <= u64::from(growth)
                && (profile.multiprocessors - asked.multiprocessors) * 100 / asked.multiprocessors <= growth
        };
        let legal = profiles.iter().filter(|profile| profile.name != asked.name && covers(profile)).count();
        let given = expansion.requests.get(&0).cloned().unwrap_or_default();
        prop_assert_eq!(given.len(), if legal == 0 { 0 } else { (legal + 1).min(MOST_ALTERNATIVES) });
        let mut parts = Vec::new();
        for (position, alternative) in given.iter().enumerate() {
            let expression = alternative["selectors"][0]["cel"]["expression"].as_str().expect("an expression");
            let profile = profiles.iter().find(|p| expression.ends_with(&format!("\"{}\"", p.name))).expect("a profile");
            if position == 0 {
                prop_assert_eq!(&profile.name, &asked.name);
            } else {
                prop_assert!(covers(profile), "{:?} for {:?}", profile, asked);
                let growth = |more: u64, less: u64| (more - less) * 100 / less;
                let memory = growth(profile.memory_bytes, asked.memory_bytes);
                let compute = growth(profile.multiprocessors.into(), asked.multiprocessors.into());
                parts.push((memory.max(compute), memory + compute));
            }
        }
        prop_assert!(parts.is_sorted(), "{:?}", parts);
        // What the patch makes is a claim that the API's types know.
        let mut patched = claim(&[partition("r", asked.name.as_str())]);
        if !given.is_empty() {
            patched["spec"]["devices"]["requests"][0] = json!({"name": "r", "firstAvailable": given});
        }
        prop_assert!(serde_json::from_value::<ResourceClaim>(patched).is_ok());
    }
}

#[test]
fn a_request_that_names_a_gpu_is_expanded_as_one_that_does_not() {
    let mut index = index();
    for node in ["n2", "n3"] {
        drop(index.apply_slices(&fixtures::slices(node, 2, AllocatorMode::Controller, 1)));
    }
    let plain = partition("r", "1g.10gb");
    let mut named = plain.clone();
    let uuid = h100("n2", 1).uuid;
    also(&mut named, &format!(r#"device.attributes["{DRIVER}"].parentUUID == "{uuid}""#));
    let want = names(&of(&index, &claim(&[plain]), Some(&LARGER)), 0);
    assert_eq!(want, ["1g10gb", "1g20gb", "2g20gb"]);
    let (copy, claim) = (index.published(), claim(&[named]));
    for index in [&index, &copy] {
        assert_eq!(names(&of(index, &claim, Some(&LARGER)), 0), want);
    }
    assert!(may_expand(&copy, &mut Matcher::new(), &claim, Some(&LARGER)));
    assert!(!may_expand(&copy, &mut Matcher::new(), &claim, None));
}
