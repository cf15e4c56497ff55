//! The window of time that a budget is for. Calendar windows are in UTC.

use super::terms_error::TermsError;
use k8s_openapi::jiff::civil::{Date, Weekday};
use k8s_openapi::jiff::tz::TimeZone;
use k8s_openapi::jiff::{SignedDuration, Timestamp, ToSpan};
use std::fmt;

/// The longest rolling window, in seconds; what is older is not kept.
pub const LONGEST: i64 = 31 * 24 * 3600;
/// The shortest rolling window, in seconds.
pub const SHORTEST: i64 = 60;

/// The window of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// The last so many seconds, at any time.
    Rolling(i64),
    /// From midnight to midnight.
    Day,
    /// From Monday to Monday.
    Week,
    /// From the first day of a month to the first day of the next.
    Month,
}

impl Window {
    /// Parses a rolling window such as `24h` or `1h30m`.
    ///
    /// # Errors
    /// [`TermsError::Rolling`] or [`TermsError::RollingBounds`]
    pub fn rolling(text: &str) -> Result<Self, TermsError> {
        let duration: SignedDuration = text.parse().map_err(|_| TermsError::Rolling(text.to_owned()))?;
        let seconds = duration.as_secs();
        if !(SHORTEST..=LONGEST).contains(&seconds) {
            return Err(TermsError::RollingBounds(text.to_owned()));
        }
        Ok(Self::Rolling(seconds))
    }

    /// Parses the name of a calendar window.
    ///
    /// # Errors
    /// [`TermsError::Calendar`]
    pub fn calendar(text: &str) -> Result<Self, TermsError> {
        match text {
            "Day" => Ok(Self::Day),
            "Week" => Ok(Self::Week),
            "Month" => Ok(Self::Month),
            _ => Err(TermsError::Calendar(text.to_owned())),
        }
    }

    /// Returns the first second of the window that contains `now`, and the first second after the window. A
    /// rolling window ends at `now`.
    pub fn bounds(self, now: i64) -> (i64, i64) {
        let days = |first: Date, span: i64| {
            let start = midnight(first);
            (start, midnight(first.checked_add(span.days()).unwrap_or(Date::MAX)))
        };
        let today = date_of(now);
        match self {
            Self::Rolling(width) => (now.saturating_sub(width), now),
            Self::Day => days(today, 1),
            Self::Week => {
                let since = today.weekday().since(Weekday::Monday);
                days(today.checked_sub(i64::from(since).days()).unwrap_or(today), 7)
            }
            Self::Month => {
                let first = today.first_of_month();
                (midnight(first), midnight(first.checked_add(1.month()).unwrap_or(Date::MAX)))
            }
        }
    }
}

fn date_of(second: i64) -> Date {
    let time = Timestamp::from_second(second).unwrap_or(Timestamp::UNIX_EPOCH);
    time.to_zoned(TimeZone::UTC).date()
}

fn midnight(date: Date) -> i64 {
    date.to_zoned(TimeZone::UTC).map_or(i64::MAX, |zoned| zoned.timestamp().as_second())
}

impl fmt::Display for Window {
    /// Writes the window for a column of `kubectl get`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Day => f.write_str("Day"),
            Self::Week => f.write_str("Week"),
            Self::Month => f.write_str("Month"),
            Self::Rolling(seconds) => {
                f.write_str("last ")?;
                let (hours, rest) = (seconds / 3600, seconds % 3600);
                let (minutes, seconds) = (rest / 60, rest % 60);
                for (amount, unit) in [(hours, 'h'), (minutes, 'm'), (seconds, 's')] {
                    if amount > 0 {
                        write!(f, "{amount}{unit}")?;
                    }
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api_time::{second, time};
    use rstest::rstest;

    #[rstest]
    #[case::day("Day", "2026-11-21T16:20:00Z", "2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z")]
    #[case::midnight("Day", "2026-11-21T00:00:00Z", "2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z")]
    #[case::saturday("Week", "2026-11-21T16:20:00Z", "2026-11-16T00:00:00Z", "2026-11-23T00:00:00Z")]
    #[case::sunday("Week", "2026-11-22T23:59:59Z", "2026-11-16T00:00:00Z", "2026-11-23T00:00:00Z")]
    #[case::monday("Week", "2026-11-23T00:00:00Z", "2026-11-23T00:00:00Z", "2026-11-30T00:00:00Z")]
    #[case::month("Month", "2026-12-31T23:59:59Z", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z")]
    #[case::leap("Month", "2028-02-29T12:00:00Z", "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z")]
    fn calendar_windows_are_those_of_utc(
        #[case] name: &str,
        #[case] now: &str,
        #[case] start: &str,
        #[case] end: &str,
    ) {
        let window = Window::calendar(name).expect("a window");
        let (from, to) = window.bounds(second(now).expect("a time"));
        assert_eq!((time(from), time(to)), (start.to_owned(), end.to_owned()));
    }

    #[test]
    fn rolling_windows_end_now_and_have_limits() {
        assert_eq!(Window::rolling("24h").map(|w| w.bounds(100_000)), Ok((13_600, 100_000)));
        assert_eq!(Window::rolling("1h30m").map(|w| w.to_string()), Ok("last 1h30m".to_owned()));
        assert_eq!(Window::rolling("744h"), Ok(Window::Rolling(LONGEST)));
        for bad in ["59s", "745h", "-2h", "day", ""] {
            assert!(Window::rolling(bad).is_err(), "{bad}");
        }
    }
}
