//! What a tenant can write: region, environment. Whatever stands there, no limit is lifted and nothing crashes or hangs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use support::{Bench, MIB, values};

fn bench(quota: u64) -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, quota);
    bench
}

#[test]
fn whatever_stands_in_the_region_no_limit_is_lifted_and_nobody_crashes() {
    use std::os::unix::fs::FileExt;
    let bench = bench(64 * MIB);
    let path = bench.region_path("a");
    let sound = std::fs::read(&path).unwrap();
    let mut seed = 0x1234_5678_9abc_def1_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for round in 0..60 {
        let mut bytes = sound.clone();
        // Words of the ledger and of the first slots, behind the constants that are checked at the start.
        for _ in 0..1 + random() % 6 {
            let at =
                if random() % 3 == 0 { 64 + random() % 128 } else { 4096 + random() % 1024 } as usize & !7;
            let value =
                [random(), random() % 100, u64::MAX, 1 << 63, ((random() % 5) << 48) | (random() % 4)]
                    [(random() % 5) as usize];
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        // In place, as a tenant could do it under running programs.
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&bytes, 0).unwrap();
        let mut program = bench.probe(&["init", "retain", "fill:linear:6M", "info", "freeall", "churn:50"]);
        let output = program.output().unwrap();
        assert!(output.status.success(), "round {round}: {output:?}");
        let answers = values(&output);
        if answers[0] != "802" {
            let count: u64 = answers[2].split(' ').next().unwrap().parse().unwrap();
            assert!(count * 6 <= 64, "round {round}: {answers:?}");
        }
    }
}
