//! System calls, made directly: without errno, cancellation points, or a symbol of a libc that may be too
//! old.

use core::arch::asm;
use core::ffi::CStr;

#[cfg(target_arch = "x86_64")]
mod number {
    pub(super) const WRITE: usize = 1;
    pub(super) const CLOSE: usize = 3;
    pub(super) const LSEEK: usize = 8;
    pub(super) const MMAP: usize = 9;
    pub(super) const MUNMAP: usize = 11;
    pub(super) const PREAD: usize = 17;
    pub(super) const MADVISE: usize = 28;
    pub(super) const NANOSLEEP: usize = 35;
    pub(super) const GETPID: usize = 39;
    pub(super) const FCNTL: usize = 72;
    pub(super) const GETDENTS: usize = 217;
    pub(super) const CLOCK_GETTIME: usize = 228;
    pub(super) const OPENAT: usize = 257;
    pub(super) const READLINKAT: usize = 267;
    pub(super) const FACCESSAT: usize = 269;
}
#[cfg(target_arch = "aarch64")]
mod number {
    pub(super) const FCNTL: usize = 25;
    pub(super) const OPENAT: usize = 56;
    pub(super) const CLOSE: usize = 57;
    pub(super) const GETDENTS: usize = 61;
    pub(super) const LSEEK: usize = 62;
    pub(super) const WRITE: usize = 64;
    pub(super) const PREAD: usize = 67;
    pub(super) const FACCESSAT: usize = 48;
    pub(super) const READLINKAT: usize = 78;
    pub(super) const NANOSLEEP: usize = 101;
    pub(super) const CLOCK_GETTIME: usize = 113;
    pub(super) const GETPID: usize = 172;
    pub(super) const MUNMAP: usize = 215;
    pub(super) const MMAP: usize = 222;
    pub(super) const MADVISE: usize = 233;
}

/// The error number of a failed system call.
pub(crate) type Errno = i32;

/// `ENOENT`
pub(crate) const ENOENT: Errno = 2;
/// `EAGAIN`: another open file has a lock.
pub(crate) const EAGAIN: Errno = 11;
/// `EINTR`
const EINTR: Errno = 4;

/// Does what Miri, which cannot run assembly, can follow of system calls: memory and sleep.
///
/// # Safety
/// As the system call asks.
#[cfg(miri)]
unsafe fn call(number: usize, arguments: [usize; 6]) -> Result<usize, Errno> {
    let [at, size, ..] = arguments;
    let layout = || std::alloc::Layout::from_size_align(size, 4096).map_err(|_| ENOENT);
    match number {
        // SAFETY: the size of a mapping is not zero.
        number::MMAP => Ok(unsafe { std::alloc::alloc_zeroed(layout()?) }.expose_provenance()),
        number::MUNMAP => {
            // SAFETY: a mapping of the above.
            unsafe { std::alloc::dealloc(core::ptr::with_exposed_provenance_mut(at), layout()?) };
            Ok(0)
        }
        number::NANOSLEEP => {
            std::thread::yield_now();
            Ok(0)
        }
        _ => Err(ENOENT),
    }
}

/// Makes a system call.
///
/// # Safety
/// As the system call asks.
#[cfg(not(miri))]
#[inline]
unsafe fn call(number: usize, arguments: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller vouches for the arguments; the kernel clobbers rcx and r11 only.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller vouches for the arguments; the kernel changes x0 only.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a => result, in("x1") b, in("x2") c, in("x3") d,
            in("x4") e, in("x5") f, options(nostack));
    }
    if (-4095..0).contains(&result) { Err(-result as Errno) } else { Ok(result as usize) }
}

/// An open file descriptor, closed when dropped.
pub(crate) struct File(i32);

impl File {
    /// Opens a file for reading.
    pub(crate) fn read_only(path: &CStr) -> Result<Self, Errno> {
        Self::open(path, 0)
    }

    /// Opens a file for reading and writing.
    pub(crate) fn read_write(path: &CStr) -> Result<Self, Errno> {
        Self::open(path, 2)
    }

    fn open(path: &CStr, flags: usize) -> Result<Self, Errno> {
        const AT_FDCWD: usize = -100_isize as usize;
        const O_CLOEXEC: usize = 0o2_000_000;
        loop {
            // SAFETY: a terminated path that outlives the call.
            match unsafe {
                call(number::OPENAT, [AT_FDCWD, path.as_ptr() as usize, flags | O_CLOEXEC, 0, 0, 0])
            } {
                Err(EINTR) => {}
                result => return result.map(|fd| Self(fd as i32)),
            }
        }
    }

    /// Gives up ownership of the descriptor and returns it.
    pub(crate) fn into_raw(self) -> i32 {
        let fd = self.0;
        core::mem::forget(self);
        fd
    }

    /// Takes over ownership of a descriptor.
    pub(crate) fn from_raw(fd: i32) -> Self {
        Self(fd)
    }

    /// Reads at an offset until the buffer is full or the file ends.
    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let arguments =
                [self.0 as usize, rest.as_mut_ptr() as usize, rest.len(), offset as usize + done, 0, 0];
            // SAFETY: the pointer and length are a slice's.
            match unsafe { call(number::PREAD, arguments) } {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(EINTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Returns the size of the file in bytes.
    pub(crate) fn size(&self) -> Result<usize, Errno> {
        // SAFETY: moves the offset of a descriptor that only we use, and only with explicit offsets.
        unsafe { call(number::LSEEK, [self.0 as usize, 0, 2, 0, 0, 0]) }
    }

    /// Reads entries of a directory, as the kernel lays them out. Returns the bytes read; 0 at the end.
    pub(crate) fn entries(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        let arguments = [self.0 as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0];
        // SAFETY: the pointer and length are a slice's.
        unsafe { call(number::GETDENTS, arguments) }
    }

    /// Returns true if another open file holds a lock on the byte, or if that cannot be told.
    pub(crate) fn is_locked(&self, byte: u64) -> bool {
        const F_OFD_GETLK: usize = 36;
        const F_WRLCK: i16 = 1;
        const F_UNLCK: i16 = 2;
        let mut lock = Flock { kind: F_WRLCK, whence: 0, start: byte as i64, length: 1, pid: 0 };
        let arguments = [self.0 as usize, F_OFD_GETLK, core::ptr::from_mut(&mut lock) as usize, 0, 0, 0];
        // SAFETY: the record outlives the call, which writes to it.
        unsafe { call(number::FCNTL, arguments) }.is_err() || lock.kind != F_UNLCK
    }

    /// Returns start and length of a lock that another open file holds somewhere in a range of bytes, if
    /// there is one. A length of 0 reaches to the end of all files.
    pub(crate) fn lock_in(&self, start: u64, length: u64) -> Result<Option<(u64, u64)>, Errno> {
        const F_OFD_GETLK: usize = 36;
        const F_WRLCK: i16 = 1;
        const F_UNLCK: i16 = 2;
        let mut lock = Flock { kind: F_WRLCK, whence: 0, start: start as i64, length: length as i64, pid: 0 };
        let arguments = [self.0 as usize, F_OFD_GETLK, core::ptr::from_mut(&mut lock) as usize, 0, 0, 0];
        // SAFETY: the record outlives the call, which writes to it.
        unsafe { call(number::FCNTL, arguments) }?;
        Ok((lock.kind != F_UNLCK).then_some((lock.start as u64, lock.length as u64)))
    }

    /// Takes a lock on a range of bytes that others may take as well, for as long as the open file lives.
    pub(crate) fn share_lock(&self, start: u64, length: u64) -> Result<(), Errno> {
        const F_OFD_SETLK: usize = 37;
        const F_RDLCK: i16 = 0;
        let lock = Flock { kind: F_RDLCK, whence: 0, start: start as i64, length: length as i64, pid: 0 };
        let arguments = [self.0 as usize, F_OFD_SETLK, core::ptr::from_ref(&lock) as usize, 0, 0, 0];
        // SAFETY: the record outlives the call.
        unsafe { call(number::FCNTL, arguments) }.map(drop)
    }

    /// Maps the file's first `size` bytes, shared.
    pub(crate) fn map_shared(&self, size: usize) -> Result<*mut u8, Errno> {
        // SAFETY: a new mapping at an address that the kernel picks.
        unsafe { call(number::MMAP, [0, size, 3, 1, self.0 as usize, 0]) }.map(|at| at as *mut u8)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: closes a descriptor that we own.
        let _ = unsafe { call(number::CLOSE, [self.0 as usize, 0, 0, 0, 0, 0]) };
    }
}

/// `struct flock` of one byte.
#[repr(C)]
struct Flock {
    kind: i16,
    whence: i16,
    start: i64,
    length: i64,
    pid: i32,
}

/// Tries to lock one byte for as long as the open file lives, whichever process holds it.
pub(crate) fn lock_byte(fd: i32, byte: u64) -> Result<(), Errno> {
    const F_OFD_SETLK: usize = 37;
    const F_WRLCK: i16 = 1;
    let lock = Flock { kind: F_WRLCK, whence: 0, start: byte as i64, length: 1, pid: 0 };
    // SAFETY: the record outlives the call.
    unsafe { call(number::FCNTL, [fd as usize, F_OFD_SETLK, core::ptr::from_ref(&lock) as usize, 0, 0, 0]) }
        .map(drop)
}

/// Unlocks one byte.
pub(crate) fn unlock_byte(fd: i32, byte: u64) {
    const F_OFD_SETLK: usize = 37;
    const F_UNLCK: i16 = 2;
    let lock = Flock { kind: F_UNLCK, whence: 0, start: byte as i64, length: 1, pid: 0 };
    // SAFETY: as above.
    let _ = unsafe {
        call(number::FCNTL, [fd as usize, F_OFD_SETLK, core::ptr::from_ref(&lock) as usize, 0, 0, 0])
    };
}

/// Returns zeroed private memory, which is never given back by itself; null where there is none.
pub(crate) fn memory(size: usize) -> *mut u8 {
    // SAFETY: a new anonymous mapping at an address that the kernel picks.
    unsafe { call(number::MMAP, [0, size, 3, 0x22, usize::MAX, 0]) }
        .map_or(core::ptr::null_mut(), |at| at as *mut u8)
}

/// Gives back memory of [`memory`].
///
/// # Safety
/// `at` and `size` are a mapping of [`memory`] that nothing refers to any more.
pub(crate) unsafe fn free_memory(at: *mut u8, size: usize) {
    // SAFETY: the caller's promise.
    let _ = unsafe { call(number::MUNMAP, [at as usize, size, 0, 0, 0, 0]) };
}

/// Makes a page read as zeros in forked children. Returns false on kernels before 4.14, which cannot.
pub(crate) fn wipe_on_fork(at: *mut u8, size: usize) -> bool {
    const MADV_WIPEONFORK: usize = 18;
    // SAFETY: advice about a private mapping of ours.
    unsafe { call(number::MADVISE, [at as usize, size, MADV_WIPEONFORK, 0, 0, 0]) }.is_ok()
}

/// Keeps a mapping out of forked children.
pub(crate) fn keep_from_children(at: *mut u8, size: usize) -> bool {
    const MADV_DONTFORK: usize = 10;
    // SAFETY: advice about a mapping of ours.
    unsafe { call(number::MADVISE, [at as usize, size, MADV_DONTFORK, 0, 0, 0]) }.is_ok()
}

/// Returns the target of a symbolic link.
pub(crate) fn link_target<'a>(path: &CStr, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    const AT_FDCWD: usize = -100_isize as usize;
    let arguments = [AT_FDCWD, path.as_ptr() as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0];
    // SAFETY: a terminated path; the pointer and length are a slice's.
    let length = unsafe { call(number::READLINKAT, arguments) }.ok()?;
    buffer.get(..length)
}

/// Returns true if a file of any kind exists.
pub(crate) fn exists(path: &CStr) -> bool {
    const AT_FDCWD: usize = -100_isize as usize;
    // SAFETY: a terminated path that outlives the call.
    unsafe { call(number::FACCESSAT, [AT_FDCWD, path.as_ptr() as usize, 0, 0, 0, 0]) }.is_ok()
}

/// Returns the process's id; never 0, even if it cannot be asked.
pub(crate) fn process_id() -> u32 {
    // SAFETY: no arguments.
    unsafe { call(number::GETPID, [0; 6]) }.map_or(u32::MAX, |pid| pid as u32)
}

/// Writes to standard error; a failure is ignored.
pub(crate) fn write_stderr(text: &[u8]) {
    // SAFETY: the pointer and length are a slice's.
    let _ = unsafe { call(number::WRITE, [2, text.as_ptr() as usize, text.len(), 0, 0, 0]) };
}

/// Returns the milliseconds of the monotonic clock, never 0.
pub(crate) fn now_ms() -> u64 {
    const CLOCK_MONOTONIC: usize = 1;
    let mut time = [0_u64; 2];
    // SAFETY: the record outlives the call, which writes to it.
    let _ = unsafe { call(number::CLOCK_GETTIME, [CLOCK_MONOTONIC, time.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    let [seconds, nanos] = time;
    (seconds * 1000 + nanos / 1_000_000).max(1)
}

/// Returns a number that differs between threads: the thread's own pointer, which costs nothing to read.
#[inline]
pub(crate) fn thread_pointer() -> u64 {
    let pointer: u64;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the ABI keeps the thread's pointer at the start of its own segment.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads a register that every process may read.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem));
    }
    pointer
}

/// Returns the nanoseconds of the monotonic clock, without a system call.
pub(crate) fn now_ns() -> u64 {
    let [seconds, nanos] = clock(1);
    seconds * 1_000_000_000 + nanos
}

/// Returns the milliseconds of the monotonic clock at the last timer tick: cheap, without a system call.
pub(crate) fn coarse_ms() -> u64 {
    const CLOCK_MONOTONIC_COARSE: i32 = 6;
    let [seconds, nanos] = clock(CLOCK_MONOTONIC_COARSE);
    (seconds * 1000 + nanos / 1_000_000).max(1)
}

fn clock(which: i32) -> [u64; 2] {
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut [u64; 2]) -> i32;
    }
    let mut time = [0_u64; 2];
    // SAFETY: libc's function; the record outlives the call, which writes to it.
    unsafe { clock_gettime(which, &mut time) };
    time
}

/// Sleeps for `micros` microseconds.
pub(crate) fn sleep_us(micros: u64) {
    let time = [micros / 1_000_000, micros % 1_000_000 * 1000];
    // SAFETY: the record outlives the call.
    let _ = unsafe { call(number::NANOSLEEP, [time.as_ptr() as usize, 0, 0, 0, 0, 0]) };
}

/// Sleeps for `millis` milliseconds.
pub(crate) fn sleep_ms(millis: u64) {
    sleep_us(millis * 1000);
}

/// Ends the process with a fault.
#[cfg(not(test))]
pub(crate) fn trap() {
    // SAFETY: raises a signal, touches nothing.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!("ud2");
        #[cfg(target_arch = "aarch64")]
        asm!("brk #1");
    }
}
