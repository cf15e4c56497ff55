//! What was seen of a real driver, as parameters of the simulated one: the file that `e2e/gpu/run` writes.
//!
//! | fact of the file | parameter |
//! |---|---|
//! | `nvml_pids` | [`ProcessView`] |
//! | `resolver` | `resolver=same` or `alias` |
//! | `context_bytes` | `context_mib`, rounded up |
//! | `time_slices` | `slice_us` |
//! | `release_after_sigkill` | [`NodeSpec::reap_delay_ms`], rounded up |
//!
//! The other facts are no parameters: the time of a kernel of a millisecond beside a busy process follows from the
//! slices, that exported memory outlives its exporter is fixed (a record that says otherwise is refused), and what
//! nvidia-smi says of MIG becomes a row of [`crate::tables`] by hand.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::spec::{NodeSpec, ProcessView};

/// Parameters with a record; `None` is assumed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// The GPU and its driver's version; empty where there is no record at all.
    pub device: String,
    /// How NVML names processes.
    pub process_view: Option<ProcessView>,
    /// Whether `cuGetProcAddress` answers with other addresses than `dlsym`.
    pub resolver_aliases: Option<bool>,
    /// What a first context takes, in MiB.
    pub context_mib: Option<u64>,
    /// Time slice beside a busy process, in microseconds.
    pub slice_us: Option<u64>,
    /// How long a killed process's memory stays in use, in milliseconds.
    pub reap_delay_ms: Option<u64>,
}

/// A record cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("record {}: {reason}; `e2e/gpu/run` on a machine with a GPU writes such files", path.display())]
pub struct RecordError {
    path: PathBuf,
    reason: String,
}

#[derive(Deserialize)]
struct File {
    simulated: bool,
    device: Device,
    facts: Map<String, Value>,
}

#[derive(Deserialize)]
struct Device {
    name: String,
    driver: String,
}

#[derive(Deserialize)]
struct Pids {
    outside: Outside,
    inside_a_pid_namespace: Value,
}

#[derive(Deserialize)]
struct Outside {
    lists_process_by_its_pid: bool,
    counts_its_memory: bool,
}

#[derive(Deserialize)]
struct Inside {
    seen: Seen,
    lists_the_process_outside_by_its_host_pid: bool,
}

#[derive(Deserialize)]
struct Seen {
    pids: Vec<u32>,
    own: u32,
}

#[derive(Deserialize)]
struct Resolver {
    equal: u64,
    different: Vec<String>,
}

#[derive(Deserialize)]
struct Context {
    of_gpu: u64,
    of_process: Option<u64>,
}

#[derive(Deserialize)]
struct Slices {
    median_us: Option<f64>,
}

#[derive(Deserialize)]
struct Release {
    ms: Option<f64>,
}

#[derive(Deserialize)]
struct Exported {
    bytes_released: u64,
    bytes_exported: u64,
}

/// A fact under its name; `None` if it could not be had where the file was written, or is of another release.
fn fact<T: DeserializeOwned>(name: &str, value: Option<&Value>) -> Result<Option<T>, String> {
    match value {
        None => Ok(None),
        Some(value) if value.get("unknown").is_some() => Ok(None),
        Some(value) => T::deserialize(value).map(Some).map_err(|error| format!("fact {name}: {error}")),
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to the range")]
fn rounded(name: &str, value: f64) -> Result<u64, String> {
    if (0.0..1e9).contains(&value) {
        Ok(value as u64)
    } else {
        Err(format!("fact {name}: {value} cannot be"))
    }
}

impl Record {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, is no such file, or is one of the simulated driver.
    pub fn read(path: &Path) -> Result<Self, RecordError> {
        let bad = |reason| RecordError { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
        Self::parse(&text).map_err(bad)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: File = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if file.simulated {
            return Err("it is of the simulated driver, which says nothing about a real one".to_owned());
        }
        let value = |name: &str| file.facts.get(name);
        let pids: Option<Pids> = fact("nvml_pids", value("nvml_pids"))?;
        let resolver: Option<Resolver> = fact("resolver", value("resolver"))?;
        let context: Option<Context> = fact("context_bytes", value("context_bytes"))?;
        let slices: Option<Slices> = fact("time_slices", value("time_slices"))?;
        let release: Option<Release> = fact("release_after_sigkill", value("release_after_sigkill"))?;
        let exported: Option<Exported> = fact("exported_memory", value("exported_memory"))?;
        if exported.is_some_and(|found| found.bytes_released > found.bytes_exported / 2) {
            return Err(
                "fact exported_memory: this driver frees it with its exporter, which the simulated one \
                        cannot be told to do"
                    .to_owned(),
            );
        }
        let whole = |name, value: Option<f64>| value.map(|value| rounded(name, value)).transpose();
        Ok(Self {
            device: format!("{}, driver {}", file.device.name, file.device.driver),
            process_view: pids.map(view).transpose()?.flatten(),
            resolver_aliases: resolver
                .filter(|found| found.equal > 0 || !found.different.is_empty())
                .map(|found| !found.different.is_empty()),
            context_mib: context.map(|found| found.of_process.unwrap_or(found.of_gpu).div_ceil(1 << 20)),
            slice_us: whole("time_slices", slices.and_then(|found| found.median_us).map(f64::round))?,
            reap_delay_ms: whole("release_after_sigkill", release.and_then(|found| found.ms).map(f64::ceil))?,
        })
    }

    /// Which parameters are assumed.
    pub fn assumed(&self) -> Vec<&'static str> {
        let all = [
            ("process view", self.process_view.is_some()),
            ("resolver", self.resolver_aliases.is_some()),
            ("context size", self.context_mib.is_some()),
            ("time slices", self.slice_us.is_some()),
            ("release delay", self.reap_delay_ms.is_some()),
        ];
        all.into_iter().filter(|(_, is_recorded)| !is_recorded).map(|(name, _)| name).collect()
    }

    /// Settings of the simulated CUDA driver, as lines of `cuda.conf`.
    pub fn settings(&self) -> Vec<String> {
        let resolver = self.resolver_aliases.map(|aliases| if aliases { "alias" } else { "same" });
        let all = [
            resolver.map(|resolver| format!("resolver={resolver}")),
            self.context_mib.map(|mib| format!("context_mib={mib}")),
            self.slice_us.map(|us| format!("slice_us={us}")),
        ];
        all.into_iter().flatten().collect()
    }
}

/// `None` where the simulator has no such view, or nobody looked from inside.
fn view(pids: Pids) -> Result<Option<ProcessView>, String> {
    let inside: Option<Inside> =
        fact("nvml_pids, inside_a_pid_namespace", Some(&pids.inside_a_pid_namespace))?;
    Ok(match (pids.outside, inside) {
        (Outside { lists_process_by_its_pid: false, .. }, _) => Some(ProcessView::Empty),
        (Outside { counts_its_memory: false, .. }, _) => Some(ProcessView::NotAvailable),
        (_, Some(inside)) if inside.lists_the_process_outside_by_its_host_pid => Some(ProcessView::Host),
        (_, Some(inside)) if inside.seen.pids.contains(&inside.seen.own) => Some(ProcessView::Own),
        _ => None,
    })
}

impl NodeSpec {
    /// The same with a driver as it was recorded; what has no record stays as it is.
    pub fn recorded(mut self, record: &Record) -> Self {
        self.process_view = record.process_view.unwrap_or(self.process_view);
        self.reap_delay_ms = record.reap_delay_ms.unwrap_or(self.reap_delay_ms);
        self.cuda_settings.extend(record.settings());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: &str = r#""simulated": false, "device": {"name": "GPU", "driver": "1.2"}"#;

    fn of(facts: &str) -> Result<Record, String> {
        Record::parse(&format!("{{{DEVICE}, \"facts\": {{{facts}}}}}"))
    }

    #[test]
    fn what_could_not_be_had_is_assumed() {
        let record = of(
            r#""context_bytes": {"unknown": "no device"}, "resolver": {"asked": 2, "equal": 2, "different": []}"#,
        );
        let record = record.unwrap();
        assert_eq!(
            record,
            Record { device: "GPU, driver 1.2".into(), resolver_aliases: Some(false), ..Record::default() }
        );
        assert_eq!(record.assumed(), ["process view", "context size", "time slices", "release delay"]);
        assert_eq!(Record::default().assumed().len(), 5);
    }

    #[test]
    fn a_malformed_fact_is_named() {
        let bad = of(r#""context_bytes": {"of_gpu": "many", "of_process": null}"#).unwrap_err();
        assert!(bad.contains("fact context_bytes") && bad.contains("many"), "{bad}");
        let bad = of(r#""release_after_sigkill": {"ms": -3.0}"#).unwrap_err();
        assert!(bad.contains("release_after_sigkill: -3"), "{bad}");
        let bad = of(r#""exported_memory": {"bytes_released": 10, "bytes_exported": 10}"#).unwrap_err();
        assert!(bad.contains("exported_memory"), "{bad}");
        let bad = Record::parse("{}").unwrap_err();
        assert!(bad.contains("simulated"), "{bad}");
        let bad = Record::read(Path::new("/no/such/record.json")).unwrap_err().to_string();
        assert!(bad.contains("/no/such/record.json"), "{bad}");
    }

    #[test]
    fn memory_that_was_not_freed_while_it_was_looked_at_has_no_delay() {
        assert_eq!(of(r#""release_after_sigkill": {"ms": null}"#).unwrap().reap_delay_ms, None);
        assert_eq!(of(r#""release_after_sigkill": {"ms": 12.2}"#).unwrap().reap_delay_ms, Some(13));
    }
}
