//! Memory that one process exports and others import: it is charged once, to who exported it, and stays charged after
//! that one's death until the last importer gives it back.

use crate::support::{Bench, GIB, Holder, MIB};
use aliquot_sim_node::NodeSpec;

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
        "pool" => {
            let holder = bench.hold(&["init", "retain", "alloc:linear:100M", "poolexport:600M"]);
            let open = format!("poolimport:{}", holder.before[3]);
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
    // What came from a pool is freed like memory of one's own.
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
    for how in ["ipc", "fd", "pool"] {
        let bench = bench();
        let (exporter, open) = exporter(&bench, how);
        let first = Holder::start(&mut bench.probe(&["init", "retain", &open, "hold", close(how), "hold"]));
        let second = bench.hold(&["init", "retain", &open]);
        exporter.kill();
        bench.await_used(0, 600 * MIB, &format!("{how}: the driver keeps it"));
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
    for how in ["ipc", "fd", "pool"] {
        let bench = bench();
        exporter(&bench, how).0.kill();
        assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"])[2], "0", "{how}");
    }
}

/// As [`exporter`]; it frees the memory at its first hold, and takes all the rest behind its second.
fn freeing_exporter(bench: &Bench, how: &str) -> (Holder, String) {
    let rest = ["hold", "free", "hold", "alloc:linear:924M"];
    let script = match how {
        "ipc" => vec!["init", "retain", "alloc:linear:100M", "alloc:linear:600M", "ipcexport"],
        _ => vec!["init", "retain", "alloc:linear:100M", "fdexport:600M"],
    };
    let holder = Holder::start(&mut bench.probe(&[script, rest.to_vec()].concat()));
    let last = holder.before.last().unwrap();
    let open = if how == "ipc" { format!("ipcopen:{last}") } else { format!("fdimport:{last}:600M") };
    (holder, open)
}

#[test]
fn what_its_exporter_frees_stays_charged_until_the_last_importer_gives_it_back() {
    for how in ["ipc", "fd"] {
        let bench = bench();
        let (mut exporter, open) = freeing_exporter(&bench, how);
        let importer =
            Holder::start(&mut bench.probe(&["init", "retain", &open, "hold", close(how), "hold"]));
        let mut importer = importer;
        exporter.step();
        assert_eq!(bench.used(0), 700 * MIB, "{how}: the driver keeps it");
        assert_eq!(bench.charged("a"), (700 * MIB, 700 * MIB), "{how}");
        assert_eq!(others(&bench), ["2", "2"], "{how}: an importer has it");
        importer.step();
        assert_eq!(bench.used(0), 100 * MIB, "{how}: nobody has it");
        // Its exporter has done nothing since.
        assert_eq!(bench.charged("a"), (100 * MIB, 100 * MIB), "{how}");
        assert_eq!(others(&bench), ["0", "2"], "{how}");
        assert_eq!(exporter.finish(), ["0"], "{how}: all but its own");
        importer.finish();
        assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"])[2], "0", "{how}");
        assert_eq!(bench.audit("a"), 0, "{how}");
    }
}

#[test]
fn what_nobody_imports_comes_back_when_its_exporter_frees_it() {
    for how in ["ipc", "fd"] {
        let bench = bench();
        let (mut exporter, _) = freeing_exporter(&bench, how);
        exporter.step();
        assert_eq!(bench.charged("a"), (100 * MIB, 100 * MIB), "{how}");
        exporter.finish();
    }
}

#[test]
fn what_was_freed_and_imported_comes_back_when_both_are_killed() {
    for how in ["ipc", "fd"] {
        let bench = bench();
        let (mut exporter, open) = freeing_exporter(&bench, how);
        let importer = bench.hold(&["init", "retain", &open]);
        exporter.step();
        exporter.kill();
        assert_eq!(others(&bench), ["2", "0"], "{how}: an importer has it");
        importer.kill();
        assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"])[2], "0", "{how}");
    }
}

#[test]
fn what_was_freed_comes_back_from_a_killed_importer_while_its_exporter_is_idle() {
    for how in ["ipc", "fd"] {
        let bench = bench();
        let (mut exporter, open) = freeing_exporter(&bench, how);
        let importers = [0, 1].map(|_| bench.hold(&["init", "retain", &open]));
        exporter.step();
        let [first, second] = importers;
        first.kill();
        assert_eq!(others(&bench), ["2", "2"], "{how}: one has it");
        second.kill();
        assert_eq!(others(&bench), ["0", "2"], "{how}: nobody has it");
        assert_eq!(exporter.finish(), ["0"], "{how}: all but its own");
    }
}

#[test]
fn what_was_freed_stays_charged_once_whatever_its_exporter_does() {
    for how in ["ipc", "fd"] {
        // Its context is measured meanwhile, where NVML shows it.
        let bench = Bench::shown(["H100-80"]).driver("context_mib=0");
        bench.share("a", 0, GIB);
        let rest = ["hold", "free", "sleep:600", "info", "alloc:linear:300M", "free", "hold"];
        let script = match how {
            "ipc" => vec!["init", "retain", "alloc:linear:100M", "alloc:linear:600M", "ipcexport"],
            _ => vec!["init", "retain", "alloc:linear:100M", "fdexport:600M"],
        };
        let mut exporter = Holder::start(&mut bench.probe(&[script, rest.to_vec()].concat()));
        let last = exporter.before.last().unwrap();
        let open = if how == "ipc" { format!("ipcopen:{last}") } else { format!("fdimport:{last}:600M") };
        let importer = bench.hold(&["init", "retain", &open]);
        exporter.step();
        assert_eq!(bench.charged("a"), (700 * MIB, 700 * MIB), "{how}");
        // It dies: nothing of it is kept twice.
        exporter.kill();
        assert_eq!(others(&bench), ["2", "0"], "{how}");
        importer.kill();
        assert_eq!(bench.run(&["init", "retain", "alloc:linear:1G"])[2], "0", "{how}");
        assert_eq!(bench.audit("a"), 0, "{how}");
    }
}

#[test]
fn what_a_killed_importer_had_stays_charged_until_the_driver_has_freed_it() {
    for (how, frees) in [("ipc", true), ("fd", true), ("ipc", false), ("fd", false)] {
        let spec = NodeSpec { reap_delay_ms: 1000, ..NodeSpec::new(["H100-80"]) };
        let bench = Bench::with(spec);
        bench.share("a", 0, GIB);
        let (mut exporter, open) = freeing_exporter(&bench, how);
        let importer = bench.hold(&["init", "retain", &open]);
        // Somebody who is there already, so that nothing of the driver's delay is over when he asks.
        let mut other =
            Holder::start(&mut bench.probe(&["init", "retain", "hold", "alloc:linear:600M", "hold"]));
        if frees {
            exporter.step();
        } else {
            exporter.kill();
            bench.await_used(0, 600 * MIB, how);
            exporter = bench.hold(&["init", "retain", "alloc:linear:100M", "hold"]);
        }
        importer.kill();
        other.step();
        assert!(bench.used(0) <= GIB, "{how}, {frees}: {} MiB are in use", bench.used(0) / MIB);
        assert_eq!(bench.charged("a"), (700 * MIB, 700 * MIB), "{how}, {frees}");
        assert_eq!(other.finish(), [] as [&str; 0], "{how}, {frees}");
        exporter.finish();
    }
}

#[test]
fn what_goes_with_its_exporters_context_stays_charged_until_the_last_importer_gives_it_back() {
    let bench = bench();
    let script = ["init", "ctx", "alloc:linear:600M", "ipcexport", "hold", "destroy", "hold"];
    let mut exporter = Holder::start(&mut bench.probe(&script));
    let open = format!("ipcopen:{}", exporter.before[3]);
    let mut importer =
        Holder::start(&mut bench.probe(&["init", "retain", &open, "hold", "ipcclose", "hold"]));
    exporter.step();
    assert_eq!(bench.used(0), 600 * MIB, "the driver keeps it");
    assert_eq!(bench.charged("a"), (600 * MIB, 600 * MIB));
    importer.step();
    assert_eq!(bench.charged("a"), (0, 0));
    importer.finish();
    exporter.finish();
}
