//! What was seen of a partition that was made twice, against what the simulator does. Pure.

use super::boards::{board_of, name};
use super::line::Line;
use aliquot_model::{GpuInfo, LiveMig};

/// A partition while it was prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Made {
    /// Whether the change of the MIG mode waits for a reset.
    pub(super) waits: bool,
    /// The GPU instances of the GPU.
    pub(super) live: Vec<LiveMig>,
    /// What CUDA calls it in a container; none if none was started.
    pub(super) cuda: Option<String>,
}

/// All comparisons; `unknown` where nothing was made.
pub(super) fn lines(gpu: &GpuInfo, made: &[Made]) -> Vec<Line> {
    let Some(board) = board_of(gpu).filter(|board| board.has_mig()) else { return Vec::new() };
    let of = name(gpu);
    let one = |made: &Made| match made.live.as_slice() {
        [one] => Some(one.clone()),
        _ => None,
    };
    let seen: Vec<LiveMig> = made.iter().filter_map(one).collect();
    let unknown = |what: &str, assumed: &str| {
        let reason = "only a partition shows it (--change-mig), and none was made";
        Line::unknown(&of, what, assumed, reason)
    };
    let first = seen.first().and_then(|first| Some((first, first.uuid.as_ref()?)));
    let what = "a partition that is made again at its place has the same UUID";
    let again = match (first, seen.get(1).and_then(|again| again.uuid.as_ref())) {
        (Some((_, uuid)), Some(again)) if uuid == again => Line::compare(&of, what, "yes", "yes"),
        (Some((_, uuid)), Some(again)) => {
            Line::compare(&of, what, "yes", format!("no: {uuid}, then {again}"))
        }
        _ => unknown(what, "yes"),
    };
    let what = "CUDA calls a partition by NVML's UUID of it";
    // CUDA has the number alone, to which a program gives a prefix of its choice.
    let number = |uuid: &str| uuid.split_once('-').map(|(_, number)| number.to_owned());
    let cuda = match (first, made.first().and_then(|made| made.cuda.as_ref())) {
        (Some((_, uuid)), Some(cuda)) if number(uuid.as_str()) == number(cuda) => {
            Line::compare(&of, what, "yes", "yes")
        }
        (Some((_, uuid)), Some(cuda)) => Line::compare(&of, what, "yes", format!("no: {cuda}, not {uuid}")),
        _ => unknown(what, "yes"),
    };
    let what = "instance ids that the driver chooses for the first partition: GPU and compute instance";
    let ids = match seen.first() {
        Some(one) => {
            let (id, _) = board.instance_ids(one.placement.size);
            let compute = one.compute_instance.map_or_else(|| "none".to_owned(), |id| id.to_string());
            Line::compare(&of, what, format!("{id} and 0"), format!("{} and {compute}", one.gpu_instance))
        }
        None => unknown(what, "the first of its size, and 0"),
    };
    vec![again, cuda, ids]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]
mod tests {
    use super::super::line::Verdict;
    use super::*;
    use aliquot_model::{MigUuid, Placement};
    use aliquot_nvml::Gpus;
    use aliquot_nvml::fake::{FakeGpus, h100_80};

    fn made(gpu: &GpuInfo, uuid: &str, cuda: &str) -> Made {
        let live = LiveMig {
            parent: gpu.uuid.clone(),
            profile_id: 19,
            placement: Placement { start: 0, size: 1 },
            gpu_instance: 7,
            compute_instance: Some(0),
            uuid: Some(MigUuid::parse(uuid).unwrap()),
        };
        Made { waits: false, live: vec![live], cuda: Some(cuda.to_owned()) }
    }

    #[test]
    fn what_is_another_the_second_time_differs_with_both_names() {
        let mut gpu = FakeGpus::new([h100_80(0)]).inventory().unwrap().gpus.remove(0);
        "NVIDIA H100 80GB HBM3".clone_into(&mut gpu.product_name);
        let verdicts = |made: &[Made]| lines(&gpu, made).iter().map(|l| l.verdict).collect::<Vec<_>>();
        let (a, b) = ("MIG-0a1b2c3d-0000-5000-8000-000000000001", "MIG-0a1b2c3d-0000-5000-8000-000000000002");
        assert_eq!(verdicts(&[]), [Verdict::Unknown; 3]);
        assert_eq!(
            verdicts(&[made(&gpu, a, &a.replace("MIG", "GPU")), made(&gpu, a, a)]),
            [Verdict::Held; 3]
        );
        let other = [made(&gpu, a, b), made(&gpu, b, b)];
        assert_eq!(verdicts(&other), [Verdict::Differs, Verdict::Differs, Verdict::Held]);
        assert!(lines(&gpu, &other)[0].machine.contains(b));
    }
}
