//! The exported symbols: the loader's three functions, and one jump for each row of the hook table.
//!
//! A jump goes through a cell that is empty until the entry is first called. Programs that were linked
//! against the vendor's library, and so never look anything up, come in here.

use crate::refuse;
use crate::select;
use crate::start::{self, State};
use crate::table::{COUNT, Hook};
use core::arch::naked_asm;
use core::ffi::c_void;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// The targets of the rows' exports; null until first called.
static TARGETS: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(core::ptr::null_mut()) }; COUNT];

/// Finds the target of row `hook`, and remembers it.
extern "C" fn bind(hook: usize) -> *const c_void {
    let target = match start::started() {
        State::Ready(core) => start::entry(core, hook),
        State::Failed | State::Loading => refuse::entry_of_row(hook, core::ptr::null_mut()),
    };
    if let (Some(cell), Some(_)) = (TARGETS.get(hook), start::if_started()) {
        cell.store(target.cast_mut(), Relaxed);
    }
    target
}

#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
extern "C" fn bind_and_jump() {
    // In: r11 = row. All argument registers are the program's and must survive.
    naked_asm!(
        "push rbp", "mov rbp, rsp",
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax", "push rbx",
        "sub rsp, 136",
        "and rsp, -16",
        "movaps [rsp], xmm0", "movaps [rsp + 16], xmm1", "movaps [rsp + 32], xmm2", "movaps [rsp + 48], xmm3",
        "movaps [rsp + 64], xmm4", "movaps [rsp + 80], xmm5", "movaps [rsp + 96], xmm6", "movaps [rsp + 112], xmm7",
        "mov rdi, r11",
        "call {bind}",
        "mov r11, rax",
        "movaps xmm0, [rsp]", "movaps xmm1, [rsp + 16]", "movaps xmm2, [rsp + 32]", "movaps xmm3, [rsp + 48]",
        "movaps xmm4, [rsp + 64]", "movaps xmm5, [rsp + 80]", "movaps xmm6, [rsp + 96]", "movaps xmm7, [rsp + 112]",
        "lea rsp, [rbp - 64]",
        "pop rbx", "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "pop rbp",
        "jmp r11",
        bind = sym bind,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
extern "C" fn bind_and_jump() {
    // In: x16 = row. All argument registers are the program's and must survive.
    naked_asm!(
        "stp x29, x30, [sp, #-224]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
        "str x8, [sp, #80]",
        "stp q0, q1, [sp, #96]", "stp q2, q3, [sp, #128]", "stp q4, q5, [sp, #160]", "stp q6, q7, [sp, #192]",
        "mov x0, x16",
        "bl {bind}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]", "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
        "ldr x8, [sp, #80]",
        "ldp q0, q1, [sp, #96]", "ldp q2, q3, [sp, #128]", "ldp q4, q5, [sp, #160]", "ldp q6, q7, [sp, #192]",
        "ldp x29, x30, [sp], #224",
        "br x16",
        bind = sym bind,
    )
}

macro_rules! exports {
    ($($symbol:ident, $name:literal, $since:literal, $stream:ident;)*) => {
        $(
            #[cfg(target_arch = "x86_64")]
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            extern "C" fn $symbol() {
                naked_asm!(
                    "mov r11, qword ptr [rip + {targets} + {at}]",
                    "test r11, r11",
                    "jz 2f",
                    "jmp r11",
                    "2: mov r11d, {row}",
                    "jmp {bind}",
                    targets = sym TARGETS,
                    at = const Hook::$symbol as usize * 8,
                    row = const Hook::$symbol as usize,
                    bind = sym bind_and_jump,
                )
            }

            #[cfg(target_arch = "aarch64")]
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            extern "C" fn $symbol() {
                naked_asm!(
                    "adrp x16, {targets} + {at}",
                    "ldr x16, [x16, #:lo12:{targets} + {at}]",
                    "cbz x16, 2f",
                    "br x16",
                    "2: mov w16, #{row}",
                    "b {bind}",
                    targets = sym TARGETS,
                    at = const Hook::$symbol as usize * 8,
                    row = const Hook::$symbol as usize,
                    bind = sym bind_and_jump,
                )
            }
        )*

        /// Returns the address of the export of row `hook`.
        pub(crate) fn address(hook: usize) -> *const c_void {
            $(if hook == Hook::$symbol as usize {
                return $symbol as *const c_void;
            })*
            core::ptr::null()
        }
    };
}
crate::table::hook_table!(exports);

#[cfg(target_arch = "x86_64")]
mod loader {
    use super::select;
    use core::arch::naked_asm;

    /// `void *dlsym(void *handle, const char *name)`
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    extern "C" fn dlsym() {
        naked_asm!(
            "push rdi", "push rsi", "sub rsp, 8",
            "mov rdx, [rsp + 24]",
            "call {select}",
            "add rsp, 8", "pop rsi", "pop rdi",
            "test rdx, rdx",
            "jz 2f",
            "jmp rdx",
            "2: ret",
            select = sym select::symbol,
        )
    }

    /// `void *dlvsym(void *handle, const char *name, const char *version)`
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    extern "C" fn dlvsym() {
        naked_asm!(
            "push rdi", "push rsi", "push rdx",
            "mov rcx, [rsp + 24]",
            "call {select}",
            "mov r11, rdx",
            "pop rdx", "pop rsi", "pop rdi",
            "test r11, r11",
            "jz 2f",
            "jmp r11",
            "2: ret",
            select = sym select::versioned,
        )
    }

    /// `void *dlopen(const char *file, int flags)`
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    extern "C" fn dlopen() {
        naked_asm!(
            "push rdi", "push rsi", "sub rsp, 8",
            "call {select}",
            "add rsp, 8", "pop rsi", "pop rdi",
            "test rdx, rdx",
            "jz 2f",
            "jmp rdx",
            "2: ret",
            select = sym select::open,
        )
    }
}

#[cfg(target_arch = "aarch64")]
mod loader {
    use super::select;
    use core::arch::naked_asm;

    /// `void *dlsym(void *handle, const char *name)`
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    extern "C" fn dlsym() {
        naked_asm!(
            "stp x29, x30, [sp, #-48]!", "mov x29, sp", "stp x0, x1, [sp, #16]",
            "mov x2, x30",
            "bl {select}",
            "cbz x1, 2f",
            "mov x16, x1",
            "ldp x0, x1, [sp, #16]", "ldp x29, x30, [sp], #48",
            "br x16",
            "2: ldp x29, x30, [sp], #48",
            "ret",
            select = sym select::symbol,
        )
    }

    /// `void *dlvsym(void *handle, const char *name, const char *version)`
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    extern "C" fn dlvsym() {
        naked_asm!(
            "stp x29, x30, [sp, #-48]!", "mov x29, sp", "stp x0, x1, [sp, #16]", "str x2, [sp, #32]",
            "mov x3, x30",
            "bl {select}",
            "cbz x1, 2f",
            "mov x16, x1",
            "ldp x0, x1, [sp, #16]", "ldr x2, [sp, #32]", "ldp x29, x30, [sp], #48",
            "br x16",
            "2: ldp x29, x30, [sp], #48",
            "ret",
            select = sym select::versioned,
        )
    }

    /// `void *dlopen(const char *file, int flags)`
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    extern "C" fn dlopen() {
        naked_asm!(
            "stp x29, x30, [sp, #-48]!", "mov x29, sp", "stp x0, x1, [sp, #16]",
            "bl {select}",
            "cbz x1, 2f",
            "mov x16, x1",
            "ldp x0, x1, [sp, #16]", "ldp x29, x30, [sp], #48",
            "br x16",
            "2: ldp x29, x30, [sp], #48",
            "ret",
            select = sym select::open,
        )
    }
}

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(".symver dl_iterate_phdr, dl_iterate_phdr@GLIBC_2.2.5");

// Newer versions than that of the oldest glibc of this architecture are offered beside it.
#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(".symver dl_iterate_phdr, dl_iterate_phdr@GLIBC_2.17");
