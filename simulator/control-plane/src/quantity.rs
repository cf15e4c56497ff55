//! Resource quantities: exact values, and the canonical form in which the server gives them back.

use std::fmt;

use serde_json::Value;

/// Units of a billionth, the finest that a quantity has.
const NANO: i128 = 1_000_000_000;

/// The family of suffixes that a quantity was written with, which its canonical form keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Binary,
    Decimal,
    Exponent,
}

/// A quantity such as `10Gi`, `500m` or `1e3`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantity {
    nano: i128,
    format: Format,
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nano == other.nano
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nano.cmp(&other.nano)
    }
}

const BINARY: [(&str, u32); 6] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60)];
const DECIMAL: [(&str, u32); 10] =
    [("n", 0), ("u", 3), ("m", 6), ("", 9), ("k", 12), ("M", 15), ("G", 18), ("T", 21), ("P", 24), ("E", 27)];

impl Quantity {
    pub(crate) const ZERO: Self = Self { nano: 0, format: Format::Decimal };

    /// Reads a string or a number, as JSON has them.
    pub(crate) fn from_json(value: &Value) -> Option<Self> {
        match value {
            Value::String(s) => Self::parse(s),
            Value::Number(n) => Self::parse(&n.to_string()),
            _ => None,
        }
    }

    pub(crate) fn parse(input: &str) -> Option<Self> {
        let (negative, rest) = match input.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, input.strip_prefix('+').unwrap_or(input)),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = (rest.get(..end)?, rest.get(end..)?);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return None;
        }
        let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
        let places = u32::try_from(fraction.len()).ok()?;
        let (scale, format) = Self::scale(suffix)?;
        // Finer than a billionth is rounded up, away from zero.
        let scaled = digits.checked_mul(scale)?;
        let divisor = 10_i128.checked_pow(places)?;
        let nano = scaled / divisor + i128::from(scaled % divisor != 0);
        Some(Self { nano: if negative { -nano } else { nano }, format })
    }

    fn scale(suffix: &str) -> Option<(i128, Format)> {
        if let Some((_, shift)) = BINARY.iter().find(|(s, _)| *s == suffix) {
            return Some(((1_i128 << shift) * NANO, Format::Binary));
        }
        if let Some((_, power)) = DECIMAL.iter().find(|(s, _)| *s == suffix) {
            return Some((10_i128.pow(*power), Format::Decimal));
        }
        let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
        let power = u32::try_from(exponent + 9).ok().filter(|p| *p <= 27)?;
        Some((10_i128.pow(power), Format::Exponent))
    }

    pub(crate) const fn is_zero_or_less(self) -> bool {
        self.nano <= 0
    }

    pub(crate) const fn is_negative(self) -> bool {
        self.nano < 0
    }

    pub(crate) const fn plus(self, other: Self) -> Self {
        Self { nano: self.nano.saturating_add(other.nano), format: self.format }
    }

    /// The value, rounded up to whole units.
    pub(crate) const fn units(self) -> i128 {
        self.nano / NANO + (self.nano % NANO > 0) as i128
    }

    pub(crate) const fn is_fractional(self) -> bool {
        self.nano % NANO != 0
    }

    /// `self - base` in units of `step`, if it is a whole number of them.
    pub(crate) const fn is_step_from(self, base: Self, step: Self) -> bool {
        step.nano != 0 && (self.nano - base.nano) % step.nano == 0
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nano == 0 {
            return f.write_str("0");
        }
        // Small or fractional binary quantities are shown in decimal.
        if self.format == Format::Binary && self.nano.abs() >= 1024 * NANO {
            let units = self.units();
            let (suffix, shift) =
                BINARY.iter().rev().find(|(_, s)| units % (1_i128 << s) == 0).copied().unwrap_or(("", 0));
            return write!(f, "{}{suffix}", units >> shift);
        }
        let (suffix, power) =
            DECIMAL.iter().rev().find(|(_, p)| self.nano % 10_i128.pow(*p) == 0).copied().unwrap_or(("n", 0));
        let mantissa = self.nano / 10_i128.pow(power);
        if self.format == Format::Exponent {
            return match i64::from(power) - 9 {
                0 => write!(f, "{mantissa}"),
                exponent => write!(f, "{mantissa}e{exponent}"),
            };
        }
        write!(f, "{mantissa}{suffix}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("1024Mi", "1Gi")]
    #[case("1536Mi", "1536Mi")]
    #[case("0.5Gi", "512Mi")]
    #[case("512", "512")]
    #[case("1000", "1k")]
    #[case("1500m", "1500m")]
    #[case("2000m", "2")]
    #[case("0.5", "500m")]
    #[case("1023Ki", "1023Ki")]
    #[case("0.5Ki", "512")]
    #[case("1e3", "1e3")]
    #[case("0", "0")]
    #[case("-5", "-5")]
    #[case("100", "100")]
    fn canonical_forms_are_those_of_the_server(#[case] input: &str, #[case] want: &str) {
        assert_eq!(Quantity::parse(input).unwrap().to_string(), want);
    }

    #[rstest::rstest]
    #[case("")]
    #[case("x")]
    #[case("1x")]
    #[case("1.2.3")]
    #[case("Gi")]
    fn nonsense_is_no_quantity(#[case] input: &str) {
        assert!(Quantity::parse(input).is_none());
    }

    #[test]
    fn quantities_compare_by_value() {
        assert_eq!(Quantity::parse("1Gi"), Quantity::parse("1024Mi"));
        assert!(Quantity::parse("1G") < Quantity::parse("1Gi"));
        let step = Quantity::parse("1Mi").unwrap();
        assert!(Quantity::parse("3Gi").unwrap().is_step_from(Quantity::ZERO, step));
        assert!(!Quantity::parse("1000").unwrap().is_step_from(Quantity::ZERO, step));
    }
}
