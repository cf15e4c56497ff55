//! The environment: variables that a tenant or HAMi's tools set. They can lower a limit and never raise one.

use core::ffi::{CStr, c_char};

/// Returns the value of a variable. An empty value counts as not set.
pub(crate) fn get(name: &[u8]) -> Option<&'static [u8]> {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    // SAFETY: libc's environment: an array of terminated strings, ended by null, or null. A program that
    // changes it while another thread reads it is in the wrong with libc's own getenv as well.
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            let entry = CStr::from_ptr(*at).to_bytes();
            if let Some(value) = entry.strip_prefix(name).and_then(|rest| rest.strip_prefix(b"=")) {
                return Some(value).filter(|value| !value.is_empty());
            }
            at = at.add(1);
        }
    }
    None
}

/// Calls `visit` with the text behind `prefix` and the value of each variable whose name starts with it.
pub(crate) fn each(prefix: &[u8], visit: &mut dyn FnMut(&'static [u8], &'static [u8])) {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    // SAFETY: as above.
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            let entry = CStr::from_ptr(*at).to_bytes();
            if let Some(rest) = entry.strip_prefix(prefix)
                && let Some(equals) = rest.iter().position(|b| *b == b'=')
                && let (Some(name), Some(value)) = (rest.get(..equals), rest.get(equals + 1..))
            {
                visit(name, value);
            }
            at = at.add(1);
        }
    }
}

/// Returns true if the kernel says that the environment must not be trusted, as in a set-uid program.
pub(crate) fn is_secure_mode() -> bool {
    const AT_SECURE: u64 = 23;
    unsafe extern "C" {
        fn getauxval(kind: u64) -> u64;
    }
    // SAFETY: reads the auxiliary vector.
    unsafe { getauxval(AT_SECURE) != 0 }
}

/// Parses a number of bytes as HAMi writes it: an integer, decimal or with `0x`, and optionally g, m or k in
/// either case, which are powers of 1024. Returns `None` if it is no such number, or above what 64 bits hold.
pub(crate) fn parse_bytes(text: &[u8]) -> Option<u64> {
    let (digits, shift) = match text.split_last()? {
        (b'g' | b'G', digits) => (digits, 30),
        (b'm' | b'M', digits) => (digits, 20),
        (b'k' | b'K', digits) => (digits, 10),
        _ => (text, 0),
    };
    parse_number(digits)?.checked_mul(1 << shift)
}

/// Parses a whole number, decimal or with `0x`.
pub(crate) fn parse_number(text: &[u8]) -> Option<u64> {
    let (radix, digits) = match text.strip_prefix(b"0x").or_else(|| text.strip_prefix(b"0X")) {
        Some(digits) => (16, digits),
        None => (10, text),
    };
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |sum, byte| {
        let digit = char::from(*byte).to_digit(radix)?;
        sum.checked_mul(u64::from(radix))?.checked_add(u64::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_hami_writes_them() {
        for (text, bytes) in [
            ("0", Some(0)),
            ("4096", Some(4096)),
            ("10g", Some(10 << 30)),
            ("3000m", Some(3000 << 20)),
            ("7K", Some(7 << 10)),
            ("0x10M", Some(16 << 20)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("17179869184g", None),
            ("", None),
            ("g", None),
            ("-1", None),
            ("1.5g", None),
            ("10gb", None),
            (" 1", None),
            ("0x", None),
        ] {
            assert_eq!(parse_bytes(text.as_bytes()), bytes, "{text:?}");
        }
    }

    #[test]
    fn any_text_is_the_number_that_it_says_or_none() {
        let mut seed = 0x0123_4567_89ab_cdef_u64;
        let mut random = |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        let letters = b"0123456789abcdefxXgGmMkK-+. _\xff";
        let mut numbers = 0;
        // Miri is a thousand times slower.
        let rounds = if cfg!(miri) { 300 } else { 500_000 };
        for _ in 0..rounds {
            let mut text = Vec::new();
            for _ in 0..random(24) {
                let from = if random(4) == 0 { letters.len() as u64 } else { 10 };
                text.push(letters[random(from) as usize]);
            }
            if random(2) == 0 {
                text.push(letters[16 + random(8) as usize]);
            }
            let Some(found) = parse_bytes(&text) else { continue };
            numbers += 1;
            // By arithmetic that cannot overflow.
            let text = std::str::from_utf8(&text).unwrap().to_ascii_lowercase();
            let (digits, unit) = match text.trim_end_matches(['g', 'm', 'k']) {
                digits if digits.len() + 1 == text.len() => {
                    let unit = text.chars().last().unwrap();
                    (digits.to_owned(), 1_u128 << (10 * ("kmg".find(unit).unwrap() + 1)))
                }
                _ => (text.clone(), 1),
            };
            let value = match digits.strip_prefix("0x") {
                Some(hex) => hex
                    .bytes()
                    .fold(0_u128, |sum, b| sum * 16 + u128::from(char::from(b).to_digit(16).unwrap())),
                None => digits.bytes().fold(0_u128, |sum, b| sum * 10 + u128::from(b - b'0')),
            };
            assert_eq!(u128::from(found), value * unit, "{text}");
        }
        assert!(numbers > rounds / 50, "{numbers} of the texts were numbers");
    }

    #[test]
    fn variables_are_found_by_whole_name() {
        assert_eq!(get(b"PAT"), None);
        assert!(get(b"PATH").is_some());
        let mut found = false;
        each(b"PA", &mut |name, _| found |= name == b"TH");
        assert!(found);
    }
}
