//! Tells each share the values that the driver counts for its processes.
//!
//! In a container NVML names processes by the node's PIDs, or not at all. So the limiter there cannot tell
//! what its own process holds beyond its allocations. The agent can, from NVML's PID, the process's cgroup
//! and its PID namespaces.

use super::Look;
use crate::selinux::Labels;
use crate::share::read_region;
use aliquot_quota::measured::{Identity, MOST_SIZE, Process, encode};
use aliquot_quota::region::RegionView;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

/// The name of the file beside the quota.
const MEASURED: &str = "measured";

/// The number of looks after which a measurement is no longer valid.
const LOOKS: u32 = 3;

/// The shortest time for which a measurement is valid, because a look may take a while.
const LEAST: Duration = Duration::from_secs(3);

/// Bytes of allocations according to each process's own account.
pub type Accounts = BTreeMap<Identity, u64>;

/// Returns the identity of a process with a PID of the node; `None` if the process is gone or `/proc` does
/// not show it.
pub fn identity(proc: &Path, pid: u32) -> Option<Identity> {
    let folder = proc.join(pid.to_string());
    let status = fs::read_to_string(folder.join("status")).ok()?;
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    let namespace = fs::read_link(folder.join("ns/pid")).ok()?;
    parse(&status, &stat, namespace.to_str()?)
}

fn parse(status: &str, stat: &str, namespace: &str) -> Option<Identity> {
    // The PIDs are listed from the outermost namespace to the process's own.
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    // The command's name may contain anything; fields are counted after its closing bracket.
    let (_, fields) = stat.rsplit_once(')')?;
    Some(Identity {
        pid_namespace: namespace.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()?,
        start_time: fields.split_whitespace().nth(19)?.parse().ok()?,
        pid: pids.split_whitespace().last()?.parse().ok()?,
    })
}

/// Returns the bytes that a share's living processes have charged for allocations. These are the processes'
/// own statements, and only about themselves.
pub fn accounts(region: &RegionView<'_>) -> Accounts {
    let living = region.processes().filter(|process| !process.dead);
    let accounts = living.map(|process| {
        let identity = Identity {
            pid_namespace: process.pid_namespace,
            start_time: process.start_time,
            pid: process.pid,
        };
        (identity, process.charged_bytes.saturating_sub(process.overhead_bytes))
    });
    accounts.collect()
}

/// Reads the accounts of shares, by their result IDs.
pub fn read_accounts<'a>(shares: &Path, ids: impl Iterator<Item = &'a String>) -> BTreeMap<String, Accounts> {
    let read = |id: &String| {
        let (_, bytes) = read_region(shares, id).ok()?;
        Some((id.clone(), accounts(&RegionView::parse(&bytes).ok()?)))
    };
    ids.filter_map(read).collect()
}

/// Builds the page of each share. The looks assign the processes to shares and have the driver's counts. The
/// accounts were read before and after the driver was asked.
pub fn pages(
    looks: &[Look],
    before: &BTreeMap<String, Accounts>,
    after: &BTreeMap<String, Accounts>,
) -> BTreeMap<String, Vec<Process>> {
    let mut pages: BTreeMap<String, Vec<Process>> = BTreeMap::new();
    for look in looks {
        let counted = |all: &BTreeMap<String, Accounts>, identity: &Identity| {
            // A process that may use several shares of the GPU has an account in each.
            let of_shares = look.subject.iter().filter_map(|id| all.get(id)?.get(identity));
            of_shares.fold(None, |sum: Option<u64>, bytes| Some(sum.unwrap_or(0).saturating_add(*bytes)))
        };
        let told: Vec<Process> = look
            .processes
            .iter()
            .filter_map(|process| {
                let identity = process.identity?;
                let counted_bytes = match (counted(before, &identity), counted(after, &identity)) {
                    (None, None) => [u64::MAX; 2],
                    (first, second) => {
                        let (first, second) = (first.unwrap_or(0), second.unwrap_or(0));
                        [first.min(second), first.max(second)]
                    }
                };
                let bytes = process.memory_bytes.unwrap_or(u64::MAX);
                Some(Process { identity, host_pid: process.pid, bytes, counted_bytes })
            })
            .collect();
        for id in &look.subject {
            pages.entry(id.clone()).or_default().extend(&told);
        }
    }
    pages
}

/// Writes the pages of the shares. A share that is gone by now is skipped.
pub fn write(
    shares: &Path,
    labels: &Labels,
    pages: &BTreeMap<String, Vec<Process>>,
    taken_ns: u64,
    interval: Duration,
) {
    let holds = interval.saturating_mul(LOOKS).max(LEAST);
    let until_ns = taken_ns.saturating_add(u64::try_from(holds.as_nanos()).unwrap_or(u64::MAX));
    for (id, processes) in pages {
        let mut out = [0; MOST_SIZE];
        let size = encode(taken_ns, until_ns, processes, &mut out);
        let quota = shares.join(id).join("quota");
        if let Err(error) = replace(&quota, labels, out.get(..size).unwrap_or_default()) {
            tracing::debug!(%error, share = %id, "cannot tell a share what was measured");
        }
    }
}

/// Replaces the file by rename, so that no reader sees half of it. It is not synced, because it is of no use
/// after a crash.
fn replace(quota: &Path, labels: &Labels, content: &[u8]) -> std::io::Result<()> {
    let new = quota.join("measured.tmp");
    fs::write(&new, content)?;
    // Containers run as any user; the umask must not decide.
    fs::set_permissions(&new, fs::Permissions::from_mode(0o644))?;
    labels.read_only(&new).map_err(std::io::Error::other)?;
    fs::rename(&new, quota.join(MEASURED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::{Measured, Quota};

    const ID: Identity = Identity { pid_namespace: 4_026_532_001, start_time: 98_765, pid: 7 };

    fn look(subject: &[&str], identity: Option<Identity>, memory_bytes: Option<u64>) -> Look {
        let process =
            Measured { pid: 5000, name: None, pod: "pod".into(), memory_bytes, percent: 0, identity };
        Look {
            subject: subject.iter().map(|id| (*id).to_owned()).collect(),
            quota: Quota::default(),
            processes: vec![process],
            region: None,
        }
    }

    fn of(all: &[(&str, u64)]) -> BTreeMap<String, Accounts> {
        all.iter().map(|(id, bytes)| ((*id).to_owned(), BTreeMap::from([(ID, *bytes)]))).collect()
    }

    #[test]
    fn a_process_is_named_by_its_innermost_namespace() {
        let status = "Name:\tx\nNSpid:\t5000\t12\t7\nThreads:\t1\n";
        let stat = format!("5000 (a) b) S {} 98765 1", ["1"; 18].join(" "));
        assert_eq!(parse(status, &stat, "pid:[4026532001]"), Some(ID));
        assert_eq!(parse("Name:\tx\n", &stat, "pid:[4026532001]"), None);
        assert_eq!(parse(status, "5000", "pid:[4026532001]"), None);
        assert_eq!(parse(status, &stat, "net:[4026532001]"), None);
        let own = identity(Path::new("/proc"), std::process::id()).unwrap();
        assert!(own.start_time > 0 && own.pid_namespace > 0);
    }

    #[test]
    fn what_was_measured_comes_with_what_was_counted_about_then() {
        let told = |looks: &[Look], before: &[(&str, u64)], after: &[(&str, u64)]| {
            let pages = pages(looks, &of(before), &of(after));
            pages
                .into_iter()
                .map(|(id, all)| (id, all.first().map(|p| (p.bytes, p.counted_bytes))))
                .collect::<Vec<_>>()
        };
        let one = [look(&["a"], Some(ID), Some(900))];
        let a = |bytes, counted| vec![("a".to_owned(), Some((bytes, counted)))];
        assert_eq!(told(&one, &[("a", 500)], &[("a", 700)]), a(900, [500, 700]));
        assert_eq!(told(&one, &[("a", 700)], &[("a", 500)]), a(900, [500, 700]));
        assert_eq!(told(&one, &[], &[("a", 500)]), a(900, [0, 500]), "it has just come");
        assert_eq!(
            told(&one, &[("b", 9)], &[]),
            a(900, [u64::MAX; 2]),
            "another share's account is not its own"
        );
        let blind = [look(&["a"], Some(ID), None)];
        assert_eq!(told(&blind, &[("a", 1)], &[("a", 1)]), a(u64::MAX, [1, 1]));
        let unknown = [look(&["a"], None, Some(900))];
        assert_eq!(told(&unknown, &[("a", 1)], &[("a", 1)]), [("a".to_owned(), None)]);
        let both = [look(&["a", "b"], Some(ID), Some(900))];
        let sum = Some((900, [300, 300]));
        let all = [("a", 100), ("b", 200)];
        assert_eq!(told(&both, &all, &all), [("a".to_owned(), sum), ("b".to_owned(), sum)]);
    }
}
