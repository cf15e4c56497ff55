//! The words of a region that processes store to, by name.

use crate::support::traced::lease_of;
use aliquot_quota::gate::Compute;
use aliquot_quota::lease::HOLDERS;
use aliquot_quota::region::{Header, Region, SLOT_COUNT, Slot};
use std::mem::offset_of;

/// Entries of the log that are watched: each is written by the same stores.
const LOGGED: usize = 6;

/// Whether a word is of the log.
pub(crate) fn is_logged(at: usize) -> bool {
    let log = of_compute(offset_of!(Compute, log));
    (log..of_compute(offset_of!(Compute, trued_borrowed_ns))).contains(&at)
}

/// A word's kind: its name, and in the log what all entries have in its place.
pub(crate) fn kind(name: String, at: usize) -> String {
    let log = of_compute(offset_of!(Compute, log));
    if is_logged(at) { format!("log: {} of an entry", (at - log) / 8 % 4) } else { name }
}

/// Offset of a word of the header.
pub(crate) const TOTAL: usize = offset_of!(Header, total);
pub(crate) const REFUSED: usize = offset_of!(Header, refused);
pub(crate) const REAPED: usize = offset_of!(Header, reaped);
pub(crate) const AUDIT: usize = offset_of!(Header, audit);
pub(crate) const PEAK: usize = offset_of!(Header, peak_bytes);
pub(crate) const CONTEXT: usize = offset_of!(Header, context_bytes);
pub(crate) const LAST_DEATH: usize = offset_of!(Header, last_death_ms);

/// Offset of a word of a slot.
pub(crate) const fn of_slot(slot: usize, word: usize) -> usize {
    offset_of!(Region, slots) + slot * size_of::<Slot>() + word
}

/// Offset of a word of the compute side.
pub(crate) const fn of_compute(word: usize) -> usize {
    offset_of!(Region, compute) + word
}

pub(crate) const DEADLINE: usize = of_compute(offset_of!(Compute, paid_until_ns));
/// The bits of the first 64 processes that wait.
pub(crate) const WAITING: usize = of_compute(offset_of!(Compute, line));
/// Since when the first process waits, and when it asked last; the second one's follow.
const PLACES: usize = WAITING + SLOT_COUNT / 64 * 8;

/// The slot that takes what an exporter frees and others still have.
pub(crate) const LEFT: usize = SLOT_COUNT - 1;

/// All words that the processes in slots 0 and 1 store to; with those of [`LEFT`] where something is left there.
pub(crate) fn all(leaves: bool) -> Vec<(String, usize)> {
    let mut all = Vec::new();
    let mut put = |name: String, at: usize| all.push((name, at));
    put("total".to_owned(), TOTAL);
    put("operation".to_owned(), TOTAL + 8);
    let header = [
        ("peak", PEAK),
        ("refused", REFUSED),
        ("reaped", REAPED),
        ("audit", AUDIT),
        ("context", CONTEXT),
        ("last death", LAST_DEATH),
    ];
    header.into_iter().for_each(|(name, at)| put(name.to_owned(), at));
    let of_slots = [
        ("recorded", offset_of!(Slot, recorded)),
        ("state", offset_of!(Slot, state)),
        ("pids", offset_of!(Slot, pid)),
        ("start time", offset_of!(Slot, start_time)),
        ("pid namespace", offset_of!(Slot, pid_namespace)),
        ("overhead", offset_of!(Slot, overhead_bytes)),
        ("dead since", offset_of!(Slot, dead_since_ms)),
        ("pending", offset_of!(Slot, pending)),
        ("exported", offset_of!(Slot, exported_bytes)),
        ("imported", offset_of!(Slot, imported_bytes)),
    ];
    for slot in [0, 1].into_iter().chain(leaves.then_some(LEFT)) {
        (0..4).for_each(|word| put(format!("slot {slot}: entry {word}"), of_slot(slot, word * 8)));
        of_slots
            .into_iter()
            .for_each(|(name, word)| put(format!("slot {slot}: {name}"), of_slot(slot, word)));
        if slot < HOLDERS {
            put(format!("slot {slot}: lease"), lease_of(slot));
        }
    }
    let of_gate = [
        ("paid until", offset_of!(Compute, paid_until_ns)),
        ("charged", offset_of!(Compute, charged_ns)),
        ("delayed", offset_of!(Compute, delayed)),
        ("borrowed until", offset_of!(Compute, borrowed_until_ns)),
        ("borrowed", offset_of!(Compute, borrowed_ns)),
        ("trued", offset_of!(Compute, trued_ns)),
        ("logged", offset_of!(Compute, logged)),
        ("leased", offset_of!(Compute, leased_ns)),
        ("trued borrowed", offset_of!(Compute, trued_borrowed_ns)),
        ("members", offset_of!(Compute, members)),
    ];
    of_gate.into_iter().for_each(|(name, word)| put(name.to_owned(), of_compute(word)));
    let log = of_compute(offset_of!(Compute, log));
    (0..4 * LOGGED).for_each(|word| put(format!("log: word {word}"), log + word * 8));
    put("waiting".to_owned(), WAITING);
    (0..4).for_each(|word| put(format!("place: word {word}"), PLACES + word * 8));
    all
}
