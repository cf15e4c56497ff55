//! Every row of the hook table by itself: each entry point is called where the limiter works, where the quota is too
//! small, and where CUDA is refused.

use crate::support::{Bench, GIB, Holder, MIB, built, values};
use crate::table::{ROWS, Row, Stream};
use std::path::Path;
use std::process::Command;

/// What each recipe allocates.
const BYTES: u64 = 64 * MIB;

fn recipe(mut command: Command, symbol: &str) -> Command {
    command.args([symbol, &BYTES.to_string()]);
    command
}

/// Whether a symbol takes memory itself.
fn takes_memory(symbol: &str) -> bool {
    [
        "cuMemAlloc",
        "cuMemCreate",
        "cuGraphUpload",
        "cuGraphLaunch",
        "cuGraphInstantiateWithParams",
        "cuCtxCreate",
        "cuCtxSetLimit",
    ]
    .iter()
    .any(|start| symbol.starts_with(start))
        || symbol.starts_with("cuArray") && symbol.contains("Create")
        || ["cuMipmappedArrayCreate", "cuDevicePrimaryCtxRetain"].contains(&symbol)
}

#[test]
fn every_entry_answers_as_the_driver_and_charges_what_that_uses() {
    let probe = &built().probe.with_file_name("rows_probe");
    // Some recipes wait, so several go on at a time.
    std::thread::scope(|scope| {
        for start in 0..4 {
            scope
                .spawn(move || ROWS.iter().skip(start).step_by(4).for_each(|row| compare(probe, row.symbol)));
        }
    });
}

/// Goes through the recipe for a symbol without the limiter and with it.
fn compare(probe: &Path, symbol: &str) {
    // Contexts take memory as well, 300 MiB each.
    let bench = Bench::new(["H100-80"]).driver("multiprocessors=75");
    bench.share("a", 0, 4 * GIB);
    let mut free = Holder::start(&mut recipe(bench.unlimited(probe), symbol));
    free.step();
    let truth = free.finish();
    let mut limited = Holder::start(&mut recipe(bench.command(probe), symbol));
    // Managed memory is charged wherever it is; untouched it is nowhere.
    let elsewhere = if symbol == "cuMemAllocManaged" { BYTES } else { 0 };
    assert_eq!(bench.charged("a").0, bench.used(0) + elsewhere, "{symbol}: while all is allocated");
    assert!(limited.before == ["0"] || !takes_memory(symbol), "{symbol} takes memory: {:?}", limited.before);
    limited.step();
    assert_eq!(bench.charged("a").0, bench.used(0), "{symbol}: when all is given back");
    assert_eq!(limited.finish(), truth, "{symbol}");
    assert_eq!(bench.audit("a"), 0, "{symbol}");
}

#[test]
fn every_entry_that_takes_memory_is_refused_what_does_not_fit() {
    let probe = built().probe.with_file_name("rows_probe");
    let takers: Vec<&str> = ROWS.iter().map(|row| row.symbol).filter(|symbol| takes_memory(symbol)).collect();
    assert!(takers.len() >= 27, "{takers:?}");
    for symbol in takers {
        let bench = Bench::new(["H100-80"]).driver("multiprocessors=75");
        // One context fits, and nothing else that is large.
        bench.share("a", 0, 330 * MIB);
        let mut command = recipe(bench.command(&probe), symbol);
        let output = command.arg("until-charged").output().unwrap();
        assert!(output.status.success(), "{symbol}: {output:?}");
        assert_eq!(values(&output), ["2"], "{symbol}");
    }
}

#[test]
fn every_entry_is_refused_where_the_limiter_cannot_work() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    bench.write_quota_bytes("a", b"no quota");
    // The resolver says which functions there are; what it hands out refuses.
    let rows: Vec<&Row> = ROWS.iter().filter(|row| row.name != "cuGetProcAddress").collect();
    let calls: Vec<String> = rows.iter().map(|row| format!("call:{}", row.symbol)).collect();
    let output = bench.probe(&calls.iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let answers = values(&output);
    assert_eq!(answers.len(), rows.len());
    for (row, answer) in rows.iter().zip(&answers) {
        let wanted = if row.stream == Stream::nvml { "27" } else { "802" };
        assert_eq!(answer, wanted, "{}", row.symbol);
    }
}

#[test]
fn a_process_is_not_restored_to_a_gpu_where_it_has_no_charge() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let log = bench.folder.path().join("calls");
    let mut command =
        recipe(bench.command(&built().probe.with_file_name("rows_probe")), "cuCheckpointProcessRestore");
    let mut holder = Holder::start(command.env("ALIQUOT_SIM_CUDA_LOG", &log));
    holder.step();
    holder.finish();
    // The third of the calls would have moved it.
    let calls = std::fs::read_to_string(&log).unwrap();
    assert_eq!(calls.matches("cuCheckpointProcessRestore").count(), 2, "{calls}");
}
