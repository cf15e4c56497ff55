//! What is loaded: the real `dlsym`, `dlvsym` and `dlopen`, and which object an address belongs to.
//!
//! The real functions are found in the symbol tables of libc and libdl, because any reference of ours to
//! these names would be satisfied by our own exports.
//! Finding them calls nothing; the rest is asked only about names of the vendor's libraries.

use crate::links;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// `struct dl_phdr_info`, the part that every version has.
#[repr(C)]
struct Info {
    base: usize,
    name: *const c_char,
    headers: *const Header,
    count: u16,
}

/// `Elf64_Phdr`.
#[repr(C)]
struct Header {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    physical: u64,
    file_size: u64,
    memory_size: u64,
    align: u64,
}

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

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_HASH: u64 = 4;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const STT_FUNC: u8 = 2;

type Visit = unsafe extern "C" fn(*const Info, usize, *mut c_void) -> c_int;

unsafe extern "C" {
    fn dl_iterate_phdr(visit: Visit, data: *mut c_void) -> c_int;
    fn dladdr(address: *const c_void, info: *mut Location) -> c_int;
}

/// `Dl_info`
#[repr(C)]
struct Location {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

/// Calls `visit` for each loaded object in link order until it returns true.
fn each_object<F: FnMut(&Object) -> bool>(visit: &mut F) -> bool {
    unsafe extern "C" fn step<F: FnMut(&Object) -> bool>(
        info: *const Info,
        _: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader hands in a valid record, and `data` is the closure below.
        let (info, visit) = unsafe { (&*info, &mut *data.cast::<F>()) };
        c_int::from(visit(&Object { info }))
    }
    // SAFETY: `step` is called only during this call, with a pointer to a closure of its type.
    unsafe { dl_iterate_phdr(step::<F>, core::ptr::from_mut(visit).cast()) != 0 }
}

/// Last part of a path.
fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').next().unwrap_or_default()
}

/// A loaded object, valid during the visit.
struct Object<'a> {
    info: &'a Info,
}

impl Object<'_> {
    fn path(&self) -> &[u8] {
        if self.info.name.is_null() {
            return b"";
        }
        // SAFETY: the loader's names are terminated strings that live as long as the object.
        unsafe { CStr::from_ptr(self.info.name) }.to_bytes()
    }

    fn file_name(&self) -> &[u8] {
        file_name(self.path())
    }

    fn headers(&self) -> &[Header] {
        if self.info.headers.is_null() {
            return &[];
        }
        // SAFETY: the loader's record holds the object's program headers and their count.
        unsafe { core::slice::from_raw_parts(self.info.headers, usize::from(self.info.count)) }
    }

    fn contains(&self, address: usize) -> bool {
        self.headers().iter().filter(|h| h.kind == PT_LOAD).any(|h| {
            let start = self.info.base.wrapping_add(h.address as usize);
            address.wrapping_sub(start) < h.memory_size as usize
        })
    }

    fn tables(&self) -> Option<Tables> {
        let header = self.headers().iter().find(|h| h.kind == PT_DYNAMIC)?;
        let base = self.info.base;
        Some(Tables { base, dynamic: base.wrapping_add(header.address as usize) as *const [u64; 2] })
    }
}

/// The tables of a loaded object.
struct Tables {
    base: usize,
    dynamic: *const [u64; 2],
}

impl Tables {
    /// An entry of the dynamic section that is an address.
    fn address(&self, tag: u64) -> Option<usize> {
        let mut entry = self.dynamic;
        loop {
            // SAFETY: the dynamic section is mapped and ends with an entry of tag 0.
            let [found, value] = unsafe { *entry };
            if found == tag {
                // glibc stores addresses relocated, except where the section is read-only.
                let value = value as usize;
                return Some(if value < self.base { self.base.wrapping_add(value) } else { value });
            }
            if found == 0 {
                return None;
            }
            // SAFETY: the terminating entry has not been reached.
            entry = unsafe { entry.add(1) };
        }
    }

    /// Address of a function that the object defines.
    fn function(&self, name: &CStr) -> Option<*mut c_void> {
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

/// Walks the chain of `name` in a GNU hash table.
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

/// The loader's functions.
#[derive(Clone, Copy)]
pub(crate) enum Loader {
    /// `dlsym`
    Sym,
    /// `dlvsym`
    Vsym,
    /// `dlopen`
    Open,
}

static REAL: [AtomicPtr<c_void>; 3] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 3];

/// Address of the real function; null in a process without glibc's loader.
pub(crate) fn real(function: Loader) -> *mut c_void {
    let (cell, name) = match function {
        Loader::Sym => (&REAL[0], c"dlsym"),
        Loader::Vsym => (&REAL[1], c"dlvsym"),
        Loader::Open => (&REAL[2], c"dlopen"),
    };
    let known = cell.load(Relaxed);
    if !known.is_null() {
        return known;
    }
    let mut found = core::ptr::null_mut();
    let mut look = |path: &[u8], tables: Option<Tables>| {
        let loader = [b"libc.so".as_slice(), b"libc-2", b"libdl.so", b"libdl-2"];
        if loader.iter().any(|l| file_name(path).starts_with(l))
            && let Some(function) = tables.and_then(|tables| tables.function(name))
        {
            found = function;
            return true;
        }
        false
    };
    let tables = |link: &links::Link| Tables { base: link.base, dynamic: link.dynamic };
    if !links::each(&mut |link| look(link.path(), Some(tables(link)))) {
        each_object(&mut |object| look(object.path(), object.tables()));
    }
    cell.store(found, Relaxed);
    found
}

/// A vendor library whose symbols are in the hook table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vendor {
    /// `libcuda.so.1`
    Cuda,
    /// `libnvidia-ml.so.1`
    Nvml,
}

impl Vendor {
    fn of(file: &[u8]) -> Option<Self> {
        if file.starts_with(b"libcuda.so") {
            Some(Self::Cuda)
        } else if file.starts_with(b"libnvidia-ml.so") {
            Some(Self::Nvml)
        } else {
            None
        }
    }
}

/// Whose code an address is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Ours.
    Stub,
    /// A vendor library's.
    Vendor(Vendor),
    /// Somebody else's.
    Other,
}

/// The object that `address` lies in.
pub(crate) fn owner(address: usize) -> Owner {
    let mut owner = Owner::Other;
    each_object(&mut |object| {
        let here = object.contains(address);
        if here {
            owner = if object.contains(own_address()) {
                Owner::Stub
            } else {
                Vendor::of(object.file_name()).map_or(Owner::Other, Owner::Vendor)
            };
        }
        here
    });
    if owner == Owner::Other { in_other_namespace(address).unwrap_or(owner) } else { owner }
}

/// A vendor library that `dlmopen` has loaded into a namespace of its own: objects there are not visited, but
/// the loader knows the address.
fn in_other_namespace(address: usize) -> Option<Owner> {
    let mut found = Location {
        file: core::ptr::null(),
        base: core::ptr::null_mut(),
        symbol: core::ptr::null(),
        address: core::ptr::null_mut(),
    };
    // SAFETY: any address may be asked for; the loader fills the record in where it knows it.
    if unsafe { dladdr(address as *const c_void, &mut found) } == 0 || found.file.is_null() {
        return None;
    }
    // SAFETY: the loader's names are terminated strings that live as long as the object.
    let path = unsafe { CStr::from_ptr(found.file) }.to_bytes();
    Vendor::of(path.rsplit(|b| *b == b'/').next()?).map(Owner::Vendor)
}

/// Whether the real library is loaded, in whatever scope.
pub(crate) fn is_loaded(vendor: Vendor) -> bool {
    each_object(&mut |object| Vendor::of(object.file_name()) == Some(vendor))
}

/// Whether `address` lies in an object that comes before ours in link order.
pub(crate) fn is_before_us(address: usize) -> bool {
    let mut before = false;
    each_object(&mut |object| {
        if object.contains(own_address()) {
            return true;
        }
        before = object.contains(address);
        before
    });
    before
}

/// Copies our own path into `buffer` and returns its length; 0 if it does not fit.
pub(crate) fn own_path(buffer: &mut [u8]) -> usize {
    let mut length = 0;
    each_object(&mut |object| {
        let ours = object.contains(own_address());
        if ours && let Some(target) = buffer.get_mut(..object.path().len()) {
            target.copy_from_slice(object.path());
            length = object.path().len();
        }
        ours
    });
    length
}

fn own_address() -> usize {
    REAL.as_ptr() as usize
}
