//! Selectors that are as costly as the API server accepts, beside upstream's interpreter in the same run.

use crate::Figure;
use crate::costly::{self, Costly, Upstream};
use aliquot_allocator::selector::Selector;
use std::time::{Duration, Instant};

/// How often each expression is compiled and evaluated on either side; medians are compared.
const ROUNDS: u32 = 21;

/// An expression's times here as multiples of those upstream.
struct Ratio {
    name: &'static str,
    compile: f64,
    evaluate: f64,
}

pub(crate) fn measure(command: &str) -> Vec<Figure> {
    let Some(program) = std::env::var("ALIQUOT_ORACLE").ok().filter(|program| !program.is_empty()) else {
        println!("SKIPPED: costly selectors beside kube-scheduler's interpreter: ALIQUOT_ORACLE is not set");
        return Vec::new();
    };
    let corpus = costly::corpus();
    let theirs = costly::ask(&program, &corpus, ROUNDS);
    let accepted = corpus.iter().zip(&theirs).filter(|(_, theirs)| theirs.accepted);
    let mut ratios: Vec<_> = accepted.map(|(costly, theirs)| compare(costly, theirs)).collect();
    ratios.sort_by(|a, b| b.evaluate.total_cmp(&a.evaluate));
    println!("selectors beside kube-scheduler's interpreter, {} expressions; the worst:", ratios.len());
    for ratio in ratios.iter().take(5) {
        println!(
            "  {:<28} evaluation {:>7.3}, compilation {:>7.3}",
            ratio.name, ratio.evaluate, ratio.compile
        );
    }
    let evaluate = ratios.first().map_or(0.0, |ratio| ratio.evaluate);
    let compile = ratios.iter().map(|ratio| ratio.compile).fold(0.0, f64::max);
    let middle = ratios.get(ratios.len() / 2).map_or(0.0, |ratio| ratio.evaluate);
    vec![
        Figure::new("selector.cost_ratio_worst", evaluate.max(compile), "ratio", command),
        Figure::new("selector.evaluate_ratio_worst", evaluate, "ratio", command),
        Figure::new("selector.evaluate_ratio_median", middle, "ratio", command),
        Figure::new("selector.compile_ratio_worst", compile, "ratio", command),
    ]
}

fn compare(costly: &Costly, theirs: &Upstream) -> Ratio {
    let (mut compiling, mut evaluating) = (Vec::new(), Vec::new());
    costly::on_our_device(|environment, facts| {
        for _ in 0..ROUNDS {
            let start = Instant::now();
            let selector = Selector::compile(costly.expression);
            compiling.push(start.elapsed());
            let start = Instant::now();
            let answer = selector.matches(environment, facts, &mut || false);
            evaluating.push(start.elapsed());
            assert_eq!(
                answer.clone().ok(),
                theirs.error.is_empty().then_some(theirs.matches),
                "{}: {answer:?} here, {:?} upstream",
                costly.name,
                theirs.error
            );
        }
    });
    Ratio {
        name: costly.name,
        compile: ratio(compiling, theirs.compile_ns),
        evaluate: ratio(evaluating, theirs.evaluate_ns),
    }
}

fn ratio(mut ours: Vec<Duration>, theirs: u64) -> f64 {
    ours.sort();
    ours[ours.len() / 2].as_secs_f64() * 1e9 / theirs.max(1) as f64
}
