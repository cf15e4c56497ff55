//! The cases: what is promised, tried with programs in shares.

use crate::life;
use crate::report::Found;
use crate::stage::{LONGEST, Mode, Share, Stage};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Memory of a share in most cases.
const QUOTA: u64 = 4 * GIB;
/// Steps in which drivers hand out memory.
const GRAIN: u64 = 2 * MIB;

/// What cases need.
pub(crate) struct Setting<'a> {
    pub(crate) stage: &'a Stage,
    /// Folder of the scripts.
    pub(crate) folder: PathBuf,
    /// `runtime.cu` as `e2e/gpu/pack` built it.
    pub(crate) runtime_program: Option<PathBuf>,
    /// Divides the length of timed cases.
    pub(crate) hurry: u64,
}

/// A case by its name.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Setting<'_>, Mode) -> Result<Found>,
}

/// All of them, what needs least first.
pub(crate) const ALL: [Case; 17] = [
    Case { name: "quota is exact: cuMemAlloc", run: |c, m| quota(c, m, "linear") },
    Case { name: "quota is exact: cuMemAllocAsync", run: |c, m| quota(c, m, "async") },
    Case { name: "quota is exact: cuMemCreate", run: |c, m| quota(c, m, "vmm") },
    Case { name: "queries show the quota", run: queries },
    Case { name: "out of memory and again, without leaks", run: out_of_memory },
    Case { name: "CUDA graphs", run: graphs },
    Case { name: "host time of a launch", run: launch_overhead },
    Case { name: "SM accuracy, one tenant of 30 %", run: |c, m| one(c, m, 30) },
    Case { name: "SM accuracy, one tenant of 70 %", run: |c, m| one(c, m, 70) },
    Case { name: "SM accuracy, two tenants of 30 and 70 %", run: two },
    Case { name: "a latency loop beside a hog", run: latency },
    Case { name: "PyTorch: native allocator", run: |c, m| torch(c, m, "native") },
    Case { name: "PyTorch: expandable segments", run: |c, m| torch(c, m, "expandable") },
    Case { name: "PyTorch: cudaMallocAsync", run: |c, m| torch(c, m, "async") },
    Case { name: "PyTorch: CUDA graphs", run: |c, m| torch(c, m, "graphs") },
    Case { name: "CuPy", run: cupy },
    Case { name: "a program built with nvcc", run: nvcc },
];

impl Setting<'_> {
    /// A share without neighbours.
    fn alone(&self, memory: u64, cores: u8) -> Result<Share> {
        self.stage.clear()?;
        self.stage.share("a", memory, cores)
    }

    fn millis(&self, millis: u64) -> String {
        (millis / self.hurry).to_string()
    }
}

fn field(value: &Value, name: &str) -> Result<f64> {
    value.get(name).and_then(Value::as_f64).with_context(|| format!("no {name} in {value}"))
}

/// The largest allocation leaves less than a step of the quota uncharged, and is never charged above it.
fn quota(c: &Setting<'_>, mode: Mode, family: &str) -> Result<Found> {
    let share = c.alone(QUOTA, 0)?;
    let mut program = c.stage.tenant(mode, Some(&share), &["limit", family, &GRAIN.to_string()])?;
    let said = program.says()?;
    let charged = share.charged()?;
    let slack = i128::from(QUOTA) - i128::from(charged);
    let codes = said.get("codes").cloned().unwrap_or_default();
    // A pool grows by segments of the driver's choice, so only the limit binds there.
    let is_exact = slack >= 0 && (family == "async" || slack < i128::from(GRAIN));
    let held = is_exact && codes == json!([2]) && said.get("kept") == Some(&json!(true));
    let figures = json!({
        "quota": QUOTA, "largest": said.get("bytes"), "charged": charged, "slack": slack as i64, "codes": codes,
    });
    Ok(Found::promised(held, "the largest allocation is not what the quota leaves", figures))
}

fn queries(c: &Setting<'_>, mode: Mode) -> Result<Found> {
    let share = c.alone(QUOTA, 0)?;
    let said = c.stage.run(mode, Some(&share), &["device"])?;
    let held = said.get("total") == Some(&json!(QUOTA)) && field(&said, "free")? < QUOTA as f64;
    Ok(Found::promised(held, "cuMemGetInfo does not show the quota", said))
}

fn out_of_memory(c: &Setting<'_>, mode: Mode) -> Result<Found> {
    let share = c.alone(QUOTA, 0)?;
    let first = c.stage.run(mode, Some(&share), &["oom", "20"])?;
    // The next process has all that the one before it had.
    let next = c.stage.run(mode, Some(&share), &["oom", "20"])?;
    let free = first.get("free_before");
    let is_same = [first.get("free_after"), next.get("free_before"), next.get("free_after")];
    let refused = [&first, &next].map(|said| said.get("refused") == Some(&json!(20)));
    let held = free.is_some() && is_same.iter().all(|other| *other == free) && refused == [true; 2];
    Ok(Found::promised(held, "memory was lost on the way", json!({"first": first, "next": next})))
}

fn graphs(c: &Setting<'_>, mode: Mode) -> Result<Found> {
    let share = c.alone(QUOTA, 50)?;
    let launches = (400 / c.hurry).max(20).to_string();
    let said = c.stage.run(mode, Some(&share), &["graph", "8", &launches])?;
    Ok(Found::measured(json!({"share": 50, "got": said})))
}

fn launch_overhead(c: &Setting<'_>, mode: Mode) -> Result<Found> {
    let bursts = (60 / c.hurry).max(3).to_string();
    let role = ["launches", bursts.as_str()];
    let bare = c.stage.run(Mode::Bare, None, &role)?;
    let unlimited = c.stage.run(mode, Some(&c.alone(QUOTA, 0)?), &role)?;
    let limited = c.stage.run(mode, Some(&c.alone(QUOTA, 50)?), &role)?;
    Ok(Found::measured(
        json!({"without_limiter": bare, "no_limit_of_time": unlimited, "share_of_50": limited}),
    ))
}

fn one(c: &Setting<'_>, mode: Mode, percent: u8) -> Result<Found> {
    let mut got = serde_json::Map::new();
    for micros in ["100", "1000", "10000"] {
        let share = c.alone(QUOTA, percent)?;
        let said = c.stage.run(mode, Some(&share), &["spin", micros, &c.millis(4000)])?;
        got.insert(format!("kernels of {micros} us"), json!(field(&said, "percent")?));
    }
    Ok(Found::measured(json!({"share": percent, "goal": "within 3 points", "got": got})))
}

/// Two tenants at the same time, with the arbiter of the node agent.
fn two(c: &Setting<'_>, mode: Mode) -> Result<Found> {
    let mut got = serde_json::Map::new();
    for micros in ["500", "5000"] {
        c.stage.clear()?;
        let (a, b) = (c.stage.share("a", QUOTA, 30)?, c.stage.share("b", QUOTA, 70)?);
        let role = ["spin", micros, &c.millis(6000)];
        let (first, second) = c.stage.with_arbiter(|| -> Result<(Value, Value)> {
            let mut first = c.stage.tenant(mode, Some(&a), &role)?;
            let mut second = c.stage.tenant(mode, Some(&b), &role)?;
            first.says()?;
            second.says()?;
            Ok((first.finish()?, second.finish()?))
        })?;
        let (small, large) = (field(&first, "percent")?, field(&second, "percent")?);
        got.insert(
            format!("kernels of {micros} us"),
            json!({"30": small, "70": large, "ratio": small / large.max(0.01)}),
        );
    }
    Ok(Found::measured(json!({"goal": "ratio of 0.41 to 0.45", "got": got})))
}

/// A short kernel and its wait, alone, beside a neighbour without limits, and beside one that is limited.
fn latency(c: &Setting<'_>, mode: Mode) -> Result<Found> {
    let role = ["latency", "100", &c.millis(3000)];
    let hog = ["spin", "5000", &c.millis(60_000)];
    let alone = c.stage.run(Mode::Bare, None, &role)?;
    let mut neighbour = c.stage.tenant(Mode::Bare, None, &hog)?;
    neighbour.says()?;
    let free = c.stage.run(Mode::Bare, None, &role)?;
    neighbour.kill()?;
    c.stage.clear()?;
    let (own, other) = (c.stage.share("own", QUOTA, 50)?, c.stage.share("hog", QUOTA, 30)?);
    let limited = c.stage.with_arbiter(|| -> Result<Value> {
        let mut neighbour = c.stage.tenant(mode, Some(&other), &hog)?;
        neighbour.says()?;
        let found = c.stage.run(mode, Some(&own), &role);
        neighbour.kill()?;
        found
    })?;
    Ok(Found::measured(json!({
        "alone": alone, "beside_a_hog_without_limits": free, "beside_a_hog_of_30_percent": limited,
    })))
}

fn torch(c: &Setting<'_>, mode: Mode, how: &str) -> Result<Found> {
    let settings = match how {
        "expandable" => vec![("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")],
        "async" => vec![("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")],
        _ => Vec::new(),
    };
    python(c, mode, "import torch; torch.cuda.init()", "torch_case.py", &[how], &settings)
}

fn cupy(c: &Setting<'_>, mode: Mode) -> Result<Found> {
    python(c, mode, "import cupy; cupy.cuda.runtime.memGetInfo()", "cupy_case.py", &[], &[])
}

/// A script that prints a line of JSON with `ok` and, where that is false, `reason`. It is for those who have what it
/// needs: `start` works without the limiter.
fn python(
    c: &Setting<'_>,
    mode: Mode,
    start: &str,
    script: &str,
    arguments: &[&str],
    settings: &[(&str, &str)],
) -> Result<Found> {
    let words = ["python3", "-c", start].map(str::to_owned);
    if let Some(why) = does_not_start(&mut c.stage.command(Mode::Bare, None, &words)?, |status| status != 0)?
    {
        return Ok(Found::skipped(format!("`{start}` does not work without the limiter: {why}")));
    }
    let share = c.alone(QUOTA, 0)?;
    let script = c.folder.join(script).display().to_string();
    let quota = QUOTA.to_string();
    let words: Vec<String> = ["python3", script.as_str(), quota.as_str()]
        .iter()
        .chain(arguments)
        .map(|word| (*word).to_owned())
        .collect();
    let mut command = c.stage.command(mode, Some(&share), &words)?;
    command.envs(settings.iter().copied());
    judge(&mut command, &share)
}

/// Why a program does not start without the limiter: what it said last, where its status says so.
fn does_not_start(command: &mut Command, is_so: impl FnOnce(i32) -> bool) -> Result<Option<String>> {
    let output = life::output(command, LONGEST);
    life::check()?;
    let output = match output {
        Ok(output) => output,
        Err(error) => return Ok(Some(format!("{error:#}"))),
    };
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).trim().lines().last().unwrap_or_default().to_owned();
    // Without a status it was killed.
    Ok(output.status.code().is_none_or(is_so).then_some(said))
}

fn judge(command: &mut Command, share: &Share) -> Result<Found> {
    let output = life::output(command, LONGEST)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = text.lines().last().unwrap_or_default();
    let said: Value = serde_json::from_str(last).with_context(|| format!("{}: {errors}", output.status))?;
    let held = output.status.success() && said.get("ok") == Some(&json!(true));
    let reason = said.get("reason").and_then(Value::as_str).unwrap_or(&errors).to_owned();
    let figures = json!({"said": said, "charged_after_exit": share.charged()?});
    Ok(Found::promised(held, &reason, figures))
}

/// A program of the CUDA runtime: the one that was carried here, or built here.
fn nvcc(c: &Setting<'_>, mode: Mode) -> Result<Found> {
    let built = tempfile::tempdir()?;
    let program = match &c.runtime_program {
        Some(carried) => carried.clone(),
        None => {
            let (program, source) = (built.path().join("runtime"), c.folder.join("runtime.cu"));
            let mut compiler = Command::new("nvcc");
            match life::output(compiler.arg("-o").arg(&program).arg(source), LONGEST) {
                Err(error) => {
                    life::check()?;
                    return Ok(Found::skipped(format!("none was carried here, and {error:#}")));
                }
                Ok(output) if !output.status.success() => {
                    let said = life::said(&output);
                    return Ok(Found::skipped(format!("nvcc does not build here: {said}")));
                }
                Ok(_) => program,
            }
        }
    };
    let words = [program.display().to_string(), QUOTA.to_string()];
    if let Some(why) = does_not_start(&mut c.stage.command(Mode::Bare, None, &words)?, |status| status == 2)?
    {
        return Ok(Found::skipped(format!("it does not start CUDA without the limiter: {why}")));
    }
    let share = c.alone(QUOTA, 0)?;
    judge(&mut c.stage.command(mode, Some(&share), &words)?, &share)
}
