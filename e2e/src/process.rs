//! The product's processes in their containers, as the host sees them: to be killed and stopped.

use anyhow::{Context, Result, bail};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use std::path::Path;

/// A process.
#[derive(Debug, Clone)]
pub struct Process {
    /// Its id on the host.
    pub pid: i32,
    environment: Vec<String>,
}

/// All processes of a program in containers, by its path there.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn of_program(program: &str) -> Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("/proc")?.flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        // Processes end while one looks.
        let Ok(arguments) = words(&entry.path().join("cmdline")) else { continue };
        if arguments.first().is_some_and(|first| first == program) {
            let Ok(environment) = words(&entry.path().join("environ")) else { continue };
            found.push(Process { pid, environment });
        }
    }
    Ok(found)
}

fn words(path: &Path) -> std::io::Result<Vec<String>> {
    let bytes = std::fs::read(path)?;
    let words = bytes.split(|b| *b == 0).filter(|w| !w.is_empty());
    Ok(words.map(|w| String::from_utf8_lossy(w).into_owned()).collect())
}

/// The one node agent.
///
/// # Errors
/// If there is none or there are two.
pub fn agent() -> Result<Process> {
    match of_program("/usr/bin/aliquot-kubelet-plugin")?.as_slice() {
        [one] => Ok(one.clone()),
        other => bail!("{} node agents run", other.len()),
    }
}

/// The controller in this pod.
///
/// # Errors
/// If it does not run.
pub fn controller(pod: &str) -> Result<Process> {
    let all = of_program("/usr/bin/aliquot-controller")?;
    let own = all.into_iter().find(|p| p.variable("POD_NAME") == Some(pod));
    own.with_context(|| format!("no controller runs in pod {pod}"))
}

impl Process {
    /// A variable of its environment.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.environment.iter().find_map(|v| v.strip_prefix(name)?.strip_prefix('='))
    }

    /// Whether it still runs.
    pub fn runs(&self) -> bool {
        Path::new(&format!("/proc/{}", self.pid)).exists()
    }

    /// SIGKILL.
    ///
    /// # Errors
    /// If it is gone.
    pub fn kill(&self) -> Result<()> {
        self.signal(Signal::SIGKILL)
    }

    /// SIGSTOP: it does nothing until it is continued.
    ///
    /// # Errors
    /// If it is gone.
    pub fn stop(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// SIGCONT.
    ///
    /// # Errors
    /// If it is gone.
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        signal::kill(Pid::from_raw(self.pid), signal).with_context(|| format!("{signal} to {}", self.pid))
    }
}
