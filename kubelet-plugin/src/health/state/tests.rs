use super::*;
use crate::health::file;
use crate::health::xid::parse_change;
use crate::testing::h100;
use aliquot_nvml::{DriverInfo, GpuError, NvmlCode, Operation, RowRemapping};
use rstest::rstest;

const DRIVER: &str = "gpu.nvidia.com";

/// A node with two GPUs that is looked at.
struct Story {
    health: Health,
    xids: Xids,
    inventory: Inventory,
    said: BTreeMap<GpuUuid, GpuHealth>,
    unheard: BTreeSet<GpuUuid>,
    module: Option<u64>,
    lost_is_lost: bool,
    now: Timestamp,
}

fn gpu(minor: u32) -> GpuUuid {
    h100(minor).uuid
}

fn lost(index: u32) -> Unreadable {
    unreadable_for(index, NvmlCode::GPU_IS_LOST)
}

fn unreadable_for(index: u32, code: NvmlCode) -> Unreadable {
    let error = GpuError::on(&gpu(index), Operation::Read("handle"), code);
    Unreadable { index, uuid: None, error }
}

impl Story {
    fn new() -> Self {
        let driver = DriverInfo { driver_version: "1".into(), cuda_version: (13, 0) };
        let gpus = vec![h100(0), h100(1)];
        let mut story = Self {
            health: Health::default(),
            xids: Xids::default(),
            inventory: Inventory { driver, gpus, live: Vec::new(), unreadable: Vec::new() },
            said: BTreeMap::new(),
            unheard: BTreeSet::new(),
            module: Some(1),
            lost_is_lost: true,
            now: Timestamp::from_second(1000).unwrap(),
        };
        story.look();
        story
    }

    fn look(&mut self) {
        self.look_at(true);
    }

    fn look_at(&mut self, answers: bool) {
        let look = Look {
            inventory: if answers { Ok(&self.inventory) } else { Err("the module is gone") },
            said: &self.said,
            unheard: &self.unheard,
            module: self.module,
            lost_is_lost: self.lost_is_lost,
            now: self.now,
        };
        self.health.look(&look, &self.xids);
    }

    fn event(&mut self, kind: EventKind) {
        let event = GpuEvent { gpu: Some(gpu(0)), gpu_instance: None, compute_instance: None, kind };
        self.health.event(&event, &self.xids, self.now);
    }

    fn wait(&mut self, seconds: i64) {
        self.now = self.now.saturating_add(SignedDuration::from_secs(seconds)).unwrap();
    }

    /// GPU 0 disappears from what can be read.
    fn lose(&mut self) {
        self.inventory.gpus.retain(|info| info.minor != 0);
        self.inventory.unreadable = vec![lost(0)];
    }

    fn find(&mut self) {
        self.inventory.gpus = vec![h100(0), h100(1)];
        self.inventory.unreadable.clear();
    }

    /// Taints of GPU 0, as kubectl shows them.
    fn taints(&self) -> Vec<String> {
        let told = self.health.told(&gpu(0), DRIVER, &self.xids);
        let shown = |taint: &Taint| {
            let key = taint.key.strip_prefix("gpu.nvidia.com/").unwrap();
            format!("{key}={}:{}", taint.value, taint.effect.as_str())
        };
        assert!(self.health.told(&gpu(1), DRIVER, &self.xids).is_empty(), "the other GPU has nothing");
        told.iter().map(|told| shown(&told.taint)).collect()
    }

    fn absent(&self) -> Vec<u32> {
        self.health.absent().map(|last| last.info.minor).collect()
    }
}

#[rstest]
#[case::of_an_application(EventKind::Xid(31), &[])]
#[case::corrected(EventKind::EccSingleBit, &[])]
#[case::informational(EventKind::Xid(94), &["xid=94:None"])]
#[case::needs_a_reset(EventKind::Xid(48), &["xid=48:NoSchedule"])]
#[case::lost(EventKind::Xid(79), &["xid=79:NoExecute"])]
#[case::unknown(EventKind::Xid(777), &["xid=777:NoSchedule"])]
#[case::memory(EventKind::EccDoubleBit, &["ecc=:NoSchedule"])]
fn an_error_makes_the_taint_of_its_class(#[case] kind: EventKind, #[case] taints: &[&str]) {
    let mut story = Story::new();
    story.event(kind);
    assert_eq!(story.taints(), taints);
    assert_eq!(
        story.health.fault(&gpu(0), &story.xids).is_some(),
        taints.iter().any(|t| t.contains(":No") && !t.ends_with("None"))
    );
}

#[test]
fn of_several_errors_the_one_that_does_most_is_told_and_then_the_oldest() {
    let mut story = Story::new();
    for number in [94, 62, 48, 62] {
        story.event(EventKind::Xid(number));
        story.wait(1);
    }
    assert_eq!(story.taints(), ["xid=62:NoSchedule"]);
    story.event(EventKind::Xid(95));
    assert_eq!(story.taints(), ["xid=95:NoExecute"]);
}

#[test]
fn what_is_to_be_ignored_now_has_no_taint_even_if_it_was_noted_before() {
    let mut story = Story::new();
    story.event(EventKind::Xid(48));
    story.xids = Xids::new([parse_change("48=Ignore").unwrap()]);
    assert!(story.taints().is_empty());
}

#[test]
fn an_informational_error_ends_a_while_after_its_last_occurrence_and_others_do_not() {
    let mut story = Story::new();
    story.event(EventKind::Xid(94));
    story.wait(500);
    story.event(EventKind::Xid(94));
    story.wait(500);
    story.look();
    assert_eq!(story.taints(), ["xid=94:None"]);
    story.event(EventKind::Xid(48));
    story.wait(601);
    story.look();
    assert_eq!(story.taints(), ["xid=48:NoSchedule"]);
    let causes: Vec<String> = story.health.gpus[&gpu(0)].causes.keys().map(ToString::to_string).collect();
    assert_eq!(causes, ["xid-48"]);
}

#[test]
fn another_load_of_the_kernel_module_ends_what_lasts_and_not_knowing_it_ends_nothing() {
    let mut story = Story::new();
    story.event(EventKind::Xid(48));
    story.module = None;
    story.look();
    story.module = Some(1);
    story.look();
    assert_eq!(story.taints(), ["xid=48:NoSchedule"]);
    story.module = Some(2);
    story.look_at(false);
    assert!(story.health.gpus[&gpu(0)].causes.contains_key(&Cause::Xid(48)), "nobody has looked yet");
    story.look();
    assert!(story.taints().is_empty());
}

#[test]
fn a_lost_gpu_stays_there_as_it_was_and_is_well_when_it_answers_again() {
    let mut story = Story::new();
    story.event(EventKind::Xid(79));
    story.lose();
    story.look();
    assert_eq!(story.taints(), ["gpu-lost=:NoExecute", "xid=79:NoExecute"]);
    assert_eq!(story.absent(), [0]);
    // A library that is opened anew does not list it.
    story.inventory.unreadable.clear();
    story.look();
    assert_eq!(story.absent(), [0]);
    story.find();
    story.look();
    assert!(story.taints().is_empty() && story.absent().is_empty());
}

#[test]
fn while_all_gpus_are_said_to_be_lost_they_only_cannot_be_read() {
    let mut story = Story::new();
    story.lose();
    story.lost_is_lost = false;
    story.look();
    assert_eq!(story.taints(), ["unmonitored=unreadable:NoSchedule"]);
    story.lost_is_lost = true;
    story.look();
    assert_eq!(story.taints(), ["gpu-lost=:NoExecute"]);
}

#[test]
fn a_gpu_that_is_not_listed_any_more_is_gone_and_its_errors_wait_for_it() {
    let mut story = Story::new();
    story.event(EventKind::Xid(48));
    story.inventory.gpus.retain(|info| info.minor != 0);
    story.look();
    assert!(story.absent().is_empty());
    story.find();
    story.look();
    assert_eq!(story.taints(), ["xid=48:NoSchedule"]);
}

#[test]
fn a_driver_that_does_not_answer_leaves_all_gpus_there_and_unmonitored() {
    let mut story = Story::new();
    story.look_at(false);
    assert_eq!(story.absent(), [0, 1]);
    let told = story.health.told(&gpu(1), DRIVER, &story.xids);
    assert_eq!((told[0].cause, told[0].detail.as_str()), (Cause::NoDriver, "the module is gone"));
    story.look();
    assert!(story.taints().is_empty() && story.absent().is_empty());
}

#[test]
fn a_gpu_that_hangs_is_unmonitored_until_its_call_comes_back() {
    let mut story = Story::new();
    for of_it in [(Some(gpu(0)), Some(0)), (None, Some(0))] {
        story.health.set_stuck(&[(of_it.0, of_it.1, "it hangs".into())], story.now);
        assert_eq!(story.taints(), ["unmonitored=stuck:NoSchedule"]);
        story.health.set_stuck(&[], story.now);
        assert!(story.taints().is_empty());
    }
}

#[test]
fn errors_that_nobody_listens_for_are_told_and_no_more() {
    let mut story = Story::new();
    story.unheard.insert(gpu(0));
    story.look();
    assert_eq!(story.taints(), ["unmonitored=events:None"]);
    assert_eq!(story.health.fault(&gpu(0), &story.xids), None);
}

#[rstest]
#[case::nothing(GpuHealth::default(), &[])]
#[case::counted(GpuHealth { uncorrected_errors: Some(2), ..GpuHealth::default() }, &["ecc=:NoSchedule"])]
#[case::pending(GpuHealth { rows: Some(RowRemapping { pending: true, failed: false }), ..GpuHealth::default() }, &["row-remap=pending:None"])]
#[case::failed(GpuHealth { rows: Some(RowRemapping { pending: true, failed: true }), ..GpuHealth::default() }, &["row-remap=failure:NoSchedule"])]
#[case::reset(GpuHealth { recovery: Some(Recovery::Needed(1)), ..GpuHealth::default() }, &["recovery=gpu-reset:NoSchedule"])]
#[case::alone(GpuHealth { recovery: Some(Recovery::Needed(3)), ..GpuHealth::default() }, &["recovery=drain-p2p:None"])]
fn what_the_gpu_says_of_itself_counts_as_long_as_it_says_so(
    #[case] said: GpuHealth,
    #[case] taints: &[&str],
) {
    let mut story = Story::new();
    story.said.insert(gpu(0), said);
    story.look();
    assert_eq!(story.taints(), taints);
    // An ill GPU may fail to answer.
    story.said.insert(gpu(0), GpuHealth::default());
    story.look();
    assert_eq!(story.taints(), taints, "what it does not tell now stays");
    let well = GpuHealth {
        uncorrected_errors: Some(0),
        rows: Some(RowRemapping { pending: false, failed: false }),
        recovery: Some(Recovery::Nothing),
    };
    story.said.insert(gpu(0), well);
    story.look();
    assert!(story.taints().is_empty());
}

#[test]
fn what_a_driver_does_not_tell_any_more_ends_with_the_one_that_told_it() {
    let mut story = Story::new();
    let failed = Some(RowRemapping { pending: true, failed: true });
    let said = GpuHealth { rows: failed, recovery: Some(Recovery::Needed(1)), ..GpuHealth::default() };
    story.said.insert(gpu(0), said);
    story.look();
    assert_eq!(story.taints().len(), 2);
    story.said.insert(gpu(0), GpuHealth::default());
    story.module = Some(2);
    story.look();
    assert!(story.taints().is_empty());
}

#[test]
fn a_recovery_that_was_wanted_and_is_not_any_more_was_done() {
    let mut story = Story::new();
    let says = |recovery| GpuHealth { recovery: Some(recovery), ..GpuHealth::default() };
    story.event(EventKind::Xid(48));
    story.said.insert(gpu(0), says(Recovery::Nothing));
    story.look();
    assert_eq!(story.taints(), ["xid=48:NoSchedule"], "it was never wanted");
    story.said.insert(gpu(0), says(Recovery::Needed(1)));
    story.look();
    story.said.insert(gpu(0), says(Recovery::Nothing));
    story.look();
    assert!(story.taints().is_empty());
}

/// What the GPU counts, and what it says of a recovery.
fn counts(errors: u64) -> GpuHealth {
    GpuHealth { uncorrected_errors: Some(errors), ..GpuHealth::default() }
}

const ECC: [&str; 1] = ["ecc=:NoSchedule"];

#[test]
fn a_memory_error_that_no_counter_has_is_not_forgotten_because_the_counter_is_0() {
    let mut story = Story::new();
    story.said.insert(gpu(0), counts(0));
    story.event(EventKind::EccDoubleBit);
    story.look();
    assert_eq!(story.taints(), ECC);
    story.module = Some(2);
    story.look();
    assert!(story.taints().is_empty());
}

#[test]
fn errors_from_before_the_agent_count_until_the_counter_begins_anew() {
    let mut story = Story::new();
    for errors in [2, 2] {
        story.said.insert(gpu(0), counts(errors));
        story.look();
        assert_eq!(story.taints(), ECC);
    }
    // The driver has started the GPU anew, and there is an error already.
    let since = |story: &Story| story.health.gpus[&gpu(0)].causes[&Cause::Ecc].since;
    let before = since(&story);
    story.wait(60);
    story.said.insert(gpu(0), counts(1));
    story.look();
    assert_eq!(story.taints(), ECC);
    assert!(since(&story) > before);
    story.said.insert(gpu(0), counts(0));
    story.look();
    assert!(story.taints().is_empty());
}

#[test]
fn what_an_administrator_has_looked_at_is_cleared_and_what_comes_later_counts_again() {
    let mut story = Story::new();
    story.said.insert(gpu(0), counts(2));
    story.event(EventKind::Xid(62));
    story.look();
    story.wait(10);
    story.event(EventKind::Xid(48));
    let looked_at = story.now;
    story.wait(10);
    story.event(EventKind::Xid(74));
    story.wait(10);
    let cleared = story.health.acknowledge(&gpu(0), looked_at, story.now);
    assert_eq!(cleared, [Cause::Xid(48), Cause::Xid(62), Cause::Ecc]);
    story.look();
    assert_eq!(story.taints(), ["xid=74:NoSchedule"]);
    // The same word again, and one from before, say nothing new.
    story.event(EventKind::Xid(62));
    for at in [looked_at, Timestamp::UNIX_EPOCH] {
        assert!(story.health.acknowledge(&gpu(0), at, story.now).is_empty());
    }
    story.said.insert(gpu(0), counts(3));
    story.look();
    assert_eq!(story.taints(), ["ecc=:NoSchedule", "xid=74:NoSchedule"]);
    assert_eq!(story.health.acknowledge(&gpu(0), story.now, story.now).len(), 3);
    assert!(story.taints().is_empty());
    // A counter that begins anew has nothing that was looked at.
    story.said.insert(gpu(0), counts(1));
    story.look();
    assert_eq!(story.taints(), ECC);
}

#[test]
fn what_was_looked_at_stays_so_over_a_restart_that_begins_without_the_driver() {
    let dir = tempfile::tempdir().unwrap();
    let mut story = Story::new();
    story.said.insert(gpu(0), counts(2));
    story.look();
    assert_eq!(story.health.acknowledge(&gpu(0), story.now, story.now), [Cause::Ecc]);
    for _ in 0..2 {
        file::save(dir.path(), &file::encode(&story.health, "boot").unwrap()).unwrap();
        story.health = file::load(dir.path(), "boot");
        story.look_at(false);
    }
    story.look();
    assert!(story.taints().is_empty());
    story.said.insert(gpu(0), counts(3));
    story.look();
    assert_eq!(story.taints(), ECC);
}

#[test]
fn a_gpu_of_which_nothing_is_known_leaves_nothing_behind() {
    let mut story = Story::new();
    story.inventory.gpus.retain(|info| info.minor != 0);
    story.look();
    assert_eq!(story.health.gpus.keys().collect::<Vec<_>>(), [&gpu(1)]);
}

/// As where the clock of the administrator's machine is ahead.
#[test]
fn a_word_of_a_time_ahead_counts_for_what_is_there_and_for_nothing_later() {
    let mut story = Story::new();
    story.event(EventKind::Xid(62));
    let ahead = story.now.saturating_add(SignedDuration::from_secs(100)).unwrap();
    assert_eq!(story.health.acknowledge(&gpu(0), ahead, story.now), [Cause::Xid(62)]);
    story.wait(1);
    story.event(EventKind::Xid(62));
    assert!(story.health.acknowledge(&gpu(0), ahead, story.now).is_empty());
    assert_eq!(story.taints(), ["xid=62:NoSchedule"]);
}

#[test]
fn a_gpu_that_is_lost_is_lost_whatever_is_acknowledged() {
    let mut story = Story::new();
    story.event(EventKind::Xid(79));
    story.lose();
    story.look();
    assert_eq!(story.health.acknowledge(&gpu(0), story.now, story.now), [Cause::Xid(79)]);
    assert_eq!(story.taints(), ["gpu-lost=:NoExecute"]);
    assert!(story.health.acknowledge(&gpu(7), story.now, story.now).is_empty(), "there is none");
}
