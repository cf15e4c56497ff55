//! Durations in flags and annotations.

use jiff::SignedDuration;
use std::time::Duration;

/// The fault in the text of a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// It is none.
    #[error("{0:?} is not a duration, for example 15s or 1h30m")]
    None(String),
    /// It is shorter than it may be.
    #[error("{text:?} is too short: use at least {least:?}")]
    TooShort {
        /// The text.
        text: String,
        /// The shortest duration.
        least: Duration,
    },
}

/// Parses a duration as people write it: numbers with units from nanoseconds to hours, as in `15s`, `250ms`
/// or `1h30m`.
///
/// # Errors
/// [`DurationError::None`] if the text is anything else, or negative.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let span: Option<SignedDuration> = text.parse().ok();
    let duration = span.and_then(|span| Duration::try_from(span).ok());
    duration.ok_or_else(|| DurationError::None(text.to_owned()))
}

/// Returns a parser of durations that are not shorter than `least`, as for flags.
pub fn at_least(least: Duration) -> impl Fn(&str) -> Result<Duration, DurationError> + Clone {
    move |text| {
        let duration = parse_duration(text)?;
        if duration < least {
            return Err(DurationError::TooShort { text: text.to_owned(), least });
        }
        Ok(duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("10s", Some(10_000))]
    #[case("250ms", Some(250))]
    #[case("5m", Some(300_000))]
    #[case("2h", Some(7_200_000))]
    #[case("1h30m", Some(5_400_000))]
    #[case("15", None)]
    #[case("s", None)]
    #[case("-1s", None)]
    #[case("soon", None)]
    #[case("", None)]
    #[case("99999999999999999h", None)]
    fn durations_have_units(#[case] text: &str, #[case] millis: Option<u64>) {
        assert_eq!(parse_duration(text).ok(), millis.map(Duration::from_millis));
    }

    #[rstest]
    #[case("1s", None)]
    #[case("999ms", Some(r#""999ms" is too short: use at least 1s"#))]
    #[case("soon", Some(r#""soon" is not a duration, for example 15s or 1h30m"#))]
    fn what_is_too_short_is_told_what_is_enough(#[case] text: &str, #[case] fault: Option<&str>) {
        let parsed = at_least(Duration::from_secs(1))(text);
        assert_eq!(parsed.err().map(|error| error.to_string()).as_deref(), fault);
    }
}
