//! The few system calls of the stub, made directly so that they need no symbol of libc.

use core::arch::asm;

#[cfg(target_arch = "x86_64")]
mod number {
    pub(super) const WRITE: usize = 1;
    pub(super) const GETPID: usize = 39;
    pub(super) const GETTID: usize = 186;
    pub(super) const FUTEX: usize = 202;
}
#[cfg(target_arch = "aarch64")]
mod number {
    pub(super) const WRITE: usize = 64;
    pub(super) const GETPID: usize = 172;
    pub(super) const GETTID: usize = 178;
    pub(super) const FUTEX: usize = 98;
}

/// Makes a system call with up to four arguments.
///
/// # Safety
/// As the system call asks.
unsafe fn call(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller vouches for the arguments; the kernel clobbers rcx and r11 only.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller vouches for the arguments; the kernel changes x0 only.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a => result, in("x1") b, in("x2") c, in("x3") d,
            options(nostack));
    }
    result
}

/// Writes to standard error; a failure is ignored.
pub(crate) fn warn(parts: &[&[u8]]) {
    for part in parts {
        // SAFETY: the pointer and length are a slice's.
        unsafe { call(number::WRITE, 2, part.as_ptr() as usize, part.len(), 0) };
    }
}

/// Returns the calling process's id in the upper half and the thread's in the lower; never 0.
pub(crate) fn thread_of_process() -> u64 {
    // SAFETY: both calls take no arguments.
    let (pid, tid) = unsafe { (call(number::GETPID, 0, 0, 0, 0), call(number::GETTID, 0, 0, 0, 0)) };
    (pid as u64) << 32 | tid as u64
}

/// Returns the calling thread's pointer to its own data, which no two threads of a process share at a time; never 0.
pub(crate) fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reads what every thread of glibc's and musl's has: on x86-64 the pointer's own address is its first word.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!("mov {}, qword ptr fs:[0]", out(reg) pointer, options(nostack, readonly, preserves_flags));
        #[cfg(target_arch = "aarch64")]
        asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack, preserves_flags));
    }
    pointer
}

/// Sleeps while `word` is `value` and nobody wakes the thread, at most 10 ms. Returns true if these are over.
pub(crate) fn wait(word: &core::sync::atomic::AtomicU32, value: u32) -> bool {
    const ETIMEDOUT: isize = 110;
    let timeout: [i64; 2] = [0, 10_000_000];
    // SAFETY: FUTEX_WAIT | PRIVATE reads the word and the timeout, both of which outlive the call.
    let code = unsafe {
        call(number::FUTEX, word.as_ptr() as usize, 128, value as usize, timeout.as_ptr() as usize)
    };
    code == -ETIMEDOUT
}

/// Wakes all threads that sleep on `word`.
pub(crate) fn wake(word: &core::sync::atomic::AtomicU32) {
    // SAFETY: FUTEX_WAKE | PRIVATE only takes the address.
    unsafe { call(number::FUTEX, word.as_ptr() as usize, 129, i32::MAX as usize, 0) };
}

/// Ends the process with a fault.
pub(crate) fn trap() {
    // SAFETY: raises a signal, touches nothing.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!("ud2");
        #[cfg(target_arch = "aarch64")]
        asm!("brk #1");
    }
}
