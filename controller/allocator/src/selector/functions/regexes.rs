//! Functions of regular expressions whose pattern is computed: it is compiled at every call, as in upstream.

use super::super::meter::Stop;
use super::super::regex::{Allowance, Regex};
use super::super::run::Run;
use super::super::search::Search;
use super::super::value::Value;
use super::{maybe_int, text};

/// Compiles a pattern and charges the steps for it.
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
