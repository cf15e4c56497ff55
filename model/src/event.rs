//! Reasons of events, with what a reader needs to know about each: constants and reference documentation come
//! from one table.

/// The kind of object that an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum About {
    /// A pod.
    Pod,
    /// A ResourceClaim.
    ResourceClaim,
    /// A Node.
    Node,
    /// A GpuBudget.
    GpuBudget,
}

impl About {
    /// Returns the kind as Kubernetes writes it.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::ResourceClaim => "ResourceClaim",
            Self::Node => "Node",
            Self::GpuBudget => "GpuBudget",
        }
    }
}

/// The type of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// Nothing is wrong.
    Normal,
    /// Something waits, or is wrong.
    Warning,
    /// Normal or Warning: the same type as the earlier event that this one takes back.
    Either,
}

impl Type {
    /// Returns the type as Kubernetes writes it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
            Self::Either => "Normal or Warning",
        }
    }

    /// Returns true if an event can be of this type; `warning` is true for a warning.
    pub const fn allows(self, warning: bool) -> bool {
        match self {
            Self::Normal => !warning,
            Self::Warning => warning,
            Self::Either => true,
        }
    }
}

/// A reason, as operators look it up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reason {
    /// The name, in CamelCase as Kubernetes requires it.
    pub name: &'static str,
    /// The type of the events.
    pub type_: Type,
    /// Kinds of objects that the events are about.
    pub about: &'static [About],
    /// When the event is sent, in lines.
    pub when: &'static [&'static str],
    /// What to do about it.
    pub advice: &'static str,
}

/// Returns true if an event is as a table describes it; `None` if the table does not have its reason.
pub fn is_as_listed(table: &[Reason], name: &str, warning: bool, about: About) -> Option<bool> {
    let reason = table.iter().find(|reason| reason.name == name)?;
    Some(reason.type_.allows(warning) && reason.about.contains(&about))
}

/// Defines a constant for each reason, and `REASONS`, the table of all reasons.
///
/// ```
/// aliquot_model::event_reasons! {
///     /// A pod fits nowhere at the moment.
///     Warning of [Pod] DOES_NOT_FIT = "DevicesDoNotFit", "wait";
/// }
/// assert_eq!(DOES_NOT_FIT, REASONS[0].name);
/// ```
#[macro_export]
macro_rules! event_reasons {
    ($($(#[doc = $when:literal])+ $type_:ident of [$($about:ident),+] $constant:ident = $name:literal, $advice:literal;)+) => {
        $($(#[doc = $when])+ pub const $constant: &str = $name;)+

        /// All reasons.
        pub const REASONS: &[$crate::event::Reason] = &[$($crate::event::Reason {
            name: $name,
            type_: $crate::event::Type::$type_,
            about: &[$($crate::event::About::$about),+],
            when: &[$($when),+],
            advice: $advice,
        }),+];
    };
}
