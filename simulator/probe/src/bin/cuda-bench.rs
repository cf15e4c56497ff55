//! `cuda-bench`: how long driver calls take in this process, as one line of JSON. Run once plainly and
//! once under the limiter, the difference is what the limiter costs.
//!
//! `cuda-bench` times pairs of cuMemAlloc and cuMemFree; `cuda-bench malloc THREADS` does so in several threads at once,
//! and tells the processor's time of a pair; `cuda-bench launch THREADS` launches, in bursts with pauses between them, so
//! that a share with a part of the GPU's time never has to wait.

#[path = "../cuda.rs"]
#[allow(dead_code, reason = "the probe needs more of it")]
mod cuda;
#[path = "../table.rs"]
#[allow(dead_code, reason = "the probe needs more of it")]
mod table;

use cuda::{Cuda, CudaError, Kernel};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const PAIRS: u32 = 20_000;
const BATCHES: u32 = 20;
const BYTES: u64 = 2 << 20;

/// Launches of a burst: with kernels of 5 us, the pause behind it pays for it at a tenth of the GPU.
const BURST: u32 = 400;
const PAUSE: Duration = Duration::from_millis(22);
/// Bursts that are not counted: costs are learned in them.
const COLD: u32 = 40;
const BURSTS: u32 = 100;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let measured = match (args.next().as_deref(), args.next().and_then(|n| n.parse::<u32>().ok())) {
        (Some("launch"), Some(threads)) => launches(threads).map(|nanos| ("launch_ns", nanos)),
        (Some("malloc"), Some(threads)) => malloc_of_threads(threads).map(|nanos| ("malloc_cpu_ns", nanos)),
        _ => malloc_pairs().map(|nanos| ("malloc_pair_ns", nanos)),
    };
    match measured {
        Ok((name, nanos)) => {
            println!("{{\"{name}\":{nanos:.2}}}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cuda-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The fastest batch: what is slower was disturbed by others on this machine.
fn malloc_pairs() -> Result<f64, CudaError> {
    let cuda = Cuda::load(false)?;
    let device = cuda.device(0)?;
    cuda.make_current(device)?;
    let mut best = f64::INFINITY;
    for _ in 0..BATCHES {
        let start = Instant::now();
        for _ in 0..PAIRS / BATCHES {
            let pointer = cuda.allocate(BYTES)?;
            cuda.free(pointer)?;
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS / BATCHES));
    }
    Ok(best)
}

/// Nanoseconds of the processor for a pair, in the mean of all threads: who waits for another thread by sleeping, or for
/// a processor, pays nothing for that.
fn malloc_of_threads(threads: u32) -> Result<f64, CudaError> {
    let cuda = Cuda::load(false)?;
    let device = cuda.device(0)?;
    cuda.make_current(device)?;
    let begins = std::sync::Barrier::new(threads as usize);
    let one = || -> Result<f64, CudaError> {
        cuda.make_current(device)?;
        begins.wait();
        let start = cpu_ns();
        for _ in 0..PAIRS {
            let pointer = cuda.allocate(BYTES)?;
            cuda.free(pointer)?;
        }
        Ok((cpu_ns() - start) / f64::from(PAIRS))
    };
    mean_of(threads, one)
}

/// The calling thread's time on a processor.
fn cpu_ns() -> f64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID);
    time.map_or(f64::NAN, |time| Duration::from(time).as_secs_f64() * 1e9)
}

/// What threads measure that run at the same time.
fn mean_of(threads: u32, one: impl Fn() -> Result<f64, CudaError> + Sync) -> Result<f64, CudaError> {
    let sum: Result<f64, CudaError> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(&one)).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or(Err(CudaError::Call("a thread", -1)))).sum()
    });
    Ok(sum? / f64::from(threads.max(1)))
}

/// Nanoseconds of a launch, all that belongs to it included, as each thread sees it: the mean over all bursts, less
/// the tenth that was slowest, which others on this machine disturbed.
fn launches(threads: u32) -> Result<f64, CudaError> {
    let cuda = Cuda::load(false)?;
    cuda.make_current(cuda.device(0)?)?;
    let kernel = cuda.spinner()?;
    let one = || -> Result<f64, CudaError> {
        cuda.make_current(cuda.device(0)?)?;
        let mut bursts = Vec::new();
        for round in 0..COLD + BURSTS {
            let nanos = burst(&cuda, &kernel)?;
            if round >= COLD {
                bursts.push(nanos);
            }
            std::thread::sleep(PAUSE * threads);
        }
        bursts.sort_by(f64::total_cmp);
        bursts.truncate(bursts.len() * 9 / 10);
        Ok(bursts.iter().sum::<f64>() / bursts.len() as f64)
    };
    mean_of(threads, one)
}

fn burst(cuda: &Cuda, kernel: &Kernel) -> Result<f64, CudaError> {
    let start = Instant::now();
    for _ in 0..BURST {
        cuda.launch(kernel)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(BURST))
}
