//! Keeps the fields that a newer release wrote into a record and that this release does not know, and puts
//! them back in their place. Pure: it does no I/O.
//!
//! The fields are found by comparison: those on disk that are missing when the decoded record is encoded
//! again.

use serde_json::Value;
use std::collections::BTreeMap;

/// The fields that this release does not know, by their place in the record.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Surplus(BTreeMap<String, Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// A field that is not known.
    Unknown(Value),
    /// Unknown fields within a field that is known.
    Within(Surplus),
    /// Unknown fields within the items of a list.
    Items(Vec<Option<Part>>),
}

impl Surplus {
    /// Returns the fields that `written` has and that `known`, the same record as this release writes it,
    /// lacks.
    pub fn of(written: &Value, known: &Value) -> Self {
        let (Value::Object(written), Value::Object(known)) = (written, known) else { return Self::default() };
        let parts = written.iter().filter_map(|(name, value)| {
            let part = match known.get(name) {
                None => (!value.is_null()).then(|| Part::Unknown(value.clone())),
                Some(known) => Part::within(value, known),
            };
            Some((name.clone(), part?))
        });
        Self(parts.collect())
    }

    /// Returns true if there are no such fields.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes a field that is known after all.
    pub fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Keeps only the unknown fields of the record itself, for a record of the same claim with other content.
    pub fn of_the_whole(self) -> Self {
        Self(self.0.into_iter().filter(|(_, part)| matches!(part, Part::Unknown(_))).collect())
    }

    /// Puts back every field whose place is still there. Values that this release writes are not replaced.
    pub fn put_back(&self, into: &mut Value) {
        let Value::Object(fields) = into else { return };
        for (name, part) in &self.0 {
            match (fields.get_mut(name), part) {
                (None, Part::Unknown(value)) => {
                    fields.insert(name.clone(), value.clone());
                }
                (Some(field), part) => part.put_back(field),
                (None, _) => {}
            }
        }
    }
}

impl Part {
    fn within(written: &Value, known: &Value) -> Option<Self> {
        match (written, known) {
            (Value::Object(_), Value::Object(_)) => {
                let within = Surplus::of(written, known);
                (!within.is_empty()).then_some(Self::Within(within))
            }
            (Value::Array(written), Value::Array(known)) => {
                let items: Vec<Option<Self>> =
                    written.iter().zip(known).map(|(written, known)| Self::within(written, known)).collect();
                items.iter().any(Option::is_some).then_some(Self::Items(items))
            }
            _ => None,
        }
    }

    fn put_back(&self, into: &mut Value) {
        match (self, into) {
            (Self::Within(surplus), into) => surplus.put_back(into),
            (Self::Items(parts), Value::Array(items)) => {
                for (part, item) in parts.iter().zip(items) {
                    if let Some(part) = part {
                        part.put_back(item);
                    }
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn what_is_not_known_comes_back_at_every_depth_and_what_is_written_stands() {
        let known = json!({"state": "A", "devices": [{"gpu": "x"}, {"gpu": "y", "share": {"n": 1}}]});
        let written = json!({"state": "A", "new": [1], "null": null, "adopted": false,
            "devices": [{"gpu": "x", "hook": {"z": 1}}, {"gpu": "y", "share": {"n": 1, "m": 2}}]});
        let surplus = Surplus::of(&written, &known);
        let mut later = json!({"state": "B", "adopted": true,
            "devices": [{"gpu": "x"}, {"gpu": "y", "share": {"n": 5}}]});
        surplus.put_back(&mut later);
        assert_eq!(
            later,
            json!({"state": "B", "adopted": true, "new": [1],
                "devices": [{"gpu": "x", "hook": {"z": 1}}, {"gpu": "y", "share": {"n": 5, "m": 2}}]})
        );
        // What was within something that is gone does not come back half.
        let mut without = json!({"state": "B", "devices": [{"gpu": "x"}, {"gpu": "y"}]});
        surplus.put_back(&mut without);
        assert_eq!(without["devices"][1], json!({"gpu": "y"}));
        let mut other = json!({"devices": [{"gpu": "z"}]});
        surplus.of_the_whole().put_back(&mut other);
        assert_eq!(other, json!({"devices": [{"gpu": "z"}], "new": [1], "adopted": false}));
    }

    fn tree() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![any::<bool>().prop_map(Value::from), any::<u8>().prop_map(Value::from)];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-d]", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    /// The same without some of its fields, which the bits choose.
    fn thinned(value: &Value, bits: &mut u64) -> Value {
        match value {
            Value::Object(map) => {
                let mut kept = serde_json::Map::new();
                for (name, value) in map {
                    *bits = bits.rotate_right(1);
                    if *bits & 1 == 0 {
                        kept.insert(name.clone(), thinned(value, bits));
                    }
                }
                Value::Object(kept)
            }
            Value::Array(list) => list.iter().map(|value| thinned(value, bits)).collect(),
            value => value.clone(),
        }
    }

    proptest! {
        #[test]
        fn what_was_taken_away_is_put_back(mut bits: u64, fields in prop::collection::btree_map("[a-d]", tree(), 0..4)) {
            let written = Value::Object(fields.into_iter().collect());
            let mut known = thinned(&written, &mut bits);
            Surplus::of(&written, &known).put_back(&mut known);
            prop_assert_eq!(known, written);
        }
    }
}
