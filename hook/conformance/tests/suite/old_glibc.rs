//! The shipped limiter in a process with an older C library: of the time when `dlsym` and the threads had
//! libraries of their own, which programs of today's images still have.

use crate::support::{Bench, GIB, MIB, answers, old, values};

#[test]
fn memory_is_limited_however_the_driver_is_looked_up() {
    let Some(built) = old::everything() else { return };
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    for resolve in ["dlsym", "dlvsym", "default", "next", "resolver"] {
        let script = ["libc", "init", "retain", "alloc:linear:600M", "alloc:linear:600M", "alloc:vmm:200M"];
        let script = [&script[..], &["info", "alloc:async:100M", "freeall", "info", "nvml"]].concat();
        let mut program = old::command(&built, &bench.probe(&[]), &script).unwrap();
        program.env("PROBE_RESOLVE", resolve);
        let answers = answers(program);
        assert_eq!(answers[..6], [old::VERSION, "0", "0", "0", "2", "0"], "{resolve}");
        assert_eq!(answers[6], format!("0 {} {GIB}", 224 * MIB));
        assert_eq!(answers[9..], [format!("0 {GIB} {GIB}"), format!("0 {GIB} {GIB} 0")]);
    }
    assert_eq!(bench.charged("a"), (0, 0));
}

#[test]
fn processes_with_both_libraries_share_one_region() {
    let Some(built) = old::everything() else { return };
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let holder = bench.hold(&["init", "retain", "alloc:linear:600M"]);
    let script = ["init", "retain", "alloc:linear:600M", "alloc:linear:400M", "fork", "info"];
    let program = old::command(&built, &bench.probe(&[]), &script).unwrap();
    assert_eq!(answers(program)[2..4], ["2", "0"]);
    holder.kill();
    let program = old::command(&built, &bench.probe(&[]), &["init", "retain", "alloc:linear:1G"]).unwrap();
    assert_eq!(answers(program)[2], "0", "a dead process's bytes come back");
}

#[test]
fn cuda_is_refused_without_a_quota() {
    let Some(built) = old::everything() else { return };
    let bench = Bench::new(["H100-80"]);
    let mut program = old::command(&built, &bench.probe(&[]), &["init", "alloc:linear:1M"]).unwrap();
    let output = program.output().unwrap();
    assert_eq!(values(&output), ["802", "802"], "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("holds no quota"), "{output:?}");
}

#[test]
fn children_of_a_process_with_many_threads_wait_for_none_of_them() {
    let Some(built) = old::everything() else { return };
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let folder = tempfile::tempdir().unwrap();
    // The loader of that time can only say with a lock whose code an address is.
    let threads = old::with_program(&built, "threads", folder.path(), &["-ldl", "-lpthread"]).unwrap();
    let program = old::command(&threads, &bench.probe(&[]), &["forks"]).unwrap();
    assert_eq!(answers(program), ["0", "0", &format!("0 {GIB} {GIB}"), "0"]);
    assert_eq!(bench.audit("a"), 0);
}

#[test]
fn programs_without_libdl_start_and_find_what_they_ask_for_weakly() {
    let Some(built) = old::everything() else { return };
    let bench = Bench::new(["H100-80"]);
    let folder = tempfile::tempdir().unwrap();
    let weak = old::with_program(&built, "weak", folder.path(), &[]).unwrap();
    // Our exports say that there is a `dlsym`, so there has to be one.
    assert_eq!(answers(old::command(&weak, &bench.probe(&[]), &[]).unwrap()), ["1", "1", "1"]);
    let mut alone = old::command(&weak, &bench.probe(&[]), &[]).unwrap();
    alone.env_remove("LD_PRELOAD");
    assert_eq!(answers(alone), ["0", "-1", "-1"], "the program itself brings none");
}

#[test]
fn a_driver_under_another_file_name_is_told_by_the_name_that_it_carries() {
    let Some(built) = old::everything() else { return };
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("libcuda-compat.so");
    std::fs::copy(built.driver.join("libcuda.so.1"), &copy).unwrap();
    // Whose code an address is is found in another way there.
    let program = old::with_program(&built, "cuda", folder.path(), &["-ldl"]).unwrap();
    let mut program = old::command(&program, &bench.probe(&[]), &["2048", "1024"]).unwrap();
    program.env("DRIVER", &copy);
    assert_eq!(answers(program), ["0", "0", "2", "0"]);
}
