//! Limits the cost of one evaluation: its steps, and the time of its caller.

/// The most steps of one evaluation; a step takes some tens of nanoseconds. This is ten times the limit that
/// upstream sets in its own unit (`CELSelectorExpressionMaxCost`), in which constants and logical operators
/// cost nothing.
pub const MOST_STEPS: u64 = 10_000_000;

/// The number of steps between two looks at the clock.
const STEPS_BETWEEN_LOOKS: u64 = 8_192;

/// The longest reason that an error keeps, in bytes.
const LONGEST_REASON: usize = 256;

/// The reason why an evaluation ended without a value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Stop {
    /// The expression failed; `&&`, `||` and the macros based on them can absorb this.
    Failed(String),
    /// The steps are used up.
    TooCostly,
    /// The time of the caller is over.
    OutOfTime,
}

impl Stop {
    /// Creates a failure; a reason that is too long is cut off.
    pub(super) fn failed(reason: impl Into<String>) -> Self {
        let mut reason = reason.into();
        if reason.len() > LONGEST_REASON {
            reason.truncate(reason.floor_char_boundary(LONGEST_REASON));
            reason.push('…');
        }
        Self::Failed(reason)
    }

    /// Creates the failure for an operator or function that does not exist for these types.
    pub(super) fn no_overload() -> Self {
        Self::Failed("No such overload".to_owned())
    }

    /// Creates the failure for a map without this key.
    pub(super) fn no_key(key: &str) -> Self {
        Self::failed(format!("No such key: {key}"))
    }

    /// Creates the failure of a function.
    pub(super) fn of_function(function: &str, message: impl std::fmt::Display) -> Self {
        Self::failed(format!("Error executing function '{function}': {message}"))
    }
}

/// Counts the steps of an evaluation.
pub(super) struct Meter<'e> {
    spent: u64,
    most: u64,
    /// The number of steps at which the next look is due.
    next: u64,
    expired: &'e mut dyn FnMut() -> bool,
}

impl<'e> Meter<'e> {
    /// Creates a meter that stops after `most` steps, or when `expired` returns true; it is called from time
    /// to time.
    pub(super) fn new(most: u64, expired: &'e mut dyn FnMut() -> bool) -> Self {
        Self { spent: 0, most, next: STEPS_BETWEEN_LOOKS.min(most), expired }
    }

    /// Charges steps before they are made.
    ///
    /// # Errors
    /// The reason to stop, if a limit is reached.
    #[inline]
    pub(super) fn charge(&mut self, steps: u64) -> Result<(), Stop> {
        self.spent = self.spent.saturating_add(steps);
        if self.spent > self.next { self.look() } else { Ok(()) }
    }

    /// Charges the steps of handling this number of bytes.
    #[inline]
    pub(super) fn charge_bytes(&mut self, bytes: usize) -> Result<(), Stop> {
        self.charge(bytes as u64 / 8)
    }

    /// Charges the steps of handling this number of values.
    #[inline]
    pub(super) fn charge_values(&mut self, values: usize) -> Result<(), Stop> {
        self.charge(values as u64 * 2)
    }

    /// Returns the steps charged so far.
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
