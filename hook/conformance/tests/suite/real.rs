//! The hook table and the limiter's answers against the libcuda of real drivers, whose `cuGetProcAddress` needs no GPU.
#![allow(unsafe_code, reason = "takes rights from a program before it starts")]

use crate::support::{Bench, GIB, built};
use crate::table::{ROWS, Row, Stream};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD: u64 = 2;

/// Directory of a real libcuda, or why there is none.
fn real(suite: &str) -> Result<PathBuf, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/real-driver");
    let said = Command::new(script).args([suite, "cuda"]).output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if !said.status.success() {
        return Err(text(&said.stderr));
    }
    Ok(Path::new(&text(&said.stdout)).join("usr/lib/x86_64-linux-gnu/nvidia/current"))
}

/// Starts a program without any right of root's, so that it can make no device node and load no module: a real driver's
/// library does so by itself where it may, and with NVIDIA's own program where that is installed.
fn powerless(command: &mut Command) {
    let drop_all = || {
        for capability in 0..=63 {
            // SAFETY: numbers only. Where it is refused, there is no such capability, or none to drop.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        }
        // SAFETY: as above.
        match unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: it makes system calls alone.
    unsafe { command.pre_exec(drop_all) };
}

/// The driver's device nodes on this machine.
fn device_nodes() -> BTreeSet<String> {
    let names = std::fs::read_dir("/dev").unwrap().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with("nvidia")).collect()
}

/// Every row of CUDA's.
fn rows() -> impl Iterator<Item = &'static Row> + Clone {
    ROWS.iter().filter(|row| row.stream != Stream::nvml)
}

/// Every name of the table just before, at and after each version at which any answer changes, by all flags.
fn requests() -> Vec<(&'static str, u32, u64)> {
    let names: BTreeSet<&str> = rows().map(|row| row.name).collect();
    let versions: BTreeSet<u32> =
        rows().flat_map(|row| [row.since - 10, row.since, row.since + 10]).collect();
    let of = |name| {
        versions.iter().flat_map(move |version| [0, 1, PER_THREAD].map(|flags| (name, *version, flags)))
    };
    names.into_iter().flat_map(of).collect()
}

/// What the driver answers each request: the exported symbol, `-` for none, `?` for an address that is no row's.
fn answers(mut program: Command, requests: &[(&str, u32, u64)]) -> Vec<String> {
    powerless(&mut program);
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut text: String = rows().map(|row| format!("symbol,{}\n", row.symbol)).collect();
    text.extend(requests.iter().map(|(name, version, flags)| format!("{name},{version},{flags}\n")));
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// The symbol in a line of the program's: what all three ways of asking gave.
fn symbol(line: &str) -> &str {
    let found: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
    assert!(found.len() == 3 && found.iter().all(|one| *one == found[0]), "{line}");
    found[0]
}

/// What the table says that a driver answers that has these symbols.
fn expected(exports: &BTreeSet<&str>, name: &str, version: u32, flags: u64) -> &'static str {
    let newest = |stream: Stream| {
        let of =
            rows().filter(|row| row.name == name && row.stream == stream && exports.contains(row.symbol));
        of.filter(|row| row.since <= version).max_by_key(|row| row.since)
    };
    let has_own = rows().any(|row| row.name == name && row.stream == Stream::thread);
    let row = match flags & PER_THREAD {
        0 => newest(Stream::legacy),
        // A function that has one for the thread's own stream is not answered with the other.
        _ if has_own => newest(Stream::thread),
        _ => newest(Stream::legacy),
    };
    row.map_or("-", |row| row.symbol)
}

/// Symbols of the table that a library exports.
fn exports(library: &Path) -> BTreeSet<&'static str> {
    let bytes = std::fs::read(library).unwrap();
    // Names in the table of dynamic symbols end in a zero byte and follow one.
    let is_there = |row: &&Row| {
        let name = [b"\0", row.symbol.as_bytes(), b"\0"].concat();
        bytes.windows(name.len()).any(|window| window == name)
    };
    rows().filter(is_there).map(|row| row.symbol).collect()
}

#[test]
fn the_table_and_the_limiter_answer_as_real_drivers_do() {
    let title = "the hook table against real drivers";
    let requests = requests();
    let before = device_nodes();
    let probe = built().probe.with_file_name("resolver_probe");
    for (suite, major) in [("bookworm", 535), ("trixie", 550)] {
        let dir = match real(suite) {
            Ok(dir) => dir,
            Err(reason) => {
                println!("SKIPPED: {title}: driver {major}: {reason}");
                continue;
            }
        };
        let exports = exports(&dir.join("libcuda.so.1"));
        assert!(exports.len() > 90, "{major}: {}", exports.len());
        let mut libraries = dir.into_os_string();
        libraries.push(":");
        libraries.push(&built().driver);
        let bench = Bench::new(["H100-80"]);
        bench.share("a", 0, GIB);
        let with = |mut command: Command| {
            command.env("LD_LIBRARY_PATH", &libraries);
            answers(command, &requests)
        };
        let truth = with(bench.unlimited(&probe));
        assert_eq!(truth.len(), requests.len());
        let mut wrong = BTreeMap::new();
        for ((name, version, flags), line) in requests.iter().zip(&truth) {
            let want = expected(&exports, name, *version, *flags);
            if symbol(line) != want {
                wrong.entry((name, want, symbol(line))).or_insert_with(|| format!("{version} {flags}"));
            }
        }
        assert!(wrong.is_empty(), "driver {major}: the table says otherwise: {wrong:#?}");
        let limited = with(bench.command(&probe));
        let differ: Vec<_> = truth.iter().zip(&limited).filter(|(a, b)| a != b).take(10).collect();
        assert!(differ.is_empty(), "driver {major} under the limiter: {differ:#?}");
        let made: Vec<_> = device_nodes().difference(&before).cloned().collect();
        assert!(made.is_empty(), "driver {major} has made device nodes on this machine: {made:?}");
    }
}
