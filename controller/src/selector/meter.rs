//! What one evaluation may cost: steps, and the time of whoever waits for it.

/// Steps that one evaluation may take, some tens of nanoseconds each: ten times what upstream allows of its
/// own unit (`CELSelectorExpressionMaxCost`), in which a step on a constant and a logical operator are free.
pub const MOST_STEPS: u64 = 10_000_000;

/// Steps between two looks at the clock.
const STEPS_BETWEEN_LOOKS: u64 = 8_192;

/// The longest reason that an error keeps, in bytes.
const LONGEST_REASON: usize = 256;

/// Why an evaluation ended without a value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Stop {
    /// The expression fails; `&&`, `||` and the macros over them can absorb it.
    Failed(String),
    /// The steps are used up.
    TooCostly,
    /// Whoever waits has no more time.
    OutOfTime,
}

impl Stop {
    /// A failure; what is too long of the reason is cut off.
    pub(super) fn failed(reason: impl Into<String>) -> Self {
        let mut reason = reason.into();
        if reason.len() > LONGEST_REASON {
            reason.truncate(reason.floor_char_boundary(LONGEST_REASON));
            reason.push('…');
        }
        Self::Failed(reason)
    }

    /// An operator or function that there is not for these types.
    pub(super) fn no_overload() -> Self {
        Self::Failed("No such overload".to_owned())
    }

    /// A map without this key.
    pub(super) fn no_key(key: &str) -> Self {
        Self::failed(format!("No such key: {key}"))
    }

    /// A function that fails.
    pub(super) fn of_function(function: &str, message: impl std::fmt::Display) -> Self {
        Self::failed(format!("Error executing function '{function}': {message}"))
    }
}

/// Counts the steps of an evaluation.
pub(super) struct Meter<'e> {
    spent: u64,
    most: u64,
    /// When `look` is due.
    next: u64,
    expired: &'e mut dyn FnMut() -> bool,
}

impl<'e> Meter<'e> {
    /// A meter that stops after `most` steps, or when `expired`, which is asked now and then, says so.
    pub(super) fn new(most: u64, expired: &'e mut dyn FnMut() -> bool) -> Self {
        Self { spent: 0, most, next: STEPS_BETWEEN_LOOKS.min(most), expired }
    }

    /// Takes steps before they are made.
    #[inline]
    pub(super) fn charge(&mut self, steps: u64) -> Result<(), Stop> {
        self.spent = self.spent.saturating_add(steps);
        if self.spent > self.next { self.look() } else { Ok(()) }
    }

    /// Takes the steps of handling so many bytes.
    #[inline]
    pub(super) fn charge_bytes(&mut self, bytes: usize) -> Result<(), Stop> {
        self.charge(bytes as u64 / 8)
    }

    /// Takes the steps of handling so many values.
    #[inline]
    pub(super) fn charge_values(&mut self, values: usize) -> Result<(), Stop> {
        self.charge(values as u64 * 2)
    }

    /// Steps taken so far.
    pub(super) const fn spent(&self) -> u64 {
        self.spent
    }

    #[cold]
    fn look(&mut self) -> Result<(), Stop> {
        if self.spent > self.most {
            return Err(Stop::TooCostly);
        }
        self.next = self.spent.saturating_add(STEPS_BETWEEN_LOOKS).min(self.most);
        if (self.expired)() { Err(Stop::OutOfTime) } else { Ok(()) }
    }
}
