//! Reads shares' regions and writes their grants.
//!
//! Regions are read, never mapped: a tenant can truncate its own, which would kill a process that has it
//! mapped.

use crate::{Arbiter, Share, Stretch, TICK_NS};
use aliquot_quota::gate::{Compute, Entry, LOG_LENGTH, Mark};
use aliquot_quota::grant::{GRANT_SIZE, Grant};
use aliquot_quota::region::{self, INITIAL_HEADER_SIZE, Region, RegionView, Slot};
use aliquot_quota::{ComputePolicy, QuotaFile};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::{offset_of, size_of};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The time after which the folder is listed again and processes are looked for, in nanoseconds.
const LIST_NS: u64 = 500_000_000;

/// The time after which the folder is listed again while no share is in it, in nanoseconds: a container that
/// is given a share takes longer to start.
const NONE_NS: u64 = 1_000_000_000;

/// The name of the grant's file beside the quota.
pub const GRANT: &str = "grant";

/// Returns the nanoseconds of the monotonic clock, which containers have in common with the node.
///
/// # Errors
/// If the kernel has no such clock.
pub fn now_ns() -> io::Result<u64> {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?;
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    Ok(part(time.tv_sec()).saturating_mul(1_000_000_000).saturating_add(part(time.tv_nsec())))
}

/// Makes the file of a share's grant, empty; the limiter reads it as no grant.
///
/// # Errors
/// If the file cannot be written.
pub fn make_grant(quota_dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let path = quota_dir.join(GRANT);
    fs::write(&path, [])?;
    // Containers run as any user; the umask must not decide.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644))
}

/// The keeper of the grants of all shares in a folder
/// (`<folder>/<share>/{quota/quota,quota/grant,region/region}`).
#[derive(Debug)]
pub struct Keeper {
    folder: PathBuf,
    shares: BTreeMap<String, Kept>,
    /// The arbiters, by the UUID of what the shares have in common: a GPU, or a partition, from which the
    /// rest of its GPU takes no time.
    arbiters: BTreeMap<String, Arbiter>,
    /// Quotas in percent of shares whose regions are not understood, by GPU. A tenant can make its own share
    /// one of them.
    unseen: BTreeMap<String, Vec<u8>>,
    slice_us: u32,
    listed_ns: u64,
}

#[derive(Debug)]
struct Kept {
    quota: QuotaFile,
    region: File,
    grant: File,
    /// The number of log entries that have been read.
    logged: u64,
    /// The slots in use.
    slots: Vec<u64>,
    /// The corrections that an agent before this one found, own and borrowed, in nanoseconds: the limiter
    /// compares sums with them.
    found_before: (i64, i64),
}

impl Keeper {
    /// Returns a keeper that knows no share yet. `slice` is how long a process has a GPU while others wait;
    /// limiters take zero for 2 ms.
    pub fn new(folder: &Path, slice: Duration) -> Self {
        Self {
            folder: folder.to_owned(),
            shares: BTreeMap::new(),
            arbiters: BTreeMap::new(),
            unseen: BTreeMap::new(),
            slice_us: u32::try_from(slice.as_micros()).unwrap_or(u32::MAX),
            listed_ns: 0,
        }
    }

    /// Looks at all shares once. Returns for how long nothing has to be done then.
    pub fn tick(&mut self, now_ns: u64) -> Duration {
        if self.listed_ns == 0 || now_ns.saturating_sub(self.listed_ns) >= LIST_NS {
            self.listed_ns = now_ns;
            self.list();
        }
        let mut gpus: BTreeMap<String, Vec<(&str, &mut Kept)>> = BTreeMap::new();
        for (id, kept) in &mut self.shares {
            gpus.entry(kept.quota.gpu_uuid.as_str().to_owned()).or_default().push((id.as_str(), kept));
        }
        let mut is_needed = false;
        for (gpu, mut shares) in gpus {
            let is_soft = |kept: &Kept| kept.quota.compute_policy == ComputePolicy::Soft;
            if !crate::is_needed(shares.iter().map(|(_, kept)| (is_soft(kept), kept.slots.len()))) {
                continue;
            }
            is_needed = true;
            let seen: Vec<Share> = shares.iter_mut().map(|(id, kept)| kept.look(id)).collect();
            let slice_us = self.slice_us;
            let unseen = self.unseen.get(&gpu).cloned().unwrap_or_default();
            let arbiter = self.arbiters.entry(gpu).or_insert_with(|| Arbiter::with_slices(slice_us));
            arbiter.note_unseen(&unseen);
            for ((_, kept), grant) in shares.iter().zip(arbiter.tick(now_ns, &seen)) {
                let (own, borrowed) = kept.found_before;
                let grant = Grant {
                    true_up_ns: grant.true_up_ns.saturating_add(own),
                    borrowed_true_up_ns: grant.borrowed_true_up_ns.saturating_add(borrowed),
                    ..grant
                };
                // A grant that cannot be written runs out.
                let _ = kept.grant.write_all_at(&grant.encode(), 0);
            }
        }
        Duration::from_nanos(match (is_needed, self.shares.is_empty()) {
            (true, _) => TICK_NS,
            (false, false) => LIST_NS,
            (false, true) => NONE_NS,
        })
    }

    fn list(&mut self) {
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let names: Vec<String> = names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        // A share whose files were made again under its name is another share. It is taken on at the next
        // list; by then the arbiter has forgotten the one before.
        let replaced = |id: &String, kept: &Kept| !kept.is_in(&self.folder.join(id));
        let gone: BTreeSet<String> =
            self.shares.iter().filter(|(id, kept)| replaced(id, kept)).map(|(id, _)| id.clone()).collect();
        self.shares.retain(|id, _| !gone.contains(id));
        self.unseen.clear();
        for id in names.into_iter().filter(|id| !gone.contains(id)) {
            let folder = self.folder.join(&id);
            match self.shares.get_mut(&id) {
                Some(known) => {
                    if let Some(quota) = read_quota(&folder) {
                        known.quota = quota;
                    }
                    known.look_for_processes();
                }
                None => {
                    if let Some(kept) = Kept::open(&folder) {
                        self.shares.insert(id, kept);
                    } else if let Some(quota) = read_quota(&folder) {
                        let percents = self.unseen.entry(quota.gpu_uuid.as_str().to_owned()).or_default();
                        percents.push(quota.cores_percent);
                    }
                }
            }
        }
        let in_use = |gpu: &String| self.shares.values().any(|kept| kept.quota.gpu_uuid.as_str() == gpu);
        self.arbiters.retain(|gpu, _| in_use(gpu));
    }
}

fn read_quota(folder: &Path) -> Option<QuotaFile> {
    QuotaFile::decode(&fs::read(folder.join("quota/quota")).ok()?).ok()
}

impl Kept {
    /// Returns true if the open files are still those in the share's folder.
    fn is_in(&self, folder: &Path) -> bool {
        let same = |open: &File, path: &Path| {
            let (Ok(open), Ok(there)) = (open.metadata(), fs::symlink_metadata(path)) else { return false };
            (open.dev(), open.ino()) == (there.dev(), there.ino())
        };
        same(&self.region, &folder.join("region/region"))
            && same(&self.grant, &folder.join("quota").join(GRANT))
    }

    fn open(folder: &Path) -> Option<Self> {
        let quota = read_quota(folder)?;
        // A tenant can put a link or a pipe there: neither is followed or waited for.
        let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
        let region =
            OpenOptions::new().read(true).custom_flags(flags).open(folder.join("region/region")).ok()?;
        let grant = OpenOptions::new().read(true).write(true).open(folder.join("quota").join(GRANT)).ok()?;
        // One of another release, which a newer agent can come upon, is not understood: the share gets no
        // grants.
        let mut head = [0; INITIAL_HEADER_SIZE];
        region.read_exact_at(&mut head, 0).ok()?;
        let size = usize::try_from(region.metadata().ok()?.len()).ok()?;
        region::check(size, &head).ok()?;
        let mut bytes = [0; GRANT_SIZE];
        let before = grant.read_exact_at(&mut bytes, 0).ok().and_then(|()| Grant::decode(&bytes));
        let found_before = before.map_or((0, 0), |grant| (grant.true_up_ns, grant.borrowed_true_up_ns));
        let mut kept = Self { quota, region, grant, logged: 0, slots: Vec::new(), found_before };
        kept.logged = kept.word(offset_of!(Compute, logged));
        kept.look_for_processes();
        Some(kept)
    }

    fn look_for_processes(&mut self) {
        let mut bytes = vec![0; aliquot_quota::REGION_FILE_SIZE];
        if self.region.read_exact_at(&mut bytes, 0).is_ok()
            && let Ok(view) = RegionView::parse(&bytes)
        {
            let live = view.processes().filter(|process| !process.dead);
            self.slots = live.filter_map(|process| u64::try_from(process.slot).ok()).collect();
        }
    }

    fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        let at = u64::try_from(at).unwrap_or(u64::MAX);
        if self.region.read_exact_at(&mut bytes, at).is_ok() { bytes } else { [0; N] }
    }

    /// Returns a word of the region's compute side.
    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.read(offset_of!(Region, compute) + at))
    }

    fn look(&mut self, id: &str) -> Share {
        let logged = self.word(offset_of!(Compute, logged));
        let behind = logged.wrapping_sub(self.logged).min(LOG_LENGTH as u64);
        let first = logged.wrapping_sub(behind);
        self.logged = logged;
        let stretches = (0..behind).filter_map(|at| self.entry(first.wrapping_add(at))).collect();
        let is_pending = |slot: &u64| {
            let at = usize::try_from(*slot).unwrap_or(0) * size_of::<Slot>() + offset_of!(Slot, pending);
            u64::from_le_bytes(self.read(offset_of!(Region, slots) + at)) != 0
        };
        Share {
            id: id.to_owned(),
            percent: self.quota.cores_percent,
            is_soft: self.quota.compute_policy == ComputePolicy::Soft,
            priority: self.quota.priority,
            charged_ns: self.word(offset_of!(Compute, charged_ns)),
            borrowed_ns: self.word(offset_of!(Compute, borrowed_ns)),
            leased_ns: self.word(offset_of!(Compute, leased_ns)),
            delayed: self.word(offset_of!(Compute, delayed)),
            stretches,
            pending: self.slots.iter().copied().filter(is_pending).collect(),
        }
    }

    fn entry(&self, number: u64) -> Option<Stretch> {
        let place = usize::try_from(number).ok()? % LOG_LENGTH;
        let at = offset_of!(Compute, log) + place * size_of::<Entry>();
        let bytes: [u8; size_of::<Entry>()] = self.read(offset_of!(Region, compute) + at);
        let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let mark = Mark::of(word(offset_of!(Entry, mark))?);
        Some(Stretch {
            slot: mark.slot.into(),
            key: mark.key,
            start_ns: word(offset_of!(Entry, start_ns))?,
            end_ns: word(offset_of!(Entry, end_ns))?,
            taken_ns: word(offset_of!(Entry, taken_ns))?,
            is_sure: mark.is_sure,
            is_borrowed: mark.is_borrowed,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "test code")]
mod tests {
    use super::*;
    use aliquot_quota::GpuUuid;
    use aliquot_quota::region::SlotState;

    fn share(folder: &Path, id: &str, grant: &Grant) {
        share_of("GPU-0", folder, id, grant);
    }

    fn share_of(uuid: &str, folder: &Path, id: &str, grant: &Grant) {
        let own = folder.join(id);
        fs::create_dir_all(own.join("quota")).unwrap();
        fs::create_dir_all(own.join("region")).unwrap();
        let quota = QuotaFile { cores_percent: 50, ..QuotaFile::new(GpuUuid::new(uuid).unwrap()) };
        fs::write(own.join("quota/quota"), quota.encode()).unwrap();
        let mut bytes = vec![0; aliquot_quota::REGION_FILE_SIZE];
        bytes[..INITIAL_HEADER_SIZE].copy_from_slice(&region::initial_header());
        fs::write(own.join("region/region"), bytes).unwrap();
        make_grant(&own.join("quota")).unwrap();
        fs::write(own.join("quota").join(GRANT), grant.encode()).unwrap();
    }

    #[test]
    fn what_was_put_right_stays_so_when_the_agent_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        let before = Grant { true_up_ns: 5_000_000_000, borrowed_true_up_ns: -7, ..Grant::default() };
        share(folder.path(), "a", &before);
        share(folder.path(), "b", &Grant::default());
        processes(folder.path(), "b", 1);
        Keeper::new(folder.path(), Duration::ZERO).tick(1_000_000_000);
        let read = |id: &str| {
            let bytes = fs::read(folder.path().join(id).join("quota").join(GRANT)).unwrap();
            let grant = Grant::decode(&bytes).unwrap();
            assert!(grant.valid_until_ns > 0, "{id} was granted nothing");
            (grant.true_up_ns, grant.borrowed_true_up_ns)
        };
        assert_eq!((read("a"), read("b")), ((5_000_000_000, -7), (0, 0)));
    }

    /// A region in which so many processes live.
    fn processes(folder: &Path, id: &str, count: usize) {
        let path = folder.join(id).join("region/region");
        let mut bytes = fs::read(&path).unwrap();
        for slot in 0..count {
            let at = offset_of!(Region, slots) + slot * size_of::<Slot>() + offset_of!(Slot, state);
            bytes[at..at + 8].copy_from_slice(&SlotState::Live.word(1).to_le_bytes());
        }
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_hard_share_that_is_alone_is_settled_where_it_has_several_processes() {
        let valid_until = |count| {
            let folder = tempfile::tempdir().unwrap();
            share(folder.path(), "a", &Grant::default());
            processes(folder.path(), "a", count);
            Keeper::new(folder.path(), Duration::from_millis(1)).tick(1_000_000_000);
            let grant = Grant::decode(&fs::read(folder.path().join("a/quota").join(GRANT)).unwrap()).unwrap();
            (grant.valid_until_ns > 0, grant.slice_us)
        };
        assert_eq!(valid_until(1), (false, 0), "all wall time of its kernels is its own");
        assert_eq!(valid_until(2), (true, 1000));
    }

    #[test]
    fn shares_without_processes_are_left_alone_until_one_starts() {
        let folder = tempfile::tempdir().unwrap();
        for id in ["a", "b"] {
            share(folder.path(), id, &Grant::default());
        }
        let mut keeper = Keeper::new(folder.path(), Duration::ZERO);
        assert_eq!(keeper.tick(1_000_000_000), Duration::from_nanos(LIST_NS));
        processes(folder.path(), "a", 1);
        assert_eq!(keeper.tick(1_500_000_000), Duration::from_nanos(TICK_NS));
    }

    #[test]
    fn shares_of_different_partitions_are_no_neighbours() {
        let folder = tempfile::tempdir().unwrap();
        for (id, uuid) in [("a", "MIG-0"), ("b", "MIG-1"), ("c", "MIG-1")] {
            share_of(uuid, folder.path(), id, &Grant::default());
            processes(folder.path(), id, 1);
        }
        let mut keeper = Keeper::new(folder.path(), Duration::ZERO);
        keeper.tick(1_000_000_000);
        keeper.tick(1_200_000_000);
        let granted = ["a", "b", "c"].map(|id| {
            let bytes = fs::read(folder.path().join(id).join("quota").join(GRANT)).unwrap();
            Grant::decode(&bytes).unwrap().valid_until_ns > 0
        });
        assert_eq!(granted, [false, true, true], "who is alone on its partition has nothing to settle");
    }

    #[test]
    fn a_share_whose_region_is_not_understood_gets_no_grant_and_counts_as_a_neighbour_with_its_quota() {
        let folder = tempfile::tempdir().unwrap();
        for id in ["a", "b", "c"] {
            share(folder.path(), id, &Grant::default());
            processes(folder.path(), id, 1);
        }
        let path = folder.path().join("c/region/region");
        let mut bytes = fs::read(&path).unwrap();
        bytes[8] ^= 1;
        fs::write(&path, bytes).unwrap();
        let mut keeper = Keeper::new(folder.path(), Duration::ZERO);
        keeper.tick(1_000_000_000);
        keeper.tick(1_200_000_000);
        let grant = |id: &str| {
            let bytes = fs::read(folder.path().join(id).join("quota").join(GRANT)).unwrap();
            Grant::decode(&bytes).unwrap()
        };
        // The half of the other, and the half of the one that is not understood, in 0.2 s.
        for id in ["a", "b"] {
            assert_eq!((grant(id).valid_until_ns > 0, grant(id).beside_ns), (true, 200_000_001), "{id}");
        }
        assert_eq!(grant("c").valid_until_ns, 0);
    }

    /// A claim that was given back and prepared again between two looks: its share's files are others of the same name.
    #[test]
    fn a_share_that_was_made_anew_between_two_looks_gets_grants() {
        let folder = tempfile::tempdir().unwrap();
        for id in ["a", "b"] {
            share(folder.path(), id, &Grant::default());
        }
        let mut keeper = Keeper::new(folder.path(), Duration::ZERO);
        keeper.tick(1_000_000_000);
        fs::rename(folder.path().join("a"), tempfile::tempdir().unwrap().keep().join("trash")).unwrap();
        share(folder.path(), "a", &Grant::default());
        processes(folder.path(), "a", 1);
        for tick in 1..100 {
            keeper.tick(1_000_000_000 + tick * 100_000_000);
        }
        let bytes = fs::read(folder.path().join("a/quota").join(GRANT)).unwrap();
        assert!(Grant::decode(&bytes).unwrap().valid_until_ns > 0, "no grant in ten seconds");
    }
}
