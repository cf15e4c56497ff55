//! Searches of a text for a regular expression. A pattern that is a literal is compiled once, with its
//! expression.

use super::meter::Stop;
use super::regex::Regex;
use super::run::Run;
use super::value::Value;

/// The function that uses a regular expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Search {
    Matches,
    Find,
    FindAll,
}

impl Search {
    /// Returns the function with this name and number of arguments, including the target.
    pub(super) fn named(name: &str, arity: usize) -> Option<Self> {
        match (name, arity) {
            ("matches", 2) => Some(Self::Matches),
            ("find", 2) => Some(Self::Find),
            ("findAll", 2 | 3) => Some(Self::FindAll),
            _ => None,
        }
    }

    /// Searches a text; `most` limits the number of matches, `None` allows all.
    pub(super) fn run(
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

/// Returns the first match, or an empty string if there is none.
fn first(run: &mut Run<'_, '_>, regex: &Regex, of: &str) -> Result<Value, Stop> {
    let found = regex.find_at(of, 0, &mut run.scratch, run.meter)?;
    let found = found.and_then(|(start, end)| of.get(start..end)).unwrap_or_default();
    run.meter.charge_bytes(found.len())?;
    Ok(Value::text(found))
}

/// Returns the matches from left to right. An empty match does not begin where another match ended.
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
