//! `aliquot-kubelet-plugin`: the node agent. See the library of the same name.

use aliquot_kubelet_plugin::args::Args;
use aliquot_kubelet_plugin::run;
use clap::Parser;
use std::process::ExitCode;
use std::time::Duration;

/// The number of threads for work that does not block. A node may have hundreds of processors, but its agent
/// needs none for long, and each thread takes memory.
const WORKERS: usize = 2;
/// The time that a thread for blocking work stays when there is nothing to do. The threads take turns, so
/// with a long time the few tasks of an idle node would keep all threads of a burst of claims.
const THREADS_STAY: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    let args = Args::parse();
    run::start_logging(args.log_format);
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_keep_alive(THREADS_STAY)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "no runtime");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(run::run(args));
    // A thread that waits for the driver must not keep the process.
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "giving up");
            ExitCode::FAILURE
        }
    }
}
