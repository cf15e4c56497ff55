//! Node agent and limiter of different releases on one node: what one has written the other one understands, or CUDA is
//! refused with a message that names both versions.

use crate::support::{Bench, GIB, values};
use aliquot_quota::{QUOTA_LAYOUT_VERSION, REGION_FILE_SIZE, REGION_LAYOUT_VERSION};
use std::io::Read;

fn bench() -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    bench
}

/// A file of a layout with another version: its size, and nothing but its first words, is like one that we know.
fn of_version(known: &[u8], version: u32, size: usize) -> Vec<u8> {
    let mut bytes = vec![0x5a; size];
    bytes[..8].copy_from_slice(&known[..8]);
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// No call goes through, and both versions are told.
fn refused(bench: &Bench, found: u32, known: u32, what: &str) {
    let output = bench.probe(&["init", "alloc:linear:1M", "info"]).output().unwrap();
    assert_eq!(values(&output), ["802", "802", "802 0 0"], "{what}");
    let text = String::from_utf8_lossy(&output.stderr);
    for part in [&*format!("version {found}"), &format!("version {known}"), "different releases"] {
        assert!(text.contains(part), "{what}: {text} has {part}");
    }
}

#[test]
fn a_quota_of_another_release_is_refused_by_its_version() {
    let bench = bench();
    let known = bench.quota("a").encode();
    for version in [QUOTA_LAYOUT_VERSION - 1, QUOTA_LAYOUT_VERSION + 1] {
        for size in [128, known.len(), 4096] {
            bench.write_quota_bytes("a", &of_version(&known, version, size));
            refused(&bench, version, QUOTA_LAYOUT_VERSION, &format!("quota {version} of {size} bytes"));
        }
    }
    bench.write_quota_bytes("a", &known);
    assert_eq!(bench.run(&["init", "retain", "alloc:linear:1M"]), ["0"; 3]);
}

#[test]
fn a_region_of_another_release_is_refused_by_its_version() {
    let bench = bench();
    let path = bench.region_path("a");
    let known = std::fs::read(&path).unwrap();
    for version in [REGION_LAYOUT_VERSION - 1, REGION_LAYOUT_VERSION + 1] {
        for size in [4096, REGION_FILE_SIZE, REGION_FILE_SIZE + 4096] {
            std::fs::write(&path, of_version(&known, version, size)).unwrap();
            refused(&bench, version, REGION_LAYOUT_VERSION, &format!("region {version} of {size} bytes"));
        }
    }
    std::fs::write(&path, known).unwrap();
    assert_eq!(bench.run(&["init", "retain", "alloc:linear:1M"]), ["0"; 3]);
}

#[test]
fn a_running_program_keeps_its_limits_when_a_newer_node_agent_writes_its_quota() {
    let bench = bench();
    let script = ["init", "retain", "hold", "sleep:700", "alloc:linear:600M", "alloc:linear:600M"];
    let mut holder = crate::support::Holder::start(&mut bench.probe(&script));
    let known = bench.quota("a").encode();
    bench.write_quota_bytes("a", &of_version(&known, QUOTA_LAYOUT_VERSION + 1, known.len()));
    let mut stderr = holder.child.stderr.take().unwrap();
    assert_eq!(holder.finish(), ["0", "0", "2"], "1 GiB as before");
    let mut text = String::new();
    stderr.read_to_string(&mut text).unwrap();
    assert!(text.contains("the limits stay as they were"), "{text}");
    assert!(text.contains(&format!("version {}", QUOTA_LAYOUT_VERSION + 1)), "{text}");
}
