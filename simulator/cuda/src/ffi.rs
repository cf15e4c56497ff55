//! What crosses the C boundary.
//!
//! The wrappers hold a caller's pointer and are only made by a caller of an exported function, whose part of the
//! driver's contract is that a pointer is null or valid for what the function documents. Everything behind them can
//! then be ordinary safe code.

use std::ffi::{CStr, c_char};
use std::fmt;

use crate::codes::{Code, Cu};

/// Where a result goes.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

/// Where an argument, or an array of them, is read from.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

/// A zero-terminated string.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> fmt::Debug for Out<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl<T> fmt::Debug for In<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.get() {
            Ok(text) => write!(f, "{text:?}"),
            Err(_) => f.write_str("null"),
        }
    }
}

impl<T> Out<T> {
    /// Writes the result; a null pointer is an invalid value.
    pub(crate) fn put(self, value: T) -> Cu {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller of the exported function vouches for the rest (module documentation).
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the result where one is wanted.
    pub(crate) fn offer(self, value: T) {
        if !self.0.is_null() {
            let _ = self.put(value);
        }
    }

    /// Writes an element of an array.
    pub(crate) fn put_at(self, index: usize, value: T) -> Cu {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller vouches for an array of as many elements as the function documents.
        unsafe { self.0.add(index).write_unaligned(value) };
        Ok(())
    }

    /// Reads an argument that is also a result.
    pub(crate) fn get(self) -> Cu<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Fails where the result could not be written later.
    pub(crate) fn check(self) -> Cu {
        if self.0.is_null() { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }

    /// The same place as bytes.
    pub(crate) fn address(self) -> u64 {
        self.0 as u64
    }

    /// The place at that address, as stated by a caller in an integer or in a structure.
    pub(crate) fn at(address: u64) -> Self {
        Self(address as *mut T)
    }
}

impl<T: Copy> In<T> {
    /// Reads the argument; a null pointer is an invalid value.
    pub(crate) fn get(self) -> Cu<T> {
        self.get_at(0)
    }

    /// Reads an element of an array.
    pub(crate) fn get_at(self, index: usize) -> Cu<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller of the exported function vouches for the rest (module documentation).
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// Reads an array.
    pub(crate) fn list(self, length: usize) -> Cu<Vec<T>> {
        (0..length).map(|i| self.get_at(i)).collect()
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The place at that address, as stated by a caller in an integer or in a structure.
    pub(crate) fn at(address: u64) -> Self {
        Self(address as *const T)
    }

    pub(crate) fn address(self) -> u64 {
        self.0 as u64
    }
}

impl Text {
    /// Reads the string; null or not UTF-8 is an invalid value.
    pub(crate) fn get(self) -> Cu<&'static str> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller vouches for a terminated string that outlives the call, during which
        // alone the reference is used.
        let text: &'static CStr = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Code::INVALID_VALUE)
    }
}

/// Copies bytes into a caller's buffer of that length as a terminated string, cut to fit.
pub(crate) fn put_text(buffer: Out<u8>, length: i32, text: &str) -> Cu {
    let room = usize::try_from(length).ok().filter(|l| *l > 0).ok_or(Code::INVALID_VALUE)?;
    let bytes = text.bytes().take(room - 1).chain([0]);
    for (index, byte) in bytes.enumerate() {
        buffer.put_at(index, byte)?;
    }
    Ok(())
}
