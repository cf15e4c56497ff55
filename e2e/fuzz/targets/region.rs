//! A region that a tenant writes into between what processes do with it: every call ends, nothing panics, and no process
//! is given more than its limit by its own count.
#![no_main]

use aliquot_fuzz::{Input, seeds, sound_region};
use aliquot_quota::gate::{self, Ask, Entrance, LONGEST_DEBT_NS, Mark, Terms};
use aliquot_quota::grant::Grant;
use aliquot_quota::lease::{ALL_NS, Lease, Room};
use aliquot_quota::ledger::{self, Cells, LedgerError, Word};
use aliquot_quota::meter::Seen;
use aliquot_quota::own::Own;
use aliquot_quota::region::{Region, RegionView, SLOT_COUNT};
use aliquot_quota::REGION_FILE_SIZE;
use libfuzzer_sys::fuzz_target;
use std::alloc::{Layout, alloc_zeroed};
use std::sync::OnceLock;

/// Processes, in the first slots.
const PROCESSES: usize = 4;
const LIMIT: u64 = 1 << 30;

/// A region on the heap, as words and as what it is.
fn region() -> (&'static Region, *mut u8) {
    static AT: OnceLock<usize> = OnceLock::new();
    // SAFETY: the layout has a size; a region of zeros is valid, as it only holds atomics, and it is never freed.
    let at = AT.get_or_init(|| unsafe { alloc_zeroed(Layout::new::<Region>()) } as usize);
    let at = *at as *mut u8;
    // SAFETY: allocated above with the region's layout; everything in it is atomic.
    (unsafe { &*at.cast::<Region>() }, at)
}

fuzz_target!(
    init: seeds(|| {
        let calls = (0..12_u8).map(|call| vec![call, 0, 5, 64, 0, call, 1, 6, 0, 1, 0, 0, 0, 0, 0, 0]);
        let writes = (0..4_u8).map(|kind| vec![200, kind, 0, 0, 0, 0, 0, 5, 0, 1, 1, 5, 0, 1, 200, kind, 1, 0, 1]);
        calls.chain(writes).collect()
    }),
    |bytes: &[u8]| {
        let (region, at) = region();
        let sound = sound_region();
        // SAFETY: the region has this size, and this is the only thread.
        unsafe { at.copy_from_nonoverlapping(sound.as_ptr(), REGION_FILE_SIZE) };
        let mut input = Input(bytes);
        let mut held = [0_u64; PROCESSES];
        let owns: [Own; PROCESSES] = Default::default();
        for (slot, held) in held.iter_mut().enumerate() {
            ledger::attach(region, slot).expect("a free slot");
            *held = 0;
        }
        let (mut now, compute) = (1 << 40, &region.compute);
        for _ in 0..64 {
            if input.is_over() {
                break;
            }
            let (call, who) = (input.byte(), usize::from(input.byte()) % PROCESSES);
            now += u64::from(input.byte()) << 16;
            let (purse, own) = (&region.compute.purses[who], &owns[who]);
            match call {
                200.. => {
                    let (place, value) = (input.place(), input.word());
                    // SAFETY: within the region and aligned; this is the only thread.
                    unsafe { at.add(place).cast::<u64>().write(value) };
                }
                _ => match call % 12 {
                    0 | 1 => {
                        let bytes = input.word();
                        match ledger::charge(region, who, held[who], bytes, LIMIT) {
                            Ok(total) => {
                                held[who] += bytes;
                                assert!(held[who] <= LIMIT && total <= LIMIT, "more than the limit is charged");
                            }
                            Err(LedgerError::Busy) => panic!("nobody else is here"),
                            Err(_) => {}
                        }
                    }
                    2 => {
                        let bytes = input.word();
                        if let Ok(part) = ledger::charge_up_to(region, who, held[who], bytes, LIMIT) {
                            held[who] += part;
                            assert!(held[who] <= LIMIT, "more than the limit is charged");
                        }
                    }
                    3 => {
                        let bytes = input.word().min(held[who]);
                        if ledger::release(region, who, held[who], bytes).is_ok() {
                            held[who] -= bytes;
                        }
                    }
                    4 => {
                        let before = ledger::total(region);
                        if ledger::mend(region, who, held[who]) == Ok(true) {
                            assert!(ledger::total(region) >= before.max(held[who]), "the larger figure counts");
                        }
                    }
                    5 => {
                        let slot = input.place() % SLOT_COUNT;
                        let state = region.load(Word::State(slot));
                        ledger::mark_dead(region, slot, state, 1);
                        let _ = ledger::reap_to(region, slot, input.word());
                    }
                    6 | 7 => {
                        let [percent, borrow_percent] = input.take();
                        let terms = Terms { percent: 1 + percent % 100, borrow_percent: borrow_percent % 101 };
                        let room = Room { allowance_ns: 4_000_000, held_ns: purse.held_ns() };
                        let ask = Ask {
                            slot: who,
                            cost_ns: input.word(),
                            is_short: call % 2 == 0,
                            room,
                            is_known: call & 16 == 0,
                            ahead_ns: 0,
                        };
                        match gate::enter(compute, own, now, ask, terms) {
                            Entrance::Own(ns) | Entrance::Borrowed(ns) => assert!(ns <= ALL_NS),
                            Entrance::Wait(until) => {
                                assert!(until <= now + LONGEST_DEBT_NS, "no wait is longer than the longest debt");
                            }
                        }
                    }
                    8 => {
                        let lease = Lease { ns: input.word() % ALL_NS, is_borrowed: call & 16 == 0 };
                        let _ = purse.put(usize::from(input.byte()), lease);
                        let _ = purse.spend(usize::from(input.byte()), input.word());
                        for taken in purse.trim(input.word()) {
                            gate::give_back(compute, now, taken, 30);
                            own.give_back(now, taken, 30);
                        }
                    }
                    9 => {
                        let grant = Grant {
                            borrow_percent: input.byte() % 101,
                            true_up_ns: input.word() as i64,
                            borrowed_true_up_ns: input.word() as i64,
                            ..Grant::default()
                        };
                        gate::true_up(compute, own, now, &grant, 30);
                    }
                    10 => {
                        let seen = Seen { start_ns: now, end_ns: input.word(), ..Seen::default() };
                        gate::log(compute, own, who as u16, false, &seen);
                        let _ = Mark::of(input.word());
                    }
                    _ => {
                        let (delta, borrowed, percent) = (input.word() as i64, input.word() as i64, input.byte() % 101);
                        gate::correct(compute, now, delta, 30);
                        gate::correct_borrowed(compute, now, borrowed, percent);
                        own.correct(now, delta, 30);
                        own.correct_borrowed(now, borrowed, percent);
                    }
                },
            }
        }
        // SAFETY: the region has this size, and this is the only thread.
        let bytes = unsafe { std::slice::from_raw_parts(at, REGION_FILE_SIZE) };
        let view = RegionView::parse(bytes).expect("the constants stand");
        assert!(view.processes().count() <= SLOT_COUNT);
        let _ = (view.held_bytes(|one| !one.dead), view.peak_bytes(), view.refused(), view.audit());
    }
);
