//! The lives that a process leads: forks, other programs in its place, small stacks, forbidden system calls.

use super::driver::{Libraries, at, call, hold, text};
use super::resolve::Driver;
use super::{Probe, after, size};
use std::ffi::{c_char, c_void};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::null_mut;

impl Probe {
    /// Does what a verb about lives says; `place` is the verb's place among the arguments.
    pub fn lives(&mut self, verb: &[&str], place: usize) -> Option<String> {
        Some(match *verb {
            // Becomes another run of this program, with the rest of the arguments.
            ["exec"] => {
                let error = Command::new("/proc/self/exe").args(after(place)).exec();
                panic!("{error}");
            }
            // Runs another program, by vfork as the standard library does.
            ["spawn"] => Command::new("/bin/true").status().unwrap().code().unwrap().to_string(),
            // Runs the rest in a forked child, and waits for it.
            ["fork"] => {
                std::io::stdout().flush().unwrap();
                // SAFETY: this program has one thread.
                let child = unsafe { libc::fork() };
                if child != 0 {
                    let mut status = 0;
                    // SAFETY: the status outlives the call.
                    unsafe { libc::waitpid(child, &mut status, 0) };
                    println!("fork = parent {status}");
                    std::process::exit(0);
                }
                self.held.clear();
                "child".to_owned()
            }
            // Forks a worker that never calls CUDA and outlives this process by a while.
            ["worker"] => {
                // SAFETY: this program has one thread.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: the worker only sleeps and ends.
                    unsafe {
                        libc::close(0);
                        libc::close(1);
                        libc::sleep(20);
                        libc::_exit(0)
                    };
                }
                child.to_string()
            }
            // Allocates and frees on a thread with so small a stack.
            ["stack", kib] => {
                let bytes = kib.parse::<usize>().unwrap() << 10;
                on_small_stack(bytes, &self.driver, after(place).count()).to_string()
            }
            ["closefrom"] => {
                // SAFETY: nothing of this program is used by descriptor afterwards.
                unsafe { libc::syscall(libc::SYS_close_range, 3, 4096, 0) };
                "0".to_owned()
            }
            ["sleep", millis] => {
                std::thread::sleep(std::time::Duration::from_millis(millis.parse().unwrap()));
                "0".to_owned()
            }
            ["hold"] => {
                hold();
                "0".to_owned()
            }
            // Tells a tracer how far we are.
            ["mark"] => {
                // SAFETY: the tracer takes the signal away.
                unsafe { libc::raise(libc::SIGUSR2) };
                "0".to_owned()
            }
            // Opens a library that binds past the limiter.
            ["deepbind", library] => {
                let name = text(library);
                // SAFETY: a terminated name.
                let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_DEEPBIND) };
                i32::from(handle.is_null()).to_string()
            }
            // Allocates by a second copy of the driver's library, in a namespace of its own.
            ["second", bytes] => {
                // SAFETY: a terminated name.
                let copy =
                    unsafe { libc::dlmopen(libc::LM_ID_NEWLM, c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
                assert!(!copy.is_null());
                let (copy, mut out) = (Libraries { cuda: copy, nvml: null_mut() }, 0_u64);
                copy.call("cuMemAlloc_v2", &[at(&mut out), size(bytes)]).to_string()
            }
            // Forbids the limiter's core, and nobody else, a system call.
            ["deny", number] => {
                self.driver.find("cuInit");
                deny(number.parse().unwrap());
                "0".to_owned()
            }
            ["libc"] => {
                unsafe extern "C" {
                    fn gnu_get_libc_version() -> *const c_char;
                }
                // SAFETY: libc's function; the text is a constant.
                let version = unsafe { std::ffi::CStr::from_ptr(gnu_get_libc_version()) };
                version.to_string_lossy().into_owned()
            }
            _ => return None,
        })
    }
}

/// Makes the kernel answer EPERM to a system call that is made from the limiter's core.
fn deny(number: u32) {
    // Whoever waits for ever is ended.
    // SAFETY: sets a timer.
    unsafe { libc::alarm(100) };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let core = maps.lines().filter(|line| line.contains("libaliquot_core.so") && line.contains("r-xp"));
    let mut found = false;
    for line in core {
        found = true;
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        assert_eq!(start >> 32, (end - 1) >> 32, "the filter compares the lower halves");
        let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
        let (load, same, below) = (
            libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
            libc::BPF_JMP | libc::BPF_JEQ,
            libc::BPF_JMP | libc::BPF_JGE,
        );
        let program = [
            step(load, 0, 0, 0),
            step(same, number, 0, 6),
            step(load, 12, 0, 0),
            step(same, (start >> 32) as u32, 0, 4),
            step(load, 8, 0, 0),
            step(below, start as u32, 0, 2),
            step(below, (end - 1) as u32, 1, 0),
            step(libc::BPF_RET, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
            step(libc::BPF_RET, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
        // SAFETY: the filter outlives the call, which copies it.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
        }
    }
    assert!(found, "the core is loaded");
}

/// Calls `cuInit`, and allocates and frees 1 MiB in a context that is current already, on a small stack.
fn on_small_stack(bytes: usize, driver: &Driver, rest: usize) -> usize {
    extern "C" fn run(data: *mut c_void) -> *mut c_void {
        // SAFETY: the pair below, alive until the thread is joined.
        let (context, entries) = unsafe { &*data.cast::<(u64, [*mut c_void; 3])>() };
        let mut out = 0_u64;
        let set = call(entries[0], &[*context]);
        let allocated = call(entries[1], &[at(&mut out), 1 << 20]);
        let freed = call(entries[2], &[out]);
        (((set | allocated | freed) as usize) + 1) as *mut c_void
    }
    let mut context = 0_u64;
    driver.ok("cuCtxGetCurrent", &[at(&mut context)]);
    assert_eq!(rest, 0, "it is the last verb");
    let entries = ["cuCtxSetCurrent", "cuMemAlloc_v2", "cuMemFree_v2"].map(|symbol| driver.find(symbol));
    let data = (context, entries);
    // SAFETY: the attributes and what the thread is given outlive the thread, which is joined here.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        assert_eq!(libc::pthread_attr_setstacksize(&mut attributes, bytes), 0);
        let (mut thread, mut result) = (std::mem::zeroed(), null_mut());
        let data = std::ptr::from_ref(&data).cast_mut().cast();
        assert_eq!(libc::pthread_create(&mut thread, &attributes, run, data), 0);
        libc::pthread_join(thread, &mut result);
        result as usize - 1
    }
}
