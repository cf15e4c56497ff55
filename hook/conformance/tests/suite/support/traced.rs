//! The test program under a tracer, which stops it behind stores to the region and at its sleeps.
#![allow(unsafe_code, reason = "traces a process")]

use super::Bench;
use aliquot_quota::gate::Compute;
use aliquot_quota::lease::{CELLS, HOLDERS, Purse};
use aliquot_quota::region::Region;
use aliquot_quota::till::Till;
use std::io::{BufRead, BufReader, Lines};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Leases of a region.
const PURSES: usize = offset_of!(Region, compute) + offset_of!(Compute, purses);

/// Stands for the word with the lease of the traced thread, of the process in a slot: which of its cells that is
/// depends on where the thread lies in memory.
pub(crate) const fn lease_of(slot: usize) -> usize {
    PURSES + slot * size_of::<Purse>()
}

/// How stores are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Eyes {
    /// By hardware watchpoints, up to four words at a time.
    Registers,
    /// By comparing the words behind each instruction; a store of what was there already is not seen.
    Steps,
}

impl Eyes {
    /// Watchpoints where this machine has them (many virtual ones have not), unless `ALIQUOT_TEST_WATCH=steps`.
    pub(crate) fn of_this_machine() -> Self {
        let forced = std::env::var_os("ALIQUOT_TEST_WATCH").is_some_and(|how| how == "steps");
        if !forced && registers_work() {
            return Self::Registers;
        }
        println!("no hardware watchpoints: one instruction at a time");
        Self::Steps
    }

    /// Words that can be watched at a time.
    pub(crate) fn most(self) -> usize {
        match self {
            Self::Registers => 4,
            Self::Steps => usize::MAX,
        }
    }
}

/// Whether a child of ours is stopped behind a store to a watched word.
fn registers_work() -> bool {
    static WORD: AtomicU64 = AtomicU64::new(0);
    // SAFETY: the child makes system calls and one store to its own memory, and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: as above.
        unsafe {
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
            WORD.store(1, Relaxed);
            libc::_exit(0);
        }
    }
    let wait = || {
        let mut status = 0;
        // SAFETY: a child of ours that nobody else waits for.
        unsafe { libc::waitpid(pid, &mut status, 0) };
        status
    };
    let mut status = wait();
    let mut hit = false;
    if libc::WIFSTOPPED(status) && watch(pid, &[WORD.as_ptr() as u64]) {
        // SAFETY: the child is stopped.
        unsafe { libc::ptrace(libc::PTRACE_CONT, pid, 0, 0) };
        status = wait();
        hit = libc::WIFSTOPPED(status) && libc::WSTOPSIG(status) == libc::SIGTRAP;
    }
    if libc::WIFSTOPPED(status) {
        // SAFETY: as above.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        wait();
    }
    hit
}

fn register(index: usize) -> usize {
    offset_of!(libc::user, u_debugreg) + index * 8
}

/// Has a stopped process stop behind each store to one of up to four words; whether it can.
fn watch(pid: i32, addresses: &[u64]) -> bool {
    // SAFETY: the process is stopped and ours.
    let put =
        |index, value: u64| unsafe { libc::ptrace(libc::PTRACE_POKEUSER, pid, register(index), value) == 0 };
    let mut control: u64 = 0;
    let mut is_good = put(7, 0);
    for (index, address) in addresses.iter().enumerate() {
        is_good &= put(index, *address);
        // Enabled for this thread, for stores to eight bytes.
        control |= 1 << (index * 2) | 0b1001 << (16 + index * 4);
    }
    is_good && put(7, control)
}

/// A region's file in our own memory.
struct Mapped(*const AtomicU64, usize);

impl Mapped {
    fn of(bench: &Bench) -> Self {
        let file = std::fs::File::options().read(true).write(true).open(bench.region_path("a")).unwrap();
        let length = file.metadata().unwrap().len() as usize;
        // SAFETY: a file of ours, which nobody shortens.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        Self(at.cast(), length)
    }

    /// The word at an offset in bytes.
    fn word(&self, offset: usize) -> u64 {
        assert!(offset + 8 <= self.1);
        // SAFETY: inside the mapping, which lives as long as `self`.
        unsafe { (*self.0.byte_add(offset)).load(Relaxed) }
    }
}

impl Mapped {
    fn put(&self, offset: usize, value: u64) {
        assert!(offset + 8 <= self.1);
        // SAFETY: inside the mapping, which lives as long as `self`.
        unsafe { (*self.0.byte_add(offset)).store(value, Relaxed) };
    }

    fn all(&self) -> Vec<u64> {
        (0..self.1 / 8).map(|at| self.word(at * 8)).collect()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: a mapping of ours.
        unsafe { libc::munmap(self.0.cast_mut().cast(), self.1) };
    }
}

/// A sleep of the limiter, before it has begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nap {
    /// When the process went on before, from a mark or its last sleep: it asked the gate later than this.
    pub(crate) since_ns: u64,
    /// How long it is going to sleep.
    pub(crate) length_ns: u64,
}

/// From where on a program is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// Its first mark.
    Mark,
    /// When it is about to take a slot's lock: before that it stores nothing to the region.
    Lock,
}

/// Stores of a program between where it is watched from and its next mark.
pub(crate) struct Stores {
    /// How often it stored to each word.
    pub(crate) counts: Vec<usize>,
    /// Words whose content changed, whether they were watched or not.
    pub(crate) changed: Vec<usize>,
}

/// The test program, traced.
pub(crate) struct Traced {
    child: Child,
    /// It writes less than a pipe holds, so nobody need read.
    answers: Lines<BufReader<ChildStdout>>,
    eyes: Eyes,
    region: Mapped,
    /// Watched words and what was in them.
    words: Vec<(usize, u64)>,
    is_stopped: bool,
    /// A word that is set to so many nanoseconds from now when it comes to where it is watched from.
    pub(crate) due: Option<(usize, u64)>,
}

impl Traced {
    /// Starts it with the share `a`; it is stopped before its first instruction.
    pub(crate) fn start(bench: &Bench, script: &[&str], eyes: Eyes) -> Self {
        let mut command = bench.probe(script);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        // SAFETY: between fork and exec only one system call is made.
        unsafe {
            command.pre_exec(|| {
                libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        let (region, words) = (Mapped::of(bench), Vec::new());
        let mut traced = Self { child, answers, eyes, region, words, is_stopped: false, due: None };
        assert_eq!(traced.wait(), Some(libc::SIGTRAP));
        traced
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// What it answered to a command before the mark that it has come to.
    pub(crate) fn answer(&mut self, command: &str) -> String {
        let of = |line: String| Some(line.strip_prefix(command)?.strip_prefix(" = ")?.to_owned());
        self.answers.by_ref().map_while(Result::ok).find_map(of).expect("it has answered")
    }

    /// A word of the share's region.
    pub(crate) fn word(&self, offset: usize) -> u64 {
        self.region.word(offset)
    }

    /// Waits until it stops, and tells the signal; `None` = it has ended well.
    fn wait(&mut self) -> Option<i32> {
        let mut status = 0;
        // SAFETY: a process of ours that nobody has waited for.
        assert_eq!(unsafe { libc::waitpid(self.pid(), &mut status, 0) }, self.pid());
        self.is_stopped = libc::WIFSTOPPED(status);
        if self.is_stopped {
            return Some(libc::WSTOPSIG(status));
        }
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "ended with {status:x}");
        None
    }

    /// Lets it go on to its next stop.
    fn go(&mut self, how: libc::c_uint) -> Option<i32> {
        // SAFETY: the process is stopped and ours.
        assert_eq!(unsafe { libc::ptrace(how, self.pid(), 0, 0) }, 0);
        self.wait()
    }

    /// Which of the watched words it has just stored to.
    fn hit(&mut self) -> u128 {
        if self.eyes == Eyes::Steps {
            let mut hit = 0;
            for (at, (word, before)) in self.words.iter_mut().enumerate() {
                let now = self.region.word(*word);
                hit |= u128::from(std::mem::replace(before, now) != now) << at;
            }
            return hit;
        }
        // SAFETY: the process is stopped and ours.
        unsafe {
            let found = libc::ptrace(libc::PTRACE_PEEKUSER, self.pid(), register(6), 0);
            assert_eq!(libc::ptrace(libc::PTRACE_POKEUSER, self.pid(), register(6), 0), 0);
            u128::from(found as u64 & 15)
        }
    }

    /// Where the region is mapped.
    fn mapped(&self) -> Vec<u64> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        let ours = maps.lines().filter(|line| line.ends_with("/region/a/region"));
        ours.map(|line| u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap()).collect()
    }

    /// Goes on to where it is to be watched.
    pub(crate) fn go_to(&mut self, from: From) {
        match from {
            From::Mark => self.go_to_mark(),
            From::Lock => self.go_to_lock(),
        }
        if let Some((word, later_ns)) = self.due {
            self.region.put(word, now_ns() + later_ns);
        }
    }

    fn go_to_lock(&mut self) {
        loop {
            assert_eq!(self.go(libc::PTRACE_SYSCALL), Some(libc::SIGTRAP), "it takes a lock");
            let registers = self.registers();
            let locks =
                registers.orig_rax == libc::SYS_fcntl as u64 && registers.rsi == libc::F_OFD_SETLK as u64;
            // The simulated node has locks of its own.
            if locks && !self.mapped().is_empty() {
                return;
            }
        }
    }

    fn registers(&self) -> libc::user_regs_struct {
        // SAFETY: a record of numbers, which the kernel fills; the process is stopped and ours.
        unsafe {
            let mut registers = std::mem::zeroed();
            assert_eq!(libc::ptrace(libc::PTRACE_GETREGS, self.pid(), 0, &mut registers), 0);
            registers
        }
    }

    /// Goes on to the next mark.
    pub(crate) fn go_to_mark(&mut self) {
        while self.go(libc::PTRACE_CONT) != Some(libc::SIGUSR2) {}
    }

    /// Where in its purse the traced thread's cell is.
    fn cell(&self) -> usize {
        Till::cell(self.registers().fs_base) % CELLS * (size_of::<Purse>() / CELLS)
    }

    fn watch(&mut self, words: &[usize]) {
        let cell = self.cell();
        let is_lease = |word: usize| (0..HOLDERS).any(|slot| lease_of(slot) == word);
        let actual = |word: &usize| if is_lease(*word) { word + cell } else { *word };
        let words: Vec<usize> = words.iter().map(actual).collect();
        self.words = words.iter().map(|word| (*word, self.region.word(*word))).collect();
        if self.eyes == Eyes::Registers {
            let region = *self.mapped().first().expect("the region is mapped");
            let addresses: Vec<u64> = words.iter().map(|word| region + *word as u64).collect();
            assert!(watch(self.pid(), &addresses), "watchpoints worked before");
        }
    }

    /// Goes on to the next store to a watched word, and tells which; `None` = to its next mark.
    fn store(&mut self) -> Option<u128> {
        let how = if self.eyes == Eyes::Steps { libc::PTRACE_SINGLESTEP } else { libc::PTRACE_CONT };
        while self.go(how) == Some(libc::SIGTRAP) {
            let hit = self.hit();
            if hit != 0 {
                return Some(hit);
            }
        }
        None
    }

    /// Counts its stores to some words; it is at its end then.
    pub(crate) fn count(&mut self, from: From, words: &[usize]) -> Stores {
        assert!(words.len() <= 128);
        self.go_to(from);
        let before = self.region.all();
        self.watch(words);
        let cell = self.cell();
        let mut counts = vec![0; words.len()];
        while let Some(hit) = self.store() {
            counts.iter_mut().enumerate().for_each(|(at, count)| *count += (hit >> at & 1) as usize);
        }
        self.watch(&[]);
        let after = self.region.all();
        let pairs = before.iter().zip(&after).enumerate();
        let changed = pairs.filter(|(_, (before, after))| before != after).map(|(at, _)| at * 8);
        let lease = |at: usize| (0..HOLDERS).map(lease_of).find(|lease| lease + cell == at);
        let changed = changed.map(|at| lease(at).unwrap_or(at)).collect();
        self.finish();
        Stores { counts, changed }
    }

    /// Goes on to the `nth` store to a word. `false` = there are fewer this time.
    pub(crate) fn reach(&mut self, from: From, word: usize, nth: usize) -> bool {
        self.go_to(from);
        self.watch(&[word]);
        let reached = (0..nth).all(|_| self.store().is_some());
        self.watch(&[]);
        reached
    }

    /// Lets it go on to its next mark, and holds each of its sleeps against the deadline in a word of the region; how
    /// many there were. Nobody else of its share moves that deadline meanwhile.
    pub(crate) fn waits_no_longer_than(&mut self, deadline: usize, what: &str) -> usize {
        /// No sleep is longer, so whatever brings a deadline forward meanwhile, nobody is later than this.
        const MOST_NS: u64 = 100_000_000;
        /// An open gate is left to those who wait longer for a millisecond, in steps of a tenth (`line.rs`); one more
        /// for the edges.
        const STEP_NS: u64 = 100_000;
        const STEPS: usize = 11;
        let (mut naps, mut steps) = (0, 0);
        while let Some(nap) = self.nap() {
            // It has asked later than `since_ns`.
            let wait = self.word(deadline).saturating_sub(nap.since_ns);
            if wait == 0 {
                steps += 1;
                let lets_pass = nap.length_ns <= STEP_NS && steps <= STEPS;
                assert!(lets_pass, "{what}: {nap:?} although its deadline had passed when it asked");
                naps += 1;
                continue;
            }
            assert!(
                nap.length_ns <= wait.max(STEP_NS) + 1000,
                "{what}: {nap:?}, and the deadline is {wait} ns away"
            );
            assert!(nap.length_ns <= MOST_NS, "{what}: {nap:?}");
            naps += 1;
        }
        naps
    }

    /// Goes on to the next sleep of the limiter (programs sleep by another system call); `None` = to its next mark.
    pub(crate) fn nap(&mut self) -> Option<Nap> {
        let mut since_ns = now_ns();
        loop {
            match self.go(libc::PTRACE_SYSCALL) {
                Some(libc::SIGTRAP) => {}
                Some(libc::SIGUSR2) => return None,
                other => panic!("stopped by {other:?}"),
            }
            let registers = self.registers();
            if registers.orig_rax != libc::SYS_nanosleep as u64 {
                continue;
            }
            if registers.rax as i64 != -i64::from(libc::ENOSYS) {
                // A sleep has ended.
                since_ns = now_ns();
            } else {
                // SAFETY: the process is stopped and ours, and passes a record of two words.
                let peek = |at: u64| unsafe { libc::ptrace(libc::PTRACE_PEEKDATA, self.pid(), at, 0) } as u64;
                let length_ns = peek(registers.rdi) * 1_000_000_000 + peek(registers.rdi + 8);
                return Some(Nap { since_ns, length_ns });
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.is_stopped = false;
        let mut status = 0;
        // SAFETY: a process of ours that nobody has waited for.
        unsafe { libc::waitpid(self.pid(), &mut status, 0) };
    }

    /// Lets it go on to its end.
    pub(crate) fn finish(&mut self) {
        while self.is_stopped && self.go(libc::PTRACE_CONT).is_some() {}
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        if self.is_stopped {
            let _ = self.child.kill();
        }
    }
}

/// The clock that the gate's deadlines are told by.
pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the record outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
