//! `cuda-bench`: how long driver calls take in this process, as one line of JSON. Run once plainly and
//! once under the limiter, the difference is what the limiter costs.

#[path = "../cuda.rs"]
#[allow(dead_code, reason = "the probe needs more of it")]
mod cuda;

use cuda::{Cuda, CudaError};
use std::process::ExitCode;
use std::time::Instant;

const PAIRS: u32 = 20_000;
const BATCHES: u32 = 20;
const BYTES: u64 = 2 << 20;

fn main() -> ExitCode {
    match measure() {
        Ok(nanos) => {
            println!("{{\"malloc_pair_ns\":{nanos:.1}}}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cuda-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The fastest batch: what is slower was disturbed by others on this machine.
fn measure() -> Result<f64, CudaError> {
    let cuda = Cuda::load()?;
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
