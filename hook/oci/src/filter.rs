//! The seccomp filter of the trial: it allows the system calls that a loader needs to find, map and bind
//! libraries, and refuses all others. The functions are pure.

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW,
    SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS, c_long, sock_filter,
};

#[cfg(target_arch = "x86_64")]
const MACHINE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const MACHINE: u32 = 0xC000_00B7;

/// The system calls that every glibc since 2.17 makes, and those that its own attempts fall back to. None of
/// them starts a process, reaches another one or the network, or changes a file.
const ALLOWED: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_set_tid_address,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_futex,
    libc::SYS_prlimit64,
    libc::SYS_getrlimit,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_sched_getaffinity,
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_capget,
    libc::SYS_exit,
    libc::SYS_exit_group,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_arch_prctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
];

/// The calls that open a file, and the number of the argument that says what for.
const OPENING: &[(c_long, u32)] = &[
    (libc::SYS_openat, 2),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, 1),
];

/// Flags of an opening that changes something.
const WRITING: u32 = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC) as u32;

/// The first call that is younger than this list. A libc has another way where the kernel does not know a
/// call.
const UNKNOWN: u32 = 451;

const REFUSE: sock_filter = end(SECCOMP_RET_ERRNO | libc::EPERM as u32);
const ALLOW: sock_filter = end(SECCOMP_RET_ALLOW);

/// Returns the filter. It allows one program to be executed, the one whose path is at this address: the
/// program that is to be tried. What that program puts at the same address, should it guess it, runs under
/// the same filter and gains nothing.
pub(crate) fn program(path: u64) -> Vec<sock_filter> {
    // Offsets in `struct seccomp_data`, of the lower half first.
    const CALL: u32 = 0;
    const ARCHITECTURE: u32 = 4;
    const ARGUMENTS: u32 = 16;
    let (low, high) = (path as u32, (path >> 32) as u32);
    let mut filter = vec![
        load(ARCHITECTURE),
        // The calls of another architecture have other numbers.
        when(BPF_JEQ, MACHINE, 1, 0),
        end(SECCOMP_RET_KILL_PROCESS),
        load(CALL),
        when(BPF_JGE, UNKNOWN, 0, 1),
        end(SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ];
    for call in ALLOWED {
        filter.extend([when(BPF_JEQ, *call as u32, 0, 1), ALLOW]);
    }
    for (call, flags) in OPENING {
        filter.extend([
            when(BPF_JEQ, *call as u32, 0, 4),
            load(ARGUMENTS + 8 * flags),
            when(BPF_JSET, WRITING, 0, 1),
            REFUSE,
            ALLOW,
        ]);
    }
    filter.extend([
        when(BPF_JEQ, libc::SYS_execve as u32, 0, 5),
        load(ARGUMENTS),
        when(BPF_JEQ, low, 0, 3),
        load(ARGUMENTS + 4),
        when(BPF_JEQ, high, 0, 1),
        ALLOW,
        REFUSE,
    ]);
    filter
}

const fn load(offset: u32) -> sock_filter {
    sock_filter { code: (BPF_LD | BPF_W | BPF_ABS) as u16, jt: 0, jf: 0, k: offset }
}

/// Skips `jt` instructions if the comparison holds, otherwise `jf`.
const fn when(comparison: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: (BPF_JMP | comparison | BPF_K) as u16, jt, jf, k }
}

const fn end(result: u32) -> sock_filter {
    sock_filter { code: (BPF_RET | BPF_K) as u16, jt: 0, jf: 0, k: result }
}
