//! Messages to the user: one per process, on standard error.

use crate::sys;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A text of bounded length, cut where it is full.
#[derive(Clone, Copy)]
pub(crate) struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    /// Returns an empty text.
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; N], len: 0 }
    }

    /// Returns the text as formatted; a zero always follows it.
    pub(crate) fn of(arguments: fmt::Arguments<'_>) -> Self {
        let mut text = Self::new();
        let _ = text.write_fmt(arguments);
        text
    }

    /// Appends bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let room = N.saturating_sub(1).saturating_sub(self.len);
        let taken = bytes.get(..bytes.len().min(room)).unwrap_or_default();
        if let Some(target) = self.bytes.get_mut(self.len..self.len + taken.len()) {
            target.copy_from_slice(taken);
            self.len += taken.len();
        }
    }

    /// Returns the text as bytes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// Returns the text, or the part of it that is UTF-8.
    pub(crate) fn as_str(&self) -> &str {
        match core::str::from_utf8(self.as_bytes()) {
            Ok(text) => text,
            Err(error) => self
                .bytes
                .get(..error.valid_up_to())
                .and_then(|t| core::str::from_utf8(t).ok())
                .unwrap_or_default(),
        }
    }

    /// Returns the text as a C string.
    pub(crate) fn as_c(&self) -> &core::ffi::CStr {
        core::ffi::CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }

    /// Returns true if everything that was written fitted.
    pub(crate) fn is_whole(&self) -> bool {
        self.len + 1 < N
    }
}

impl<const N: usize> Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

impl<const N: usize> fmt::Display for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

static REFUSAL_TOLD: AtomicBool = AtomicBool::new(false);
static DOUBT_TOLD: AtomicBool = AtomicBool::new(false);

/// Tells the user, once per process, why CUDA is refused.
pub(crate) fn refusal(reason: &str) {
    if !REFUSAL_TOLD.swap(true, Relaxed) {
        let text: Text<512> = Text::of(format_args!("aliquot: CUDA is refused: {reason}\n"));
        sys::write_stderr(text.as_bytes());
    }
}

/// Tells the user, once per process, something that limits what the program can do.
pub(crate) fn note(reason: fmt::Arguments<'_>) {
    if !DOUBT_TOLD.swap(true, Relaxed) {
        let text: Text<512> = Text::of(format_args!("aliquot: {reason}\n"));
        sys::write_stderr(text.as_bytes());
    }
}

/// Lets everything be told once more, in a forked child.
pub(crate) fn renew_after_fork() {
    REFUSAL_TOLD.store(false, Relaxed);
    DOUBT_TOLD.store(false, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_where_it_is_full() {
        let text: Text<8> = Text::of(format_args!("{}{}", "abc", 12345678));
        assert_eq!((text.as_str(), text.as_c().to_bytes()), ("abc1234", b"abc1234".as_slice()));
        assert!(!text.is_whole());
        assert!(Text::<8>::of(format_args!("abc")).is_whole());
    }
}
