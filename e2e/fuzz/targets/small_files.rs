//! Quota, grant and measured page: whatever the bytes are, decoding ends, and what decodes encodes to the same.
#![no_main]

use aliquot_fuzz::{seeds, summed};
use aliquot_quota::grant::Grant;
use aliquot_quota::measured::{self, MOST_MEASURED, MOST_SIZE, Measured, Process};
use aliquot_quota::{ComputePolicy, FailMode, GpuUuid, QuotaFile};
use libfuzzer_sys::fuzz_target;

fn check(bytes: &[u8]) {
    if let Ok(quota) = QuotaFile::decode(bytes) {
        assert_eq!(quota.encode(), bytes, "a quota is what its encoder writes");
        assert!(quota.cores_percent <= 100);
    }
    if let Some(grant) = Grant::decode(bytes) {
        assert!(grant.borrow_percent <= 100 && grant.own_permille <= 1000);
        assert_eq!(Grant::decode(&grant.encode()), Some(grant));
    }
    if let Some(found) = Measured::decode(bytes) {
        let all: Vec<Process> = found.processes().collect();
        assert!(all.len() <= MOST_MEASURED);
        let mut again = [0; MOST_SIZE];
        let size = measured::encode(found.taken_ns, found.valid_until_ns, &all, &mut again);
        assert_eq!(&again[..size], bytes, "a page is what its encoder writes");
        let _ = found.is_fresh(found.taken_ns);
    }
}

fn files() -> Vec<Vec<u8>> {
    let uuid = GpuUuid::new("GPU-4e3f2d1c-0b0a-5968-8776-655443322110").expect("a UUID");
    let plain = QuotaFile::new(uuid);
    let full = QuotaFile {
        memory_bytes: 8 << 30,
        oversubscribe_bytes: 1 << 30,
        cores_percent: 30,
        compute_policy: ComputePolicy::Soft,
        fail_mode: FailMode::Open,
        priority: -3,
        ..plain
    };
    let grant = Grant { valid_until_ns: 1 << 40, borrow_percent: 30, true_up_ns: -5, ..Grant::default() };
    let mut files = vec![plain.encode().to_vec(), full.encode().to_vec(), grant.encode().to_vec()];
    for count in [0, 1, 3] {
        let mut page = [0; MOST_SIZE];
        let all = [Process { bytes: 1 << 30, ..Process::default() }; 3];
        let size = measured::encode(1 << 40, 1 << 41, &all[..count], &mut page);
        files.push(page[..size].to_vec());
    }
    files
}

fuzz_target!(init: seeds(files), |bytes: &[u8]| {
    check(bytes);
    if let Some(summed) = summed(bytes) {
        check(&summed);
    }
});
