//! The limiter for aarch64 under an emulator: what is written for each processor apart (jumps, 128-bit exchange,
//! system calls, thread pointer) does what it does on x86-64. Skipped where no compiler or emulator is installed.

use crate::support::{Bench, GIB, Holder, MIB, answers, arm, values};

fn bench(quota: u64) -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, quota);
    bench
}

#[test]
fn memory_is_limited_and_the_tenant_sees_its_own_part() {
    let Some(arm) = arm::everything() else { return };
    let bench = bench(GIB);
    for resolve in ["dlsym", "dlvsym", "default", "resolver"] {
        let script = ["init", "retain", "alloc:linear:600M", "alloc:linear:600M", "alloc:vmm:200M", "info"];
        let script =
            [&script[..], &["alloc:async:100M", "alloc:array:4M", "freeall", "info", "nvml"]].concat();
        let mut program = arm::emulated(&arm, &bench, &script);
        let seen = answers_of(program.env("PROBE_RESOLVE", resolve));
        assert_eq!(seen[..5], ["0", "0", "0", "2", "0"], "{resolve}");
        assert_eq!(seen[5], format!("0 {} {GIB}", 224 * MIB));
        assert_eq!(seen[6..9], ["0"; 3]);
        assert_eq!(seen[10], format!("0 {GIB} {GIB} 0"));
    }
    assert_eq!(bench.charged("a"), (0, 0));
    assert_eq!(bench.audit("a"), 0);
}

fn answers_of(program: &mut std::process::Command) -> Vec<String> {
    let output = program.output().expect("runs");
    assert!(output.status.success(), "{program:?}: {output:?}");
    values(&output)
}

#[test]
fn processes_of_both_machines_share_one_region() {
    let Some(arm) = arm::everything() else { return };
    let bench = bench(GIB);
    let mut held = arm::emulated(&arm, &bench, &["init", "retain", "alloc:linear:600M", "hold"]);
    let holder = Holder::start(&mut held);
    assert_eq!(bench.run(&["init", "retain", "alloc:linear:600M", "alloc:linear:400M"])[2..], ["2", "0"]);
    holder.kill();
    assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"])[2], "0", "its bytes come back");
    let after = arm::emulated(&arm, &bench, &["init", "retain", "alloc:linear:1G", "info"]);
    assert_eq!(answers(after)[2..], ["0", &format!("0 0 {GIB}")], "whoever takes them back");
}

#[test]
fn cuda_is_refused_where_the_limiter_cannot_work() {
    let Some(arm) = arm::everything() else { return };
    let bench = bench(GIB);
    std::fs::remove_file(bench.root().join("quota/a/quota")).unwrap();
    let mut program = arm::emulated(&arm, &bench, &["init", "alloc:linear:1M"]);
    let output = program.output().unwrap();
    assert_eq!(values(&output), ["802", "802"], "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("quota cannot be opened"), "{output:?}");
}
