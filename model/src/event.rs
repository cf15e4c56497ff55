//! Reasons of events, each with what a person who meets it wants to know: constants and reference from one table.

/// Kind of object that an event is about.
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
    /// The kind, as Kubernetes writes it.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::ResourceClaim => "ResourceClaim",
            Self::Node => "Node",
            Self::GpuBudget => "GpuBudget",
        }
    }
}

/// Type of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// Nothing is wrong.
    Normal,
    /// Something waits, or is wrong.
    Warning,
    /// As the event before it that it takes back.
    Either,
}

impl Type {
    /// As Kubernetes writes it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
            Self::Either => "Normal or Warning",
        }
    }

    /// Whether an event that is a warning, or is none, can be of this type.
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
    /// CamelCase, as Kubernetes wants it.
    pub name: &'static str,
    /// Its type.
    pub type_: Type,
    /// Kinds of objects that get it.
    pub about: &'static [About],
    /// When, in lines.
    pub when: &'static [&'static str],
    /// What to do.
    pub advice: &'static str,
}

/// Whether an event is as a table says; `None` if its reason is not in it.
pub fn is_as_listed(table: &[Reason], name: &str, warning: bool, about: About) -> Option<bool> {
    let reason = table.iter().find(|reason| reason.name == name)?;
    Some(reason.type_.allows(warning) && reason.about.contains(&about))
}

/// Makes a constant of each reason, and `REASONS`, the table of all.
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

        /// All of them.
        pub const REASONS: &[$crate::event::Reason] = &[$($crate::event::Reason {
            name: $name,
            type_: $crate::event::Type::$type_,
            about: &[$($crate::event::About::$about),+],
            when: &[$($when),+],
            advice: $advice,
        }),+];
    };
}
