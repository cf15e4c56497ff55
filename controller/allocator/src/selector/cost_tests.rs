//! What evaluations cost, counted in steps.

use super::*;
use rstest::rstest;

const DRIVER: &str = "gpu.aliquot.dev";

fn run(expression: &str, expired: &mut dyn FnMut() -> bool) -> (Result<bool, SelectorError>, u64) {
    let facts = DeviceFacts { driver: DRIVER, ..DeviceFacts::default() };
    Selector::compile(expression).metered(&Environment::new(), &facts, expired)
}

fn list(length: usize) -> String {
    format!("{:?}", (1..=length).collect::<Vec<_>>())
}

#[test]
fn a_literal_pattern_is_compiled_once_not_at_every_call() {
    let expression = format!(r#"{}.all(i, {}.all(j, !"x".matches("\\w{{100}}")))"#, list(20), list(10));
    let (answer, steps) = run(&expression, &mut || false);
    assert_eq!(answer, Ok(true));
    assert!(steps < 5_000, "{steps}");
}

#[test]
fn an_expression_beyond_the_budget_is_given_up_and_says_so() {
    let numbers = list(500);
    let (answer, steps) = run(
        &format!("{numbers}.all(a, {numbers}.all(b, {numbers}.all(c, a + b + c > 0))) || true"),
        &mut || false,
    );
    let error = answer.expect_err("`||` does not absorb it");
    assert!(matches!(error, SelectorError::TooCostly { .. }), "{error}");
    assert!(error.to_string().contains("simplify it"), "{error}");
    assert!(steps < MOST_STEPS + 10_000, "{steps}");
}

#[test]
fn an_evaluation_ends_when_time_is_up() {
    let mut looks = 0;
    let mut expired = || {
        looks += 1;
        looks > 3
    };
    let (answer, steps) = run("lists.range(100000).all(i, i >= 0) || true", &mut expired);
    assert!(matches!(answer, Err(SelectorError::OutOfTime { .. })), "{answer:?}");
    assert!(steps < 1_000_000, "{steps}");
}

#[rstest]
#[case::texts("\"0123456789\"")]
#[case::lists("[1]")]
fn doubling_takes_no_memory_beyond_the_budget(#[case] first: &str) {
    let binds: String = (0..40).map(|i| format!("cel.bind(a{}, a{i} + a{i}, ", i + 1)).collect();
    let expression = format!("cel.bind(a0, {first}, {binds}a40.size() > 0{}", ")".repeat(41));
    let (answer, steps) = run(&expression, &mut || false);
    assert!(matches!(answer, Ok(true) | Err(SelectorError::TooCostly { .. })), "{answer:?}");
    // What is joined without being copied is not charged before it is walked.
    assert!(steps <= MOST_STEPS || answer.is_err(), "{steps}");
}

#[rstest]
#[case::negations(format!("{}true{}", "!!(".repeat(60), ")".repeat(60)))]
#[case::optionals(format!("optional.of(1){}.hasValue()", ".optMap(a, a)".repeat(60)))]
#[case::macros(format!("{}true{}", "[1].all(x, ".repeat(60), ")".repeat(60)))]
#[case::brackets(format!("{}true{}", "(".repeat(100), ")".repeat(100)))]
fn nesting_costs_in_proportion_to_the_text(#[case] expression: String) {
    let (answer, steps) = run(&expression, &mut || false);
    assert_eq!(answer, Ok(true));
    assert!(steps < 20 * expression.len() as u64, "{steps}");
}

#[rstest]
#[case::repetitions(r#"!"x".matches("((a{100}){10}){1000}")"#.to_owned())]
#[case::folded_classes(format!(r#"!"x".matches("(?i){}")"#, r"\\pL".repeat(100)))]
fn a_pattern_that_is_too_large_is_not_compiled(#[case] expression: String) {
    let (answer, _) = run(&expression, &mut || false);
    assert!(matches!(answer, Err(SelectorError::TooCostly { .. })), "{answer:?}");
}

#[test]
fn an_expression_longer_than_the_api_server_takes_is_not_kept() {
    let selector = Selector::compile(&format!("\"{}\" == \"\"", "x".repeat(600_000)));
    assert!(selector.bytes() < 1_000, "{}", selector.bytes());
}

#[test]
fn compiled_expressions_are_bounded_in_bytes() {
    let selectors = Selectors::with_room(1 << 20);
    for number in 0..2_000 {
        let expression = format!("device.driver == \"{number}{}\"", "x".repeat(2_000)).into();
        selectors.get(DRIVER, &expression);
        assert!(selectors.bytes() <= 1 << 20, "{number}: {}", selectors.bytes());
    }
}

proptest::proptest! {
    #[test]
    fn a_regular_expression_matches_as_the_regex_crate_has_it(
        pattern in "[ab]{0,2}(\\(a\\|b[*+?]?\\)|[ab][*+?]|\\[ab\\]\\{1,3\\}|\\^|\\$|\\.){0,4}",
        text in "[abc]{0,8}",
    ) {
        if let Ok(theirs) = ::regex::Regex::new(&pattern) {
            let mut never = || false;
            let mut meter = Meter::new(MOST_STEPS, &mut never);
            let mut scratch = regex::Scratch::default();
            let ours = regex::Regex::compile(&pattern, &mut regex::Allowance::default()).expect("it is valid");
            let found = ours.find_at(&text, 0, &mut scratch, &mut meter).expect("it is cheap");
            proptest::prop_assert_eq!(found, theirs.find(&text).map(|found| (found.start(), found.end())));
            let matches = ours.is_match(&text, &mut scratch, &mut meter).expect("it is cheap");
            proptest::prop_assert_eq!(matches, theirs.is_match(&text));
        }
    }
}
