//! What processes do while they are killed or stopped.

use super::words::{
    AUDIT, CONTEXT, DEADLINE, LAST_DEATH, LEFT, PEAK, REAPED, REFUSED, TOTAL, WAITING, of_compute, of_slot,
};
use crate::support::traced::{From, lease_of};
use aliquot_quota::gate::Compute;
use aliquot_quota::region::{Slot, audit};
use std::mem::offset_of;

/// Who is there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    /// Nobody.
    Empty,
    /// A process died with 900 MiB.
    Heir,
    /// A process lives in slot 0 that has exported 100 MiB; `OPEN` in the script opens them.
    Exporter,
    /// That one was killed when the other had opened them.
    Orphan,
    /// That one has freed them when the other had opened them.
    Freed,
    /// Another process has opened the 100 MiB that the traced one exports before its first mark.
    Importer,
    /// The share has not paid for its last launches yet.
    Indebted,
    /// The node agent lends time, and has found that other charges were wrong.
    Granted,
}

impl Setting {
    /// Whether what an exporter frees is left to those who have it.
    pub(crate) fn leaves(self) -> bool {
        matches!(self, Self::Freed | Self::Importer)
    }
}

/// One path through the limiter.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) setting: Setting,
    pub(crate) from: From,
    /// What the process does before, while it is watched, and afterwards.
    pub(crate) before: &'static [&'static str],
    pub(crate) watched: &'static [&'static str],
    pub(crate) after: &'static [&'static str],
    /// MiB that it is charged at the least and at the most in the middle.
    pub(crate) held: [u64; 2],
    /// Words that this path is known to store to.
    pub(crate) known: &'static [usize],
    /// Whether somebody else waits at the gate meanwhile.
    pub(crate) waits: bool,
    /// MiB of a context.
    pub(crate) context: u64,
    /// Bits of the audit word that it sets.
    pub(crate) audit: u64,
}

const START: [&str; 2] = ["init", "retain"];
const PLAIN: Case = Case {
    name: "",
    setting: Setting::Empty,
    from: From::Mark,
    before: &START,
    watched: &[],
    after: &["freeall"],
    held: [0, 0],
    known: &[],
    waits: false,
    context: 0,
    audit: 0,
};
const LAUNCH: Case = Case { after: &[], waits: true, ..PLAIN };

const OWN: usize = 0;
const OTHER: usize = 1;
const EXPORTED: usize = offset_of!(Slot, exported_bytes);
const IMPORTED: usize = offset_of!(Slot, imported_bytes);
const STATE: usize = offset_of!(Slot, state);

/// What an exporter frees and others still have goes to a slot of nobody's.
const LEAVING: [usize; 7] = [
    of_slot(OWN, EXPORTED),
    TOTAL,
    of_slot(LEFT, STATE),
    of_slot(LEFT, EXPORTED),
    of_slot(LEFT, offset_of!(Slot, recorded)),
    of_slot(LEFT, offset_of!(Slot, pid)),
    of_slot(LEFT, offset_of!(Slot, dead_since_ms)),
];

pub(crate) const CASES: [Case; 20] = [
    Case {
        name: "attach",
        from: From::Lock,
        before: &[],
        watched: &START,
        known: &[
            of_slot(OWN, STATE),
            of_slot(OWN, offset_of!(Slot, pid)),
            of_slot(OWN, offset_of!(Slot, start_time)),
            of_slot(OWN, offset_of!(Slot, pid_namespace)),
            of_compute(offset_of!(Compute, members)),
        ],
        ..PLAIN
    },
    Case {
        name: "context",
        before: &["init"],
        watched: &["ctx", "destroy"],
        after: &[],
        held: [0, 100],
        context: 100,
        known: &[CONTEXT, TOTAL, of_slot(OWN, offset_of!(Slot, overhead_bytes))],
        ..PLAIN
    },
    Case {
        name: "charge",
        watched: &["alloc:linear:600M"],
        held: [0, 600],
        known: &[TOTAL, PEAK, of_slot(OWN, offset_of!(Slot, recorded))],
        ..PLAIN
    },
    Case {
        name: "release",
        before: &["init", "retain", "alloc:linear:600M"],
        watched: &["free"],
        held: [0, 600],
        known: &[TOTAL],
        ..PLAIN
    },
    Case {
        name: "handles",
        watched: &["alloc:mapped:100M", "free"],
        held: [0, 100],
        known: &[TOTAL],
        ..PLAIN
    },
    Case {
        name: "pools",
        watched: &["alloc:async:64M", "free", "sync"],
        held: [0, 128],
        known: &[TOTAL],
        ..PLAIN
    },
    Case {
        name: "graphs",
        watched: &["graph:60M", "launch", "graphtrim"],
        after: &["graphend"],
        held: [0, 64],
        known: &[TOTAL],
        waits: true,
        ..PLAIN
    },
    Case {
        name: "refusal",
        before: &["init", "retain", "alloc:linear:600M"],
        watched: &["alloc:linear:600M"],
        held: [600, 600],
        known: &[REFUSED],
        ..PLAIN
    },
    Case {
        name: "audit",
        watched: &["deepbind:libm.so.6"],
        known: &[AUDIT],
        audit: audit::DEEPBIND,
        ..PLAIN
    },
    Case {
        name: "reap",
        setting: Setting::Heir,
        watched: &["alloc:linear:600M"],
        held: [0, 600],
        known: &[
            REAPED,
            LAST_DEATH,
            TOTAL,
            of_slot(OWN, STATE),
            of_slot(OWN, offset_of!(Slot, dead_since_ms)),
        ],
        ..PLAIN
    },
    Case {
        name: "export",
        before: &["init", "retain", "alloc:linear:100M"],
        watched: &["ipcexport", "free", "fdexport:100M", "free"],
        held: [0, 100],
        known: &[of_slot(OWN, EXPORTED), TOTAL],
        ..PLAIN
    },
    Case {
        name: "import",
        setting: Setting::Exporter,
        watched: &["OPEN", "ipcclose"],
        known: &[of_slot(OTHER, IMPORTED)],
        ..PLAIN
    },
    Case {
        name: "orphan",
        setting: Setting::Orphan,
        before: &["init", "retain", "OPEN", "mark"],
        watched: &["alloc:linear:1000M", "ipcclose", "alloc:linear:1000M"],
        held: [0, 1000],
        known: &[of_slot(OTHER, IMPORTED), REAPED, of_slot(OWN, STATE)],
        ..PLAIN
    },
    Case {
        name: "leave",
        setting: Setting::Importer,
        before: &["init", "retain", "alloc:linear:100M", "ipcexport", "mark"],
        watched: &["free"],
        held: [0, 100],
        known: &LEAVING,
        ..PLAIN
    },
    Case {
        name: "leave a handle",
        setting: Setting::Importer,
        before: &["init", "retain", "fdexport:100M", "mark"],
        watched: &["free"],
        held: [0, 100],
        known: &LEAVING,
        ..PLAIN
    },
    Case {
        name: "last",
        setting: Setting::Freed,
        before: &["init", "retain", "OPEN", "mark"],
        watched: &["ipcclose"],
        known: &[of_slot(OTHER, IMPORTED), TOTAL, of_slot(LEFT, STATE)],
        ..PLAIN
    },
    Case {
        name: "launch",
        watched: &["kernel", "sleep:2", "kernel"],
        known: &[
            DEADLINE,
            of_compute(offset_of!(Compute, charged_ns)),
            of_compute(offset_of!(Compute, logged)),
            of_compute(offset_of!(Compute, log)),
            of_slot(OWN, offset_of!(Slot, pending)),
        ],
        ..LAUNCH
    },
    Case {
        name: "gate",
        setting: Setting::Indebted,
        // Who waits with a kernel that was measured looks at the gate seldom.
        before: &["init", "retain", "kernel:500", "kernel:500", "kernel:500", "kernel:500"],
        watched: &["kernel:500"],
        known: &[DEADLINE, WAITING, of_compute(offset_of!(Compute, delayed))],
        ..LAUNCH
    },
    Case {
        name: "leases",
        before: &["init", "retain", "kernels:20:400"],
        watched: &["kernels:20:30"],
        known: &[DEADLINE, of_compute(offset_of!(Compute, leased_ns)), lease_of(OWN)],
        ..LAUNCH
    },
    Case {
        name: "borrowing",
        setting: Setting::Granted,
        watched: &["kernel:12000", "kernels:12000:3"],
        known: &[
            DEADLINE,
            of_compute(offset_of!(Compute, borrowed_until_ns)),
            of_compute(offset_of!(Compute, borrowed_ns)),
            of_compute(offset_of!(Compute, trued_ns)),
            of_compute(offset_of!(Compute, trued_borrowed_ns)),
        ],
        ..LAUNCH
    },
];
