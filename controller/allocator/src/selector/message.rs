//! Texts in messages: expressions, and the errors of libraries.

/// Returns an expression as messages show it. A long expression is cut off, so that its error fits into the
/// message too.
pub fn quoted(expression: &str) -> String {
    quoted_within(expression, 256)
}

/// Returns an expression as messages show it, cut off after `longest` bytes.
pub fn quoted_within(expression: &str, longest: usize) -> String {
    if expression.len() <= longest {
        return format!("{expression:?}");
    }
    let start = expression.get(..expression.floor_char_boundary(longest)).unwrap_or_default();
    format!("{start:?}… ({} bytes)", expression.len())
}

/// Returns a text of several lines as one line.
pub(super) fn one_line(text: &str) -> String {
    text.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}
