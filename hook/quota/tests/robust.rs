//! The limiter in the lives that processes lead: killed, forked, replaced, starved, misconfigured.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![allow(unsafe_code, reason = "sends signals")]

mod support;

use aliquot_quota::region::{RegionView, SlotState};
use aliquot_quota::{FailMode, REGION_FILE_SIZE};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use support::{Bench, GIB, Holder, MIB, answers, built, values};

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
    // The last one is gone as well, and the next look finds it.
    assert_eq!(bench.run(&["init", "retain", "info"])[2], format!("0 {GIB} {GIB}"));
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
    let mut children = Vec::new();
    for round in 0..40_u64 {
        while children.len() < 6 {
            let mut churn = bench.probe(&["init", "retain", "churn:100000"]);
            churn.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
            children.push(churn.spawn().unwrap());
        }
        std::thread::sleep(Duration::from_millis(20 + round * 7 % 50));
        let used = bench.used(0);
        assert!(used <= 256 * MIB, "{used} bytes used");
        let mut victim = children.swap_remove((round * 5 % 6) as usize);
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
    for mut child in children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
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

#[test]
fn programs_without_cuda_notice_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let plain = Command::new("/bin/sh").args(["-c", "echo out; echo err >&2; exit 3"]).output().unwrap();
    let mut limited = Command::new("/bin/sh");
    limited.args(["-c", "echo out; echo err >&2; exit 3"]).current_dir(folder.path());
    // No quota, no region, no driver: it does not matter.
    limited.env("LD_PRELOAD", built().limiter.join("libaliquot_preload.so")).env("ALIQUOT_ROOT", "/nowhere");
    assert_eq!(limited.output().unwrap(), plain);
}

#[test]
fn names_are_not_found_where_no_driver_is_loaded() {
    // A program that looks whether CUDA is there, without loading it.
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("look.c");
    let program = folder.path().join("look");
    std::fs::write(
        &source,
        r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        int main(void) {
            void *self = dlopen(0, RTLD_NOW);
            void *found[] = { dlsym(RTLD_DEFAULT, "cuInit"), dlsym(RTLD_NEXT, "cuInit"), dlsym(self, "cuInit"),
                dlsym(RTLD_DEFAULT, "nvmlDeviceGetMemoryInfo"), dlvsym(RTLD_DEFAULT, "cuMemAlloc_v2", "GLIBC_2.2.5") };
            const char *error = dlerror();
            printf("%d %d %d %d %d %d\n", !!found[0], !!found[1], !!found[2], !!found[3], !!found[4], !!error);
            printf("%d\n", dlsym(RTLD_DEFAULT, "printf") == (void *)printf);
            return 0;
        }"#,
    )
    .unwrap();
    compile(&source, &program, &["-ldl"]);
    let mut command = Command::new(&program);
    command.env("LD_PRELOAD", built().limiter.join("libaliquot_preload.so"));
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 0 0 0 0 1\n1\n");
    assert!(output.stderr.is_empty(), "{output:?}");
}

fn compile(source: &Path, program: &Path, arguments: &[&str]) {
    let status = Command::new("cc").arg("-o").arg(program).arg(source).args(arguments).status();
    assert!(status.expect("a C compiler, which rustc links with as well").success());
}

#[test]
fn a_program_linked_against_the_driver_is_limited() {
    let bench = bench(GIB);
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("linked.c"), folder.path().join("linked"));
    std::fs::write(
        &source,
        r#"
        #include <stddef.h>
        #include <stdio.h>
        typedef unsigned long long ptr;
        int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
        int cuMemAlloc_v2(ptr *, size_t), cuMemFree_v2(ptr), cuMemGetInfo_v2(size_t *, size_t *);
        int main(void) {
            void *context; ptr p = 0; size_t free = 0, total = 0;
            int a = cuInit(0), b = cuDevicePrimaryCtxRetain(&context, 0), c = cuCtxSetCurrent(context);
            int d = cuMemAlloc_v2(&p, (1ul << 30) + 1), e = cuMemAlloc_v2(&p, 1ul << 30);
            cuMemGetInfo_v2(&free, &total);
            printf("%d %d %d %d %d %zu %zu %d\n", a, b, c, d, e, free, total, cuMemFree_v2(p));
            return 0;
        }"#,
    )
    .unwrap();
    let library = built().driver.join("libcuda.so.1");
    for binding in ["-Wl,-z,lazy", "-Wl,-z,now"] {
        compile(&source, &program, &[library.to_str().unwrap(), binding]);
        let output = bench.command(&program).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("0 0 0 2 0 0 {GIB} 0\n"), "{output:?}");
    }
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
    refused(&bench, |program| program.env_remove("ALIQUOT_ROOT"), "/run/aliquot/quota does not exist");
    refused(&bench, |program| program.env("ALIQUOT_ROOT", "/nowhere"), "cannot be opened");
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
fn a_second_copy_of_the_driver_is_refused() {
    let bench = bench(GIB);
    assert_eq!(bench.run(&["init", "retain", "second:2G", "alloc:linear:1G"])[2..], ["802", "0"]);
}

#[test]
fn deep_binding_is_noted_for_the_node_agent() {
    let deepbind = aliquot_quota::region::audit::DEEPBIND;
    for script in [["deepbind:libm.so.6", "init", "retain"], ["init", "retain", "deepbind:libm.so.6"]] {
        let bench = bench(GIB);
        assert_eq!(bench.run(&script), ["0"; 3]);
        assert_eq!(bench.audit("a") & deepbind, deepbind, "{script:?}");
    }
}

#[test]
fn constructors_and_allocators_may_look_things_up() {
    // A library that is preloaded beside the stub, replaces malloc, and looks it up in its first call; and
    // asks for CUDA before main.
    let bench = bench(GIB);
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("shim.c"), folder.path().join("libshim.so"));
    std::fs::write(
        &source,
        r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stddef.h>
        #include <unistd.h>
        static void *(*real)(size_t);
        static char early[65536];
        static size_t used;
        void *malloc(size_t n) {
            static int inside;
            if (!real) {
                if (inside) { void *p = early + used; used += (n + 63) & ~63ul; return used < sizeof early ? p : NULL; }
                inside = 1;
                real = dlsym(RTLD_NEXT, "malloc");
                inside = 0;
            }
            return real(n);
        }
        __attribute__((constructor)) static void start(void) {
            if (dlsym(RTLD_DEFAULT, "cuInit") || dlvsym(RTLD_NEXT, "nvmlInit_v2", "X")) _exit(9);
        }"#,
    )
    .unwrap();
    compile(&source, &library, &["-shared", "-fPIC", "-ldl"]);
    let stub = built().limiter.join("libaliquot_preload.so");
    for order in [[&library, &stub], [&stub, &library]] {
        let mut program = bench.probe(&["init", "retain", "alloc:linear:2G", "alloc:linear:1G"]);
        program.env("LD_PRELOAD", order.map(|path| path.to_str().unwrap()).join(":")).env("LD_BIND_NOW", "1");
        assert_eq!(answers(program), ["0", "0", "2", "0"], "{order:?}");
    }
}

/// Options of `unshare` that work here, with `-r` where we are not root.
fn unshare(options: &[&str]) -> Option<Vec<String>> {
    [vec![], vec!["-r"]].into_iter().map(|first| [first, options.to_vec()].concat()).find_map(|options| {
        let works =
            Command::new("unshare").args(&options).arg("true").output().is_ok_and(|out| out.status.success());
        works.then(|| options.into_iter().map(str::to_owned).collect())
    })
}

/// The test program in namespaces of its own.
fn apart(bench: &Bench, options: &[String], before: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(options).args(["sh", "-c", &format!("{before} exec \"$0\" \"$@\"")]);
    command.arg(&built().probe).args(arguments);
    let like = bench.probe(&[]);
    command
        .env_clear()
        .envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .env("PATH", "/bin:/usr/bin");
    command
}

#[test]
fn two_pid_namespaces_share_one_region() {
    let Some(options) = unshare(&["-p", "-f", "--kill-child", "-m", "--mount-proc"]) else {
        eprintln!("skipped: no pid namespace can be made");
        return;
    };
    // NVML shows pids of the node, so contexts cannot be measured and count as large as is assumed.
    let context = 528 * MIB;
    let bench = bench(8 * GIB);
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
    let bench = bench(4 * GIB);
    let script = ["init", "retain", "alloc:linear:4G", "alloc:linear:3G", "free"];
    let program = apart(&bench, &options, "mount -t tmpfs none /proc &&", &script);
    assert_eq!(answers(program), ["0", "0", "2", "0", "0"]);
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
