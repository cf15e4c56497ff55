//! Kubernetes quantities, exactly (`k8s.io/apimachinery/pkg/api/resource`), without floating point.

use std::fmt;
use std::ops::{Add, Sub};
use std::str::FromStr;

const NANO: i128 = 1_000_000_000;

/// A quantity with a resolution of 10⁻⁹. Smaller fractions are rounded up, as Kubernetes does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Quantity(i128);

/// The reason why a text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a quantity: {reason} (examples: 10Gi, 500m, 2)")]
pub struct QuantityError {
    text: String,
    reason: &'static str,
}

impl Quantity {
    /// The quantity 0.
    pub const ZERO: Self = Self(0);

    /// Returns a whole number of units, for example bytes.
    pub const fn from_u64(units: u64) -> Self {
        Self(units as i128 * NANO)
    }

    /// Returns whole units, rounded up; `None` if negative or larger than `u64`.
    pub fn to_u64(self) -> Option<u64> {
        u64::try_from(div_ceil(self.0, NANO)).ok()
    }

    /// Returns the quantity in billionths of a unit.
    pub const fn nanos(self) -> i128 {
        self.0
    }

    /// Returns a quantity of billionths of a unit.
    pub const fn from_nanos(nanos: i128) -> Self {
        Self(nanos)
    }
}

/// Divides and rounds towards positive infinity.
fn div_ceil(value: i128, by: i128) -> i128 {
    let quotient = value.div_euclid(by);
    if value.rem_euclid(by) == 0 { quotient } else { quotient.saturating_add(1) }
}

impl Add for Quantity {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sub for Quantity {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

/// Returns the multiplier of a suffix, as (numerator, denominator); `None` if it is unknown.
fn suffix(text: &str) -> Option<(i128, i128)> {
    Some(match text {
        "n" => (1, NANO),
        "u" => (1, 1_000_000),
        "m" => (1, 1_000),
        "" => (1, 1),
        "k" => (1_000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        _ => return None,
    })
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let fail = |reason| QuantityError { text: text.chars().take(64).collect(), reason };
        let (negative, body) = match text.as_bytes().first() {
            Some(b'-') => (true, text.get(1..).unwrap_or_default()),
            Some(b'+') => (false, text.get(1..).unwrap_or_default()),
            _ => (false, text),
        };
        let split = body.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(body.len());
        let (number, unit) = body.split_at(split);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() {
            return Err(fail("it has no digits"));
        }
        if fraction.contains('.') {
            return Err(fail("it has two decimal points"));
        }
        let (times, over) = match suffix(unit) {
            Some(multiplier) => multiplier,
            None => {
                let exponent = unit.strip_prefix(['e', 'E']).and_then(|e| e.parse::<i32>().ok());
                let power = |n: u32| 10i128.checked_pow(n).ok_or_else(|| fail("it is too large"));
                match exponent {
                    Some(e) if e >= 0 => (power(e.unsigned_abs())?, 1),
                    Some(e) => (1, power(e.unsigned_abs())?),
                    None => return Err(fail("its unit is unknown")),
                }
            }
        };
        let mut digits: i128 = 0;
        let mut scale: i128 = 1;
        let mut rest = false;
        for (index, c) in whole.chars().chain(fraction.chars()).enumerate() {
            let digit = i128::from(c.to_digit(10).ok_or_else(|| fail("it has an unexpected character"))?);
            if index >= whole.len() && scale >= NANO.saturating_mul(NANO) {
                rest |= digit != 0;
                continue;
            }
            digits = digits
                .checked_mul(10)
                .and_then(|d| d.checked_add(digit))
                .ok_or_else(|| fail("it is too large"))?;
            if index >= whole.len() {
                scale = scale.saturating_mul(10);
            }
        }
        // digits / scale * times / over, in nanos, rounded away from zero as Kubernetes does. Common factors
        // are cancelled first, so that every quantity below 2^63 fits.
        let mut numerator = digits;
        let mut denominator = scale;
        for factor in [times, NANO] {
            let common = gcd(factor, denominator);
            denominator /= common;
            numerator = numerator.checked_mul(factor / common).ok_or_else(|| fail("it is too large"))?;
        }
        denominator = denominator.checked_mul(over).ok_or_else(|| fail("it is too small"))?;
        let mut nanos = div_ceil(numerator, denominator);
        if rest && numerator % denominator == 0 {
            nanos = nanos.saturating_add(1);
        }
        Ok(Self(if negative { -nanos } else { nanos }))
    }
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}

impl fmt::Display for Quantity {
    /// Formats the shortest exact form: binary suffixes for multiples of 1Ki, plain or decimal suffixes
    /// below.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0;
        if value % NANO == 0 {
            let units = value / NANO;
            for (name, shift) in [("Ei", 60), ("Pi", 50), ("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)] {
                let unit = 1i128 << shift;
                if units != 0 && units % unit == 0 {
                    return write!(f, "{}{name}", units / unit);
                }
            }
            return write!(f, "{units}");
        }
        for (name, unit) in [("m", 1_000_000), ("u", 1_000)] {
            if value % unit == 0 {
                return write!(f, "{}{name}", value / unit);
            }
        }
        write!(f, "{value}n")
    }
}

/// The fault in the text of a number of bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BytesError {
    /// It is no quantity.
    #[error(transparent)]
    Quantity(#[from] QuantityError),
    /// It is negative or too large.
    #[error("{0:?} is not a number of bytes")]
    None(String),
}

/// Parses a number of bytes, as for flags.
///
/// # Errors
/// [`BytesError`]
pub fn parse_bytes(text: &str) -> Result<u64, BytesError> {
    let quantity: Quantity = text.parse()?;
    quantity.to_u64().ok_or_else(|| BytesError::None(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[rstest]
    #[case("10Gi", 10 << 30)]
    #[case("1.5Gi", 3 << 29)]
    #[case("80", 80)]
    #[case("1k", 1000)]
    #[case("1e3", 1000)]
    #[case("2E", 2_000_000_000_000_000_000)]
    #[case("0", 0)]
    #[case("500m", 1)]
    #[case("0.5", 1)]
    #[case("1500m", 2)]
    #[case("+3", 3)]
    #[case(".5Ki", 512)]
    fn parses_and_rounds_up_to_units(#[case] text: &str, #[case] units: u64) {
        assert_eq!(text.parse::<Quantity>().map(|q| q.to_u64()), Ok(Some(units)));
    }

    #[rstest]
    #[case("")]
    #[case("Gi")]
    #[case("1.2.3")]
    #[case("10GiB")]
    #[case("10 Gi")]
    #[case("ten")]
    #[case("1e99")]
    #[case("--1")]
    fn refuses_what_kubernetes_refuses(#[case] text: &str) {
        assert!(text.parse::<Quantity>().is_err(), "{text}");
    }

    #[test]
    fn negative_quantities_have_no_units() {
        assert_eq!("-1".parse::<Quantity>().map(|q| q.to_u64()), Ok(None));
    }

    proptest! {
        #[test]
        fn printing_and_parsing_round_trip(nanos in -1_000_000_000_000_000_000_000_000i128..1_000_000_000_000_000_000_000_000) {
            let quantity = Quantity::from_nanos(nanos);
            prop_assert_eq!(quantity.to_string().parse::<Quantity>(), Ok(quantity));
        }

        #[test]
        fn every_byte_count_is_exact(bytes: u64) {
            let text = Quantity::from_u64(bytes).to_string();
            prop_assert_eq!(text.parse::<Quantity>().map(|q| q.to_u64()), Ok(Some(bytes)));
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".{0,40}") {
            let _ = text.parse::<Quantity>();
        }
    }
}
