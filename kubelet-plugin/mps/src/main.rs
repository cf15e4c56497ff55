//! `aliquot-mps`: runs NVIDIA's MPS control daemon for each claim that asks for one. See the library.

use aliquot_mps::args::{Args, LogFormat, Place, Task};
use aliquot_mps::contract::MpsDir;
use aliquot_mps::isolate::{self, HOPELESS, Part, Role};
use aliquot_mps::keeper::Timing;
use aliquot_mps::supervise::{self, Launcher};
use anyhow::Context;
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = Args::parse();
    match &args.command {
        Some(Task::Daemon { directory, group, control }) => {
            let role = if *control { Role::Control } else { Role::Daemon };
            daemon(&args.place, directory, Part { role, group: *group })
        }
        None => serve(&args),
    }
}

fn serve(args: &Args) -> ExitCode {
    start_logging(args.log_format);
    let served = std::env::current_exe().context("cannot find this program").and_then(|program| {
        let (roots, isolation) = (args.place.roots(), args.place.isolation());
        let launcher = Launcher { program, roots, isolation };
        supervise::run(&MpsDir::new(&args.mps_dir), &launcher, &Timing::default())
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "giving up");
            ExitCode::FAILURE
        }
    }
}

fn daemon(place: &Place, directory: &std::path::Path, part: Part) -> ExitCode {
    use std::io::Write;
    let claim = directory
        .parent()
        .zip(directory.file_name().and_then(|name| name.to_str()))
        .context("the directory of a claim has a parent and a name")
        .and_then(|(parent, uid)| Ok(MpsDir::new(parent).claim(uid)?));
    let (reason, hopeless) = match claim {
        Ok(claim) => {
            let error = isolate::become_program(&claim, &place.roots(), place.isolation(), part);
            (error.to_string(), error.is_hopeless())
        }
        Err(error) => (format!("{error:#}"), true),
    };
    // The supervisor reads the reason from the log.
    let _ = writeln!(std::io::stderr(), "{reason}");
    match u8::try_from(HOPELESS) {
        Ok(status) if hopeless => ExitCode::from(status),
        _ => ExitCode::FAILURE,
    }
}

fn start_logging(format: LogFormat) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}
