//! The demo where it cannot run: its containers are made of what Linux alone has.

use crate::args::{ContainerArgs, DemoArgs, TetherArgs};
use anyhow::{Result, bail};
use std::process::ExitCode;

/// Runs the demo.
///
/// # Errors
/// Always.
pub(crate) async fn run(_: DemoArgs) -> Result<()> {
    bail!("the demo runs on Linux alone, as it makes containers; all other commands work here")
}

pub(crate) const fn become_container(_: &ContainerArgs) -> ExitCode {
    ExitCode::FAILURE
}

pub(crate) const fn become_tethered(_: &TetherArgs) -> ExitCode {
    ExitCode::FAILURE
}
