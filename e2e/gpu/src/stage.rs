//! How a case's programs run: shares as the node agent lays them out, and programs in them, plainly or in
//! namespaces of their own.

use crate::driver::now_ns;
use crate::life;
use aliquot_arbiter::files::{Keeper, make_grant};
use aliquot_kubelet_plugin::driver::{DriverFiles, Roots};
use aliquot_quota::region::{RegionView, initial_header};
use aliquot_quota::{GpuUuid, QuotaFile, REGION_FILE_SIZE};
use aliquot_sim_node::limiter_at;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Without the limiter.
    Bare,
    /// With `LD_PRELOAD`.
    Preloaded,
    /// In pid and mount namespaces of its own with a bind-mounted `/etc/ld.so.preload`, as in a container.
    Unshared,
}

impl Mode {
    /// As in results.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Preloaded => "LD_PRELOAD",
            Self::Unshared => "unshare -pm, /etc/ld.so.preload",
        }
    }
}

/// Makes `/etc/ld.so.preload` name the limiter for what follows: `$1` is that file, the rest a program. A file that
/// is not there cannot be mounted over, so then `/etc` becomes a copy that has one.
const ENTER: &str = r#"set -e
list=$1; shift
if [ ! -e /etc/ld.so.preload ]; then
  cp -a /etc "$(dirname "$list")/etc" 2>/dev/null || true
  : > "$(dirname "$list")/etc/ld.so.preload"
  mount --bind "$(dirname "$list")/etc" /etc
fi
mount --bind "$list" /etc/ld.so.preload
exec "$@"
"#;

/// What everything runs with.
#[derive(Debug)]
pub(crate) struct Stage {
    folder: tempfile::TempDir,
    stub: PathBuf,
    gpu: String,
    /// Variables of every program.
    pub(crate) env: Vec<(String, String)>,
}

/// A share that programs run in.
#[derive(Debug, Clone)]
pub(crate) struct Share {
    /// The stub of the limiter's copy that takes it for its own.
    stub: PathBuf,
    /// A list of preloaded libraries with that stub.
    list: PathBuf,
    region: PathBuf,
}

impl Share {
    /// Bytes charged to it.
    pub(crate) fn charged(&self) -> Result<u64> {
        let bytes = std::fs::read(&self.region)?;
        let view = RegionView::parse(&bytes).map_err(|e| anyhow::anyhow!("{e}"))?;
        Ok(view.total_bytes())
    }
}

impl Stage {
    /// With the limiter's files in `hook`, on the GPU of this UUID, whose driver lies in these roots.
    pub(crate) fn new(hook: &Path, gpu: &str, roots: &Roots) -> Result<Self> {
        let stub = hook.join("libaliquot_preload.so").canonicalize();
        let stub =
            stub.with_context(|| format!("{}/libaliquot_preload.so: build the limiter", hook.display()))?;
        ensure!(
            stub.with_file_name("libaliquot_core.so").is_file(),
            "libaliquot_core.so is not beside {stub:?}"
        );
        let folder = tempfile::tempdir()?;
        let mut env = vec![("CUDA_VISIBLE_DEVICES".to_owned(), gpu.to_owned())];
        // A driver in the root of the machine is found as every program finds it.
        if roots.driver != Path::new("/") {
            let libraries = folder.path().join("driver");
            link_driver(roots, &libraries)?;
            let mut all = libraries.display().to_string();
            // An empty name would be the working directory.
            if let Some(others) = std::env::var("LD_LIBRARY_PATH").ok().filter(|others| !others.is_empty()) {
                all = format!("{all}:{others}");
            }
            env.push(("LD_LIBRARY_PATH".to_owned(), all));
        }
        Ok(Self { folder, stub, gpu: gpu.to_owned(), env })
    }

    /// Lays a new share out.
    pub(crate) fn share(&self, id: &str, memory_bytes: u64, cores_percent: u8) -> Result<Share> {
        let of_agent = self.folder.path().join("shares").join(id);
        let root = self.folder.path().join(format!("root-{id}"));
        for old in [&of_agent, &root] {
            if old.exists() {
                std::fs::remove_dir_all(old)?;
            }
        }
        let (quota_dir, region_dir) = (of_agent.join("quota"), of_agent.join("region"));
        for folder in [&quota_dir, &region_dir, &root.join("quota"), &root.join("region")] {
            std::fs::create_dir_all(folder)?;
        }
        let uuid = GpuUuid::new(&self.gpu).map_err(|e| anyhow::anyhow!("{}: {e}", self.gpu))?;
        let quota = QuotaFile { memory_bytes, cores_percent, ..QuotaFile::new(uuid) };
        std::fs::write(quota_dir.join("quota"), quota.encode())?;
        make_grant(&quota_dir)?;
        let mut bytes = vec![0; REGION_FILE_SIZE];
        let header = initial_header();
        bytes.get_mut(..header.len()).context("a region is larger than its header")?.copy_from_slice(&header);
        let region = region_dir.join("region");
        std::fs::write(&region, bytes)?;
        std::fs::set_permissions(&region, PermissionsExt::from_mode(0o666))?;
        symlink(&quota_dir, root.join("quota").join(id))?;
        symlink(&region_dir, root.join("region").join(id))?;
        let limiter = self.stub.parent().context("no folder of the limiter")?;
        let stub = limiter_at(&root, limiter, &root.join("limiter"))?;
        let list = root.join("ld.so.preload");
        std::fs::write(&list, format!("{}\n", stub.display()))?;
        Ok(Share { stub, list, region })
    }

    /// A program in a share.
    pub(crate) fn command(&self, mode: Mode, share: Option<&Share>, program: &[String]) -> Result<Command> {
        let (name, arguments) = program.split_first().context("no program")?;
        let mut command = match mode {
            Mode::Bare | Mode::Preloaded => {
                let mut command = Command::new(name);
                command.args(arguments);
                command
            }
            Mode::Unshared => {
                let mut command = Command::new("unshare");
                command.args([
                    "-p",
                    "-m",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                    "/bin/sh",
                    "-c",
                    ENTER,
                    "sh",
                ]);
                let empty = self.folder.path().join("empty");
                std::fs::write(&empty, "")?;
                command.arg(share.map_or(&empty, |share| &share.list)).arg(name).args(arguments);
                command
            }
        };
        if mode == Mode::Preloaded {
            command.env("LD_PRELOAD", share.map_or(&self.stub, |share| &share.stub));
        }
        for (name, value) in &self.env {
            command.env(name, value);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }

    /// Starts one of our own roles.
    pub(crate) fn tenant(&self, mode: Mode, share: Option<&Share>, role: &[&str]) -> Result<Running> {
        let own = std::env::current_exe()?.display().to_string();
        let words: Vec<String> =
            [own.as_str(), "tenant"].iter().chain(role).map(|word| (*word).to_owned()).collect();
        Running::start(self.command(mode, share, &words)?)
    }

    /// Runs a role to its end; what it said last.
    pub(crate) fn run(&self, mode: Mode, share: Option<&Share>, role: &[&str]) -> Result<Value> {
        self.tenant(mode, share, role)?.finish()
    }

    /// Does something while the node agent's arbiter looks at all shares.
    pub(crate) fn with_arbiter<T>(&self, part: impl FnOnce() -> T) -> T {
        let is_over = Arc::new(AtomicBool::new(false));
        let (mut keeper, stop) =
            (Keeper::new(&self.folder.path().join("shares"), Duration::ZERO), Arc::clone(&is_over));
        let agent = std::thread::spawn(move || {
            while !stop.load(Relaxed) {
                let pause = keeper.tick(now_ns());
                std::thread::sleep(pause.min(Duration::from_millis(20)));
            }
        });
        let result = part();
        is_over.store(true, Relaxed);
        // It only sleeps and reads files.
        let _ = agent.join();
        result
    }

    /// Forgets shares, so that the arbiter of the next case does not see them.
    pub(crate) fn clear(&self) -> Result<()> {
        let shares = self.folder.path().join("shares");
        if shares.exists() {
            std::fs::remove_dir_all(shares)?;
        }
        Ok(())
    }
}

/// Links the driver's own libraries into a new folder. The image of a driver has a C library beside them, with which
/// no program of this machine would start.
fn link_driver(roots: &Roots, folder: &Path) -> Result<()> {
    std::fs::create_dir(folder)?;
    let found = DriverFiles::discover(roots);
    let mut linked = BTreeSet::new();
    for file in found.libraries.iter().filter(|file| !file.compat32) {
        let library = file.host.canonicalize().with_context(|| file.host.display().to_string())?;
        // The same names are in several directories of a container.
        for name in file.container.iter().filter_map(|path| Path::new(path).file_name()) {
            if linked.insert(name) {
                symlink(&library, folder.join(name))?;
            }
        }
    }
    Ok(())
}

/// Longest life of a program: a driver that hangs must not use up the machine's time.
pub(crate) const LONGEST: Duration = Duration::from_secs(90);

/// A program that was started.
pub(crate) struct Running {
    child: Child,
    is_over: Arc<AtomicBool>,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Running {
    fn start(mut command: Command) -> Result<Self> {
        let mut child = command.spawn().with_context(|| format!("{:?}", command.get_program()))?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().context("no output")?);
        let is_over = Arc::new(AtomicBool::new(false));
        let (seen, pid, start) = (Arc::clone(&is_over), child.id(), Instant::now());
        std::thread::spawn(move || {
            while !seen.load(Relaxed) {
                if life::must_end(start, LONGEST).is_some() {
                    return crate::driver::kill(pid);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Ok(Self { child, is_over, stdin, stdout })
    }

    /// The next line that it says.
    pub(crate) fn says(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.stdout.read_line(&mut line)? == 0 {
            life::check()?;
            let mut said = String::new();
            if let Some(mut errors) = self.child.stderr.take() {
                use std::io::Read;
                let _ = errors.read_to_string(&mut said);
            }
            anyhow::bail!("the program ended ({}): {}", self.child.wait()?, said.trim());
        }
        serde_json::from_str(&line).with_context(|| line.trim().to_owned())
    }

    /// Lets it go on.
    pub(crate) fn go_on(&mut self) -> Result<()> {
        if let Some(stdin) = &mut self.stdin {
            stdin.write_all(b"\n")?;
            stdin.flush()?;
        }
        Ok(())
    }

    /// Lets it go on to its end; what it said last.
    pub(crate) fn finish(mut self) -> Result<Value> {
        drop(self.stdin.take());
        let mut last = self.says()?;
        while let Ok(next) = self.says() {
            last = next;
        }
        Ok(last)
    }

    /// SIGKILL, to it and nothing else.
    pub(crate) fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        // Whoever is still there was left behind by an error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;

    #[test]
    fn of_the_image_of_a_driver_programs_get_the_drivers_libraries_alone() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        let libraries = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
        std::fs::create_dir_all(&libraries).unwrap();
        for name in ["libcuda.so.580.95.05", "libnvidia-ml.so.580.95.05", "libc.so.6", "libm.so.6"] {
            std::fs::write(libraries.join(name), "").unwrap();
        }
        symlink("libcuda.so.580.95.05", libraries.join("libcuda.so.1")).unwrap();
        let roots = Roots { driver: root.clone(), host: root.clone(), proc: root.join("proc") };
        let folder = dir.path().join("driver");
        link_driver(&roots, &folder).unwrap();
        let library = libraries.join("libcuda.so.580.95.05").canonicalize().unwrap();
        assert_eq!(std::fs::read_link(folder.join("libcuda.so.1")).unwrap(), library);
        assert!(folder.join("libnvidia-ml.so.1").is_file());
        for other in ["libc.so.6", "libm.so.6"] {
            assert!(!folder.join(other).exists(), "{other}");
        }
    }
}
