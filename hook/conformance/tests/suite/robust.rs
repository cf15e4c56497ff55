//! The limiter in the lives that processes lead: killed, forked, replaced, starved, misconfigured.
#![allow(unsafe_code, reason = "sends signals")]

use crate::support::namespace::{apart, unshare};
use crate::support::{Bench, GIB, Holder, MIB, Storm, answers, built, values};
use aliquot_quota::region::{RegionView, SlotState};
use aliquot_quota::{FailMode, REGION_FILE_SIZE};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

fn signal(pid: i32, signal: i32) {
    // SAFETY: sends a signal to a process that the test started and has not waited for.
    unsafe { libc::kill(pid, signal) };
}

fn bench(quota: u64) -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, quota);
    bench
}

#[test]
fn a_killed_process_leaves_nothing() {
    let bench = bench(GIB);
    for _ in 0..5 {
        bench.hold(&["init", "retain", "alloc:linear:600M", "alloc:async:200M", "alloc:mapped:100M"]).kill();
        assert_eq!(
            bench.run(&["init", "retain", "alloc:linear:1G", "info"])[2..],
            ["0", &format!("0 0 {GIB}")]
        );
    }
    // The last one is gone as well, and who needs its bytes has them.
    let last = bench.run(&["init", "retain", "alloc:linear:1G", "free", "info"]);
    assert_eq!(last[2..], ["0", "0", &format!("0 {GIB} {GIB}")]);
    assert_eq!(bench.charged("a"), (0, 0));
}

#[test]
fn a_stopped_process_keeps_what_it_holds_and_holds_up_nobody() {
    let bench = bench(GIB);
    let stopped = bench.hold(&["init", "retain", "alloc:linear:600M"]);
    signal(stopped.child.id() as i32, libc::SIGSTOP);
    let answers = bench.run(&["init", "retain", "alloc:linear:500M", "alloc:linear:400M", "info"]);
    assert_eq!(answers[2..], ["2", "0", &format!("0 {} {GIB}", 24 * MIB)]);
    signal(stopped.child.id() as i32, libc::SIGCONT);
    stopped.finish();
}

#[test]
fn bytes_come_back_after_two_seconds_where_nvml_cannot_tell() {
    let spec = aliquot_sim_node::NodeSpec {
        process_view: aliquot_sim_node::ProcessView::Empty,
        reap_delay_ms: 500,
        ..aliquot_sim_node::NodeSpec::new(["H100-80"])
    };
    let bench = Bench::with(spec);
    bench.share("a", 0, 4 * GIB);
    bench.hold(&["init", "retain", "alloc:linear:3G"]).kill();
    // Refused at first, but the memory is known to come back, so the call waits for it.
    let answers = bench.run(&["init", "retain", "alloc:linear:3G", "alloc:linear:3G"]);
    assert_eq!(answers[2..], ["0", "2"]);
}

#[test]
fn storms_of_killed_processes_leave_no_leak_and_never_exceed_the_quota() {
    let bench = bench(256 * MIB);
    let mut storm = Storm(Vec::new());
    for round in 0..40_u64 {
        while storm.0.len() < 6 {
            let mut churn = bench.probe(&["init", "retain", "churn:100000"]);
            churn.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
            storm.0.push(churn.spawn().unwrap());
        }
        std::thread::sleep(Duration::from_millis(20 + round * 7 % 50));
        let used = bench.used(0);
        assert!(used <= 256 * MIB, "{used} bytes used");
        let mut victim = storm.0.swap_remove((round * 5 % 6) as usize);
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
    drop(storm);
    let answers = bench.run(&["init", "retain", "alloc:linear:256M", "info", "free"]);
    assert_eq!(answers[2..], ["0", &format!("0 0 {}", 256 * MIB), "0"]);
    assert_eq!(bench.charged("a"), (0, 0));
    assert_eq!(bench.audit("a"), 0);
}

#[test]
fn a_forked_child_starts_on_its_own() {
    let bench = bench(GIB);
    // Forked before CUDA: parent and child are two processes of the claim.
    let mut before = bench.probe(&["nvml", "fork", "init", "retain", "alloc:linear:1G", "info", "free"]);
    let output = before.output().unwrap();
    let answers = values(&output);
    assert_eq!(answers[1..], ["child", "0", "0", "0", &format!("0 0 {GIB}"), "0", "parent 0"], "{output:?}");
    assert_eq!(bench.charged("a").0, 0);
    // Forked after CUDA: the driver refuses the child, and the child releases nothing of the parent's.
    let after = ["init", "retain", "alloc:linear:600M", "fork", "alloc:linear:600M", "info"];
    let answers = bench.run(&after);
    assert_eq!(answers[3], "child");
    assert_ne!(answers[4], "0");
    let holder = bench.hold(&["init", "retain", "alloc:linear:600M", "worker"]);
    let worker: i32 = holder.before[3].parse().unwrap();
    assert_eq!(bench.charged("a"), (600 * MIB, 600 * MIB));
    holder.kill();
    // The worker lives on, and does not keep its dead parent's bytes.
    assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"])[2], "0");
    signal(worker, libc::SIGKILL);
}

#[test]
fn a_process_that_closes_all_descriptors_keeps_its_slot() {
    let bench = bench(GIB);
    let holder = bench.hold(&["init", "retain", "alloc:linear:600M", "closefrom"]);
    let answers = bench.run(&["init", "retain", "info"]);
    assert_eq!(answers[2], format!("0 {} {GIB}", 424 * MIB));
    assert_eq!(bench.charged("a"), (600 * MIB, 600 * MIB));
    holder.kill();
}

#[test]
fn a_slot_that_was_taken_away_is_taken_anew_with_all_its_bytes() {
    let bench = bench(GIB);
    let mut program =
        bench.probe(&["init", "retain", "alloc:linear:600M", "hold", "alloc:linear:100M", "info", "freeall"]);
    let holder = Holder::start(&mut program);
    // Somebody takes the owner for dead: the slot is emptied under it.
    let path = bench.region_path("a");
    let mut bytes = std::fs::read(&path).unwrap();
    let slot = RegionView::parse(&bytes).unwrap().processes().next().unwrap().slot;
    let base = 4096 + slot * 256;
    let put =
        |bytes: &mut Vec<u8>, at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    let generation = u64::from_le_bytes(bytes[base + 40..base + 48].try_into().unwrap()) >> 8;
    put(&mut bytes, base + 40, SlotState::Free.word(generation));
    put(&mut bytes, base, 0);
    put(&mut bytes, base + 16, 0);
    put(&mut bytes, 64, 0);
    // Written in place: the file is mapped.
    use std::os::unix::fs::FileExt;
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&bytes, 0).unwrap();
    assert_eq!(bench.charged("a").0, 0);
    assert_eq!(holder.finish(), ["0", &format!("0 {} {GIB}", 324 * MIB), "0"]);
    assert_eq!(bench.charged("a").0, 0);
}

#[test]
fn small_stacks_are_enough() {
    let bench = bench(GIB);
    let answers = bench.run(&["init", "retain", "alloc:linear:1M", "stack:16"]);
    assert_eq!(answers[3], "0");
}

fn nothing(program: &mut Command) -> &mut Command {
    program
}

/// Runs `cuInit` where the limiter cannot work, and checks that CUDA is refused with this reason.
fn refused(bench: &Bench, change: impl Fn(&mut Command) -> &mut Command, reason: &str) {
    for resolve in ["dlsym", "resolver"] {
        let mut program =
            bench.probe(&["init", "call:cuCtxSynchronize", "call:cuMemGetInfo_v2", "alloc:linear:1M"]);
        program.args(["call:nvmlDeviceGetMemoryInfo"]).env("PROBE_RESOLVE", resolve);
        change(&mut program);
        let output = program.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(values(&output), ["802", "802", "802", "802", "27"], "{reason} by {resolve}");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            text.contains(reason) && text.starts_with("aliquot: CUDA is refused: "),
            "{text} has {reason}"
        );
        assert_eq!(text.lines().count(), 1, "one message: {text}");
    }
}

#[test]
fn cuda_is_refused_where_the_limiter_cannot_work() {
    let bench = bench(GIB);
    let good = std::fs::read(bench.root().join("quota/a/quota")).unwrap();
    let nowhere = bench.copy_limiter(&built().limiter, Path::new("/nowhere"), "nowhere");
    refused(&bench, |program| program.env("LD_PRELOAD", &nowhere), "/nowhere/quota does not exist");
    let file = bench.folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let file = bench.copy_limiter(&built().limiter, &file, "on-a-file");
    refused(&bench, |program| program.env("LD_PRELOAD", &file), "/quota cannot be opened");
    refused(
        &bench,
        |p| p.env("CUDA_DEVICE_MEMORY_LIMIT", "lots"),
        "CUDA_DEVICE_MEMORY_LIMIT=lots is no number",
    );
    refused(&bench, |p| p.env("CUDA_DEVICE_MEMORY_LIMIT_0", "99999999999g"), "is no number of bytes");
    refused(&bench, |p| p.env("CUDA_DEVICE_MEMORY_LIMIT_7", "1g"), "names no device of the claim");
    let mut changed = good.clone();
    changed[130] ^= 1;
    bench.write_quota_bytes("a", &changed);
    refused(&bench, nothing, "its checksum does not match");
    bench.write_quota_bytes("a", &good[..200]);
    refused(&bench, nothing, "200 bytes instead of 256");
    std::fs::remove_file(bench.root().join("quota/a/quota")).unwrap();
    refused(&bench, nothing, "quota cannot be opened");
    std::fs::remove_dir_all(bench.root().join("quota/a")).unwrap();
    refused(&bench, nothing, "holds no quota");
}

/// As [`refused`], where it is found out only after the driver has been initialised.
fn refused_by_init(bench: &Bench, change: impl Fn(&mut Command) -> &mut Command, reason: &str) {
    let mut program = bench.probe(&["init", "init", "alloc:linear:1M", "info"]);
    change(&mut program);
    let output = program.output().unwrap();
    assert_eq!(values(&output), ["802", "802", "802", "802 0 0"], "{reason}");
    assert!(String::from_utf8_lossy(&output.stderr).contains(reason), "{output:?} has {reason}");
}

#[test]
fn cuda_is_refused_where_the_region_cannot_be_used() {
    let bench = bench(GIB);
    let path = bench.region_path("a");
    let good = std::fs::read(&path).unwrap();
    std::fs::write(&path, &good[..REGION_FILE_SIZE - 1]).unwrap();
    refused_by_init(&bench, nothing, "instead of");
    let mut changed = good.clone();
    changed[8] = 9;
    std::fs::write(&path, &changed).unwrap();
    refused_by_init(&bench, nothing, "unknown layout version 9");
    std::fs::remove_file(&path).unwrap();
    refused_by_init(&bench, nothing, "cannot be opened");
    std::fs::write(&path, &good).unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("control"), "").unwrap();
    refused_by_init(&bench, |p| p.env("CUDA_MPS_PIPE_DIRECTORY", folder.path()), "MPS");
}

#[test]
fn no_variable_has_the_shipped_limiter_look_elsewhere_for_its_quota() {
    let bench = bench(GIB);
    let shipped = built().limiter.join("libaliquot_preload.so");
    for variable in ["ALIQUOT_ROOT", "ALIQUOT_QUOTA", "ALIQUOT_REGION", "ALIQUOT_SIM_ROOT", "aliquot-root"] {
        let with = |program: &mut Command| {
            program.env("LD_PRELOAD", &shipped).env(variable, bench.root()).args(["call:cuInit"]);
        };
        let mut program = bench.probe(&["init"]);
        with(&mut program);
        let output = program.output().unwrap();
        assert_eq!(values(&output)[0], "802", "{variable}");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("/run/aliquot/quota does not exist"), "{variable}: {text}");
    }
}

#[test]
fn the_shipped_core_names_the_folder_that_containers_have_and_no_other() {
    let bytes = std::fs::read(built().limiter.join("libaliquot_core.so")).unwrap();
    let mark = b"aliquot-root=";
    let named: Vec<&[u8]> = bytes
        .windows(mark.len())
        .enumerate()
        .filter(|(_, window)| window == mark)
        .map(|(at, _)| bytes[at + mark.len()..].split(|b| *b == 0).next().unwrap())
        .collect();
    assert_eq!(named, [b"/run/aliquot"]);
}

#[test]
fn a_device_class_may_let_programs_run_without_limits() {
    let bench = bench(GIB);
    let mut quota = bench.quota("a");
    quota.fail_mode = FailMode::Open;
    bench.write_quota("a", &quota);
    std::fs::remove_file(bench.region_path("a")).unwrap();
    let mut program = bench.probe(&["init", "retain", "alloc:linear:2G"]);
    let output = program.output().unwrap();
    assert_eq!(values(&output), ["0", "0", "0"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("running without limits"), "{output:?}");
}

#[test]
fn a_region_that_cannot_be_refuses_memory_and_lifts_no_limit() {
    let bench = bench(GIB);
    let path = bench.region_path("a");
    let mut bytes = std::fs::read(&path).unwrap();
    // The last operation is by a slot that does not exist.
    bytes[78..80].copy_from_slice(&u16::MAX.to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(bench.run(&["init", "retain", "alloc:linear:2M", "alloc:vmm:2M"])[2..], ["2", "2"]);
    assert_ne!(bench.audit("a") & aliquot_quota::region::audit::CORRUPT, 0);
    // A total out of this world.
    bytes[78..80].copy_from_slice(&[0, 0]);
    bytes[64..72].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(bench.run(&["init", "retain", "alloc:linear:2M", "info"])[2..], ["2", &format!("0 0 {GIB}")]);
}

#[test]
fn without_a_core_cuda_is_refused() {
    let bench = bench(GIB);
    let folder = tempfile::tempdir().unwrap();
    let stub = folder.path().join("libaliquot_preload.so");
    std::fs::copy(built().limiter.join("libaliquot_preload.so"), &stub).unwrap();
    refused(&bench, |program| program.env("LD_PRELOAD", &stub), "libaliquot_core.so");
    std::fs::copy(built().driver.join("libcuda.so.1"), folder.path().join("libaliquot_core.so")).unwrap();
    refused(&bench, |program| program.env("LD_PRELOAD", &stub), "has no start function");
}

#[test]
fn a_closed_stderr_harms_nobody() {
    let bench = bench(GIB);
    let mut shell = bench.command(Path::new("/bin/sh"));
    shell.arg("-c").arg("exec \"$0\" init retain alloc:linear:2G 2>&-").arg(&built().probe);
    assert_eq!(answers(shell), ["0", "0", "2"]);
    let mut shell = bench.command(Path::new("/bin/sh"));
    shell.arg("-c").arg("exec \"$0\" init 2>&-").arg(&built().probe).env("CUDA_DEVICE_MEMORY_LIMIT", "x");
    assert_eq!(answers(shell), ["802"]);
}

#[test]
fn a_region_full_of_dead_processes_has_room() {
    let bench = bench(GIB);
    let path = bench.region_path("a");
    let mut bytes = std::fs::read(&path).unwrap();
    for slot in 0..aliquot_quota::region::SLOT_COUNT {
        let at = 4096 + slot * 256 + 40;
        bytes[at..at + 8].copy_from_slice(&SlotState::Live.word(1).to_le_bytes());
    }
    std::fs::write(&path, &bytes).unwrap();
    // They are all dead, and the first one who finds no place looks for that.
    assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"]), ["0", "0", "0"]);
}

#[test]
fn a_program_that_becomes_another_leaves_its_bytes() {
    let bench = bench(GIB);
    let script = ["init", "retain", "alloc:linear:600M", "exec", "init", "retain", "alloc:linear:1G", "info"];
    assert_eq!(bench.run(&script)[3..], ["0", "0", "0", &format!("0 0 {GIB}")]);
    let script = ["init", "retain", "alloc:linear:600M", "spawn", "info", "free"];
    assert_eq!(bench.run(&script)[3..], ["0", &format!("0 {} {GIB}", 424 * MIB), "0"]);
}

#[test]
fn two_pid_namespaces_share_one_region() {
    let Some(options) = unshare(&["-p", "-f", "--kill-child", "-m", "--mount-proc"]) else {
        eprintln!("skipped: no pid namespace can be made");
        return;
    };
    // NVML shows pids of the node, so contexts cannot be measured and count as large as is assumed.
    let context = 528 * MIB;
    let bench = bench(8 * GIB).driver("");
    // All are pid 1 in their namespaces.
    let first =
        Holder::start(apart(&bench, &options, "", &["init", "retain", "alloc:linear:4G"]).arg("hold"));
    let second = apart(&bench, &options, "", &["init", "retain", "alloc:linear:4G", "info"]);
    assert_eq!(
        answers(second)[2..],
        ["2", &format!("0 {} {}", 4 * GIB - 2 * context, 8 * GIB)],
        "the first one lives"
    );
    first.kill();
    let third = apart(&bench, &options, "", &["init", "retain", "alloc:linear:7G"]);
    assert_eq!(answers(third)[2], "0", "and is gone");
}

#[test]
fn proc_is_not_needed() {
    let Some(options) = unshare(&["-m"]) else {
        eprintln!("skipped: no mount namespace can be made");
        return;
    };
    // Without it nobody knows which process NVML means, so a context counts as large as is assumed.
    let bench = bench(4 * GIB).driver("");
    let script = ["init", "retain", "alloc:linear:4G", "alloc:linear:3G", "free"];
    let program = apart(&bench, &options, "mount -t tmpfs none /proc &&", &script);
    assert_eq!(answers(program), ["0", "0", "2", "0", "0"]);
}
