//! The process of the trial: it runs a program of the image, so it has no rights and leaves nothing.
//!
//! It is the first process of a PID namespace of its own. Its end, whatever the reason, ends everything that
//! it started; and it ends with the hook.

use crate::filter;
use crate::inside::Root;
use crate::loader::LoaderError;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, pipe2};
use std::ffi::{CStr, c_char};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// The time for a killed process to be gone: it is gone at once, unless it waits for a file system that does
/// not answer.
const GRACE: Duration = Duration::from_secs(1);
/// The time between two looks at whether the trial has ended, which takes milliseconds.
const LOOK: Duration = Duration::from_millis(2);
/// The most output that is read, in bytes: more than a loader says, and no more than a pipe holds. A program
/// that says more waits, and runs out of time.
const MOST: u64 = 1 << 16;

/// Runs a program of the container's root in that root, without any right. Returns whether it succeeded, and
/// what it said.
pub(crate) fn run(
    root: &Root,
    program: &CStr,
    argument: &CStr,
    environment: &[&CStr],
    until: Instant,
) -> Result<(bool, String), LoaderError> {
    let system = |errno: Errno| LoaderError::Run(errno.into());
    let null = File::open("/dev/null").map_err(LoaderError::Run)?;
    let (said, says) = pipe2(OFlag::O_CLOEXEC).map_err(system)?;
    let (failed, fails) = pipe2(OFlag::O_CLOEXEC).map_err(system)?;
    let (arguments, environment) = (pointers(&[program, argument]), pointers(environment));
    let plan = Plan {
        root: root.as_fd().as_raw_fd(),
        program: program.as_ptr(),
        arguments: &arguments,
        environment: &environment,
        standard: [null.as_raw_fd(), says.as_raw_fd(), says.as_raw_fd()],
        filter: &filter::program(program.as_ptr() as u64),
        listener: said.as_raw_fd(),
    };
    let mut process = Process::start(|| {
        let Err((what, errno)) = plan.begin();
        let fails = fails.as_fd();
        // If nobody can be told, nobody waits.
        let _ = nix::unistd::write(fails, &(errno as i32).to_ne_bytes());
        let _ = nix::unistd::write(fails, what.as_bytes());
    })?;
    drop((says, fails));
    let status = process.end(until).map_err(system)?.ok_or(LoaderError::Time)?;
    let fault = left_in(failed).map_err(system)?;
    if let Some((errno, what)) = fault.split_first_chunk() {
        let (errno, what) = (Errno::from_raw(i32::from_ne_bytes(*errno)), String::from_utf8_lossy(what));
        return Err(LoaderError::Confine { what: what.into_owned(), source: errno });
    }
    let text = left_in(said).map_err(system)?;
    Ok((matches!(status, WaitStatus::Exited(_, 0)), String::from_utf8_lossy(&text).into_owned()))
}

fn pointers(texts: &[&CStr]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
}

/// Returns what was written into a pipe. A process that still has the pipe's other end, by whatever means, is
/// not waited for.
fn left_in(pipe: OwnedFd) -> Result<Vec<u8>, Errno> {
    use nix::fcntl::{FcntlArg, fcntl};
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let mut bytes = Vec::new();
    // At the end of what is there it fails, if the pipe is still open.
    let _ = File::from(pipe).take(MOST).read_to_end(&mut bytes);
    Ok(bytes)
}

/// The first process of a PID namespace; dropping it ends everything in the namespace. It is kept by its
/// number and not by a pidfd, which kernels before 5.4 cannot wait for: no other process can have that number
/// before it was waited for.
struct Process {
    id: Pid,
    waited_for: bool,
}

impl Process {
    /// Starts a process that does this and ends.
    fn start(body: impl FnOnce()) -> Result<Self, LoaderError> {
        let flags = libc::CLONE_NEWPID | libc::SIGCHLD;
        // SAFETY: without a stack or shared memory this is fork(); the hook has one thread, so that no lock
        // is held in the child.
        let id = unsafe {
            libc::syscall(libc::SYS_clone, flags, std::ptr::null::<u8>(), 0_usize, 0_usize, 0_usize)
        };
        match id {
            0 => {
                body();
                // SAFETY: ends the process, running nothing more of it.
                unsafe { libc::_exit(127) }
            }
            id if id > 0 => {
                Ok(Self { id: Pid::from_raw(i32::try_from(id).unwrap_or(i32::MAX)), waited_for: false })
            }
            _ => Err(LoaderError::Namespace(Errno::last())),
        }
    }

    /// Waits for the process's end, and returns how it ended; `None` if it did not end in time.
    fn end(&mut self, until: Instant) -> Result<Option<WaitStatus>, Errno> {
        loop {
            match waitpid(self.id, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) if Instant::now() >= until => return Ok(None),
                Ok(WaitStatus::StillAlive) => std::thread::sleep(LOOK),
                Ok(status) => {
                    self.waited_for = true;
                    return Ok(Some(status));
                }
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.waited_for && kill(self.id, Signal::SIGKILL).is_ok() {
            let _ = self.end(Instant::now() + GRACE);
        }
    }
}

/// The steps of the process until it is the image's program.
struct Plan<'a> {
    root: RawFd,
    program: *const c_char,
    arguments: &'a [*const c_char],
    environment: &'a [*const c_char],
    standard: [RawFd; 3],
    /// The other end of its output, which is the hook's.
    listener: RawFd,
    /// The filter of the system calls that it may make from then on.
    filter: &'a [libc::sock_filter],
}

/// The step that failed, and why.
type Fault = (&'static str, Errno);

impl Plan<'_> {
    fn begin(&self) -> Result<std::convert::Infallible, Fault> {
        self.enter()?;
        give_up_rights()?;
        self.follow_the_hook()?;
        self.wire()?;
        self.filter_calls()?;
        // SAFETY: terminated strings, and lists of them that end in null, all of which outlive the call.
        let failed =
            unsafe { libc::execve(self.program, self.arguments.as_ptr(), self.environment.as_ptr()) };
        done(failed.into(), "be run")?;
        Err(("be run", Errno::UnknownErrno))
    }

    fn enter(&self) -> Result<(), Fault> {
        // SAFETY: system calls on a descriptor of the hook's and a terminated string.
        unsafe {
            done(libc::fchdir(self.root).into(), "enter the container's root")?;
            done(libc::chroot(c".".as_ptr()).into(), "enter the container's root")
        }
    }

    /// Makes the process end when the hook does. A change of identity undoes that, so this comes after it.
    fn follow_the_hook(&self) -> Result<(), Fault> {
        // SAFETY: system calls on plain values, descriptors of our own and one local.
        unsafe {
            done(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0).into(), "be tied to the hook")?;
            // The hook may have ended before: then nobody listens.
            libc::close(self.listener);
            let mut output = libc::pollfd { fd: self.standard[1], events: 0, revents: 0 };
            libc::poll(&raw mut output, 1, 0);
            if output.revents & libc::POLLERR != 0 {
                Err(("be tied to the hook", Errno::EPIPE))
            } else {
                Ok(())
            }
        }
    }

    fn wire(&self) -> Result<(), Fault> {
        for (standard, fd) in (0..).zip(self.standard) {
            // SAFETY: a system call on descriptors of our own.
            done(unsafe { libc::dup2(fd, standard) }.into(), "be given its output")?;
        }
        // Closes every descriptor but the three standard ones at exec. Kernels before 5.11 cannot do that;
        // there no file of the hook's is left open either, because the hook only opens files that close on
        // exec.
        const CLOSE_ON_EXEC: libc::c_uint = 4;
        // SAFETY: marks descriptors of this process only.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, CLOSE_ON_EXEC) };
        Ok(())
    }

    fn filter_calls(&self) -> Result<(), Fault> {
        let len = u16::try_from(self.filter.len()).unwrap_or(0);
        let filter = libc::sock_fprog { len, filter: self.filter.as_ptr().cast_mut() };
        // SAFETY: a system call that reads the filter, which outlives it.
        let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
        match done(set.into(), "be kept from system calls") {
            // A kernel without filters, which has none for the container either; an empty one is refused as
            // well.
            Err((_, Errno::EINVAL)) if len > 0 => Ok(()),
            result => result,
        }
    }
}

fn give_up_rights() -> Result<(), Fault> {
    const NOBODY: libc::uid_t = 65534;
    // So that a fault cannot fill the disk, nor a loop the processor.
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let seconds = crate::loader::PATIENCE.as_secs();
    let seconds = libc::rlimit { rlim_cur: seconds, rlim_max: seconds };
    // SAFETY: system calls on plain values and locals.
    unsafe {
        done(libc::setrlimit(libc::RLIMIT_CORE, &raw const none).into(), "be limited")?;
        done(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const none).into(), "be limited")?;
        done(libc::setrlimit(libc::RLIMIT_CPU, &raw const seconds).into(), "be limited")?;
        done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into(), "be kept from new rights")?;
        // Bounding set first; it needs a capability that goes with the identity.
        for capability in 0..64 {
            if libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 {
                break;
            }
        }
        // In a user namespace there may be no such user; then the root of that namespace stays, without
        // capabilities. The system calls are made directly: the C library's own functions make them for all
        // threads that it knows of, and wait for a lock that one of those threads, which this process does
        // not have, may have held.
        let mapped = libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) == 0
            && libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY) == 0
            && libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0;
        let drop = "be rid of its capabilities";
        if !mapped {
            done(libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0).into(), drop)?;
        }
        let header: [u32; 2] = [0x2008_0522, 0];
        let nothing = [0_u32; 6];
        done(libc::syscall(libc::SYS_capset, header.as_ptr(), nothing.as_ptr()), drop)
    }
}

fn done(result: libc::c_long, what: &'static str) -> Result<(), Fault> {
    if result < 0 { Err((what, Errno::last())) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
