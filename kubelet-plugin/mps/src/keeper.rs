//! Decides what to do about the daemon of one claim. Pure: the observed state and the time are arguments, and
//! the actions to take are the result.
//!
//! ```text
//! Idle ── start ──► Starting ── limits hold ──► Ready
//!  ▲                   │                          │      it ended, or is asked for no more
//!  └── all is gone ── Ending ◄────────────────────┘
//! ```

use crate::contract::{ANSWER, Ask, Phase, State, Version};
use std::time::Duration;

/// The time since some fixed moment.
pub type Clock = Duration;

/// The time limits of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// The time in which a daemon must answer after its start, with all limits set; otherwise it is ended.
    pub answer: Duration,
    /// The time in which a daemon must end after `quit`; otherwise it is killed. A daemon that was killed is
    /// killed again after this time.
    pub quit: Duration,
    /// The pause after the first failure; it doubles with each further one.
    pub least_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
    /// The time for which a daemon must be ready before its earlier failures are forgotten.
    pub calm: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            answer: ANSWER,
            quit: Duration::from_secs(10),
            least_pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(60),
            calm: Duration::from_secs(60),
        }
    }
}

/// The number of failures in a row after which a daemon counts as failed.
pub const MOST_FAILURES: u32 = 5;

/// The agent's ask for a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// The agent asks for a daemon.
    Daemon(Ask),
    /// The agent asks for a daemon that cannot be run; the text says why.
    Unfit(String),
    /// The agent asks for nothing.
    Nothing,
}

/// The state of the daemon's processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// The control daemon runs, with this process ID.
    Runs(u32),
    /// The control daemon runs with this process ID, without a server, and its device nodes have numbers that
    /// its GPUs no longer have: the driver was loaded anew meanwhile.
    Outdated(u32),
    /// The control daemon ended, and a server of it is still there.
    Lingers(End),
    /// All processes ended.
    Ended(End),
}

impl Seen {
    /// Returns the state in which no daemon was started.
    pub fn nothing() -> Self {
        Self::Ended(End { reason: String::new(), hopeless: false })
    }
}

/// The end of a control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// The daemon's last message, for people who read the claim.
    pub reason: String,
    /// True if the daemon did not even start, and trying again soon will not help.
    pub hopeless: bool,
}

/// The state of the last command to the control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// No command was given since the daemon was started.
    Nothing,
    /// A command is under way.
    Waiting,
    /// The command was accepted.
    Taken,
    /// The command was refused; the text says why.
    Refused(String),
}

/// An action for the supervisor to take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Start a daemon.
    Start(Ask),
    /// Set the limits, and read them back.
    SetLimits(Ask),
    /// Tell the control daemon to end itself and its servers.
    Quit,
    /// Kill all processes of the daemon.
    Kill,
    /// Write the state.
    Say(State),
    /// Remove the state, and forget the claim.
    Forget,
}

/// The state that is kept for one claim.
#[derive(Debug)]
pub struct Keeper {
    timing: Timing,
    stage: Stage,
    ask: Option<Ask>,
    failures: u32,
    starts: u32,
    hopeless: bool,
    reason: Option<String>,
    said: Option<State>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// There is no daemon.
    Idle { not_before: Clock },
    /// There is a daemon, and its limits are being set.
    Starting { since: Clock },
    /// The daemon is ready for clients.
    Ready { since: Clock },
    /// The daemon is to end; it was told, or killed, at this time.
    Ending { since: Clock },
}

impl Keeper {
    /// Creates the keeper of a claim that nothing is known of yet.
    pub fn new(timing: Timing) -> Self {
        Self {
            timing,
            stage: Stage::Idle { not_before: Duration::ZERO },
            ask: None,
            failures: 0,
            starts: 0,
            hopeless: false,
            reason: None,
            said: None,
        }
    }

    /// Creates the keeper of a claim with processes of a predecessor's daemon that do not end. The claim gets
    /// no daemon before they have ended.
    pub fn with_leftovers(timing: Timing, reason: String) -> Self {
        let stage = Stage::Ending { since: Duration::ZERO };
        Self { stage, hopeless: true, reason: Some(reason), ..Self::new(timing) }
    }

    /// Returns true if there is, or may be, a process of this claim's daemon.
    pub fn has_daemon(&self) -> bool {
        !matches!(self.stage, Stage::Idle { .. })
    }

    /// Returns the ask that the running daemon was started for.
    pub fn running_ask(&self) -> Option<&Ask> {
        self.ask.as_ref().filter(|_| self.has_daemon())
    }

    /// Notes that the last state could not be written, so that it is written again.
    pub fn not_said(&mut self) {
        self.said = None;
    }

    /// Decides the next actions. `seen` and `told` describe the daemon that was started last.
    pub fn step(&mut self, now: Clock, asked: &Asked, seen: &Seen, told: &Told) -> Vec<Action> {
        let mut actions = match self.stage {
            Stage::Idle { not_before } => self.idle(now, asked, not_before),
            Stage::Starting { .. } | Stage::Ready { .. } => self.running(now, asked, seen, told),
            Stage::Ending { since } => self.ending(now, seen, since),
        };
        if actions.last() != Some(&Action::Forget) {
            actions.extend(self.news(seen).map(Action::Say));
        }
        actions
    }

    fn idle(&mut self, now: Clock, asked: &Asked, not_before: Clock) -> Vec<Action> {
        match asked {
            Asked::Nothing => vec![Action::Forget],
            Asked::Unfit(reason) => {
                (self.ask, self.hopeless, self.reason) = (None, true, Some(reason.clone()));
                Vec::new()
            }
            Asked::Daemon(ask) => {
                if self.ask.as_ref() != Some(ask) {
                    (self.failures, self.hopeless, self.reason) = (0, false, None);
                } else if now < not_before {
                    return Vec::new();
                }
                self.ask = Some(ask.clone());
                self.starts += 1;
                self.stage = Stage::Starting { since: now };
                vec![Action::Start(ask.clone())]
            }
        }
    }

    fn running(&mut self, now: Clock, asked: &Asked, seen: &Seen, told: &Told) -> Vec<Action> {
        if let Seen::Lingers(end) | Seen::Ended(end) = seen {
            return self.fail(now, end.clone());
        }
        let same = matches!((asked, &self.ask), (Asked::Daemon(asked), Some(ask)) if asked == ask);
        let wanted = same && !matches!(seen, Seen::Outdated(_));
        let Some(ask) = self.ask.clone().filter(|_| wanted) else {
            self.stage = Stage::Ending { since: now };
            return vec![Action::Quit];
        };
        match (self.stage, told) {
            (Stage::Starting { .. }, Told::Taken) => {
                self.stage = Stage::Ready { since: now };
                (self.hopeless, self.reason) = (false, None);
                Vec::new()
            }
            (Stage::Starting { since }, told) if now.saturating_sub(since) >= self.timing.answer => {
                let why = match told {
                    Told::Refused(why) => why.as_str(),
                    _ => "it does not answer",
                };
                let reason =
                    format!("the MPS control daemon was not ready within {:?}: {why}", self.timing.answer);
                self.fail(now, End { reason, hopeless: false })
            }
            (Stage::Starting { .. }, Told::Nothing | Told::Refused(_)) => vec![Action::SetLimits(ask)],
            (Stage::Ready { since }, _) if now.saturating_sub(since) >= self.timing.calm => {
                self.failures = 0;
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// Handles a daemon that ended by itself, or is of no use: its remaining processes are killed.
    fn fail(&mut self, now: Clock, end: End) -> Vec<Action> {
        self.failures = self.failures.saturating_add(1);
        (self.hopeless, self.reason) = (end.hopeless, Some(end.reason));
        self.stage = Stage::Ending { since: now };
        vec![Action::Kill]
    }

    fn ending(&mut self, now: Clock, seen: &Seen, since: Clock) -> Vec<Action> {
        if matches!(seen, Seen::Ended(_)) {
            self.stage = Stage::Idle { not_before: now + self.pause() };
            return Vec::new();
        }
        let orphaned = matches!(seen, Seen::Lingers(_));
        if !orphaned && now.saturating_sub(since) < self.timing.quit {
            return Vec::new();
        }
        self.stage = Stage::Ending { since: now };
        vec![Action::Kill]
    }

    fn pause(&self) -> Duration {
        let longest = self.timing.longest_pause;
        match self.failures {
            0 => Duration::ZERO,
            _ if self.hopeless => longest,
            failures => {
                let factor = 2_u32.saturating_pow(failures - 1);
                self.timing.least_pause.saturating_mul(factor).min(longest)
            }
        }
    }

    /// Returns the state, if it differs from the last one that was written.
    fn news(&mut self, seen: &Seen) -> Option<State> {
        let ready = matches!(self.stage, Stage::Ready { .. });
        let failed = self.hopeless || self.failures >= MOST_FAILURES;
        let pid = match seen {
            Seen::Runs(pid) | Seen::Outdated(pid) if self.has_daemon() => Some(*pid),
            _ => None,
        };
        let state = State {
            version: Version,
            state: match (ready, failed) {
                (true, _) => Phase::Ready,
                (false, true) => Phase::Failed,
                (false, false) => Phase::Starting,
            },
            reason: self.reason.clone(),
            pid,
            restarts: self.starts.saturating_sub(1),
        };
        let changed = self.said.as_ref() != Some(&state);
        changed.then(|| self.said.insert(state).clone())
    }
}

#[cfg(test)]
mod tests;
