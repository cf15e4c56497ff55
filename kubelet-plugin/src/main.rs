//! `aliquot-kubelet-plugin`: the node agent. See the library of the same name.

use aliquot_kubelet_plugin::args::Args;
use aliquot_kubelet_plugin::run;
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = Args::parse();
    run::start_logging(args.log_format);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
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
