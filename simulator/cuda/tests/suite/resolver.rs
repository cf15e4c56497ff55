//! The resolver against the recorded requests of the CUDA runtime, against the exports, and where it must say no.
#![allow(unsafe_code, reason = "the tests call a C library")]

use std::ffi::{CStr, CString};

use crate::common::{Cuda, at, on, on_node};

const TABLE: &str = include_str!("../../symbols/symbols.csv");

/// What `cuGetProcAddress_v2` answers: code, address, status.
fn ask(cuda: &Cuda, name: &str, version: u64, flags: u64) -> (i32, usize, i32) {
    let name = CString::new(name).unwrap();
    let (mut address, mut status) = (usize::MAX, -1_i32);
    let code = cuda.call(
        "cuGetProcAddress_v2",
        &[name.as_ptr() as u64, at(&mut address), version, flags, at(&mut status)],
    );
    (code, address, status)
}

/// The exported symbol at an address.
fn symbol_at(address: usize) -> String {
    // SAFETY: zeroes are a valid place for the answer.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked about.
    assert_ne!(unsafe { libc::dladdr(address as *const libc::c_void, &raw mut info) }, 0);
    assert!(!info.dli_sname.is_null());
    // SAFETY: a name in the loaded library.
    unsafe { CStr::from_ptr(info.dli_sname) }.to_str().unwrap().to_owned()
}

fn resolved(cuda: &Cuda, name: &str, version: u64, flags: u64) -> String {
    let (code, address, status) = ask(cuda, name, version, flags);
    assert_eq!((code, status), (0, 0), "{name} {version} {flags}");
    symbol_at(address)
}

struct Row {
    name: &'static str,
    since: u64,
    per_thread: bool,
    elf: &'static str,
    core: bool,
}

fn rows() -> Vec<Row> {
    TABLE
        .lines()
        .skip(1)
        .map(|line| {
            let [name, since, flavour, elf, part, _] = line.split(',').collect::<Vec<_>>()[..] else {
                panic!("{line}")
            };
            let since = since.parse().unwrap();
            Row { name, since, per_thread: flavour != "legacy", elf, core: part == "core" }
        })
        .collect()
}

#[test]
fn the_table_has_every_symbol_of_the_newest_header_and_all_are_exported() {
    on(&["T4"], || {
        let cuda = Cuda::load();
        let rows = rows();
        assert_eq!(rows.iter().filter(|r| r.core).count(), 685);
        assert_eq!(rows.iter().filter(|r| r.core && r.per_thread).count(), 105);
        for row in rows {
            assert_eq!(symbol_at(cuda.entry(row.elf)), row.elf);
        }
    });
}

#[test]
fn every_symbol_is_the_answer_to_its_own_version() {
    on_node(&["T4"], "cuda_version = 13050", || {
        let cuda = Cuda::load();
        for row in rows() {
            let flags = if row.per_thread { 2 } else { 1 };
            // A per-thread twin is at least as old as the newest legacy symbol of that version, or hides it.
            let answer = resolved(&cuda, row.name, row.since, flags);
            assert_eq!(answer, row.elf, "{} {} {flags}", row.name, row.since);
        }
    });
}

#[test]
fn the_runtimes_recorded_requests_are_answered() {
    on_node(&["T4"], "cuda_version = 13050", || {
        let cuda = Cuda::load();
        let rows = rows();
        // Asked for by the newest runtime, and in no public header.
        let unknown = ["cuSubgridCreate", "cuSubgridWorkerGridCreate", "cuSubgridWorksetCreate"];
        let logs = [include_str!("data/cudart-12.9.csv"), include_str!("data/cudart-13.5.csv")];
        assert_eq!(logs.map(|log| log.lines().count() - 1), [418, 480]);
        for line in logs.iter().flat_map(|log| log.lines().skip(1)) {
            let [name, version, flags] = line.split(',').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let (version, flags) = (version.parse().unwrap(), flags.parse().unwrap());
            if unknown.contains(&name) {
                assert_eq!(ask(&cuda, name, version, flags), (0, 0, 1), "{line}");
                continue;
            }
            let answer = resolved(&cuda, name, version, flags);
            // The rule once more, by search instead of order: of the flavours that the flags allow, the newest that
            // is not newer than what was asked for; the per-thread flavour first.
            let newest = |per_thread| {
                rows.iter()
                    .filter(|r| r.name == name && r.per_thread == per_thread && r.since <= version)
                    .max_by_key(|r| r.since)
                    .map(|r| r.elf)
            };
            let expected = if flags == 2 { newest(true).or_else(|| newest(false)) } else { newest(false) };
            assert_eq!(Some(answer.as_str()), expected, "{line}");
        }
    });
}

#[test]
fn probes_that_other_tables_get_wrong() {
    on_node(&["T4"], "cuda_version = 13050", || {
        let cuda = Cuda::load();
        for (name, version, flags, elf) in [
            ("cuMemPrefetchAsync", 8000, 0, "cuMemPrefetchAsync"),
            ("cuMemPrefetchAsync", 12020, 0, "cuMemPrefetchAsync_v2"),
            ("cuMemAdvise", 8000, 0, "cuMemAdvise"),
            ("cuMemAdvise", 12020, 0, "cuMemAdvise_v2"),
            ("cuCtxCreate", 2000, 0, "cuCtxCreate"),
            ("cuCtxCreate", 3020, 0, "cuCtxCreate_v2"),
            ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"),
            ("cuCtxCreate", 12050, 0, "cuCtxCreate_v4"),
            ("cuLaunchKernel", 4000, 0, "cuLaunchKernel"),
            ("cuLaunchKernel", 7000, 2, "cuLaunchKernel_ptsz"),
            ("cuLaunchKernel", 6000, 2, "cuLaunchKernel"),
            ("cuMemAllocAsync", 11020, 2, "cuMemAllocAsync_ptsz"),
            ("cuMemGetInfo", 2000, 0, "cuMemGetInfo"),
            ("cuMemAlloc", 3010, 0, "cuMemAlloc"),
            ("cuMemAlloc", 13050, 2, "cuMemAlloc_v2"),
            ("cuGraphLaunch", 10000, 0, "cuGraphLaunch"),
            ("cuCtxGetDevice", 12080, 0, "cuCtxGetDevice"),
            ("cuCtxGetDevice", 13000, 0, "cuCtxGetDevice_v2"),
            ("cuMemcpyDtoH", 7000, 2, "cuMemcpyDtoH_v2_ptds"),
            ("cuStreamSynchronize", 7000, 2, "cuStreamSynchronize_ptsz"),
            ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
            ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ] {
            assert_eq!(resolved(&cuda, name, version, flags), elf, "{name} {version} {flags}");
        }
    });
}

#[test]
fn what_is_not_there_is_refused_with_the_right_status() {
    on_node(&["T4"], "cuda_version = 12040", || {
        let cuda = Cuda::load();
        for (name, version, flags, code, status) in [
            ("cuMemAlloc", 1000, 0, 0, 2),
            ("cuMemAllocAsync", 11010, 0, 0, 2),
            ("cuMemAllocAsync", 11010, 2, 0, 2),
            ("cuMemAlloc_v2", 12040, 0, 0, 1),
            ("cuLaunchKernel_ptsz", 12040, 2, 0, 1),
            ("cuNoSuchThing", 12040, 0, 0, 1),
            ("", 12040, 0, 0, 1),
            ("cumemalloc", 12040, 0, 0, 1),
            // Newer than the driver.
            ("cuMemcpyBatchAsync", 12040, 0, 0, 1),
            ("cuMemAlloc", 12050, 0, 1, -1),
            ("cuMemAlloc", 12040, 4, 1, -1),
            ("cuMemAlloc", 12040, 3, 1, -1),
        ] {
            let answer = ask(&cuda, name, version, flags);
            assert_eq!((answer.0, answer.2), (code, status), "{name} {version} {flags}");
            assert!(code != 0 || answer.1 == 0, "{name}: no address");
        }
        assert_eq!(cuda.call("cuGetProcAddress_v2", &[0, at(&mut 0_u64), 12040, 0, 0]), 1);
        let mut nowhere = 7_u64;
        let without_status = [c"cuNoSuchThing".as_ptr() as u64, at(&mut nowhere), 12040, 0, 0];
        assert_eq!((cuda.call("cuGetProcAddress_v2", &without_status), nowhere), (0, 0));
        let name = c"cuNoSuchThing".as_ptr() as u64;
        let mut address = 0_u64;
        assert_eq!(cuda.call("cuGetProcAddress", &[name, at(&mut address), 12040, 0]), 500);
        assert_eq!(
            cuda.call("cuGetProcAddress", &[c"cuInit".as_ptr() as u64, at(&mut address), 12040, 0]),
            0
        );
        assert_eq!(address as usize, cuda.entry("cuInit"));
    });
}

#[test]
fn a_driver_may_answer_with_other_addresses_than_it_exports() {
    on_node(&["T4"], "resolver = alias", || {
        let cuda = Cuda::start();
        let (_, address, _) = ask(&cuda, "cuDeviceGetCount", 2000, 0);
        assert_ne!(address, cuda.entry("cuDeviceGetCount"));
        let mut count = 0;
        assert_eq!(crate::common::call_at(address, &[at(&mut count)]), 0);
        assert_eq!(count, 1);
    });
}

#[test]
fn what_is_not_modelled_says_so_and_is_listed() {
    on(&["T4"], || {
        let cuda = Cuda::with_context();
        let listed: Vec<&str> = include_str!("../../NOT_MODELLED.md")
            .lines()
            .filter_map(|l| l.strip_prefix("- `")?.strip_suffix('`'))
            .collect();
        for name in &listed {
            assert_eq!(cuda.call(name, &[]), 801, "{name}");
        }
        let implemented: Vec<String> = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/api"))
            .unwrap()
            .map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap())
            .collect();
        for row in rows() {
            let written = implemented.iter().any(|text| {
                [format!("fn {}(", row.elf), format!("fn {} |", row.elf), format!("| {}(", row.elf)]
                    .iter()
                    .any(|form| text.contains(form))
            });
            assert_ne!(written, listed.contains(&row.elf), "{} is either implemented or listed", row.elf);
        }
    });
}

#[test]
fn another_librarys_symbols_of_the_same_names_are_not_taken_for_its_own() {
    let source = r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        int cuMemAlloc_v2(unsigned long *p, unsigned long n) { (void)p; (void)n; return 4242; }
        int main(int argc, char **argv) {
            void *library = dlopen(argv[argc - 1], RTLD_NOW | RTLD_GLOBAL);
            if (!library) { puts(dlerror()); return 1; }
            int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
            int (*resolve)(const char *, void **, int, unsigned long, int *) =
                (int (*)(const char *, void **, int, unsigned long, int *))dlsym(library, "cuGetProcAddress_v2");
            int (*alloc)(unsigned long *, unsigned long) = 0;
            unsigned long pointer;
            int status = -1;
            if (init(0) || resolve("cuMemAlloc", (void **)&alloc, 3020, 0, &status) || status) return 2;
            printf("%d", alloc(&pointer, 1));
            return 0;
        }"#;
    let node = crate::common::TestNode::of(&["T4"]);
    let (file, program) = (node.dir().join("main.c"), node.dir().join("main"));
    std::fs::write(&file, source).unwrap();
    let mut compile = std::process::Command::new("cc");
    compile.args(["-rdynamic", "-o"]).arg(&program).arg(&file).arg("-ldl");
    crate::common::check(compile);
    for resolver in ["same", "alias"] {
        let mut run = std::process::Command::new(&program);
        run.arg(crate::common::library()).env("ALIQUOT_SIM_NODE", node.dir());
        run.env("ALIQUOT_SIM_ROOT", node.dir().join("root"));
        run.env("ALIQUOT_SIM_CUDA", format!("resolver={resolver}"));
        let output = run.output().unwrap();
        // No context: the driver's own answer.
        assert_eq!(String::from_utf8_lossy(&output.stdout), "201", "{resolver}");
    }
}
