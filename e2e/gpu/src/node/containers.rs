//! Containers with the edits of our CDI specs: by runc or crun where one works, else by `aliquot-sim-kubelet`.
//!
//! Their root has the C library, the probe and nothing else of this machine, so whatever of the driver a program needs
//! has come by the spec.

use super::groups;
use crate::life::{self, drain, said};
use aliquot_cdi::{ContainerEdits, HookName};
use aliquot_sim_kubelet::cdi;
use aliquot_sim_kubelet::container::{self, Bind, ContainerSpec, Isolation};
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// Where the probe is in a container.
pub(crate) const PROBE: &str = "/usr/local/bin/cuda-probe";
const PATH: &str = "PATH=/usr/local/bin:/usr/bin:/bin";
/// What programs and the driver's libraries take of a C library.
const C_LIBRARY: [&str; 7] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libresolv.so.2",
    "libgcc_s.so.1",
];
const LOADERS: [&str; 2] = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];
/// OCI runtimes, in the order in which they are tried.
const OCI: [&str; 2] = ["runc", "crun"];
/// Longest life of a container.
const LONGEST: Duration = Duration::from_secs(120);
/// How often is looked whether one has to end.
const LOOK: Duration = Duration::from_millis(50);

/// Which runtime is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Choice {
    /// The first that works.
    Auto,
    /// runc.
    Runc,
    /// crun.
    Crun,
    /// Our own, in a mount namespace.
    Own,
}

/// A place for containers and a runtime.
#[derive(Debug)]
pub(crate) struct Containers {
    folder: PathBuf,
    /// `runc` or `crun`; none is our own.
    runtime: Option<&'static str>,
    /// Why no runtime before this one was taken.
    pub(crate) others: Vec<String>,
    number: std::cell::Cell<u32>,
}

/// A container that runs until it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    child: Child,
    /// Its first line.
    pub(crate) said: Value,
}

impl Containers {
    /// Lays a root out in `folder` and looks for a runtime that works.
    pub(crate) fn new(folder: &Path, probe: &Path, choice: Choice) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "containers with device nodes need root");
        fill(&folder.join("rootfs"), probe)?;
        let [runc, crun] = OCI.map(Some);
        let tried = match choice {
            Choice::Auto => vec![runc, crun, None],
            Choice::Runc => vec![runc],
            Choice::Crun => vec![crun],
            Choice::Own => vec![None],
        };
        let mut others = Vec::new();
        for runtime in tried {
            life::check()?;
            let candidate =
                Self { folder: folder.to_owned(), runtime, others: others.clone(), number: 0.into() };
            // An option that the probe does not know: it says so and ends with 2.
            match candidate.run(&ContainerEdits::default(), &[PROBE, "--help"]) {
                Ok(output) if output.status.code() == Some(2) => return Ok(candidate),
                Ok(output) => others.push(format!("{}: {}", candidate.name(), said(&output))),
                Err(error) => others.push(format!("{}: {error:#}", candidate.name())),
            }
        }
        bail!("no container can be started here: {}", others.join("; "))
    }

    /// Of the runtime.
    pub(crate) fn name(&self) -> &'static str {
        self.runtime.unwrap_or("our own, in a mount namespace")
    }

    /// Runs a program in a container to its end.
    pub(crate) fn run(&self, edits: &ContainerEdits, argv: &[&str]) -> Result<Output> {
        life::output(&mut self.command(edits, argv)?, LONGEST)
    }

    /// Starts a program that says a line of JSON and stays.
    pub(crate) fn hold(&self, edits: &ContainerEdits, argv: &[&str]) -> Result<Held> {
        let mut command = self.command(edits, argv)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = Instant::now();
        let mut child =
            command.spawn().with_context(|| format!("{:?} does not start", command.get_program()))?;
        let out = child.stdout.take().context("no output")?;
        let err = drain(child.stderr.take());
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = BufReader::new(out).read_line(&mut line);
            let _ = send.send(line);
        });
        let line = loop {
            match receive.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) if life::must_end(started, LONGEST).is_none() => {}
                said => break said.unwrap_or_default(),
            }
        };
        let mut held = Held { child, said: Value::Null };
        match serde_json::from_str(&line) {
            Ok(value) => held.said = value,
            Err(_) => {
                drop(held);
                let said = err.join().unwrap_or_default();
                bail!("{argv:?} said {:?}: {}", line.trim(), String::from_utf8_lossy(&said).trim());
            }
        }
        Ok(held)
    }

    fn command(&self, edits: &ContainerEdits, argv: &[&str]) -> Result<Command> {
        self.number.set(self.number.get() + 1);
        match self.runtime {
            Some(runtime) => self.by_oci(runtime, edits, argv),
            None => self.by_own(edits, argv),
        }
    }

    fn by_own(&self, edits: &ContainerEdits, argv: &[&str]) -> Result<Command> {
        let (binds, nodes, hooks): (Vec<Bind>, _, _) = cdi::apply(edits)?;
        let env = std::iter::once(PATH).chain(edits.env.iter().map(String::as_str));
        let env: BTreeMap<String, String> = env
            .filter_map(|entry| entry.split_once('='))
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .collect();
        let spec = ContainerSpec {
            scratch: self.folder.clone(),
            isolation: Isolation::Root,
            root: Some(self.folder.join("rootfs")),
            binds,
            nodes,
            hooks,
            env,
            before: Vec::new(),
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        };
        let path = self.folder.join(format!("own-{}.json", self.number.get()));
        std::fs::write(&path, serde_json::to_vec_pretty(&spec)?)?;
        Ok(container::command(&std::env::current_exe()?, &path))
    }

    fn by_oci(&self, runtime: &str, edits: &ContainerEdits, argv: &[&str]) -> Result<Command> {
        std::fs::write(self.folder.join("config.json"), config(edits, argv)?.to_string())?;
        let mut command = Command::new(runtime);
        command.arg("--root").arg(state(&self.folder, runtime)).args(["run", "--bundle"]).arg(&self.folder);
        command.arg(format!("{}-{}", groups::name_of(&self.folder), self.number.get()));
        Ok(command)
    }
}

impl Drop for Containers {
    fn drop(&mut self) {
        forget(&self.folder);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let kill = |pid: u32, signal| {
            i32::try_from(pid).map(|pid| nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal))
        };
        // An OCI runtime hands it on to the container; killed, it would leave the container behind.
        let _ = kill(self.child.id(), nix::sys::signal::Signal::SIGTERM);
        for _ in 0..1000 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where a runtime keeps what it knows of containers.
fn state(folder: &Path, runtime: &str) -> PathBuf {
    folder.join(format!("state-{runtime}"))
}

/// Has the runtimes forget containers, with their control groups, that nobody ended in order.
pub(crate) fn forget(folder: &Path) {
    for runtime in OCI {
        let state = state(folder, runtime);
        for container in std::fs::read_dir(&state).into_iter().flatten().flatten() {
            let mut command = Command::new(runtime);
            command.arg("--root").arg(&state).args(["delete", "--force"]).arg(container.file_name());
            match life::output(&mut command, LONGEST) {
                Ok(output) if output.status.success() => {}
                Ok(output) => eprintln!("gpu-check: {runtime} delete: {}", said(&output)),
                Err(error) => eprintln!("gpu-check: {error:#}"),
            }
        }
    }
    groups::remove(folder);
}

/// A root with this machine's C library and the probe.
fn fill(root: &Path, probe: &Path) -> Result<()> {
    let put = |from: &Path, to: &Path| -> Result<()> {
        let to = root.join(to.strip_prefix("/").unwrap_or(to));
        std::fs::create_dir_all(to.parent().context("no folder")?)?;
        std::fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    };
    for name in ["proc", "sys", "dev", "tmp", "etc", "run", "usr/bin"] {
        std::fs::create_dir_all(root.join(name))?;
    }
    put(probe, Path::new(PROBE))?;
    // This program has it loaded, wherever it is on this machine.
    let maps = std::fs::read_to_string("/proc/self/maps").context("cannot read /proc/self/maps")?;
    let files = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(Path::new);
    let libc = files.filter(|path| path.ends_with("libc.so.6")).find_map(Path::parent);
    let libc = libc.context("this program has no libc.so.6, so what the container needs is not known")?;
    for name in C_LIBRARY {
        let path = libc.join(name);
        if path.exists() {
            put(&path, &path)?;
        }
    }
    for loader in LOADERS.map(Path::new) {
        if loader.exists() {
            put(loader, loader)?;
        }
    }
    Ok(())
}

/// The configuration of a container for an OCI runtime.
fn config(edits: &ContainerEdits, argv: &[&str]) -> Result<Value> {
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}),
        json!({"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]}),
        // CUDA looks at the processors and buses of the machine.
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]}),
    ];
    mounts.extend(edits.mounts.iter().map(|mount| {
        json!({
            "destination": mount.container_path, "type": "bind", "source": mount.host_path,
            "options": mount.options,
        })
    }));
    // As runtimes have it: what lies deeper is mounted later.
    mounts.sort_by_key(|mount| mount["destination"].as_str().map_or(0, |path| path.matches('/').count()));
    let (mut devices, mut rules) = (Vec::new(), vec![json!({"allow": false, "access": "rwm"})]);
    for node in &edits.device_nodes {
        let (Some(major), Some(minor)) = (node.major, node.minor) else {
            bail!("{} has no number in the spec", node.path);
        };
        let kind = node.device_type.as_deref().unwrap_or("c");
        devices.push(json!({
            "path": node.path, "type": kind, "major": major, "minor": minor, "fileMode": 0o666,
        }));
        let access = node.permissions.as_deref().unwrap_or("rwm");
        rules.push(json!({
            "allow": true, "type": kind, "major": major, "minor": minor, "access": access,
        }));
    }
    let create = edits.hooks.iter().filter(|hook| hook.hook_name == HookName::CreateContainer);
    let hooks: Vec<Value> =
        create.map(|hook| json!({"path": hook.path, "args": hook.args, "env": hook.env})).collect();
    let env: Vec<&str> = std::iter::once(PATH).chain(edits.env.iter().map(String::as_str)).collect();
    let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({"type": kind}));
    Ok(json!({
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": argv, "env": env, "cwd": "/", "noNewPrivileges": true},
        "root": {"path": "rootfs"},
        "mounts": mounts,
        "hooks": {"createContainer": hooks},
        "linux": {"devices": devices, "resources": {"devices": rules}, "namespaces": namespaces},
    }))
}
