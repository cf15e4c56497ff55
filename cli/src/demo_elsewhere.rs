//! The demo on systems on which it cannot run: its containers need features of Linux.

use crate::args::{ContainerArgs, DemoArgs, TetherArgs};
use anyhow::{Result, bail};
use std::process::ExitCode;

/// Refuses to run the demo.
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
