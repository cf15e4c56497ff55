//! How long things may last: until they are told to end, and until the time of the run is over.

use anyhow::{Context, Result, bail, ensure};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use std::io::Read;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

static IS_STOPPED: AtomicBool = AtomicBool::new(false);
static END: OnceLock<Instant> = OnceLock::new();

/// How often is looked whether a program ended.
const LOOK: Duration = Duration::from_millis(10);

/// From now on SIGTERM ends the run in order, and the end of the process `guard` is a SIGTERM.
///
/// # Errors
/// If signals cannot be listened to, or the guard has ended already.
pub(crate) fn listen(guard: u32) -> Result<()> {
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            let Ok(mut told) = signal(SignalKind::terminate()) else { return };
            let _ = send.send(());
            told.recv().await;
            IS_STOPPED.store(true, Relaxed);
        });
    });
    receive.recv().context("cannot listen to signals")?;
    prctl::set_pdeathsig(Signal::SIGTERM).context("cannot ask to be told of the guard's end")?;
    // It may have ended before the kernel was asked.
    ensure!(is_child_of(guard), "the process that watches over the run has ended");
    Ok(())
}

/// Whether this process is still a child of that one.
pub(crate) fn is_child_of(parent: u32) -> bool {
    u32::try_from(nix::unistd::getppid().as_raw()) == Ok(parent)
}

/// No program of the run lasts longer than until then.
pub(crate) fn set_end(at: Instant) {
    let _ = END.set(at);
}

/// Whether the run was told to end.
pub(crate) fn is_stopped() -> bool {
    IS_STOPPED.load(Relaxed)
}

/// An error once the run was told to end.
pub(crate) fn check() -> Result<()> {
    ensure!(!is_stopped(), "the run was interrupted");
    Ok(())
}

/// Why a program that was started then and may last so long must end now, if it must.
pub(crate) fn must_end(started: Instant, longest: Duration) -> Option<String> {
    if is_stopped() {
        return Some("the run was interrupted".to_owned());
    }
    if started.elapsed() > longest {
        return Some(format!("it did not end within {} s", longest.as_secs()));
    }
    let is_over = END.get().is_some_and(|end| Instant::now() > *end);
    is_over.then(|| "the time of the run was over".to_owned())
}

/// Runs a program to its end, and kills it where it must end before.
pub(crate) fn output(command: &mut Command, longest: Duration) -> Result<Output> {
    let name = command.get_program().display().to_string();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("{name} does not start"))?;
    let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if let Some(why) = must_end(started, longest) {
            let _ = child.kill();
            let _ = child.wait();
            bail!("{name}: {why}");
        }
        std::thread::sleep(LOOK);
    };
    let read = |thread: JoinHandle<Vec<u8>>| thread.join().unwrap_or_default();
    Ok(Output { status, stdout: read(out), stderr: read(err) })
}

/// Reads a stream to its end, in a thread.
pub(crate) fn drain(stream: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        bytes
    })
}

/// What a program said, for a reason.
pub(crate) fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    format!("{}: {} {}", output.status, text(&output.stdout), text(&output.stderr)).trim().to_owned()
}
