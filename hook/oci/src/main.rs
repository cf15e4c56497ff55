//! See the library's documentation.

use aliquot_oci_hook::{Args, HookError, run};
use std::process::ExitCode;

fn main() -> ExitCode {
    let outcome = Args::parse(std::env::args_os().skip(1))
        .map_err(HookError::from)
        .and_then(|args| run(&args, &mut std::io::stdin().lock()));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "aliquot: the container is not started: {error}");
            ExitCode::FAILURE
        }
    }
}
