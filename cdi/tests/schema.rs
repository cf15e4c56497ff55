//! Specs of every shape against the published JSON schema, and through JSON and back.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "helpers of tests")]

use aliquot_cdi::{
    ContainerEdits, Device, DeviceNode, Hook, HookName, IntelRdt, Mount, NetDevice, Spec, Version,
};
use jsonschema::Validator;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use serde_json::{Value, json};

/// The published schema, with its second file put in place of the references to it.
fn published_schema() -> Validator {
    let mut schema: Value = serde_json::from_str(include_str!("data/schema-1.1.0/schema.json")).unwrap();
    let defs: Value = serde_json::from_str(include_str!("data/schema-1.1.0/defs.json")).unwrap();
    point_inside(&mut schema);
    schema["definitions"] = defs["definitions"].clone();
    jsonschema::draft7::new(&schema).expect("the published schema is a schema")
}

fn point_inside(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get_mut("$ref") {
                *reference = reference.trim_start_matches("defs.json").to_owned();
            }
            fields.values_mut().for_each(point_inside);
        }
        Value::Array(items) => items.iter_mut().for_each(point_inside),
        _ => {}
    }
}

fn path() -> impl Strategy<Value = String> {
    "(/[a-zA-Z0-9._-]{1,8}){1,4}"
}

fn env(size: std::ops::Range<usize>) -> impl Strategy<Value = Vec<String>> {
    vec("[A-Z_]{1,6}=.{0,8}".prop_map(|entry| entry.replace('\0', "")), size)
}

fn device_node() -> impl Strategy<Value = DeviceNode> {
    (
        path(),
        option::of(path()),
        option::of(prop::sample::select(vec!["b", "c", "u", "p"])),
        (option::of(0i64..=i64::MAX), option::of(0i64..1000)),
        option::of(0u32..=0o777),
        option::of(prop::sample::select(vec!["r", "rw", "rwm"])),
        (option::of(any::<u32>()), option::of(any::<u32>())),
    )
        .prop_map(|(path, host_path, kind, (major, minor), file_mode, permissions, (uid, gid))| {
            DeviceNode {
                path,
                host_path,
                device_type: kind.map(str::to_owned),
                major,
                minor,
                file_mode,
                permissions: permissions.map(str::to_owned),
                uid,
                gid,
            }
        })
}

fn hook() -> impl Strategy<Value = Hook> {
    let names = vec![
        HookName::Prestart,
        HookName::CreateRuntime,
        HookName::CreateContainer,
        HookName::StartContainer,
        HookName::Poststart,
        HookName::Poststop,
    ];
    (prop::sample::select(names), path(), vec("[a-z -]{0,6}", 0..3), env(1..3), option::of(1u32..))
        .prop_map(|(hook_name, path, args, env, timeout)| Hook { hook_name, path, args, env, timeout })
}

fn mount() -> impl Strategy<Value = Mount> {
    (path(), path(), vec("[a-z]{1,6}", 0..3), option::of(prop::sample::select(vec!["none", "bind", "tmpfs"])))
        .prop_map(|(host_path, container_path, options, mount_type)| Mount {
            host_path,
            container_path,
            options,
            mount_type: mount_type.map(str::to_owned),
        })
}

fn rdt() -> impl Strategy<Value = IntelRdt> {
    let old_or_new = prop_oneof![
        (option::of(any::<bool>()), option::of(any::<bool>()))
            .prop_map(|(enable_cmt, enable_mbm)| IntelRdt { enable_cmt, enable_mbm, ..IntelRdt::default() }),
        (vec("[A-Z0-9:=;]{1,8}", 0..2), option::of(any::<bool>())).prop_map(
            |(schemata, enable_monitoring)| {
                IntelRdt { schemata, enable_monitoring, ..IntelRdt::default() }
            }
        ),
    ];
    (old_or_new, option::of("[a-z]{1,8}"), option::of("[a-z]{1,8}"), option::of("[a-z]{1,8}")).prop_map(
        |(rdt, clos_id, l3_cache_schema, mem_bw_schema)| IntelRdt {
            clos_id,
            l3_cache_schema,
            mem_bw_schema,
            ..rdt
        },
    )
}

fn edits() -> impl Strategy<Value = ContainerEdits> {
    // Interface names are unique in a list: built from the position.
    let net_devices = (0usize..3).prop_map(|n| {
        (0..n)
            .map(|i| NetDevice { host_interface_name: format!("eth{i}"), name: format!("net{i}") })
            .collect()
    });
    (
        env(0..3),
        vec(device_node(), 0..3),
        net_devices,
        vec(hook(), 0..2),
        vec(mount(), 0..3),
        option::of(rdt()),
        vec(any::<u32>(), 0..3),
    )
        .prop_map(|(env, device_nodes, net_devices, hooks, mounts, intel_rdt, additional_gids)| {
            ContainerEdits { env, device_nodes, net_devices, hooks, mounts, intel_rdt, additional_gids }
        })
}

fn annotations() -> impl Strategy<Value = std::collections::BTreeMap<String, String>> {
    btree_map("([a-z]{1,5}\\.dev/)?[a-z]{1,5}", ".{0,8}", 0..3)
}

fn spec() -> impl Strategy<Value = Spec> {
    let device = (annotations(), edits());
    (
        "[a-z]{1,6}\\.[a-z]{1,3}/[a-z]{1,5}(\\.[a-z]{1,3})?",
        annotations(),
        prop::collection::btree_map("[a-z0-9]([a-z0-9:._-]{0,8}[a-z0-9])?", device, 1..4),
        edits(),
    )
        .prop_map(|(kind, annotations, devices, container_edits)| {
            let devices = devices
                .into_iter()
                .map(|(name, (annotations, mut container_edits))| {
                    container_edits.set_env("ALWAYS", "1");
                    Device { name: name.parse().unwrap(), annotations, container_edits }
                })
                .collect();
            let mut spec = Spec::new(kind.parse().unwrap(), devices);
            spec.annotations = annotations;
            spec.container_edits = container_edits;
            spec.declare_lowest_version();
            spec
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_we_call_valid_the_published_schema_calls_valid(spec in spec()) {
        thread_local!(static SCHEMA: Validator = published_schema());
        let range = spec.version_range();
        // Old and new resctrl switches in two devices of one spec: no version has both.
        prop_assume!(range.lowest <= range.highest);
        prop_assert_eq!(spec.validate(), Ok(()));
        let value = serde_json::to_value(&spec).unwrap();
        SCHEMA.with(|schema| {
            let errors: Vec<String> = schema.iter_errors(&value).map(|e| format!("{}: {e}", e.instance_path())).collect();
            prop_assert!(errors.is_empty(), "{errors:?}\n{value:#}");
            Ok(())
        })?;
    }

    #[test]
    fn a_spec_survives_json(spec in spec()) {
        let text = serde_json::to_string(&spec).unwrap();
        prop_assert_eq!(serde_json::from_str::<Spec>(&text).unwrap(), spec);
    }
}

/// What the schema refuses, we refuse too, at the latest when it is decoded.
#[test]
fn what_the_schema_refuses_does_not_decode() {
    let schema = published_schema();
    let good = json!({
        "cdiVersion": "1.1.0",
        "kind": "v.example/c",
        "devices": [{
            "name": "d",
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/x", "major": 1}],
                "mounts": [{"hostPath": "/a", "containerPath": "/b"}],
                "hooks": [{"hookName": "createRuntime", "path": "/h", "env": ["PATH=/bin"]}],
                "netDevices": [{"hostInterfaceName": "a", "name": "b"}],
                "additionalGids": [1],
                "intelRdt": {"schemata": ["x"]},
            },
        }],
    });
    assert!(schema.is_valid(&good));
    serde_json::from_value::<Spec>(good.clone()).unwrap().validate().unwrap();

    let broken = [
        ("/cdiVersion", None),
        ("/kind", None),
        ("/devices", None),
        ("/devices", Some(json!({}))),
        ("/devices/0/name", None),
        ("/devices/0/containerEdits", None),
        ("/devices/0/containerEdits/deviceNodes/0/path", None),
        ("/devices/0/containerEdits/deviceNodes/0/major", Some(json!("1"))),
        ("/devices/0/containerEdits/mounts/0/hostPath", None),
        ("/devices/0/containerEdits/mounts/0/containerPath", Some(json!(7))),
        ("/devices/0/containerEdits/hooks/0/hookName", None),
        ("/devices/0/containerEdits/hooks/0/path", None),
        ("/devices/0/containerEdits/netDevices/0/name", None),
        ("/devices/0/containerEdits/additionalGids/0", Some(json!(-1))),
        ("/devices/0/containerEdits/additionalGids/0", Some(json!(4_294_967_296u64))),
        ("/devices/0/containerEdits/intelRdt/schemata", Some(json!("x"))),
    ];
    for (pointer, replacement) in broken {
        let mut value = good.clone();
        match replacement {
            Some(new) => *value.pointer_mut(pointer).unwrap() = new,
            None => {
                let (parent, field) = pointer.rsplit_once('/').unwrap();
                value.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(field).unwrap();
            }
        }
        assert!(!schema.is_valid(&value), "the schema takes it: {pointer}");
        assert!(serde_json::from_value::<Spec>(value).is_err(), "we take it: {pointer}");
    }
}

#[test]
fn unknown_fields_are_refused_as_the_runtimes_refuse_them() {
    let text =
        r#"{"cdiVersion":"0.5.0","kind":"v/c","devices":[{"name":"d","containerEdits":{"envs":["A=1"]}}]}"#;
    let error = serde_json::from_str::<Spec>(text).unwrap_err().to_string();
    assert!(error.contains("`envs`"), "{error}");
}

#[test]
fn a_leading_v_in_the_version_is_read_and_not_written() {
    let text =
        r#"{"cdiVersion":"v0.6.0","kind":"v/c","devices":[{"name":"d","containerEdits":{"env":["A=1"]}}]}"#;
    let spec: Spec = serde_json::from_str(text).unwrap();
    assert_eq!(spec.cdi_version, Version::V0_6);
    assert!(serde_json::to_string(&spec).unwrap().contains(r#""cdiVersion":"0.6.0""#));
}

#[test]
fn a_claim_of_a_share_reads_like_this() {
    let mut device = ContainerEdits::default();
    device.set_env("ALIQUOT_SHARE_0", "GPU-8f6d2a10");
    device.device_nodes = ["nvidia0", "nvidiactl", "nvidia-uvm"]
        .map(|name| DeviceNode::from_host(format!("/dev/{name}"), format!("/run/sim/root/dev/{name}")))
        .into();
    device.mounts.push(Mount::read_only("/var/lib/x/quota", "/run/aliquot/quota/x"));
    device.mounts.push(Mount::read_write("/var/lib/x/region", "/run/aliquot/region/x"));
    device.hooks.push(Hook {
        hook_name: HookName::CreateContainer,
        path: "/opt/aliquot/hook".into(),
        args: vec!["hook".into(), "ldcache".into()],
        env: vec!["PATH=/usr/bin".into()],
        timeout: None,
    });
    let spec = Spec::new(
        "gpu.aliquot.dev/claim".parse().unwrap(),
        vec![Device::new("x-0".parse().unwrap(), device)],
    );
    spec.validate().unwrap();
    insta::assert_snapshot!(serde_json::to_string_pretty(&spec).unwrap());
}
