//! The call log: a line for each call and for what else is worth one.

use std::fs::File;
use std::io::Write as _;
use std::sync::OnceLock;

/// Writes a line of the call log; `text` is only asked for where there is one.
pub(crate) fn line(text: impl FnOnce() -> String) {
    if let Some(mut log) = log_file() {
        // One write per line: lines of several threads and processes stay whole.
        let _ = log.write_all(
            format!("{} {} {}\n", aliquot_sim_node::now_ns(), std::process::id(), text()).as_bytes(),
        );
    }
}

/// A line of the call log that is not a call.
pub(crate) fn note(text: &str) {
    line(|| format!("# {text}"));
}

fn log_file() -> Option<&'static File> {
    static LOG: OnceLock<Option<File>> = OnceLock::new();
    LOG.get_or_init(|| {
        let path = std::env::var_os("ALIQUOT_SIM_CUDA_LOG").filter(|p| !p.is_empty())?;
        File::options().create(true).append(true).open(path).ok()
    })
    .as_ref()
}
