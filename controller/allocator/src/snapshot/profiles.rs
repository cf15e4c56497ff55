//! The MIG profiles of the boards that nodes publish.

use super::Snapshot;
use crate::selector::AttributeValue;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the profiles of each board.
pub fn profiles(index: &Snapshot) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let (Some(profile), Some(product)) =
        (index.find_qualified("profile"), index.find_qualified("productName"))
    else {
        return found;
    };
    for layout in index.makes_published() {
        for (position, _) in (0u32..).zip(layout.devices.iter()) {
            let text = |name| layout.attribute(position, name).and_then(|value| text_of(index, value));
            if let Some(profile) = text(profile) {
                let board = text(product).unwrap_or("unknown board").to_owned();
                found.entry(board).or_default().insert(profile.to_owned());
            }
        }
    }
    found
}

/// Returns the value of an attribute, if it is text.
pub fn text_of(index: &Snapshot, value: u32) -> Option<&str> {
    match index.value(value) {
        AttributeValue::Text(text) => Some(text),
        _ => None,
    }
}
