//! Processes on several GPUs: each launch pays where it runs, and short ones go by without a lock; and a quota of a GPU
//! that the container does not have.

use crate::support::{Bench, GIB, answers, built};
use aliquot_quota::QuotaFile;
use std::collections::BTreeMap;

/// Two GPUs, with shares of so many percent (0: no share).
fn bench(percent: [u8; 2]) -> Bench {
    let bench = Bench::whole(["H100-80", "H100-80"]);
    for (gpu, percent) in percent.into_iter().enumerate().filter(|(_, percent)| *percent > 0) {
        let id = ["a", "b"][gpu];
        bench.share(id, gpu, GIB);
        bench.write_quota(id, &QuotaFile { cores_percent: percent, ..bench.quota(id) });
    }
    bench
}

/// Percent of each GPU that a program had, of three runs at the most the one that a busy machine delayed least.
fn had(bench: &Bench, arguments: &[&str]) -> [f64; 2] {
    let least = |had: &[f64; 2]| had[0].min(had[1]);
    let mut best = once(bench, arguments);
    for _ in 0..2 {
        if least(&best) > 5.0 {
            break;
        }
        let next = once(bench, arguments);
        best = if least(&next) > least(&best) { next } else { best };
    }
    best
}

/// The same of a single run.
fn once(bench: &Bench, arguments: &[&str]) -> [f64; 2] {
    let mut command = bench.command(&built().probe.with_file_name("devices_probe"));
    command.args(arguments);
    let percent = |line: &String| {
        let numbers: Vec<u64> = line.split(' ').map(|n| n.parse().unwrap()).collect();
        100.0 * numbers[2] as f64 / (numbers[1] - numbers[0]) as f64
    };
    let answers = answers(command);
    let had = [percent(&answers[0]), percent(&answers[1])];
    println!("{arguments:?}: {had:.1?} %");
    had
}

/// A busy machine's delays can only lower a figure.
fn is_about(had: f64, share: f64) {
    assert!((share * 0.1..share + 1.5).contains(&had), "{had} instead of {share} %");
}

#[test]
fn each_device_has_its_own_limit_of_time() {
    for micros in ["1000", "100"] {
        let [first, second] = had(&bench([20, 60]), &["threads", micros, "3000"]);
        is_about(first, 20.0);
        is_about(second, 60.0);
    }
}

#[test]
fn a_kernel_of_all_devices_pays_where_it_runs() {
    // In turn: neither gets more launches than the one with less.
    for how in ["current", "streams"] {
        for (percent, micros) in [([30, 90], "1000"), ([90, 30], "1000"), ([90, 30], "100")] {
            for had in had(&bench(percent), &[how, micros, "2000"]) {
                is_about(had, 30.0);
            }
        }
    }
}

#[test]
fn a_device_without_a_share_limits_nobody_and_pays_for_nobody() {
    for how in ["current", "streams"] {
        for percent in [[0, 30], [30, 0]] {
            for had in had(&bench(percent), &[how, "1000", "2000"]) {
                is_about(had, 30.0);
            }
        }
    }
}

#[test]
fn a_short_launch_asks_the_driver_once_where_it_goes() {
    for how in ["current", "streams"] {
        let bench = bench([90, 90]);
        let log = bench.folder.path().join("calls");
        let mut command = bench.command(&built().probe.with_file_name("devices_probe"));
        answers_of(command.args([how, "5", "1000"]).env("ALIQUOT_SIM_CUDA_LOG", &log));
        let text = std::fs::read_to_string(&log).unwrap();
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for line in text.lines() {
            *counts.entry(line.split([' ', '(']).nth(2).unwrap()).or_default() += 1;
        }
        let of = |names: &[&str]| names.iter().filter_map(|name| counts.get(name)).sum::<usize>();
        let launches = of(&["cuLaunchKernel"]);
        assert!(launches > 200, "{counts:?}");
        let asked = of(&["cuCtxGetDevice", "cuStreamGetCtx"]);
        // What goes by the learner makes two of these calls at least, and asks once more.
        let exchanges = of(&["cuThreadExchangeStreamCaptureMode"]);
        assert!(asked >= launches / 2 && asked <= launches + exchanges / 2, "{how}: {counts:?}");
        // On a busy machine more launches are learnt from than on another, but never all.
        assert!(exchanges / 2 < launches, "{how}: {counts:?}");
    }
}

/// What cuInit answers in a container with the device nodes of some GPUs, and what is said.
fn starts(bench: &Bench, gpus: &[usize], chosen: Option<&str>) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let dev = folder.path().join("dev");
    std::fs::create_dir(&dev).unwrap();
    let minors = gpus.iter().map(|gpu| format!("nvidia{}", bench.node.gpus()[*gpu].minor));
    for name in ["nvidiactl".to_owned(), "nvidia-uvm".to_owned()].into_iter().chain(minors) {
        std::fs::write(dev.join(name), []).unwrap();
    }
    let mut command = bench.probe(&["init"]);
    command.env("ALIQUOT_SIM_ROOT", folder.path());
    command.envs(chosen.map(|chosen| ("CUDA_VISIBLE_DEVICES", chosen)));
    let output = command.output().unwrap();
    (crate::support::values(&output).remove(0), String::from_utf8_lossy(&output.stderr).into_owned())
}

const REFUSED: &str = "802";

/// A GPU that the container was not given, of this node or of none.
#[test]
fn a_quota_of_a_gpu_that_the_container_does_not_have_lets_no_program_start() {
    for elsewhere in [true, false] {
        let bench = Bench::whole(["H100-80", "H100-80"]);
        let other = "GPU-00000000-1111-2222-3333-444444444444".to_owned();
        let named = if elsewhere { bench.node.gpus()[0].uuid.clone() } else { other };
        bench.share_of("a", &named, 0, GIB);
        let (code, said) = starts(&bench, &[1], None);
        assert_eq!(code, REFUSED, "{said}");
        for wanted in [named.as_str(), &bench.node.gpus()[1].uuid[4..], "delete the pod"] {
            assert!(said.contains(wanted), "{wanted}: {said}");
        }
        // Whatever the program chooses, and whatever else the container has.
        assert_eq!(starts(&bench, &[1], Some("0")).0, REFUSED);
        bench.share("b", 1, GIB);
        if !elsewhere {
            assert_eq!(starts(&bench, &[0, 1], None).0, REFUSED);
            assert_eq!(starts(&bench, &[0, 1], Some("0")).0, REFUSED);
        }
        // What the program sees is limited.
        assert_eq!(starts(&bench, &[0, 1], Some("1")).0, "0");
    }
}

#[test]
fn a_program_may_choose_among_the_devices_of_its_container() {
    let bench = bench([50, 0]);
    for chosen in [None, Some("0"), Some("1"), Some("1,0"), Some(bench.node.gpus()[1].uuid.as_str())] {
        let (code, said) = starts(&bench, &[0, 1], chosen);
        assert_eq!(code, "0", "{chosen:?}: {said}");
    }
}

fn answers_of(command: &mut std::process::Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
