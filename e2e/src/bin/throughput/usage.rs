//! Processor time of the programs of the cluster: what is at work when something takes long.

use std::collections::BTreeMap;

/// Names as the kernel keeps them: their first 15 bytes.
const PROGRAMS: [&str; 7] = [
    "etcd",
    "kube-apiserver",
    "kube-controller",
    "kube-scheduler",
    "kubelet",
    "aliquot-control",
    "throughput",
];
/// Clock ticks in a second on every Linux that Rust supports.
const TICKS: f64 = 100.0;

/// Seconds so far, by program.
pub(crate) fn so_far() -> BTreeMap<String, f64> {
    let mut used = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((name, rest)) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')')) else {
            continue;
        };
        if !PROGRAMS.contains(&name) {
            continue;
        }
        // After the name come state, ten other fields, then user and system time.
        let ticks: u64 =
            rest.split_whitespace().skip(11).take(2).filter_map(|text| text.parse::<u64>().ok()).sum();
        #[expect(clippy::cast_precision_loss, reason = "ticks of a short life")]
        let seconds = ticks as f64 / TICKS;
        *used.entry(name.to_owned()).or_default() += seconds;
    }
    used
}

/// Seconds since.
pub(crate) fn since(before: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let mut used = so_far();
    for (program, seconds) in &mut used {
        *seconds -= before.get(program).copied().unwrap_or_default();
    }
    used
}
