//! `cuda-probe`: a CUDA program against the driver API, as a tenant would write one. For each device
//! it sees it allocates until CUDA refuses, says how much it got, and frees everything.
//!
//! It knows nothing of limits, simulators or Kubernetes: it loads `libcuda.so.1` like any program and
//! runs on real GPUs as well. One line of JSON per run on stdout; exit 1 with a reason when CUDA does
//! not start.
//!
//! `--hold` keeps the process (with its CUDA contexts) after the report, until SIGTERM or SIGINT, as a
//! service would stay;
//! `--watch` keeps it too, and prints a line with the memory of the first device whenever that is another;
//! `--occupy BYTES` takes just that much of each device instead, and keeps it meanwhile;
//! `--managed` takes managed memory (`cuMemAllocManaged`) instead of the device's own;
//! `--code BYTES` first runs code of that size, which takes memory that no call asks for, and waits ten seconds, in
//! which a node agent can notice (the simulated driver's code only);
//! `--direct` calls the driver past every library that stands in between, as a program does that sets out to evade
//! a limiter;
//! `--busy SECONDS` then launches kernels of a millisecond on the first device, as fast as it is let, and prints a
//! second line that says how much of the GPU's time they got.

mod cuda;
mod table;

use cuda::{Cuda, CudaError};
use nix::sys::signal::{SigSet, Signal};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Largest single allocation tried.
const FIRST_CHUNK: u64 = 1 << 30;
/// Smallest: the granularity at which drivers hand out memory.
const LAST_CHUNK: u64 = 2 << 20;

/// How long `--code` waits.
const NOTICE: Duration = Duration::from_secs(10);

/// How often `--watch` looks.
const LOOK: Duration = Duration::from_millis(200);

/// What `--watch` sees.
#[derive(Debug, Serialize, PartialEq, Eq)]
struct Memory {
    /// `cuDeviceTotalMem`.
    total_bytes: u64,
}

/// What the program found.
#[derive(Debug, Serialize)]
struct Report {
    devices: Vec<DeviceReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// One device.
#[derive(Debug, Serialize)]
struct DeviceReport {
    ordinal: i32,
    name: String,
    uuid: String,
    /// `cuDeviceTotalMem`.
    total_bytes: u64,
    /// `cuMemGetInfo` before anything was allocated.
    free_bytes: u64,
    /// Allocated when CUDA refused more, or as `--occupy` said.
    allocated_bytes: u64,
    /// How CUDA refused: 2 is CUDA_ERROR_OUT_OF_MEMORY. Absent if not so much was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused_with: Option<i32>,
}

/// What `--busy` found.
#[derive(Debug, Serialize)]
struct BusyReport {
    /// Kernels of a millisecond that ended.
    kernels: u64,
    /// From the first launch to the last end.
    seconds: f64,
    /// Part of that time in which a kernel ran.
    gpu_percent: f64,
}

fn main() -> ExitCode {
    let (mut hold, mut watch, mut direct, mut managed) = (false, false, false, false);
    let (mut occupy, mut code) = (None, None);
    let mut busy = None;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match (arg.as_str(), arg.strip_prefix("--occupy=")) {
            ("--hold", _) => hold = true,
            ("--direct", _) => direct = true,
            ("--managed", _) => managed = true,
            ("--watch", _) => (hold, watch) = (true, true),
            ("--busy", _) => match args.next().and_then(|v| v.parse().ok()) {
                Some(seconds) => busy = Some(Duration::from_secs(seconds)),
                None => return usage("--busy wants a number of seconds"),
            },
            ("--code", _) => match args.next().and_then(|v| v.parse().ok()) {
                Some(bytes) => code = Some(bytes),
                None => return usage("--code wants a number of bytes"),
            },
            ("--occupy", _) => match args.next().and_then(|v| v.parse().ok()) {
                Some(bytes) => occupy = Some(bytes),
                None => return usage("--occupy wants a number of bytes"),
            },
            (flag, _) if flag.starts_with("--busy=") => match flag.trim_start_matches("--busy=").parse() {
                Ok(seconds) => busy = Some(Duration::from_secs(seconds)),
                Err(_) => return usage("--busy wants a number of seconds"),
            },
            (_, Some(value)) => match value.parse() {
                Ok(bytes) => occupy = Some(bytes),
                Err(_) => return usage("--occupy wants a number of bytes"),
            },
            _ => return usage(&format!("unknown argument {arg:?}")),
        }
    }
    // Before there are threads: they inherit it. As the first process of a container we would not be
    // ended by these signals otherwise, and every pod would use up its grace period.
    let ends: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    if hold && let Err(error) = ends.thread_block() {
        eprintln!("cuda-probe: cannot wait for signals: {error}");
        return ExitCode::FAILURE;
    }
    let (mut cuda, report) = match Cuda::load(direct) {
        Ok(cuda) => {
            let allocate = if managed { Cuda::allocate_managed } else { Cuda::allocate };
            let report = probe(&cuda, &Wanted { occupy, code, allocate });
            (Some(cuda), report)
        }
        Err(error) => (None, Report { devices: Vec::new(), error: Some(error.to_string()) }),
    };
    let failed = report.error.is_some();
    let line = serde_json::to_string(&report).unwrap_or_default();
    let mut out = std::io::stdout();
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        return ExitCode::FAILURE;
    }
    if failed {
        return ExitCode::FAILURE;
    }
    if let (Some(span), Some(cuda)) = (busy, &cuda) {
        let line = match keep_busy(cuda, span) {
            Ok(report) => serde_json::to_string(&report).unwrap_or_default(),
            Err(error) => {
                eprintln!("cuda-probe: {error}");
                return ExitCode::FAILURE;
            }
        };
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
            return ExitCode::FAILURE;
        }
    }
    if let (true, Some(cuda)) = (watch, cuda.take()) {
        let watching = std::thread::Builder::new().spawn(move || watch_memory(&cuda));
        if let Err(error) = watching {
            eprintln!("cuda-probe: cannot watch: {error}");
            return ExitCode::FAILURE;
        }
    }
    if hold {
        while ends.wait().is_err() {}
    }
    drop(cuda);
    ExitCode::SUCCESS
}

/// Prints the memory of the first device whenever it is another, for as long as the process runs.
fn watch_memory(cuda: &Cuda) {
    let mut last = None;
    loop {
        let now = cuda.device(0).and_then(|device| cuda.total_memory(device));
        match now.map(|total_bytes| Memory { total_bytes }) {
            Ok(now) if last.as_ref() != Some(&now) => {
                println!("{}", serde_json::to_string(&now).unwrap_or_default());
                last = Some(now);
            }
            Ok(_) => {}
            Err(error) => eprintln!("cuda-probe: {error}"),
        }
        std::thread::sleep(LOOK);
    }
}

fn usage(reason: &str) -> ExitCode {
    eprintln!(
        "cuda-probe: {reason}\nusage: cuda-probe [--direct] [--managed] [--hold] [--watch] [--code BYTES] [--occupy BYTES] [--busy SECONDS]"
    );
    ExitCode::from(2)
}

fn keep_busy(cuda: &Cuda, span: Duration) -> Result<BusyReport, CudaError> {
    /// Launches that may be ahead of the GPU.
    const AHEAD: u64 = 8;
    cuda.make_current(cuda.device(0)?)?;
    let kernel = cuda.spinner()?;
    let (start, mut kernels) = (Instant::now(), 0_u64);
    while start.elapsed() < span {
        cuda.launch(&kernel)?;
        kernels += 1;
        if kernels.is_multiple_of(AHEAD) {
            cuda.wait()?;
        }
    }
    cuda.wait()?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(BusyReport { kernels, seconds, gpu_percent: kernels as f64 / 10.0 / seconds })
}

/// One of the driver's ways to allocate.
type Allocate = fn(&Cuda, u64) -> Result<u64, CudaError>;

/// What to do on each device.
struct Wanted {
    occupy: Option<u64>,
    code: Option<u64>,
    allocate: Allocate,
}

fn probe(cuda: &Cuda, wanted: &Wanted) -> Report {
    let mut devices = Vec::new();
    let result = cuda.device_count().and_then(|count| {
        for ordinal in 0..count {
            devices.push(probe_device(cuda, ordinal, wanted)?);
        }
        Ok(())
    });
    Report { devices, error: result.err().map(|error| error.to_string()) }
}

fn probe_device(cuda: &Cuda, ordinal: i32, wanted: &Wanted) -> Result<DeviceReport, CudaError> {
    let device = cuda.device(ordinal)?;
    cuda.make_current(device)?;
    if let Some(bytes) = wanted.code {
        cuda.run_code(bytes)?;
        std::thread::sleep(NOTICE);
    }
    let (free_bytes, _) = cuda.memory_info()?;
    let (allocated_bytes, refused_with) = match wanted.occupy {
        Some(bytes) => {
            (wanted.allocate)(cuda, bytes)?;
            (bytes, None)
        }
        None => find_limit(cuda, wanted.allocate)?,
    };
    Ok(DeviceReport {
        ordinal,
        name: cuda.name(device)?,
        uuid: cuda.uuid(device)?,
        total_bytes: cuda.total_memory(device)?,
        free_bytes,
        allocated_bytes,
        refused_with,
    })
}

/// Takes memory until CUDA refuses, and gives it back: how much it was, and the code of the refusal.
fn find_limit(cuda: &Cuda, allocate: Allocate) -> Result<(u64, Option<i32>), CudaError> {
    let mut held = Vec::new();
    let mut allocated_bytes = 0u64;
    let mut chunk = FIRST_CHUNK;
    let refused_with = loop {
        match allocate(cuda, chunk) {
            Ok(pointer) => {
                held.push(pointer);
                allocated_bytes = allocated_bytes.saturating_add(chunk);
            }
            Err(_) if chunk > LAST_CHUNK => chunk /= 2,
            Err(error) => break error.code(),
        }
    };
    for pointer in held {
        cuda.free(pointer)?;
    }
    Ok((allocated_bytes, Some(refused_with)))
}
