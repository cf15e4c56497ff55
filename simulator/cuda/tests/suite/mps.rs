//! Who gets a context on a GPU in exclusive mode, with NVIDIA's own control daemon and without one.
#![allow(unsafe_code, reason = "the tests call a C library")]

use crate::common::{Cuda, Process, TestNode, at, role};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const EXCLUSIVE_PROCESS: u32 = 3;
const UNAVAILABLE: &str = "46";

/// Plays a program that opens and closes a context.
fn program() {
    let cuda = Cuda::start();
    crate::common::serve(|line| match line {
        "open" => cuda.call("cuDevicePrimaryCtxRetain", &[at(&mut 0_u64), 0]).to_string(),
        "close" => cuda.call("cuDevicePrimaryCtxRelease_v2", &[0]).to_string(),
        _ => {
            let mut client = -1;
            cuda.ok("cuDeviceGetAttribute", &[at(&mut client), 133, 0]);
            client.to_string()
        }
    });
}

/// NVIDIA's program, or why there is none.
fn control() -> Result<PathBuf, String> {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/real-driver");
    let said = Command::new(tool).args(["bookworm", "files"]).output().map_err(|error| error.to_string())?;
    if !said.status.success() {
        return Err(format!("tools/real-driver: {}", String::from_utf8_lossy(&said.stderr).trim()));
    }
    Ok(Path::new(String::from_utf8(said.stdout).unwrap().trim()).join("usr/bin/nvidia-cuda-mps-control"))
}

/// A control daemon in a directory of its own.
struct Daemon {
    child: Child,
    directory: PathBuf,
}

impl Daemon {
    fn start(program: &Path, directory: PathBuf) -> Self {
        std::fs::create_dir(&directory).unwrap();
        let mut command = Command::new(program);
        command
            .arg("-f")
            .env("CUDA_MPS_PIPE_DIRECTORY", &directory)
            .env("CUDA_MPS_LOG_DIRECTORY", &directory);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let mut daemon = Self { child, directory };
        while !daemon.answers(program) {
            assert!(daemon.child.try_wait().unwrap().is_none(), "the daemon has ended");
            std::thread::sleep(Duration::from_millis(20));
        }
        daemon
    }

    fn answers(&self, program: &Path) -> bool {
        let mut command = Command::new(program);
        command.env("CUDA_MPS_PIPE_DIRECTORY", &self.directory);
        command.stdin(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(node: &TestNode, directory: &Path) -> Process {
    let mut command = node.command("program");
    command.env("CUDA_MPS_PIPE_DIRECTORY", directory);
    Process::start(command)
}

#[test]
fn clients_of_one_control_daemon_share_an_exclusive_gpu_and_others_get_no_context() {
    if role().is_some() {
        return program();
    }
    let control = match control() {
        Ok(control) => control,
        Err(reason) => return println!("SKIPPED: MPS clients: {reason}"),
    };
    let node = TestNode::of(&["T4"]);
    node.node.set_compute_mode(0, EXCLUSIVE_PROCESS).unwrap();
    let daemons = ["one", "two"].map(|name| Daemon::start(&control, node.dir().join(name)));
    let mut clients = [(); 3].map(|()| spawn(&node, &daemons[0].directory));
    let mut foreign = spawn(&node, &daemons[1].directory);
    let mut alone = spawn(&node, &node.dir().join("nobody"));
    assert_eq!(clients.each_mut().map(|client| client.ask("client")), ["1"; 3]);
    assert_eq!(alone.ask("client"), "0");
    assert_eq!(clients.each_mut().map(|client| client.ask("open")), ["0"; 3]);
    assert_eq!((alone.ask("open"), foreign.ask("open")), (UNAVAILABLE.into(), UNAVAILABLE.into()));
    assert_eq!(clients.each_mut().map(|client| client.ask("close")), ["0"; 3]);
    assert_eq!(alone.ask("open"), "0", "nobody has the GPU");
    assert_eq!(clients[0].ask("open"), UNAVAILABLE, "the daemon's server cannot have it either");
    clients.into_iter().chain([foreign, alone]).for_each(Process::finish);
}

#[test]
fn a_directory_of_a_control_daemon_that_is_gone_makes_nobody_a_client() {
    if role().is_some() {
        return program();
    }
    let node = TestNode::of(&["T4"]);
    node.node.set_compute_mode(0, EXCLUSIVE_PROCESS).unwrap();
    let directory = node.dir().join("pipe");
    std::fs::create_dir(&directory).unwrap();
    // A socket whose listener is gone.
    drop(std::os::unix::net::UnixListener::bind(directory.join("control")).unwrap());
    let [mut first, mut second] = [(); 2].map(|()| spawn(&node, &directory));
    assert_eq!(
        (first.ask("client"), first.ask("open"), second.ask("open")),
        ("0".into(), "0".into(), UNAVAILABLE.into())
    );
    first.finish();
    second.finish();
}
