//! Builds the commands that set a claim's limits, and reads the control daemon's answer. Pure: it does no
//! I/O.
//!
//! The daemon reports a command that it did not accept only in its output, so each limit is read back.

use crate::contract::{Ask, LIMIT_UNIT};
use std::fmt::Write;

/// Returns the lines that set all limits and then ask for each of them. Without limits they ask for something that
/// any living daemon answers.
pub fn script(ask: &Ask) -> String {
    let mut set = String::new();
    let mut get = String::new();
    // Writing to a string cannot fail.
    if let Some(percent) = ask.active_thread_percentage {
        let _ = writeln!(set, "set_default_active_thread_percentage {percent}");
        get.push_str("get_default_active_thread_percentage\n");
    }
    if let Some(bytes) = ask.pinned_device_memory_limit_bytes {
        for index in 0..ask.gpus.len() {
            let _ = writeln!(set, "set_default_device_pinned_mem_limit {index} {}M", bytes / LIMIT_UNIT);
            let _ = writeln!(get, "get_default_device_pinned_mem_limit {index}");
        }
    }
    if get.is_empty() { "get_server_list\n".to_owned() } else { set + &get }
}

/// The error of a limit that is not in force.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the control daemon did not take {limit}; it answered {answer:?}: compare the limit with what this driver's MPS \
     supports"
)]
pub struct NotTaken {
    /// The name of the limit, as in the ask.
    pub limit: &'static str,
    /// The whole answer.
    pub answer: String,
}

/// Compares the daemon's answer to [`script`] with the ask.
///
/// # Errors
/// Fails with [`NotTaken`] if a limit is not in force.
pub fn check(ask: &Ask, answer: &str) -> Result<(), NotTaken> {
    let mut wanted: Vec<(&'static str, bool)> = Vec::new();
    let lines: Vec<&str> = answer.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let memory = ask.pinned_device_memory_limit_bytes.map(|bytes| bytes / LIMIT_UNIT);
    let asked = usize::from(ask.active_thread_percentage.is_some()) + memory.map_or(0, |_| ask.gpus.len());
    let mut answers = lines.iter().skip(lines.len().saturating_sub(asked));
    if let Some(percent) = ask.active_thread_percentage {
        let holds = answers.next().and_then(|line| line.parse::<f64>().ok());
        wanted.push(("activeThreadPercentage", holds == Some(f64::from(percent))));
    }
    if let Some(mib) = memory {
        for _ in &ask.gpus {
            let holds = answers.next().and_then(|line| in_mib(line));
            wanted.push(("pinnedDeviceMemoryLimit", holds == Some(mib)));
        }
    }
    match wanted.iter().find(|(_, holds)| !holds) {
        None => Ok(()),
        Some((limit, _)) => Err(NotTaken { limit, answer: answer.to_owned() }),
    }
}

/// Parses a limit as the daemon writes it, in whole `M` or `G`, into MiB.
fn in_mib(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = number.parse().ok()?;
    match unit {
        "M" => Some(number),
        "G" => number.checked_mul(1024),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{AskedGpu, ClaimRef, Version};
    use rstest::rstest;

    fn ask(percent: Option<u32>, bytes: Option<u64>) -> Ask {
        Ask {
            version: Version,
            claim: ClaimRef { namespace: "ns".into(), name: "c".into(), uid: "u".into() },
            gpus: [0, 1].map(|minor| AskedGpu { uuid: format!("GPU-{minor}"), minor }).into(),
            active_thread_percentage: percent,
            pinned_device_memory_limit_bytes: bytes,
        }
    }

    #[test]
    fn limits_are_set_for_every_gpu_and_asked_back() {
        assert_eq!(
            script(&ask(Some(50), Some((512 << 20) + 5))),
            "set_default_active_thread_percentage 50\n\
             set_default_device_pinned_mem_limit 0 512M\n\
             set_default_device_pinned_mem_limit 1 512M\n\
             get_default_active_thread_percentage\n\
             get_default_device_pinned_mem_limit 0\n\
             get_default_device_pinned_mem_limit 1\n"
        );
        assert_eq!(script(&ask(None, None)), "get_server_list\n");
    }

    // What driver 535 answers: a set percentage is repeated, a set memory limit is not.
    #[rstest]
    #[case::all(Some(50), Some(80 << 30), "50.0\n50.0\n80G\n80G\n", true)]
    #[case::in_mib(None, Some(512 << 20), "512M\n512M\n", true)]
    #[case::no_limits(None, None, "\n", true)]
    #[case::another_percentage(Some(50), None, "100.0\n100.0\n", false)]
    #[case::one_gpu_alone(None, Some(1 << 30), "1G\n", false)]
    #[case::another_limit(None, Some(1 << 30), "1G\n2G\n", false)]
    #[case::unknown(Some(50), None, "Unknown command \"set_default_active_thread_percentage\"\n", false)]
    #[case::nothing(Some(50), None, "", false)]
    fn only_an_answer_with_every_limit_is_taken(
        #[case] percent: Option<u32>,
        #[case] bytes: Option<u64>,
        #[case] answer: &str,
        #[case] taken: bool,
    ) {
        let said = check(&ask(percent, bytes), answer);
        assert_eq!(said.is_ok(), taken, "{said:?}");
    }

    #[test]
    fn the_limit_and_the_answer_are_named() {
        let said = check(&ask(Some(50), None), "100.0\n").unwrap_err().to_string();
        assert_eq!(
            said,
            "the control daemon did not take activeThreadPercentage; it answered \"100.0\\n\": compare the limit with \
             what this driver's MPS supports"
        );
    }
}
