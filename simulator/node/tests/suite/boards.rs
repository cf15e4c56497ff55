//! The board tables against figures written down a second time, and the rules that every table must keep.

use aliquot_sim_node::board::ci_profiles;
use aliquot_sim_node::{BOARDS, Engines, GiProfile, GpuSpec, Node, NodeError, NodeSpec, board, create};
use proptest::prelude::*;
use rstest::rstest;

/// name, lgip id, NVML enumeration, slices, multiprocessors, memory MiB, starts, size, most instances
type Row<'a> = (&'a str, u32, u32, u32, u32, u64, &'a str, u32, u32);

#[rstest]
#[case::a30("A30", &[
    ("1g.6gb", 14, 0, 1, 14, 5836, "0 1 2 3", 1, 4),
    ("1g.6gb+me", 21, 7, 1, 14, 5836, "0 1 2 3", 1, 1),
    ("2g.12gb", 5, 1, 2, 28, 11672, "0 2", 2, 2),
    ("2g.12gb+me", 6, 8, 2, 28, 11672, "0 2", 2, 1),
    ("4g.24gb", 0, 3, 4, 56, 24064, "0", 4, 1),
])]
#[case::a100_40("A100-40", &[
    ("1g.5gb", 19, 0, 1, 14, 4864, "0 1 2 3 4 5 6", 1, 7),
    ("1g.5gb+me", 20, 7, 1, 14, 4864, "0 1 2 3 4 5 6", 1, 1),
    ("1g.10gb", 15, 9, 1, 14, 9856, "0 2 4 6", 2, 4),
    ("2g.10gb", 14, 1, 2, 28, 9856, "0 2 4", 2, 3),
    ("3g.20gb", 9, 2, 3, 42, 19968, "0 4", 4, 2),
    ("4g.20gb", 5, 3, 4, 56, 19968, "0", 4, 1),
    ("7g.40gb", 0, 4, 7, 98, 40192, "0", 8, 1),
])]
#[case::a100_80("A100-80", &[
    ("1g.10gb", 19, 0, 1, 14, 9728, "0 1 2 3 4 5 6", 1, 7),
    ("1g.10gb+me", 20, 7, 1, 14, 9728, "0 1 2 3 4 5 6", 1, 1),
    ("1g.20gb", 15, 9, 1, 14, 19968, "0 2 4 6", 2, 4),
    ("2g.20gb", 14, 1, 2, 28, 19968, "0 2 4", 2, 3),
    ("3g.40gb", 9, 2, 3, 42, 40192, "0 4", 4, 2),
    ("4g.40gb", 5, 3, 4, 56, 40192, "0", 4, 1),
    ("7g.80gb", 0, 4, 7, 98, 80384, "0", 8, 1),
])]
#[case::h100("H100-80", &[
    ("1g.10gb", 19, 0, 1, 16, 9984, "0 1 2 3 4 5 6", 1, 7),
    ("1g.10gb+me", 20, 7, 1, 16, 9984, "0 1 2 3 4 5 6", 1, 1),
    ("1g.20gb", 15, 9, 1, 26, 20096, "0 2 4 6", 2, 4),
    ("2g.20gb", 14, 1, 2, 32, 20096, "0 2 4", 2, 3),
    ("3g.40gb", 9, 2, 3, 60, 40448, "0 4", 4, 2),
    ("4g.40gb", 5, 3, 4, 64, 40448, "0", 4, 1),
    ("7g.80gb", 0, 4, 7, 132, 81152, "0", 8, 1),
])]
#[case::h200("H200-141", &[
    ("1g.18gb", 19, 0, 1, 16, 16384, "0 1 2 3 4 5 6", 1, 7),
    ("1g.18gb+me", 20, 7, 1, 16, 16384, "0 1 2 3 4 5 6", 1, 1),
    ("1g.35gb", 15, 9, 1, 26, 33024, "0 2 4 6", 2, 4),
    ("2g.35gb", 14, 1, 2, 32, 33024, "0 2 4", 2, 3),
    ("3g.71gb", 9, 2, 3, 60, 71168, "0 4", 4, 2),
    ("4g.71gb", 5, 3, 4, 64, 71168, "0", 4, 1),
    ("7g.141gb", 0, 4, 7, 132, 143_104, "0", 8, 1),
])]
#[case::b200("B200-180", &[
    ("1g.23gb", 19, 0, 1, 18, 20992, "0 1 2 3 4 5 6", 1, 7),
    ("1g.23gb+me", 20, 7, 1, 18, 20992, "0 1 2 3 4 5 6", 1, 1),
    ("1g.45gb", 15, 9, 1, 30, 45312, "0 2 4 6", 2, 4),
    ("2g.45gb", 14, 1, 2, 36, 45312, "0 2 4", 2, 3),
    ("3g.90gb", 9, 2, 3, 70, 91136, "0 4", 4, 2),
    ("4g.90gb", 5, 3, 4, 72, 91136, "0", 4, 1),
    ("7g.180gb", 0, 4, 7, 148, 182_784, "0", 8, 1),
])]
#[case::rtx_pro_6000("RTX PRO 6000", &[
    ("1g.24gb", 14, 0, 1, 46, 24192, "0 3 6 9", 3, 4),
    ("1g.24gb+me", 21, 7, 1, 46, 24192, "0 3 6 9", 3, 1),
    ("1g.24gb+gfx", 47, 10, 1, 46, 24192, "0 3 6 9", 3, 4),
    ("1g.24gb+me.all", 65, 15, 1, 46, 24192, "0 3 6 9", 3, 1),
    ("1g.24gb-me", 67, 13, 1, 46, 24192, "0 3 6 9", 3, 4),
    ("2g.48gb", 5, 1, 2, 94, 48512, "0 6", 6, 2),
    ("2g.48gb+gfx", 35, 11, 2, 94, 48512, "0 6", 6, 2),
    ("2g.48gb+me.all", 64, 16, 2, 94, 48512, "0 6", 6, 1),
    ("2g.48gb-me", 66, 14, 2, 94, 48512, "0 6", 6, 2),
    ("4g.96gb", 0, 3, 4, 188, 97280, "0", 12, 1),
    ("4g.96gb+gfx", 32, 12, 4, 188, 97280, "0", 12, 1),
])]
#[case::t4("T4", &[])]
#[case::l40s("L40S", &[])]
fn profiles_are_those_of_the_user_guide(#[case] key: &str, #[case] rows: &[Row]) {
    let board = board(key).unwrap();
    let starts = |p: &GiProfile| p.starts.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let starts: Vec<String> = board.profiles.iter().map(starts).collect();
    let found: Vec<Row> = board
        .profiles
        .iter()
        .zip(&starts)
        .map(|(p, s)| {
            (p.name, p.id, p.nvml, p.slices, p.multiprocessors, p.memory_mib, s.as_str(), p.size, p.max)
        })
        .collect();
    assert_eq!(found, rows);
}

#[rstest]
#[case("A30", 24576, 56, (8, 0))]
#[case("A100-40", 40960, 108, (8, 0))]
#[case("A100-80", 81920, 108, (8, 0))]
#[case("H100-80", 81559, 132, (9, 0))]
#[case("H200-141", 143_771, 132, (9, 0))]
#[case("B200-180", 183_359, 148, (10, 0))]
#[case("RTX-PRO-6000", 97887, 188, (12, 0))]
#[case("T4", 15360, 40, (7, 5))]
#[case("L40S", 46068, 142, (8, 9))]
fn whole_boards_have_their_size(
    #[case] key: &str,
    #[case] memory_mib: u64,
    #[case] multiprocessors: u32,
    #[case] capability: (u32, u32),
) {
    let board = board(key).unwrap();
    assert_eq!(
        (board.memory_mib, board.multiprocessors, board.compute_capability),
        (memory_mib, multiprocessors, capability)
    );
}

#[test]
fn seven_slice_boards_have_25_placements_and_the_workstation_board_30() {
    let count = |key: &str| board(key).unwrap().profiles.iter().map(|p| p.starts.len()).sum::<usize>();
    for key in ["A100-40", "A100-80", "H100-80", "H200-141", "B200-180"] {
        assert_eq!(count(key), 25, "{key}");
    }
    assert_eq!(count("RTX-PRO-6000"), 30);
}

#[test]
fn every_profile_fits_its_board() {
    for board in BOARDS {
        for p in board.profiles {
            let what = format!("{} {}", board.key, p.name);
            assert!(p.starts.iter().all(|s| s + p.size <= board.axis), "{what}");
            assert!(p.memory_mib * u64::from(p.max) <= board.memory_mib, "{what}");
            assert!(p.multiprocessors * p.max <= board.multiprocessors, "{what}");
            assert!(p.engines.fits_in(board.engines), "{what}");
            assert!(p.max as usize <= p.starts.len(), "{what}");
            let (first, ids) = board.instance_ids(p.size);
            assert!(ids >= p.max && first + ids <= 15, "{what}");
            assert!(
                ci_profiles(p.slices).iter().any(|ci| ci.slices == p.slices),
                "{what}: no full compute instance"
            );
            assert!(p.slice_multiprocessors * p.slices <= p.multiprocessors, "{what}");
        }
        let mut names: Vec<_> = board.profiles.iter().map(|p| p.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), board.profiles.len(), "{}: a name twice", board.key);
    }
}

fn mig_node(key: &str) -> (tempfile::TempDir, Node) {
    let dir = tempfile::tempdir().unwrap();
    let spec = NodeSpec { gpus: vec![GpuSpec::new(key).with_mig()], ..NodeSpec::new(["T4"]) };
    let node = create(dir.path(), &spec).unwrap();
    (dir, node)
}

fn mig_boards() -> impl Iterator<Item = &'static str> {
    BOARDS.iter().filter(|b| b.has_mig()).map(|b| b.key)
}

#[test]
fn every_legal_placement_can_be_created_on_an_empty_gpu() {
    for key in mig_boards() {
        let (_dir, node) = mig_node(key);
        for profile in board(key).unwrap().profiles {
            for &start in profile.starts {
                let gi = node.create_gi(0, profile.id, Some(start)).unwrap();
                assert_eq!((gi.start, gi.size, gi.profile.id), (start, profile.size, profile.id), "{key}");
                let full = ci_profiles(profile.slices).iter().find(|c| c.slices == profile.slices).unwrap();
                let ci = node.create_ci(0, gi.id, gi.serial, full.id, None).unwrap();
                let devices = node.mig_devices(0).unwrap();
                assert_eq!(devices.len(), 1);
                assert_eq!(devices[0].multiprocessors, profile.multiprocessors, "{key} {}", profile.name);
                assert_eq!(devices[0].name, profile.name);
                node.destroy_ci(0, gi.id, gi.serial, ci.id).unwrap();
                node.destroy_gi(0, gi.id, gi.serial).unwrap();
            }
        }
    }
}

#[test]
fn illegal_starts_are_invalid_arguments() {
    for key in mig_boards() {
        let (_dir, node) = mig_node(key);
        let board = board(key).unwrap();
        for profile in board.profiles {
            for start in (0..=board.axis).filter(|s| !profile.starts.contains(s)) {
                let refused = node.create_gi(0, profile.id, Some(start));
                assert!(
                    matches!(refused, Err(NodeError::InvalidArgument(_))),
                    "{key} {} {start}",
                    profile.name
                );
            }
        }
    }
}

#[test]
fn overlapping_placements_are_refused_and_disjoint_ones_only_for_want_of_engines() {
    for key in mig_boards() {
        let (_dir, node) = mig_node(key);
        let board = board(key).unwrap();
        for first in board.profiles {
            for &start in first.starts {
                let gi = node.create_gi(0, first.id, Some(start)).unwrap();
                for second in board.profiles {
                    for &other in second.starts {
                        let what = format!("{key} {}@{start} then {}@{other}", first.name, second.name);
                        let overlaps = other < start + first.size && start < other + second.size;
                        let engines = first.engines.plus(second.engines).fits_in(board.engines);
                        let spent = first.id == second.id && second.max == 1;
                        match node.create_gi(0, second.id, Some(other)) {
                            Ok(made) => {
                                assert!(!overlaps && engines && !spent, "{what} was allowed");
                                node.destroy_gi(0, made.id, made.serial).unwrap();
                            }
                            Err(NodeError::InsufficientResources(_)) => {
                                assert!(overlaps || !engines || spent, "{what} was refused");
                            }
                            Err(other) => panic!("{what}: {other}"),
                        }
                    }
                }
                node.destroy_gi(0, gi.id, gi.serial).unwrap();
            }
        }
    }
}

#[rstest]
#[case("H100-80", &["4g.40gb", "3g.40gb"])]
#[case("H100-80", &["4g.40gb", "2g.20gb", "1g.10gb"])]
#[case("H100-80", &["3g.40gb", "3g.40gb"])]
#[case("A100-40", &["1g.5gb", "2g.10gb", "4g.20gb"])]
#[case("A100-40", &["1g.5gb+me", "1g.5gb", "1g.5gb", "1g.5gb", "1g.5gb", "1g.5gb", "1g.5gb"])]
#[case("A100-80", &["1g.20gb", "1g.20gb", "1g.20gb", "1g.20gb"])]
#[case("A30", &["2g.12gb", "1g.6gb", "1g.6gb+me"])]
#[case("RTX-PRO-6000", &["2g.48gb+gfx", "1g.24gb", "1g.24gb-me"])]
#[case("RTX-PRO-6000", &["1g.24gb+me.all", "1g.24gb-me", "1g.24gb-me", "1g.24gb-me"])]
fn known_geometries_fit_where_the_driver_chooses_the_place(#[case] key: &str, #[case] profiles: &[&str]) {
    let (_dir, node) = mig_node(key);
    for name in profiles {
        let id = board(key).unwrap().profile_by_name(name).unwrap().id;
        node.create_gi(0, id, None).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[rstest]
#[case::one_low_blocks_four("H100-80", ("1g.10gb", Some(0)), "4g.40gb")]
#[case::four_and_two_leave_no_two("A100-40", ("4g.20gb", Some(0)), "7g.40gb")]
#[case::one_media_set("H100-80", ("1g.10gb+me", None), "1g.10gb+me")]
#[case::all_media_leaves_none("RTX-PRO-6000", ("1g.24gb+me.all", None), "1g.24gb")]
fn what_does_not_fit_is_refused(#[case] key: &str, #[case] first: (&str, Option<u32>), #[case] second: &str) {
    let (_dir, node) = mig_node(key);
    let id = |name: &str| board(key).unwrap().profile_by_name(name).unwrap().id;
    node.create_gi(0, id(first.0), first.1).unwrap();
    assert!(matches!(node.create_gi(0, id(second), None), Err(NodeError::InsufficientResources(_))));
    assert_eq!(node.gi_remaining(0, id(second)).unwrap(), 0);
}

#[test]
fn instance_ids_follow_the_tree_of_the_axis() {
    let (_dir, node) = mig_node("A100-40");
    let id = |name: &str| board("A100-40").unwrap().profile_by_name(name).unwrap().id;
    let made = |name: &str| node.create_gi(0, id(name), None).unwrap();
    let (one, two, four) = (made("1g.5gb"), made("2g.10gb"), made("4g.20gb"));
    assert_eq!((one.start, two.start, four.start), (6, 4, 0));
    assert_eq!((one.id, two.id, four.id), (7, 3, 1));
}

#[test]
fn a_destroyed_instance_is_not_reached_by_its_old_serial() {
    let (_dir, node) = mig_node("A30");
    let first = node.create_gi(0, 14, Some(0)).unwrap();
    node.destroy_gi(0, first.id, first.serial).unwrap();
    let second = node.create_gi(0, 14, Some(0)).unwrap();
    assert_eq!(first.id, second.id);
    assert!(matches!(node.destroy_gi(0, first.id, first.serial), Err(NodeError::NotFound(_))));
    assert_eq!(node.gis(0).unwrap().len(), 1);
}

#[test]
fn compute_instances_share_the_slices_of_their_gpu_instance() {
    let (_dir, node) = mig_node("H100-80");
    let gi = node.create_gi(0, 9, None).unwrap();
    let make = |profile, start| node.create_ci(0, gi.id, gi.serial, profile, start);
    let one = make(0, Some(2)).unwrap();
    let two = make(1, None).unwrap();
    assert_eq!((one.start, two.start, two.size), (2, 0, 2));
    assert!(matches!(make(0, None), Err(NodeError::InsufficientResources(_))));
    assert!(matches!(make(2, None), Err(NodeError::InsufficientResources(_))));
    assert!(matches!(make(3, None), Err(NodeError::InvalidArgument(_))), "a 3g has no 4c");
    assert!(matches!(make(1, Some(1)), Err(NodeError::InvalidArgument(_))));
    let names: Vec<_> =
        node.mig_devices(0).unwrap().into_iter().map(|d| (d.name, d.multiprocessors)).collect();
    assert_eq!(names, [("1c.3g.40gb".to_owned(), 16), ("2c.3g.40gb".to_owned(), 32)]);
    assert!(matches!(node.destroy_gi(0, gi.id, gi.serial), Err(NodeError::InUse(_))));
}

#[derive(Debug, Clone)]
enum Step {
    Create { profile: usize, start: Option<usize> },
    Destroy { which: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0_usize..16, proptest::option::of(0_usize..8))
            .prop_map(|(profile, start)| Step::Create { profile, start }),
        1 => (0_usize..8).prop_map(|which| Step::Destroy { which }),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn live_instances_never_overlap_and_never_exceed_the_board(pick in 0_usize..7, steps in steps()) {
        let key = mig_boards().nth(pick).unwrap();
        let (_dir, node) = mig_node(key);
        let board = board(key).unwrap();
        for step in steps {
            let before = node.gis(0).unwrap();
            match step {
                Step::Create { profile, start } => {
                    let profile = &board.profiles[profile % board.profiles.len()];
                    let start = start.map(|s| profile.starts[s % profile.starts.len()]);
                    let remaining = node.gi_remaining(0, profile.id).unwrap();
                    let made = node.create_gi(0, profile.id, start);
                    // The count of what remains is exact where the driver may choose the place.
                    if start.is_none() {
                        prop_assert_eq!(made.is_ok(), remaining > 0);
                    } else if made.is_ok() {
                        prop_assert!(remaining > 0);
                    }
                    if let (Ok(_), true) = (&made, start.is_none()) {
                        prop_assert_eq!(node.gi_remaining(0, profile.id).unwrap(), remaining - 1);
                    }
                    if made.is_err() {
                        prop_assert_eq!(&before, &node.gis(0).unwrap());
                    }
                }
                Step::Destroy { which } => if let Some(gi) = before.get(which) {
                    node.destroy_gi(0, gi.id, gi.serial).unwrap();
                    prop_assert_eq!(node.gis(0).unwrap().len(), before.len() - 1);
                }
            }
            let live = node.gis(0).unwrap();
            for (i, a) in live.iter().enumerate() {
                prop_assert!(a.start + a.size <= board.axis);
                for b in &live[i + 1..] {
                    prop_assert!(a.id != b.id && (a.start + a.size <= b.start || b.start + b.size <= a.start));
                }
            }
            let engines = live.iter().fold(Engines::default(), |sum, gi| sum.plus(gi.profile.engines));
            prop_assert!(engines.fits_in(board.engines));
            prop_assert!(live.iter().map(|gi| gi.profile.memory_mib).sum::<u64>() <= board.memory_mib);
            prop_assert!(live.iter().map(|gi| gi.profile.multiprocessors).sum::<u32>() <= board.multiprocessors);
        }
    }
}
