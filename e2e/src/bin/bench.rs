//! `make bench`: what the limiter costs, against the same programs without it in the same run.
//! Prints a table and writes `target/bench/limiter.json`.
#![forbid(unsafe_code)]

use aliquot_quota::{QuotaFile, region};
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

#[derive(Debug, Serialize)]
struct Figure {
    name: &'static str,
    value: f64,
    unit: &'static str,
    baseline: f64,
    ratio: f64,
    command: String,
}

fn main() -> Result<()> {
    let own = std::env::current_exe()?;
    let build = own.parent().context("no build directory")?.to_owned();
    let hook = std::env::var_os("ALIQUOT_HOOK_DIR").map_or_else(|| build.join("../hook"), PathBuf::from);
    let stub =
        hook.join("libaliquot_preload.so").canonicalize().context("libaliquot_preload.so is not built")?;
    let dir = tempfile::tempdir()?;
    let node = dir.path().join("node");
    let mut spec = aliquot_sim_node::NodeSpec::new(["H100-80"]);
    spec.cuda_library = Some(build.join("libcuda.so"));
    spec.nvml_library = Some(build.join("libnvidia_ml.so"));
    let hardware = aliquot_sim_node::create(&node, &spec)?;
    let uuid = hardware.gpus().first().context("no GPU")?.uuid.clone();
    let share = share(dir.path(), &uuid)?;

    let figures = vec![malloc_pair(&build, &node, &share, &stub)?, exec(&stub)?];
    let out = build.join("../bench");
    std::fs::create_dir_all(&out)?;
    std::fs::write(out.join("limiter.json"), serde_json::to_vec_pretty(&figures)?)?;
    println!("{:<26} {:>12} {:>12} {:>8}  unit", "name", "value", "baseline", "ratio");
    for f in &figures {
        println!("{:<26} {:>12.1} {:>12.1} {:>8.3}  {}", f.name, f.value, f.baseline, f.ratio, f.unit);
    }
    Ok(())
}

/// A share of 40 GiB as the node agent lays it out.
fn share(dir: &Path, uuid: &str) -> Result<PathBuf> {
    let root = dir.join("aliquot");
    let (quota, region_dir) = (root.join("quota/bench"), root.join("region/bench"));
    std::fs::create_dir_all(&quota)?;
    std::fs::create_dir_all(&region_dir)?;
    let gpu = aliquot_quota::GpuUuid::new(uuid).map_err(|e| anyhow::anyhow!("{e}"))?;
    let file = QuotaFile { memory_bytes: 40 << 30, ..QuotaFile::new(gpu) };
    std::fs::write(quota.join("quota"), file.encode())?;
    let mut bytes = vec![0u8; aliquot_quota::REGION_FILE_SIZE];
    let header = region::initial_header();
    bytes.get_mut(..header.len()).context("a region is larger than its header")?.copy_from_slice(&header);
    std::fs::write(region_dir.join("region"), bytes)?;
    Ok(root)
}

/// Added time of a pair of cuMemAlloc and cuMemFree.
fn malloc_pair(build: &Path, node: &Path, share: &Path, stub: &Path) -> Result<Figure> {
    let program = build.join("cuda-bench");
    let run = |limited: bool| -> Result<f64> {
        let mut command = Command::new(&program);
        command
            .env("ALIQUOT_SIM_NODE", node)
            .env("ALIQUOT_SIM_ROOT", node.join("root"))
            .env("LD_LIBRARY_PATH", node.join("root/usr/lib/x86_64-linux-gnu"));
        if limited {
            command.env("LD_PRELOAD", stub).env("ALIQUOT_ROOT", share);
        }
        let output = command.output().with_context(|| program.display().to_string())?;
        let said =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let value: serde_json::Value =
            serde_json::from_slice(&output.stdout).with_context(|| said.clone())?;
        value.get("malloc_pair_ns").and_then(serde_json::Value::as_f64).context(said)
    };
    let (mut with, mut without) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..5 {
        without = without.min(run(false)?);
        with = with.min(run(true)?);
    }
    Ok(Figure {
        name: "limiter.malloc_pair_ns",
        value: with - without,
        unit: "ns added",
        baseline: without,
        ratio: with / without,
        command: "cuda-bench with and without LD_PRELOAD, simulated driver".to_owned(),
    })
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
        name: "limiter.exec_us",
        value: with - without,
        unit: "us added",
        baseline: without,
        ratio: with / without,
        command: "/bin/true with and without LD_PRELOAD".to_owned(),
    })
}
