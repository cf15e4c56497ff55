use super::*;
use crate::{Device, HookName, QualifiedName};
use rstest::rstest;

/// A device that has one of everything valid up to 1.0.0.
fn full_edits() -> ContainerEdits {
    ContainerEdits {
        env: vec!["A=1".into(), "B=".into(), "C=x=y".into()],
        device_nodes: vec![
            DeviceNode::at("/dev/nvidia0"),
            DeviceNode {
                device_type: Some("c".into()),
                major: Some(195),
                minor: Some(0),
                file_mode: Some(0o660),
                permissions: Some("rw".into()),
                uid: Some(0),
                gid: Some(44),
                ..DeviceNode::from_host("/dev/nvidia1", "/root/dev/nvidia1")
            },
        ],
        net_devices: vec![],
        hooks: vec![Hook {
            hook_name: HookName::CreateContainer,
            path: "/usr/bin/hook".into(),
            args: vec!["hook".into(), "run".into()],
            env: vec!["H=1".into()],
            timeout: Some(5),
        }],
        mounts: vec![
            Mount::read_only("/a", "/b"),
            Mount {
                host_path: "tmpfs".into(),
                container_path: "/t".into(),
                options: vec![],
                mount_type: Some("tmpfs".into()),
            },
        ],
        intel_rdt: Some(IntelRdt { clos_id: Some("/".into()), ..IntelRdt::default() }),
        additional_gids: vec![44],
    }
}

fn spec_with(edits: ContainerEdits) -> Spec {
    let name: QualifiedName = "v.example/c=d".parse().unwrap();
    Spec::new(name.kind, vec![Device::new(name.name, edits)])
}

fn problems(spec: &Spec) -> Vec<String> {
    spec.validate().err().map(|p| p.0.iter().map(ToString::to_string).collect()).unwrap_or_default()
}

#[test]
fn a_spec_with_one_of_everything_is_valid() {
    assert_eq!(problems(&spec_with(full_edits())), Vec::<String>::new());
}

type Change = fn(&mut ContainerEdits);

#[rstest]
#[case::env_name(|e: &mut ContainerEdits| e.env[1] = "=x".into(), r#"env[1]: "=x" is not NAME=value"#)]
#[case::env_value(|e: &mut ContainerEdits| e.env[1] = "X".into(), r#"env[1]: "X" is not NAME=value"#)]
#[case::env_nul(|e: &mut ContainerEdits| e.env[0] = "X=\0".into(), "env[0]: contains a NUL byte")]
#[case::node_path(|e: &mut ContainerEdits| e.device_nodes[1].path = "dev/x".into(), r#"deviceNodes[1].path: "dev/x" is not an absolute path"#)]
#[case::node_empty(|e: &mut ContainerEdits| e.device_nodes[0].path = String::new(), "deviceNodes[0].path: is empty")]
#[case::node_host(|e: &mut ContainerEdits| e.device_nodes[1].host_path = Some(String::new()), "deviceNodes[1].hostPath: is empty")]
#[case::node_type(|e: &mut ContainerEdits| e.device_nodes[0].device_type = Some("x".into()), r#"deviceNodes[0].type: "x" is none of b, c, u, p"#)]
#[case::node_permissions(|e: &mut ContainerEdits| e.device_nodes[0].permissions = Some("rx".into()), r#"deviceNodes[0].permissions: "rx" is not made of r, w and m"#)]
#[case::node_major(|e: &mut ContainerEdits| e.device_nodes[1].major = Some(-1), "deviceNodes[1].major: is negative")]
#[case::hook_path(|e: &mut ContainerEdits| e.hooks[0].path = "hook".into(), r#"hooks[0].path: "hook" is not an absolute path"#)]
#[case::hook_without_env(|e: &mut ContainerEdits| e.hooks[0].env.clear(), "hooks[0].env: is empty, and runc up to 1.2 then runs the hook with the container's own environment, LD_PRELOAD included; give PATH at least")]
#[case::hook_env(|e: &mut ContainerEdits| e.hooks[0].env[0] = "H".into(), r#"hooks[0].env[0]: "H" is not NAME=value"#)]
#[case::hook_args(|e: &mut ContainerEdits| e.hooks[0].args[1] = "\0".into(), "hooks[0].args[1]: contains a NUL byte")]
#[case::hook_timeout(|e: &mut ContainerEdits| e.hooks[0].timeout = Some(0), "hooks[0].timeout: is zero; leave it out to wait for the hook")]
#[case::mount_host(|e: &mut ContainerEdits| e.mounts[0].host_path = "a".into(), r#"mounts[0].hostPath: "a" is not an absolute path"#)]
#[case::mount_source(|e: &mut ContainerEdits| e.mounts[1].host_path = String::new(), "mounts[1].hostPath: is empty")]
#[case::mount_container(|e: &mut ContainerEdits| e.mounts[1].container_path = "t".into(), r#"mounts[1].containerPath: "t" is not an absolute path"#)]
#[case::mount_option(|e: &mut ContainerEdits| e.mounts[0].options[0] = "ro,exec".into(), r#"mounts[0].options[0]: "ro,exec" is not one mount option"#)]
#[case::clos(|e: &mut ContainerEdits| e.intel_rdt.as_mut().unwrap().clos_id = Some("a/b".into()), r#"intelRdt.closID: "a/b" is not the name of a directory"#)]
#[case::net_twice(
    |e: &mut ContainerEdits| e.net_devices = ["x", "y"].map(|n| NetDevice { host_interface_name: "eth0".into(), name: n.into() }).into(),
    r#"netDevices[1].hostInterfaceName: "eth0" is in the list already"#
)]
#[case::net_empty(
    |e: &mut ContainerEdits| e.net_devices = vec![NetDevice { host_interface_name: "eth0".into(), name: String::new() }],
    "netDevices[0].name: is empty"
)]
fn a_broken_edit_is_named_by_its_field(#[case] change: Change, #[case] message: &str) {
    let mut edits = full_edits();
    change(&mut edits);
    // At a device, and at the spec itself.
    let spec = spec_with(edits.clone());
    assert_eq!(problems(&spec), [format!("devices[0].containerEdits.{message}")]);
    let mut spec = spec_with(full_edits());
    spec.container_edits = edits;
    spec.declare_lowest_version();
    assert_eq!(problems(&spec), [format!("containerEdits.{message}")]);
}

#[test]
fn all_problems_are_reported_at_once_in_the_order_of_the_file() {
    let mut spec = spec_with(ContainerEdits::default());
    spec.devices.push(spec.devices[0].clone());
    spec.annotations.insert("Bad Key".into(), String::new());
    spec.cdi_version = Version::V0_5;
    let found = problems(&spec);
    assert_eq!(found[0], "cdiVersion: 0.5.0 is too low: the spec uses fields of 0.6.0");
    assert!(found[1].starts_with(r#"annotations["Bad Key"]: "#), "{}", found[1]);
    assert_eq!(found[2], "devices[0].containerEdits: a device needs at least one edit");
    assert_eq!(found[3], r#"devices[1].name: "d" is in the spec already"#);
    assert_eq!(found[4], "devices[1].containerEdits: a device needs at least one edit");
    assert_eq!(found.len(), 5);
    assert_eq!(spec.validate().unwrap_err().to_string(), found.join("; "));
}

#[rstest]
#[case("key", true)]
#[case("aliquot.dev/claim-uid", true)]
#[case("", false)]
#[case("-key", false)]
#[case("key/", false)]
#[case("/key", false)]
#[case("a..b/key", false)]
#[case("A.dev/key", false)]
#[case("a/b/c", false)]
fn annotation_keys_follow_kubernetes(#[case] key: &str, #[case] valid: bool) {
    let mut spec = spec_with(full_edits());
    spec.devices[0].annotations.insert(key.to_owned(), "v".to_owned());
    spec.declare_lowest_version();
    assert_eq!(spec.validate().is_ok(), valid, "{:?}", problems(&spec));
}

#[test]
fn annotations_have_a_total_limit() {
    let mut spec = spec_with(full_edits());
    spec.annotations.insert("k".into(), "v".repeat(ANNOTATIONS_LIMIT - 1));
    assert!(spec.validate().is_ok());
    spec.annotations.insert("l".into(), String::new());
    assert_eq!(
        problems(&spec),
        [format!("annotations: {} bytes are more than 262144", ANNOTATIONS_LIMIT + 1)]
    );
}

type ChangeSpec = fn(&mut Spec);

#[rstest]
#[case::plain(|_: &mut Spec| (), Version::V0_5, Version::V1_1)]
#[case::digit_first(|s: &mut Spec| s.devices[0].name = "0".parse().unwrap(), Version::V0_5, Version::V1_1)]
#[case::spec_annotation(|s: &mut Spec| { s.annotations.insert("k".into(), "v".into()); }, Version::V0_6, Version::V1_1)]
#[case::device_annotation(|s: &mut Spec| { s.devices[0].annotations.insert("k".into(), "v".into()); }, Version::V0_6, Version::V1_1)]
#[case::dot_in_class(|s: &mut Spec| s.kind = "v/c.d".parse().unwrap(), Version::V0_6, Version::V1_1)]
#[case::gids(|s: &mut Spec| s.container_edits.additional_gids = vec![1], Version::V0_7, Version::V1_1)]
#[case::rdt(|s: &mut Spec| s.devices[0].container_edits.intel_rdt = Some(IntelRdt::default()), Version::V0_7, Version::V1_1)]
#[case::cmt(|s: &mut Spec| s.container_edits.intel_rdt = Some(IntelRdt { enable_cmt: Some(true), ..IntelRdt::default() }), Version::V0_7, Version::V1_0)]
#[case::mbm(|s: &mut Spec| s.container_edits.intel_rdt = Some(IntelRdt { enable_mbm: Some(true), ..IntelRdt::default() }), Version::V0_7, Version::V1_0)]
#[case::schemata(|s: &mut Spec| s.container_edits.intel_rdt = Some(IntelRdt { schemata: vec!["L3:0=f".into()], ..IntelRdt::default() }), Version::V1_1, Version::V1_1)]
#[case::monitoring(|s: &mut Spec| s.container_edits.intel_rdt = Some(IntelRdt { enable_monitoring: Some(true), ..IntelRdt::default() }), Version::V1_1, Version::V1_1)]
#[case::net(
    |s: &mut Spec| s.devices[0].container_edits.net_devices = vec![NetDevice { host_interface_name: "a".into(), name: "b".into() }],
    Version::V1_1,
    Version::V1_1
)]
fn the_lowest_sufficient_version_is_declared(
    #[case] change: ChangeSpec,
    #[case] lowest: Version,
    #[case] highest: Version,
) {
    let mut edits = ContainerEdits::default();
    edits.set_env("A", "1");
    let mut spec = spec_with(edits);
    change(&mut spec);
    spec.declare_lowest_version();
    assert_eq!(spec.cdi_version, lowest);
    assert_eq!(spec.version_range().highest, highest);
    for version in [Version::V0_5, Version::V0_6, Version::V0_7, Version::V0_8, Version::V1_0, Version::V1_1]
    {
        spec.cdi_version = version;
        assert_eq!(spec.validate().is_ok(), (lowest..=highest).contains(&version), "{version}");
    }
}

#[test]
fn fields_that_never_lived_together_are_refused_in_every_version() {
    let rdt = IntelRdt { enable_cmt: Some(true), enable_monitoring: Some(true), ..IntelRdt::default() };
    let edits = ContainerEdits { intel_rdt: Some(rdt), ..ContainerEdits::default() };
    let spec = spec_with(edits);
    assert_eq!(
        problems(&spec),
        ["cdiVersion: uses fields that came with 1.1.0 and others that went after 1.0.0"]
    );
}
