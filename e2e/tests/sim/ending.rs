//! However a demo ends, nothing of it lives on, and its files go at the latest with the next one.

use super::{Build, ONE_SHARE, directory, output};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use rstest::rstest;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// What a machine under load may take for what needs a moment.
const LONG: Duration = Duration::from_secs(120);

/// A process: an id, and when it started, as ids come back.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    pid: i32,
    started: String,
}

/// Every process that has not ended, with its parent's id.
fn processes() -> Result<Vec<(Process, i32, String)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
        // Processes end while one looks.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let (Some((_, fields)), Some(name)) = (stat.rsplit_once(')'), stat.split(['(', ')']).nth(1)) else {
            continue;
        };
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let (Some(state), Some(parent), Some(started)) = (fields.first(), fields.get(1), fields.get(19))
        else {
            continue;
        };
        if !["Z", "X"].contains(state) {
            let process = Process { pid, started: (*started).to_owned() };
            found.push((process, parent.parse()?, name.to_owned()));
        }
    }
    Ok(found)
}

/// All descendants of a process, by name.
fn descendants(of: i32) -> Result<Vec<(Process, String)>> {
    let all = processes()?;
    let (mut parents, mut found) = (BTreeSet::from([of]), Vec::new());
    loop {
        let children: Vec<_> = all
            .iter()
            .filter(|(process, parent, _)| parents.contains(parent) && !parents.contains(&process.pid))
            .collect();
        if children.is_empty() {
            return Ok(found);
        }
        parents.extend(children.iter().map(|(process, ..)| process.pid));
        found.extend(children.into_iter().map(|(process, _, name)| (process.clone(), name.clone())));
    }
}

/// A program that takes no hint, with another one beside it that is in a session of its own. It says nothing, so the demo
/// waits a while for it.
const STUBBORN: &str = r#"[sh, -c, "trap '' TERM HUP INT; setsid sleep 971 & exec sleep 970"]"#;

/// A demo whose container runs a program; its process and all that it started.
fn running_demo(build: &Build, dir: &Path) -> Result<(Child, Vec<(Process, String)>)> {
    let stubborn =
        ONE_SHARE.replace("    image: none\n", &format!("    image: none\n    command: {STUBBORN}\n"));
    std::fs::write(dir.join("one.yaml"), ONE_SHARE)?;
    std::fs::write(dir.join("stubborn.yaml"), stubborn)?;
    std::fs::write(dir.join("fleet.yaml"), "nodes:\n- name: small\n  gpus: [{board: T4}]\n")?;
    let mut command = build.demo(dir, &["-f", "stubborn.yaml", "--fleet", "fleet.yaml"]);
    let mut demo = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let started = Instant::now();
    loop {
        let found = descendants(i32::try_from(demo.id())?)?;
        if found.iter().filter(|(_, name)| name == "sleep").count() == 2 {
            ensure!(found.len() >= 6, "controller, node agent, container and programs: {found:?}");
            return Ok((demo, found));
        }
        if demo.try_wait()?.is_some() || started.elapsed() > LONG {
            demo.kill().ok();
            let out = demo.wait_with_output()?;
            anyhow::bail!("no program ran: {}", String::from_utf8_lossy(&out.stderr));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn send(demo: &Child, signal: Signal) -> Result<()> {
    signal::kill(Pid::from_raw(i32::try_from(demo.id())?), signal).context("signal")
}

/// Those of them that run.
fn alive(of: &[(Process, String)]) -> Result<Vec<String>> {
    let all: BTreeSet<Process> = processes()?.into_iter().map(|(process, ..)| process).collect();
    Ok(of.iter().filter(|(process, _)| all.contains(process)).map(|(_, name)| name.clone()).collect())
}

/// Directories of runs in the usual place for temporary files.
fn runs(dir: &Path) -> Result<Vec<String>> {
    let names = std::fs::read_dir(dir)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect::<Result<_>>()?;
    Ok(names.into_iter().filter(|name| name.starts_with("aliquot-")).collect())
}

#[rstest]
#[case::terminated(Signal::SIGTERM)]
#[case::interrupted(Signal::SIGINT)]
#[case::hung_up(Signal::SIGHUP)]
fn sim_a_demo_that_is_told_to_end_takes_everything_with_it(#[case] signal: Signal) -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let (demo, children) = running_demo(&build, dir.path())?;
    send(&demo, signal)?;
    let ended = demo.wait_with_output()?;
    let (alive, left) = (alive(&children)?, runs(dir.path())?);
    ensure!(alive.is_empty(), "still running: {alive:?}");
    ensure!(left.is_empty(), "left: {left:?}");
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(!ended.status.success() && said.contains(signal.as_str()), "said: {said}");
    Ok(())
}

#[test]
fn sim_what_a_killed_demo_started_ends_and_the_next_demo_removes_its_files() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let (demo, children) = running_demo(&build, dir.path())?;
    send(&demo, Signal::SIGKILL)?;
    demo.wait_with_output()?;
    let started = Instant::now();
    while !alive(&children)?.is_empty() {
        ensure!(started.elapsed() < LONG, "still running: {:?}", alive(&children)?);
        std::thread::sleep(Duration::from_millis(20));
    }
    ensure!(runs(dir.path())?.len() == 1, "nobody was there to remove its files");
    let next = output(build.demo(dir.path(), &["-f", "one.yaml", "--fleet", "fleet.yaml"]))?;
    ensure!(next.status.success(), "{}", String::from_utf8_lossy(&next.stderr));
    ensure!(runs(dir.path())?.is_empty(), "left: {:?}", runs(dir.path())?);
    Ok(())
}
