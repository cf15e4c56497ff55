//! What is loaded: the real `dlsym`, `dlvsym` and `dlopen`, and which object an address belongs to.
//!
//! The real functions are found in the symbol tables of libc and libdl, because any reference to these names
//! would be satisfied by the stub's own exports. Finding them calls nothing. The rest is asked only about
//! names of the vendor's libraries.

use crate::forks;
use crate::links::{self, Link};
use crate::sys;
use crate::tables::Tables;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering::Relaxed};

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

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
type Visit = unsafe extern "C" fn(*const Info, usize, *mut c_void) -> c_int;

unsafe extern "C" {
    fn dl_iterate_phdr(visit: Visit, data: *mut c_void) -> c_int;
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
    forks::walk(|| unsafe { dl_iterate_phdr(step::<F>, core::ptr::from_mut(visit).cast()) != 0 })
}

/// Returns the last part of a path.
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

    fn vendor(&self) -> Option<Vendor> {
        Vendor::of(self.path(), self.tables())
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

/// A function of the loader.
#[derive(Clone, Copy)]
pub(crate) enum Loader {
    /// `dlsym`
    Sym,
    /// `dlvsym`
    Vsym,
    /// `dlopen`
    Open,
    /// `dladdr1`
    Addr,
}

static REAL: [AtomicPtr<c_void>; 4] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 4];

/// Returns the address of the real function; null in a process without glibc's loader.
pub(crate) fn real(function: Loader) -> *mut c_void {
    let (cell, name) = match function {
        Loader::Sym => (&REAL[0], c"dlsym"),
        Loader::Vsym => (&REAL[1], c"dlvsym"),
        Loader::Open => (&REAL[2], c"dlopen"),
        Loader::Addr => (&REAL[3], c"dladdr1"),
    };
    let known = cell.load(Relaxed);
    if !known.is_null() {
        return known;
    }
    let mut found = of_libc(name);
    if found.is_null() && load_libdl() {
        found = of_libc(name);
    }
    cell.store(found, Relaxed);
    found
}

/// Loads libdl, if an older C library keeps these functions in it and nobody has needed it: a program that
/// asks for them weakly sees the stub's exports and takes them for given. Returns true if libdl is loaded
/// now.
fn load_libdl() -> bool {
    type Open = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
    /// The process and thread that loads libdl, and may look something up meanwhile.
    static LOADING: AtomicU64 = AtomicU64::new(0);
    const RTLD_NOW: c_int = 2;
    /// The flag that the C library's own calls carry.
    const RTLD_DLOPEN: c_int = c_int::MIN;
    let open = of_libc(c"__libc_dlopen_mode");
    let me = sys::thread_of_process();
    if open.is_null() || LOADING.swap(me, Relaxed) == me {
        return false;
    }
    // SAFETY: the function of this name and type in every glibc that has a libdl of its own.
    let loaded = unsafe {
        let open = core::mem::transmute::<*mut c_void, Open>(open);
        !open(c"libdl.so.2".as_ptr(), RTLD_NOW | RTLD_DLOPEN).is_null()
    };
    LOADING.store(0, Relaxed);
    loaded
}

/// Returns the address of a function of libc or libdl; null if there is none.
pub(crate) fn of_libc(name: &CStr) -> *mut c_void {
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
    if !links::each(&mut |link| look(link.path(), Some(link.into()))) {
        each_object(&mut |object| look(object.path(), object.tables()));
    }
    found
}

/// `struct dl_find_object` of glibc 2.35, with room for later fields.
#[repr(C)]
struct Place {
    flags: u64,
    start: usize,
    end: usize,
    link: *const Link,
    frame: *const c_void,
    more: [u64; 16],
}

/// The address of glibc's `_dl_find_object`; 0 = not looked for, 1 = this C library has none.
static FIND: AtomicUsize = AtomicUsize::new(0);

/// Returns the owner of an address as the loader tells it, without a lock and in all scopes. `None` if this C
/// library has no function for it.
fn owner_by_loader(address: usize) -> Option<Owner> {
    type Find = unsafe extern "C" fn(*const c_void, *mut Place) -> c_int;
    let mut find = FIND.load(Relaxed);
    if find == 0 {
        links::each(&mut |link| {
            let loader = file_name(link.path()).starts_with(b"ld-linux");
            if loader && let Some(function) = Tables::from(link).function(c"_dl_find_object") {
                find = function as usize;
            }
            loader
        });
        find = find.max(1);
        FIND.store(find, Relaxed);
    }
    if find == 1 {
        return None;
    }
    let mut place = Place {
        flags: 0,
        start: 0,
        end: 0,
        link: core::ptr::null(),
        frame: core::ptr::null(),
        more: [0; 16],
    };
    // SAFETY: the loader's function of this type, which takes any address and fills the record in where it
    // knows it; its link lives as long as the object, which the caller has an address of.
    let link = unsafe {
        let find = core::mem::transmute::<usize, Find>(find);
        if find(address as *const c_void, &mut place) != 0 {
            return Some(Owner::Other);
        }
        place.link.as_ref()
    };
    if (place.start..place.end).contains(&own_address()) {
        return Some(Owner::Stub);
    }
    let vendor = link.and_then(|link| Vendor::of(link.path(), Some(link.into())));
    Some(vendor.map_or(Owner::Other, Owner::Vendor))
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
    /// Recognises a vendor library by its file's name or, because a copy or link may have another one, by the
    /// name that it carries itself.
    fn of(path: &[u8], tables: Option<Tables>) -> Option<Self> {
        Self::named(file_name(path)).or_else(|| Self::named(tables?.soname()))
    }

    fn named(name: &[u8]) -> Option<Self> {
        if name.starts_with(b"libcuda.so") {
            Some(Self::Cuda)
        } else if name.starts_with(b"libnvidia-ml.so") {
            Some(Self::Nvml)
        } else {
            None
        }
    }
}

/// The owner of the code at an address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The stub itself.
    Stub,
    /// A vendor library.
    Vendor(Vendor),
    /// Any other object.
    Other,
}

/// Returns the owner of the object that `address` lies in.
pub(crate) fn owner(address: usize) -> Owner {
    if let Some(owner) = owner_by_loader(address) {
        return owner;
    }
    let mut owner = Owner::Other;
    each_object(&mut |object| {
        let here = object.contains(address);
        if here {
            owner = if object.contains(own_address()) {
                Owner::Stub
            } else {
                object.vendor().map_or(Owner::Other, Owner::Vendor)
            };
        }
        here
    });
    if owner == Owner::Other { in_other_namespace(address).unwrap_or(owner) } else { owner }
}

/// Returns the vendor library that `dlmopen` has loaded at an address into a namespace of its own: objects
/// there are not visited, but the loader knows the address.
fn in_other_namespace(address: usize) -> Option<Owner> {
    type Dladdr1 = unsafe extern "C" fn(*const c_void, *mut Location, *mut *const Link, c_int) -> c_int;
    const RTLD_DL_LINKMAP: c_int = 2;
    let mut found = Location {
        file: core::ptr::null(),
        base: core::ptr::null_mut(),
        symbol: core::ptr::null(),
        address: core::ptr::null_mut(),
    };
    let mut link: *const Link = core::ptr::null();
    let dladdr1 = real(Loader::Addr);
    if dladdr1.is_null() {
        return None;
    }
    // SAFETY: the loader's function of this type; any address may be asked for, and it fills the records in
    // where it knows it. Its link lives as long as the object.
    let link = unsafe {
        let dladdr1 = core::mem::transmute::<*mut c_void, Dladdr1>(dladdr1);
        let known = dladdr1(address as *const c_void, &mut found, &mut link, RTLD_DL_LINKMAP) != 0;
        if known { link.as_ref() } else { None }
    }?;
    Vendor::of(link.path(), Some(link.into())).map(Owner::Vendor)
}

/// Returns true if the real library is loaded, in whatever scope.
pub(crate) fn is_loaded(vendor: Vendor) -> bool {
    each_object(&mut |object| object.vendor() == Some(vendor))
}

/// Returns true if `address` lies in an object that comes before the stub in link order.
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

/// Copies the stub's own path into `buffer` and returns its length; 0 if it does not fit.
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
