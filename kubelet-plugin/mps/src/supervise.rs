//! The supervisor: looks at what the agent asks and at its daemons, several times a second, and does what
//! [`Keeper`] decides.
//!
//! It adopts nothing: daemons that a predecessor left are ended before the agent can see the new supervisor. What cannot
//! be ended, such as a process that waits in the driver for hardware that hangs, holds up its own claim only.

mod launch;

use crate::contract::{ClaimDir, ContractError, MpsDir, Sole};
use crate::isolate;
use crate::keeper::{Action, Asked, Keeper, Seen, Timing, Told};
use crate::processes;
use anyhow::Context;
pub use launch::Launcher;
use launch::Processes;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

/// How often it looks, beside whenever a process ends.
const LOOK_MILLIS: u16 = 200;
/// How long daemons of a predecessor may take to end after they were killed. All claims wait for that long at most.
const PREDECESSORS: Duration = Duration::from_secs(10);
const PREDECESSORS_LOOK: Duration = Duration::from_millis(50);

/// A claim under supervision.
struct Claim {
    dir: ClaimDir,
    keeper: Keeper,
    processes: Processes,
    /// The last thing that went wrong here, so that it is said once.
    trouble: Option<String>,
}

/// Serves a directory until SIGTERM or SIGINT, then ends all daemons.
///
/// # Errors
/// If it cannot start: another supervisor is there, or the directory cannot be put in order.
pub fn run(dir: &MpsDir, launcher: &Launcher, timing: &Timing) -> anyhow::Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD] {
        signals.add(signal);
    }
    signals.thread_block().context("cannot block signals")?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&signals, flags).context("cannot listen for signals")?;
    let sole = Sole::take(dir)?;
    let mut claims = put_in_order(dir, launcher, timing)?;
    if !await_program(launcher, &signals)? {
        return Ok(());
    }
    let _announced = sole.announce()?;
    tracing::info!(directory = %dir.path().display(), "serving");
    let started = Instant::now();
    let mut ends = false;
    loop {
        ends |= stop_asked(&signals)?;
        meet(dir, &mut claims, launcher, timing);
        claims.retain(|_, claim| claim.turn(started.elapsed(), ends));
        if ends && claims.is_empty() {
            tracing::info!("all daemons ended");
            return Ok(());
        }
    }
}

/// Waits until a daemon could start: before, the agent would offer what nobody here can serve. A driver may come after
/// us. Returns false if this process is to end.
fn await_program(launcher: &Launcher, signals: &SignalFd) -> anyhow::Result<bool> {
    let mut told = false;
    while let Err(error) = isolate::find(&launcher.roots) {
        if !told {
            tracing::error!(%error, "MPS is not served until a daemon can start");
            told = true;
        }
        if stop_asked(signals)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Waits for a signal, or for the time of the next look. Returns true if this process is to end.
fn stop_asked(signals: &SignalFd) -> anyhow::Result<bool> {
    match poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], PollTimeout::from(LOOK_MILLIS)) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(errno).context("cannot wait for signals"),
    }
    let mut asked = false;
    while let Some(signal) = signals.read_signal().context("cannot read signals")? {
        asked |= signal.ssi_signo != Signal::SIGCHLD as u32;
    }
    Ok(asked)
}

/// Ends what a predecessor left running, and takes back what it said. Returns the claims of which something does not
/// end: their states say so, for a claim without one has no daemon.
fn put_in_order(
    dir: &MpsDir,
    launcher: &Launcher,
    timing: &Timing,
) -> anyhow::Result<BTreeMap<String, Claim>> {
    end_predecessors(dir);
    let mut claims = BTreeMap::new();
    for dir in dir.claims()? {
        let left = pids(&processes::of_claim(dir.path()));
        if left.is_empty() {
            dir.remove_state()?;
            continue;
        }
        let reason = format!(
            "processes {left:?} of the claim's former MPS daemon cannot be killed: see the kernel's log for a driver \
             that hangs; the claim goes on once they have ended, by a reset of the GPU or a reboot"
        );
        let uid = dir.uid().to_owned();
        let mut claim = Claim::new(dir, launcher, Keeper::with_leftovers(timing.clone(), reason));
        claim.turn(Duration::ZERO, false);
        if let Some(trouble) = claim.trouble {
            anyhow::bail!("cannot say that processes {left:?} of claim {uid} run on: {trouble}");
        }
        claims.insert(uid, claim);
    }
    Ok(claims)
}

/// Kills what a predecessor left running until it has ended, or has had the time for it.
fn end_predecessors(dir: &MpsDir) {
    let started = Instant::now();
    let mut told = Vec::new();
    loop {
        let left = processes::of_all(dir.path());
        let pids = pids(&left);
        if left.is_empty() {
            return;
        }
        if started.elapsed() > PREDECESSORS {
            tracing::error!(
                ?pids,
                "MPS daemons of a predecessor cannot be killed; their claims wait for that"
            );
            return;
        }
        if told != pids {
            tracing::warn!(?pids, "ending MPS daemons of a predecessor");
            told = pids;
        }
        left.iter().for_each(processes::Process::kill);
        thread::sleep(PREDECESSORS_LOOK);
    }
}

fn pids(processes: &[processes::Process]) -> Vec<u32> {
    processes.iter().map(|process| process.pid).collect()
}

/// Takes up claims that are new.
fn meet(dir: &MpsDir, claims: &mut BTreeMap<String, Claim>, launcher: &Launcher, timing: &Timing) {
    let there = dir.claims().unwrap_or_else(|error| {
        tracing::error!(%error, "no new claims");
        Vec::new()
    });
    for claim in there.into_iter().filter(|claim| claim.ask_file().exists()) {
        claims
            .entry(claim.uid().to_owned())
            .or_insert_with(|| Claim::new(claim, launcher, Keeper::new(timing.clone())));
    }
}

impl Claim {
    fn new(dir: ClaimDir, launcher: &Launcher, keeper: Keeper) -> Self {
        Self { keeper, processes: Processes::new(launcher.clone(), dir.clone()), dir, trouble: None }
    }

    /// Looks, decides and acts. Returns false once nothing is left of the claim.
    fn turn(&mut self, now: Duration, ends: bool) -> bool {
        let asked = match self.dir.ask() {
            _ if ends => Asked::Nothing,
            Ok(Some(ask)) => Asked::Daemon(ask),
            Ok(None) => Asked::Nothing,
            // Who runs goes on: that a file could not be read for a moment says nothing of what is asked.
            Err(error) => match (&error, self.keeper.running_ask()) {
                (ContractError::Io { .. }, Some(ask)) => Asked::Daemon(ask.clone()),
                _ => Asked::Unfit(error.to_string()),
            },
        };
        let (seen, told) = match self.keeper.has_daemon() {
            true => self.processes.look(),
            false => (Seen::nothing(), Told::Nothing),
        };
        let mut trouble = None;
        let actions = self.keeper.step(now, &asked, &seen, &told);
        let forgotten = actions.contains(&Action::Forget);
        let mut done = true;
        for action in actions {
            let says = matches!(action, Action::Say(_));
            if let Err(error) = self.act(action) {
                trouble = Some(format!("{error:#}"));
                done = false;
                if says {
                    self.keeper.not_said();
                }
            }
        }
        self.processes.bound_logs();
        if trouble.is_some() && trouble != self.trouble {
            tracing::error!(claim = self.dir.uid(), error = trouble, "cannot serve a claim");
        }
        self.trouble = trouble;
        // A state that could not be removed is tried again.
        !(forgotten && done)
    }

    fn act(&mut self, action: Action) -> anyhow::Result<()> {
        let uid = self.dir.uid();
        match action {
            Action::Start(ask) => {
                tracing::info!(
                    uid,
                    namespace = ask.claim.namespace,
                    claim = ask.claim.name,
                    "starting a daemon"
                );
                self.processes
                    .start(&ask)
                    .with_context(|| format!("cannot start a daemon in {}", self.dir.path().display()))
            }
            Action::SetLimits(ask) => {
                self.processes.set_limits(&ask);
                Ok(())
            }
            Action::Quit => {
                tracing::info!(uid, "ending a daemon");
                self.processes.quit();
                Ok(())
            }
            Action::Kill => {
                self.processes.kill();
                Ok(())
            }
            Action::Say(state) => {
                tracing::info!(uid, state = ?state.state, reason = state.reason, pid = state.pid, "state");
                Ok(self.dir.write_state(&state)?)
            }
            Action::Forget => Ok(self.dir.remove_state()?),
        }
    }
}
