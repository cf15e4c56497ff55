//! Finds out why no device is what a request asks for: which of class, selectors and capacities no device
//! meets, and what is published instead.

use super::ask::{Alternative, Amount};
use super::matcher::{Answers, Matcher};
use super::miss::{Demand, MOST_PUBLISHED, Miss, Published, bare};
use crate::selector::{AttributeValue, Compiled, Field};
use crate::snapshot::{IDENTITIES, Layout, Owner, Snapshot};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Returns how many of an alternative's selectors select a device before the first that does not.
pub(super) fn passed(answers: &[Arc<Answers>], position: u32) -> usize {
    let fails = |answers: &Arc<Answers>| !matches!(answers.get(position), Some(Ok(true)));
    answers.iter().position(fails).unwrap_or(answers.len())
}

/// Returns why none of these devices is what is asked for, although the first `reached` selectors select a
/// device of this owner.
pub(super) fn find(
    index: &Snapshot,
    matcher: &Matcher,
    layouts: &[(&Layout, Vec<Arc<Answers>>)],
    alternative: &Alternative<'_>,
    owner: Owner,
    reached: usize,
) -> (Miss, Published) {
    let class = &alternative.class.name;
    let near = || {
        layouts.iter().flat_map(|(layout, answers)| {
            let devices = layout.devices.iter().zip(0u32..).filter(|(device, _)| device.owner == owner);
            let near = devices.filter(|(_, position)| passed(answers, *position) >= reached);
            near.map(|(device, position)| (*layout, device, position))
        })
    };
    let Some(expression) = alternative.selectors.get(reached) else {
        let capacities = near().flat_map(|(_, device, _)| index.shape(device).capacities.iter());
        let known: BTreeSet<_> = capacities.map(|(name, _)| *name).collect();
        let unknown = |asked: &&Amount| asked.name.is_none_or(|name| !known.contains(&name));
        return match alternative.capacities.iter().find(unknown) {
            Some(asked) => (
                Miss::NoCapacity { class: class.clone(), written: asked.written.clone() },
                known.into_iter().map(|name| bare(index.name(name)).to_owned()).collect(),
            ),
            None => (Miss::Amount, Published::new()),
        };
    };
    let compiled = matcher.compiled(index.driver(), expression);
    let demand = demand(index.driver(), &compiled);
    // Which GPUs exist is not shown to tenants, and differs on each node.
    let told = demand.as_ref().filter(|demand| !IDENTITIES.contains(&demand.attribute.as_str()));
    let symbol = told.and_then(|demand| index.sym(&format!("{}/{}", index.driver(), demand.attribute)));
    let values = symbol
        .into_iter()
        .flat_map(|name| near().filter_map(move |(layout, _, position)| layout.attribute(position, name)));
    // Hundreds of devices have only a few different values.
    let values: BTreeSet<u32> = values.collect();
    let published = values.into_iter().take(MOST_PUBLISHED).map(|value| text(index.value(value))).collect();
    let miss = if reached < alternative.class.selectors.len() {
        Miss::Class { class: class.clone(), demand }
    } else {
        Miss::Selector { class: class.clone(), expression: expression.clone(), demand }
    };
    (miss, published)
}

/// Returns the first attribute of the driver's devices that an expression compares with literals.
fn demand(driver: &str, compiled: &Compiled) -> Option<Demand> {
    let named = compiled.selector.named();
    let attributes = named.iter().filter(|named| named.field == Field::Attributes && named.domain == driver);
    attributes.into_iter().find_map(|named| {
        let values = compiled.selector.demanded(driver, &named.name)?;
        let values = values.into_iter().map(str::to_owned).collect();
        Some(Demand { attribute: named.name.clone(), values })
    })
}

fn text(value: &AttributeValue) -> String {
    match value {
        AttributeValue::Int(value) => value.to_string(),
        AttributeValue::Bool(value) => value.to_string(),
        AttributeValue::Text(value) | AttributeValue::Version(value) => value.to_string(),
    }
}
