//! Modes and limits of GPUs, which a run leaves as they were.

use crate::driver::{Board, at};
use crate::node::line::Promise;
use serde_json::Value;
use std::collections::BTreeMap;

/// A setting, NVML's function that reads it, and what that takes between the GPU and its answers (one or two numbers).
const SETTINGS: [(&str, &str, Option<u64>); 9] = [
    ("MIG mode, now and pending", "nvmlDeviceGetMigMode", None),
    ("compute mode", "nvmlDeviceGetComputeMode", None),
    ("persistence mode", "nvmlDeviceGetPersistenceMode", None),
    ("ECC mode, now and pending", "nvmlDeviceGetEccMode", None),
    ("accounting mode", "nvmlDeviceGetAccountingMode", None),
    ("power limit in mW", "nvmlDeviceGetPowerManagementLimit", None),
    ("GPU operation mode", "nvmlDeviceGetGpuOperationMode", None),
    ("clock of multiprocessors that was set, in MHz", "nvmlDeviceGetApplicationsClock", Some(1)),
    ("clock of memory that was set, in MHz", "nvmlDeviceGetApplicationsClock", Some(2)),
];

/// Settings by GPU; what NVML does not tell is its code.
pub(crate) type Modes = BTreeMap<String, BTreeMap<&'static str, String>>;

/// Reads all settings of these GPUs.
pub(crate) fn read(boards: &[Board]) -> Modes {
    let of = |board: &Board| {
        let all = SETTINGS.iter().map(|(name, symbol, kind)| {
            let [mut first, mut second] = [0_u32; 2];
            let answers = [at(&mut first), at(&mut second)];
            let words: Vec<u64> = std::iter::once(board.device).chain(*kind).chain(answers).collect();
            let said = match board.nvml.call(symbol, &words) {
                Ok(0) => format!("{first} {second}"),
                Ok(code) => format!("NVML's error {code}"),
                Err(error) => error.to_string(),
            };
            (*name, said)
        });
        all.collect()
    };
    boards.iter().map(|board| (board.uuid(), of(board))).collect()
}

/// Whether everything is as it was.
pub(crate) fn unchanged(before: &Modes, after: &Modes) -> Promise {
    let mut changed = Vec::new();
    for (gpu, settings) in before {
        for (name, value) in settings {
            let now = after.get(gpu).and_then(|settings| settings.get(name)).map_or("?", String::as_str);
            if now != value {
                changed.push(format!("{gpu}: {name} was {value} and is {now}"));
            }
        }
    }
    let name = "modes, clocks and limits of all GPUs are as they were before the run";
    Promise::of(name, changed.is_empty(), changed.join("; "), Value::Null)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;
    use crate::report::Outcome;

    #[test]
    fn a_setting_that_is_another_afterwards_is_named_with_both_values() {
        let modes = |value: &str| -> Modes {
            BTreeMap::from([("GPU-1".to_owned(), BTreeMap::from([("persistence mode", value.to_owned())]))])
        };
        assert_eq!(unchanged(&modes("0 0"), &modes("0 0")).outcome, Outcome::Passed);
        let changed = unchanged(&modes("0 0"), &modes("1 0"));
        assert_eq!(changed.outcome, Outcome::Failed);
        assert_eq!(changed.reason, "GPU-1: persistence mode was 0 0 and is 1 0");
        assert_eq!(unchanged(&modes("0 0"), &Modes::new()).outcome, Outcome::Failed);
    }
}
