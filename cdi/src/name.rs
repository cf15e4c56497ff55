//! Names: the kind `vendor/class`, the device, and both together as `vendor/class=device`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The reason why a text is not a valid name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text has no `/`.
    #[error("{0:?} has no vendor: want vendor/class")]
    NoVendor(String),
    /// The text has no `=`.
    #[error("{0:?} names no device: want vendor/class=device")]
    NoDevice(String),
    /// A part is empty.
    #[error("the {part} is empty")]
    Empty {
        /// The part: vendor, class or device.
        part: &'static str,
    },
    /// A part is too long.
    #[error("the {part} {text:?} is longer than {limit} bytes")]
    TooLong {
        /// The part: vendor, class or device.
        part: &'static str,
        /// The text of the part.
        text: String,
        /// The most bytes allowed.
        limit: usize,
    },
    /// A part starts with a character that is not allowed there.
    #[error("the {part} {text:?} does not start with a {wanted}")]
    Start {
        /// The part: vendor, class or device.
        part: &'static str,
        /// The text of the part.
        text: String,
        /// The characters with which it may start.
        wanted: &'static str,
    },
    /// A part ends with a character that is not allowed there.
    #[error("the {part} {text:?} does not end with a letter or digit")]
    End {
        /// The part: vendor, class or device.
        part: &'static str,
        /// The text of the part.
        text: String,
    },
    /// A part contains a character that is not allowed.
    #[error("the {part} {text:?} contains {found:?}")]
    Character {
        /// The part: vendor, class or device.
        part: &'static str,
        /// The text of the part.
        text: String,
        /// The character.
        found: char,
    },
}

/// The rules for one part of a name.
struct Part {
    name: &'static str,
    limit: usize,
    digit_first: bool,
    inner: &'static [char],
}

const VENDOR: Part = Part { name: "vendor", limit: 253, digit_first: false, inner: &['-', '_', '.'] };
const CLASS: Part = Part { name: "class", limit: 63, digit_first: false, inner: &['-', '_', '.'] };
/// The specification gives no limit; this limit keeps a name usable as an id in the kubelet's API.
const DEVICE: Part = Part { name: "device", limit: 253, digit_first: true, inner: &['-', '_', '.', ':'] };

impl Part {
    fn check(&self, text: &str) -> Result<(), NameError> {
        let part = self.name;
        let (Some(first), Some(last)) = (text.chars().next(), text.chars().last()) else {
            return Err(NameError::Empty { part });
        };
        let text_owned = || text.to_owned();
        if text.len() > self.limit {
            return Err(NameError::TooLong { part, text: text_owned(), limit: self.limit });
        }
        if let Some(found) = text.chars().find(|c| !c.is_ascii_alphanumeric() && !self.inner.contains(c)) {
            return Err(NameError::Character { part, text: text_owned(), found });
        }
        if !(first.is_ascii_alphabetic() || self.digit_first && first.is_ascii_digit()) {
            let wanted = if self.digit_first { "letter or digit" } else { "letter" };
            return Err(NameError::Start { part, text: text_owned(), wanted });
        }
        if !last.is_ascii_alphanumeric() {
            return Err(NameError::End { part, text: text_owned() });
        }
        Ok(())
    }
}

macro_rules! text_conversions {
    ($name:ident) => {
        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.to_string()
            }
        }
    };
}

/// Vendor and class of devices, `vendor/class`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Kind {
    vendor: String,
    class: String,
}

impl Kind {
    /// Returns the kind of a vendor and class. Returns an error if a part is not valid.
    pub fn new(vendor: &str, class: &str) -> Result<Self, NameError> {
        VENDOR.check(vendor)?;
        CLASS.check(class)?;
        Ok(Self { vendor: vendor.to_owned(), class: class.to_owned() })
    }

    /// Returns the part before the slash, a domain.
    pub fn vendor(&self) -> &str {
        &self.vendor
    }

    /// Returns the part after the slash.
    pub fn class(&self) -> &str {
        &self.class
    }

    /// Returns the qualified name of a device of this kind.
    pub fn device(&self, name: DeviceName) -> QualifiedName {
        QualifiedName { kind: self.clone(), name }
    }
}

impl FromStr for Kind {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let (vendor, class) = text.split_once('/').ok_or_else(|| NameError::NoVendor(text.to_owned()))?;
        Self::new(vendor, class)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vendor, self.class)
    }
}

/// The name of a device within its kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceName(String);

impl DeviceName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DeviceName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        DEVICE.check(text)?;
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The qualified name `vendor/class=device`, as the kubelet passes it to the runtime.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct QualifiedName {
    /// Vendor and class.
    pub kind: Kind,
    /// The device.
    pub name: DeviceName,
}

impl FromStr for QualifiedName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let (kind, name) = text.split_once('=').ok_or_else(|| NameError::NoDevice(text.to_owned()))?;
        Ok(Self { kind: kind.parse()?, name: name.parse()? })
    }
}

impl fmt::Display for QualifiedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.name)
    }
}

text_conversions!(Kind);
text_conversions!(DeviceName);
text_conversions!(QualifiedName);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    proptest! {
        #[test]
        fn printing_a_qualified_name_and_parsing_it_gives_it_back(
            vendor in "[a-zA-Z]([a-zA-Z0-9._-]{0,20}[a-zA-Z0-9])?",
            class in "[a-zA-Z]([a-zA-Z0-9._-]{0,20}[a-zA-Z0-9])?",
            device in "[a-zA-Z0-9]([a-zA-Z0-9:._-]{0,40}[a-zA-Z0-9])?",
        ) {
            let text = format!("{vendor}/{class}={device}");
            let name: QualifiedName = text.parse().unwrap();
            prop_assert_eq!(name.kind.vendor(), vendor);
            prop_assert_eq!(name.kind.class(), class);
            prop_assert_eq!(name.name.as_str(), device);
            prop_assert_eq!(name.to_string(), text);
        }

        #[test]
        fn no_text_makes_parsing_panic(text in ".{0,60}") {
            if let Ok(name) = text.parse::<QualifiedName>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }

    #[rstest]
    #[case::no_device(
        "gpu.aliquot.dev/claim",
        "\"gpu.aliquot.dev/claim\" names no device: want vendor/class=device"
    )]
    #[case::no_vendor("claim=a", "\"claim\" has no vendor: want vendor/class")]
    #[case::empty_vendor("/claim=a", "the vendor is empty")]
    #[case::empty_class("v/=a", "the class is empty")]
    #[case::empty_device("v/c=", "the device is empty")]
    #[case::two_slashes("v/c/d=a", "the class \"c/d\" contains '/'")]
    #[case::vendor_digit("1v/c=a", "the vendor \"1v\" does not start with a letter")]
    #[case::class_end("v/c-=a", "the class \"c-\" does not end with a letter or digit")]
    #[case::device_start("v/c=-a", "the device \"-a\" does not start with a letter or digit")]
    #[case::space("v/c=a b", "the device \"a b\" contains ' '")]
    #[case::not_ascii("v/c=é", "the device \"é\" contains 'é'")]
    #[case::colon_in_class("v/a:b=c", "the class \"a:b\" contains ':'")]
    fn refuses_what_runtimes_refuse(#[case] text: &str, #[case] message: &str) {
        assert_eq!(text.parse::<QualifiedName>().unwrap_err().to_string(), message);
    }

    #[test]
    fn a_class_may_have_63_bytes_and_a_vendor_253() {
        assert!(Kind::new(&"v".repeat(253), &"c".repeat(63)).is_ok());
        assert!(matches!(Kind::new(&"v".repeat(254), "c"), Err(NameError::TooLong { limit: 253, .. })));
        assert!(matches!(Kind::new("v", &"c".repeat(64)), Err(NameError::TooLong { limit: 63, .. })));
    }

    #[test]
    fn a_device_name_may_start_with_a_digit_and_hold_colons() {
        let name: QualifiedName = "v/c=0:gpu".parse().unwrap();
        assert_eq!(name.kind.device("0:gpu".parse().unwrap()), name);
    }
}
