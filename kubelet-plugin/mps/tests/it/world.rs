//! A supervisor, and an agent's side of its directory.

use aliquot_mps::contract::{Ask, AskedGpu, ClaimDir, ClaimRef, MpsDir, Phase, State, Version};
use aliquot_mps::processes::{Process, Table};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// A driver's real files, or why there are none.
pub(crate) fn real_files() -> Result<PathBuf, String> {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/real-driver");
    let said = Command::new(tool).args(["bookworm", "files"]).output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if said.status.success() {
        Ok(text(&said.stdout).into())
    } else {
        Err(format!("tools/real-driver: {}", text(&said.stderr)))
    }
}

/// A node: a directory that both share, a list of devices, and a driver.
pub(crate) struct World {
    temp: tempfile::TempDir,
    /// Under `/tmp`, over which an isolated daemon mounts its own.
    proc: tempfile::TempDir,
    pub(crate) dir: MpsDir,
    driver: PathBuf,
    isolated: bool,
    supervisor: Option<Child>,
}

impl World {
    pub(crate) fn new(driver: &Path, isolated: bool) -> Self {
        let temp = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let devices = "Character devices:\n195 nvidia\n195 nvidiactl\n508 nvidia-uvm\n\nBlock devices:\n";
        let proc = tempfile::tempdir().unwrap();
        fs::write(proc.path().join("devices"), devices).unwrap();
        let dir = MpsDir::new(temp.path().join("mps"));
        Self { dir, temp, proc, driver: driver.to_owned(), isolated, supervisor: None }
    }

    pub(crate) fn path(&self) -> &Path {
        self.temp.path()
    }

    /// The kernel's list of devices.
    pub(crate) fn devices(&self) -> PathBuf {
        self.proc.path().join("devices")
    }

    pub(crate) fn supervise(&mut self) {
        self.start_supervisor(Stdio::inherit());
        wait("the supervisor is seen", || self.dir.is_served().unwrap().then_some(()));
    }

    /// Starts one, which may serve nobody yet.
    pub(crate) fn start_supervisor(&mut self, log: Stdio) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aliquot-mps"));
        command.arg("--mps-dir").arg(self.dir.path()).arg("--driver-root").arg(&self.driver);
        command.arg("--host-root").arg("/").arg("--proc-root").arg(self.proc.path());
        if !self.isolated {
            command.arg("--without-isolation");
        }
        self.supervisor = Some(command.stderr(log).spawn().unwrap());
    }

    pub(crate) fn kill_supervisor(&mut self) {
        let mut child = self.supervisor.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Ends the supervisor as the kubelet does.
    pub(crate) fn terminate_supervisor(&mut self) -> bool {
        let mut child = self.supervisor.take().unwrap();
        kill(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
        child.wait().unwrap().success()
    }

    pub(crate) fn ask(&self, uid: &str, percent: Option<u32>, bytes: Option<u64>) -> ClaimDir {
        let claim = self.dir.claim(uid).unwrap();
        for dir in [claim.pipe(), claim.shm(), claim.log()] {
            fs::create_dir_all(dir).unwrap();
        }
        let gpus = [0, 1].map(|minor| AskedGpu { uuid: format!("GPU-{minor}"), minor });
        let name = ClaimRef { namespace: "ns".into(), name: "c".into(), uid: uid.into() };
        let ask = Ask {
            version: Version,
            claim: name,
            gpus: gpus.into(),
            active_thread_percentage: percent,
            pinned_device_memory_limit_bytes: bytes,
        };
        claim.write_ask(&ask).unwrap();
        claim
    }

    /// Asks the claim's daemon as a client would that has its directory of sockets.
    pub(crate) fn tell(&self, claim: &ClaimDir, text: &str) -> String {
        let child = self.start_telling(claim, text);
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
    }

    /// The same, without waiting for the answer.
    pub(crate) fn start_telling(&self, claim: &ClaimDir, text: &str) -> Child {
        let mut command = Command::new(self.driver.join("usr/bin/nvidia-cuda-mps-control"));
        command.env("CUDA_MPS_PIPE_DIRECTORY", claim.pipe()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        writeln!(child.stdin.take().unwrap(), "{text}").unwrap();
        child
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(mut child) = self.supervisor.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let mut table = Table::new(self.dir.path());
        table.look().unwrap();
        table.all().for_each(Process::kill);
    }
}

pub(crate) fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn state_of(claim: &ClaimDir, phase: Phase) -> State {
    let mut last = None;
    wait(&format!("{} is {phase:?}", claim.uid()), || {
        let state = claim.state().unwrap();
        if state != last {
            println!("{}: {state:?}", claim.uid());
            last.clone_from(&state);
        }
        state.filter(|state| state.state == phase)
    })
}

pub(crate) fn gone(claim: &ClaimDir) {
    wait("the state is gone", || claim.state().unwrap().is_none().then_some(()));
}

pub(crate) fn kill_hard(pid: u32) {
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL).unwrap();
}

pub(crate) fn lives(pid: u32) -> bool {
    // A zombie has no environment.
    fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environment| !environment.is_empty())
}
