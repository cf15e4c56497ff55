//! Annotations of a Node that are about one GPU each: `<prefix><GPU UUID>: <value>`.

use crate::GpuUuid;
use std::collections::BTreeMap;

/// The most characters of a reason that are passed on.
pub(crate) const REASON: usize = 200;

/// Returns the name of a GPU's annotation.
pub(crate) fn key(prefix: &str, gpu: &GpuUuid) -> String {
    format!("{prefix}{gpu}")
}

/// Returns a reason as it is passed on: in one line, and shortened.
pub(crate) fn reason(text: &str) -> String {
    text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(REASON).collect()
}

/// Returns the values of the annotations with this prefix by GPU, and the names of those that name no GPU by
/// its UUID or whose value cannot be read.
pub(crate) fn read<T>(
    annotations: &BTreeMap<String, String>,
    prefix: &str,
    value: impl Fn(&str) -> Option<T>,
) -> (BTreeMap<GpuUuid, T>, Vec<String>) {
    let mut gpus = BTreeMap::new();
    let mut not_understood = Vec::new();
    for (name, text) in annotations {
        let Some(gpu) = name.strip_prefix(prefix) else { continue };
        match GpuUuid::parse(gpu).zip(value(text)) {
            Some((gpu, said)) => drop(gpus.insert(gpu, said)),
            None => not_understood.push(name.clone()),
        }
    }
    (gpus, not_understood)
}
