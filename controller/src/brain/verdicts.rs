//! What did not fit, by what was asked: of pods that ask for the same one is decided, as long as nothing changed
//! that could make room. Without that a Deployment of fifty that fit nowhere costs fifty decisions each time.

use crate::decide::NoFit;
use std::collections::HashMap;

/// Verdicts that are kept at most; one names a reason for each kind of node, not each node.
const MOST: usize = 1000;

/// What was found of a question.
#[derive(Debug, Clone)]
pub(super) enum Verdict {
    /// It does not fit.
    NoFit(NoFit),
    /// A short look does not tell.
    NotAtOnce,
}

/// What was found since there was room for the last time.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    known: HashMap<u64, Verdict>,
    /// Questions for which nobody could go who would make room, and the state of the holders then.
    hopeless: HashMap<u64, u64>,
    /// How often there had been room, see [`crate::queue::Queue::wakes`].
    wakes: u64,
}

impl Verdicts {
    /// Something changed that decisions read.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.hopeless.clear();
    }

    /// Whether anything is known.
    pub(super) fn has_any(&mut self, wakes: u64) -> bool {
        if std::mem::replace(&mut self.wakes, wakes) != wakes {
            self.forget();
        }
        !self.known.is_empty()
    }

    /// What is known.
    pub(super) fn get(&self, question: u64) -> Option<&Verdict> {
        self.known.get(&question)
    }

    /// Whether nobody could go who would make room, with the same holders.
    pub(super) fn is_hopeless(&mut self, question: u64, wakes: u64, holders: u64) -> bool {
        self.has_any(wakes);
        self.hopeless.get(&question) == Some(&holders)
    }

    /// Nobody could go who would make room.
    pub(super) fn note_hopeless(&mut self, question: u64, wakes: u64, holders: u64) {
        self.has_any(wakes);
        if self.hopeless.len() >= MOST {
            self.hopeless.clear();
        }
        self.hopeless.insert(question, holders);
    }

    /// Keeps what was found.
    pub(super) fn insert(&mut self, question: u64, wakes: u64, verdict: Verdict) {
        self.has_any(wakes);
        if self.known.len() >= MOST {
            self.known.clear();
        }
        self.known.insert(question, verdict);
    }
}
