//! Verdicts that a request does not fit: of the pods that request the same, one is decided, until something
//! changes that could make room. Otherwise a Deployment of fifty pods that fit nowhere would cost fifty
//! decisions each time.

use aliquot_allocator::schedule::NoFit;
use std::collections::HashMap;

/// The most verdicts that are kept; one names a reason for each kind of node, not for each node.
const MOST: usize = 1000;

/// The verdict on a question.
#[derive(Debug, Clone)]
pub(super) enum Verdict {
    /// The request does not fit.
    NoFit(NoFit),
    /// A short look is not enough to tell.
    NotAtOnce,
}

/// The verdicts since room was last made.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    known: HashMap<u64, Verdict>,
    /// Questions for which no victims were found, with the version of the holders at that time.
    hopeless: HashMap<u64, u64>,
    /// The number of times that room was made, see [`aliquot_allocator::queue::Queue::wakes`].
    wakes: u64,
}

impl Verdicts {
    /// Forgets everything, because something changed that decisions read.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.hopeless.clear();
    }

    /// Returns true if there is any verdict since room was last made.
    pub(super) fn has_any(&mut self, wakes: u64) -> bool {
        if std::mem::replace(&mut self.wakes, wakes) != wakes {
            self.forget();
        }
        !self.known.is_empty()
    }

    /// Returns the verdict on a question; `None` if there is none.
    pub(super) fn get(&self, question: u64) -> Option<&Verdict> {
        self.known.get(&question)
    }

    /// Returns true if no victims were found for a question with the same holders.
    pub(super) fn is_hopeless(&mut self, question: u64, wakes: u64, holders: u64) -> bool {
        self.has_any(wakes);
        self.hopeless.get(&question) == Some(&holders)
    }

    /// Notes that no victims were found for a question.
    pub(super) fn note_hopeless(&mut self, question: u64, wakes: u64, holders: u64) {
        self.has_any(wakes);
        if self.hopeless.len() >= MOST {
            self.hopeless.clear();
        }
        self.hopeless.insert(question, holders);
    }

    /// Stores a verdict.
    pub(super) fn insert(&mut self, question: u64, wakes: u64, verdict: Verdict) {
        self.has_any(wakes);
        if self.known.len() >= MOST {
            self.known.clear();
        }
        self.known.insert(question, verdict);
    }
}
