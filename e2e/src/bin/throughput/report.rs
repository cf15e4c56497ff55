//! What is printed and written.

use crate::load::Measured;
use crate::settings::Settings;
use aliquot_e2e::figure::{self, Figure};
use anyhow::{Context, Result};
use std::path::PathBuf;

/// The figures of this run beside those that earlier runs wrote under other names.
#[derive(Debug)]
pub(crate) struct Report {
    path: PathBuf,
    figures: Vec<Figure>,
    command: String,
}

impl Report {
    /// Reads what there is.
    ///
    /// # Errors
    /// If the folder cannot be made or the file is something else.
    pub(crate) fn new(settings: &Settings) -> Result<Self> {
        let own = std::env::current_exe()?;
        let folder = own.parent().context("no build directory")?.join("../bench");
        std::fs::create_dir_all(&folder)?;
        let path = folder.join("throughput.json");
        let figures = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        println!("{}", settings.command());
        Ok(Self { path, figures, command: settings.command() })
    }

    /// The last of some runs.
    pub(crate) fn line(&self, who: &str, what: &str, round: usize, runs: &[Measured]) {
        let Some(run) = runs.last() else { return };
        let used: Vec<String> =
            run.used.iter().map(|(program, seconds)| format!("{program} {seconds:.1}")).collect();
        println!(
            "{who:<16} {what:<10} run {round}: {} pods in {:.2} s, {:.1} pods/s; created in {:.2} s; CPU seconds: {}",
            run.pods,
            run.bound.as_secs_f64(),
            run.rate(),
            run.created.as_secs_f64(),
            used.join(", ")
        );
    }

    /// Adds how fast pods of the one were bound beside those of the other, and what a pod cost: the medians
    /// of their runs.
    pub(crate) fn compare(&mut self, name: &str, unit: &str, (one, other): (&[Measured], &[Measured])) {
        let cost = "processor ms a pod, all programs of the cluster together; baseline: the same";
        let rate: fn(&Measured) -> f64 = Measured::rate;
        for (name, unit, of) in
            [(name.to_owned(), unit, rate), (format!("{name}.cost"), cost, Measured::cost)]
        {
            let (value, baseline) = (middle(one, of), middle(other, of));
            let (unit, command) = (unit.to_owned(), self.command.clone());
            self.add(Figure {
                name,
                value,
                unit,
                baseline,
                ratio: value / baseline,
                command,
                assumed: Vec::new(),
            });
        }
    }

    /// Adds a figure, in the place of one of its name.
    pub(crate) fn add(&mut self, figure: Figure) {
        self.figures.retain(|known| known.name != figure.name);
        self.figures.push(figure);
    }

    /// A value; not a number if there is none.
    pub(crate) fn value(&self, name: &str) -> f64 {
        self.figures.iter().find(|figure| figure.name == name).map_or(f64::NAN, |figure| figure.value)
    }

    /// Writes and prints.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn finish(&self) -> Result<()> {
        figure::report(&self.path, &self.figures)
    }
}

/// The median.
fn middle(runs: &[Measured], of: impl Fn(&Measured) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match (values.get(half), half.checked_sub(1).and_then(|below| values.get(below))) {
        (Some(upper), Some(lower)) if values.len().is_multiple_of(2) => f64::midpoint(*upper, *lower),
        (Some(upper), _) => *upper,
        _ => f64::NAN,
    }
}
