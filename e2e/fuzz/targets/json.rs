//! The OCI hook's JSON reader against serde_json: both refuse a document or both read it, and both find the same string.
#![no_main]

use aliquot_fuzz::seeds;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

#[path = "../../../hook/oci/src/json.rs"]
mod json;

/// How deep a document is nested at the most, in brackets.
fn depth(text: &str) -> usize {
    let (mut depth, mut most) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        most = most.max(depth);
    }
    most
}

fn documents() -> Vec<Vec<u8>> {
    [
        r#"{"ociVersion":"1.2.0","id":"x","status":"creating","pid":12,"bundle":"/run/b","annotations":{"a":"b"}}"#,
        r#"{"ociVersion":"1.2.0","process":{"args":["sh"],"cwd":"/","noNewPrivileges":true},"root":{"path":"rootfs","readonly":false},"mounts":[],"n":-1.5e+3}"#,
        r#"{"root":{"path":"r\u00f6\n\ud83d\ude00/x"},"a":[null,true,[],{}],"bundle":"/\\\/\b\f\t"}"#,
        r#""text""#,
        "[0, 1e9, -0.5]",
    ]
    .iter()
    .map(|text| text.as_bytes().to_vec())
    .collect()
}

fuzz_target!(init: seeds(documents), |bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    // Each has a limit of its own to how deep documents may be, far above what the hook reads.
    if depth(text) > 100 {
        let _ = json::string_at(text, &["bundle"]);
        return;
    }
    let theirs = serde_json::from_str::<Value>(text);
    for path in [&["bundle"][..], &["root", "path"], &[]] {
        // Nothing reads lists but what is asked for, so it is only to end.
        let _ = json::numbers_at(text, path);
        let ours = json::string_at(text, path);
        let found = theirs.as_ref().ok().map(|value| {
            let at = path.iter().try_fold(value, |value, key| value.as_object()?.get(*key));
            at.and_then(Value::as_str).map(str::to_owned)
        });
        assert_eq!(ours.ok(), found, "{path:?} of {text:?}; serde_json: {theirs:?}");
    }
});
