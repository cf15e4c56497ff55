//! What the simulator assumes of a driver until it was seen, measured without the limiter.

use crate::driver::{Board, at, kill};
use crate::life;
use crate::stage::{LONGEST, Mode, Running, Stage};
use aliquot_kubelet_plugin::driver::find_program;
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;

/// Functions with a version of their own, as `base=symbol@version`.
const RESOLVED: [&str; 12] = [
    "cuMemAlloc=cuMemAlloc_v2@3020",
    "cuMemFree=cuMemFree_v2@3020",
    "cuMemGetInfo=cuMemGetInfo_v2@3020",
    "cuMemAllocAsync=cuMemAllocAsync@11020",
    "cuMemCreate=cuMemCreate@10020",
    "cuLaunchKernel=cuLaunchKernel@4000",
    "cuLaunchKernelEx=cuLaunchKernelEx@11060",
    "cuGraphLaunch=cuGraphLaunch@10000",
    "cuCtxCreate=cuCtxCreate_v2@3020",
    "cuDevicePrimaryCtxRetain=cuDevicePrimaryCtxRetain@7000",
    "cuModuleLoadData=cuModuleLoadData@2000",
    "cuGetProcAddress=cuGetProcAddress_v2@12000",
];

/// All facts; one that cannot be had is its error's text. Programs of the driver are those of its root.
pub(crate) fn all(
    stage: &Stage,
    board: &Board,
    driver_root: &Path,
    quick: bool,
    can_unshare: bool,
) -> Map<String, Value> {
    type Fact<'a> = (&'static str, Box<dyn Fn() -> Result<Value> + 'a>);
    let millis = if quick { 300 } else { 3000 };
    // Less than any context, and more than a driver takes for itself once it was used. Where the memory cannot be
    // read, what needs it says so.
    let idle = board.memory().map_or(u64::MAX, |(_, used)| used + (64 << 20));
    let facts: [Fact<'_>; 12] = [
        ("nvml_pids", Box::new(move || nvml_pids(stage, board, can_unshare))),
        ("resolver", Box::new(|| resolver(stage))),
        ("context_bytes", Box::new(move || context(stage, board, idle))),
        ("event_of_1ms_kernel", Box::new(move || events(stage, millis))),
        ("time_slices", Box::new(move || slices(stage, quick))),
        ("release_after_sigkill", Box::new(move || release(stage, board, idle))),
        ("exported_memory", Box::new(move || exported(stage, board, idle))),
        ("fabric", Box::new(|| fabric(board))),
        ("persistence", Box::new(|| persistence(board))),
        ("mps", Box::new(|| mps(of_driver(stage, driver_root, "nvidia-cuda-mps-control")))),
        ("mig_profiles", Box::new(|| mig(of_driver(stage, driver_root, "nvidia-smi"), "-lgip"))),
        ("mig_placements", Box::new(|| mig(of_driver(stage, driver_root, "nvidia-smi"), "-lgipp"))),
    ];
    let say = |fact: &Fact<'_>| {
        life::check().and_then(|()| fact.1()).unwrap_or_else(|e| json!({"unknown": format!("{e:#}")}))
    };
    facts.iter().map(|fact| (fact.0.to_owned(), say(fact))).collect()
}

/// Under which pids NVML lists processes, outside and inside a pid namespace.
fn nvml_pids(stage: &Stage, board: &Board, can_unshare: bool) -> Result<Value> {
    let before: Vec<u32> = board.processes()?.iter().map(|(pid, _)| *pid).collect();
    let mut holder = stage.tenant(Mode::Bare, None, &["device"])?;
    let pid = pid_of(&holder.says()?)?;
    let listed = board.processes()?;
    let outside = json!({
        "lists_process_by_its_pid": listed.iter().any(|(listed, _)| *listed == pid),
        "counts_its_memory": listed.iter().any(|(listed, bytes)| *listed == pid && bytes.is_some()),
        "processes_before": before.len(), "processes_now": listed.len(),
    });
    let inside = if can_unshare {
        let seen = stage.run(Mode::Unshared, None, &["processes"])?;
        let pids = seen.get("pids").and_then(Value::as_array).cloned().unwrap_or_default();
        json!({"seen": seen, "lists_the_process_outside_by_its_host_pid": pids.contains(&json!(pid))})
    } else {
        json!({"unknown": "namespaces cannot be made here"})
    };
    Ok(json!({"outside": outside, "inside_a_pid_namespace": inside}))
}

fn pid_of(said: &Value) -> Result<u32> {
    let pid = said.get("pid").and_then(Value::as_u64).context("no pid")?;
    Ok(u32::try_from(pid)?)
}

fn resolver(stage: &Stage) -> Result<Value> {
    let role: Vec<&str> = ["resolver"].into_iter().chain(RESOLVED).collect();
    stage.run(Mode::Bare, None, &role)
}

/// What a first context takes.
fn context(stage: &Stage, board: &Board, idle: u64) -> Result<Value> {
    until_idle(board, idle)?;
    let (_, before) = board.memory()?;
    let mut holder = stage.tenant(Mode::Bare, None, &["device"])?;
    let pid = pid_of(&holder.says()?)?;
    let (_, with) = board.memory()?;
    let of_process = board.processes()?.into_iter().find(|(listed, _)| *listed == pid).and_then(|(_, b)| b);
    Ok(json!({"of_gpu": with.saturating_sub(before), "of_process": of_process}))
}

/// What events show of a kernel of a millisecond, alone and beside a busy process.
fn events(stage: &Stage, millis: u64) -> Result<Value> {
    let alone = stage.run(Mode::Bare, None, &["event", "1000", "50"])?;
    let mut hog = stage.tenant(Mode::Bare, None, &["spin", "5000", &(millis * 10).to_string()])?;
    hog.says()?;
    let beside = stage.run(Mode::Bare, None, &["event", "1000", "50"])?;
    hog.kill()?;
    Ok(json!({"alone": alone, "beside_a_busy_process": beside}))
}

/// How long a process is interrupted by a busy one.
fn slices(stage: &Stage, quick: bool) -> Result<Value> {
    let mut hog = stage.tenant(Mode::Bare, None, &["spin", "5000", "20000"])?;
    hog.says()?;
    let found = stage.run(Mode::Bare, None, &["slices", "100", if quick { "300" } else { "2000" }])?;
    hog.kill()?;
    Ok(found)
}

/// Waits until the GPU's memory in use is so low; how long that took. `None` if it is not after ten seconds.
fn until_used(board: &Board, most: u64) -> Result<Option<f64>> {
    let start = Instant::now();
    loop {
        // Looked at once more after the time, as a machine may stand still meanwhile.
        let is_last = start.elapsed() > Duration::from_secs(10);
        if board.memory()?.1 <= most {
            return Ok(Some(start.elapsed().as_secs_f64() * 1000.0));
        }
        if is_last {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until nothing is left in use of processes that ended: what they had stays for a while.
fn until_idle(board: &Board, idle: u64) -> Result<()> {
    until_used(board, idle)?.map(drop).context("memory of processes that have ended stays in use")
}

fn holding(stage: &Stage) -> Result<(Running, Value)> {
    let mut holder = stage.tenant(Mode::Bare, None, &["hold", &GIB.to_string()])?;
    let said = holder.says()?;
    Ok((holder, said))
}

/// How long a killed process's memory stays in use.
fn release(stage: &Stage, board: &Board, idle: u64) -> Result<Value> {
    until_idle(board, idle)?;
    let (_, before) = board.memory()?;
    let (holder, _) = holding(stage)?;
    let (_, with) = board.memory()?;
    ensure!(
        with >= before + GIB,
        "{before} bytes were in use before, {with} with a process that holds {GIB}"
    );
    holder.kill()?;
    Ok(json!({"ms": until_used(board, before + GIB / 2)?}))
}

/// Whether memory that another process opened outlives the killed process that made it.
fn exported(stage: &Stage, board: &Board, idle: u64) -> Result<Value> {
    until_idle(board, idle)?;
    let (exporter, said) = holding(stage)?;
    let handle = said.get("handle").and_then(Value::as_str).context("no handle")?.to_owned();
    let mut importer = stage.tenant(Mode::Bare, None, &["import", &handle])?;
    let opened = importer.says()?;
    let (_, with) = board.memory()?;
    kill(pid_of(&said)?);
    drop(exporter);
    std::thread::sleep(Duration::from_secs(3));
    let (_, after) = board.memory()?;
    importer.go_on()?;
    let read = importer.says()?;
    Ok(json!({
        "open_code": opened.get("open_code"), "read_code": read.get("read_code"),
        "bytes_released": with.saturating_sub(after), "bytes_exported": GIB,
    }))
}

/// What NVML says of the NVLink fabric, which the simulated one does not have.
fn fabric(board: &Board) -> Result<Value> {
    // nvmlGpuFabricInfo_t: 16 bytes of a cluster's id, a status, a clique, and a state in a byte.
    let mut info = [0_u32; 8];
    let code = board.nvml.call("nvmlDeviceGetGpuFabricInfo", &[board.device, at(&mut info)])?;
    let [.., status, clique, state, _] = info;
    Ok(json!({"code": code, "state": state & 0xff, "status": status, "clique": clique}))
}

fn persistence(board: &Board) -> Result<Value> {
    let mut mode = 0_u32;
    board.nvml.must("nvmlDeviceGetPersistenceMode", &[board.device, at(&mut mode)])?;
    Ok(json!(if mode == 0 { "off" } else { "on" }))
}

/// A program of the driver with the driver's libraries: that of its root, or where there is none the one in `PATH`.
fn of_driver(stage: &Stage, root: &Path, name: &str) -> Command {
    let mut command = Command::new(find_program(root, name).unwrap_or_else(|| name.into()));
    command.envs(stage.env.iter().map(|(name, value)| (name, value)));
    command
}

/// Whether there is the control daemon of MPS, and whether one runs where programs look for it.
fn mps(mut command: Command) -> Result<Value> {
    let version = life::output(command.arg("-v"), LONGEST).map(|output| life::said(&output));
    let pipes = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    let runs = Path::new(&pipes).join("control").exists();
    Ok(json!({"version": version.unwrap_or_else(|error| format!("{error:#}")), "one runs": runs}))
}

/// What nvidia-smi says of MIG profiles; nothing is changed.
fn mig(mut smi: Command, what: &str) -> Result<Value> {
    let output = life::output(smi.args(["mig", what]), LONGEST)?;
    let said = [output.stdout, output.stderr].concat();
    Ok(json!({"status": output.status.code(), "output": String::from_utf8_lossy(&said)}))
}
