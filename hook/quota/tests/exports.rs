//! Memory that one process exports and others import: it is charged once, to who exported it, and stays charged after
//! that one's death until the last importer gives it back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use support::{Bench, GIB, Holder, MIB};

fn bench() -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    bench
}

/// A process with 100 MiB of its own that has exported 600 MiB more, and how others open it.
fn exporter(bench: &Bench, how: &str) -> (Holder, String) {
    match how {
        "ipc" => {
            let holder =
                bench.hold(&["init", "retain", "alloc:linear:100M", "alloc:linear:600M", "ipcexport"]);
            let open = format!("ipcopen:{}", holder.before[4]);
            (holder, open)
        }
        _ => {
            let holder = bench.hold(&["init", "retain", "alloc:linear:100M", "fdexport:600M"]);
            let open = format!("fdimport:{}:600M", holder.before[3]);
            (holder, open)
        }
    }
}

fn close(how: &str) -> &'static str {
    if how == "ipc" { "ipcclose" } else { "free" }
}

/// Answers to an allocation of 600 MiB and one of 400 MiB.
fn others(bench: &Bench) -> [String; 2] {
    let answers = bench.run(&["init", "retain", "alloc:linear:600M", "alloc:linear:400M"]);
    [answers[2].clone(), answers[3].clone()]
}

#[test]
fn what_is_imported_is_charged_once() {
    for how in ["ipc", "fd"] {
        let bench = bench();
        let (exporter, open) = exporter(&bench, how);
        let importers = [0, 1].map(|_| bench.hold(&["init", "retain", &open, "info"]));
        for importer in &importers {
            assert_eq!(importer.before[2..], ["0", &format!("0 {} {GIB}", 324 * MIB)], "{how}");
        }
        assert_eq!(bench.charged("a"), (700 * MIB, 700 * MIB), "{how}");
        for importer in importers {
            importer.finish();
        }
        exporter.finish();
        assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"])[2], "0", "{how}");
    }
}

#[test]
fn what_a_dead_process_exported_stays_charged_until_the_last_importer_gives_it_back() {
    for how in ["ipc", "fd"] {
        let bench = bench();
        let (exporter, open) = exporter(&bench, how);
        let first = Holder::start(&mut bench.probe(&["init", "retain", &open, "hold", close(how), "hold"]));
        let second = bench.hold(&["init", "retain", &open]);
        exporter.kill();
        assert_eq!(bench.used(0), 600 * MIB, "{how}: the driver keeps it");
        assert_eq!(others(&bench), ["2", "0"], "{how}: two importers");
        // One closes it and lives on, the other dies with it.
        let mut first = first;
        first.step();
        assert_eq!(others(&bench), ["2", "0"], "{how}: one importer");
        second.kill();
        assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"])[2], "0", "{how}: none");
        first.finish();
        assert_eq!(bench.audit("a"), 0, "{how}");
    }
}

#[test]
fn what_nobody_imported_comes_back_with_its_exporters_death() {
    for how in ["ipc", "fd"] {
        let bench = bench();
        exporter(&bench, how).0.kill();
        assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"])[2], "0", "{how}");
    }
}
