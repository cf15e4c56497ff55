use super::*;
use crate::ledger::{Held, Partition};
use crate::testing::{DRIVER, POOL, claim, h100, share_of};
use aliquot_model::config::MpsConfig;
use aliquot_model::{MigUuid, Placement, ProfileName};
use rstest::rstest;
use serde_json::{Value, json};

const MIG: &str = "MIG-0d0f1c4e-0000-5000-8000-000000000001";

fn gpu(request: &str, minor: u32) -> Device {
    Device {
        request: request.into(),
        device: format!("gpu-{minor}"),
        share_id: None,
        held: Some(Held::Whole),
        consumed: None,
        share: None,
        ..share_of(&h100(minor), 0, 0)
    }
}

fn partition(request: &str) -> Device {
    let (placement, profile) = (Placement::new(4, 4), ProfileName::new("3g.40gb"));
    let uuid = MigUuid::parse(MIG);
    Device {
        device: "gpu-0-mig-3g40gb-9-4".into(),
        held: Some(Held::Partition(placement)),
        partition: Some(Partition { profile_id: 9, profile, placement, adopted: false, uuid }),
        ..gpu(request, 0)
    }
}

fn told(devices: &[Device]) -> Vec<(Device, BTreeMap<String, Attribute>)> {
    let minor = |device: &Device| device.name().unwrap().minor();
    devices.iter().map(|device| (device.clone(), attributes(device, &h100(minor(device))))).collect()
}

fn files(
    claim: &ClaimRef,
    in_pod: Option<&str>,
    devices: &[Device],
) -> Result<Vec<RequestFile>, MetadataError> {
    let metadata = Metadata { pod_claim_name: in_pod.map(str::to_owned) };
    requests(DRIVER, Path::new("/data"), claim, &metadata, &told(devices))
}

/// The objects of a stream.
fn objects(file: &RequestFile) -> Vec<Value> {
    serde_json::Deserializer::from_slice(&file.content).into_iter().map(Result::unwrap).collect()
}

#[test]
fn a_file_says_the_same_in_each_version_newest_first() {
    let file = files(&claim("u-1"), None, &[partition("r")]).unwrap().remove(0);
    let mut objects = objects(&file);
    let versions: Vec<Value> = objects.iter_mut().map(|object| object["apiVersion"].take()).collect();
    assert_eq!(versions, ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"]);
    assert_eq!(objects[0], objects[1]);
    assert_eq!(
        objects[0],
        json!({
            "apiVersion": null, "kind": "DeviceMetadata",
            "metadata": {"name": "claim-u-1", "namespace": "ns", "uid": "u-1", "generation": 1},
            "requests": [{"name": "r", "devices": [{
                "driver": DRIVER, "pool": POOL, "name": "gpu-0-mig-3g40gb-9-4",
                "attributes": {
                    "type": {"string": "mig"},
                    "uuid": {"string": MIG},
                    "parentUUID": {"string": "GPU-00000000-0000-0000-0000-000000000000"},
                    "profile": {"string": "3g.40gb"},
                    "productName": {"string": "NVIDIA H100 80GB HBM3"},
                    "brand": {"string": "Nvidia"},
                    "architecture": {"string": "Hopper"},
                    "cudaComputeCapability": {"version": "9.0.0"},
                    "cudaDriverVersion": {"version": "13.0.0"},
                    "driverVersion": {"version": "580.65.6"},
                    "minor": {"int": 0},
                    "index": {"int": 0},
                    "resource.kubernetes.io/pciBusID": {"string": "0000:00:00.0"},
                    "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
                    "resource.kubernetes.io/numaNode": {"int": 0},
                },
            }]}],
        })
    );
}

#[test]
fn a_file_of_a_gpu_through_mps_says_the_limits_of_each_process() {
    let config = MpsConfig {
        active_thread_percentage: Some(50),
        pinned_device_memory_limit: Some(aliquot_model::Quantity::from_u64(1 << 30)),
    };
    let device = Device { device: "gpu-0-mps".into(), mps: Some(config), ..gpu("r", 0) };
    let file = files(&claim("u-1"), None, &[device]).unwrap().remove(0);
    let told = objects(&file)[0]["requests"][0]["devices"][0]["attributes"].clone();
    assert_eq!(told["type"], json!({"string": "mps"}));
    assert_eq!(told["activeThreadPercentage"], json!({"int": 50}));
    assert_eq!(told["pinnedDeviceMemoryLimitBytes"], json!({"int": 1 << 30}));
}

#[rstest]
#[case::by_its_name(None, "resourceclaims/claim-u-1/r")]
#[case::from_a_template(Some("in-pod"), "resourceclaimtemplates/in-pod/r")]
fn containers_find_a_file_by_what_the_pod_says(#[case] in_pod: Option<&str>, #[case] path: &str) {
    let file = files(&claim("u-1"), in_pod, &[gpu("r", 0)]).unwrap().remove(0);
    assert_eq!(file.spec_name, format!("{DRIVER}_metadata_u-1_r"));
    assert_eq!(objects(&file)[0].get("podClaimName").and_then(Value::as_str), in_pod);
    assert_eq!(
        serde_json::to_value(&file.spec).unwrap(),
        json!({
            "cdiVersion": "0.5.0", "kind": format!("{DRIVER}/metadata"),
            "devices": [{"name": "u-1_r", "containerEdits": {"mounts": [{
                "hostPath": "/data/dra-device-metadata/u-1/r/metadata.json",
                "containerPath": format!(
                    "/var/run/kubernetes.io/dra-device-attributes/{path}/{DRIVER}-metadata.json"
                ),
                "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
            }]}}],
        })
    );
    assert!(file.spec.validate().is_ok());
    assert_eq!(device_id(DRIVER, "u-1", "r"), format!("{DRIVER}/metadata=u-1_r"));
}

#[test]
fn each_request_has_a_file_with_all_its_devices() {
    let devices = [gpu("a/large", 0), gpu("b", 1), gpu("a/large", 2)];
    let files = files(&claim("u-1"), None, &devices).unwrap();
    let names = files.iter().map(|file| {
        let request = &objects(file)[0]["requests"][0];
        let devices = request["devices"].as_array().unwrap().iter().map(|device| device["name"].clone());
        (file.spec_name.clone(), request["name"].clone(), devices.collect::<Vec<_>>())
    });
    assert_eq!(
        names.collect::<Vec<_>>(),
        [
            (format!("{DRIVER}_metadata_u-1_a"), json!("a/large"), vec![json!("gpu-0"), json!("gpu-2")]),
            (format!("{DRIVER}_metadata_u-1_b"), json!("b"), vec![json!("gpu-1")]),
        ]
    );
}

#[rstest]
#[case::up("..", "r")]
#[case::elsewhere("a/../../../etc", "r")]
#[case::hidden(".a", "r")]
#[case::empty_part("a..b", "r")]
#[case::empty("", "r")]
#[case::nul("a\0b", "r")]
#[case::upper("Claim", "r")]
#[case::option("-claim", "r")]
#[case::request_up("c", "..")]
#[case::request_with_dots("c", "a.b")]
#[case::request_empty("c", "")]
#[case::request_underscore("c", "a_b")]
#[case::subrequest_first("c", "/etc")]
fn a_name_that_kubernetes_does_not_allow_is_part_of_no_path(#[case] name: &str, #[case] request: &str) {
    let claim = ClaimRef { name: name.to_owned(), ..claim("u-1") };
    let error = files(&claim, None, &[gpu(request, 0)]).unwrap_err().to_string();
    assert!(error.contains("no name that Kubernetes allows") && error.contains("u-1"), "{error}");
    let elsewhere = ClaimRef { name: "c".into(), uid: "../u".into(), ..claim.clone() };
    assert!(files(&elsewhere, None, &[gpu("r", 0)]).is_err());
    let error = files(&ClaimRef { name: "c".into(), ..claim }, Some("../x"), &[gpu("r", 0)]).unwrap_err();
    assert!(error.to_string().contains("name in its pod \"../x\""), "{error}");
}

#[test]
fn the_longest_names_that_kubernetes_allows_make_files() {
    let long = |length: usize| "n".repeat(length);
    let dotted = [long(63), long(63), long(63), long(61)].join(".");
    assert_eq!(dotted.len(), 253);
    for name in [dotted, long(253)] {
        let claim =
            ClaimRef { namespace: long(63), name, uid: "0d5f5f9e-0b6c-4e0d-8a44-6c1d0d4f3f00".into() };
        let file = files(&claim, Some(&long(63)), &[gpu(&long(63), 0)]).unwrap().remove(0);
        assert!(file.spec.validate().is_ok());
        let (mount, spec) =
            (&file.spec.devices[0].container_edits.mounts[0], format!("{}.json", file.spec_name));
        for path in [&mount.container_path, &mount.host_path, &spec] {
            assert!(path.split('/').all(|part| part.len() <= 255) && path.len() < 4096, "{path}");
        }
        assert!(files(&ClaimRef { name: long(254), ..claim }, None, &[gpu("r", 0)]).is_err());
    }
}

#[test]
fn a_file_is_bounded_whatever_the_driver_says() {
    let mut info = h100(0);
    info.product_name = "N".repeat(20_000);
    info.brand = "B".repeat(20_000);
    info.pci_bus_id = Some("0".repeat(20_000));
    info.pcie_root = Some("p".repeat(20_000));
    // What a claim can have at most.
    let devices = vec![(partition("r"), attributes(&partition("r"), &info)); 32];
    let files = requests(DRIVER, Path::new("/data"), &claim("u-1"), &Metadata::default(), &devices).unwrap();
    assert!(files.len() == 1 && files[0].content.len() < 256 << 10, "{}", files[0].content.len());
}
