//! `nvidia-smi` without arguments, and `--query-gpu`: what NVML says of each GPU that this process sees.
//!
//! Unlike the rest it asks the library, as NVIDIA's program does: so what a limiter changes there is seen.

use crate::CliError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::ffi::OsStr;

/// NVML as a loader finds it.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// A property that can be asked for: its name, and the unit that its column says.
type Property = (&'static str, &'static str, Ask);

/// Asks for it of a GPU with an index.
type Ask = fn(u32, &Device<'_>) -> Result<String, NvmlError>;

const PROPERTIES: [Property; 7] = [
    ("index", "", |index, _| Ok(index.to_string())),
    ("name", "", |_, gpu| gpu.name()),
    ("uuid", "", |_, gpu| gpu.uuid()),
    ("memory.total", "MiB", |_, gpu| Ok(mebibytes(gpu.memory_info()?.total))),
    ("memory.used", "MiB", |_, gpu| Ok(mebibytes(gpu.memory_info()?.used))),
    ("memory.free", "MiB", |_, gpu| Ok(mebibytes(gpu.memory_info()?.free))),
    ("utilization.gpu", "%", |_, gpu| Ok(gpu.utilization_rates()?.gpu.to_string())),
];

fn mebibytes(bytes: u64) -> String {
    (bytes >> 20).to_string()
}

/// A question.
#[derive(Debug)]
struct Query {
    asked: Vec<&'static Property>,
    header: bool,
    units: bool,
}

/// The values of properties, a line for each GPU, below a line with their names.
///
/// # Errors
/// If there is no such property or format, or NVML does not answer.
pub(crate) fn run(names: &str, format: &str) -> Result<String, CliError> {
    let query = Query::read(names, format).map_err(CliError::Usage)?;
    let nvml = Nvml::builder().lib_path(OsStr::new(LIBRARY)).init()?;
    let mut out = query.first_line();
    for index in 0..nvml.device_count()? {
        let gpu = nvml.device_by_index(index)?;
        out += &query.line(|ask| ask(index, &gpu));
    }
    Ok(out)
}

/// What people look at first: memory and load of each GPU, a line each.
///
/// # Errors
/// If NVML does not answer.
pub(crate) fn overview() -> Result<String, CliError> {
    let nvml = Nvml::builder().lib_path(OsStr::new(LIBRARY)).init()?;
    let mut out = row("GPU", "Name", "Memory-Usage", "GPU-Util");
    for index in 0..nvml.device_count()? {
        let gpu = nvml.device_by_index(index)?;
        let or_none = |value: Result<String, NvmlError>| value.unwrap_or_else(|_| "N/A".to_owned());
        let memory = gpu
            .memory_info()
            .map(|memory| format!("{}MiB / {}MiB", mebibytes(memory.used), mebibytes(memory.total)));
        let load = gpu.utilization_rates().map(|rates| format!("{}%", rates.gpu));
        out += &row(&index.to_string(), &or_none(gpu.name()), &or_none(memory), &or_none(load));
    }
    Ok(out)
}

fn row(index: &str, name: &str, memory: &str, load: &str) -> String {
    format!("| {index:>3}  {name:<30} | {memory:>21} | {load:>8} |\n")
}

impl Query {
    fn read(names: &str, format: &str) -> Result<Self, String> {
        let mut query = Self { asked: Vec::new(), header: true, units: true };
        for name in names.split(',').map(str::trim) {
            let known = PROPERTIES.iter().find(|(property, ..)| *property == name);
            let all: Vec<&str> = PROPERTIES.iter().map(|(name, ..)| *name).collect();
            let known = known
                .ok_or_else(|| format!("no property {name:?}; this stand-in knows {}", all.join(", ")))?;
            query.asked.push(known);
        }
        let mut options = format.split(',').map(str::trim);
        if options.next() != Some("csv") {
            return Err("--query-gpu needs --format=csv".to_owned());
        }
        for option in options {
            match option {
                "noheader" => query.header = false,
                "nounits" => query.units = false,
                _ => return Err(format!("no format {option:?}; there are csv, noheader and nounits")),
            }
        }
        Ok(query)
    }

    /// The unit of a property, if it has one and is to have it.
    fn unit(&self, property: &Property) -> Option<&'static str> {
        Some(property.1).filter(|unit| self.units && !unit.is_empty())
    }

    fn first_line(&self) -> String {
        if !self.header {
            return String::new();
        }
        line(self.asked.iter().map(|property| match self.unit(property) {
            Some(unit) => format!("{} [{unit}]", property.0),
            None => property.0.to_owned(),
        }))
    }

    fn line(&self, value: impl Fn(Ask) -> Result<String, NvmlError>) -> String {
        line(self.asked.iter().map(|property| match (value(property.2), self.unit(property)) {
            (Ok(value), Some(unit)) => format!("{value} {unit}"),
            (Ok(value), None) => value,
            (Err(NvmlError::NoPermission), _) => "[Insufficient Permissions]".to_owned(),
            (Err(_), _) => "[N/A]".to_owned(),
        }))
    }
}

fn line(values: impl Iterator<Item = String>) -> String {
    values.collect::<Vec<_>>().join(", ") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_have_units_unless_told_otherwise() {
        let lines = |format: &str| {
            let query = Query::read("index, memory.total", format).expect("a query");
            query.first_line() + &query.line(|_| Ok("7".to_owned()))
        };
        assert_eq!(lines("csv"), "index, memory.total [MiB]\n7, 7 MiB\n");
        assert_eq!(lines("csv,nounits"), "index, memory.total\n7, 7\n");
        assert_eq!(lines("csv,noheader"), "7, 7 MiB\n");
        let query = Query::read("name", "csv").expect("a query");
        assert_eq!(query.line(|_| Err(NvmlError::NotSupported)), "[N/A]\n");
    }

    #[test]
    fn what_it_does_not_know_is_named() {
        for (names, format, word) in
            [("pstate", "csv", "pstate"), ("name", "", "csv"), ("name", "csv,x", "\"x\"")]
        {
            let why = Query::read(names, format).expect_err("no such query");
            assert!(why.contains(word), "{why}");
        }
    }
}
