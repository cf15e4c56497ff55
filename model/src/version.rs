//! Versions in the form that DRA attributes require: strict semver 2.0.0.

use semver::Version;

/// Converts a driver or CUDA version to semver: `535.104.05` → `535.104.5`, `12.8` → `12.8.0`. Numbers lose
/// leading zeros, missing parts become 0, and anything after the third number or after other text is dropped.
/// Returns `None` if the text does not start with a number.
pub fn normalise(raw: &str) -> Option<Version> {
    let mut parts = raw.trim().split('.').map(|part| {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u64>().ok()
    });
    let major = parts.next()??;
    let minor = parts.next().flatten().unwrap_or(0);
    let patch = parts.next().flatten().unwrap_or(0);
    Some(Version::new(major, minor, patch))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("535.104.05", Some("535.104.5"))]
    #[case("12.8", Some("12.8.0"))]
    #[case("580.65.06.01", Some("580.65.6"))]
    #[case("9", Some("9.0.0"))]
    #[case("550.54-beta", Some("550.54.0"))]
    #[case("N/A", None)]
    #[case("", None)]
    fn driver_versions_become_semver(#[case] raw: &str, #[case] want: Option<&str>) {
        assert_eq!(normalise(raw).map(|v| v.to_string()).as_deref(), want);
    }
}
