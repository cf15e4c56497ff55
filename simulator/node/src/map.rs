//! The state file in memory, its lock, and the signs of life of the processes that use it.
//!
//! Two kinds of kernel file lock do the work, because both end with their holder, however it ends:
//!
//! - The node's lock is an open-file-description lock on `state`. Inside one process it is preceded by a
//!   mutex; a fork waits for that mutex, and the child opens a description of its own.
//! - A process shows that it lives by a classic record lock on its own byte of `procs`. Such locks are not
//!   inherited by children, end with `execve`, and the kernel tells an observer the holder's pid in the
//!   observer's own pid namespace. They would end when the process closed *any* descriptor of `procs`, so
//!   descriptors of `procs` are never closed.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::error::NodeError;
use crate::layout::{COMPUTE_BYTES, COMPUTE_OFFSET, MAGIC, STATE_FILE_BYTES, State};

/// The mutex that precedes the file lock inside this process.
struct ProcessMutex(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a pthread mutex is made to be used from many threads; the cell is only handed to pthread calls.
unsafe impl Sync for ProcessMutex {}

static PROCESS: ProcessMutex = ProcessMutex(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn lock_process() {
    // SAFETY: the mutex is static and initialised.
    unsafe { libc::pthread_mutex_lock(PROCESS.0.get()) };
}

extern "C" fn unlock_process() {
    // SAFETY: the mutex is static and initialised, and locked by this thread: by `lock_process` in the
    // prepare handler of the same fork, or by the guard that is being dropped.
    unsafe { libc::pthread_mutex_unlock(PROCESS.0.get()) };
}

extern "C" fn unlock_in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    unlock_process();
}

fn install_fork_handlers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the three handlers are functions of this library, which libc forgets if it is unloaded.
        unsafe {
            libc::pthread_atfork(Some(lock_process), Some(unlock_process), Some(unlock_in_child));
        }
    });
}

/// Descriptors of `procs` files by device and inode, never closed. Used under the process mutex.
struct Kept(UnsafeCell<Vec<((u64, u64), RawFd)>>);

// SAFETY: only touched with the process mutex held.
unsafe impl Sync for Kept {}

static KEPT: Kept = Kept(UnsafeCell::new(Vec::new()));

/// An open state file.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    state_path: PathBuf,
    identity: (u64, u64),
    lock_fd: AtomicI32,
    forks_seen: AtomicU32,
    procs_path: PathBuf,
    procs_identity: (u64, u64),
    procs_fd: AtomicI32,
}

// SAFETY: the mapping is shared memory; its locked part is reached through the lock only, the rest as atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> NodeError + 'a {
    move |source| NodeError::Io { what, path: path.to_owned(), source }
}

fn open_rw(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(path)
}

impl Mapping {
    /// Maps the state of the node in `dir`.
    pub(crate) fn open(dir: &Path) -> Result<Self, NodeError> {
        install_fork_handlers();
        let state_path = dir.join("state");
        let procs_path = dir.join("procs");
        let file = open_rw(&state_path).map_err(io_error("could not open", &state_path))?;
        let meta = file.metadata().map_err(io_error("could not read", &state_path))?;
        if meta.size() != STATE_FILE_BYTES as u64 {
            let reason = format!("it has {} bytes, not {STATE_FILE_BYTES}", meta.size());
            return Err(NodeError::Layout { path: state_path, reason });
        }
        // SAFETY: a fresh shared mapping of a file of exactly this size, at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                STATE_FILE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io_error("could not map", &state_path)(io::Error::last_os_error()));
        }
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(io_error("could not map", &state_path)(io::Error::other("mapped at address zero")));
        };
        let unmap = |error| {
            // SAFETY: the mapping was made just now and nothing refers to it.
            unsafe { libc::munmap(base.as_ptr().cast(), STATE_FILE_BYTES) };
            error
        };
        let procs =
            std::fs::metadata(&procs_path).map_err(io_error("could not read", &procs_path)).map_err(unmap)?;
        let mapping = Self {
            base,
            identity: (meta.dev(), meta.ino()),
            lock_fd: AtomicI32::new(file.into_raw_fd()),
            forks_seen: AtomicU32::new(FORKS.load(Ordering::Relaxed)),
            procs_identity: (procs.dev(), procs.ino()),
            procs_fd: AtomicI32::new(-1),
            state_path,
            procs_path,
        };
        let found = mapping.lock()?.magic;
        if found == MAGIC {
            Ok(mapping)
        } else {
            let reason = format!("its first word is {found:#x}, not {MAGIC:#x}");
            Err(NodeError::Layout { path: mapping.state_path.clone(), reason })
        }
    }

    /// Takes the node's lock.
    pub(crate) fn lock(&self) -> Result<Locked<'_>, NodeError> {
        lock_process();
        let locked = self.current_lock_fd().and_then(|fd| file_lock(fd, libc::F_OFD_SETLKW, libc::F_WRLCK));
        match locked {
            Ok(()) => Ok(Locked { mapping: self }),
            Err(source) => {
                unlock_process();
                Err(NodeError::Lock(source))
            }
        }
    }

    /// The atomics behind the locked part.
    pub(crate) fn compute_words(&self) -> &[AtomicU64] {
        // SAFETY: the area lies inside the mapping, is aligned to a page, and is only ever used as atomics.
        unsafe {
            let start = self.base.as_ptr().add(COMPUTE_OFFSET).cast::<AtomicU64>();
            std::slice::from_raw_parts(start, COMPUTE_BYTES / 8)
        }
    }

    /// A word of the locked part that is also used as an atomic without the lock.
    pub(crate) fn shared_word(&self, pick: impl FnOnce(*mut State) -> *mut u32) -> &AtomicU32 {
        let word = pick(self.base.as_ptr().cast::<State>());
        // SAFETY: `pick` projects to a `u32` field of the mapped state (the callers are in this crate), so
        // it is valid and aligned as long as the mapping is; every access outside the lock is atomic.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// The descriptor for the lock: opened anew after a fork, or where the program closed ours.
    fn current_lock_fd(&self) -> io::Result<RawFd> {
        let fd = self.lock_fd.load(Ordering::Relaxed);
        let ours = is_file(fd, self.identity);
        let forks = FORKS.load(Ordering::Relaxed);
        if ours && self.forks_seen.load(Ordering::Relaxed) == forks {
            return Ok(fd);
        }
        let fresh =
            if ours { open_rw(Path::new(&format!("/proc/self/fd/{fd}"))) } else { Err(io::Error::other("")) }
                .or_else(|_| open_rw(&self.state_path))?
                .into_raw_fd();
        if ours {
            // SAFETY: this descriptor is ours (checked just now) and is replaced below.
            unsafe { libc::close(fd) };
        }
        self.lock_fd.store(fresh, Ordering::Relaxed);
        self.forks_seen.store(forks, Ordering::Relaxed);
        Ok(fresh)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let fd = self.lock_fd.load(Ordering::Relaxed);
        if is_file(fd, self.identity) {
            // SAFETY: the descriptor is ours and not used again.
            unsafe { libc::close(fd) };
        }
        // SAFETY: the mapping was made with this address and length; nothing borrows it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), STATE_FILE_BYTES) };
    }
}

/// The node's state with the lock held.
pub(crate) struct Locked<'a> {
    mapping: &'a Mapping,
}

impl std::ops::Deref for Locked<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        // SAFETY: the mapping is at least as large as `State` and page-aligned, every bit pattern is a valid
        // `State`, and the lock keeps all other threads and processes out.
        unsafe { &*self.mapping.base.as_ptr().cast::<State>() }
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        // SAFETY: as for `deref`; `&mut self` makes this the only reference.
        unsafe { &mut *self.mapping.base.as_ptr().cast::<State>() }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let fd = self.mapping.lock_fd.load(Ordering::Relaxed);
        // Unlocking a descriptor that we hold locked cannot fail in a way that could be acted on.
        let _ = file_lock(fd, libc::F_OFD_SETLK, libc::F_UNLCK);
        unlock_process();
    }
}

impl Locked<'_> {
    /// Says "this process lives" on byte `slot`; false where another process says so on that byte.
    pub(crate) fn claim_slot(&self, slot: usize) -> io::Result<bool> {
        let fd = self.procs_fd()?;
        match byte_lock(fd, libc::F_SETLK, libc::F_WRLCK, slot) {
            Ok(_) => Ok(true),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Gives the byte back.
    pub(crate) fn yield_slot(&self, slot: usize) -> io::Result<()> {
        byte_lock(self.procs_fd()?, libc::F_SETLK, libc::F_UNLCK, slot).map(|_| ())
    }

    /// The pid of the *other* process that holds byte `slot`, in our pid namespace (0: not visible in it).
    pub(crate) fn slot_holder(&self, slot: usize) -> io::Result<Option<i32>> {
        let lock = byte_lock(self.procs_fd()?, libc::F_GETLK, libc::F_WRLCK, slot)?;
        Ok((i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid))
    }

    fn procs_fd(&self) -> io::Result<RawFd> {
        let mapping = self.mapping;
        let fd = mapping.procs_fd.load(Ordering::Relaxed);
        if is_file(fd, mapping.procs_identity) {
            return Ok(fd);
        }
        // SAFETY: `self` holds the process mutex, which guards this list.
        let kept = unsafe { &mut *KEPT.0.get() };
        kept.retain(|&(identity, fd)| is_file(fd, identity));
        let found = kept.iter().find(|(identity, _)| *identity == mapping.procs_identity).map(|&(_, fd)| fd);
        let fd = match found {
            Some(fd) => fd,
            None => {
                let fd = open_rw(&mapping.procs_path)?.into_raw_fd();
                kept.push((mapping.procs_identity, fd));
                fd
            }
        };
        mapping.procs_fd.store(fd, Ordering::Relaxed);
        Ok(fd)
    }
}

fn is_file(fd: RawFd, identity: (u64, u64)) -> bool {
    if fd < 0 {
        return false;
    }
    // SAFETY: an all-zero stat buffer is a valid place for fstat to write to.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the buffer is valid; a descriptor that is not open gives an error.
    let rc = unsafe { libc::fstat(fd, &mut stat) };
    rc == 0 && (stat.st_dev, stat.st_ino) == identity
}

fn file_lock(fd: RawFd, command: i32, kind: i32) -> io::Result<()> {
    run_lock(fd, command, kind, 0, 0).map(|_| ())
}

fn byte_lock(fd: RawFd, command: i32, kind: i32, byte: usize) -> io::Result<libc::flock> {
    let start = libc::off_t::try_from(byte).map_err(io::Error::other)?;
    run_lock(fd, command, kind, start, 1)
}

fn run_lock(
    fd: RawFd,
    command: i32,
    kind: i32,
    start: libc::off_t,
    len: libc::off_t,
) -> io::Result<libc::flock> {
    // SAFETY: an all-zero flock is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(kind).map_err(io::Error::other)?;
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).map_err(io::Error::other)?;
    lock.l_start = start;
    lock.l_len = len;
    loop {
        // SAFETY: `lock` is valid for the call, which these commands read and F_GETLK writes.
        if unsafe { libc::fcntl(fd, command, &mut lock) } == 0 {
            return Ok(lock);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Nanoseconds on the clock that all processes of a machine share.
pub fn now_ns() -> u64 {
    // SAFETY: an all-zero timespec is valid.
    let mut now: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: `now` is valid for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Sixteen random bytes that differ between program images (a fork shares its parent's).
pub(crate) fn image_random() -> [u8; 16] {
    // SAFETY: AT_RANDOM is the address of sixteen bytes that stay readable for the life of the image.
    unsafe {
        let address = libc::getauxval(libc::AT_RANDOM) as *const [u8; 16];
        if address.is_null() { [0; 16] } else { address.read_unaligned() }
    }
}

/// Sleeps until the word is no longer `seen`, something wakes it, or the time is over.
pub(crate) fn futex_wait(word: &AtomicU32, seen: u32, timeout_ns: u64) {
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout_ns / 1_000_000_000).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::try_from(timeout_ns % 1_000_000_000).unwrap_or(0),
    };
    // SAFETY: the word and the timeout are valid for the call; a shared futex is keyed by the file.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &timeout);
    }
}

/// Wakes every sleeper on the word.
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: the word is valid for the call.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}
