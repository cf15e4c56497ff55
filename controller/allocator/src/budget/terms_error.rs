//! What is wrong with the terms of a budget.

/// The reason why a GpuBudget's spec cannot be kept. The schema refuses most of them before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TermsError {
    /// The spec has not the form of one.
    #[error("spec: {0}")]
    Spec(String),
    /// The limit is no amount of GPU-hours.
    #[error("spec.gpuHours {0:?} is not a number such as 100 or 2.5")]
    GpuHours(String),
    /// The window is none, or both kinds at once.
    #[error("spec.window must have either rolling or calendar")]
    Window,
    /// The rolling window is no duration.
    #[error("spec.window.rolling {0:?} is not a duration such as 24h or 90m")]
    Rolling(String),
    /// The rolling window is too short or too long.
    #[error("spec.window.rolling {0:?} must be from 1m to 744h")]
    RollingBounds(String),
    /// There is no such calendar window.
    #[error("spec.window.calendar {0:?} must be Day, Week or Month")]
    Calendar(String),
    /// A class to lower priorities to is missing.
    #[error("spec.lowerPriorityClassName must be set with spec.enforcement LowerPriority")]
    PriorityClass,
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(TermsError::Spec("missing field".into()), "spec: missing field")]
    #[case(TermsError::GpuHours("x".into()), r#"spec.gpuHours "x" is not a number such as 100 or 2.5"#)]
    #[case(TermsError::RollingBounds("1s".into()), r#"spec.window.rolling "1s" must be from 1m to 744h"#)]
    #[case(TermsError::Calendar("Year".into()), r#"spec.window.calendar "Year" must be Day, Week or Month"#)]
    fn errors_name_the_field_and_what_it_takes(#[case] error: TermsError, #[case] text: &str) {
        assert_eq!(error.to_string(), text);
    }
}
