//! Times as the Kubernetes API writes them: RFC 3339, in whole seconds of Unix time here.

use k8s_openapi::jiff::Timestamp;

/// Formats a second of Unix time as the API writes times.
pub fn time(second: i64) -> String {
    Timestamp::from_second(second).map_or_else(|_| "never".to_owned(), |time| time.to_string())
}

/// Parses a time of the API; returns seconds of Unix time.
pub fn second(text: &str) -> Option<i64> {
    text.parse::<Timestamp>().ok().map(Timestamp::as_second)
}
