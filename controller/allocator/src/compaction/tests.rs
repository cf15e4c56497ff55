use super::*;
use crate::fixtures::{self, mig_share, object, partition, request, share};
use crate::preempt::tests::World;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use proptest::prelude::{Just, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::strategy::Strategy as Generator;
use proptest::test_runner::Config;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Everybody may be moved, and nothing is kept for anybody.
const ALL: Around<'_> = Around { may_move: &|_| true, keep: &|_, _, _| {} };

fn movable(pod: &mut ApiPod) {
    pod.metadata.annotations =
        Some([("aliquot.dev/compaction".to_owned(), "Allow".to_owned())].into_iter().collect());
    pod.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true,
    }))]);
}

/// A pod that runs where the real decision put it, and whether it may be moved.
fn run(world: &mut World, name: &str, requests: &[Value], may_move: bool) -> bool {
    if !world.run(name, requests, 0, 10) {
        return false;
    }
    let node = node_of(&world.index, name);
    world.pod_with(name, &[name], 0, |pod| {
        let spec = pod.spec.as_mut().expect("a spec");
        spec.node_name = Some(node);
        spec.scheduling_gates = None;
        if may_move {
            movable(pod);
        }
    });
    true
}

fn node_of(index: &Snapshot, pod: &str) -> String {
    index.pod(&ObjectKey::new("default", pod)).and_then(|pod| pod.node.clone()).expect("bound").to_string()
}

/// Ends a pod with its claim.
fn end(world: &mut World, name: &str) {
    world.remove(name);
    world.index.delete_claim(&ObjectKey::new("default", name), None);
}

fn outlined(world: &mut World, terms: Terms) -> Outline {
    outline(&mut world.index, &mut world.matcher, Options::default(), terms, ALL, &mut || false)
}

fn moved(outline: &Outline) -> Vec<String> {
    let mut names: Vec<String> =
        outline.steps.iter().flat_map(|step| &step.moves).map(|m| m.pod.name.to_string()).collect();
    names.sort();
    names
}

/// Two GPUs, each half empty: `a` is on the first and `d` on the second.
fn halves(may_move: [bool; 2]) -> World {
    let mut world = World::new(&[("n1", 2)]);
    let half = [partition("r", "3g.40gb")];
    for (name, may_move) in [("a", may_move[0]), ("b", false), ("c", false), ("d", may_move[1])] {
        assert!(run(&mut world, name, &half, may_move));
    }
    end(&mut world, "b");
    end(&mut world, "c");
    world
}

#[test]
fn a_gpu_is_emptied_when_everybody_on_it_fits_into_the_gaps_of_others() {
    let mut world = halves([false, true]);
    let outline = outlined(&mut world, Terms::default());
    assert_eq!(outline.steps.len(), 1);
    let [step] = outline.steps.as_slice() else { panic!("{outline:?}") };
    let [only] = step.moves.as_slice() else { panic!("{outline:?}") };
    assert_eq!((&*only.pod.name, step.gpu), ("d", 1));
    assert!(only.from.iter().all(|device| device.starts_with("gpu-1-mig-3g40gb")), "{only:?}");
    assert!(only.to.iter().all(|device| device.starts_with("gpu-0-mig-3g40gb")), "{only:?}");
    assert_eq!(outline.before.whole, 0);
    assert_eq!(outline.after.whole, 1000);
    let (before, after) = (outline.before.fragmentation(), outline.after.fragmentation());
    assert!(before == 1000 && after < 200, "two halves leave little of a GPU: {outline:?}");
}

#[test]
fn who_did_not_say_so_stays() {
    let mut world = halves([false, false]);
    let outline = outlined(&mut world, Terms::default());
    assert!(outline.steps.is_empty());
    assert_eq!(outline.before, outline.after);
    assert_eq!(outline.before.fragmentation(), 1000, "all that is free is in gaps");
}

#[test]
fn only_one_of_two_halves_moves() {
    let mut world = halves([true, true]);
    assert_eq!(outlined(&mut world, Terms::default()).steps.len(), 1);
}

#[test]
fn a_gpu_that_costs_more_moves_than_it_is_worth_is_left() {
    let mut world = World::new(&[("n1", 2)]);
    for number in 0..7 {
        assert!(run(&mut world, &format!("keep{number}"), &[partition("r", "1g.10gb")], false));
    }
    for number in 0..3 {
        assert!(run(&mut world, &format!("go{number}"), &[partition("r", "1g.10gb")], true));
    }
    for number in 0..3 {
        end(&mut world, &format!("keep{number}"));
    }
    let few = Terms { per_gpu: 2, ..Terms::default() };
    assert!(outlined(&mut world, few).steps.is_empty());
    assert!(outlined(&mut world, Terms { in_all: 2, ..Terms::default() }).steps.is_empty());
    assert_eq!(moved(&outlined(&mut world, Terms::default())), ["go0", "go1", "go2"]);
}

#[test]
fn shares_move_to_shares_with_room() {
    let mut world = World::new(&[("n1", 1), ("n2", 1)]);
    assert!(run(&mut world, "a", &[share("r", "50Gi", "50")], false));
    assert!(run(&mut world, "b", &[share("r", "40Gi", "30")], true));
    assert!(run(&mut world, "filler", &[share("r", "10Gi", "10")], false));
    let other = |world: &World, name: &str| node_of(&world.index, name);
    assert_ne!(other(&world, "a"), other(&world, "b"), "they do not fit on one");
    assert!(outlined(&mut world, Terms::default()).steps.is_empty());
    let mut world = World::new(&[("n1", 1), ("n2", 1)]);
    assert!(run(&mut world, "a", &[share("r", "50Gi", "50")], false));
    assert!(run(&mut world, "big", &[share("r", "70Gi", "20")], false));
    assert!(run(&mut world, "b", &[share("r", "9Gi", "30")], true));
    end(&mut world, "big");
    let alone = node_of(&world.index, "a") != node_of(&world.index, "b");
    assert_eq!(moved(&outlined(&mut world, Terms::default())).is_empty(), !alone);
}

#[test]
fn shares_of_partitions_move_to_a_partition_with_room() {
    let mut world = World::new(&[("n1", 2)]);
    world.index.reset_classes(&fixtures::classes_with_mig_shares());
    world.index.reset_slices(&fixtures::slices_with_mig_shares("n1", 2));
    let half = [mig_share("r", "3g.40gb", "20Gi", "50")];
    assert!(run(&mut world, "stays", &half, false));
    assert!(run(&mut world, "goes", &half, false));
    // The other half of the first GPU.
    assert!(run(&mut world, "beside", &[partition("r", "3g.40gb")], false));
    assert!(run(&mut world, "moves", &half, true));
    assert!(outlined(&mut world, Terms::default()).steps.is_empty(), "the shared partition is full");
    end(&mut world, "goes");
    let outline = outlined(&mut world, Terms::default());
    assert_eq!(moved(&outline), ["moves"]);
}

#[test]
fn beside_a_partition_that_is_shared_in_full_the_rest_of_a_gpu_is_free() {
    let mut world = World::new(&[("n1", 1)]);
    world.index.reset_classes(&fixtures::classes_with_mig_shares());
    world.index.reset_slices(&fixtures::slices_with_mig_shares("n1", 1));
    assert!(run(&mut world, "full", &[mig_share("r", "1g.10gb", "10Gi", "100")], false));
    let gaps = measure(&world.index, &std::collections::HashMap::new());
    assert!(gaps.whole == 0 && gaps.partial > 800, "{gaps:?}");
}

#[test]
fn under_spread_nothing_moves() {
    let mut world = halves([true, true]);
    let options = Options { strategy: Strategy::Spread };
    let outline =
        outline(&mut world.index, &mut world.matcher, options, Terms::default(), ALL, &mut || false);
    assert!(outline.steps.is_empty());
}

#[test]
fn a_pod_that_uses_a_claim_with_others_stays() {
    let mut world = halves([false, true]);
    let key = ObjectKey::new("default", "d");
    let mut reserved = world.index.claim(&key).expect("a claim").reserved_for.clone();
    reserved.push(crate::hold::consumer(crate::hold::Hold::InUse, "uid-d"));
    world.index.replace_consumers(&key, reserved);
    assert!(outlined(&mut world, Terms::default()).steps.is_empty());
}

fn requests() -> impl Generator<Value = Value> {
    prop_oneof![
        Just(partition("r", "1g.10gb")),
        Just(partition("r", "2g.20gb")),
        Just(partition("r", "3g.40gb")),
        Just(share("r", "20Gi", "20")),
        Just(share("r", "50Gi", "40")),
        Just(request("r", "gpu.aliquot.dev", 1)),
    ]
}

proptest! {
    #![proptest_config(Config::with_cases(Config::default().cases / 5))]

    /// Played out, an outline frees what it says, nothing is held twice on the way, and nobody moves
    /// who did not say so.
    #[test]
    fn an_outline_keeps_its_word(
        pods in prop::collection::vec((requests(), prop::bool::weighted(0.8), prop::bool::weighted(0.5)), 1..24),
    ) {
        let mut world = World::new(&[("n1", 2), ("n2", 2)]);
        let mut alive = Vec::new();
        for (number, (request, may_move, stays)) in pods.iter().enumerate() {
            let name = format!("p{number}");
            if run(&mut world, &name, std::slice::from_ref(request), *may_move) {
                alive.push((name, *may_move, *stays));
            }
        }
        for (name, _, stays) in &alive {
            if !stays {
                end(&mut world, name);
            }
        }
        let may_move: BTreeMap<&str, bool> =
            alive.iter().map(|(name, may_move, _)| (name.as_str(), *may_move)).collect();
        let outline = outlined(&mut world, Terms::default());
        prop_assert_eq!(outline.before, measure(&world.index, &HashMap::new()));
        let freed = i64::try_from(outline.steps.len()).unwrap_or(i64::MAX).saturating_mul(1000);
        prop_assert_eq!(outline.after.whole, outline.before.whole + freed);
        let mut seen = HashSet::new();
        for one in outline.steps.iter().flat_map(|step| &step.moves) {
            prop_assert!(may_move.get(&*one.pod.name).copied().unwrap_or(false), "{:?}", one);
            prop_assert!(seen.insert(one.pod.clone()), "moved twice: {:?}", one);
        }
        let mut work = Work {
            keep: ALL.keep,
            index: &mut world.index,
            matcher: &mut world.matcher,
            options: Options::default(),
            stages: HashMap::new(),
            moved: HashSet::new(),
        };
        for step in &outline.steps {
            let gpu = gaps::occupied(work.index).into_iter()
                .find(|gpu| gpu.id == (step.pool, step.gpu)).expect("it was there");
            let done = work.empty(&gpu, &mut || false);
            prop_assert_eq!(done.as_ref(), Some(step));
            for stage in work.stages.values() {
                prop_assert!(stage.is_consistent(work.index));
            }
        }
    }
}
