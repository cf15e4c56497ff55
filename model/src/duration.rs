//! Durations in flags and annotations.

use jiff::SignedDuration;
use std::time::Duration;

/// Parses a duration as people write it: numbers with units from nanoseconds to hours, as in `15s`, `250ms`
/// or `1h30m`.
///
/// # Errors
/// If the text is anything else, or negative; the error is a sentence for its author.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let span: Option<SignedDuration> = text.parse().ok();
    let duration = span.and_then(|span| Duration::try_from(span).ok());
    duration.ok_or_else(|| format!("{text:?} is not a duration, for example 15s or 1h30m"))
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
}
