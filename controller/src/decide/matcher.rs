//! Selectors on layouts: each expression runs once for each distinct combination of what it reads of a
//! device; equal nodes share the answer for a whole layout.

use crate::index::{Class, IDENTITIES, Index, Layout};
use crate::selector::{Environment, Reads, Selector, SelectorError};
use std::collections::HashMap;
use std::sync::Arc;

/// Compiled selectors and what they answered. A cache: it can be dropped at any time.
#[derive(Debug, Default)]
pub struct Matcher {
    environment: Environment,
    selectors: HashMap<Arc<str>, Arc<Compiled>>,
    answers: HashMap<LayoutKey, Arc<Answers>>,
    values: HashMap<DeviceKey, Answer>,
    last: u32,
    evaluations: u64,
    generation: u64,
}

/// Selector, fixed part of a layout, columns that the selector reads.
type LayoutKey = (u32, u64, Box<[u64]>);
/// Selector, shape if the selector reads of it, values that the selector reads.
type DeviceKey = (u32, Option<u32>, Box<[Option<u32>]>);

#[derive(Debug)]
struct Compiled {
    id: u32,
    selector: Selector,
    may_select: bool,
}

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
    /// Answers that are kept before all are dropped.
    const MOST: usize = 200_000;

    /// A matcher that knows nothing yet.
    pub fn new() -> Self {
        Self::default()
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

    fn compiled(&mut self, driver: &str, expression: &Arc<str>) -> Arc<Compiled> {
        if let Some(known) = self.selectors.get(expression) {
            return known.clone();
        }
        if self.selectors.len() >= Self::MOST {
            self.selectors.clear();
            self.answers.clear();
            self.values.clear();
            self.generation = self.generation.wrapping_add(1);
        }
        let selector = Selector::compile(expression);
        let may_select = selector.may_select(driver, &self.environment);
        self.last = self.last.wrapping_add(1);
        let compiled = Arc::new(Compiled { id: self.last, selector, may_select });
        self.selectors.insert(expression.clone(), compiled.clone());
        compiled
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
    /// what identifies a device.
    pub fn layouts<'a>(&mut self, index: &'a Index, expressions: &[Arc<str>]) -> Vec<&'a Arc<Layout>> {
        let identities = IDENTITIES.map(|name| format!("{}/{name}", index.driver()));
        if expressions.iter().any(|expression| self.reads_any(index.driver(), expression, &identities)) {
            return index.pools().filter_map(|pool| pool.layout.as_ref()).collect();
        }
        index.makes_published().collect()
    }

    /// What an expression answers for every device of a layout.
    pub fn answers(&mut self, index: &Index, layout: &Layout, expression: &Arc<str>) -> Arc<Answers> {
        let compiled = self.compiled(index.driver(), expression);
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
            return known.clone();
        }
        let answers = (0u32..)
            .zip(layout.devices.iter())
            .map(|(position, device)| {
                let read = match &reads {
                    Some(syms) => syms.iter().map(|sym| layout.attribute(position, *sym)).collect(),
                    None => {
                        let names = index.shape(device).attributes.iter();
                        names.map(|name| layout.attribute(position, *name)).collect()
                    }
                };
                self.answer(index, layout, position, shaped.then_some(device.shape), &compiled, read)
            })
            .collect();
        if self.answers.len() >= Self::MOST {
            self.answers.clear();
            self.generation = self.generation.wrapping_add(1);
        }
        let answers = Arc::new(Answers::new(answers));
        self.answers.insert(key, answers.clone());
        answers
    }

    fn answer(
        &mut self,
        index: &Index,
        layout: &Layout,
        position: u32,
        shape: Option<u32>,
        compiled: &Compiled,
        read: Box<[Option<u32>]>,
    ) -> Answer {
        let key = (compiled.id, shape, read);
        if let Some(known) = self.values.get(&key) {
            return known.clone();
        }
        let Some(facts) = index.facts(layout, position) else { return Ok(false) };
        self.evaluations = self.evaluations.wrapping_add(1);
        let answer = compiled.selector.matches(&self.environment, &facts);
        if self.values.len() >= Self::MOST {
            self.values.clear();
        }
        self.values.insert(key, answer.clone());
        answer
    }
}
