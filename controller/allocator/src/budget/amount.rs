//! GPU-hours as users write and read them.

use super::profile::Spent;
use super::terms_error::TermsError;

/// One GPU-hour, in millionths of a GPU for one second.
const HOUR: Spent = 3_600 * 1_000_000;
/// The most decimals that users may write.
const DECIMALS: u32 = 6;

/// Parses GPU-hours such as `100` or `0.25`.
///
/// # Errors
/// [`TermsError::GpuHours`]
pub fn read(text: &str) -> Result<Spent, TermsError> {
    let wrong = || TermsError::GpuHours(text.to_owned());
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    let decimals = u32::try_from(rest.len()).unwrap_or(u32::MAX);
    if whole.is_empty()
        || whole.len() > 12
        || !digits(whole)
        || !digits(rest)
        || decimals > DECIMALS
        || (rest.is_empty() && text.contains('.'))
    {
        return Err(wrong());
    }
    let scale: Spent = 10i128.pow(DECIMALS);
    let whole: Spent = whole.parse().map_err(|_| wrong())?;
    let rest: Spent = if rest.is_empty() {
        0
    } else {
        rest.parse::<Spent>().map_err(|_| wrong())? * 10i128.pow(DECIMALS - decimals)
    };
    Ok((whole * scale + rest) * (HOUR / scale))
}

/// Formats GPU-hours with three decimals, rounded down. So while something is left, the used amount is shown
/// as less than the limit.
pub fn hours(spent: Spent) -> String {
    let thousandths = spent.max(0) / (HOUR / 1000);
    format!("{}.{:03}", thousandths / 1000, thousandths % 1000)
}

/// Formats GPU-hours with as few decimals as are exact; used for limits.
pub fn short(spent: Spent) -> String {
    let micro = spent.max(0) / (HOUR / 1_000_000);
    let text = format!("{}.{:06}", micro / 1_000_000, micro % 1_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Returns whole-GPU seconds, for metrics.
#[expect(clippy::cast_precision_loss, reason = "metrics are floating-point numbers")]
pub fn seconds(spent: Spent) -> f64 {
    spent as f64 / 1_000_000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("0", Some(0))]
    #[case("1", Some(HOUR))]
    #[case("0.25", Some(HOUR / 4))]
    #[case("0.000001", Some(3_600))]
    #[case("100000", Some(100_000 * HOUR))]
    #[case("", None)]
    #[case("1.", None)]
    #[case(".5", None)]
    #[case("-1", None)]
    #[case("1e3", None)]
    #[case("0.0000001", None)]
    fn hours_are_read_exactly_or_not_at_all(#[case] text: &str, #[case] expected: Option<Spent>) {
        assert_eq!(read(text).ok(), expected);
    }

    #[test]
    fn amounts_are_printed_as_people_read_them() {
        assert_eq!(hours(HOUR * 3 / 2), "1.500");
        assert_eq!(hours(HOUR - 1), "0.999");
        assert_eq!(hours(-5), "0.000");
        assert_eq!([short(HOUR), short(HOUR / 4), short(0)], ["1", "0.25", "0"]);
        assert!((seconds(HOUR) - 3600.0).abs() < 1e-9);
    }
}
