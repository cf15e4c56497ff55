//! Small cases against the best that is possible: two GPUs, claims that come one after the other and
//! stay. The optimum knows all of them beforehand and may refuse any.

use crate::claims::{self, PROFILES, SLICES, USUAL};
use crate::placers::{Fgd, Placer, Rule, Shipped, Simple, mask};
use crate::random::Random;
use crate::{Args, Figure};
use aliquot_allocator::schedule::Strategy;

const GPUS: usize = 2;
/// Claims of a case: about twice of what fits.
const CLAIMS: usize = 14;
/// Cases per seed.
const CASES: u64 = 20;

/// The most slices that claims can get: by what is in use of the two GPUs, the most of those in use.
fn optimum(wishes: &[usize]) -> u32 {
    let mut reached = vec![false; 1 << (8 * GPUS)];
    reached[0] = true;
    for profile in wishes {
        let states: Vec<usize> = (0..reached.len()).filter(|state| reached[*state]).collect();
        for state in states {
            for gpu in 0..GPUS {
                for start in PROFILES[*profile].starts {
                    let mask = usize::try_from(mask(*profile, *start)).expect("small") << (8 * gpu);
                    if state & mask == 0 {
                        reached[state | mask] = true;
                    }
                }
            }
        }
    }
    let most = (0..reached.len()).filter(|state| reached[*state]).map(usize::count_ones).max();
    most.expect("the empty state is reached")
}

pub(crate) fn measure(args: &Args, command: &str) -> Vec<Figure> {
    let mut sums = [0.0; 5];
    let mut all = 0.0;
    for case in 0..CASES * args.seeds {
        let mut random = Random::new(args.seed.wrapping_mul(1_000) + case);
        let wishes: Vec<usize> = (0..CLAIMS).map(|_| claims::any_of_mix(&USUAL, &mut random)).collect();
        all += f64::from(optimum(&wishes));
        let mut placers: [Box<dyn Placer>; 5] = [
            Box::new(Simple::on(GPUS, Rule::Spread, case)),
            Box::new(Simple::on(GPUS, Rule::Random, case)),
            Box::new(Simple::on(GPUS, Rule::Fullest, case)),
            Box::new(Fgd::on(GPUS, USUAL)),
            Box::new(Shipped::on(1, GPUS, Strategy::BinPack)),
        ];
        for (sum, placer) in sums.iter_mut().zip(&mut placers) {
            for (claim, profile) in wishes.iter().enumerate() {
                if placer.place(claim, *profile) {
                    *sum += f64::from(PROFILES[*profile].size);
                }
            }
        }
    }
    let percent = sums.map(|sum| 100.0 * sum / all);
    println!(
        "slices given of those that the optimum gives, two GPUs of {SLICES} slices, {} cases: spread {:.1} %, random \
         {:.1} %, fullest {:.1} %, fgd {:.1} %, aliquot {:.1} %",
        CASES * args.seeds,
        percent[0],
        percent[1],
        percent[2],
        percent[3],
        percent[4]
    );
    let others = percent[..4].iter().copied().fold(0.0, f64::max);
    vec![Figure::new("allocator.packing.exact.given_percent", percent[4], "percent", command).against(others)]
}
