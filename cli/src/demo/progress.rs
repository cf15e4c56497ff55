//! The progress of the demo.

use super::lines::{WIDTH, cut};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Numbered steps on stderr: each step is announced when it starts, and its time is shown when it ends.
pub(crate) struct Progress {
    step: usize,
    steps: usize,
    started: Option<Instant>,
    terminal: bool,
    /// The width of the running step's line, in characters.
    column: usize,
}

impl Progress {
    pub(crate) fn new(steps: usize) -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let terminal = std::io::stderr().is_terminal() && !dumb;
        Self { step: 0, steps, started: None, terminal, column: 0 }
    }

    /// Ends the step before, if any, and starts the next.
    pub(crate) fn step(&mut self, what: &str) {
        self.done();
        self.step = self.step.saturating_add(1);
        self.started = Some(Instant::now());
        let line = format!("[{}/{}] {what}", self.step, self.steps);
        self.column = line.chars().count();
        if self.terminal { write(&line) } else { write(&format!("{line}\n")) }
    }

    /// Replaces the detail after a running step; only on terminals that can rewrite a line.
    pub(crate) fn detail(&self, what: &str) {
        if self.terminal {
            write(&format!("\x1b[s  {}\x1b[K\x1b[u", cut(what, WIDTH.saturating_sub(self.column + 2))));
        }
    }

    /// Ends the running step.
    pub(crate) fn done(&mut self) {
        if let Some(started) = self.started.take()
            && self.terminal
        {
            write(&format!("  {}\x1b[K\n", seconds(started.elapsed())));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.started.take().is_some() && self.terminal {
            write("\n");
        }
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// Errors are ignored: progress that nobody can read must not stop the work.
fn write(text: &str) {
    let mut out = std::io::stderr();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
