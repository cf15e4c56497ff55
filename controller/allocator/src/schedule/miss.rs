//! The condition of a request that no device meets, in words for the reader of the pod's events.

use crate::selector::quoted_within;
use crate::snapshot::IDENTITIES;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// The most values that are listed.
const LISTED: usize = 12;
/// The most values that are kept: the answers are stored, and tenants write the questions.
pub(super) const MOST_PUBLISHED: usize = 64;
/// The most bytes of an expression that are shown.
const SHOWN: usize = 120;

/// The condition that no device meets.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Miss {
    /// No device is of the class.
    Class {
        /// The class.
        class: Arc<str>,
        /// The demand of the class's selectors, if it can be told.
        demand: Option<Demand>,
    },
    /// A selector of the request selects no device of the class.
    Selector {
        /// The class.
        class: Arc<str>,
        /// The selector.
        expression: Arc<str>,
        /// The demand of the selector, if it can be told.
        demand: Option<Demand>,
    },
    /// No device has a capacity of this name.
    NoCapacity {
        /// The class.
        class: Arc<str>,
        /// The name, as written.
        written: Arc<str>,
    },
    /// No device has this much of a capacity, or allows such an amount.
    Amount,
}

/// An attribute that devices must have.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Demand {
    /// Name of the attribute, without its domain.
    pub attribute: String,
    /// The accepted values.
    pub values: Vec<String>,
}

/// The values or names that are published instead of what no device has: values of the attribute, or names of
/// capacities.
pub type Published = BTreeSet<String>;

/// Returns a name without its domain.
pub(super) fn bare(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

fn list(published: &Published) -> String {
    let mut shown: Vec<&str> = published.iter().map(String::as_str).take(LISTED).collect();
    let more = published.len().saturating_sub(LISTED);
    let last = match published.len() {
        MOST_PUBLISHED.. => "and others".to_owned(),
        _ => format!("{more} more"),
    };
    if more > 0 {
        shown.push(&last);
    }
    shown.join(", ")
}

/// Returns a name of which the written one may be a misspelling: the two differ by at most two letters.
fn meant<'p>(written: &str, published: &'p Published) -> Option<&'p String> {
    let written = bare(written);
    let near = published.iter().map(|name| (distance(written, name), name));
    near.filter(|(distance, name)| *distance <= 2 && *distance < name.len()).min().map(|(_, name)| name)
}

/// Returns how many letters have to be added, removed or changed.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (line, letter) in one.chars().enumerate() {
        let mut before = line;
        let mut next = vec![line + 1];
        for (of_other, above) in other.chars().zip(row.iter().skip(1)) {
            let left = next.last().copied().unwrap_or_default();
            next.push((left + 1).min(above + 1).min(before + usize::from(letter != of_other)));
            before = *above;
        }
        row = next;
    }
    row.last().copied().unwrap_or_default()
}

/// A request, what no device has, and what is published, as the end of "N nodes …".
pub(super) struct Told<'t>(pub(super) &'t str, pub(super) &'t Miss, pub(super) &'t Published);

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(request, miss, published) = self;
        // If a demanded value is published, another part of the expression is the reason.
        let met = |demand: &&Demand| demand.values.iter().any(|value| published.contains(value));
        let demanded = |f: &mut fmt::Formatter<'_>, demand: &Option<Demand>| {
            let Some(Demand { attribute, values }) = demand.as_ref().filter(|demand| !met(demand)) else {
                return Ok(());
            };
            let more = if values.len() > LISTED { " or another" } else { "" };
            let values: Vec<&str> = values.iter().map(String::as_str).take(LISTED).collect();
            write!(f, ": {attribute} has to be {}{more}", values.join(" or "))?;
            match published.is_empty() {
                true if IDENTITIES.contains(&attribute.as_str()) => Ok(()),
                true => f.write_str(", which nothing published has"),
                false => write!(f, ", published are {}", list(published)),
            }
        };
        match miss {
            Miss::Class { class, demand } => {
                write!(f, "have no device of DeviceClass {class}, which request {request} names")?;
                demanded(f, demand)?;
                f.write_str("; name another class, or let an administrator switch this kind on")
            }
            Miss::Selector { class, expression, demand } => {
                let shown = quoted_within(expression, SHOWN);
                write!(
                    f,
                    "have no device of DeviceClass {class} that the selector {shown} of request {request} selects"
                )?;
                demanded(f, demand)?;
                f.write_str(if demand.as_ref().is_some_and(|d| !met(&d)) && !published.is_empty() {
                    "; ask for one of these"
                } else {
                    "; change the selector"
                })
            }
            Miss::NoCapacity { class, written } => {
                write!(f, "have no device with the capacity {written}, which request {request} asks for; ")?;
                if published.is_empty() {
                    return write!(f, "those of DeviceClass {class} have none: leave it out");
                }
                write!(f, "those of DeviceClass {class} have {}", list(published))?;
                match meant(written, published) {
                    Some(name) => write!(f, ": is {name} meant?"),
                    None => Ok(()),
                }
            }
            Miss::Amount => write!(
                f,
                "have no device that gives the amounts that request {request} asks for; see the capacities and request \
                 policies in the ResourceSlices"
            ),
        }
    }
}
