//! Lines that a terminal of 80 columns shows without wrapping.

use std::ffi::OsStr;

/// Columns of a line.
pub(crate) const WIDTH: usize = 80;

/// A space at which no line is broken.
pub(crate) const KEPT: char = '\u{a0}';

/// Wraps a text into lines with an indent; a word that is longer than a line is not cut.
pub(crate) fn wrapped(text: &str, indent: usize) -> String {
    let before = " ".repeat(indent);
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split([' ', '\n']).filter(|word| !word.is_empty()) {
        let long = word.chars().count();
        if column > 0 && column + 1 + long > WIDTH {
            out.push('\n');
            column = 0;
        }
        if column == 0 {
            out.push_str(&before);
            column = indent;
        } else {
            out.push(' ');
            column += 1;
        }
        out.extend(word.chars().map(|c| if c == KEPT { ' ' } else { c }));
        column += long;
    }
    out.push('\n');
    out
}

/// Returns a text of at most `most` characters, with `…` in place of what does not fit.
pub(crate) fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(std::iter::once('…')).collect()
}

/// Returns true if colours are to be used on a terminal: <https://no-color.org>.
pub(crate) fn colours(is_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::a_terminal(true, None, Some("xterm"), true)]
    #[case::no_terminal(false, None, Some("xterm"), false)]
    #[case::unwanted(true, Some("1"), Some("xterm"), false)]
    #[case::an_empty_variable_says_nothing(true, Some(""), Some("xterm"), true)]
    #[case::dumb(true, None, Some("dumb"), false)]
    fn colours_are_for_terminals_whose_user_wants_them(
        #[case] is_terminal: bool,
        #[case] no_color: Option<&str>,
        #[case] term: Option<&str>,
        #[case] wanted: bool,
    ) {
        assert_eq!(colours(is_terminal, no_color.map(OsStr::new), term.map(OsStr::new)), wanted);
    }

    #[test]
    fn lines_are_as_wide_as_the_terminal_at_most() {
        let text = "word ".repeat(100);
        let lines = wrapped(&text, 4);
        assert!(lines.lines().all(|line| line.len() <= WIDTH && line.starts_with("    word")), "{lines}");
        assert_eq!(lines.split_whitespace().count(), 100);
        assert_eq!((cut("abc", 3), cut("abcd", 3)), ("abc".to_owned(), "ab…".to_owned()));
    }
}
