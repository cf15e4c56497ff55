//! What NVML says of a GPU, against the simulator's table of its board. Pure.

use super::line::Line;
use aliquot_model::{GpuInfo, MigCapability, MigProfile};
use aliquot_nvml::MemoryUse;
use aliquot_sim_node::{BOARDS, Board, GiProfile};

const MIB: u64 = 1 << 20;
/// What is known of boards is in this file.
const TABLES: &str = "simulator/node/src/tables.rs";

/// How a GPU is named in lines.
pub(crate) fn name(gpu: &GpuInfo) -> String {
    format!("GPU {} ({})", gpu.minor, gpu.product_name)
}

/// The simulator's board of the same product.
pub(crate) fn board_of(gpu: &GpuInfo) -> Option<&'static Board> {
    BOARDS.iter().find(|board| board.product == gpu.product_name)
}

/// All comparisons of a GPU with its board.
pub(crate) fn lines(gpu: &GpuInfo, memory: Option<MemoryUse>) -> Vec<Line> {
    let of = name(gpu);
    let Some(board) = board_of(gpu) else {
        let keys: Vec<&str> = BOARDS.iter().map(|board| board.key).collect();
        let reason = format!("no board of this name; its row would go into {TABLES}");
        return vec![Line::unknown(&of, "the board has a table", keys.join(", "), reason)];
    };
    let mut lines = Vec::new();
    match memory {
        Some(memory) => {
            lines.push(Line::compare(&of, "memory in MiB", board.memory_mib, memory.total / MIB));
            let reserved = Line::compare(
                &of,
                "MiB that the driver keeps for itself",
                board.reserved_mib,
                memory.reserved / MIB,
            );
            lines.push(reserved.or_else("it may be another with another driver"));
        }
        None => {
            lines.push(Line::unknown(&of, "memory in MiB", board.memory_mib, "NVML does not tell the memory"))
        }
    }
    let (major, minor) = board.compute_capability;
    let (seen_major, seen_minor) = gpu.compute_capability;
    lines.extend([
        Line::compare(&of, "multiprocessors", board.multiprocessors, gpu.multiprocessors),
        Line::compare(
            &of,
            "compute capability",
            format!("{major}.{minor}"),
            format!("{seen_major}.{seen_minor}"),
        ),
        Line::compare(
            &of,
            "architecture",
            format!("{:?}", board.architecture),
            format!("{:?}", gpu.architecture),
        ),
        Line::compare(
            &of,
            "MIG",
            there(board.has_mig()),
            there(!matches!(gpu.mig, MigCapability::Unsupported)),
        ),
    ]);
    lines.extend(profiles(&of, board, gpu));
    lines
}

fn there(is_there: bool) -> &'static str {
    if is_there { "there" } else { "not there" }
}

fn profiles(of: &str, board: &Board, gpu: &GpuInfo) -> Vec<Line> {
    let mut lines = Vec::new();
    for assumed in board.profiles {
        let what = format!("MIG profile {}", assumed.id);
        let machine = gpu.profile(assumed.id).map_or_else(|| "none of this id".to_owned(), of_machine);
        lines.push(Line::compare(of, &what, of_table(assumed), machine));
    }
    let unknown = gpu.profiles().iter().filter(|profile| board.profile_by_id(profile.id).is_none());
    lines.extend(unknown.map(|profile| {
        let what = format!("MIG profile {}", profile.id);
        let line = Line::compare(of, &what, "none of this id", of_machine(profile));
        line.or_else(&format!("its row goes into {TABLES}"))
    }));
    lines
}

fn of_table(profile: &GiProfile) -> String {
    let e = profile.engines;
    shown(
        (profile.name, profile.nvml),
        [profile.memory_mib, profile.multiprocessors.into(), profile.slices.into(), profile.max.into()],
        profile.starts,
        profile.size,
        [e.copy, e.decoder, e.encoder, e.jpeg, e.ofa],
    )
}

fn of_machine(profile: &MigProfile) -> String {
    let e = profile.engines;
    let starts: Vec<u32> = profile.placements.iter().map(|placement| placement.start).collect();
    shown(
        (profile.name.as_str(), profile.nvml_profile),
        [
            profile.memory_bytes / MIB,
            profile.multiprocessors.into(),
            profile.compute_slices.into(),
            profile.max_instances.into(),
        ],
        &starts,
        profile.memory_slices(),
        [e.copy, e.decoders, e.encoders, e.jpeg, e.ofa],
    )
}

/// A profile in words, so that what differs can be seen.
fn shown(
    (name, nvml): (&str, u32),
    figures: [u64; 4],
    starts: &[u32],
    size: u32,
    engines: [u32; 5],
) -> String {
    let [memory, multiprocessors, slices, most] = figures;
    let [copy, decoders, encoders, jpeg, ofa] = engines;
    format!(
        "{name}, NVML's number {nvml}, {memory} MiB, {multiprocessors} multiprocessors, {slices} compute slices, \
         at most {most}, {size} memory slices from {starts:?}, engines: copy {copy}, NVDEC {decoders}, \
         NVENC {encoders}, JPEG {jpeg}, OFA {ofa}"
    )
}

/// Whether a switch of the MIG mode waits for a reset, where a partition was made without one (`made`).
pub(crate) fn mode_change(gpu: &GpuInfo, made: Option<bool>) -> Option<Line> {
    let board = board_of(gpu).filter(|board| board.has_mig())?;
    let (of, what) = (name(gpu), "a change of the MIG mode");
    let said = |reset| if reset { "waits for a reset" } else { "is in force at once" };
    let assumed = said(board.mig_needs_reset);
    Some(match made {
        Some(waits) => Line::compare(&of, what, assumed, said(waits)),
        None => Line::unknown(&of, what, assumed, "only a switch shows it (--change-mig), and none was made"),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]
mod tests {
    use super::super::line::Verdict;
    use super::*;
    use aliquot_nvml::Gpus;
    use aliquot_nvml::fake::{FakeGpus, h100_80};

    fn h100() -> GpuInfo {
        let mut gpu = FakeGpus::new([h100_80(0)]).inventory().unwrap().gpus.remove(0);
        "NVIDIA H100 80GB HBM3".clone_into(&mut gpu.product_name);
        gpu
    }

    fn line<'a>(lines: &'a [Line], what: &str) -> &'a Line {
        lines.iter().find(|line| line.assumption == what).unwrap()
    }

    #[test]
    fn a_board_that_nobody_knows_is_unknown_and_does_not_differ() {
        let gpu = GpuInfo { product_name: "NVIDIA H900".into(), ..h100() };
        let lines = lines(&gpu, None);
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].verdict, Verdict::Unknown);
        assert!(lines[0].reason.contains("tables.rs"), "{}", lines[0]);
    }

    #[test]
    fn a_profile_that_is_cut_another_way_differs_and_both_sides_are_told() {
        let mut gpu = h100();
        let before = lines(&gpu, None);
        let MigCapability::Supported { profiles, .. } = &mut gpu.mig else { unreachable!() };
        let known = profiles.iter_mut().find(|profile| profile.id == 19).unwrap();
        known.placements.pop();
        let mut other = known.clone();
        other.id = 77;
        profiles.push(other);
        let after = lines(&gpu, None);
        assert_ne!(line(&before, "MIG profile 19").machine, line(&after, "MIG profile 19").machine);
        let line_19 = line(&after, "MIG profile 19");
        assert_eq!(line_19.verdict, Verdict::Differs);
        assert!(line_19.assumed.contains("[0, 1, 2, 3, 4, 5, 6]"), "{line_19}");
        assert!(line_19.machine.contains("[0, 1, 2, 3, 4, 5]"), "{line_19}");
        assert_eq!(line(&after, "MIG profile 77").verdict, Verdict::Differs);
    }

    #[test]
    fn whether_a_mode_change_waits_is_unknown_until_one_was_made() {
        assert_eq!(mode_change(&h100(), None).unwrap().verdict, Verdict::Unknown);
        assert_eq!(mode_change(&h100(), Some(false)).unwrap().verdict, Verdict::Held);
        assert_eq!(mode_change(&h100(), Some(true)).unwrap().verdict, Verdict::Differs);
    }
}
