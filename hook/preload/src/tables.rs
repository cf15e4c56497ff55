//! The symbol table of a loaded object, read as the loader reads it.

use crate::links::Link;
use core::ffi::{CStr, c_char, c_void};

/// `Elf64_Sym`.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_HASH: u64 = 4;
const DT_SONAME: u64 = 14;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const STT_FUNC: u8 = 2;

/// The tables of a loaded object.
pub(crate) struct Tables {
    /// The offset that is added to the object's addresses.
    pub(crate) base: usize,
    /// The object's dynamic section.
    pub(crate) dynamic: *const [u64; 2],
}

impl From<&Link> for Tables {
    fn from(link: &Link) -> Self {
        Self { base: link.base, dynamic: link.dynamic }
    }
}

impl Tables {
    /// Returns the value of an entry of the dynamic section.
    fn entry(&self, tag: u64) -> Option<usize> {
        let mut entry = self.dynamic;
        if entry.is_null() {
            return None;
        }
        loop {
            // SAFETY: the dynamic section is mapped and ends with an entry of tag 0.
            let [found, value] = unsafe { *entry };
            if found == tag {
                return Some(value as usize);
            }
            if found == 0 {
                return None;
            }
            // SAFETY: the terminating entry has not been reached.
            entry = unsafe { entry.add(1) };
        }
    }

    /// Returns the address in an entry of the dynamic section.
    fn address(&self, tag: u64) -> Option<usize> {
        // glibc stores addresses relocated, except where the section is read-only.
        self.entry(tag).map(|value| if value < self.base { self.base.wrapping_add(value) } else { value })
    }

    /// Returns the name that programs are linked against the object by; empty if it has none.
    pub(crate) fn soname(&self) -> &[u8] {
        let (Some(at), Some(strings)) = (self.entry(DT_SONAME), self.address(DT_STRTAB)) else { return b"" };
        // SAFETY: an offset into the object's strings, which end with a zero and live as long as the object.
        unsafe { CStr::from_ptr((strings as *const c_char).add(at)) }.to_bytes()
    }

    /// Returns the address of a function that the object defines.
    pub(crate) fn function(&self, name: &CStr) -> Option<*mut c_void> {
        let symbols = self.address(DT_SYMTAB)? as *const Symbol;
        let strings = self.address(DT_STRTAB)? as *const c_char;
        let matches = |index: u32| {
            // SAFETY: the index comes from the object's hash table; its names are offsets into the strings.
            let (symbol, text) = unsafe {
                let symbol = &*symbols.add(index as usize);
                (symbol, CStr::from_ptr(strings.add(symbol.name as usize)))
            };
            (symbol.section != 0 && symbol.info & 15 == STT_FUNC && text == name)
                .then(|| self.base.wrapping_add(symbol.value as usize) as *mut c_void)
        };
        if let Some(table) = self.address(DT_GNU_HASH) {
            // SAFETY: a GNU hash table of an object that the loader has accepted.
            return unsafe { gnu_lookup(table as *const u32, name, matches) };
        }
        let table = self.address(DT_HASH)? as *const u32;
        // SAFETY: a System V hash table: its second word counts the symbols.
        let count = unsafe { *table.add(1) };
        (0..count).find_map(matches)
    }
}

/// Looks `name` up by walking its chain in a GNU hash table.
///
/// # Safety
/// `table` is a GNU hash table, as the loader uses it.
unsafe fn gnu_lookup(
    table: *const u32,
    name: &CStr,
    matches: impl Fn(u32) -> Option<*mut c_void>,
) -> Option<*mut c_void> {
    let mut hash: u32 = 5381;
    for byte in name.to_bytes() {
        hash = hash.wrapping_mul(33).wrapping_add(u32::from(*byte));
    }
    // SAFETY: the caller vouches for the table's layout: four words, the filter of 64-bit words, the buckets,
    // the chains, each chain ended by an odd word.
    unsafe {
        let (buckets, offset, filter) = (*table, *table.add(1), *table.add(2));
        let bucket = table.add(4 + 2 * filter as usize);
        let chain = bucket.add(buckets as usize);
        let mut index = *bucket.add((hash.checked_rem(buckets)?) as usize);
        while index >= offset {
            let word = *chain.add((index - offset) as usize);
            if word | 1 == hash | 1
                && let Some(found) = matches(index)
            {
                return Some(found);
            }
            if word & 1 == 1 {
                break;
            }
            index += 1;
        }
    }
    None
}
