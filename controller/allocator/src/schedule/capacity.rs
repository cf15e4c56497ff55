//! Consumable capacity: computes exactly how much a request takes (KEP-5075).

use super::ask::Alternative;
use crate::quantity::Quantity;
use crate::snapshot::{Capacity, Range, Shape, Sym};
use std::sync::Arc;

/// Returns what a request consumes of a capacity, after rounding; `None` if the policy does not allow such an
/// amount. Without a requested amount this is the policy's default, and without a default the whole capacity.
pub fn consumed(capacity: &Capacity, requested: Option<Quantity>) -> Option<Quantity> {
    let policy = capacity.policy.as_ref();
    let Some(requested) = requested else {
        let amount = policy.and_then(|policy| policy.default).unwrap_or(capacity.value);
        return allowed(capacity, amount);
    };
    let rounded = match policy {
        None => requested,
        Some(policy) => match (policy.range, policy.values.is_empty()) {
            (Some(range), _) => round_up(requested, range),
            // No value is large enough for an amount above the greatest one.
            (None, false) => policy.values.iter().copied().find(|value| requested <= *value)?,
            (None, true) => requested,
        },
    };
    allowed(capacity, rounded)
}

fn allowed(capacity: &Capacity, amount: Quantity) -> Option<Quantity> {
    let Some(policy) = &capacity.policy else { return Some(amount) };
    if policy.default == Some(amount) {
        return Some(amount);
    }
    let fine = match (policy.range, policy.values.is_empty()) {
        (Some(range), _) => range.max.is_none_or(|max| amount <= max) && on_step(amount, range),
        (None, false) => policy.values.contains(&amount),
        (None, true) => true,
    };
    fine.then_some(amount)
}

fn round_up(requested: Quantity, range: Range) -> Quantity {
    if requested < range.min {
        return range.min;
    }
    let Some(step) = range.step.map(Quantity::nanos).filter(|step| *step > 0) else { return requested };
    let above = requested.nanos().saturating_sub(range.min.nanos());
    let steps = above.div_euclid(step) + i128::from(above.rem_euclid(step) != 0);
    Quantity::from_nanos(range.min.nanos().saturating_add(steps.saturating_mul(step)))
}

fn on_step(amount: Quantity, range: Range) -> bool {
    match range.step.map(Quantity::nanos).filter(|step| *step > 0) {
        Some(step) => amount.nanos().saturating_sub(range.min.nanos()).rem_euclid(step) == 0,
        None => true,
    }
}

/// The amounts taken of each capacity of a device; `None` if the device is not shared.
pub(super) type Consumed = Option<Arc<[Quantity]>>;

/// Returns the amounts that an alternative takes of a device's capacities; `Some(None)` if the device is not
/// shared. Returns `None` if the alternative asks for more than there is, for an amount that is not allowed,
/// or for a capacity that the device lacks.
pub(super) fn consumption(shape: &Shape, alternative: &Alternative<'_>) -> Option<Consumed> {
    let known = |name: &Option<Sym>| {
        name.is_some_and(|name| shape.capacities.binary_search_by_key(&name, |(n, _)| *n).is_ok())
    };
    if !alternative.capacities.iter().all(|asked| known(&asked.name)) {
        return None;
    }
    let mut amounts = Vec::with_capacity(shape.capacities.len());
    for (name, capacity) in &shape.capacities {
        let requested =
            alternative.capacities.iter().find(|asked| asked.name == Some(*name)).map(|asked| asked.amount);
        let amount = consumed(capacity, requested)?;
        if amount > capacity.value {
            return None;
        }
        amounts.push(amount);
    }
    Some(shape.shareable.then(|| amounts.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Policy;
    use proptest::prelude::*;
    use rstest::rstest;

    fn q(text: &str) -> Quantity {
        text.parse().expect("a quantity")
    }

    fn range(
        value: &str,
        default: Option<&str>,
        min: &str,
        max: Option<&str>,
        step: Option<&str>,
    ) -> Capacity {
        Capacity {
            value: q(value),
            policy: Some(Policy {
                default: default.map(q),
                values: Vec::new(),
                range: Some(Range { min: q(min), max: max.map(q), step: step.map(q) }),
            }),
        }
    }

    fn values(value: &str, default: Option<&str>, values: &[&str]) -> Capacity {
        let values = values.iter().map(|v| q(v)).collect();
        Capacity { value: q(value), policy: Some(Policy { default: default.map(q), values, range: None }) }
    }

    fn plain(value: &str) -> Capacity {
        Capacity { value: q(value), policy: None }
    }

    #[rstest]
    #[case::plain_not_asked(plain("80Gi"), None, Some("80Gi"))]
    #[case::plain_asked(plain("80Gi"), Some("3Gi"), Some("3Gi"))]
    #[case::default_when_not_asked(
        range("80Gi", Some("80Gi"), "1Mi", Some("80Gi"), Some("1Mi")),
        None,
        Some("80Gi")
    )]
    #[case::on_step(
        range("80Gi", Some("80Gi"), "1Mi", Some("80Gi"), Some("1Mi")),
        Some("10Gi"),
        Some("10Gi")
    )]
    #[case::rounded_up_to_step(
        range("80Gi", Some("80Gi"), "1Mi", Some("80Gi"), Some("1Mi")),
        Some("1048577"),
        Some("2Mi")
    )]
    #[case::raised_to_least(
        range("80Gi", Some("80Gi"), "1Mi", Some("80Gi"), Some("1Mi")),
        Some("1"),
        Some("1Mi")
    )]
    #[case::beyond_most(range("80Gi", Some("1Gi"), "1Mi", Some("40Gi"), Some("1Mi")), Some("41Gi"), None)]
    #[case::no_most(range("80Gi", Some("1Gi"), "1Mi", None, Some("1Mi")), Some("41Gi"), Some("41Gi"))]
    #[case::no_step(range("80Gi", Some("1Gi"), "1Mi", Some("80Gi"), None), Some("1048577"), Some("1048577"))]
    #[case::zero_is_allowed(range("100", Some("0"), "0", Some("100"), Some("1")), Some("0"), Some("0"))]
    #[case::fraction_of_a_unit(
        range("100", Some("0"), "0", Some("100"), Some("1")),
        Some("1500m"),
        Some("2")
    )]
    #[case::step_counted_from_least(
        range("100", Some("3"), "3", Some("99"), Some("5")),
        Some("9"),
        Some("13")
    )]
    #[case::rounding_beyond_most(range("100", Some("3"), "3", Some("13"), Some("5")), Some("14"), None)]
    #[case::fractional_step(
        range("2", Some("100m"), "100m", Some("2"), Some("100m")),
        Some("150m"),
        Some("200m")
    )]
    #[case::value(values("10", Some("1"), &["1"]), Some("1"), Some("1"))]
    #[case::value_not_asked(values("10", Some("1"), &["1"]), None, Some("1"))]
    #[case::value_rounded_up(values("10", Some("1"), &["1", "4", "8"]), Some("5"), Some("8"))]
    #[case::value_zero_becomes_one(values("10", Some("1"), &["1"]), Some("0"), Some("1"))]
    #[case::beyond_values(values("10", Some("1"), &["1", "4"]), Some("5"), None)]
    #[case::no_default_takes_all(values("10", None, &["1", "10"]), None, Some("10"))]
    #[case::no_default_and_all_not_allowed(values("10", None, &["1", "4"]), None, None)]
    fn requests_are_rounded_as_upstream_does(
        #[case] capacity: Capacity,
        #[case] requested: Option<&str>,
        #[case] expected: Option<&str>,
    ) {
        assert_eq!(consumed(&capacity, requested.map(q)), expected.map(q));
    }

    proptest! {
        #[test]
        fn never_less_than_asked_and_always_allowed(
            min in 0u64..50, step in 1u64..50, steps in 0u64..50, requested in 0u64..5000,
        ) {
            let max = min + step * steps;
            let capacity = range(
                &(max + 7).to_string(), Some(&min.to_string()), &min.to_string(),
                Some(&max.to_string()), Some(&step.to_string()),
            );
            let asked = Quantity::from_u64(requested);
            match consumed(&capacity, Some(asked)) {
                Some(amount) => {
                    prop_assert!(amount >= asked && amount <= Quantity::from_u64(max));
                    prop_assert_eq!((amount.to_u64().expect("whole") - min) % step, 0);
                    prop_assert!(requested < min || amount.to_u64().expect("whole") - requested < step);
                }
                None => prop_assert!(requested > max),
            }
        }
    }
}
