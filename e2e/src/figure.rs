//! What benchmarks print and write.

use serde::{Deserialize, Serialize};
use std::path::Path;

/// A figure, as all benchmarks write it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// Name.
    pub name: String,
    /// Value.
    pub value: f64,
    /// Unit.
    pub unit: String,
    /// What it is compared with.
    pub baseline: f64,
    /// Value by baseline.
    pub ratio: f64,
    /// What measures it.
    pub command: String,
    /// Which parameters of a device it depends on that have no record of a real one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assumed: Vec<String>,
}

/// Writes figures into a file, as a list, and prints them as a table.
///
/// # Errors
/// If the file cannot be written.
pub fn report(path: &Path, figures: &[Figure]) -> anyhow::Result<()> {
    std::fs::write(path, serde_json::to_vec_pretty(figures)?)?;
    println!("{:<44} {:>14} {:>14} {:>8}  unit", "name", "value", "baseline", "ratio");
    for Figure { name, value, unit, baseline, ratio, assumed, .. } in figures {
        let mark = if assumed.is_empty() { "" } else { "; assumed: " };
        println!(
            "{name:<44} {value:>14.3} {baseline:>14.3} {ratio:>8.3}  {unit}{mark}{}",
            assumed.join(", ")
        );
    }
    Ok(())
}
