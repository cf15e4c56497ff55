//! The ledger under every interleaving of a few processes, each of which may be killed or stopped before any
//! single access to shared memory.
//!
//! From every state that can be reached, a process that comes along alone must find the exact account: the
//! dead hold nothing, the stopped what their operations have done, the total is the sum of both, and it takes
//! a bounded number of accesses, because it waits for nobody.
//!
//! A process is a function of what its accesses returned. So it is advanced by one access by running it again
//! from the start with the returned values on record, and left at the next access by unwinding.

use aliquot_quota::ledger::{self, Cells, LedgerError, PairOf, Word};
use aliquot_quota::region::SlotState;
use std::cell::RefCell;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

const SLOTS: usize = 4;
const WORDS: usize = 2 + 7 * SLOTS;
const LIMIT: u64 = 100;
/// More accesses than any operation needs that nobody disturbs.
const ALONE: usize = 200;

type Memory = [u64; WORDS];

fn index(word: Word) -> usize {
    match word {
        Word::Total => 0,
        Word::Op => 1,
        Word::Entry(slot, which) => 2 + slot * 7 + which * 2,
        Word::EntrySeq(slot, which) => 3 + slot * 7 + which * 2,
        Word::Recorded(slot) => 6 + slot * 7,
        Word::State(slot) => 7 + slot * 7,
        Word::DeadSince(slot) => 8 + slot * 7,
    }
}

/// Thrown where a process is left.
struct Left;

/// Shared memory as one process sees it.
struct View {
    memory: RefCell<Memory>,
    /// What its accesses returned.
    log: RefCell<Vec<u64>>,
    /// Accesses so far in this run.
    at: RefCell<usize>,
    /// Accesses that may still be made for the first time.
    budget: RefCell<usize>,
}

impl View {
    fn new(memory: Memory, log: Vec<u64>, budget: usize) -> Self {
        Self {
            memory: RefCell::new(memory),
            log: RefCell::new(log),
            at: RefCell::new(0),
            budget: RefCell::new(budget),
        }
    }

    fn access(&self, make: impl FnOnce(&mut Memory) -> u64) -> u64 {
        let at = self.at.replace_with(|at| *at + 1);
        if let Some(known) = self.log.borrow().get(at) {
            return *known;
        }
        if *self.budget.borrow() == 0 {
            resume_unwind(Box::new(Left));
        }
        *self.budget.borrow_mut() -= 1;
        let result = make(&mut self.memory.borrow_mut());
        self.log.borrow_mut().push(result);
        result
    }
}

impl Cells for View {
    fn slots(&self) -> usize {
        SLOTS
    }

    fn load(&self, word: Word) -> u64 {
        self.access(|memory| memory[index(word)])
    }

    fn store(&self, word: Word, value: u64) {
        self.access(|memory| {
            memory[index(word)] = value;
            0
        });
    }

    fn swap(&self, word: Word, old: u64, new: u64) -> bool {
        self.access(|memory| {
            let same = memory[index(word)] == old;
            if same {
                memory[index(word)] = new;
            }
            u64::from(same)
        }) != 0
    }

    fn swap_pair(&self, pair: PairOf, old: (u64, u64), new: (u64, u64)) -> bool {
        let first = match pair {
            PairOf::Total => 0,
            PairOf::Entry(slot, which) => index(Word::Entry(slot, which)),
        };
        self.access(|memory| {
            let same = (memory[first], memory[first + 1]) == old;
            if same {
                (memory[first], memory[first + 1]) = new;
            }
            u64::from(same)
        }) != 0
    }
}

/// What a process does next.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Step {
    Charge(u64),
    ChargeUpTo(u64),
    Release(u64),
    /// Compares the total with its parts, which it is.
    Mend,
    /// The same, where somebody may have written into the region.
    Mended,
    /// Charges, unless the region is found to be damaged.
    ChargeIfSound(u64),
    /// Takes back what another slot holds, which is dead.
    Reap(usize),
    /// The same but for so many bytes.
    ReapTo(usize, u64),
    /// Moves into its slot, which is free.
    Attach,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct Process {
    slot: usize,
    steps: Vec<Step>,
    /// Steps done.
    done: usize,
    /// What the accesses of the step under way returned.
    log: Vec<u64>,
    /// Bytes that the steps done have charged.
    held: u64,
    killed: bool,
}

impl Process {
    fn new(slot: usize, steps: &[Step]) -> Self {
        Self { slot, steps: steps.to_vec(), done: 0, log: Vec::new(), held: 0, killed: false }
    }

    /// Advances by one access.
    fn advance(&mut self, memory: &mut Memory) {
        let Some(step) = self.steps.get(self.done).copied() else { return };
        let view = View::new(*memory, std::mem::take(&mut self.log), 1);
        let (slot, held) = (self.slot, self.held);
        let run = catch_unwind(AssertUnwindSafe(|| match step {
            Step::Charge(bytes) => match ledger::charge(&view, slot, held, bytes, LIMIT) {
                Ok(_) => bytes as i64,
                Err(LedgerError::Refused(_)) => 0,
                Err(error) => panic!("of a sound region: {error:?}"),
            },
            Step::ChargeIfSound(bytes) => match ledger::charge(&view, slot, held, bytes, LIMIT) {
                Ok(_) => bytes as i64,
                Err(LedgerError::Corrupt) => 0,
                Err(error) => panic!("{error:?}"),
            },
            Step::Mended => {
                ledger::mend(&view, slot, held).unwrap();
                0
            }
            Step::ChargeUpTo(bytes) => ledger::charge_up_to(&view, slot, held, bytes, LIMIT).unwrap() as i64,
            Step::Release(bytes) => {
                ledger::release(&view, slot, held, bytes).unwrap();
                // At most what is held: an earlier charge may have been refused.
                -(bytes.min(self.held) as i64)
            }
            Step::Mend => {
                assert_eq!(ledger::mend(&view, slot, held), Ok(false), "a sound region is not mended");
                0
            }
            Step::Attach => {
                ledger::attach(&view, slot).expect("the slot is free");
                0
            }
            Step::Reap(other) => {
                ledger::reap(&view, other).unwrap();
                0
            }
            Step::ReapTo(other, keep) => {
                ledger::reap_to(&view, other, keep).unwrap();
                0
            }
        }));
        *memory = view.memory.into_inner();
        match run {
            Ok(change) => {
                self.held = self.held.wrapping_add_signed(change);
                self.done += 1;
            }
            Err(thrown) if thrown.is::<Left>() => self.log = view.log.into_inner(),
            Err(thrown) => resume_unwind(thrown),
        }
    }

    fn ended(&self) -> bool {
        self.killed || self.done == self.steps.len()
    }

    /// What a check depends on.
    fn seen(&self) -> (usize, bool, Vec<u64>) {
        (self.slot, self.killed, self.possible())
    }

    /// What its slot may hold: before and after the step under way.
    fn possible(&self) -> Vec<u64> {
        let after = match self.steps.get(self.done) {
            Some(Step::Charge(bytes) | Step::ChargeIfSound(bytes)) => vec![self.held + bytes],
            Some(Step::ChargeUpTo(bytes)) => (1..=*bytes).map(|part| self.held + part).collect(),
            Some(Step::Release(bytes)) => vec![self.held.saturating_sub(*bytes)],
            Some(Step::Mend | Step::Mended | Step::Reap(_) | Step::ReapTo(..) | Step::Attach) | None => {
                vec![]
            }
        };
        [vec![self.held], after].concat()
    }
}

#[derive(Clone, Hash)]
struct State {
    memory: Memory,
    processes: Vec<Process>,
    kills: usize,
}

fn solo<T>(memory: &mut Memory, run: impl FnOnce(&View) -> T) -> T {
    let view = View::new(*memory, Vec::new(), ALONE);
    let result = catch_unwind(AssertUnwindSafe(|| run(&view)));
    *memory = view.memory.into_inner();
    match result {
        Ok(result) => result,
        Err(thrown) if thrown.is::<Left>() => panic!("an undisturbed process does not come to an end"),
        Err(thrown) => resume_unwind(thrown),
    }
}

/// Checks a state with a process that comes along while all others stand still.
fn check(state: &State) {
    assert!(state.memory[0] <= LIMIT, "the total exceeds the limit: {:?}", state.memory);
    let mut memory = state.memory;
    for slot in 0..SLOTS {
        let dead =
            state.processes.iter().find(|process| process.slot == slot).is_some_and(|process| process.killed);
        let word = memory[index(Word::State(slot))];
        if dead {
            solo(&mut memory, |view| ledger::mark_dead(view, slot, word, 1));
        }
        if SlotState::of(memory[index(Word::State(slot))]) == Some(SlotState::Dead) {
            solo(&mut memory, |view| ledger::reap(view, slot)).unwrap();
            assert_eq!(
                solo(&mut memory, |view| ledger::charged(view, slot)),
                0,
                "slot {slot} is dead and holds bytes"
            );
            assert_eq!(SlotState::of(memory[index(Word::State(slot))]), Some(SlotState::Free));
        }
    }
    // Whoever changes anything first completes what others left behind; an empty charge does.
    let free = (0..SLOTS).find(|slot| state.processes.iter().all(|p| p.slot != *slot || p.killed)).unwrap();
    solo(&mut memory, |view| ledger::charge(view, free, 0, 0, u64::MAX)).unwrap();
    let charged: Vec<u64> =
        (0..SLOTS).map(|slot| solo(&mut memory, |view| ledger::charged(view, slot))).collect();
    for process in state.processes.iter().filter(|process| !process.killed) {
        assert!(
            process.possible().contains(&charged[process.slot]),
            "slot {} holds {} and not {:?}",
            process.slot,
            charged[process.slot],
            process.possible()
        );
    }
    assert_eq!(memory[0], charged.iter().sum::<u64>(), "the total is not the sum: {charged:?}");
}

fn digest(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Visits every state that can be reached with up to so many kills. Returns how many there are.
fn explore(start: State, kills: usize) -> usize {
    explore_with(start, kills, &check)
}

/// The same, with what is to hold in each of them.
fn explore_with(start: State, kills: usize, check: &dyn Fn(&State)) -> usize {
    let (mut seen, mut sound) = (HashSet::new(), HashSet::new());
    let mut open = vec![start];
    while let Some(state) = open.pop() {
        if !seen.insert(digest(&state)) {
            continue;
        }
        if sound
            .insert(digest(&(&state.memory, state.processes.iter().map(Process::seen).collect::<Vec<_>>())))
        {
            check(&state);
        }
        for at in 0..state.processes.len() {
            if state.processes[at].ended() {
                continue;
            }
            let mut next = state.clone();
            next.processes[at].advance(&mut next.memory);
            open.push(next);
            // Dying is only worth a branch in the middle of a step; between steps it looks like being stopped.
            if state.kills < kills && !state.processes[at].log.is_empty() {
                let mut next = state.clone();
                // What it had read is of no consequence any more.
                next.processes[at] = Process { killed: true, ..Process::new(state.processes[at].slot, &[]) };
                next.kills += 1;
                open.push(next);
            }
        }
    }
    println!("{} states", seen.len());
    seen.len()
}

fn state(processes: Vec<Process>) -> State {
    let mut memory = [0; WORDS];
    for process in &processes {
        memory[index(Word::State(process.slot))] = SlotState::Live.word(1);
    }
    State { memory, processes, kills: 0 }
}

#[test]
fn two_processes_charge_and_release_at_once() {
    let states = explore(
        state(vec![
            Process::new(0, &[Step::Charge(60), Step::Release(60)]),
            Process::new(1, &[Step::Charge(60), Step::Release(60)]),
        ]),
        1,
    );
    assert!(states > 2_000, "{states} states");
}

#[test]
fn three_processes_charge_at_once() {
    let three =
        [40, 70, 30].into_iter().enumerate().map(|(slot, bytes)| Process::new(slot, &[Step::Charge(bytes)]));
    let states = explore(state(three.collect()), 1);
    assert!(states > 1_000, "{states} states");
}

#[test]
fn a_partial_charge_never_exceeds_the_limit() {
    let states = explore(
        state(vec![Process::new(0, &[Step::ChargeUpTo(70)]), Process::new(1, &[Step::Charge(50)])]),
        1,
    );
    assert!(states > 1_000, "{states} states");
}

#[test]
fn who_compares_the_total_with_its_parts_never_takes_a_sound_region_for_damaged() {
    let two = vec![
        Process::new(0, &[Step::Charge(60), Step::Mend, Step::Release(60)]),
        Process::new(1, &[Step::Charge(30), Step::Release(30)]),
    ];
    let states = explore(state(two), 1);
    assert!(states > 2_000, "{states} states");
    let two =
        state(vec![Process::new(0, &[Step::Reap(2)]), Process::new(1, &[Step::Mend, Step::Charge(50)])]);
    let states = explore(with_a_dead_slot(two, true), 1);
    assert!(states > 1_000, "{states} states");
}

/// What holds once somebody has compared the total with its parts, in a region into which somebody has written.
fn check_mended(state: &State) {
    let mut mended = state.clone();
    // Whoever lives does so; a free slot's owner where nobody does.
    for process in mended.processes.iter().filter(|process| !process.killed && process.log.is_empty()) {
        solo(&mut mended.memory, |view| ledger::mend(view, process.slot, process.held)).unwrap();
    }
    solo(&mut mended.memory, |view| ledger::mend(view, SLOTS - 1, 0)).unwrap();
    // From here on it is as any other. Of who was stopped on the way nobody else knows what was erased.
    for process in mended.processes.iter_mut().filter(|process| !process.killed && !process.log.is_empty()) {
        let shown = solo(&mut mended.memory, |view| ledger::charged(view, process.slot));
        process.held = process.held.min(shown);
    }
    check(&mended);
}

/// A process mends a damaged region while another charges and releases, and either is killed or stopped anywhere.
#[test]
fn a_total_that_was_zeroed_is_the_sum_again_whoever_dies_while_it_is_mended() {
    let mut damaged = state(vec![
        Process::new(0, &[Step::Mended]),
        Process::new(1, &[Step::Mended, Step::ChargeIfSound(30)]),
    ]);
    solo(&mut damaged.memory, |view| ledger::charge(view, 0, 0, 50, LIMIT)).unwrap();
    solo(&mut damaged.memory, |view| ledger::charge(view, 1, 0, 10, LIMIT)).unwrap();
    damaged.processes[0].held = 50;
    damaged.processes[1].held = 10;
    damaged.memory[index(Word::Total)] = 0;
    damaged.memory[index(Word::Entry(0, 0))] = 0;
    damaged.memory[index(Word::Entry(0, 1))] = 0;
    let states = explore_with(damaged, 1, &check_mended);
    assert!(states > 1_000, "{states} states");
}

/// A dead slot 2 with 30 bytes, whose owner died with an announced charge, or after a charge that its slot
/// does not show yet.
fn with_a_dead_slot(mut state: State, happened: bool) -> State {
    let memory = &mut state.memory;
    solo(memory, |view| ledger::charge(view, 2, 0, 30, LIMIT)).unwrap();
    memory[index(Word::Entry(2, 0))] = 35;
    memory[index(Word::EntrySeq(2, 0))] = 2;
    if happened {
        memory[0] += 5;
        memory[1] = 2 << 48 | 2;
    }
    memory[index(Word::State(2))] = SlotState::Dead.word(1);
    state
}

#[test]
fn two_processes_take_the_same_dead_slot_back() {
    for happened in [false, true] {
        let two = state(vec![Process::new(0, &[Step::Reap(2)]), Process::new(1, &[Step::Reap(2)])]);
        // Who takes back leaves nothing of its own behind: being killed is being stopped.
        let states = explore(with_a_dead_slot(two, happened), 0);
        assert!(states > 500, "{states} states");
    }
}

#[test]
fn processes_that_would_keep_different_parts_of_a_dead_slot_agree() {
    let two = state(vec![Process::new(0, &[Step::ReapTo(2, 10)]), Process::new(1, &[Step::ReapTo(2, 25)])]);
    let states = explore(with_a_dead_slot(two, true), 0);
    assert!(states > 300, "{states} states");
}

#[test]
fn charging_and_taking_back_go_together() {
    for happened in [false, true] {
        let two = state(vec![
            Process::new(0, &[Step::Reap(2), Step::Charge(80)]),
            Process::new(1, &[Step::Charge(60)]),
        ]);
        let states = explore(with_a_dead_slot(two, happened), 1);
        assert!(states > 1_000, "{states} states");
    }
}

#[test]
fn a_slot_is_used_again_while_a_late_process_still_takes_it_back() {
    // The owner of slot 0 dies at any point; one process takes its bytes back, moves into the slot and charges,
    // while another may have stopped anywhere in taking the same bytes back.
    let mut dead = with_a_dead_slot(state(vec![]), true);
    dead.processes = vec![
        Process::new(2, &[Step::Reap(2), Step::Attach, Step::Charge(70)]),
        Process::new(1, &[Step::Reap(2)]),
    ];
    dead.memory[index(Word::State(1))] = SlotState::Live.word(1);
    let states = explore(dead, 0);
    assert!(states > 1_000, "{states} states");
}
