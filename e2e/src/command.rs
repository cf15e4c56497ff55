//! Runs programs and turns what they say into errors.

use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};

/// Runs a program to its end and gives what it printed.
///
/// # Errors
/// If it does not start or ends with a failure; the error has the command and what it said.
pub fn run(program: impl AsRef<OsStr>, args: &[&str]) -> Result<String> {
    run_with_input(program, args, "")
}

/// The same with text on its standard input.
///
/// # Errors
/// As [`run`].
pub fn run_with_input(program: impl AsRef<OsStr>, args: &[&str], input: &str) -> Result<String> {
    run_to_end(program, args, input, &[])
}

/// As [`run`], for a program that ends well with these exit codes, too.
///
/// # Errors
/// As [`run`].
pub fn run_accepting(program: impl AsRef<OsStr>, args: &[&str], codes: &[i32]) -> Result<String> {
    run_to_end(program, args, "", codes)
}

fn run_to_end(program: impl AsRef<OsStr>, args: &[&str], input: &str, codes: &[i32]) -> Result<String> {
    let program = program.as_ref();
    let what = || format!("{} {}", program.to_string_lossy(), args.join(" "));
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(what)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read its input may close it early.
        stdin.write_all(input.as_bytes()).ok();
    }
    let output = child.wait_with_output().with_context(what)?;
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() && !output.status.code().is_some_and(|code| codes.contains(&code)) {
        bail!("{} ended with {}:\n{}{}", what(), output.status, out, String::from_utf8_lossy(&output.stderr));
    }
    Ok(out)
}
