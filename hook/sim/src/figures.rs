//! The figures: each is the worst over the device variants.

use crate::rivals::{self, Board, Rule};
use crate::scenarios::{
    EIGHT, PERCENTS, SEEDS, WAITING_PERCENTS, graphs, loads, long_tails, tenants, waiting, window,
};
use crate::waits::Waits;
use crate::world::{Devices, Load, Outcome, Tenant, Variant, run, run_rival};

/// One figure for `limiter.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The name of the figure.
    pub name: String,
    /// The result.
    pub value: f64,
    /// The unit of the result.
    pub unit: &'static str,
    /// The value to compare it with: the goal, or the ideal.
    pub baseline: f64,
    /// What the baseline is, and what else has to be known.
    pub note: &'static str,
}

const GOAL: &str = "the baseline is the goal";
const IDEAL: &str = "our own reading of another limiter's description; the baseline is what was asked for";
const SAMPLED: &str =
    "NVML's samples are not long enough for kernels of 100 ms, so an error stays whoever limits";
const PUBLISHED: &str =
    "our own reading of another limiter's description; the baseline is its authors' figure";

/// Returns the errors of all tenants in the first window, in percentage points.
fn errors_of(outcome: &Outcome, tenants: &[Tenant]) -> Vec<f64> {
    let of = |(share, tenant): (&f64, &Tenant)| share * 100.0 - f64::from(tenant.percent);
    outcome.windows.iter().flat_map(|shares| shares.iter().zip(tenants).map(of)).collect()
}

/// Runs tenants, and returns their errors in percentage points.
pub fn errors(variant: Variant, tenants: &[Tenant], seed: u64) -> Vec<f64> {
    errors_of(&run(variant, tenants, window(tenants), 1, seed), tenants)
}

/// Returns the absolute errors of scenarios on a device, in order, and the waits in them.
fn all_errors(variant: Variant, loads: &[Load], percents: &[&[u8]]) -> (Vec<f64>, Waits) {
    let (mut all, mut waits) = (Vec::new(), Waits::default());
    for load in loads {
        for percents in percents {
            for seed in SEEDS {
                let tenants = tenants(percents, *load);
                let outcome = run(variant, &tenants, window(&tenants), 1, seed);
                all.extend(errors_of(&outcome, &tenants).iter().map(|e| e.abs()));
                waits = waits.and(outcome.waits);
            }
        }
    }
    all.sort_by(f64::total_cmp);
    (all, waits)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn worst(variants: &[Variant], of: impl Fn(Variant) -> f64) -> f64 {
    variants.iter().copied().map(of).fold(f64::NEG_INFINITY, f64::max)
}

/// Returns what tenants of 30 and 70 % get, as a ratio, for each device and load.
fn two_tenants_each(variants: &[Variant]) -> Vec<Figure> {
    let streams = Load { streams: 8, width: crate::gpu::WHOLE / 8, ..Load::of(5_000_000) };
    let loads = [
        ("0.5 ms", Load::of(500_000)),
        ("5 ms", Load::of(5_000_000)),
        ("50 ms", Load::of(50_000_000)),
        ("8 streams of 5 ms", streams),
    ];
    let mut all = Vec::new();
    for variant in variants {
        for (name, load) in &loads {
            let tenants = tenants(&[30, 70], *load);
            let outcome = run(*variant, &tenants, window(&tenants), 1, 1);
            let ratio = outcome.windows.first().and_then(|w| Some(w.first()? / w.get(1)?));
            all.push(Figure {
                name: format!("limiter.sim.two_tenants.ratio: {name}, {}", variant.name),
                value: ratio.unwrap_or(f64::NAN),
                unit: "30 % to 70 %",
                baseline: 3.0 / 7.0,
                note: GOAL,
            });
        }
    }
    all
}

/// Returns the figure that is furthest from 3/7.
fn furthest(each: Vec<Figure>) -> f64 {
    let far = |ratio: &f64| (ratio - 3.0 / 7.0).abs();
    let all = each.into_iter().map(|figure| figure.value);
    all.max_by(|a, b| far(a).total_cmp(&far(b))).unwrap_or(f64::NAN)
}

/// Returns Jain's index: 1 where all have the same, 1/n where one of n has everything.
fn jain_of(got: impl Iterator<Item = f64> + Clone) -> f64 {
    let squares: f64 = got.clone().map(|g| g * g).sum();
    got.clone().sum::<f64>().powi(2) / (got.count() as f64 * squares)
}

/// Returns Jain's index of what each of eight tenants got of its quota.
fn jain(variant: Variant) -> f64 {
    let tenants = tenants(&[5, 5, 10, 10, 10, 20, 20, 20], Load::of(5_000_000));
    let outcome = run(variant, &tenants, window(&tenants), 1, 1);
    let of = |shares: &Vec<f64>| jain_of(shares.iter().zip(&tenants).map(|(s, t)| s / f64::from(t.percent)));
    outcome.windows.iter().map(of).fold(f64::INFINITY, f64::min)
}

/// Returns numbers of processes of one share, and what each process does.
fn siblings() -> impl Iterator<Item = (usize, Load)> {
    let kernels = [50_000, 500_000, 5_000_000, 50_000_000];
    [2, 4, 8].into_iter().flat_map(move |processes| kernels.map(|kernel| (processes, Load::of(kernel))))
}

/// Returns Jain's index of what the processes of a share of 30 % have of it beside a share of 50 %, and by
/// how many percentage points the share is off.
fn among_siblings(variant: Variant, processes: usize, load: Load) -> (f64, f64) {
    let mut tenants = tenants(&[30, 50], load);
    if let Some(first) = tenants.first_mut() {
        first.load.processes = processes;
    }
    let outcome = run(variant, &tenants, window(&tenants), 1, 1);
    let jain = outcome.processes.first().map(|used| jain_of(used.iter().map(|ns| *ns as f64)));
    let error = errors_of(&outcome, &tenants).first().copied();
    (jain.unwrap_or(f64::NAN), error.unwrap_or(f64::NAN))
}

/// The lengths of the kernels of a borrower whose owner comes back, in nanoseconds.
const RECLAIMED_NS: [u64; 4] = [500_000, 5_000_000, 20_000_000, 50_000_000];

/// Returns the milliseconds from an owner's first launch until it has its quota: until the first 100 ms begin
/// in which it has at least nine tenths of it, in steps of 10 ms. It is the worst of several moments at which
/// the owner comes.
fn reclaim_ms(variant: Variant, kernel_ns: u64) -> f64 {
    [200, 203, 207, 212, 219]
        .map(|start| reclaim_at(variant, kernel_ns, start))
        .into_iter()
        .fold(0.0, f64::max)
}

fn reclaim_at(variant: Variant, kernel_ns: u64, from: usize) -> f64 {
    const STEP_NS: u64 = 10_000_000;
    let mut borrower = Tenant { percent: 20, load: Load::of(kernel_ns), is_soft: true, priority: 0 };
    borrower.load.jitter_percent = 5;
    let mut owner = Tenant { percent: 70, load: Load::of(2_000_000), is_soft: false, priority: 0 };
    owner.load.start_ns = from as u64 * STEP_NS;
    let outcome = run(variant, &[borrower, owner], STEP_NS, from + 100, 1);
    let got: Vec<f64> = outcome.windows.iter().skip(from).filter_map(|w| w.get(1).copied()).collect();
    let first = got.windows(10).position(|span| mean(span) >= 0.63);
    first.map_or(10.0 * got.len() as f64, |at| at as f64 * 10.0)
}

/// Returns the error of a tenant of 30 % with bursts that come to less than that, beside a busy one of 70 %:
/// how far it stays behind what it asks for, or the other from its quota, in percentage points. It is the
/// worst of several bursts.
fn burst_error(variant: Variant) -> f64 {
    // Launches of a burst, their length, and the pause: 20 % of the GPU, and 10 % in large bursts.
    let shapes = [(20, 1_000_000, 100_000_000), (400, 50_000, 100_000_000), (4, 5_000_000, 200_000_000)];
    let error = |(burst, kernel_ns, pause_ns): (u64, u64, u64)| {
        let mut tenants = tenants(&[30, 70], Load::of(2_000_000));
        let asked = (burst * kernel_ns) as f64 / pause_ns as f64 * 100.0;
        if let Some(first) = tenants.first_mut() {
            first.load = Load { burst, pause_ns, ..Load::of(kernel_ns) };
        }
        // The first second is that of learning.
        let outcome = run(variant, &tenants, 1_000_000_000, 11, 1);
        let of = |at: usize| {
            let got: Vec<f64> = outcome.windows.iter().skip(1).filter_map(|w| w.get(at).copied()).collect();
            mean(&got) * 100.0
        };
        (asked - of(0)).max(0.0).max((of(1) - 70.0).abs())
    };
    shapes.into_iter().map(error).fold(0.0, f64::max)
}

/// Returns mean and 95th percentile of the errors of these scenarios, and the waits in them.
fn sm_errors(variants: &[Variant], name: &str, loads: &[Load], percents: &[&[u8]]) -> (Vec<Figure>, Waits) {
    let all: Vec<_> = variants.iter().map(|variant| all_errors(*variant, loads, percents)).collect();
    let waits = all.iter().fold(Waits::default(), |sum, (_, waits)| sum.and(*waits));
    let highest = |of: &dyn Fn(&[f64]) -> f64| {
        all.iter().map(|(errors, _)| of(errors)).fold(f64::NEG_INFINITY, f64::max)
    };
    let p95 = |errors: &[f64]| errors.get(errors.len() * 95 / 100).copied().unwrap_or(f64::NAN);
    let figure = |what: &str, value, baseline| Figure {
        name: format!("limiter.sim.{name}.{what}"),
        value,
        unit: "percentage points, worst device",
        baseline,
        note: GOAL,
    };
    (vec![figure("mean_pp", highest(&mean), 1.0), figure("p95_pp", highest(&p95), 3.0)], waits)
}

/// Returns the same figures for scenarios beyond those of one to four tenants with kernels of even length.
fn further_errors(variants: &[Variant]) -> Vec<Figure> {
    let sets = [
        sm_errors(variants, "sm_error.graphs", &graphs(), &PERCENTS),
        sm_errors(variants, "sm_error.long_tails", &long_tails(), &PERCENTS),
        sm_errors(variants, "sm_error.waiting", &waiting(), &WAITING_PERCENTS),
        sm_errors(variants, "sm_error.eight_tenants", &loads(), &EIGHT),
    ];
    sets.into_iter().flat_map(|(figures, _)| figures).collect()
}

/// Returns all figures.
pub fn all(devices: &Devices) -> Vec<Figure> {
    let variants = &devices.variants;
    let (mut figures, waits) = sm_errors(variants, "sm_error", &loads(), &PERCENTS);
    let figure = |name: &str, value, unit, baseline| Figure {
        name: name.to_owned(),
        value,
        unit,
        baseline,
        note: GOAL,
    };
    figures.extend([
        figure(
            "limiter.sim.two_tenants.ratio",
            furthest(two_tenants_each(variants)),
            "30 % to 70 %, furthest of all",
            3.0 / 7.0,
        ),
        figure("limiter.sim.fairness.jain", -worst(variants, |v| -jain(v)), "8 tenants, worst device", 0.99),
        figure(
            "limiter.sim.siblings.jain",
            -worst(variants, |v| {
                siblings().map(|(n, load)| -among_siblings(v, n, load).0).fold(-1.0, f64::max)
            }),
            "2 to 8 processes of one share, worst device",
            0.9,
        ),
        figure(
            "limiter.sim.soft.reclaim_ms",
            worst(variants, |v| RECLAIMED_NS.map(|k| reclaim_ms(v, k)).into_iter().fold(0.0, f64::max)),
            "ms, kernels up to 50 ms, worst device",
            200.0,
        ),
        figure(
            "limiter.sim.waiter.late_ms",
            waits.latest_ns as f64 / 1e6,
            "ms, the latest that a waiter wakes behind its deadline, worst device",
            100.0,
        ),
    ]);
    figures.extend(further_errors(variants));
    figures.push(figure(
        "limiter.sim.bursts.error_pp",
        worst(variants, burst_error),
        "percentage points, 30 % in bursts beside 70 %, worst device",
        3.0,
    ));
    figures.push(figure(
        "limiter.sim.two_tenants.untold_ratio",
        furthest(two_tenants_each(&variants.map(|v| Variant { told_ns: 2_000_000, ..v }))),
        "30 % to 70 %, furthest of all where the node agent takes all time slices for 2 ms",
        3.0 / 7.0,
    ));
    figures.extend(two_tenants_each(variants));
    figures.extend(self::rivals(variants));
    figures
}

/// The kernels of vgpu-manager's load, in nanoseconds; its description says 50 to 200 ms, about 100.
const PUBLISHED_NS: [u64; 2] = [50_000_000, 100_000_000];

/// Returns the mean error in points, taken as vgpu-manager takes its errors: one tenant of 30 % waits for
/// each kernel, for 30 s; what counts is the utilisation that NVML shows, in whole percent, from the first
/// sample above 5 % on.
fn as_published(play: impl Fn(&[Tenant]) -> Outcome) -> f64 {
    let of = |kernel_ns: u64| {
        let tenants = tenants(&[30], Load { waits: true, ..Load::of(kernel_ns) });
        let outcome = play(&tenants);
        let percent = outcome.windows.iter().filter_map(|shares| Some((shares.first()? * 100.0).floor()));
        let errors: Vec<f64> =
            percent.skip_while(|percent| *percent <= 5.0).map(|percent| (percent - 30.0).abs()).collect();
        mean(&errors)
    };
    mean(&PUBLISHED_NS.map(of))
}

/// Returns the ratio of two tenants of 30 and 70 % as in HAMi-core's issue 314: matrix products of 21.6 ms,
/// for 240 s.
fn pair_as_published(play: impl Fn(&[Tenant]) -> Outcome) -> f64 {
    let outcome = play(&tenants(&[30, 70], Load::of(21_600_000)));
    outcome.windows.first().and_then(|w| Some(w.first()? / w.get(1)?)).unwrap_or(f64::NAN)
}

const SAMPLES: usize = 180;
const PAIR_NS: u64 = 240_000_000_000;

/// Returns the figures of others' controllers in the same world, measured as their authors did.
fn rivals(variants: &[Variant; 3]) -> Vec<Figure> {
    let [first, ..] = *variants;
    let figure = |who: &str, what: &str, value, unit, baseline, note| Figure {
        name: format!("limiter.sim.{who}.{what}"),
        value,
        unit,
        baseline,
        note,
    };
    const ERROR: &str = "percentage points, one tenant of 30 %, kernels of 50 and 100 ms, samples of NVML";
    const PAIR: &str = "30 % to 70 %, kernels of 21.6 ms";
    let ours = |tenants: &[Tenant]| run(first, tenants, rivals::SAMPLE_NS, SAMPLES, 1);
    let pair = |tenants: &[Tenant]| run(first, tenants, PAIR_NS, 1, 1);
    let mut all = vec![
        figure("as_published", "mean_pp", as_published(ours), ERROR, 1.0, SAMPLED),
        figure("as_published", "two_tenants.ratio", pair_as_published(pair), PAIR, 3.0 / 7.0, GOAL),
    ];
    for (rule, who, error, ratio) in
        [(Rule::Delta, "rival.delta", 19.1, Some(0.85)), (Rule::Aimd, "rival.aimd", 2.5, None)]
    {
        let sampled = |tenants: &[Tenant]| {
            run_rival((rule, Board::RTX_4080), first, tenants, rivals::SAMPLE_NS, SAMPLES, 1)
        };
        let pair = |tenants: &[Tenant]| run_rival((rule, Board::RTX_PRO_6000), first, tenants, PAIR_NS, 1, 1);
        let mut errors = Vec::new();
        for load in loads() {
            for percents in PERCENTS {
                let tenants = tenants(percents, load);
                let outcome = run_rival((rule, Board::RTX_4080), first, &tenants, window(&tenants), 1, 1);
                errors.extend(errors_of(&outcome, &tenants).iter().map(|e| e.abs()));
            }
        }
        let (goal, note) = ratio.map_or((3.0 / 7.0, IDEAL), |published| (published, PUBLISHED));
        all.extend([
            figure(who, "as_published.mean_pp", as_published(sampled), ERROR, error, PUBLISHED),
            figure(who, "as_published.two_tenants.ratio", pair_as_published(pair), PAIR, goal, note),
            figure(
                who,
                "sm_error.mean_pp",
                mean(&errors),
                "percentage points, scenarios of ours, 2 ms slices",
                1.0,
                IDEAL,
            ),
        ]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::VARIANTS;

    #[test]
    fn processes_of_a_share_have_equal_parts_of_it() {
        for variant in VARIANTS {
            for (processes, load) in siblings() {
                let (jain, error) = among_siblings(variant, processes, load);
                let what = format!("{} {processes} of {} ns", variant.name, load.longest_ns());
                assert!(jain > 0.9, "{what}: {jain}");
                assert!(error.abs() < 4.0, "{what}: the share is {error} points off");
            }
        }
    }

    #[test]
    fn tenants_get_their_percentages_whatever_their_neighbours_do() {
        for variant in VARIANTS {
            for percents in [&[30][..], &[30, 50], &[10, 30, 50]] {
                for kernel in [5_000_000, 50_000_000] {
                    let got = errors(variant, &tenants(percents, Load::of(kernel)), 3);
                    assert!(
                        got.iter().all(|e| e.abs() < 2.0),
                        "{} {percents:?} {kernel}: {got:?}",
                        variant.name
                    );
                }
            }
        }
    }

    #[test]
    fn a_share_without_neighbours_gets_its_percentage_with_kernels_of_any_length() {
        for kernel in [50_000, 500_000, 500_000_000] {
            let got = errors(VARIANTS[0], &tenants(&[30], Load::of(kernel)), 3);
            assert!(got.iter().all(|e| e.abs() < 1.0), "{kernel}: {got:?}");
        }
    }

    #[test]
    fn graphs_waiting_tenants_and_eight_of_them_get_their_percentages() {
        type Few<'a> = (Vec<Load>, &'a [&'a [u8]], f64);
        let few: [Few<'_>; 3] = [
            (graphs(), &[&[30], &[30, 50]], 2.5),
            (waiting(), &WAITING_PERCENTS, 1.0),
            (vec![Load::of(500_000), Load::of(50_000_000)], &EIGHT, 2.0),
        ];
        for (loads, percents, most) in few {
            for load in loads {
                for percents in percents {
                    let got = errors(VARIANTS[0], &tenants(percents, load), 1);
                    assert!(got.iter().all(|e| e.abs() < most), "{percents:?} {load:?}: {got:?}");
                }
            }
        }
    }

    #[test]
    fn lengths_with_a_long_tail_are_learned() {
        for load in long_tails() {
            let got = errors(VARIANTS[0], &tenants(&[30], load), 1);
            assert!(got.iter().all(|e| e.abs() < 1.0), "{load:?}: {got:?}");
        }
    }

    #[test]
    fn thirty_to_seventy_holds_on_a_full_gpu_whatever_its_slices_are() {
        for figure in two_tenants_each(&VARIANTS) {
            assert!((0.41..=0.45).contains(&figure.value), "{}: {}", figure.name, figure.value);
        }
    }

    #[test]
    fn who_borrows_has_nearly_all_that_is_idle() {
        for kernel in [500_000, 5_000_000, 50_000_000] {
            let borrower = Tenant { percent: 20, load: Load::of(kernel), is_soft: true, priority: 0 };
            let idle = Tenant {
                percent: 70,
                load: Load { start_ns: u64::MAX / 4, ..Load::of(kernel) },
                is_soft: false,
                priority: 0,
            };
            let outcome = run(VARIANTS[0], &[borrower, idle], 1_000_000_000, 4, 1);
            let got: Vec<f64> = outcome.windows.iter().skip(2).map(|w| w[0]).collect();
            assert!(mean(&got) > 0.9, "{kernel}: {got:?}");
        }
    }

    /// So that the simulation says something about others, too: limiter-decisions section 5.
    #[test]
    fn the_stock_controller_errs_as_its_authors_saw_it() {
        let sampled = |t: &[Tenant]| {
            run_rival((Rule::Delta, Board::RTX_4080), VARIANTS[0], t, rivals::SAMPLE_NS, SAMPLES, 1)
        };
        let error = as_published(sampled);
        assert!((17.0..21.0).contains(&error), "{error} where 17.5 to 20.7 was seen");
        let pair =
            |t: &[Tenant]| run_rival((Rule::Delta, Board::RTX_PRO_6000), VARIANTS[0], t, PAIR_NS, 1, 1);
        let ratio = pair_as_published(pair);
        assert!((0.8..=1.01).contains(&ratio), "{ratio} where 0.85 was seen");
        let ratio = pair_as_published(|t: &[Tenant]| run(VARIANTS[0], t, PAIR_NS, 1, 1));
        assert!((0.41..=0.45).contains(&ratio), "ours: {ratio}");
    }

    #[test]
    fn halving_loses_a_quarter_of_its_tenants_time_or_more() {
        let of = |kernel_ns: u64| {
            let tenants = tenants(&[30], Load { waits: true, ..Load::of(kernel_ns) });
            let outcome =
                run_rival((Rule::Aimd, Board::RTX_4080), VARIANTS[0], &tenants, 30_000_000_000, 1, 1);
            outcome.windows.first().and_then(|w| w.first().copied()).unwrap_or(f64::NAN)
        };
        for kernel_ns in PUBLISHED_NS {
            let got = of(kernel_ns);
            assert!((0.10..0.225).contains(&got), "{kernel_ns}: {got} of 0.30");
        }
    }

    #[test]
    fn an_owner_has_its_quota_back_soon() {
        for variant in VARIANTS {
            for kernel in RECLAIMED_NS {
                let reclaim = reclaim_at(variant, kernel, 212);
                assert!(reclaim <= 200.0, "{} {kernel}: {reclaim} ms", variant.name);
            }
        }
    }
}
