//! What holds of the trial's process by itself: its program may call whatever it likes here, as the filter, which lets
//! it start nothing, would hide the rest.

use super::*;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::process::{Command, Stdio};
use std::sync::mpsc;

/// Only a test that fails waits for so long.
const AT_MOST: Duration = Duration::from_secs(60);

const EVERYTHING: [libc::sock_filter; 1] = [libc::sock_filter {
    code: (libc::BPF_RET | libc::BPF_K) as u16,
    jt: 0,
    jf: 0,
    k: libc::SECCOMP_RET_ALLOW,
}];

/// Starts a script under this machine's own root, whose output goes into `says`.
fn start(script: &CStr, says: RawFd, listener: RawFd) -> Process {
    let root = File::open("/").unwrap();
    let null = File::open("/dev/null").unwrap();
    let (arguments, environment) = (pointers(&[c"sh", c"-c", script]), pointers(&[c"PATH=/usr/bin:/bin"]));
    let plan = Plan {
        root: root.as_raw_fd(),
        program: c"/bin/sh".as_ptr(),
        arguments: &arguments,
        environment: &environment,
        standard: [null.as_raw_fd(), says, says],
        filter: &EVERYTHING,
        listener,
    };
    // It allocates nothing: other threads can hold the allocator's lock.
    Process::start(|| {
        let Err(_) = plan.begin();
    })
    .unwrap()
}

fn is_root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: {test}: entering a root needs root");
    }
    root
}

/// What is said until nobody is left that could say more; `None` if somebody is.
fn everything_from(mut pipe: impl Read + AsFd) -> Option<String> {
    let (mut said, mut buffer) = (Vec::new(), [0; 4096]);
    let until = Instant::now() + AT_MOST;
    loop {
        let left = PollTimeout::try_from(until.saturating_duration_since(Instant::now())).unwrap();
        match poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], left) {
            Ok(0) => return None,
            Err(Errno::EINTR) => {}
            ready => drop(ready.unwrap()),
        }
        match pipe.read(&mut buffer).unwrap() {
            0 => return Some(String::from_utf8(said).unwrap()),
            read => said.extend_from_slice(buffer.get(..read).unwrap()),
        }
    }
}

#[test]
fn what_a_trials_program_has_started_ends_with_it() {
    if !is_root("the end of what a program has started") {
        return;
    }
    let (said, says) = pipe2(OFlag::O_CLOEXEC).unwrap();
    // In a session of its own, and without a parent.
    let script = c"(setsid sleep 300 &) ; echo started";
    let mut process = start(script, says.as_raw_fd(), said.as_raw_fd());
    drop(says);
    let status = process.end(Instant::now() + AT_MOST).unwrap();
    assert!(matches!(status, Some(WaitStatus::Exited(_, 0))), "{status:?}");
    let said = everything_from(File::from(said));
    assert_eq!(said.as_deref(), Some("started\n"), "what it has started lives on");
}

/// Runs this test alone in another process, which is the hook, and kills that.
#[test]
fn a_trial_ends_with_a_hook_that_is_killed() {
    const HOOK: &str = "ALIQUOT_TEST_IS_THE_HOOK";
    if !is_root("a hook that is killed") {
        return;
    }
    if std::env::var_os(HOOK).is_some() {
        let (listener, _speaker) = pipe2(OFlag::O_CLOEXEC).unwrap();
        let mut process = start(c"echo begun; exec sleep 300", 1, listener.as_raw_fd());
        let ended = process.end(Instant::now() + 2 * AT_MOST);
        panic!("it was not killed: {ended:?}");
    }
    let mut hook = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "trial::tests::a_trial_ends_with_a_hook_that_is_killed", "--nocapture"])
        .env(HOOK, "")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = hook.stdout.take().unwrap();
    let mut before = Vec::new();
    while !before.ends_with(b"begun\n") {
        let mut byte = [0];
        said.read_exact(&mut byte).expect("the trial has begun");
        before.extend(byte);
    }
    hook.kill().unwrap();
    hook.wait().unwrap();
    assert!(everything_from(said).is_some(), "the trial's process lives on");
}

#[test]
fn what_others_keep_open_is_not_waited_for() {
    let (said, says) = pipe2(OFlag::O_CLOEXEC).unwrap();
    nix::unistd::write(&says, b"said").unwrap();
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(left_in(said)));
    assert_eq!(told.recv_timeout(AT_MOST), Ok(Ok(b"said".to_vec())));
    drop(says);
}
