//! Runs the supervisor. Several times a second it looks at the agent's asks and at its daemons, and does what
//! [`Keeper`] decides.
//!
//! The supervisor adopts nothing: daemons that a predecessor left are ended before the agent can see the new
//! supervisor. A process that cannot be ended, such as one that waits in the driver for hardware that hangs,
//! holds up only its own claim.

mod launch;
mod logs;

use crate::contract::{ClaimDir, ContractError, MpsDir, Sole};
use crate::groups::Groups;
use crate::isolate;
use crate::keeper::{Action, Asked, Keeper, Seen, Timing, Told};
use crate::processes::{Process, Table};
use anyhow::Context;
pub use launch::Launcher;
use launch::{Processes, is_done};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

/// The interval between looks in milliseconds; the supervisor also looks whenever a process ends.
const LOOK_MILLIS: u16 = 200;
/// The interval between looks for servers of running daemons: a server that was never seen is not known when
/// it ends slowly.
const SERVERS: Duration = Duration::from_secs(1);
/// The time that daemons of a predecessor may take to end after they were killed. All claims wait at most
/// that long.
const PREDECESSORS: Duration = Duration::from_secs(10);
const PREDECESSORS_LOOK: Duration = Duration::from_millis(50);

/// A claim under supervision.
struct Claim {
    dir: ClaimDir,
    keeper: Keeper,
    processes: Processes,
    /// The last error of the claim, so that it is reported once.
    trouble: Option<String>,
}

/// Serves a directory until SIGTERM or SIGINT, then ends all daemons.
///
/// # Errors
/// Fails if the supervisor cannot start: another supervisor is there, or the directory cannot be put in
/// order.
pub fn run(dir: &MpsDir, launcher: &Launcher, timing: &Timing) -> anyhow::Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD] {
        signals.add(signal);
    }
    signals.thread_block().context("cannot block signals")?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&signals, flags).context("cannot listen for signals")?;
    let sole = Sole::take(dir)?;
    let mut table = Table::new(dir.path());
    let mut groups = Groups::new(dir).context("cannot see which groups processes have")?;
    let mut claims = put_in_order(dir, launcher, timing, &mut table, &mut groups)?;
    if !await_program(launcher, &signals)? {
        return Ok(());
    }
    let _announced = sole.announce()?;
    tracing::info!(directory = %dir.path().display(), "serving");
    let started = Instant::now();
    let mut ends = false;
    loop {
        ends |= stop_asked(&signals)?;
        meet(dir, &mut claims, launcher, timing, &mut groups);
        is_done("look for processes", table.look_within(SERVERS));
        claims.retain(|_, claim| claim.turn(started.elapsed(), ends, &mut table));
        if ends && claims.is_empty() {
            tracing::info!("all daemons ended");
            return Ok(());
        }
    }
}

/// Waits until a daemon could start. Before that, the agent would offer MPS that the supervisor cannot serve.
/// A driver may come after the supervisor. Returns false if this process is to end.
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

/// Ends the daemons that a predecessor left running, and removes its answers. Returns the claims with
/// processes that do not end. Their states say so, because a claim without a state has no daemon.
fn put_in_order(
    dir: &MpsDir,
    launcher: &Launcher,
    timing: &Timing,
    table: &mut Table,
    groups: &mut Groups,
) -> anyhow::Result<BTreeMap<String, Claim>> {
    end_predecessors(table).context("cannot look for MPS daemons of a predecessor")?;
    let mut claims = BTreeMap::new();
    for dir in dir.claims()? {
        let left = pids(table.of_claim(dir.path()));
        if left.is_empty() {
            dir.remove_state()?;
            continue;
        }
        let reason = format!(
            "processes {left:?} of the claim's former MPS daemon cannot be killed: see the kernel's log for a driver \
             that hangs; the claim goes on once they have ended, by a reset of the GPU or a reboot"
        );
        let uid = dir.uid().to_owned();
        let mut claim = Claim::new(dir, launcher, Keeper::with_leftovers(timing.clone(), reason), groups);
        claim.turn(Duration::ZERO, false, table);
        // Any state shows that something is there, even the predecessor's.
        if let Some(trouble) = claim.trouble.as_ref().filter(|_| !claim.dir.state_file().exists()) {
            anyhow::bail!("cannot say that processes {left:?} of claim {uid} run on: {trouble}");
        }
        claims.insert(uid, claim);
    }
    Ok(claims)
}

/// Kills the processes that a predecessor left running, until they have ended or their time is over.
fn end_predecessors(table: &mut Table) -> io::Result<()> {
    let started = Instant::now();
    let mut told = Vec::new();
    loop {
        table.look()?;
        let pids = pids(table.all());
        if pids.is_empty() {
            return Ok(());
        }
        if started.elapsed() > PREDECESSORS {
            tracing::error!(
                ?pids,
                "MPS daemons of a predecessor cannot be killed; their claims wait for that"
            );
            return Ok(());
        }
        if told != pids {
            tracing::warn!(?pids, "ending MPS daemons of a predecessor");
            told = pids;
        }
        table.all().for_each(Process::kill);
        thread::sleep(PREDECESSORS_LOOK);
    }
}

fn pids<'a>(processes: impl Iterator<Item = &'a Process>) -> Vec<u32> {
    processes.map(|process| process.pid).collect()
}

/// Takes up new claims.
fn meet(
    dir: &MpsDir,
    claims: &mut BTreeMap<String, Claim>,
    launcher: &Launcher,
    timing: &Timing,
    groups: &mut Groups,
) {
    let there = dir.claims().unwrap_or_else(|error| {
        tracing::error!(%error, "no new claims");
        Vec::new()
    });
    for claim in there.into_iter().filter(|claim| claim.ask_file().exists()) {
        claims
            .entry(claim.uid().to_owned())
            .or_insert_with(|| Claim::new(claim, launcher, Keeper::new(timing.clone()), groups));
    }
}

impl Claim {
    fn new(dir: ClaimDir, launcher: &Launcher, keeper: Keeper, groups: &mut Groups) -> Self {
        let group = dir.group().unwrap_or_else(|| groups.another());
        Self { keeper, processes: Processes::new(launcher.clone(), dir.clone(), group), dir, trouble: None }
    }

    /// Looks, decides and acts. Returns false once nothing is left of the claim.
    fn turn(&mut self, now: Duration, ends: bool, table: &mut Table) -> bool {
        let asked = match self.dir.ask() {
            _ if ends => Asked::Nothing,
            Ok(Some(ask)) => Asked::Daemon(ask),
            Ok(None) => Asked::Nothing,
            // A running daemon goes on: a file that could not be read for a moment says nothing about the
            // ask.
            Err(error) => match (&error, self.keeper.running_ask()) {
                (ContractError::Io { .. }, Some(ask)) => Asked::Daemon(ask.clone()),
                _ => Asked::Unfit(error.to_string()),
            },
        };
        let (seen, told) = match self.keeper.has_daemon() {
            true => self.processes.look(table),
            false => (Seen::nothing(), Told::Nothing),
        };
        let mut trouble = None;
        let actions = self.keeper.step(now, &asked, &seen, &told);
        let forgotten = actions.contains(&Action::Forget);
        let mut done = true;
        for action in actions {
            let says = matches!(action, Action::Say(_));
            if let Err(error) = self.act(action, table) {
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
        // If the state could not be removed, this is tried again.
        !(forgotten && done)
    }

    fn act(&mut self, action: Action, table: &mut Table) -> anyhow::Result<()> {
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
                is_done("look for processes", table.look());
                self.processes.quit();
                Ok(())
            }
            Action::Kill => {
                self.processes.kill(table);
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
