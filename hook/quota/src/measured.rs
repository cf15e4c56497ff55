//! What the driver counts for each process of a share, as the node agent measured it.
//!
//! It is a file beside the quota file, replaced by rename at each look of the agent. In a container NVML may
//! name processes by their pids on the node, or none; the agent sees both and says which is which. The file
//! has a header (magic, time of the look, end of validity, number of processes), one record for each process,
//! and a checksum over everything before it.

/// The most processes in one file.
pub const MOST_MEASURED: usize = 512;

/// Size of a file without processes, in bytes.
pub const EMPTY_SIZE: usize = 40;

/// Size of the record of one process, in bytes.
pub const RECORD_SIZE: usize = 48;

/// Size of the largest file, in bytes.
pub const MOST_SIZE: usize = EMPTY_SIZE + MOST_MEASURED * RECORD_SIZE;

/// Magic bytes; the last one is the layout's version.
const MAGIC: [u8; 8] = *b"ALQMEAS1";

/// The identity of a process. The start counts too, because ids of pid namespaces are reused at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    /// Inode of the process's pid namespace.
    pub pid_namespace: u64,
    /// Start of the process in clock ticks since boot.
    pub start_time: u64,
    /// Pid of the process in that namespace.
    pub pid: u32,
}

/// One process of a share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// The process's identity.
    pub identity: Identity,
    /// Pid of the process on the node.
    pub host_pid: u32,
    /// Bytes that the driver counts for the process; [`u64::MAX`] where it counts none.
    pub bytes: u64,
    /// The least and the most bytes that its account showed as allocations around that moment; [`u64::MAX`]
    /// if it has no account.
    pub counted_bytes: [u64; 2],
}

/// Writes the content of a file into `out` and returns its size in bytes. Processes beyond [`MOST_MEASURED`]
/// are left out.
pub fn encode(taken_ns: u64, valid_until_ns: u64, processes: &[Process], out: &mut [u8; MOST_SIZE]) -> usize {
    let processes = processes.get(..MOST_MEASURED).unwrap_or(processes);
    let size = EMPTY_SIZE + processes.len() * RECORD_SIZE;
    let mut words = out.chunks_exact_mut(8);
    let mut put = |word: [u8; 8]| {
        if let Some(to) = words.next() {
            to.copy_from_slice(&word);
        }
    };
    put(MAGIC);
    put(taken_ns.to_le_bytes());
    put(valid_until_ns.to_le_bytes());
    put((processes.len() as u64).to_le_bytes());
    for process in processes {
        let id = process.identity;
        let pids = u64::from(process.host_pid) << 32 | u64::from(id.pid);
        let [least, most] = process.counted_bytes;
        for word in [id.pid_namespace, id.start_time, pids, process.bytes, least, most] {
            put(word.to_le_bytes());
        }
    }
    let sum = crate::file::checksum(out.get(..size - 8).unwrap_or_default());
    if let Some(to) = out.get_mut(size - 8..size) {
        to.copy_from_slice(&sum.to_le_bytes());
    }
    size
}

/// The content of a file.
#[derive(Clone, Copy)]
pub struct Measured<'a> {
    /// The time at which the driver was asked, in nanoseconds of the monotonic clock.
    pub taken_ns: u64,
    /// The time from which on the file says nothing.
    pub valid_until_ns: u64,
    records: &'a [u8],
}

impl<'a> Measured<'a> {
    /// Reads the content of a file; returns `None` for anything other than a whole file of this layout.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let word = |at: usize| bytes.get(at * 8..at * 8 + 8)?.try_into().ok().map(u64::from_le_bytes);
        if !bytes.starts_with(&MAGIC) {
            return None;
        }
        let count = usize::try_from(word(3)?).ok().filter(|count| *count <= MOST_MEASURED)?;
        let size = EMPTY_SIZE + count * RECORD_SIZE;
        if bytes.len() != size || word(size / 8 - 1)? != crate::file::checksum(bytes.get(..size - 8)?) {
            return None;
        }
        Some(Self { taken_ns: word(1)?, valid_until_ns: word(2)?, records: bytes.get(32..size - 8)? })
    }

    /// Returns true if the file is valid at this moment.
    pub const fn is_fresh(&self, now_ns: u64) -> bool {
        self.taken_ns <= now_ns && now_ns < self.valid_until_ns
    }

    /// Returns the processes in the file.
    pub fn processes(&self) -> impl Iterator<Item = Process> + use<'a> {
        self.records.chunks_exact(RECORD_SIZE).map(|record| {
            let word = |at: usize| {
                record
                    .get(at * 8..at * 8 + 8)
                    .and_then(|w| w.try_into().ok())
                    .map_or(u64::MAX, u64::from_le_bytes)
            };
            Process {
                identity: Identity { pid_namespace: word(0), start_time: word(1), pid: word(2) as u32 },
                host_pid: (word(2) >> 32) as u32,
                bytes: word(3),
                counted_bytes: [word(4), word(5)],
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn process() -> impl Strategy<Value = Process> {
        (any::<[u64; 5]>(), any::<[u32; 2]>()).prop_map(
            |([pid_namespace, start_time, bytes, least, most], [pid, host_pid])| Process {
                identity: Identity { pid_namespace, start_time, pid },
                host_pid,
                bytes,
                counted_bytes: [least, most],
            },
        )
    }

    proptest! {
        #[test]
        fn decode_of_encode_is_identity(taken: u64, until: u64, all in prop::collection::vec(process(), 0..40)) {
            let mut out = [0xa5; MOST_SIZE];
            let size = encode(taken, until, &all, &mut out);
            let read = Measured::decode(&out[..size]).unwrap();
            prop_assert_eq!((read.taken_ns, read.valid_until_ns), (taken, until));
            prop_assert_eq!(read.processes().collect::<Vec<_>>(), all);
        }

        #[test]
        fn any_changed_byte_and_any_other_length_is_refused(count in 0..4_usize, at: prop::sample::Index, flip in 1..=255_u8) {
            let mut out = [0; MOST_SIZE];
            let size = encode(1, 2, &[Process::default(); 4][..count], &mut out);
            prop_assert!(Measured::decode(&out[..at.index(size)]).is_none());
            prop_assert!(Measured::decode(&out[..size + 1 + at.index(100)]).is_none());
            out[at.index(size)] ^= flip;
            prop_assert!(Measured::decode(&out[..size]).is_none());
        }

        #[test]
        fn nothing_that_is_read_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let bytes = [&MAGIC[..], &bytes].concat();
            if let Some(read) = Measured::decode(&bytes) {
                prop_assert!(read.processes().count() <= MOST_MEASURED);
            }
        }
    }

    #[test]
    fn more_processes_than_it_holds_are_left_out() {
        let mut out = [0; MOST_SIZE];
        assert_eq!(encode(1, 2, &[Process::default(); MOST_MEASURED + 1], &mut out), MOST_SIZE);
        assert_eq!(Measured::decode(&out).unwrap().processes().count(), MOST_MEASURED);
    }

    #[test]
    fn it_is_fresh_from_when_it_was_taken_until_it_runs_out() {
        let mut out = [0; MOST_SIZE];
        let size = encode(10, 20, &[], &mut out);
        let read = Measured::decode(&out[..size]).unwrap();
        assert_eq!([9, 10, 19, 20].map(|now| read.is_fresh(now)), [false, true, true, false]);
    }
}
