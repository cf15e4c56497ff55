//! Regular expressions with the syntax of Go's `regexp` and a bound on their cost.
//!
//! The `regex` crate turns Unicode classes and counted repetitions into automata over bytes, which can be
//! several hundred times larger than Go's programs. This implementation keeps a class as one instruction, as
//! Go does, and runs all threads side by side (Pike's method). Compiling and matching take steps in
//! proportion to the instructions, and each step is metered.

use super::message::one_line;
use super::meter::{Meter, Stop};
use super::pattern;
use regex_syntax::hir::{Class, Hir, HirKind, Look};

/// The size that all patterns of an expression together may still have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allowance {
    /// Instructions, and ranges of classes.
    parts: usize,
    /// Unicode classes (`\p`), each of which is built from a table of hundreds of ranges.
    classes: usize,
}

impl Default for Allowance {
    fn default() -> Self {
        Self { parts: 50_000, classes: 64 }
    }
}

/// The number of classes that one class counts for in a pattern that may ignore case: such a class is folded
/// range by range.
const FOLDED: usize = 8;

/// The most levels of brackets in a pattern.
const MOST_LEVELS: u32 = 250;

/// A compiled regular expression.
#[derive(Debug)]
pub(super) struct Regex {
    program: Vec<Inst>,
    classes: Vec<Vec<(char, char)>>,
    /// The text that every match begins with.
    prefix: String,
    /// True if the prefix is the whole pattern.
    literal: bool,
    /// True if a match can begin only at the beginning of the text.
    anchored: bool,
}

#[derive(Debug, Clone, Copy)]
enum Inst {
    Char(char),
    Class(usize),
    /// Continues at both instructions; the first is preferred.
    Split(usize, usize),
    Jump(usize),
    Look(Look),
    Match,
}

/// Memory for matching; every match of an evaluation reuses it.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    now: Threads,
    next: Threads,
    stack: Vec<usize>,
}

/// Threads in order of preference, each with its instruction and the beginning of its match.
#[derive(Debug, Default)]
struct Threads {
    list: Vec<(usize, usize)>,
    /// For each instruction: the round in which it was last added.
    marks: Vec<u64>,
    round: u64,
}

impl Threads {
    fn reset(&mut self, size: usize) {
        self.list.clear();
        self.round += 1;
        if self.marks.len() < size {
            self.marks.resize(size, 0);
        }
    }

    /// Returns true if the instruction is new in this round.
    fn mark(&mut self, at: usize) -> bool {
        match self.marks.get_mut(at) {
            Some(mark) if *mark != self.round => {
                *mark = self.round;
                true
            }
            _ => false,
        }
    }
}

impl Regex {
    /// Compiles a pattern in Go's syntax, and subtracts its size from the allowance.
    ///
    /// # Errors
    ///
    /// A failure if the pattern is not a regular expression; [`Stop::TooCostly`] if it is too large.
    pub(super) fn compile(pattern: &str, allowance: &mut Allowance) -> Result<Self, Stop> {
        let classes = allowance.classes.checked_sub(unicode_classes(pattern));
        allowance.classes = classes.ok_or(Stop::TooCostly)?;
        let invalid =
            |reason: String| Stop::failed(format!("{pattern:?} is no regular expression: {reason}"));
        let hir = regex_syntax::ParserBuilder::new()
            .nest_limit(MOST_LEVELS)
            .utf8(false)
            .build()
            .parse(&pattern::from_go(pattern))
            .map_err(|error| invalid(one_line(&error.to_string())))?;
        let mut compiler = Compiler { program: Vec::new(), classes: Vec::new(), allowance };
        compiler.add(&hir)?;
        compiler.push(Inst::Match)?;
        let (prefix, literal) = prefix(&hir);
        let anchored = hir.properties().look_set_prefix().contains(Look::Start);
        Ok(Self { program: compiler.program, classes: compiler.classes, prefix, literal, anchored })
    }

    /// Returns the estimated steps of compiling, without those for instructions.
    pub(super) fn steps_to_compile(pattern: &str) -> u64 {
        20 + 4 * pattern.len() as u64 + 500 * unicode_classes(pattern) as u64
    }

    pub(super) const fn instructions(&self) -> usize {
        self.program.len()
    }

    /// Returns the estimated memory of the regular expression, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let classes: usize = self.classes.iter().map(|class| 24 + class.len() * 8).sum();
        size_of::<Self>() + self.program.len() * size_of::<Inst>() + classes + self.prefix.len()
    }

    /// Returns true if the text has a match.
    pub(super) fn is_match(
        &self,
        text: &str,
        scratch: &mut Scratch,
        meter: &mut Meter<'_>,
    ) -> Result<bool, Stop> {
        if self.literal {
            meter.charge_bytes(text.len())?;
            return Ok(text.contains(&self.prefix));
        }
        Ok(self.search(text, 0, true, scratch, meter)?.is_some())
    }

    /// Returns the leftmost match from a position on; of several matches there, the preferred one.
    pub(super) fn find_at(
        &self,
        text: &str,
        from: usize,
        scratch: &mut Scratch,
        meter: &mut Meter<'_>,
    ) -> Result<Option<(usize, usize)>, Stop> {
        self.search(text, from, false, scratch, meter)
    }

    fn search(
        &self,
        text: &str,
        from: usize,
        any: bool,
        scratch: &mut Scratch,
        meter: &mut Meter<'_>,
    ) -> Result<Option<(usize, usize)>, Stop> {
        let size = self.program.len();
        let Scratch { now, next, stack } = scratch;
        now.reset(size);
        let mut found = None;
        let mut at = from;
        let mut before = text.get(..from).and_then(|before| before.chars().next_back());
        loop {
            if now.list.is_empty() {
                if found.is_some() || self.anchored && at > 0 {
                    break;
                }
                // No thread is running, so the search skips to where a match can begin.
                if !self.prefix.is_empty() {
                    let rest = text.get(at..).unwrap_or_default();
                    let skipped = rest.find(&self.prefix);
                    meter.charge_bytes(skipped.unwrap_or(rest.len()))?;
                    let Some(skipped) = skipped else { break };
                    if skipped > 0 {
                        at += skipped;
                        before = text.get(..at).and_then(|before| before.chars().next_back());
                    }
                }
            }
            let char = text.get(at..).and_then(|rest| rest.chars().next());
            let around = Around { before, after: char };
            if found.is_none() && !(self.anchored && at > 0) {
                self.follow(now, stack, 0, at, around, meter)?;
            }
            next.reset(size);
            meter.charge(1 + now.list.len() as u64 / 2)?;
            let behind = at + char.map_or(1, char::len_utf8);
            let after = text.get(behind..).and_then(|rest| rest.chars().next());
            for position in 0..now.list.len() {
                let Some(&(pc, start)) = now.list.get(position) else { break };
                let consumed = match self.program.get(pc) {
                    Some(Inst::Match) => {
                        found = Some((start, at));
                        if any {
                            return Ok(found);
                        }
                        // The later threads are less preferred.
                        break;
                    }
                    Some(Inst::Char(wanted)) => char == Some(*wanted),
                    Some(Inst::Class(class)) => char.is_some_and(|char| self.has(*class, char)),
                    _ => false,
                };
                if consumed {
                    self.follow(next, stack, pc + 1, start, Around { before: char, after }, meter)?;
                }
            }
            std::mem::swap(now, next);
            if char.is_none() {
                break;
            }
            before = char;
            at = behind;
        }
        Ok(found)
    }

    fn has(&self, class: usize, char: char) -> bool {
        let Some(ranges) = self.classes.get(class) else { return false };
        if let [(start, end)] = ranges.as_slice() {
            return (*start..=*end).contains(&char);
        }
        let after = ranges.partition_point(|(start, _)| *start <= char);
        after.checked_sub(1).and_then(|at| ranges.get(at)).is_some_and(|(_, end)| char <= *end)
    }

    /// Adds a thread, and follows it to all instructions that need a character.
    fn follow(
        &self,
        threads: &mut Threads,
        stack: &mut Vec<usize>,
        pc: usize,
        start: usize,
        around: Around,
        meter: &mut Meter<'_>,
    ) -> Result<(), Stop> {
        stack.clear();
        stack.push(pc);
        while let Some(pc) = stack.pop() {
            if !threads.mark(pc) {
                continue;
            }
            match self.program.get(pc) {
                Some(Inst::Jump(to)) => stack.push(*to),
                Some(Inst::Split(first, second)) => {
                    meter.charge(1)?;
                    stack.push(*second);
                    stack.push(*first);
                }
                Some(Inst::Look(look)) => {
                    if around.is(*look) {
                        stack.push(pc + 1);
                    }
                }
                _ => threads.list.push((pc, start)),
            }
        }
        Ok(())
    }
}

/// The characters before and after a position.
#[derive(Clone, Copy)]
struct Around {
    before: Option<char>,
    after: Option<char>,
}

impl Around {
    fn is(self, look: Look) -> bool {
        let word = |char: Option<char>| char.is_some_and(|char| char.is_ascii_alphanumeric() || char == '_');
        match look {
            Look::Start => self.before.is_none(),
            Look::End => self.after.is_none(),
            Look::StartLF | Look::StartCRLF => self.before.is_none_or(|char| char == '\n'),
            Look::EndLF | Look::EndCRLF => self.after.is_none_or(|char| char == '\n'),
            Look::WordAsciiNegate | Look::WordUnicodeNegate => word(self.before) == word(self.after),
            _ => word(self.before) != word(self.after),
        }
    }
}

/// Returns the number of Unicode classes that a pattern counts for.
fn unicode_classes(pattern: &str) -> usize {
    let classes = pattern.matches("\\p").count() + pattern.matches("\\P").count();
    let flags = pattern.split("(?").skip(1).map(|after| after.split([':', ')']).next().unwrap_or_default());
    let folded = classes > 0 && flags.into_iter().any(|flags| flags.contains('i'));
    if folded { classes * FOLDED } else { classes }
}

struct Compiler<'a> {
    program: Vec<Inst>,
    classes: Vec<Vec<(char, char)>>,
    allowance: &'a mut Allowance,
}

impl Compiler<'_> {
    fn take(&mut self, parts: usize) -> Result<(), Stop> {
        self.allowance.parts = self.allowance.parts.checked_sub(parts).ok_or(Stop::TooCostly)?;
        Ok(())
    }

    fn push(&mut self, inst: Inst) -> Result<usize, Stop> {
        self.take(1)?;
        self.program.push(inst);
        Ok(self.program.len() - 1)
    }

    fn set(&mut self, at: usize, inst: Inst) {
        if let Some(place) = self.program.get_mut(at) {
            *place = inst;
        }
    }

    fn add(&mut self, hir: &Hir) -> Result<(), Stop> {
        match hir.kind() {
            HirKind::Empty => {}
            HirKind::Literal(literal) => {
                for char in String::from_utf8_lossy(&literal.0).chars() {
                    self.push(Inst::Char(char))?;
                }
            }
            HirKind::Class(class) => {
                let class = self.class(class)?;
                self.push(Inst::Class(class))?;
            }
            HirKind::Look(look) => {
                self.push(Inst::Look(*look))?;
            }
            HirKind::Capture(capture) => self.add(&capture.sub)?,
            HirKind::Concat(parts) => {
                for part in parts {
                    self.add(part)?;
                }
            }
            HirKind::Alternation(parts) => self.alternatives(parts)?,
            HirKind::Repetition(repetition) => {
                let sub = &*repetition.sub;
                let from = self.classes.len();
                for _ in 0..repetition.min {
                    self.again(sub, from)?;
                }
                match repetition.max {
                    None => {
                        let split = self.push(Inst::Match)?;
                        self.again(sub, from)?;
                        self.push(Inst::Jump(split))?;
                        self.fork(split, repetition.greedy);
                    }
                    Some(max) => {
                        let mut splits = Vec::new();
                        for _ in repetition.min..max {
                            splits.push(self.push(Inst::Match)?);
                            self.again(sub, from)?;
                        }
                        splits.into_iter().for_each(|split| self.fork(split, repetition.greedy));
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds a copy that uses the classes of the first one.
    fn again(&mut self, sub: &Hir, from: usize) -> Result<(), Stop> {
        let first = self.classes.len() == from;
        if first {
            return self.add(sub);
        }
        let (known, begin) = (self.classes.len(), self.program.len());
        if let HirKind::Class(_) = sub.kind() {
            self.push(Inst::Class(from))?;
            return Ok(());
        }
        self.add(sub)?;
        // The classes come in the same order in each copy.
        let added = self.classes.len() - known;
        if added > 0 {
            for inst in self.program.iter_mut().skip(begin) {
                if let Inst::Class(class) = inst
                    && *class >= known
                {
                    *class = *class - known + from;
                }
            }
            self.classes.truncate(known);
        }
        Ok(())
    }

    /// Turns an instruction into a choice between the next one and the end of what was added last.
    fn fork(&mut self, split: usize, greedy: bool) {
        let (inner, behind) = (split + 1, self.program.len());
        self.set(split, if greedy { Inst::Split(inner, behind) } else { Inst::Split(behind, inner) });
    }

    fn alternatives(&mut self, parts: &[Hir]) -> Result<(), Stop> {
        let mut ends = Vec::new();
        for (position, part) in parts.iter().enumerate() {
            if position + 1 == parts.len() {
                self.add(part)?;
                break;
            }
            let split = self.push(Inst::Match)?;
            self.add(part)?;
            ends.push(self.push(Inst::Match)?);
            self.fork(split, true);
        }
        let behind = self.program.len();
        ends.into_iter().for_each(|end| self.set(end, Inst::Jump(behind)));
        Ok(())
    }

    fn class(&mut self, class: &Class) -> Result<usize, Stop> {
        let ranges: Vec<_> = match class {
            Class::Unicode(class) => class.iter().map(|range| (range.start(), range.end())).collect(),
            Class::Bytes(class) => {
                class.iter().map(|range| (char::from(range.start()), char::from(range.end()))).collect()
            }
        };
        self.take(ranges.len() / 8)?;
        self.classes.push(ranges);
        Ok(self.classes.len() - 1)
    }
}

/// Returns the text that every match begins with, and whether this is the whole pattern.
fn prefix(hir: &Hir) -> (String, bool) {
    let text = |hir: &Hir| match hir.kind() {
        HirKind::Literal(literal) => String::from_utf8(literal.0.to_vec()).ok(),
        _ => None,
    };
    match hir.kind() {
        HirKind::Concat(parts) => (parts.first().and_then(text).unwrap_or_default(), false),
        HirKind::Capture(capture) => prefix(&capture.sub),
        _ => text(hir).map_or_else(|| (String::new(), false), |text| (text, true)),
    }
}
