//! Functions of regular expressions. Those that are written out are compiled once, with the expression
//! that they are in; those that are computed are compiled at every call, as upstream does it.

use super::super::eval::Run;
use super::super::meter::Stop;
use super::super::regex::{Allowance, Regex};
use super::super::value::Value;
use super::{maybe_int, text};

/// What is asked of a regular expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Search {
    Matches,
    Find,
    FindAll,
}

impl Search {
    /// The function of this name for so many arguments, the target among them.
    pub(in super::super) fn named(name: &str, arity: usize) -> Option<Self> {
        match (name, arity) {
            ("matches", 2) => Some(Self::Matches),
            ("find", 2) => Some(Self::Find),
            ("findAll", 2 | 3) => Some(Self::FindAll),
            _ => None,
        }
    }

    /// Searches a text; `most` is how many matches are wanted, all if there is no such number.
    pub(in super::super) fn run(
        self,
        run: &mut Run<'_, '_>,
        regex: &Regex,
        of: &str,
        most: Option<i64>,
    ) -> Result<Value, Stop> {
        match self {
            Self::Matches => Ok(Value::Bool(regex.is_match(of, &mut run.scratch, run.meter)?)),
            Self::Find => first(run, regex, of),
            Self::FindAll => all(run, regex, of, most.and_then(|most| usize::try_from(most).ok())),
        }
    }
}

/// Compiles a pattern and takes the steps for it.
fn compiled(run: &mut Run<'_, '_>, pattern: &str) -> Result<Regex, Stop> {
    run.meter.charge(Regex::steps_to_compile(pattern))?;
    let regex = Regex::compile(pattern, &mut Allowance::default())?;
    run.meter.charge(regex.instructions() as u64 * 4)?;
    Ok(regex)
}

fn computed(search: Search, run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let of = text(args, 0)?;
    let most = maybe_int(args, 2)?;
    let regex = compiled(run, text(args, 1)?)?;
    search.run(run, &regex, of, most)
}

pub(super) fn matches(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    computed(Search::Matches, run, args)
}

pub(super) fn find(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    computed(Search::Find, run, args)
}

pub(super) fn find_all(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    computed(Search::FindAll, run, args)
}

/// The first match, or nothing.
fn first(run: &mut Run<'_, '_>, regex: &Regex, of: &str) -> Result<Value, Stop> {
    let found = regex.find_at(of, 0, &mut run.scratch, run.meter)?;
    let found = found.and_then(|(start, end)| of.get(start..end)).unwrap_or_default();
    run.meter.charge_bytes(found.len())?;
    Ok(Value::text(found))
}

/// Matches from left to right; one that is empty does not begin where another ended.
fn all(run: &mut Run<'_, '_>, regex: &Regex, of: &str, most: Option<usize>) -> Result<Value, Stop> {
    let mut found = Vec::new();
    let (mut from, mut ended) = (0, None);
    while most.is_none_or(|most| found.len() < most) && from <= of.len() {
        let Some((start, end)) = regex.find_at(of, from, &mut run.scratch, run.meter)? else { break };
        let accepted = end > from || ended != Some(start);
        if end > from {
            from = end;
        } else {
            from += of.get(from..).and_then(|rest| rest.chars().next()).map_or(1, char::len_utf8);
        }
        ended = Some(end);
        if accepted {
            let part = of.get(start..end).unwrap_or_default();
            run.meter.charge_values(2)?;
            run.meter.charge_bytes(part.len())?;
            found.push(Value::text(part));
        }
    }
    Ok(Value::list(found))
}
