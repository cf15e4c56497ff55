//! The product's own programs, run as child processes with their logs in files.

use aliquot_sim_kubelet::tether::{self, Tethered};
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The directories of built files.
#[derive(Debug, Clone)]
pub(crate) struct Build {
    programs: PathBuf,
    limiter: PathBuf,
}

impl Build {
    /// Finds the built files, which are beside this program unless other directories are given.
    pub(crate) fn find(programs: Option<&Path>, limiter: Option<&Path>) -> Result<Self> {
        let own = std::env::current_exe().context("cannot find this program's own path")?;
        let beside = own.parent().context("this program has no directory")?;
        let programs = programs.unwrap_or(beside).to_owned();
        let limiter = limiter.map_or_else(|| programs.join("../hook"), Path::to_owned);
        Ok(Self { programs, limiter })
    }

    /// Returns the path of a built program or library; an error if it does not exist.
    pub(crate) fn file(&self, name: &str) -> Result<PathBuf> {
        Self::existing(self.programs.join(name))
    }

    /// Returns the path of one of the limiter's two files, or of the OCI hook.
    pub(crate) fn limiter_file(&self, name: &str) -> Result<PathBuf> {
        Self::existing(self.limiter.join(name))
    }

    fn existing(path: PathBuf) -> Result<PathBuf> {
        if !path.is_file() {
            bail!(
                "{} is not there: the demo runs what a checkout of the source builds, so run `make demo` in one, or name \
                 its target/debug with --build-dir",
                path.display()
            );
        }
        path.canonicalize().with_context(|| format!("cannot resolve {}", path.display()))
    }
}

/// A running program of the product. It is killed when this value is dropped, and ends with this process.
pub(crate) struct Process {
    name: String,
    child: Tethered,
    log: PathBuf,
}

impl Process {
    /// Starts a program; stdout and stderr go to `<logs>/<name>.log`.
    pub(crate) fn start(
        program: &Path,
        name: &str,
        logs: &Path,
        args: &[impl AsRef<OsStr>],
        env: &[(&str, &OsStr)],
    ) -> Result<Self> {
        let log = logs.join(format!("{name}.log"));
        let file = std::fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let own = std::env::current_exe().context("cannot find this program's own path")?;
        let child = tether::command(&own, program)
            .args(args)
            .envs(env.iter().copied())
            .stdin(std::process::Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self { name: name.to_owned(), child: Tethered(child), log })
    }

    /// Returns an error with the end of the program's log if it is no longer running.
    pub(crate) fn check(&mut self) -> Result<()> {
        let Some(status) = self.child.0.try_wait()? else { return Ok(()) };
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(12)..).unwrap_or_default().join("\n");
        bail!("{} ended with {status}; the end of {}:\n{tail}", self.name, self.log.display())
    }

    /// Stops the program with SIGTERM, and with SIGKILL after 10 s.
    pub(crate) async fn stop(mut self) -> Result<()> {
        if let Some(pid) = self.child.0.id().and_then(|pid| i32::try_from(pid).ok()) {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM).ok();
        }
        if tokio::time::timeout(Duration::from_secs(10), self.child.0.wait()).await.is_err() {
            self.child.0.kill().await.with_context(|| format!("cannot stop {}", self.name))?;
        }
        Ok(())
    }
}
