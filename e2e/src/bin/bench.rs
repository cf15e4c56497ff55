//! `make bench`: what the limiter costs, against the same programs without it in the same run.
//! Prints a table and writes `target/bench/limiter.json`. `ALIQUOT_GPU_RECORD` names a file of `e2e/gpu/results`, whose
//! facts replace what is assumed of devices.
#![forbid(unsafe_code)]

#[path = "bench/memory.rs"]
mod memory;

use aliquot_e2e::figure::{self, Figure};
use aliquot_quota::{QuotaFile, region};
use aliquot_sim_node::{Record, limiter_at};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

fn main() -> Result<()> {
    let own = std::env::current_exe()?;
    let build = own.parent().context("no build directory")?.to_owned();
    let hook = std::env::var_os("ALIQUOT_HOOK_DIR").map_or_else(|| build.join("../hook"), PathBuf::from);
    let stub =
        hook.join("libaliquot_preload.so").canonicalize().context("libaliquot_preload.so is not built")?;
    let dir = tempfile::tempdir()?;
    // What a real driver was seen to do; what it has no record of is assumed, and marked so.
    let record = std::env::var_os("ALIQUOT_GPU_RECORD").filter(|path| !path.is_empty()).map(PathBuf::from);
    let recorded = record.as_deref().map(Record::read).transpose()?.unwrap_or_default();
    if record.is_some() {
        println!("recorded: {}", recorded.device);
    }
    let null = Null::new(dir.path(), &build)?;
    let mut figures = vec![null.malloc_pair(&stub)?, exec(&stub)?];
    figures.push(null.launch("limiter.launch.idle_ns", 0, 1, &stub)?);
    figures.push(null.launch("limiter.launch.limited_ns", 10, 1, &stub)?);
    figures.extend(null.scaling(&stub)?);
    figures.extend(null.malloc_scaling(&stub)?);
    figures.extend(memory::figures(&build, &stub, dir.path(), &recorded)?);
    figures.extend(simulation(&build, record.as_deref())?);
    let out = build.join("../bench");
    std::fs::create_dir_all(&out)?;
    figure::report(&out.join("limiter.json"), &figures)
}

/// A share of 40 GiB and so many percent as the node agent lays it out.
fn share(dir: &Path, uuid: &str, percent: u8) -> Result<PathBuf> {
    let root = dir.join("aliquot");
    let (quota, region_dir) = (root.join("quota/bench"), root.join("region/bench"));
    std::fs::create_dir_all(&quota)?;
    std::fs::create_dir_all(&region_dir)?;
    let gpu = aliquot_quota::GpuUuid::new(uuid).map_err(|e| anyhow::anyhow!("{e}"))?;
    let file = QuotaFile { memory_bytes: 40 << 30, cores_percent: percent, ..QuotaFile::new(gpu) };
    std::fs::write(quota.join("quota"), file.encode())?;
    let mut bytes = vec![0u8; aliquot_quota::REGION_FILE_SIZE];
    let header = region::initial_header();
    bytes.get_mut(..header.len()).context("a region is larger than its header")?.copy_from_slice(&header);
    std::fs::write(region_dir.join("region"), bytes)?;
    Ok(root)
}

/// A driver that does nothing, under the name that programs open.
struct Null {
    folder: PathBuf,
    program: PathBuf,
}

impl Null {
    fn new(dir: &Path, build: &Path) -> Result<Self> {
        let folder = dir.join("null");
        std::fs::create_dir_all(&folder)?;
        let library = build.join("libnullcuda.so").canonicalize().context("libnullcuda.so is not built")?;
        std::os::unix::fs::symlink(library, folder.join("libcuda.so.1"))?;
        Ok(Self { folder, program: build.join("cuda-bench") })
    }

    /// Nanoseconds of a launch, or of what the arguments say.
    fn run(&self, share: Option<&Path>, arguments: &[&str], stub: &Path) -> Result<f64> {
        let mut command = Command::new(&self.program);
        command.args(arguments).env("LD_LIBRARY_PATH", &self.folder);
        if let Some(share) = share {
            let limiter = stub.parent().context("no folder of the limiter")?;
            command.env("LD_PRELOAD", limiter_at(share, limiter, &share.join("limiter"))?);
        }
        let output = command.output().with_context(|| self.program.display().to_string())?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let value: serde_json::Value =
            serde_json::from_slice(&output.stdout).with_context(|| said.clone())?;
        let names = ["launch_ns", "malloc_pair_ns", "malloc_cpu_ns"];
        let nanos = names.into_iter().find_map(|name| value.get(name));
        nanos.and_then(serde_json::Value::as_f64).context(said)
    }

    /// With and without a share of so many percent, the better of some runs.
    fn pair(&self, percent: u8, arguments: &[&str], stub: &Path) -> Result<(f64, f64)> {
        let uuid = "GPU-00000000-0000-0000-0000-000000000000";
        let (mut with, mut without) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..3 {
            let share =
                share(&self.folder.join(format!("{percent}-{}", arguments.join("-"))), uuid, percent)?;
            without = without.min(self.run(None, arguments, stub)?);
            with = with.min(self.run(Some(&share), arguments, stub)?);
        }
        Ok((with, without))
    }

    /// Added time of a pair of cuMemAlloc and cuMemFree.
    fn malloc_pair(&self, stub: &Path) -> Result<Figure> {
        let (with, without) = self.pair(0, &[], stub)?;
        Ok(Figure {
            name: "limiter.malloc_pair_ns".to_owned(),
            value: with - without,
            unit: "ns added".to_owned(),
            baseline: without,
            ratio: with / without,
            command: "cuda-bench with and without LD_PRELOAD, driver that does nothing".to_owned(),
            assumed: Vec::new(),
        })
    }

    /// Added time of a launch in a share of so many percent of the GPU's time (0: without a limit).
    fn launch(&self, name: &str, percent: u8, threads: usize, stub: &Path) -> Result<Figure> {
        let (with, without) = self.pair(percent, &["launch", &threads.to_string()], stub)?;
        Ok(Figure {
            name: name.to_owned(),
            value: with - without,
            unit: "ns added".to_owned(),
            baseline: without,
            ratio: with / without,
            command: format!(
                "cuda-bench launch {threads}, share of {percent} % (0: no limit of time), with and without \
                 LD_PRELOAD, driver that does nothing"
            ),
            assumed: launched(),
        })
    }

    /// A launch in a limited share at 1, 2, … threads: how much more than at one.
    fn scaling(&self, stub: &Path) -> Result<Vec<Figure>> {
        let processors = std::thread::available_parallelism()?.get();
        let most = processors.min(16);
        let (one, _) = self.pair(10, &["launch", "1"], stub)?;
        let counts = doubling(most);
        let figure = |threads: usize| -> Result<Figure> {
            let (with, _) = self.pair(10, &["launch", &threads.to_string()], stub)?;
            Ok(Figure {
                name: format!("limiter.launch.scaling_{threads}_threads"),
                value: with / one,
                unit: format!("times one thread, of {processors} processors"),
                baseline: one,
                ratio: with / one,
                command: format!("cuda-bench launch {threads}, share of 10 %, driver that does nothing"),
                assumed: launched(),
            })
        };
        counts.map(figure).collect()
    }

    /// What a pair of cuMemAlloc and cuMemFree adds to the processor's time at 1, 2, … threads: how much more than at
    /// one.
    fn malloc_scaling(&self, stub: &Path) -> Result<Vec<Figure>> {
        let processors = std::thread::available_parallelism()?.get();
        let added = |threads: usize| -> Result<f64> {
            let (with, without) = self.pair(0, &["malloc", &threads.to_string()], stub)?;
            Ok(with - without)
        };
        let one = added(1)?;
        let figure = |threads: usize| -> Result<Figure> {
            let value = added(threads)? / one;
            Ok(Figure {
                name: format!("limiter.malloc_pair.scaling_{threads}_threads"),
                value,
                unit: format!("times the added processor time of one thread, of {processors} processors"),
                baseline: 1.5,
                ratio: value / 1.5,
                command: format!(
                    "cuda-bench malloc {threads} and malloc 1 ({one:.0} ns added), with and without LD_PRELOAD, driver \
                     that does nothing; the baseline is the goal"
                ),
                assumed: Vec::new(),
            })
        };
        doubling(processors.min(16)).map(figure).collect()
    }
}

/// What the driver that does nothing has made up about launches.
fn launched() -> Vec<String> {
    ["kernels of 5 us", "1 us for each call about events"].map(str::to_owned).to_vec()
}

/// 2, 4, … threads.
fn doubling(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(2_usize), |n| Some(n * 2)).take_while(move |n| *n <= most)
}

/// The figures of the simulation in virtual time.
fn simulation(build: &Path, record: Option<&Path>) -> Result<Vec<Figure>> {
    let mut command = Command::new(build.join("limiter-sim"));
    if let Some(record) = record {
        command.arg("--record").arg(record);
    }
    let output = command.arg("--json").output().context("limiter-sim")?;
    anyhow::ensure!(output.status.success(), "limiter-sim: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("limiter-sim prints no figures")
}

/// Added time of starting a program that never touches CUDA.
fn exec(stub: &Path) -> Result<Figure> {
    let run = |limited: bool| -> Result<f64> {
        let start = Instant::now();
        for _ in 0..200 {
            let mut command = Command::new("/bin/true");
            if limited {
                command.env("LD_PRELOAD", stub);
            }
            command.status().context("/bin/true")?;
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / 200.0)
    };
    let (mut with, mut without) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..5 {
        without = without.min(run(false)?);
        with = with.min(run(true)?);
    }
    Ok(Figure {
        name: "limiter.exec_us".to_owned(),
        value: with - without,
        unit: "us added".to_owned(),
        baseline: without,
        ratio: with / without,
        command: "/bin/true with and without LD_PRELOAD".to_owned(),
        assumed: Vec::new(),
    })
}
