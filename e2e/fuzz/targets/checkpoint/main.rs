//! The node agent's checkpoint: reading ends, and what is read is written as what is read to be the same; records that
//! are not understood to the byte.
#![no_main]
#![allow(dead_code, unused_imports, reason = "of the agent's modules only a part is used")]

// The agent as a dependency would be a few hundred crates to instrument.
#[path = "../../../../kubelet-plugin/src/checkpoint.rs"]
mod checkpoint;
mod claim;
#[path = "../../../../kubelet-plugin/src/ledger.rs"]
mod ledger;
mod plan;

use aliquot_fuzz::seeds;
use checkpoint::{CheckpointError, VERSION, decode, encode};
use ledger::Ledger;
use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};

/// A file with this content, as a release with this version of the format writes it.
fn file(content: &[u8], version: u32) -> Vec<u8> {
    let sum: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    let length = content.len();
    let header = format!(
        r#"{{"format":"aliquot-checkpoint","version":{version},"sequence":7,"bytes":{length},"sha256":"{sum}"}}"#
    );
    [header.as_bytes(), b"\n", content].concat()
}

fn written(ledger: &Ledger, sequence: u64) -> Vec<u8> {
    encode(ledger, sequence).and_then(|content| content.file()).expect("a ledger serialises")
}

fn check(bytes: &[u8]) {
    let (ledger, sequence) = match decode(bytes) {
        Ok(read) => read,
        Err(CheckpointError::Newer { found, .. }) => return assert!(found > VERSION),
        Err(_) => return,
    };
    for (uid, record) in &ledger.newer {
        assert_eq!((&record.claim.uid, record.why().is_empty()), (uid, false));
        let _ = (record.answerable("boot"), record.undoable(), record.keys());
    }
    for (holder, device) in ledger.held() {
        assert!(ledger.has(&holder.claim.uid));
        assert!(ledger.others("nobody", &device.gpu).any(|(_, other)| other == device));
    }
    let again = written(&ledger, sequence);
    let (read, number) = decode(&again).expect("what was written is read");
    assert_eq!(number, sequence);
    assert_eq!(read.newer, ledger.newer, "to the byte");
    assert_eq!(
        (&read.claims, &read.bindings, &read.releases, &read.lost, &read.beside.parts),
        (&ledger.claims, &ledger.bindings, &ledger.releases, &ledger.lost, &ledger.beside.parts)
    );
    assert_eq!(written(&read, sequence), again, "it comes to rest");
}

fn files() -> Vec<Vec<u8>> {
    let before = include_bytes!("../../../../kubelet-plugin/tests/data/checkpoint-25299bf.json");
    let at = before.iter().position(|byte| *byte == b'\n').expect("a header");
    let content = &before[at + 1..];
    let text = String::from_utf8(content.to_vec()).expect("text");
    let changed = |from: &str, to: &str| text.trim_end().replacen(from, to, 1).into_bytes();
    let mut seeds = vec![
        before.to_vec(),
        content.to_vec(),
        changed("\"Completed\"", "\"Suspended\""),
        changed("\"step\": \"writeSpec\"", "\"step\": \"startDaemon\", \"gpu\": \"GPU-1\""),
        changed("\"claims\"", "\"lost\": {\"reason\": \"r\", \"running\": {}}, \"release\": \"9\", \"x\": 1e3, \"claims\""),
        changed("\"since\"", "\"format\": 2, \"since\""),
    ];
    // One short record: easier to mutate than all of them.
    seeds.push(br#"{"claims":{"u":{"claim":{"namespace":"n","name":"c","uid":"u"},"state":"Completed","bootId":"b","since":1,"devices":[{"resultId":"u-1","request":"r","pool":"p","device":"gpu-0","gpu":"GPU-1","held":"whole","x":[1]}],"steps":[{"step":"writeSpec"}]}},"bindings":{"0":{"gpu":"GPU-1"}}}"#.to_vec());
    seeds
}

// A file, or the content of one: the checksum is not for the fuzzer to find.
fuzz_target!(init: seeds(files), |bytes: &[u8]| {
    check(bytes);
    for version in [VERSION, VERSION + 1] {
        check(&file(bytes, version));
    }
});
