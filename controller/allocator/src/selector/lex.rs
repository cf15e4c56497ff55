//! Splits an expression into tokens.

use super::compile_error::{CompileError, TokenError};
use std::str::Chars;

/// A token.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// An identifier.
    Name(String),
    /// An integer without its sign.
    Int(u64),
    /// An unsigned integer such as `1u`.
    Uint(u64),
    /// A floating-point number such as `1.5` or `1e3`.
    Double(f64),
    /// A string literal.
    Text(String),
    /// A bytes literal such as `b"…"`.
    Bytes(Vec<u8>),
    /// An operator or bracket.
    Sign(&'static str),
    /// The end of the expression.
    End,
}

/// Operators and brackets; longer ones come first.
const SIGNS: [&str; 26] = [
    "&&", "||", "<=", ">=", "==", "!=", "[?", ".?", "(", ")", "[", "]", "{", "}", ".", ",", "?", ":", "+",
    "-", "*", "/", "%", "!", "<", ">",
];

/// Returns the tokens of an expression; the last one is [`Token::End`].
pub(super) fn tokens(source: &str) -> Result<Vec<Token>, CompileError> {
    let mut rest = source;
    let mut tokens = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', '\t', '\n', '\r', '\u{c}']);
        if let Some(comment) = rest.strip_prefix("//") {
            rest = comment.split_once('\n').map_or("", |(_, after)| after);
            continue;
        }
        let Some(first) = rest.chars().next() else {
            tokens.push(Token::End);
            return Ok(tokens);
        };
        let at = source.len() - rest.len();
        let wrong = |error| CompileError::Token { at, error };
        let token = if let Some((kind, body)) = literal_start(rest) {
            let (token, after) = text(kind, body).map_err(wrong)?;
            rest = after;
            token
        } else if first.is_ascii_digit()
            || rest.strip_prefix('.').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        {
            let (token, after) = number(rest).map_err(wrong)?;
            rest = after;
            token
        } else if first == '_' || first.is_ascii_alphabetic() {
            let end = rest.find(|c: char| c != '_' && !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
            let (name, after) = rest.split_at(end);
            rest = after;
            Token::Name(name.to_owned())
        } else if let Some(quoted) = rest.strip_prefix('`') {
            let (name, after) = quoted.split_once('`').ok_or_else(|| wrong(TokenError::NameNotClosed))?;
            rest = after;
            Token::Name(name.to_owned())
        } else {
            let sign = SIGNS.iter().find(|sign| rest.starts_with(**sign));
            let sign = sign.ok_or_else(|| wrong(TokenError::Character { character: first }))?;
            rest = rest.strip_prefix(sign).unwrap_or_default();
            Token::Sign(sign)
        };
        tokens.push(token);
    }
}

/// The kind of a string literal.
#[derive(Debug, Clone, Copy, Default)]
struct Kind {
    raw: bool,
    bytes: bool,
}

fn literal_start(rest: &str) -> Option<(Kind, &str)> {
    let mut kind = Kind::default();
    let mut body = rest;
    loop {
        match body.chars().next()? {
            '"' | '\'' => return Some((kind, body)),
            'r' | 'R' if !kind.raw => kind.raw = true,
            'b' | 'B' if !kind.bytes => kind.bytes = true,
            _ => return None,
        }
        body = body.get(1..)?;
    }
}

/// Reads a string literal from its first quote on; returns the token and the rest.
fn text(kind: Kind, body: &str) -> Result<(Token, &str), TokenError> {
    let quote =
        ["\"\"\"", "'''", "\"", "'"].into_iter().find(|quote| body.starts_with(quote)).unwrap_or("\"");
    let mut rest = body.get(quote.len()..).unwrap_or_default();
    let mut bytes: Vec<u8> = Vec::new();
    loop {
        if let Some(after) = rest.strip_prefix(quote) {
            let token = if kind.bytes {
                Token::Bytes(bytes)
            } else {
                Token::Text(String::from_utf8(bytes).map_err(|_| TokenError::NotUtf8)?)
            };
            return Ok((token, after));
        }
        let mut chars = rest.chars();
        match chars.next() {
            None => return Err(TokenError::StringNotClosed { quote }),
            Some('\n' | '\r') if quote.len() == 1 => {
                return Err(TokenError::StringNotClosed { quote });
            }
            Some('\\') if !kind.raw => escape(kind, &mut chars, &mut bytes)?,
            Some('\\') => {
                // A raw string keeps the next character as it is, even if it is a quote.
                bytes.push(b'\\');
                if let Some(next) = chars.next() {
                    bytes.extend(next.encode_utf8(&mut [0; 4]).as_bytes());
                }
            }
            Some(other) => bytes.extend(other.encode_utf8(&mut [0; 4]).as_bytes()),
        }
        rest = chars.as_str();
    }
}

fn escape(kind: Kind, chars: &mut Chars<'_>, bytes: &mut Vec<u8>) -> Result<(), TokenError> {
    let escaped = chars.next().ok_or(TokenError::EndsWithBackslash)?;
    let simple = match escaped {
        'a' => Some(0x07),
        'b' => Some(0x08),
        'f' => Some(0x0c),
        'n' => Some(b'\n'),
        'r' => Some(b'\r'),
        't' => Some(b'\t'),
        'v' => Some(0x0b),
        '\\' => Some(b'\\'),
        '?' => Some(b'?'),
        '"' => Some(b'"'),
        '\'' => Some(b'\''),
        '`' => Some(b'`'),
        _ => None,
    };
    if let Some(byte) = simple {
        bytes.push(byte);
        return Ok(());
    }
    let (radix, digits, already) = match escaped {
        'x' | 'X' => (16, 2, 0),
        'u' if !kind.bytes => (16, 4, 0),
        'U' if !kind.bytes => (16, 8, 0),
        '0'..='3' => (8, 2, escaped.to_digit(8).unwrap_or_default()),
        character => return Err(TokenError::NoEscape { character }),
    };
    let mut code = already;
    for _ in 0..digits {
        let digit = chars.next().and_then(|digit| digit.to_digit(radix));
        code = code * radix + digit.ok_or(TokenError::FewDigits)?;
    }
    match u8::try_from(code) {
        Ok(byte) if kind.bytes => bytes.push(byte),
        _ => {
            let code = char::from_u32(code).ok_or(TokenError::NoCharacter)?;
            bytes.extend(code.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }
    Ok(())
}

fn number(rest: &str) -> Result<(Token, &str), TokenError> {
    let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unsigned = |value: Result<u64, _>, after: &'_ str| {
        let value = value.map_err(|_: std::num::ParseIntError| TokenError::TooLargeNumber)?;
        Ok::<_, TokenError>(match after.strip_prefix(['u', 'U']) {
            Some(after) => (Token::Uint(value), after.len()),
            None => (Token::Int(value), after.len()),
        })
    };
    let split = |after: usize| rest.get(rest.len() - after..).unwrap_or_default();
    if let Some(hex) = rest.strip_prefix("0x").or_else(|| rest.strip_prefix("0X")) {
        let end = hex.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(hex.len());
        let (value, after) = hex.split_at(end);
        let (token, after) = unsigned(u64::from_str_radix(value, 16), after)?;
        return Ok((token, split(after)));
    }
    let whole = digits(rest);
    let mut end = whole;
    let tail = rest.get(end..).unwrap_or_default();
    if let Some(fraction) = tail.strip_prefix('.') {
        let count = digits(fraction);
        end += if count > 0 { 1 + count } else { 0 };
    }
    let tail = rest.get(end..).unwrap_or_default();
    if let Some(exponent) = tail.strip_prefix(['e', 'E']) {
        let sign = usize::from(exponent.starts_with(['+', '-']));
        let count = digits(exponent.get(sign..).unwrap_or_default());
        end += if count > 0 { 1 + sign + count } else { 0 };
    }
    let (value, after) = rest.split_at(end);
    if end > whole {
        let value = value.parse().map_err(|_| TokenError::UnreadableNumber)?;
        return Ok((Token::Double(value), after));
    }
    let (token, after) = unsigned(value.parse(), after)?;
    Ok((token, split(after)))
}
