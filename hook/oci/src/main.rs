//! The OCI hook's program; see the library's documentation.

use aliquot_oci_hook::{HookError, Task, run};
use std::process::ExitCode;

fn main() -> ExitCode {
    // Runtimes start a hook in the container's root, whose content is the image's.
    if let Err(error) = std::env::set_current_dir("/") {
        return refuse(&error);
    }
    let outcome = Task::parse(std::env::args_os().skip(1))
        .map_err(HookError::from)
        .and_then(|task| run(&task, &mut std::io::stdin().lock()));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(&error),
    }
}

fn refuse(error: &dyn std::fmt::Display) -> ExitCode {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "aliquot: the container is not started: {error}");
    ExitCode::FAILURE
}
