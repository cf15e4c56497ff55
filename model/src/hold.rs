//! The text of the driver's own entry in a claim's `reservedFor`, which keeps the claim's devices without a
//! pod. The controller writes it, and the node agent reads it.

use crate::names::{HOLD_GROUP, HOLD_RESOURCE};

/// The content of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// A pod uses the claim; the time begins when the last pod is gone.
    InUse,
    /// No pod uses the claim; it is kept until this second of Unix time.
    Until(i64),
}

const IN_USE: &str = "in-use";
const UNTIL: &str = "until-";

impl Hold {
    /// Returns the name of the entry.
    pub fn name(self) -> String {
        match self {
            Self::InUse => IN_USE.to_owned(),
            Self::Until(second) => format!("{UNTIL}{second}"),
        }
    }

    /// Reads an entry from its API group, resource and name; `None` if it is not an entry of this driver. An
    /// entry of this driver that cannot be read has ended.
    pub fn read(api_group: Option<&str>, resource: &str, name: &str) -> Option<Self> {
        let ours = api_group == Some(HOLD_GROUP) && resource == HOLD_RESOURCE;
        ours.then(|| match name {
            IN_USE => Self::InUse,
            name => Self::Until(name.strip_prefix(UNTIL).and_then(|s| s.parse().ok()).unwrap_or(0)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_as_it_is_written() {
        for hold in [Hold::InUse, Hold::Until(1_800_000_000)] {
            assert_eq!(Hold::read(Some(HOLD_GROUP), HOLD_RESOURCE, &hold.name()), Some(hold));
        }
    }

    #[test]
    fn what_cannot_be_read_has_ended_and_what_is_not_ours_is_none() {
        assert_eq!(Hold::read(Some(HOLD_GROUP), HOLD_RESOURCE, "until-soon"), Some(Hold::Until(0)));
        assert_eq!(Hold::read(None, "pods", "in-use"), None);
        assert_eq!(Hold::read(Some("other.example"), HOLD_RESOURCE, "in-use"), None);
    }
}
