//! Just enough JSON to take a string out of nested objects. A program that runs beside containers should not
//! depend on more.

/// The reason why a document could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonError {
    /// The document is not JSON.
    Malformed,
    /// The document is nested deeper than any configuration.
    Deep,
}

/// Returns the string at a path of object keys; `None` if nothing or something else is there.
pub(crate) fn string_at(document: &str, path: &[&str]) -> Result<Option<String>, JsonError> {
    let mut reader = Reader { rest: document.as_bytes(), found: None, raw: None };
    reader.value(Some(path), 0)?;
    reader.space();
    if reader.rest.is_empty() { Ok(reader.found) } else { Err(JsonError::Malformed) }
}

/// Returns the whole numbers of the list at a path of object keys; `None` if there is no such list.
pub(crate) fn numbers_at(document: &str, path: &[&str]) -> Option<Vec<u32>> {
    let mut reader = Reader { rest: document.as_bytes(), found: None, raw: None };
    reader.value(Some(path), 0).ok()?;
    let list = std::str::from_utf8(reader.raw?).ok()?.strip_prefix('[')?.strip_suffix(']')?;
    list.split(',').map(|number| number.trim().parse().ok()).collect()
}

struct Reader<'a> {
    rest: &'a [u8],
    found: Option<String>,
    /// The text of the value at the path.
    raw: Option<&'a [u8]>,
}

impl<'a> Reader<'a> {
    fn space(&mut self) {
        let blank = self.rest.iter().take_while(|b| matches!(b, b' ' | b'\t' | b'\n' | b'\r')).count();
        self.rest = self.rest.get(blank..).unwrap_or_default();
    }

    fn next(&mut self) -> Result<u8, JsonError> {
        let (first, rest) = self.rest.split_first().ok_or(JsonError::Malformed)?;
        self.rest = rest;
        Ok(*first)
    }

    /// Takes the next byte behind white space if it is `wanted`. Returns true if it was.
    fn takes(&mut self, wanted: u8) -> bool {
        self.space();
        let here = self.rest.first() == Some(&wanted);
        if here {
            self.rest = self.rest.get(1..).unwrap_or_default();
        }
        here
    }

    fn expect(&mut self, wanted: u8) -> Result<(), JsonError> {
        if self.takes(wanted) { Ok(()) } else { Err(JsonError::Malformed) }
    }

    /// Reads one value; `path` leads to the wanted string if it is inside this value.
    fn value(&mut self, path: Option<&[&str]>, depth: u32) -> Result<(), JsonError> {
        if depth > 128 {
            return Err(JsonError::Deep);
        }
        self.space();
        let before: &'a [u8] = self.rest;
        self.content(path, depth)?;
        if path.is_some_and(<[&str]>::is_empty) {
            self.raw = before.get(..before.len().saturating_sub(self.rest.len()));
        }
        Ok(())
    }

    fn content(&mut self, path: Option<&[&str]>, depth: u32) -> Result<(), JsonError> {
        match self.rest.first() {
            Some(b'{') => self.object(path, depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => {
                let text = self.string()?;
                if path.is_some_and(<[&str]>::is_empty) {
                    self.found = Some(text);
                }
                Ok(())
            }
            _ => self.word(),
        }
    }

    fn object(&mut self, path: Option<&[&str]>, depth: u32) -> Result<(), JsonError> {
        self.expect(b'{')?;
        if self.takes(b'}') {
            return Ok(());
        }
        loop {
            self.space();
            let key = self.string()?;
            self.expect(b':')?;
            let inside = path.and_then(|path| path.split_first()).filter(|(first, _)| **first == key);
            if inside.is_some() {
                // If a key is there twice, the last one counts.
                self.found = None;
                self.raw = None;
            }
            self.value(inside.map(|(_, rest)| rest), depth + 1)?;
            if !self.takes(b',') {
                return self.expect(b'}');
            }
        }
    }

    fn array(&mut self, depth: u32) -> Result<(), JsonError> {
        self.expect(b'[')?;
        if self.takes(b']') {
            return Ok(());
        }
        loop {
            self.value(None, depth + 1)?;
            if !self.takes(b',') {
                return self.expect(b']');
            }
        }
    }

    /// Reads a number, `true`, `false` or `null`.
    fn word(&mut self) -> Result<(), JsonError> {
        let length = self.rest.iter().take_while(|b| b.is_ascii_alphanumeric() || b"+-.".contains(b)).count();
        let word = self.rest.get(..length).unwrap_or_default();
        self.rest = self.rest.get(length..).unwrap_or_default();
        let text = std::str::from_utf8(word).unwrap_or_default();
        if matches!(text, "true" | "false" | "null") || is_number(text) {
            Ok(())
        } else {
            Err(JsonError::Malformed)
        }
    }

    fn string(&mut self) -> Result<String, JsonError> {
        self.expect(b'"')?;
        let mut bytes = Vec::new();
        loop {
            match self.next()? {
                b'"' => return String::from_utf8(bytes).map_err(|_| JsonError::Malformed),
                b'\\' => {
                    let character = self.escape()?;
                    bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                }
                byte if byte < 0x20 => return Err(JsonError::Malformed),
                byte => bytes.push(byte),
            }
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        Ok(match self.next()? {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let first = self.hex()?;
                let code = if (0xd800..0xdc00).contains(&first) {
                    if self.next()? != b'\\' || self.next()? != b'u' {
                        return Err(JsonError::Malformed);
                    }
                    let second = self.hex()?.checked_sub(0xdc00).filter(|low| *low < 0x400);
                    0x10000 + ((first - 0xd800) << 10) + second.ok_or(JsonError::Malformed)?
                } else {
                    first
                };
                char::from_u32(code).ok_or(JsonError::Malformed)?
            }
            _ => return Err(JsonError::Malformed),
        })
    }

    fn hex(&mut self) -> Result<u32, JsonError> {
        (0..4).try_fold(0, |sum, _| {
            let digit = char::from(self.next()?).to_digit(16).ok_or(JsonError::Malformed)?;
            Ok(sum * 16 + digit)
        })
    }
}

/// Returns true if a text is a number as JSON writes numbers, which is narrower than what Rust reads, and
/// finite.
fn is_number(text: &str) -> bool {
    let (number, exponent) = match text.split_once(['e', 'E']) {
        Some((number, exponent)) => (number, Some(exponent)),
        None => (text, None),
    };
    let (whole, part) = match number.split_once('.') {
        Some((whole, part)) => (whole, Some(part)),
        None => (number, None),
    };
    let whole = whole.strip_prefix('-').unwrap_or(whole);
    let exponent = exponent.map(|exponent| exponent.strip_prefix(['+', '-']).unwrap_or(exponent));
    let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let has_form = are_digits(whole)
        && (whole == "0" || !whole.starts_with('0'))
        && part.is_none_or(are_digits)
        && exponent.is_none_or(are_digits);
    has_form && text.parse::<f64>().is_ok_and(f64::is_finite)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_their_path() {
        let at = |text: &str| numbers_at(text, &["Driver"]);
        assert_eq!(
            at(r#"{"Format": 1, "Driver": [535, 550 ,580], "Device": [1]}"#),
            Some(vec![535, 550, 580])
        );
        for none in [
            r#"{"Driver": ["535"]}"#,
            r#"{"Driver": [-1]}"#,
            r#"{"Driver": 535}"#,
            "{}",
            "[",
            r#"{"Driver": []}"#,
        ] {
            assert_eq!(at(none), None, "{none}");
        }
    }

    #[test]
    fn strings_are_found_by_their_path() {
        let document = r#" {"a": [1, {"root": "no"}], "root": {"readonly": true, "path": "r\u00f6\n\ud83d\ude00/x"},
            "deep": {"root": {"path": "no"}}, "n": -1.5e3, "e": {}, "l": []} "#;
        assert_eq!(string_at(document, &["root", "path"]), Ok(Some("rö\n😀/x".to_owned())));
        assert_eq!(string_at(document, &["root"]), Ok(None));
        assert_eq!(string_at(document, &["root", "readonly"]), Ok(None));
        assert_eq!(string_at(document, &["a", "root"]), Ok(None), "arrays are not looked into");
        assert_eq!(string_at("\"x\"", &[]), Ok(Some("x".to_owned())));
    }

    #[test]
    fn of_a_key_that_is_there_twice_the_last_one_counts() {
        let path = |document| string_at(document, &["root", "path"]);
        assert_eq!(path(r#"{"root":{"path":"a","path":"b"}}"#), Ok(Some("b".to_owned())));
        assert_eq!(path(r#"{"root":{"path":"a","path":1}}"#), Ok(None));
        assert_eq!(path(r#"{"root":{"path":"a"},"root":{}}"#), Ok(None));
        assert_eq!(path(r#"{"root":{"path":"a"},"other":{"path":1}}"#), Ok(Some("a".to_owned())));
    }

    #[test]
    fn what_is_not_json_is_refused() {
        for text in [
            "",
            "{",
            "{\"a\"}",
            "{\"a\":}",
            "[1,]",
            "nul",
            "{} {}",
            "\"\\x\"",
            "\"\\ud800\"",
            "1e999",
            "\"\n\"",
        ] {
            assert_eq!(string_at(text, &["a"]), Err(JsonError::Malformed), "{text}");
        }
        for text in ["05", "-", "+1", "1.", ".5", "1e", "1e+", "0x1", "-01", "inf", "NaN", "1_0"] {
            assert_eq!(string_at(text, &["a"]), Err(JsonError::Malformed), "{text}");
        }
        for text in ["0", "-0", "10.50", "1E+5", "2e-999"] {
            assert_eq!(string_at(text, &["a"]), Ok(None), "{text}");
        }
        let deep = "[".repeat(100_000);
        assert_eq!(string_at(&deep, &["a"]), Err(JsonError::Deep));
    }
}
