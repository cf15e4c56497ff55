//! What costly selectors take here, in steps, against the cost that the API server estimates for them.

use crate::costly;
use aliquot_allocator::selector::{MOST_STEPS, Selector};

/// Steps for one unit of upstream's estimate, where a call of a regular expression is a unit for each
/// four bytes of its pattern and ten of its text, whatever classes of Unicode it names.
const STEPS_PER_UNIT: u64 = 100;

#[test]
fn what_the_api_server_accepts_takes_steps_in_proportion_to_its_estimate() {
    let Some(program) = crate::oracle() else { return };
    let corpus = costly::corpus();
    let answers = costly::ask(&program, &corpus, 1);
    let mut worst = (0.0, "");
    for (costly, theirs) in corpus.iter().zip(&answers) {
        let selector = Selector::compile(costly.expression);
        let (answer, steps) =
            costly::on_our_device(|environment, facts| selector.metered(environment, facts, &mut || false));
        println!(
            "{:<28} accepted {:<5} estimate {:>9} steps {steps:>9}",
            costly.name, theirs.accepted, theirs.estimate
        );
        assert!(steps <= MOST_STEPS + 10_000, "{}: {steps} steps", costly.name);
        if !theirs.accepted {
            continue;
        }
        // Constants and logical operators are free upstream.
        let most = costly.expression.len() as u64 + STEPS_PER_UNIT * theirs.estimate;
        assert!(steps <= most, "{}: {steps} steps, at most {most} expected", costly.name);
        let answered = theirs.error.is_empty().then_some(theirs.matches);
        assert_eq!(
            answer.clone().ok(),
            answered,
            "{}: {answer:?} here, {:?} upstream",
            costly.name,
            theirs.error
        );
        let ratio = steps as f64 / theirs.estimate.max(1) as f64;
        if ratio > worst.0 {
            worst = (ratio, costly.name);
        }
    }
    println!("at most {:.2} steps for a unit of upstream's estimate: {}", worst.0, worst.1);
    assert!(
        answers.iter().filter(|theirs| theirs.accepted).count() > 50,
        "most of the corpus can be written"
    );
}
