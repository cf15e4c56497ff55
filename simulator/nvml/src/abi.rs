//! The C side: pointers that callers give us, and opaque handles that we give them.
//!
//! All raw pointer access of this library is here. The contract of NVML's interface stands behind every
//! `SAFETY` comment: a pointer that is not null points to memory of its type, valid for the call.

use std::ffi::{CStr, c_char, c_uint};

use crate::call::{Code, Done};

/// A pointer for one value or an array that the caller wants filled.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// A pointer that stands in a structure of the caller.
    pub(crate) fn from_field(pointer: *mut T) -> Self {
        Self(pointer)
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Refuses a null pointer.
    pub(crate) fn check(self) -> Done {
        if self.is_null() { Err(Code::INVALID_ARGUMENT) } else { Ok(()) }
    }

    /// Writes one value.
    pub(crate) fn put(self, value: T) -> Done {
        self.check()?;
        // SAFETY: not null, so valid for a write by the contract of the interface.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Reads one value.
    pub(crate) fn get(self) -> Result<T, Code> {
        self.check()?;
        // SAFETY: not null, so valid for a read by the contract of the interface.
        Ok(unsafe { self.0.read() })
    }

    /// Writes consecutive values; the caller has checked that the array is long enough.
    pub(crate) fn put_all(self, values: impl IntoIterator<Item = T>) -> Done {
        self.check()?;
        for (index, value) in values.into_iter().enumerate() {
            // SAFETY: the array is as long as the caller of this method found out.
            unsafe { self.0.add(index).write(value) };
        }
        Ok(())
    }

    /// Reads the value at `index` of an array that is longer than that.
    pub(crate) fn at(self, index: usize) -> Self {
        // The pointer is only used by the methods above.
        Self(self.0.wrapping_add(index))
    }

    /// The same address as another type.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Writes text and its zero into a buffer of `length` bytes.
    pub(crate) fn put_text(self, text: &str, length: c_uint) -> Done {
        self.check()?;
        if text.len() >= length as usize {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        self.put_all(text.bytes().chain([0]).map(|b| b as c_char))
    }

    /// The text that the caller gave.
    pub(crate) fn text<'a>(self) -> Result<&'a str, Code> {
        self.check()?;
        // SAFETY: a zero-terminated string that outlives the call, by the contract of the interface.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| Code::INVALID_ARGUMENT)
    }
}

/// Text for a fixed field.
pub(crate) fn field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (to, from) in field.iter_mut().take(N.saturating_sub(1)).zip(text.bytes()) {
        *to = from as c_char;
    }
    field
}

/// The `NVML_STRUCT_VERSION` of a structure.
pub(crate) const fn version_of<T>(version: u32) -> u32 {
    (version << 24) | size_of::<T>() as u32
}

/// The protocol of NVML's lists: tells the length; refuses a buffer that is too short.
pub(crate) fn put_list<T: Copy>(count: Out<c_uint>, buffer: Out<T>, values: &[T]) -> Done {
    let room = count.get()?;
    let length = c_uint::try_from(values.len()).map_err(|_| Code::UNKNOWN)?;
    count.put(length)?;
    if length == 0 {
        return Ok(());
    }
    if room < length {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    buffer.put_all(values.iter().copied())
}

/// What an opaque handle stands for. A handle is a number in the shape of a pointer, never dereferenced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Thing {
    Gpu { index: usize },
    MigDevice { gpu: usize, gi: u32, ci: u32, serial: u64 },
    GpuInstance { gpu: usize, gi: u32, serial: u64 },
    ComputeInstance { gpu: usize, gi: u32, ci: u32, serial: u64 },
    EventSet { id: u64 },
}

/// `nvmlDevice_t`, `nvmlGpuInstance_t`, `nvmlComputeInstance_t` and `nvmlEventSet_t`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Handle(usize);

const MARK: usize = 0xa1 << 56;
const SERIAL_BITS: usize = (1 << 28) - 1;

impl Handle {
    /// The handle as the bindings' pointer type.
    pub(crate) fn as_pointer<T>(self) -> *mut T {
        self.0 as *mut T
    }

    pub(crate) fn thing(self) -> Option<Thing> {
        if self.0 & (0xff << 56) != MARK {
            return None;
        }
        let byte = |shift: usize| (self.0 >> shift) & 0xff;
        let number = |shift: usize| byte(shift) as u32;
        let gpu = byte(44);
        let (gi, ci, serial) = (number(36), number(28), (self.0 & SERIAL_BITS) as u64);
        match (self.0 >> 52) & 0xf {
            1 => Some(Thing::Gpu { index: gpu }),
            2 => Some(Thing::MigDevice { gpu, gi, ci, serial }),
            3 => Some(Thing::GpuInstance { gpu, gi, serial }),
            4 => Some(Thing::ComputeInstance { gpu, gi, ci, serial }),
            5 => Some(Thing::EventSet { id: serial }),
            _ => None,
        }
    }
}

impl From<Thing> for Handle {
    fn from(thing: Thing) -> Self {
        let pack = |kind: usize, gpu: usize, gi: u32, ci: u32, serial: u64| {
            let serial = serial as usize & SERIAL_BITS;
            Self(MARK | kind << 52 | gpu << 44 | (gi as usize) << 36 | (ci as usize) << 28 | serial)
        };
        match thing {
            Thing::Gpu { index } => pack(1, index, 0, 0, 0),
            Thing::MigDevice { gpu, gi, ci, serial } => pack(2, gpu, gi, ci, serial),
            Thing::GpuInstance { gpu, gi, serial } => pack(3, gpu, gi, 0, serial),
            Thing::ComputeInstance { gpu, gi, ci, serial } => pack(4, gpu, gi, ci, serial),
            Thing::EventSet { id } => pack(5, 0, 0, 0, id),
        }
    }
}
