//! The closing report, for a person: what failed first, then what was learnt, then what was not tried. Pure.

use crate::node::line::{Line, Verdict};
use crate::report::{Case, Outcome, Report};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Facts by their names in the file, in words. One that is not here is told by its name.
const WORDS: [(&str, &str); 12] = [
    ("nvml_pids", "under which pids NVML lists processes"),
    ("resolver", "whether cuGetProcAddress answers with the addresses of dlsym"),
    ("context_bytes", "bytes that a first context takes"),
    ("event_of_1ms_kernel", "what events show of a kernel of 1000 us"),
    ("time_slices", "how a busy process interrupts short kernels"),
    ("release_after_sigkill", "how long a killed process's memory stays in use"),
    ("exported_memory", "what becomes of exported memory without its exporter"),
    ("fabric", "NVLink fabric"),
    ("persistence", "persistence mode"),
    ("mps", "NVIDIA's MPS control daemon"),
    ("mig_profiles", "nvidia-smi mig -lgip"),
    ("mig_placements", "nvidia-smi mig -lgipp"),
];
/// Longest text of a value; the file has all of it.
const WIDTH: usize = 300;

/// The report. `path` is the file that has everything.
pub(crate) fn text(report: &Report, path: &str, seconds: f64) -> String {
    let mut out = String::new();
    heading(&mut out, report);
    promises(&mut out, report);
    assumptions(&mut out, report);
    facts(&mut out, report);
    measured(&mut out, &report.cases);
    let _ = writeln!(out, "\nAll of it is in {path}; the run took {seconds:.0} s.");
    let _ = writeln!(
        out,
        "{}",
        match (report.holds(), report.complete) {
            (true, true) => "RESULT: no promise failed.",
            (true, false) => "RESULT: the run was cut off; no promise had failed.",
            (false, _) => "RESULT: promises failed; they are named above.",
        }
    );
    out
}

fn heading(out: &mut String, report: &Report) {
    let of_device = |field: &str| report.device.get(field).and_then(Value::as_str).unwrap_or("unknown");
    let kernel = report.machine.get("kernel").and_then(Value::as_str).unwrap_or("unknown");
    let _ = writeln!(out, "\n==== {}, driver {}, kernel {kernel}", of_device("name"), of_device("driver"));
    if report.simulated {
        let _ = writeln!(out, "The driver is the SIMULATED one: figures say nothing about hardware.");
    }
    match &report.node {
        Some(node) if node.runtime.is_empty() => {
            let _ = writeln!(out, "No container could be started.");
        }
        Some(node) => {
            let _ = writeln!(out, "Containers were started by: {}.", node.runtime);
        }
        None => {}
    }
}

fn promises(out: &mut String, report: &Report) {
    let of_agent = report.promises().map(|p| (p.outcome, p.name.clone(), p.reason.clone()));
    let of_cases =
        report.cases.iter().map(|c| (c.outcome, format!("{} ({})", c.name, c.mode), c.reason.clone()));
    let all: Vec<_> = of_agent.chain(of_cases).collect();
    let count = |outcome| all.iter().filter(|one| one.0 == outcome).count();
    let _ = writeln!(
        out,
        "\n== Promises: {} passed, {} failed, {} not tried",
        count(Outcome::Passed),
        count(Outcome::Failed),
        count(Outcome::Skipped)
    );
    for (_, name, reason) in all.iter().filter(|one| one.0 == Outcome::Failed) {
        let _ = writeln!(out, "  FAILED   {name}: {reason}");
    }
    // One reason stands for many, and both ways to run a case for the case.
    let mut not_tried: BTreeMap<&str, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
    for promise in report.promises().filter(|promise| promise.outcome == Outcome::Skipped) {
        not_tried.entry(&promise.reason).or_default().entry(&promise.name).or_default();
    }
    for case in report.cases.iter().filter(|case| case.outcome == Outcome::Skipped) {
        not_tried.entry(&case.reason).or_default().entry(&case.name).or_default().push(case.mode);
    }
    for (reason, names) in not_tried {
        let _ = writeln!(out, "  not tried, as {reason}:");
        for (name, modes) in names {
            let mode = match modes.as_slice() {
                [one] => format!(" ({one})"),
                _ => String::new(),
            };
            let _ = writeln!(out, "    {name}{mode}");
        }
    }
}

fn assumptions(out: &mut String, report: &Report) {
    let all: Vec<&Line> = report.assumptions().collect();
    let of = |verdict| all.iter().filter(move |line| line.verdict == verdict);
    let _ = writeln!(
        out,
        "\n== Assumptions of the simulator: {} held, {} differ, {} unknown",
        of(Verdict::Held).count(),
        of(Verdict::Differs).count(),
        of(Verdict::Unknown).count()
    );
    for line in of(Verdict::Differs).chain(of(Verdict::Unknown)) {
        let _ = writeln!(out, "  {line}");
    }
}

fn facts(out: &mut String, report: &Report) {
    if report.facts.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n== Facts for the simulator");
    for (name, value) in &report.facts {
        let words = WORDS.iter().find(|(fact, _)| fact == name).map_or(name.as_str(), |(_, words)| words);
        // Tables of many lines are for the file.
        let table = value.get("output").and_then(Value::as_str);
        let said = table.map_or_else(|| brief(value), |text| format!("{} lines", text.lines().count()));
        let _ = writeln!(out, "  {words}: {said}");
    }
}

fn measured(out: &mut String, cases: &[Case]) {
    let all: Vec<&Case> = cases.iter().filter(|case| case.outcome == Outcome::Measured).collect();
    if !all.is_empty() {
        let _ = writeln!(out, "\n== Measured, without a verdict");
    }
    for case in all {
        let _ = writeln!(out, "  {} ({}): {}", case.name, case.mode, brief(&case.figures));
    }
}

/// A value in a line, for reading.
fn brief(value: &Value) -> String {
    let mut text = shown(value);
    if let Some((end, _)) = text.char_indices().nth(WIDTH) {
        text.truncate(end);
        text.push('…');
    }
    text
}

fn shown(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let field = |(name, value): (&String, &Value)| match value {
                Value::Object(_) => format!("{} ({})", name.replace('_', " "), shown(value)),
                _ => format!("{} {}", name.replace('_', " "), shown(value)),
            };
            map.iter().map(field).collect::<Vec<_>>().join(", ")
        }
        Value::Array(all) => format!("[{}]", all.iter().map(shown).collect::<Vec<_>>().join(" ")),
        Value::Number(number) if number.is_f64() => format!("{:.1}", number.as_f64().unwrap_or_default()),
        Value::String(text) => text.clone(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Null => "nothing".to_owned(),
        Value::Number(_) => value.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;
    use crate::node::line::Promise;
    use serde_json::json;

    fn case(name: &str, outcome: Outcome, reason: &str) -> Case {
        Case {
            name: name.to_owned(),
            mode: "bare",
            outcome,
            reason: reason.to_owned(),
            figures: json!({"got": {"kernels of 100 us": 30.125}, "goal": "within 3 points"}),
            seconds: 1.0,
        }
    }

    fn report(cases: Vec<Case>) -> Report {
        Report {
            date: String::new(),
            aliquot: "0",
            complete: true,
            simulated: true,
            device: json!({"name": "NVIDIA H100", "driver": "580.95.05"}),
            machine: json!({"kernel": "6.1"}),
            facts: json!({"context_bytes": {"of_gpu": 5, "of_process": null}, "new_fact": true})
                .as_object()
                .unwrap()
                .clone(),
            node: None,
            cuda: vec![Line::compare("CUDA", "launches", 1024, 512)],
            unchanged: Some(Promise::of("modes are as they were", true, "", Value::Null)),
            cases,
        }
    }

    #[test]
    fn what_failed_comes_before_what_was_not_tried_and_one_reason_is_said_once() {
        let cases = vec![
            case("CuPy", Outcome::Skipped, "there is no CuPy"),
            case("CuPy", Outcome::Skipped, "there is no CuPy"),
            case("quota", Outcome::Failed, "it was passed"),
            case("CuPy again", Outcome::Skipped, "there is no CuPy"),
            case("accuracy", Outcome::Measured, ""),
        ];
        let said = text(&report(cases), "results.json", 12.4);
        let place = |what: &str| said.find(what).unwrap_or_else(|| panic!("{what}: {said}"));
        assert!(place("SIMULATED") < place("1 passed, 1 failed, 3 not tried"), "{said}");
        assert!(
            place("FAILED   quota (bare): it was passed") < place("not tried, as there is no CuPy"),
            "{said}"
        );
        assert_eq!(said.matches("there is no CuPy").count(), 1, "{said}");
        assert!(said.contains("    CuPy\n    CuPy again (bare)\n"), "{said}");
        place("differs   CUDA: launches: the simulator has 1024, the machine 512");
        place("bytes that a first context takes: of gpu 5, of process nothing");
        place("  new_fact: yes\n");
        place("accuracy (bare): goal within 3 points, got (kernels of 100 us 30.1)");
        assert!(said.ends_with("RESULT: promises failed; they are named above.\n"), "{said}");
    }

    #[test]
    fn a_run_that_was_cut_off_says_so() {
        let mut cut = report(Vec::new());
        assert!(text(&cut, "f", 1.0).ends_with("RESULT: no promise failed.\n"));
        cut.complete = false;
        assert!(text(&cut, "f", 1.0).contains("the run was cut off"));
    }
}
