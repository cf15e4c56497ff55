//! What a CUDA program does in a case: `gpu-check tenant ROLE …` prints one line of JSON, and knows nothing of limits.
//!
//! Kernels do a counted number of rounds, so that their GPU time does not depend on who else has the GPU; how many
//! make a microsecond is measured first and comes in `GPU_CHECK_ROUNDS_PER_US`. A simulated driver takes the first
//! parameter for microseconds instead.

mod habits;

use crate::driver::{Board, Function, Library, at, now_ns};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::ffi::CString;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

const OUT_OF_MEMORY: i32 = 2;
/// Rounds of a microsecond on no particular GPU, until they are measured.
const ROUNDS_PER_US: u64 = 40;
/// Launches ahead of the GPU.
const AHEAD: u64 = 16;

const PTX: &str = "
.version VERSION
.target TARGET
.address_size 64
.visible .entry spin_param_us(.param .u64 us, .param .u64 rounds, .param .u64 out)
{
  .reg .u64 %r<6>;
  .reg .pred %p;
  ld.param.u64 %r1, [rounds];
  ld.param.u64 %r5, [out];
  mov.u64 %r2, 0;
  mov.u64 %r4, 0;
again:
  mov.u64 %r3, %clock64;
  xor.b64 %r4, %r4, %r3;
  add.u64 %r2, %r2, 1;
  setp.lt.u64 %p, %r2, %r1;
  @%p bra again;
  st.global.u64 [%r5], %r4;
  ret;
}
";

/// Prints a line of JSON.
fn say(value: &Value) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{value}")?;
    Ok(out.flush()?)
}

/// Waits for a line, or for the end of the input.
fn wait() {
    let mut line = String::new();
    let _ = std::io::stdin().lock().read_line(&mut line);
}

/// A number among the arguments.
fn number(arguments: &[String], place: usize, default: u64) -> Result<u64> {
    arguments.get(place).map_or(Ok(default), |text| text.parse().with_context(|| format!("{text:?}")))
}

/// Runs a role.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let role = arguments.first().map(String::as_str).unwrap_or_default();
    let rest = arguments.get(1..).unwrap_or_default();
    let gpu = Gpu::open()?;
    match role {
        "device" => gpu.describe(),
        "processes" => processes(),
        "habits" => gpu.habits(),
        "limit" => gpu.limit(rest),
        "oom" => gpu.oom(number(rest, 0, 20)?),
        "graph" => gpu.graph(number(rest, 0, 8)?, number(rest, 1, 200)?),
        "calibrate" => gpu.calibrate(),
        "spin" => gpu.spin(number(rest, 0, 1000)?, number(rest, 1, 1000)?),
        "launches" => gpu.launches(number(rest, 0, 40)?),
        "latency" => gpu.latency(number(rest, 0, 100)?, number(rest, 1, 1000)?),
        "slices" => gpu.slices(number(rest, 0, 100)?, number(rest, 1, 2000)?),
        "event" => gpu.event_times(number(rest, 0, 1000)?, number(rest, 1, 50)?),
        "resolver" => gpu.resolver(rest),
        "hold" => gpu.hold(number(rest, 0, 1 << 30)?),
        "import" => gpu.import(rest.first().context("import wants a handle")?),
        other => bail!("there is no role {other:?}"),
    }
}

/// Under which pids NVML lists processes, this one among them.
fn processes() -> Result<()> {
    let gpu = std::env::var("CUDA_VISIBLE_DEVICES").context("the stage names the GPU")?;
    let pids: Vec<u32> = Board::of_uuid(&gpu)?.processes()?.iter().map(|(pid, _)| *pid).collect();
    say(&json!({"pids": pids, "own": std::process::id()}))
}

struct Gpu {
    cuda: Library,
}

struct Kernel {
    launch: Function,
    function: u64,
    out: u64,
    per_us: u64,
}

impl Kernel {
    fn launch(&self, micros: u64, stream: u64) -> i32 {
        self.rounds(micros, micros.saturating_mul(self.per_us), stream)
    }

    fn rounds(&self, micros: u64, rounds: u64, stream: u64) -> i32 {
        let (mut us, mut rounds, mut out) = (micros, rounds, self.out);
        let mut parameters = [at(&mut us), at(&mut rounds), at(&mut out)];
        self.launch.call(&[self.function, 1, 1, 1, 32, 1, 1, 0, stream, at(&mut parameters), 0])
    }
}

impl Gpu {
    /// Initialises CUDA with the first device's primary context.
    fn open() -> Result<Self> {
        let cuda = Library::cuda()?;
        cuda.must("cuInit", &[0])?;
        let (mut device, mut context) = (0_i32, 0_u64);
        cuda.must("cuDeviceGet", &[at(&mut device), 0])?;
        cuda.must("cuDevicePrimaryCtxRetain", &[at(&mut context), device as u64])?;
        cuda.must("cuCtxSetCurrent", &[context])?;
        Ok(Self { cuda })
    }

    fn memory(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0_u64, 0_u64);
        self.cuda.must("cuMemGetInfo_v2", &[at(&mut free), at(&mut total)])?;
        Ok((free, total))
    }

    fn wait(&self) -> Result<()> {
        self.cuda.must("cuCtxSynchronize", &[])
    }

    /// The spinning kernel, for the first target that the driver takes.
    fn kernel(&self) -> Result<Kernel> {
        let (mut module, mut function, mut out) = (0_u64, 0_u64, 0_u64);
        let mut last = 0;
        for (version, target) in [("6.0", "sm_50"), ("6.3", "sm_75"), ("7.0", "sm_80"), ("7.8", "sm_90")] {
            let text = CString::new(PTX.replace("VERSION", version).replace("TARGET", target))?;
            last = self.cuda.call("cuModuleLoadData", &[at(&mut module), text.as_ptr() as u64])?;
            if last == 0 {
                break;
            }
        }
        ensure!(last == 0, "cuModuleLoadData takes none of our kernels: {last}");
        let name = c"spin_param_us".as_ptr() as u64;
        self.cuda.must("cuModuleGetFunction", &[at(&mut function), module, name])?;
        self.cuda.must("cuMemAlloc_v2", &[at(&mut out), 8])?;
        let told = std::env::var("GPU_CHECK_ROUNDS_PER_US").ok().and_then(|text| text.parse().ok());
        let per_us = told.unwrap_or(ROUNDS_PER_US);
        let kernel = Kernel { launch: self.cuda.function("cuLaunchKernel")?, function, out, per_us };
        // Loads the code, which later launches need not do.
        ensure!(kernel.launch(1, 0) == 0, "the first launch failed");
        self.wait()?;
        Ok(kernel)
    }

    fn describe(&self) -> Result<()> {
        let mut version = 0_i32;
        self.cuda.must("cuDriverGetVersion", &[at(&mut version)])?;
        let (free, total) = self.memory()?;
        say(&json!({"pid": std::process::id(), "cuda": version, "free": free, "total": total}))?;
        wait();
        Ok(())
    }

    /// The largest allocation of a family, which is kept until a line comes.
    fn limit(&self, arguments: &[String]) -> Result<()> {
        let family = arguments.first().map(String::as_str).unwrap_or("linear");
        let grain = number(arguments, 1, 2 << 20)?;
        let (_, total) = self.memory()?;
        let (mut low, mut high, mut codes) = (0, total / grain + 2, Vec::new());
        while low + 1 < high {
            let middle = (low + high) / 2;
            match self.allocate(family, middle * grain)? {
                Ok(held) => {
                    self.release(family, held)?;
                    low = middle;
                }
                Err(code) => {
                    codes.push(code);
                    high = middle;
                }
            }
        }
        let kept = self.allocate(family, low * grain)?;
        codes.sort_unstable();
        codes.dedup();
        say(&json!({
            "pid": std::process::id(), "bytes": low * grain, "codes": codes, "kept": kept.is_ok(), "total": total,
        }))?;
        wait();
        Ok(())
    }

    /// Allocates; the handle, or CUDA's code.
    fn allocate(&self, family: &str, bytes: u64) -> Result<Result<u64, i32>> {
        let mut out = 0_u64;
        let code = match family {
            "linear" => self.cuda.call("cuMemAlloc_v2", &[at(&mut out), bytes])?,
            "async" => {
                let code = self.cuda.call("cuMemAllocAsync", &[at(&mut out), bytes, 0])?;
                code.max(self.cuda.call("cuStreamSynchronize", &[0])?)
            }
            "vmm" => {
                // CUmemAllocationProp: pinned memory of device 0.
                let mut properties = [0_u32; 8];
                let [kind, _, place, ..] = &mut properties;
                (*kind, *place) = (1, 1);
                self.cuda.call("cuMemCreate", &[at(&mut out), bytes, at(&mut properties), 0])?
            }
            other => bail!("there is no family {other:?}"),
        };
        Ok(if code == 0 { Ok(out) } else { Err(code) })
    }

    fn release(&self, family: &str, held: u64) -> Result<()> {
        match family {
            "linear" => self.cuda.must("cuMemFree_v2", &[held]),
            "async" => {
                self.cuda.must("cuMemFreeAsync", &[held, 0])?;
                self.cuda.must("cuStreamSynchronize", &[0])
            }
            _ => self.cuda.must("cuMemRelease", &[held]),
        }
    }

    /// Fills memory until CUDA refuses, frees everything, again and again.
    fn oom(&self, rounds: u64) -> Result<()> {
        const CHUNK: u64 = 64 << 20;
        let mut free = Vec::new();
        let mut refused = 0;
        for _ in 0..rounds {
            free.push(self.memory()?.0);
            let mut held = Vec::new();
            let code = loop {
                match self.allocate("linear", CHUNK)? {
                    Ok(new) => held.push(new),
                    Err(code) => break code,
                }
            };
            ensure!(code == OUT_OF_MEMORY, "refused with {code}");
            refused += 1;
            for one in held {
                self.release("linear", one)?;
            }
        }
        free.push(self.memory()?.0);
        // The first round may leave memory that the driver keeps for itself.
        let (first, last) = (free.get(1).copied(), free.last().copied());
        say(&json!({"rounds": rounds, "refused": refused, "free_before": first, "free_after": last}))
    }

    /// Captures kernels into a graph and launches it.
    fn graph(&self, kernels: u64, launches: u64) -> Result<()> {
        let kernel = self.kernel()?;
        let (mut stream, mut graph, mut exec) = (0_u64, 0_u64, 0_u64);
        self.cuda.must("cuStreamCreate", &[at(&mut stream), 1])?;
        self.cuda.must("cuStreamBeginCapture_v2", &[stream, 0])?;
        for _ in 0..kernels {
            ensure!(kernel.launch(100, stream) == 0, "a captured launch failed");
        }
        self.cuda.must("cuStreamEndCapture", &[stream, at(&mut graph)])?;
        self.cuda.must("cuGraphInstantiateWithFlags", &[at(&mut exec), graph, 0])?;
        let start = now_ns();
        for _ in 0..launches {
            self.cuda.must("cuGraphLaunch", &[exec, stream])?;
        }
        self.wait()?;
        let (gpu_ns, wall_ns) = (kernels * launches * 100_000, now_ns() - start);
        say(&json!({"gpu_ns": gpu_ns, "wall_ns": wall_ns, "percent": percent(gpu_ns, wall_ns)}))
    }

    /// How many rounds make a microsecond while nobody else has the GPU.
    fn calibrate(&self) -> Result<()> {
        const ROUNDS: u64 = 200_000;
        let kernel = self.kernel()?;
        let mut fastest = f32::INFINITY;
        for _ in 0..5 {
            // The parameter in microseconds makes a simulated kernel last as long as the rounds would.
            let took = self.timed(|| kernel.rounds(ROUNDS / ROUNDS_PER_US, ROUNDS, 0))?;
            fastest = fastest.min(took);
        }
        let per_us = (ROUNDS as f32 / (fastest * 1000.0)).round().max(1.0) as u64;
        say(&json!({"rounds_per_us": per_us}))
    }

    /// Milliseconds between two events around a launch.
    fn timed(&self, launch: impl FnOnce() -> i32) -> Result<f32> {
        let (mut start, mut end, mut took) = (0_u64, 0_u64, 0_f32);
        self.cuda.must("cuEventCreate", &[at(&mut start), 0])?;
        self.cuda.must("cuEventCreate", &[at(&mut end), 0])?;
        self.cuda.must("cuEventRecord", &[start, 0])?;
        ensure!(launch() == 0, "a launch failed");
        self.cuda.must("cuEventRecord", &[end, 0])?;
        self.cuda.must("cuEventSynchronize", &[end])?;
        self.cuda.must("cuEventElapsedTime", &[at(&mut took), start, end])?;
        self.cuda.must("cuEventDestroy_v2", &[start])?;
        self.cuda.must("cuEventDestroy_v2", &[end])?;
        Ok(took)
    }

    /// Keeps the GPU busy with kernels of a length for a time.
    fn spin(&self, micros: u64, millis: u64) -> Result<()> {
        let kernel = self.kernel()?;
        say(&json!({"ready": std::process::id()}))?;
        let (start, mut kernels) = (now_ns(), 0);
        while now_ns() - start < millis * 1_000_000 {
            ensure!(kernel.launch(micros, 0) == 0, "a launch failed");
            kernels += 1;
            if kernels % AHEAD == 0 {
                self.wait()?;
            }
        }
        self.wait()?;
        let (end, gpu_ns) = (now_ns(), kernels * micros * 1000);
        say(&json!({
            "start_ns": start, "end_ns": end, "gpu_ns": gpu_ns, "percent": percent(gpu_ns, end - start),
        }))
    }

    /// Host time of a launch, in bursts with pauses that pay for them.
    fn launches(&self, bursts: u64) -> Result<()> {
        const BURST: u32 = 400;
        let kernel = self.kernel()?;
        let mut each = Vec::new();
        for _ in 0..bursts {
            let start = Instant::now();
            for _ in 0..BURST {
                ensure!(kernel.launch(2, 0) == 0, "a launch failed");
            }
            each.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(BURST));
            self.wait()?;
            std::thread::sleep(Duration::from_millis(10));
        }
        each.sort_by(f64::total_cmp);
        // Costs are learned in the first ones, and others disturb some.
        say(&json!({"median_ns": each.get(each.len() / 2), "least_ns": each.first()}))
    }

    /// How long a short kernel takes from its launch until the host knows that it ended, again and again.
    fn latency(&self, micros: u64, millis: u64) -> Result<()> {
        let kernel = self.kernel()?;
        let (start, mut all) = (Instant::now(), Vec::new());
        while start.elapsed() < Duration::from_millis(millis) {
            let before = Instant::now();
            ensure!(kernel.launch(micros, 0) == 0, "a launch failed");
            self.wait()?;
            all.push(before.elapsed().as_secs_f64() * 1e6);
            std::thread::sleep(Duration::from_millis(2));
        }
        all.sort_by(f64::total_cmp);
        let part = |p: usize| all.get(all.len() * p / 100).or_else(|| all.last()).copied();
        say(&json!({
            "count": all.len(), "p50_us": part(50), "p95_us": part(95), "p99_us": part(99), "max_us": all.last(),
        }))
    }

    /// What a pair of events shows for a kernel.
    fn event_times(&self, micros: u64, count: u64) -> Result<()> {
        let kernel = self.kernel()?;
        let mut all: Vec<f32> = (0..count)
            .map(|_| self.timed(|| kernel.launch(micros, 0)).map(|ms| ms * 1000.0))
            .collect::<Result<_>>()?;
        all.sort_by(f32::total_cmp);
        let part = |p: usize| all.get(all.len() * p / 100).copied();
        say(
            &json!({"least_us": all.first(), "median_us": part(50), "p90_us": part(90), "most_us": all.last()}),
        )
    }

    /// How long short kernels, one directly behind the other, are interrupted: others' time slices.
    fn slices(&self, micros: u64, count: u64) -> Result<()> {
        let (kernel, mut events) = (self.kernel()?, vec![0_u64; count as usize + 1]);
        for (at_launch, event) in events.iter_mut().enumerate() {
            self.cuda.must("cuEventCreate", &[at(event), 0])?;
            ensure!(at_launch == 0 || kernel.launch(micros, 0) == 0, "a launch failed");
            self.cuda.must("cuEventRecord", &[*event, 0])?;
        }
        self.wait()?;
        let between = |pair: &[u64]| -> Result<f64> {
            let mut took = 0_f32;
            let (start, end) = (pair.first().copied(), pair.last().copied());
            let words = [at(&mut took), start.unwrap_or_default(), end.unwrap_or_default()];
            self.cuda.must("cuEventElapsedTime", &words)?;
            Ok(f64::from(took) * 1000.0 - micros as f64)
        };
        let all = events.windows(2).map(between).collect::<Result<Vec<f64>>>()?;
        // Less than half a kernel is what events and launches cost.
        let mut breaks: Vec<f64> = all.into_iter().filter(|us| *us > micros as f64 / 2.0).collect();
        breaks.sort_by(f64::total_cmp);
        let median = breaks.get(breaks.len() / 2);
        say(&json!({"kernels": count, "interruptions": breaks.len(), "median_us": median,
            "least_us": breaks.first(), "most_us": breaks.last()}))
    }

    /// Whether the driver's resolver answers with the addresses that its table of symbols has.
    fn resolver(&self, names: &[String]) -> Result<()> {
        let resolve = self.cuda.function("cuGetProcAddress_v2")?;
        let mut version = 0_i32;
        self.cuda.must("cuDriverGetVersion", &[at(&mut version)])?;
        let mut different = Vec::new();
        let mut equal = 0;
        for name in names {
            // `base=symbol@version`: the version of CUDA in which this symbol became the one by the base's name.
            let (base, rest) = name.split_once('=').context("base=symbol@version")?;
            let (symbol, at_version) = rest.split_once('@').context("base=symbol@version")?;
            let asked: i32 = at_version.parse()?;
            let text = CString::new(base)?;
            let (mut found, mut status) = (0_u64, -1_i32);
            let words = [text.as_ptr() as u64, at(&mut found), asked.min(version) as u64, 0, at(&mut status)];
            let code = resolve.call(&words);
            if code == 0 && found == self.cuda.address(symbol) as u64 {
                equal += 1;
            } else {
                different.push(format!("{symbol} (code {code}, status {status})"));
            }
        }
        say(&json!({"asked": names.len(), "equal": equal, "different": different}))
    }

    /// Holds memory until a line comes; says by which handle other processes reach it.
    fn hold(&self, bytes: u64) -> Result<()> {
        let held = match self.allocate("linear", bytes)? {
            Ok(held) => held,
            Err(code) => bail!("cuMemAlloc of {bytes} bytes failed with {code}"),
        };
        let mut handle = [0_u8; 64];
        let code = self.cuda.call("cuIpcGetMemHandle", &[handle.as_mut_ptr() as u64, held])?;
        let hex: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
        say(&json!({"pid": std::process::id(), "handle": hex, "handle_code": code}))?;
        wait();
        Ok(())
    }

    /// Opens memory of another process, waits for a line, reads it, and waits for another.
    fn import(&self, hex: &str) -> Result<()> {
        let bytes: Vec<u64> = (0..8)
            .map(|word| {
                let text = hex.get(word * 16..word * 16 + 16).context("a short handle")?;
                Ok(u64::from_str_radix(text, 16)?.swap_bytes())
            })
            .collect::<Result<_>>()?;
        let open = self.cuda.address("cuIpcOpenMemHandle_v2");
        ensure!(!open.is_null(), "the driver has no cuIpcOpenMemHandle_v2");
        let (mut address, mut value) = (0_u64, 0_u64);
        let code = crate::driver::open_handle(open, &mut address, &bytes);
        say(&json!({"pid": std::process::id(), "open_code": code}))?;
        wait();
        let read = self.cuda.call("cuMemcpyDtoH_v2", &[at(&mut value), address, 8])?;
        say(&json!({"read_code": read}))?;
        wait();
        Ok(())
    }
}

fn percent(part: u64, of: u64) -> f64 {
    100.0 * part as f64 / of.max(1) as f64
}
