//! Selectors on layouts: each expression runs once for each distinct combination of what it reads of a
//! device; equal nodes share the answer for a whole layout.

use crate::index::{Class, IDENTITIES, Index, Layout};
use crate::selector::{Compiled, Reads, SelectorError, Selectors};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// What selectors answered. A cache: it can be dropped at any time. It belongs to one thread; the compiled
/// expressions behind it can be those of several.
#[derive(Debug, Default)]
pub struct Matcher {
    selectors: Arc<Selectors>,
    answers: HashMap<LayoutKey, Arc<Answers>>,
    values: HashMap<DeviceKey, Answer>,
    /// Estimates of the memory that answers and values are in, in bytes.
    bytes: (usize, usize),
    evaluations: u64,
    generation: u64,
    until: Option<Instant>,
    given_up: Option<Arc<str>>,
    ran_out: bool,
    most_bytes: Option<usize>,
}

/// Selector, fixed part of a layout, columns that the selector reads.
type LayoutKey = (u64, u64, Box<[u64]>);
/// Selector, shape if the selector reads of it, values that the selector reads.
type DeviceKey = (u64, Option<u32>, Box<[Option<u32>]>);

/// Time is up before every device has its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfTime;

/// A selector's answer for a device.
pub type Answer = Result<bool, SelectorError>;

/// A selector's answers for the devices of a layout, by position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answers {
    all: Vec<Answer>,
    accepted: Vec<u64>,
    failed: Vec<u64>,
}

impl Answers {
    /// The answer for a device.
    pub fn get(&self, position: u32) -> Option<&Answer> {
        self.all.get(position as usize)
    }

    fn new(all: Vec<Answer>) -> Self {
        let bits = |wanted: fn(&Answer) -> bool| {
            let word = |answers: &[Answer]| {
                answers.iter().rev().fold(0u64, |word, answer| word << 1 | u64::from(wanted(answer)))
            };
            all.chunks(64).map(word).collect()
        };
        Self { accepted: bits(|answer| *answer == Ok(true)), failed: bits(Result::is_err), all }
    }

    /// Estimate of the memory that they are in, in bytes.
    const fn bytes(&self) -> usize {
        self.all.len() * size_of::<Answer>() + (self.accepted.len() + self.failed.len()) * 8
    }

    /// Of up to 64 devices from a position on: which are selected, and on which the selector fails.
    pub fn of(&self, first: u32, count: usize) -> (u64, u64) {
        let (word, shift) = (first as usize / 64, first % 64);
        let mask = if count >= 64 { u64::MAX } else { (1 << count) - 1 };
        let of = |bits: &[u64]| {
            let at = |word: usize| bits.get(word).copied().unwrap_or_default();
            let high = if shift == 0 { 0 } else { at(word + 1) << (64 - shift) };
            (at(word) >> shift | high) & mask
        };
        (of(&self.accepted), of(&self.failed))
    }
}

impl Matcher {
    /// Memory of the answers for layouts, and of those for devices, in bytes, before they are dropped.
    const MOST_BYTES: usize = 48 << 20;
    /// What an entry of a map needs beside what it says, in bytes.
    const ENTRY: usize = 96;
    /// Evaluations between two looks at the clock, beside those that each evaluation takes itself.
    const EVALUATIONS_BETWEEN_LOOKS: u64 = 16;

    /// A matcher that knows nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A matcher that uses the compiled expressions of others.
    pub fn sharing(selectors: Arc<Selectors>) -> Self {
        Self { selectors, ..Self::default() }
    }

    /// The same with so much memory for answers for layouts, and as much for those for devices, in bytes.
    #[must_use]
    pub fn within(self, most_bytes: usize) -> Self {
        Self { most_bytes: Some(most_bytes), ..self }
    }

    /// The compiled expressions, for another matcher.
    pub const fn selectors(&self) -> &Arc<Selectors> {
        &self.selectors
    }

    /// How often an expression ran on a device.
    pub const fn evaluations(&self) -> u64 {
        self.evaluations
    }

    /// Counts up when answers are dropped: only answers of one generation can be told apart by where
    /// they lie.
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// The expression within which time was up since the last call, if it was within one.
    pub const fn take_given_up(&mut self) -> Option<Arc<str>> {
        self.given_up.take()
    }

    fn most_bytes(&self) -> usize {
        self.most_bytes.unwrap_or(Self::MOST_BYTES)
    }

    /// A compiled expression.
    pub(super) fn compiled(&self, driver: &str, expression: &Arc<str>) -> Arc<Compiled> {
        self.selectors.get(driver, expression)
    }

    /// Whether a class can select devices of the driver, whatever is published at the moment.
    pub fn may_select(&mut self, driver: &str, class: &Class) -> bool {
        class
            .selectors
            .iter()
            .all(|expression| expression.as_ref().is_none_or(|e| self.compiled(driver, e).may_select))
    }

    /// Whether an expression reads one of these attributes, or may.
    pub fn reads_any(&mut self, driver: &str, expression: &Arc<str>, names: &[String]) -> bool {
        match self.compiled(driver, expression).selector.reads() {
            Reads::Everything => true,
            Reads::Names { names: read, .. } => names.iter().any(|name| read.contains(name)),
        }
    }

    /// The layouts that tell all that can be selected: of nodes of one make one, unless an expression reads
    /// what identifies a device. Then those with a device that has what an expression demands, and all if none
    /// demands anything.
    pub fn layouts<'a>(&mut self, index: &'a Index, expressions: &[Arc<str>]) -> Vec<&'a Arc<Layout>> {
        let driver = index.driver();
        let identities = IDENTITIES.map(|name| format!("{driver}/{name}"));
        if !expressions.iter().any(|expression| self.reads_any(driver, expression, &identities)) {
            return index.makes_published().collect();
        }
        for expression in expressions {
            let compiled = self.compiled(driver, expression);
            for identity in IDENTITIES {
                if let Some(values) = compiled.selector.demanded(driver, identity) {
                    return index.layouts_with(identity, &values).collect();
                }
            }
        }
        index.pools().filter_map(|pool| pool.layout.as_ref()).collect()
    }

    /// Until when [`Self::answers_until`] may take; without it, as long as it needs. For callers that have
    /// no clock of their own, such as a review of the webhook.
    pub const fn set_until(&mut self, until: Option<Instant>) {
        self.until = until;
        self.ran_out = false;
    }

    /// Whether the time that was set was up before an answer was found: what was asked since is not all known.
    pub const fn ran_out(&self) -> bool {
        self.ran_out
    }

    /// Like [`Self::answers`], within the time that was set.
    ///
    /// # Errors
    ///
    /// [`OutOfTime`] if it was up.
    pub fn answers_until(
        &mut self,
        index: &Index,
        layout: &Layout,
        expression: &Arc<str>,
    ) -> Result<Arc<Answers>, OutOfTime> {
        let until = self.until;
        let mut expired = || until.is_some_and(|until| Instant::now() >= until);
        let answers = self.answers(index, layout, expression, &mut expired);
        self.ran_out |= answers.is_err();
        answers
    }

    /// Whether the time that was set is up. Remembered as [`Self::ran_out`]: whoever asks leaves something undone.
    pub fn is_late(&mut self) -> bool {
        let late = self.until.is_some_and(|until| Instant::now() >= until);
        self.ran_out |= late;
        late
    }

    /// An expression, compiled within the time that was set.
    ///
    /// # Errors
    ///
    /// [`OutOfTime`] if it was up, and the expression was not compiled before.
    pub fn compile_until(&mut self, driver: &str, expression: &Arc<str>) -> Result<Arc<Compiled>, OutOfTime> {
        match self.selectors.known(expression) {
            Some(known) => Ok(known),
            None if self.is_late() => Err(OutOfTime),
            None => Ok(self.compiled(driver, expression)),
        }
    }

    /// What an expression answers for every device of a layout. `expired` is asked now and then whether time
    /// is up, also while an expression runs; what was answered until then is kept.
    ///
    /// # Errors
    ///
    /// [`OutOfTime`] if it was.
    pub fn answers(
        &mut self,
        index: &Index,
        layout: &Layout,
        expression: &Arc<str>,
        expired: &mut dyn FnMut() -> bool,
    ) -> Result<Arc<Answers>, OutOfTime> {
        let compiled = match self.selectors.known(expression) {
            Some(known) => known,
            None if expired() => return Err(OutOfTime),
            None => self.compiled(index.driver(), expression),
        };
        let (reads, shaped, columns): (Option<Vec<_>>, bool, Box<[u64]>) = match compiled.selector.reads() {
            Reads::Everything => (None, true, layout.columns().map(|column| column.id).collect()),
            Reads::Names { names, shape } => {
                let syms: Vec<_> = names.iter().filter_map(|name| index.sym(name)).collect();
                let ids = syms.iter().map(|sym| layout.column(*sym).map_or(0, |column| column.id)).collect();
                (Some(syms), *shape, ids)
            }
        };
        let key = (compiled.id, layout.id, columns);
        if let Some(known) = self.answers.get(&key) {
            return Ok(known.clone());
        }
        let mut answers = Vec::with_capacity(layout.devices.len());
        for (position, device) in (0u32..).zip(layout.devices.iter()) {
            let read = match &reads {
                Some(syms) => syms.iter().map(|sym| layout.attribute(position, *sym)).collect(),
                None => {
                    let names = index.shape(device).attributes.iter();
                    names.map(|name| layout.attribute(position, *name)).collect()
                }
            };
            let shape = shaped.then_some(device.shape);
            answers.push(self.answer(index, layout, position, shape, &compiled, read, expired)?);
        }
        let answers = Arc::new(Answers::new(answers));
        self.bytes.0 += Self::ENTRY + key.2.len() * 8 + answers.bytes();
        if self.bytes.0 > self.most_bytes() {
            self.answers.clear();
            self.bytes.0 = 0;
            self.generation = self.generation.wrapping_add(1);
        }
        self.answers.insert(key, answers.clone());
        Ok(answers)
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the device, what is read of it, and the time that is left"
    )]
    fn answer(
        &mut self,
        index: &Index,
        layout: &Layout,
        position: u32,
        shape: Option<u32>,
        compiled: &Compiled,
        read: Box<[Option<u32>]>,
        expired: &mut dyn FnMut() -> bool,
    ) -> Result<Answer, OutOfTime> {
        if compiled.is_too_costly() {
            return Ok(Err(SelectorError::TooCostly { expression: compiled.selector.source().clone() }));
        }
        let key = (compiled.id, shape, read);
        if let Some(known) = self.values.get(&key) {
            return Ok(known.clone());
        }
        let Some(facts) = index.facts(layout, position) else { return Ok(Ok(false)) };
        self.evaluations = self.evaluations.wrapping_add(1);
        if self.evaluations.is_multiple_of(Self::EVALUATIONS_BETWEEN_LOOKS) && expired() {
            return Err(OutOfTime);
        }
        let answer = compiled.selector.matches(self.selectors.environment(), &facts, expired);
        match &answer {
            Err(SelectorError::OutOfTime { expression }) => {
                self.given_up = Some(expression.clone());
                return Err(OutOfTime);
            }
            Err(SelectorError::TooCostly { .. }) => compiled.set_too_costly(),
            _ => {}
        }
        self.bytes.1 += Self::ENTRY + key.2.len() * 8 + size_of::<Answer>();
        if self.bytes.1 > self.most_bytes() {
            self.values.clear();
            self.bytes.1 = 0;
        }
        self.values.insert(key, answer.clone());
        Ok(answer)
    }
}
