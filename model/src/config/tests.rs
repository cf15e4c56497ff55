use super::*;
use rstest::rstest;
use serde_json::json;

#[rstest]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuConfig"}), Config::Gpu(GpuConfig::default()))]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "computePolicy": "Soft", "priority": 5}),
    Config::Share(ShareConfig { compute_policy: ComputePolicy::Soft, priority: 5, ..ShareConfig::default() }))]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "oversubscribe": "8Gi"}),
    Config::Share(ShareConfig { oversubscribe: Some(Quantity::from_u64(8 << 30)), ..ShareConfig::default() }))]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "MpsConfig", "pinnedDeviceMemoryLimit": "2Gi"}),
    Config::Mps(MpsConfig { active_thread_percentage: None, pinned_device_memory_limit: Some(Quantity::from_u64(2 << 30)) }))]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "AllocationPolicy", "substitution": "Larger", "goBack": true}),
    Config::Policy(AllocationPolicy { substitution: Substitution::Larger, go_back: true, ..AllocationPolicy::default() }))]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "AllocationPolicy", "nodeStrategy": "Spread", "gpuStrategy": "BinPack"}),
    Config::Policy(AllocationPolicy { node_strategy: Some(Placing::Spread), gpu_strategy: Some(Placing::BinPack), ..AllocationPolicy::default() }))]
#[case(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
    "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}}),
    Config::Gpu(GpuConfig { time_slice: TimeSliceInterval::Long, ..GpuConfig::default() }))]
#[case(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
    "sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}}}),
    Config::Mps(MpsConfig { active_thread_percentage: Some(50), pinned_device_memory_limit: None }))]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "MigConfig", "driverCapabilities": "graphics"}),
    Config::Mig(MigConfig { driver_capabilities: "graphics".parse().unwrap() }))]
#[case(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig"}), Config::Mig(MigConfig::default()))]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "VfioConfig"}), Config::Vfio(VfioConfig::default()))]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "VfioConfig", "iommu": {"backend": "IommuFd", "apiDevice": false}}),
    Config::Vfio(VfioConfig { iommu: Iommu { backend: IommuBackend::IommuFd, api_device: false } }))]
#[case(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig",
    "iommu": {"backendPolicy": "PreferIommuFD", "enableAPIDevice": false}}),
    Config::Vfio(VfioConfig { iommu: Iommu { backend: IommuBackend::PreferIommuFd, api_device: false } }))]
#[case(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig", "iommu": {"backendPolicy": "LegacyOnly"}}),
    Config::Vfio(VfioConfig::default()))]
fn known_kinds_decode(#[case] parameters: Value, #[case] want: Config) {
    assert_eq!(decode_strict(&parameters), Ok(want.clone()));
    assert_eq!(decode_lenient(&parameters), Ok(want.clone()));
    assert_eq!(decode_strict(&want.encode()), Ok(want), "what is encoded decodes again");
}

#[rstest]
#[case(json!([]), "must be a JSON object")]
#[case(json!({"kind": "GpuConfig"}), "unknown kind \"GpuConfig\" of apiVersion \"\"")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "computPolicy": "Hard"}),
    "ShareConfig.computPolicy: unknown field `computPolicy`, expected one of `computePolicy`")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "computePolicy": "Harder"}),
    "ShareConfig.computePolicy: unknown variant `Harder`")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "priority": "high"}),
    "ShareConfig.priority: invalid type: string")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "priority": 101}),
    "ShareConfig.priority: must be from -100 to 100")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "priority": 300}),
    "ShareConfig.priority: must be from -100 to 100")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "oversubscribe": "8GiB"}),
    "ShareConfig.oversubscribe: \"8GiB\" is not a quantity")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "oversubscribe": "-1Gi"}),
    "ShareConfig.oversubscribe: must be a whole number of bytes, 0 or more")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuConfig", "driverCapabilities": "cuda"}),
    "GpuConfig.driverCapabilities: \"cuda\" is none of compute, utility, video")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "MpsConfig", "pinnedDeviceMemoryLimit": "2GiB"}),
    "MpsConfig.pinnedDeviceMemoryLimit: \"2GiB\" is not a quantity")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "MpsConfig", "activeThreadPercentage": 0}),
    "MpsConfig.activeThreadPercentage: must be from 1 to 100")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "VfioConfig", "iommu": {"backend": "iommufd"}}),
    "VfioConfig.iommu.backend: unknown variant `iommufd`, expected one of `Legacy`, `IommuFd`")]
#[case(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig", "iommu": {"enableAPIDevice": true}}),
    "VfioDeviceConfig.iommu: missing field `backendPolicy`")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "AllocationPolicy", "substitution": "larger"}),
    "AllocationPolicy.substitution: unknown variant `larger`, expected `Never` or `Larger`")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "AllocationPolicy", "nodeStrategy": "Pack"}),
    "AllocationPolicy.nodeStrategy: unknown variant `Pack`, expected `BinPack` or `Spread`")]
#[case(json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "AllocationPolicy", "maxGrowthPercent": 10001}),
    "AllocationPolicy.maxGrowthPercent: must be from 0 to 10000")]
#[case(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
    "sharing": {"strategy": "TimeSlicing", "mpsConfig": {}}}), "GpuConfig.sharing.mpsConfig: must be absent")]
#[case(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
    "sharing": {"strategy": "Turbo"}}), "GpuConfig.sharing.strategy: unknown variant `Turbo`")]
fn errors_name_the_field(#[case] parameters: Value, #[case] want: &str) {
    let error = decode_strict(&parameters).expect_err("refused").to_string();
    assert!(error.contains(want), "{error}");
}

#[test]
fn fields_of_a_newer_release_are_ignored_in_what_we_stored() {
    let stored = json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "priority": 7, "burst": {"ms": 3}});
    assert!(decode_strict(&stored).is_err());
    let share = ShareConfig { priority: 7, ..Default::default() };
    assert_eq!(decode_lenient(&stored), Ok(Config::Share(share)));
}

/// As it is read from the API.
fn read(text: &str) -> Value {
    read_within_bounds(&mut serde_json::Deserializer::from_str(text)).expect("JSON")
}

fn many(of: &str, times: usize) -> String {
    vec![of; times].join(",")
}

/// An object with values in a list: it is one, the list and two more are three.
fn with(list: &str) -> String {
    format!(r#"{{"apiVersion":"aliquot.dev/v1alpha1","kind":"GpuConfig","a":[{list}]}}"#)
}

#[rstest]
#[case::as_many_values_as_may_be(with(&many("0", MOST_VALUES - 4)), true)]
#[case::one_more(with(&many("0", MOST_VALUES - 3)), false)]
#[case::objects(with(&many(r#"{"":0}"#, MOST_VALUES)), false)]
#[case::names(with(&format!(r#"{{"{}":0}}"#, "n".repeat(MOST_BYTES))), false)]
#[case::texts(with(&format!(r#""{}""#, "t".repeat(MOST_BYTES))), false)]
#[case::deeper_than_serde_json_reads(with(&format!("{}{}", "[".repeat(4000), "]".repeat(4000))), false)]
#[case::another_type(format!("[{}]", many("0", 1000)), false)]
fn what_is_too_large_is_read_as_something_that_says_so(#[case] text: String, #[case] is_kept: bool) {
    let read = read(&text);
    if is_kept {
        assert_eq!(Ok(&read), serde_json::from_str(&text).as_ref().map_err(|_| ()));
        return;
    }
    // The API server takes nothing but an object.
    assert!(read.is_object() && read.to_string().len() < 100, "{read}");
    let wants = format!("at most {MOST_VALUES} values with {MOST_BYTES} bytes");
    for parameters in [Some(read), serde_json::from_str(&text).ok()].into_iter().flatten() {
        for decoded in [decode_strict(&parameters), decode_lenient(&parameters)] {
            let error = decoded.expect_err("it is never taken for something else");
            assert_eq!(error, ConfigError::TooLarge);
            assert!(error.to_string().contains(&wants), "{error}");
        }
    }
}

#[test]
fn what_is_no_json_is_not_read_as_something_too_large() {
    let text = with(&many("0", 1000));
    let cut = &mut serde_json::Deserializer::from_str(&text[..text.len() - 1]);
    assert!(read_within_bounds(cut).is_err());
}
