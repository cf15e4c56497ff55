//! `cuGetProcAddress` under the limiter against the driver's own answers: for everything that the CUDA runtime
//! was seen to ask for, and for every name, version and flag there is, wrong ones included.
//!
//! The simulated driver's table is derived from NVIDIA's headers by other code than the limiter's.

use crate::support::{Bench, GIB, built};
use crate::table;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// What the limiter is asked: `name,version,flags`.
fn requests() -> Vec<String> {
    let mut all = Vec::new();
    for log in ["cudart-12.9.csv", "cudart-13.5.csv"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/tests/data").join(log);
        all.extend(std::fs::read_to_string(path).unwrap().lines().skip(1).map(str::to_owned));
    }
    assert_eq!(all.len(), 418 + 480, "the logs of both runtimes");
    let rows = symbols();
    let names: BTreeSet<&str> = rows.iter().map(|(name, _, _)| name.as_str()).collect();
    // Just before, at and after each version at which any answer changes.
    let versions: BTreeSet<i32> =
        rows.iter().flat_map(|(_, since, _)| [since - 10, *since, since + 10]).collect();
    for name in &names {
        for version in &versions {
            for flags in 0..4 {
                all.push(format!("{name},{version},{flags}"));
            }
        }
    }
    // Names that are none: exported symbols, names of no function, names beyond the table.
    for name in
        ["cuMemAlloc_v2", "cuMemAlloc_v3", "cuMemAllocX", "cuNothing", "cuLaunchKernel_ptsz", "mem", ""]
    {
        for version in [0, 2000, 12000, 13000] {
            all.push(format!("{name},{version},0"));
        }
    }
    all
}

/// (name, since, symbol) of the simulated driver.
fn symbols() -> Vec<(String, i32, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../simulator/cuda/symbols/symbols.csv");
    let text = std::fs::read_to_string(path).unwrap();
    let rows: Vec<_> = text
        .lines()
        .skip(1)
        .map(|line| line.split(',').collect::<Vec<_>>())
        .map(|columns| (columns[0].to_owned(), columns[1].parse().unwrap(), columns[3].to_owned()))
        .collect();
    assert!(rows.len() > 650, "{} rows", rows.len());
    rows
}

fn answers(mut program: Command, requests: &[String]) -> Vec<String> {
    program.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = program.spawn().unwrap();
    let mut text = String::new();
    for (_, _, symbol) in symbols() {
        text += &format!("symbol,{symbol}\n");
    }
    text += &requests.join("\n");
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn the_list_that_the_table_is_derived_from_names_every_row() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/table/symbols.txt");
    let text = std::fs::read_to_string(path).unwrap();
    let listed: BTreeSet<&str> = text.split_whitespace().collect();
    let rows = table::ROWS.iter().filter(|row| row.stream != table::Stream::nvml).map(|row| row.symbol);
    assert_eq!(listed, rows.collect());
}

#[test]
fn answers_are_the_drivers_own_for_every_request() {
    let requests = requests();
    assert!(requests.len() > 50_000, "{} requests", requests.len());
    let probe = built().probe.with_file_name("resolver_probe");
    for version in [11080, 12020, 13050] {
        let of_version = format!("cuda_version={version},resolver=");
        let same = format!("{of_version}same");
        let bench = Bench::new(["H100-80"]).driver(&same);
        bench.share("a", 0, GIB);
        let truth = answers(bench.unlimited(&probe), &requests);
        assert_eq!(truth.len(), requests.len());
        assert!(
            truth.iter().all(|line| !line.contains('?')),
            "every answer of the driver is an exported symbol"
        );
        let compare = |limited: Vec<String>, what: &str| {
            let wrong: Vec<_> = truth.iter().zip(&limited).filter(|(a, b)| a != b).take(10).collect();
            assert!(wrong.is_empty(), "{what} {version}: {wrong:#?}");
        };
        compare(answers(bench.command(&probe), &requests), "same");
        // A driver whose resolver gives other addresses than its exports have: those that pass are unknown to
        // the test as well, those that are hooked are not.
        let bench = bench.driver(&format!("{of_version}alias"));
        let hooked: BTreeSet<&str> =
            table::ROWS.iter().map(|row| row.name).filter(|name| !name.is_empty()).collect();
        let limited = answers(bench.command(&probe), &requests);
        let mut compared = 0;
        for (truth, limited) in truth.iter().zip(&limited) {
            if hooked.contains(truth.split(',').next().unwrap()) {
                assert_eq!(truth, limited, "alias {version}");
                compared += 1;
            }
        }
        assert!(compared > 5_000, "{compared} compared");
    }
}
