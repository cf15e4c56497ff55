//! What a tenant can write: region, environment. Whatever stands there, no limit is lifted and nothing crashes or hangs.

use crate::support::scribbler::{Random, Scribbler};
use crate::support::{Bench, GIB, Holder, MIB, values};
use aliquot_quota::ledger::{self, Cells, LedgerError, PairOf, Word};
use aliquot_quota::region::{
    INITIAL_HEADER_SIZE, Region, RegionView, SLOT_COUNT, SlotState, audit, initial_header,
};
use aliquot_quota::{QuotaFile, REGION_FILE_SIZE};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

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
            (random.below(9), random.below(SLOTS), [1, 30, 101, u64::MAX][random.below(4)])
        };
        region.writes.set(u32::try_from(region.random.borrow_mut().below(4)).unwrap());
        region.left.set(10_000);
        match kind {
            0 | 1 => match ledger::charge(&region, slot, 0, bytes, LIMIT) {
                Ok(total) => {
                    charged += 1;
                    assert!(total <= LIMIT && bytes <= total, "round {round}: {bytes} of {total}");
                }
                Err(LedgerError::Refused(_)) => refused += 1,
                Err(LedgerError::Corrupt | LedgerError::Busy) => corrupt += 1,
            },
            2 => {
                if let Ok(part) = ledger::charge_up_to(&region, slot, 0, bytes, LIMIT) {
                    assert!(part <= bytes.min(LIMIT), "round {round}: {part}");
                }
            }
            3 => drop(ledger::release(&region, slot, 0, bytes)),
            4 => drop(ledger::reap(&region, slot)),
            5 => drop(ledger::attach(&region, slot)),
            6 => drop(ledger::mend(&region, slot, [0, 30, u64::MAX][round as usize % 3])),
            7 => {
                let state = region.load(Word::State(slot));
                ledger::mark_dead(&region, slot, state, 1);
                ledger::dead_since(&region, slot, 1);
            }
            _ => drop(ledger::charge_forced(&region, slot, 0, bytes)),
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

/// A region in which a word changes at every look.
struct Restless(Hostile, [Word; 2]);

impl Cells for Restless {
    fn slots(&self) -> usize {
        SLOTS
    }

    fn load(&self, word: Word) -> u64 {
        self.0.access();
        let value = self.0.get(word);
        if self.1.contains(&word) {
            // Of the same parity, so that it is the same entry that is looked for.
            self.0.words.borrow_mut().insert(key(word), value + 2);
        }
        value
    }

    fn store(&self, word: Word, value: u64) {
        self.0.store(word, value);
    }

    fn swap(&self, word: Word, old: u64, new: u64) -> bool {
        self.0.swap(word, old, new)
    }

    fn swap_pair(&self, pair: PairOf, old: (u64, u64), new: (u64, u64)) -> bool {
        self.0.swap_pair(pair, old, new)
    }
}

#[test]
fn who_finds_another_figure_at_every_look_gives_up_after_a_bounded_number_of_looks() {
    for restless in [
        [Word::Op; 2],
        [Word::Total, Word::Op],
        [Word::Recorded(1); 2],
        [Word::EntrySeq(1, 0), Word::EntrySeq(1, 1)],
        [Word::EntrySeq(2, 0), Word::Recorded(2)],
    ] {
        let hostile = Hostile {
            words: RefCell::default(),
            random: RefCell::new(Random(1)),
            writes: Cell::new(0),
            left: Cell::new(0),
        };
        let region = Restless(hostile, restless);
        let calls: [&dyn Fn() -> Option<LedgerError>; 5] = [
            &|| ledger::charge(&region, 1, 0, 10, LIMIT).err(),
            &|| ledger::charge_up_to(&region, 1, 0, 10, LIMIT).err(),
            &|| ledger::release(&region, 1, 0, 10).err(),
            &|| ledger::mend(&region, 1, 10).err(),
            &|| ledger::reap(&region, 2).err(),
        ];
        for call in calls {
            region.0.words.borrow_mut().clear();
            region.0.store_sound(1);
            region.0.words.borrow_mut().insert(key(Word::State(2)), SlotState::Dead.word(1));
            region.0.left.set(20 * ledger::TRIES);
            call();
        }
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

/// Ends a process that takes longer than any that the region could hold up may: whoever waits for it fails.
struct Watch {
    _done: std::sync::mpsc::Sender<()>,
}

impl Watch {
    fn of(pid: u32, seconds: u64) -> Self {
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            // Given up by whoever holds the other end, or not.
            if is_done.recv_timeout(Duration::from_secs(seconds)) == Err(RecvTimeoutError::Timeout) {
                eprintln!("process {pid} was ended after {seconds} s");
                let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
        });
        Self { _done: done }
    }
}

/// The region's file, written in place as a tenant can under running programs.
fn scribble(bench: &Bench, at: usize, bytes: &[u8]) {
    let file = std::fs::OpenOptions::new().write(true).open(bench.region_path("a")).unwrap();
    file.write_all_at(bytes, at as u64).unwrap();
}

const QUOTA: u64 = GIB;
/// What can be taken beyond the quota, for each process, by who writes into the region.
const BEYOND: u64 = QUOTA / 16;

/// Two processes, the first of which holds three quarters of the quota when somebody writes into the region, and neither
/// of which gets the better of it; both take what they can afterwards.
fn two_take_what_they_can(bench: &Bench, what: &str, write: impl FnOnce()) {
    std::fs::write(bench.region_path("a"), sound_region()).unwrap();
    let mut first = bench.probe(&["init", "retain", "alloc:linear:768M", "hold", "fill:linear:16M", "hold"]);
    let mut first = Holder::start(&mut first);
    let _first_watch = Watch::of(first.child.id(), 60);
    write();
    let mut second = bench.probe(&["init", "retain", "fill:linear:16M", "hold"]);
    let second = Holder::start_watched(&mut second, |pid| Watch::of(pid, 60));
    let used = bench.used(0);
    assert!(used <= QUOTA + 2 * BEYOND, "{what}: {} MiB, {:?}", used / MIB, second.before);
    first.step();
    let used = bench.used(0);
    assert!(used <= QUOTA + 2 * BEYOND, "{what}: {} MiB in the end, {:?}", used / MIB, second.before);
    first.kill();
    second.kill();
    bench.await_used(0, 0, what);
}

fn sound_region() -> Vec<u8> {
    let mut bytes = vec![0; REGION_FILE_SIZE];
    bytes[..INITIAL_HEADER_SIZE].copy_from_slice(&initial_header());
    bytes
}

#[test]
fn a_zeroed_total_lifts_no_limit() {
    let bench = bench(8 * GIB);
    let mut program = bench.probe(&["init", "retain", "alloc:linear:7424M", "hold"]);
    program.args(["alloc:linear:8192M", "alloc:linear:1024M", "alloc:linear:700M"]);
    let holder = Holder::start(&mut program);
    scribble(&bench, 64, &[0; 8]);
    assert_eq!(holder.finish(), ["2", "2", "0"]);
    assert_ne!(bench.audit("a") & audit::CORRUPT, 0, "and it is reported");
}

#[test]
fn no_single_word_of_a_region_lifts_a_limit_or_holds_anybody_up() {
    let bench = bench(QUOTA);
    let header = [64, 72, 128, 136, 144, 152, 160, 168];
    let slots = [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104];
    let words =
        header.into_iter().chain([0, 1].into_iter().flat_map(|slot| slots.map(|at| 4096 + slot * 256 + at)));
    for at in words {
        let now = crate::support::now_ms();
        for value in [0, 1, u64::MAX, 1 << 48 | 1, now, 2 | 1 << 8] {
            let what = format!("word {at} is {value:#x}");
            two_take_what_they_can(&bench, &what, || scribble(&bench, at, &value.to_le_bytes()));
        }
    }
}

#[test]
fn no_content_of_a_region_lifts_a_limit_or_holds_anybody_up() {
    let bench = bench(QUOTA);
    let mut random = Random(0x1357_9bdf_2468_ace0);
    let slot = |slot: usize| {
        let bytes = std::fs::read(bench.region_path("a")).unwrap();
        bytes[4096 + slot * 256..4096 + (slot + 1) * 256].to_vec()
    };
    for (what, fill) in [("zeros", 0_u8), ("ones", 0xff), ("a pattern", 0x11)] {
        for from in [0, 64, 4096] {
            let what = format!("{what} from {from}");
            two_take_what_they_can(&bench, &what, || {
                scribble(&bench, from, &vec![fill; REGION_FILE_SIZE - from])
            });
        }
    }
    for round in 0..12 {
        let bytes: Vec<u8> = (0..(REGION_FILE_SIZE - 64) / 8)
            .flat_map(|_| if round % 2 == 0 { random.next() } else { random.word() }.to_le_bytes())
            .collect();
        two_take_what_they_can(&bench, &format!("garbage {round}"), || scribble(&bench, 64, &bytes));
    }
    // Another slot's, and an account that agrees with itself and shows nobody.
    two_take_what_they_can(&bench, "the next slot's", || scribble(&bench, 4096, &slot(1)));
    two_take_what_they_can(&bench, "a share that nobody uses", || scribble(&bench, 0, &sound_region()));
}

#[test]
fn who_writes_garbage_all_the_while_takes_no_limit_away_and_holds_nobody_up_for_long() {
    let compute = std::mem::offset_of!(Region, compute);
    type Value = Box<dyn FnMut(usize) -> u64 + Send>;
    let random = |seed| {
        let mut random = Random(seed);
        Box::new(move |_: usize| random.word()) as Value
    };
    let mut count = 0_u64;
    let counting = Box::new(move |_: usize| {
        count += 1;
        count
    }) as Value;
    let places: [(&str, std::ops::Range<usize>, Value); 5] = [
        ("garbage in the header", 64..176, random(7)),
        ("garbage in header and slots", 64..4096 + 4 * 256, random(77)),
        ("a total that never rests", 64..80, counting),
        ("nobody there", 64..4096 + 4 * 256, Box::new(|_: usize| 0)),
        ("a share in debt for ever", compute..compute + 64, Box::new(|_: usize| u64::MAX)),
    ];
    for (what, words, value) in places {
        let bench = bench(QUOTA);
        bench.write_quota("a", &QuotaFile { cores_percent: 50, ..bench.quota("a") });
        let mut first =
            bench.probe(&["init", "retain", "alloc:linear:768M", "hold", "fill:linear:16M", "hold"]);
        let mut first = Holder::start(&mut first);
        let _watch = Watch::of(first.child.id(), 200);
        let scribbler = Scribbler::start(&bench, [words], value);
        // A launch may wait half a minute, and whatever is refused looks for the dead for some seconds first.
        let mut second = bench.probe(&["init", "retain", "kernel", "fill:linear:16M", "hold"]);
        let second = Holder::start_watched(&mut second, |pid| Watch::of(pid, 200));
        first.step();
        let used = bench.used(0);
        assert!(used <= QUOTA + 2 * BEYOND, "{what}: {} MiB, {:?}", used / MIB, second.before);
        drop(scribbler);
        first.kill();
        second.kill();
    }
}
