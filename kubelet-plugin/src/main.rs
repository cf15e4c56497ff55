//! `aliquot-kubelet-plugin`: the node agent. See the library of the same name.

use aliquot_kubelet_plugin::args::Args;
use aliquot_kubelet_plugin::run;
use clap::Parser;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    run::start_logging(args.log_format);
    match run::run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "giving up");
            ExitCode::FAILURE
        }
    }
}
