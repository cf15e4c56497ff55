//! What NVML says of a GPU beside what the node agent reads of it, against the simulator's table and its own habits.
//! Only reads.

use super::boards::{board_of, name};
use super::line::Line;
use crate::driver::{Board, NOT_SUPPORTED, at};
use aliquot_model::GpuInfo;
use aliquot_sim_node::events;

/// Figures of the table: what, NVML's function, what that takes after the GPU, and the table's column.
type Figure = (&'static str, &'static str, Option<u64>, fn(&aliquot_sim_node::Board) -> u64);
const FIGURES: [Figure; 7] = [
    ("default power limit in mW", "nvmlDeviceGetPowerManagementDefaultLimit", None, |b| {
        b.power_limit_mw.into()
    }),
    ("highest clock of multiprocessors in MHz", "nvmlDeviceGetMaxClockInfo", Some(1), |b| {
        b.sm_clock_mhz.into()
    }),
    ("highest clock of memory in MHz", "nvmlDeviceGetMaxClockInfo", Some(2), |b| b.memory_clock_mhz.into()),
    ("width of the memory's bus in bits", "nvmlDeviceGetMemoryBusWidth", None, |b| b.memory_bus_width.into()),
    ("generation of PCIe", "nvmlDeviceGetMaxPcieLinkGeneration", None, |b| b.pcie.0.into()),
    ("width of PCIe", "nvmlDeviceGetMaxPcieLinkWidth", None, |b| b.pcie.1.into()),
    ("brand by NVML's number", "nvmlDeviceGetBrand", None, |b| b.brand.into()),
];

/// The GPU among what was read of all, or why it is not there.
pub(super) fn board<'a>(all: &'a Result<Vec<Board>, String>, gpu: &GpuInfo) -> Result<&'a Board, String> {
    let found = all.as_ref().map_err(Clone::clone)?.iter().find(|board| board.uuid() == gpu.uuid.as_str());
    found.ok_or_else(|| format!("NVML listed no GPU {} when it was asked again", gpu.uuid))
}

/// What stands for all comparisons of a GPU of which nothing could be read.
pub(super) fn untold(gpu: &GpuInfo, reason: String) -> Line {
    let what = "power limit, clocks, memory bus, PCIe, BAR1, events, NUMA node and reserved memory";
    Line::unknown(&name(gpu), what, "as in its table", reason)
}

/// All comparisons of a GPU.
pub(super) fn lines(gpu: &GpuInfo, board: &Board) -> Vec<Line> {
    let of = name(gpu);
    let mut lines = Vec::new();
    if let Some(table) = board_of(gpu) {
        for (what, symbol, kind, column) in FIGURES {
            let mut seen = 0_u64;
            let words: Vec<u64> =
                std::iter::once(board.device).chain(kind).chain(std::iter::once(at(&mut seen))).collect();
            let code = board.nvml.call(symbol, &words);
            lines.push(told(&of, what, column(table), symbol, code, seen));
        }
        lines.extend(pci(&of, table, board));
    }
    lines.push(bar1(&of, gpu, board));
    let mut types = 0_u64;
    let code = board.nvml.call("nvmlDeviceGetSupportedEventTypes", &[board.device, at(&mut types)]);
    let what = "types of events that can be listened to, as bits";
    lines.push(told(&of, what, events::ACCEPTED, "nvmlDeviceGetSupportedEventTypes", code, types));
    let mut node = 0_u64;
    let code = board.nvml.call("nvmlDeviceGetNumaNodeId", &[board.device, at(&mut node)]);
    let what = "NVML's code for the NUMA node of a GPU whose memory is none";
    lines.push(match code {
        Ok(code) => Line::compare(&of, what, NOT_SUPPORTED, code),
        Err(error) => Line::unknown(&of, what, NOT_SUPPORTED, error.to_string()),
    });
    lines.push(reserved(&of, board));
    lines
}

/// A figure, or why NVML does not tell it.
fn told(of: &str, what: &str, assumed: u64, symbol: &str, code: anyhow::Result<i32>, seen: u64) -> Line {
    match code {
        Ok(0) => Line::compare(of, what, assumed, seen),
        Ok(code) => Line::unknown(of, what, assumed, format!("{symbol} failed with {code}")),
        Err(error) => Line::unknown(of, what, assumed, error.to_string()),
    }
}

fn pci(of: &str, table: &aliquot_sim_node::Board, board: &Board) -> Vec<Line> {
    const SYMBOL: &str = "nvmlDeviceGetPciInfo_v3";
    // nvmlPciInfo_t: 16 bytes of an address, three numbers, these two, and 32 bytes of an address.
    let mut info = [0_u32; 17];
    let code = board.nvml.call(SYMBOL, &[board.device, at(&mut info)]).map_err(|error| error.to_string());
    let [.., device, subsystem, _, _, _, _, _, _, _, _] = info;
    [("PCI device", table.pci_device_id, device), ("PCI subsystem", table.pci_subsystem_id, subsystem)]
        .map(|(what, assumed, seen)| {
            let assumed = format!("{assumed:#010x}");
            match &code {
                Ok(0) => Line::compare(of, what, assumed, format!("{seen:#010x}"))
                    .or_else("boards of one name come from several makers"),
                Ok(code) => Line::unknown(of, what, assumed, format!("{SYMBOL} failed with {code}")),
                Err(error) => Line::unknown(of, what, assumed, error.clone()),
            }
        })
        .to_vec()
}

/// The window through which the processor reaches the memory.
fn bar1(of: &str, gpu: &GpuInfo, board: &Board) -> Line {
    const SYMBOL: &str = "nvmlDeviceGetBAR1MemoryInfo";
    let mut info = [0_u64; 3];
    let code = board.nvml.call(SYMBOL, &[board.device, at(&mut info)]);
    let [total, ..] = info;
    let assumed = gpu.memory_bytes.next_power_of_two() >> 20;
    told(
        of,
        "MiB of the BAR1 window: the next power of two above the memory",
        assumed,
        SYMBOL,
        code,
        total >> 20,
    )
}

/// What older callers are told of memory in use.
fn reserved(of: &str, board: &Board) -> Line {
    let what = "memory in use, asked for in the old way, has what the driver keeps for itself";
    // total, free, used; and a version, total, reserved, free, used.
    let (mut old, mut new) = ([0_u64; 3], [0_u64; 5]);
    let [version, ..] = &mut new;
    *version = 2 << 24 | 40;
    let read = board
        .nvml
        .must("nvmlDeviceGetMemoryInfo", &[board.device, at(&mut old)])
        .and_then(|()| board.nvml.must("nvmlDeviceGetMemoryInfo_v2", &[board.device, at(&mut new)]));
    if let Err(error) = read {
        return Line::unknown(of, what, "yes", error.to_string());
    }
    let ([_, _, all], [_, _, reserved, _, used]) = (old, new);
    // Others may take or free memory between the two.
    let machine = if all.abs_diff(used + reserved) < reserved / 2 {
        "yes".to_owned()
    } else {
        format!("no: {all} in the old way, {used} and {reserved} in the new one")
    };
    Line::compare(of, what, "yes", machine)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::super::line::Verdict;
    use super::*;
    use aliquot_nvml::Gpus;
    use aliquot_nvml::fake::{FakeGpus, h100_80};

    #[test]
    fn a_gpu_of_which_nothing_could_be_read_is_unknown_with_the_reason() {
        let gpu = FakeGpus::new([h100_80(0)]).inventory().unwrap().gpus.remove(0);
        for (all, reason) in [
            (Err("nvmlInit_v2 failed with 999".to_owned()), "failed with 999"),
            (Ok(Vec::new()), "listed no GPU"),
        ] {
            let line = untold(&gpu, board(&all, &gpu).map(|_| ()).unwrap_err());
            assert_eq!(line.verdict, Verdict::Unknown);
            assert!(line.reason.contains(reason), "{line}");
        }
    }
}
