//! Evaluates selectors on layouts. Each expression runs once for each distinct combination of the values that
//! it reads of a device; equal nodes share the answers for a whole layout.

use crate::clock::Deadline;
use crate::selector::{Compiled, Reads, SelectorError, Selectors};
use crate::snapshot::{Class, IDENTITIES, Layout, Snapshot};
use std::collections::HashMap;
use std::sync::Arc;

/// The answers of selectors. This is a cache, which can be dropped at any time. It belongs to one thread, but
/// the compiled expressions behind it can be shared by several.
#[derive(Debug, Default)]
pub struct Matcher {
    selectors: Arc<Selectors>,
    answers: HashMap<LayoutKey, Arc<Answers>>,
    values: HashMap<DeviceKey, Answer>,
    /// Estimated memory of the answers and of the values, in bytes.
    bytes: (usize, usize),
    evaluations: u64,
    generation: u64,
    until: Option<Deadline>,
    given_up: Option<Arc<str>>,
    ran_out: bool,
    most_bytes: Option<usize>,
}

/// Selector, fixed part of a layout, and the columns that the selector reads.
type LayoutKey = (u64, u64, Box<[u64]>);
/// Selector, shape (if the selector reads facts of the shape), and the values that the selector reads.
type DeviceKey = (u64, Option<u32>, Box<[Option<u32>]>);

/// The error that the time was up before every device had its answer.
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
    /// Returns the answer for a device.
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

    /// Returns the estimated memory of the answers, in bytes.
    const fn bytes(&self) -> usize {
        self.all.len() * size_of::<Answer>() + (self.accepted.len() + self.failed.len()) * 8
    }

    /// Returns two masks for up to 64 devices from a position on: the devices that are selected, and those on
    /// which the selector fails.
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
    /// The most memory of the answers for layouts, and of those for devices, in bytes. Beyond it they are
    /// dropped.
    const MOST_BYTES: usize = 48 << 20;
    /// The memory that a map entry needs in addition to its content, in bytes.
    const ENTRY: usize = 96;
    /// The number of evaluations between two looks at the clock, in addition to the looks within each
    /// evaluation.
    const EVALUATIONS_BETWEEN_LOOKS: u64 = 16;

    /// Creates a matcher without answers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a matcher that uses shared compiled expressions.
    pub fn sharing(selectors: Arc<Selectors>) -> Self {
        Self { selectors, ..Self::default() }
    }

    /// Returns the matcher with another memory limit, in bytes. The limit holds for the answers for layouts
    /// and again for those for devices.
    #[must_use]
    pub fn within(self, most_bytes: usize) -> Self {
        Self { most_bytes: Some(most_bytes), ..self }
    }

    /// Returns the compiled expressions, for another matcher.
    pub const fn selectors(&self) -> &Arc<Selectors> {
        &self.selectors
    }

    /// Returns how many times an expression was evaluated on a device.
    pub const fn evaluations(&self) -> u64 {
        self.evaluations
    }

    /// Returns a number that grows when answers are dropped: only answers of one generation can be told apart
    /// by their address.
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the expression during which the time was up since the last call, if there is one.
    pub const fn take_given_up(&mut self) -> Option<Arc<str>> {
        self.given_up.take()
    }

    fn most_bytes(&self) -> usize {
        self.most_bytes.unwrap_or(Self::MOST_BYTES)
    }

    /// Returns a compiled expression.
    pub(super) fn compiled(&self, driver: &str, expression: &Arc<str>) -> Arc<Compiled> {
        self.selectors.get(driver, expression)
    }

    /// Returns true if a class can select devices of the driver, whatever is published at the moment.
    pub fn may_select(&mut self, driver: &str, class: &Class) -> bool {
        class
            .selectors
            .iter()
            .all(|expression| expression.as_ref().is_none_or(|e| self.compiled(driver, e).may_select))
    }

    /// Returns true if an expression reads one of these attributes, or may read it.
    pub fn reads_any(&mut self, driver: &str, expression: &Arc<str>, names: &[String]) -> bool {
        match self.compiled(driver, expression).selector.reads() {
            Reads::Everything => true,
            Reads::Names { names: read, .. } => names.iter().any(|name| read.contains(name)),
        }
    }

    /// Returns layouts that are sufficient to tell what can be selected. This is one layout for each make of
    /// node, unless an expression reads what identifies a device. In that case, it is the layouts with a
    /// device that has what an expression demands, and all layouts if no expression demands anything.
    pub fn layouts<'a>(&mut self, index: &'a Snapshot, expressions: &[Arc<str>]) -> Vec<&'a Arc<Layout>> {
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

    /// Sets the deadline for [`Self::answers_until`]; `None` sets no limit. For callers that have no clock of
    /// their own, such as a review of the webhook.
    pub fn set_until(&mut self, until: Option<Deadline>) {
        self.until = until;
        self.ran_out = false;
    }

    /// Returns true if the deadline passed before an answer was found. Then some of the answers since are not
    /// known.
    pub const fn ran_out(&self) -> bool {
        self.ran_out
    }

    /// Does the same as [`Self::answers`], within the deadline that was set.
    ///
    /// # Errors
    ///
    /// [`OutOfTime`] if the deadline has passed.
    pub fn answers_until(
        &mut self,
        index: &Snapshot,
        layout: &Layout,
        expression: &Arc<str>,
    ) -> Result<Arc<Answers>, OutOfTime> {
        let until = self.until.clone();
        let mut expired = || until.as_ref().is_some_and(Deadline::is_over);
        let answers = self.answers(index, layout, expression, &mut expired);
        self.ran_out |= answers.is_err();
        answers
    }

    /// Returns true if the deadline has passed. This is remembered in [`Self::ran_out`], because the caller
    /// then leaves something undone.
    pub fn is_late(&mut self) -> bool {
        let late = self.until.as_ref().is_some_and(Deadline::is_over);
        self.ran_out |= late;
        late
    }

    /// Compiles an expression within the deadline that was set.
    ///
    /// # Errors
    ///
    /// [`OutOfTime`] if the deadline has passed and the expression was not compiled before.
    pub fn compile_until(&mut self, driver: &str, expression: &Arc<str>) -> Result<Arc<Compiled>, OutOfTime> {
        match self.selectors.known(expression) {
            Some(known) => Ok(known),
            None if self.is_late() => Err(OutOfTime),
            None => Ok(self.compiled(driver, expression)),
        }
    }

    /// Returns the answers of an expression for every device of a layout. `expired` is called from time to
    /// time and returns true if the time is up, also while an expression runs. The answers found until then
    /// are kept.
    ///
    /// # Errors
    ///
    /// [`OutOfTime`] if the time is up.
    pub fn answers(
        &mut self,
        index: &Snapshot,
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
        index: &Snapshot,
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
