//! Translates Go's syntax of regular expressions to that of the `regex-syntax` crate.
//!
//! In Go, `\d`, `\w`, `\s` and `\b` match only ASCII. In a class, an opening bracket, `&&`, `--` and `~~`
//! stand for themselves. `\Q…\E` quotes text.

use std::iter::Peekable;
use std::str::Chars;

/// Translates a pattern of Go for `regex-syntax`. Errors in the pattern are kept, for `regex-syntax` to find.
pub(super) fn from_go(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len() + 16);
    let mut chars = pattern.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\\' => outside(&mut chars, &mut out),
            '[' => {
                out.push('[');
                class(&mut chars, &mut out);
            }
            other => out.push(other),
        }
    }
    out
}

/// Translates an escape sequence outside of a class, after its backslash.
fn outside(chars: &mut Peekable<Chars<'_>>, out: &mut String) {
    match chars.next() {
        Some('d') => out.push_str("[0-9]"),
        Some('D') => out.push_str("[^0-9]"),
        Some('w') => out.push_str("[0-9A-Za-z_]"),
        Some('W') => out.push_str("[^0-9A-Za-z_]"),
        Some('s') => out.push_str("[\\t\\n\\f\\r ]"),
        Some('S') => out.push_str("[^\\t\\n\\f\\r ]"),
        Some('b') => out.push_str("(?-u:\\b)"),
        Some('B') => out.push_str("(?-u:\\B)"),
        Some('C') => out.push_str("(?s:.)"),
        Some('Q') => quoted(chars, out),
        Some(other) => escaped(other, chars, out),
        None => out.push('\\'),
    }
}

/// Translates the text after `\Q`: everything up to `\E` stands for itself.
fn quoted(chars: &mut Peekable<Chars<'_>>, out: &mut String) {
    while let Some(char) = chars.next() {
        if char == '\\' && chars.next_if_eq(&'E').is_some() {
            return;
        }
        out.push_str(&regex_syntax::escape(char.encode_utf8(&mut [0; 4])));
    }
}

/// Translates an escape sequence that means the same everywhere; octal digits are the number of a character.
fn escaped(char: char, chars: &mut Peekable<Chars<'_>>, out: &mut String) {
    let octal = |next: Option<&char>| next.is_some_and(|next| next.is_digit(8));
    let first = char.to_digit(8).filter(|digit| *digit == 0 || octal(chars.peek()));
    let Some(first) = first else {
        out.push('\\');
        out.push(char);
        return;
    };
    let mut code = first;
    for _ in 0..2 {
        let Some(digit) = chars.peek().and_then(|next| next.to_digit(8)) else { break };
        chars.next();
        code = code * 8 + digit;
    }
    out.push_str(&format!("\\x{{{code:X}}}"));
}

/// Translates a class, after its opening bracket.
fn class(chars: &mut Peekable<Chars<'_>>, out: &mut String) {
    if chars.next_if_eq(&'^').is_some() {
        out.push('^');
    }
    // A closing bracket in the first position stands for itself.
    if chars.next_if_eq(&']').is_some() {
        out.push_str("\\]");
    }
    while let Some(char) = chars.next() {
        match char {
            ']' => {
                out.push(']');
                return;
            }
            '[' if chars.peek() == Some(&':') => {
                out.push('[');
                // A named class such as `[:alpha:]`.
                for char in chars.by_ref() {
                    out.push(char);
                    if char == ']' {
                        break;
                    }
                }
            }
            '[' => out.push_str("\\["),
            '&' | '~' => {
                out.push('\\');
                out.push(char);
            }
            '-' if chars.peek() == Some(&'-') => out.push_str("\\-"),
            '\\' => match chars.next() {
                Some('d') => out.push_str("0-9"),
                Some('w') => out.push_str("0-9A-Za-z_"),
                Some('s') => out.push_str("\\t\\n\\f\\r "),
                Some('D') => out.push_str("[^0-9]"),
                Some('W') => out.push_str("[^0-9A-Za-z_]"),
                Some('S') => out.push_str("[^\\t\\n\\f\\r ]"),
                Some('Q') => quoted(chars, out),
                Some(other) => escaped(other, chars, out),
                None => out.push('\\'),
            },
            other => out.push(other),
        }
    }
}
