//! CDI specs: reading ends, and what is read and valid is written as what is read to be the same.
#![no_main]

use aliquot_cdi::{ContainerEdits, Device, DeviceNode, Kind, Mount, QualifiedName, Spec, resolve};
use aliquot_fuzz::seeds;
use libfuzzer_sys::fuzz_target;

fn specs() -> Vec<Vec<u8>> {
    let kind = Kind::new("gpu.aliquot.dev", "device").expect("a kind");
    let mut edits = ContainerEdits::default();
    edits.set_env("NAME", "value=1");
    edits.device_nodes.push(DeviceNode::at("/dev/nvidia0"));
    edits.mounts.push(Mount::read_only("/opt/a", "/usr/lib/a"));
    let device = |name: &str| Device::new(name.parse().expect("a name"), edits.clone());
    let spec = Spec::new(kind, vec![device("a"), device("b-1")]);
    vec![
        serde_json::to_vec(&spec).expect("JSON"),
        br#"{"cdiVersion":"1.1.0","kind":"a.b/c","devices":[{"name":"d","containerEdits":{"hooks":[{"hookName":"createContainer","path":"/x","args":["y"],"env":["A=b"],"timeout":5}],"intelRdt":{"closID":"z"},"additionalGids":[1]}}],"annotations":{"a":"b"}}"#.to_vec(),
    ]
}

fuzz_target!(init: seeds(specs), |bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(name) = text.parse::<QualifiedName>()
    {
        assert_eq!(name.to_string().parse(), Ok(name));
    }
    let Ok(spec) = serde_json::from_slice::<Spec>(bytes) else { return };
    let range = spec.version_range();
    let is_valid = spec.validate().is_ok();
    let written = serde_json::to_vec(&spec).expect("JSON");
    let again: Spec = serde_json::from_slice(&written).expect("what was written is read");
    assert_eq!(again, spec);
    assert_eq!(again.validate().is_ok(), is_valid);
    assert_eq!(again.version_range().lowest, range.lowest);
    if is_valid {
        for device in &spec.devices {
            let name = spec.kind.device(device.name.clone());
            resolve(std::slice::from_ref(&spec), [&name]).expect("a device of the spec");
        }
    }
});
