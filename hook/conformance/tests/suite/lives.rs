//! The limiter in the lives that processes lead: threads, children, other programs in their place, roots that cannot
//! be written and system calls that are forbidden; and what of a process it must not touch.

use crate::support::c::{compile, source};
use crate::support::namespace::{apart, unshare};
use crate::support::{Bench, GIB, MIB, Storm, answers, built, null_driver, values};
use aliquot_quota::GpuUuid;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

fn bench(quota: u64) -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, quota);
    bench
}

fn made(name: &str, arguments: &[&str]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join(name);
    compile(&source(name), &program, arguments);
    (folder, program)
}

#[test]
fn a_program_finds_itself_as_it_was() {
    let bench = bench(GIB);
    let (_folder, program) = made("traces", &["-ldl"]);
    let alone = bench.unlimited(&program).output().unwrap();
    let limited = bench.command(&program).output().unwrap();
    // The limiter has NVML open, which holds the kernel module and the GPUs; on a real node those are `/dev/nvidiactl` and
    // `/dev/nvidia0` once more.
    let text = |output: &std::process::Output| -> String {
        let all = String::from_utf8_lossy(&output.stdout).into_owned();
        all.split_inclusive('\n')
            .filter(|line| !line.contains("/node/module") && !line.contains("/node/open-"))
            .collect()
    };
    assert!(text(&alone).contains("codes 0, too much 2") && text(&alone).ends_with("atexit\n"), "{alone:?}");
    // Signals, umask, directory, environment, limits, names, descriptors, threads, exit: the same with and without.
    assert_eq!(text(&limited), text(&alone));
    assert_eq!((limited.status, limited.stderr), (alone.status, alone.stderr));
}

#[test]
fn everything_from_the_first_look_up_on_works_on_a_stack_of_16_kib() {
    let bench = bench(GIB);
    let (_folder, program) = made("threads", &["-ldl", "-lpthread"]);
    let mut quota = bench.quota("a");
    quota.cores_percent = 50;
    quota.gpu_uuid = GpuUuid::new("GPU-00000000-0000-0000-0000-000000000000").unwrap();
    bench.write_quota("a", &quota);
    let mut command = bench.command(&program);
    command.arg("small").env("LD_LIBRARY_PATH", null_driver());
    assert_eq!(answers(command), ["0", "2"]);
}

#[test]
fn children_of_a_process_with_many_threads_wait_for_none_of_them() {
    let bench = bench(GIB);
    let (_folder, program) = made("threads", &["-ldl", "-lpthread"]);
    let mut command = bench.command(&program);
    command.arg("forks");
    assert_eq!(answers(command), ["0", "0", &format!("0 {GIB} {GIB}"), "0"]);
    assert_eq!(bench.audit("a"), 0);
}

#[test]
fn nothing_walks_under_the_loaders_lock_while_a_large_process_forks() {
    let bench = bench(GIB);
    let (_folder, program) = made("threads", &["-ldl", "-lpthread"]);
    let mut command = bench.command(&program);
    command.arg("slow");
    let answers = answers(command);
    assert_eq!(answers[1], "0", "the child's status");
    // Each of the two threads may begin one look-up during the fork, and none comes to its end.
    assert!(answers[2].parse::<u32>().unwrap() <= 2, "{} look-ups during the fork", answers[2]);
}

#[test]
fn a_fork_waits_for_a_walk_that_waits_for_somebody_elses() {
    let bench = bench(GIB);
    let (_folder, program) = made("threads", &["-ldl", "-lpthread"]);
    let mut command = bench.command(&program);
    command.arg("held");
    assert_eq!(answers(command)[1], "0", "the child's status");
}

#[test]
fn a_fork_in_a_signal_handler_waits_for_no_walk_that_it_interrupts() {
    let bench = bench(GIB);
    let (_folder, program) = made("threads", &["-ldl", "-lpthread"]);
    let mut command = bench.command(&program);
    command.arg("signal");
    assert_eq!(answers(command)[1], "0", "a fork waited for as long as it ever does");
}

#[test]
fn storms_of_killed_processes_with_many_threads_leave_nothing_and_never_exceed_the_quota() {
    const QUOTA: u64 = 48 * MIB;
    let bench = bench(QUOTA);
    let (_folder, program) = made("threads", &["-ldl", "-lpthread"]);
    let mut storm = Storm(Vec::new());
    for round in 0..30_u64 {
        while storm.0.len() < 5 {
            let mut child = bench.command(&program);
            child.arg("storm").stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
            storm.0.push(child.spawn().unwrap());
        }
        std::thread::sleep(std::time::Duration::from_millis(10 + round * 7 % 40));
        let used = bench.used(0);
        assert!(used <= QUOTA, "{used} bytes used");
        let mut victim = storm.0.swap_remove((round * 3 % 5) as usize);
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
    drop(storm);
    assert_eq!(
        bench.run(&["init", "retain", "alloc:linear:48M", "free", "info"])[2..],
        ["0", "0", &format!("0 {QUOTA} {QUOTA}")]
    );
    assert_eq!((bench.charged("a"), bench.audit("a")), ((0, 0), 0));
}

#[test]
fn a_child_by_vfork_becomes_another_program_and_its_parent_keeps_its_bytes() {
    let bench = bench(GIB);
    let (_folder, program) = made("threads", &["-ldl", "-lpthread"]);
    let mut command = bench.command(&program);
    command.arg("vfork").arg(&built().probe).args([
        "init",
        "retain",
        "alloc:linear:600M",
        "alloc:linear:400M",
    ]);
    let answers = answers(command);
    let child = ["0", "0", "2", "0"];
    let expected = [&["0"][..], &child, &child, &child, &child, &child, &["0"]].concat();
    assert_eq!(answers[..22], expected);
    assert_eq!(answers[22..], [format!("0 {} {GIB}", 424 * MIB), "0".to_owned()]);
    assert_eq!(bench.charged("a"), (0, 0));
}

#[test]
fn a_chain_of_programs_is_limited_in_each() {
    let bench = bench(GIB);
    let link = ["init", "retain", "alloc:linear:600M", "alloc:linear:600M", "exec"];
    let script: Vec<&str> = link
        .iter()
        .copied()
        .cycle()
        .take(link.len() * 3)
        .chain(["init", "retain", "alloc:linear:1G"])
        .collect();
    let answers = bench.run(&script);
    for seen in answers.chunks(4).take(3) {
        assert_eq!(seen, ["0", "0", "0", "2"]);
    }
    assert_eq!(answers[14], "0", "nothing of all those before is left");
    // Shells in between never touch CUDA.
    let mut shell = bench.command(Path::new("/bin/sh"));
    shell.arg("-c").arg(
        "exec sh -c 'exec sh -c \"exec $0 init retain alloc:linear:2G\"'"
            .replace("$0", &built().probe.display().to_string()),
    );
    assert_eq!(crate::support::answers(shell), ["0", "0", "2"]);
}

#[test]
fn a_root_that_cannot_be_written_is_enough() {
    let Some(options) = unshare(&["-m"]) else {
        eprintln!("skipped: no mount namespace can be made");
        return;
    };
    let bench = bench(GIB);
    let folder = bench.folder.path().display().to_string();
    // The region stays writable, as in a container; quotas do not.
    let before = format!(
        "mount --bind {folder} {folder} && mount --bind {folder}/aliquot/quota {folder}/aliquot/quota && \
         mount -o remount,bind,ro {folder}/aliquot/quota && mount -o remount,bind,ro / && ! touch /x 2>/dev/null && \
         ! touch {folder}/aliquot/quota/x 2>/dev/null &&"
    );
    let script = ["init", "retain", "alloc:linear:2G", "alloc:linear:600M", "free", "info"];
    assert_eq!(answers(apart(&bench, &options, &before, &script))[2..5], ["2", "0", "0"]);
}

/// System calls of the core by number, as `cuda_probe deny` forbids them to it.
fn calls() -> Vec<(&'static str, i64)> {
    vec![
        ("write", libc::SYS_write),
        ("lseek", libc::SYS_lseek),
        ("mmap", libc::SYS_mmap),
        ("munmap", libc::SYS_munmap),
        ("pread64", libc::SYS_pread64),
        ("madvise", libc::SYS_madvise),
        ("nanosleep", libc::SYS_nanosleep),
        ("getpid", libc::SYS_getpid),
        ("fcntl", libc::SYS_fcntl),
        ("getdents64", libc::SYS_getdents64),
        ("clock_gettime", libc::SYS_clock_gettime),
        ("openat", libc::SYS_openat),
        ("readlinkat", libc::SYS_readlinkat),
        ("faccessat", libc::SYS_faccessat),
    ]
}

#[test]
fn a_forbidden_system_call_ends_no_program_and_lifts_no_limit() {
    for (name, number) in calls() {
        let bench = bench(GIB);
        let deny = format!("deny:{number}");
        for early in [true, false] {
            let (first, then) = if early { (deny.as_str(), "sleep:0") } else { ("sleep:0", deny.as_str()) };
            let script =
                [first, "init", "retain", then, "alloc:linear:1100M", "fill:linear:100M", "info", "freeall"];
            let mut program: Command = bench.probe(&script);
            let output = program.output().unwrap();
            assert!(output.status.success(), "{name}: {output:?}");
            let seen = values(&output);
            assert!(seen[4] == "2" || seen[4] == "802", "{name} {early}: {seen:?}");
            // What the limiter cannot begin without refuses CUDA with its own code.
            let needed = ["lseek", "mmap", "pread64", "fcntl", "getdents64", "openat"];
            assert_eq!(seen[1] == "802", early && needed.contains(&name), "{name} {early}: {seen:?}");
            let filled: u64 = seen[5].split(' ').next().unwrap().parse().unwrap();
            assert!(filled <= 10, "{name} {early}: {seen:?}");
        }
        assert!(bench.used(0) == 0, "{name}");
    }
}
