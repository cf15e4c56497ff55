//! What a tenant can write: region, environment. Whatever stands there, no limit is lifted and nothing crashes or hangs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use aliquot_quota::REGION_FILE_SIZE;
use aliquot_quota::ledger::{self, Cells, LedgerError, PairOf, Word};
use aliquot_quota::region::{INITIAL_HEADER_SIZE, RegionView, SLOT_COUNT, SlotState, initial_header};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use support::{Bench, MIB, values};

/// Numbers without a pattern, the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// A word as a tenant would write it: nothing, little, everything, something like what belongs there.
    fn word(&mut self) -> u64 {
        let any = self.next();
        let like = (((any >> 8) % 6) << 48) | (any % 8);
        [0, any % 200, u64::MAX, 1 << 63, any, like, (any % 3) | (like << 8)][self.below(7)]
    }
}

const SLOTS: usize = 4;
const LIMIT: u64 = 100;

/// A region that somebody writes into while it is used.
struct Hostile {
    words: RefCell<HashMap<(u8, usize, usize), u64>>,
    random: RefCell<Random>,
    /// Words that will still be overwritten.
    writes: Cell<u32>,
    /// Accesses that are left before somebody must be taken to hang.
    left: Cell<u32>,
}

fn key(word: Word) -> (u8, usize, usize) {
    match word {
        Word::Total => (0, 0, 0),
        Word::Op => (1, 0, 0),
        Word::Entry(slot, which) => (2, slot, which),
        Word::EntrySeq(slot, which) => (3, slot, which),
        Word::Recorded(slot) => (4, slot, 0),
        Word::State(slot) => (5, slot, 0),
        Word::DeadSince(slot) => (6, slot, 0),
    }
}

impl Hostile {
    fn spoil(&self) {
        let mut random = self.random.borrow_mut();
        let word = match random.below(7) {
            0 => Word::Total,
            1 => Word::Op,
            2 => Word::Entry(random.below(SLOTS), random.below(2)),
            3 => Word::EntrySeq(random.below(SLOTS), random.below(2)),
            4 => Word::Recorded(random.below(SLOTS)),
            5 => Word::State(random.below(SLOTS)),
            _ => Word::DeadSince(random.below(SLOTS)),
        };
        let value = random.word();
        self.words.borrow_mut().insert(key(word), value);
    }

    fn access(&self) {
        self.left.set(self.left.get().checked_sub(1).expect("it comes to an end"));
        if self.writes.get() > 0 && self.random.borrow_mut().below(4) == 0 {
            self.writes.set(self.writes.get() - 1);
            self.spoil();
        }
    }

    fn get(&self, word: Word) -> u64 {
        self.words.borrow().get(&key(word)).copied().unwrap_or(0)
    }
}

impl Cells for Hostile {
    fn slots(&self) -> usize {
        SLOTS
    }

    fn load(&self, word: Word) -> u64 {
        self.access();
        self.get(word)
    }

    fn store(&self, word: Word, value: u64) {
        self.access();
        self.words.borrow_mut().insert(key(word), value);
    }

    fn swap(&self, word: Word, old: u64, new: u64) -> bool {
        self.access();
        let same = self.get(word) == old;
        if same {
            self.words.borrow_mut().insert(key(word), new);
        }
        same
    }

    fn swap_pair(&self, pair: PairOf, old: (u64, u64), new: (u64, u64)) -> bool {
        self.access();
        let (value, stamp) = match pair {
            PairOf::Total => (Word::Total, Word::Op),
            PairOf::Entry(slot, which) => (Word::Entry(slot, which), Word::EntrySeq(slot, which)),
        };
        let same = (self.get(value), self.get(stamp)) == old;
        if same {
            self.words.borrow_mut().insert(key(value), new.0);
            self.words.borrow_mut().insert(key(stamp), new.1);
        }
        same
    }
}

#[test]
fn a_million_operations_on_a_hostile_region_end_and_charge_nothing_beyond_the_limit() {
    let region = Hostile {
        words: RefCell::default(),
        random: RefCell::new(Random(0x0123_4567_89ab_cdef)),
        writes: Cell::new(0),
        left: Cell::new(0),
    };
    let (mut charged, mut refused, mut corrupt) = (0, 0, 0);
    for round in 0..1_000_000_u32 {
        if round % 16 == 0 {
            // Often enough sound again, so that there is something to spoil.
            region.words.borrow_mut().clear();
            (0..SLOTS).for_each(|slot| region.store_sound(slot));
        }
        let (kind, slot, bytes) = {
            let mut random = region.random.borrow_mut();
            (random.below(8), random.below(SLOTS), [1, 30, 101, u64::MAX][random.below(4)])
        };
        region.writes.set(u32::try_from(region.random.borrow_mut().below(4)).unwrap());
        region.left.set(10_000);
        match kind {
            0 | 1 => match ledger::charge(&region, slot, bytes, LIMIT) {
                Ok(total) => {
                    charged += 1;
                    assert!(total <= LIMIT && bytes <= total, "round {round}: {bytes} of {total}");
                }
                Err(LedgerError::Refused(_)) => refused += 1,
                Err(LedgerError::Corrupt) => corrupt += 1,
            },
            2 => {
                if let Ok(part) = ledger::charge_up_to(&region, slot, bytes, LIMIT) {
                    assert!(part <= bytes.min(LIMIT), "round {round}: {part}");
                }
            }
            3 => drop(ledger::release(&region, slot, bytes)),
            4 => drop(ledger::reap(&region, slot)),
            5 => drop(ledger::attach(&region, slot)),
            6 => {
                let state = region.load(Word::State(slot));
                ledger::mark_dead(&region, slot, state, 1);
                ledger::dead_since(&region, slot, 1);
            }
            _ => drop(ledger::charge_forced(&region, slot, bytes)),
        }
    }
    // All ways were taken.
    assert!(charged > 10_000 && refused > 10_000 && corrupt > 10_000, "{charged} {refused} {corrupt}");
}

impl Hostile {
    /// A slot in use with nothing charged.
    fn store_sound(&self, slot: usize) {
        self.words.borrow_mut().insert(key(Word::State(slot)), SlotState::Live.word(1));
    }
}

#[test]
fn any_bytes_of_a_region_can_be_looked_at() {
    let mut random = Random(0xfeed_beef_1234_5678);
    let mut bytes = vec![0; REGION_FILE_SIZE];
    for _ in 0..200 {
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&random.word().to_le_bytes());
        }
        bytes[..INITIAL_HEADER_SIZE].copy_from_slice(&initial_header());
        let view = RegionView::parse(&bytes).unwrap();
        let processes = view.processes().count();
        assert!(processes <= SLOT_COUNT);
        let _ = (view.total_bytes(), view.peak_bytes(), view.refused(), view.reaped(), view.audit());
    }
}

#[test]
fn whatever_stands_in_the_environment_no_limit_is_raised() {
    use std::os::unix::ffi::OsStringExt;
    let bench = bench(64 * MIB);
    let mut random = Random(0x5555_aaaa_1234_4321);
    let letters = b"0123456789gmkxX-+. _\"\xff=";
    for round in 0..150 {
        let mut program = bench.probe(&["init", "retain", "fill:linear:6M", "info"]);
        for _ in 0..1 + random.below(3) {
            let name =
                ["CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_DEVICE_MEMORY_LIMIT_"]
                    [random.below(3)];
            let likely = ["", "0", "1g", "999999999999999999g", "0x", "6m", "18446744073709551615"];
            let value = if random.below(2) == 0 {
                likely[random.below(likely.len())].as_bytes().to_vec()
            } else {
                (0..random.below(12)).map(|_| letters[random.below(letters.len())]).collect()
            };
            program.env(name, std::ffi::OsString::from_vec(value));
        }
        let output = program.output().unwrap();
        assert!(output.status.success(), "round {round}: {output:?}");
        let answers = values(&output);
        let filled: u64 = answers[2].split(' ').next().unwrap().parse().unwrap();
        assert!(
            answers[0] == "802" && filled == 0 || filled * 6 <= 64,
            "round {round}: {program:?} {answers:?}"
        );
    }
}

fn bench(quota: u64) -> Bench {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, quota);
    bench
}

#[test]
fn whatever_stands_in_the_region_no_limit_is_lifted_and_nobody_crashes() {
    use std::os::unix::fs::FileExt;
    let bench = bench(64 * MIB);
    let path = bench.region_path("a");
    let sound = std::fs::read(&path).unwrap();
    let mut seed = 0x1234_5678_9abc_def1_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for round in 0..60 {
        let mut bytes = sound.clone();
        // Words of the ledger and of the first slots, behind the constants that are checked at the start.
        for _ in 0..1 + random() % 6 {
            let at =
                if random() % 3 == 0 { 64 + random() % 128 } else { 4096 + random() % 1024 } as usize & !7;
            let value =
                [random(), random() % 100, u64::MAX, 1 << 63, ((random() % 5) << 48) | (random() % 4)]
                    [(random() % 5) as usize];
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        // In place, as a tenant could do it under running programs.
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&bytes, 0).unwrap();
        let mut program = bench.probe(&["init", "retain", "fill:linear:6M", "info", "freeall", "churn:50"]);
        let output = program.output().unwrap();
        assert!(output.status.success(), "round {round}: {output:?}");
        let answers = values(&output);
        if answers[0] != "802" {
            let count: u64 = answers[2].split(' ').next().unwrap().parse().unwrap();
            assert!(count * 6 <= 64, "round {round}: {answers:?}");
        }
    }
}
