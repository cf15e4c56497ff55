//! What the kernel's lists say of the driver's devices.

use super::boards;
use super::line::Line;
use aliquot_kubelet_plugin::driver::monitor_capability;
use aliquot_model::GpuInfo;
use aliquot_nvml::caps::MigMinors;
use aliquot_sim_node::{MAX_CIS, MAX_GIS, ci_capability_minor, gi_capability_minor, has_frontend};
use std::path::Path;

const OF: &str = "driver";

/// All comparisons under a proc root.
pub(crate) fn lines(proc_root: &Path, driver_version: &str, gpus: &[GpuInfo]) -> Vec<Line> {
    let mut lines = match std::fs::read_to_string(proc_root.join("devices")) {
        Ok(text) => devices(&text, driver_version),
        Err(error) => {
            let reason = format!("{} cannot be read: {error}", proc_root.join("devices").display());
            vec![Line::unknown(OF, "the kernel lists the driver's devices", "yes", reason)]
        }
    };
    lines.extend(gpus.iter().filter_map(|gpu| device_minor(proc_root, gpu)));
    lines.extend(minors(proc_root, gpus));
    lines
}

/// Names in `/proc/devices`. Numbers are nobody's assumption: they are read at each prepare.
fn devices(text: &str, driver_version: &str) -> Vec<Line> {
    let characters = text.lines().take_while(|line| !line.starts_with("Block"));
    let names: Vec<&str> = characters.filter_map(|line| line.split_whitespace().nth(1)).collect();
    let gpus = if has_frontend(driver_version) { "nvidia-frontend" } else { "nvidia" };
    let seen: Vec<&str> =
        ["nvidia", "nvidia-frontend"].into_iter().filter(|name| names.contains(name)).collect();
    let mut lines =
        vec![Line::compare(OF, "the kernel lists GPUs of this driver as", gpus, seen.join(" and "))];
    for (name, without) in [
        ("nvidia-uvm", "no CUDA program starts without it: run `nvidia-modprobe -c 0 -u`"),
        ("nvidia-caps", "no partition can be opened without it"),
    ] {
        let there = if names.contains(&name) { "there" } else { "not there" };
        lines.push(
            Line::compare(OF, &format!("{name} in the kernel's list"), "there", there).or_else(without),
        );
    }
    lines
}

/// The driver's own word on a GPU's minor number.
fn device_minor(proc_root: &Path, gpu: &GpuInfo) -> Option<Line> {
    let of = boards::name(gpu);
    let what = "NVML's minor number is that of the driver's information file";
    let address = gpu.pci_bus_id.as_deref()?;
    let path = proc_root.join("driver/nvidia/gpus").join(address).join("information");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => {
            return Some(Line::unknown(&of, what, gpu.minor, format!("{}: {error}", path.display())));
        }
    };
    let said = text.lines().find_map(|line| line.strip_prefix("Device Minor:")).map(str::trim);
    Some(match said {
        Some(said) => Line::compare(&of, what, gpu.minor, said),
        None => Line::unknown(&of, what, gpu.minor, format!("{} has no Device Minor", path.display())),
    })
}

/// The layout of `mig-minors`.
fn minors(proc_root: &Path, gpus: &[GpuInfo]) -> Vec<Line> {
    let what = "minor numbers of capabilities in mig-minors";
    let path = MigMinors::path(proc_root);
    let minors = match (path.exists(), MigMinors::read(proc_root)) {
        (true, Ok(minors)) => minors,
        (true, Err(error)) => {
            return vec![Line::unknown(OF, what, "listed", format!("{}: {error}", path.display()))];
        }
        (false, _) => {
            return vec![Line::unknown(OF, what, "listed", format!("{} is not there", path.display()))];
        }
    };
    let monitor = monitor_capability(proc_root).map_or_else(|| "none".to_owned(), |minor| minor.to_string());
    let mut lines = vec![Line::compare(OF, "minor number of the capability `monitor`", 2, monitor)];
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    for gpu in gpus {
        let (mut listed, mut other) = (0, Vec::new());
        for gi in 0..number(MAX_GIS) {
            let of_gi = (gi_capability_minor(gpu.minor, gi), minors.gpu_instance(gpu.minor, gi));
            let of_cis = (0..number(MAX_CIS)).map(|ci| {
                (ci_capability_minor(gpu.minor, gi, ci), minors.compute_instance(gpu.minor, gi, ci))
            });
            for (assumed, seen) in std::iter::once(of_gi).chain(of_cis) {
                listed += usize::from(seen.is_some());
                if seen.is_some_and(|seen| seen != assumed) {
                    other.push(format!("{assumed} is {}", seen.unwrap_or(0)));
                }
            }
        }
        other.truncate(3);
        let first = gi_capability_minor(gpu.minor, 0);
        let assumed = format!("{} from {first} on", MAX_GIS * (MAX_CIS + 1));
        let machine = if other.is_empty() {
            format!("{listed} from {first} on")
        } else {
            format!("{listed}, and {}", other.join(", "))
        };
        lines.push(Line::compare(&boards::name(gpu), what, assumed, machine));
    }
    lines
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]
mod tests {
    use super::super::line::Verdict;
    use super::*;

    #[test]
    fn a_module_that_is_not_loaded_differs_with_what_to_do() {
        let text = "Character devices:\n195 nvidia\n195 nvidiactl\n236 nvidia-caps\n\nBlock devices:\n508 nvidia-uvm\n";
        let lines = devices(text, "580.95.05");
        assert_eq!(
            lines.iter().map(|line| line.verdict).collect::<Vec<_>>(),
            [Verdict::Held, Verdict::Differs, Verdict::Held]
        );
        assert!(lines[1].reason.contains("nvidia-modprobe"), "{}", lines[1]);
    }

    #[test]
    fn an_old_driver_is_expected_under_its_old_name() {
        let text = "Character devices:\n195 nvidia-frontend\n";
        assert_eq!(devices(text, "535.104.05")[0].verdict, Verdict::Held);
        assert_eq!(devices(text, "580.95.05")[0].verdict, Verdict::Differs);
    }
}
