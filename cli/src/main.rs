//! `aliquot`: the operator's command.
//!
//! `demo` runs the whole product on one machine without GPU, cluster or root; `explain` says why a claim has
//! its devices, or has none; `plan` shows which pods would be moved to fill gaps; `release` frees devices
//! that claims keep without a pod; `cordon` and `uncordon` take one GPU out of service and put it back;
//! `acknowledge` clears the earlier errors of a GPU; `uninstall` removes the product from a cluster;
//! `completion` prints a script for a shell; `install-node-files` is run by the node agent's init container.
//! Installed as `kubectl-aliquot`, the program is a kubectl plugin.
//!
//! Start reading at [`demo::run`].
#![forbid(unsafe_code)]

/// Prints a line. Errors are ignored: the reader may be gone (`| head`), and the work goes on all the same.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

mod args;
mod client;
mod completion;
mod cordon;
#[cfg(target_os = "linux")]
mod demo;
#[cfg(not(target_os = "linux"))]
#[path = "demo_elsewhere.rs"]
mod demo;
mod explain;
mod install;
mod output;
mod plan;
#[cfg(test)]
mod reference;
mod release;
mod rights;
mod snapshot;
mod uninstall;

use args::{Args, Command};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut words = std::env::args_os();
    if completion::is_asked(words.next().as_deref()) {
        let words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
        completion::answer(&words);
        return ExitCode::SUCCESS;
    }
    let args = Args::read();
    let result = match args.command {
        // Before any thread exists: a process with threads cannot enter a user namespace.
        Command::Container(container) => return demo::become_container(&container),
        Command::Tether(tether) => return demo::become_tethered(&tether),
        Command::InstallNodeFiles(install) => done(install::run(&install)),
        Command::Demo(demo) => done(in_runtime(demo::run(demo))),
        Command::Plan(plan) => done(in_runtime(plan::run(plan))),
        Command::Release(release) => done(in_runtime(release::run(release))),
        Command::Cordon(cordon) => done(in_runtime(cordon::run(cordon))),
        Command::Uncordon(uncordon) => done(in_runtime(cordon::undo(uncordon))),
        Command::Acknowledge(acknowledge) => done(in_runtime(cordon::acknowledge::run(acknowledge))),
        Command::Explain(explain) => in_runtime(explain::run(explain)),
        Command::Completion(completion) => {
            completion::run(&completion);
            Ok(ExitCode::SUCCESS)
        }
        Command::Uninstall(uninstall) => done(in_runtime(uninstall::run(uninstall))),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("aliquot: {}", client::told(&error));
            ExitCode::FAILURE
        }
    }
}

fn done(result: anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    result.map(|()| ExitCode::SUCCESS)
}

fn in_runtime<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}
