//! Functions of strings. Positions are counted in characters.

use super::super::meter::Stop;
use super::super::run::Run;
use super::super::value::Value;
use super::{arg, count, int, lists, maybe_int, text};

/// Charges a search: it takes time in proportion to the text.
fn charge_search(run: &mut Run<'_, '_>, text: &str) -> Result<(), Stop> {
    run.meter.charge_bytes(text.len())
}

fn chars(text: &str) -> u64 {
    text.chars().count() as u64
}

/// Returns the byte position at which a character begins; the end of the text counts as a position.
fn byte_at(text: &str, position: i64) -> Option<usize> {
    let position = usize::try_from(position).ok()?;
    if position == 0 {
        return Some(0);
    }
    let mut starts = text.char_indices().map(|(at, _)| at).chain([text.len()]);
    starts.nth(position)
}

fn outside(function: &str, position: i64) -> Stop {
    Stop::of_function(function, format_args!("index out of range: {position}"))
}

pub(super) fn contains(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (of, wanted) = (text(args, 0)?, text(args, 1)?);
    charge_search(run, of)?;
    Ok(Value::Bool(of.contains(wanted)))
}

pub(super) fn starts_with(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (of, wanted) = (text(args, 0)?, text(args, 1)?);
    run.meter.charge_bytes(wanted.len())?;
    Ok(Value::Bool(of.starts_with(wanted)))
}

pub(super) fn ends_with(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (of, wanted) = (text(args, 0)?, text(args, 1)?);
    run.meter.charge_bytes(wanted.len())?;
    Ok(Value::Bool(of.ends_with(wanted)))
}

pub(super) fn char_at(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (of, position) = (text(args, 0)?, int(args, 1)?);
    charge_search(run, of)?;
    let at = byte_at(of, position).ok_or_else(|| outside("charAt", position))?;
    let found = of.get(at..).and_then(|rest| rest.chars().next());
    Ok(Value::text(found.map(String::from).unwrap_or_default()))
}

pub(super) fn substring(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (of, start) = (text(args, 0)?, int(args, 1)?);
    charge_search(run, of)?;
    let from = byte_at(of, start).ok_or_else(|| outside("substring", start))?;
    let to = match maybe_int(args, 2)? {
        Some(end) if end < start => return Err(outside("substring", end)),
        Some(end) => byte_at(of, end).ok_or_else(|| outside("substring", end))?,
        None => of.len(),
    };
    Ok(Value::text(of.get(from..to).unwrap_or_default()))
}

pub(super) fn lower_ascii(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    run.meter.charge_bytes(text(args, 0)?.len())?;
    Ok(Value::text(text(args, 0)?.to_ascii_lowercase()))
}

pub(super) fn upper_ascii(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    run.meter.charge_bytes(text(args, 0)?.len())?;
    Ok(Value::text(text(args, 0)?.to_ascii_uppercase()))
}

pub(super) fn trim(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    run.meter.charge_bytes(text(args, 0)?.len())?;
    Ok(Value::text(text(args, 0)?.trim()))
}

pub(super) fn replace(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (of, from, to) = (text(args, 0)?, text(args, 1)?, text(args, 2)?);
    let most = maybe_int(args, 3)?.and_then(|most| usize::try_from(most).ok());
    run.meter.charge_bytes(of.len().saturating_mul(2))?;
    // The length of the result is known before the result is created.
    let times = of.matches(from).count().min(most.unwrap_or(usize::MAX));
    run.meter.charge_bytes(times.saturating_mul(to.len().saturating_add(8)))?;
    Ok(Value::text(match most {
        Some(most) => of.replacen(from, to, most),
        None => of.replace(from, to),
    }))
}

pub(super) fn split(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (of, separator) = (text(args, 0)?, text(args, 1)?);
    let most = match maybe_int(args, 2)? {
        Some(0) => return Ok(Value::list(Vec::new())),
        Some(most) => usize::try_from(most).unwrap_or(usize::MAX),
        None => usize::MAX,
    };
    run.meter.charge_bytes(of.len().saturating_mul(2))?;
    let mut parts = Vec::new();
    if separator.is_empty() {
        let mut rest = of;
        while let Some(next) = rest.chars().next() {
            if parts.len() + 1 == most {
                break;
            }
            let (one, after) = rest.split_at(next.len_utf8());
            run.meter.charge_values(2)?;
            parts.push(Value::text(one));
            rest = after;
        }
        if !rest.is_empty() {
            parts.push(Value::text(rest));
        }
    } else {
        for part in of.splitn(most, separator) {
            run.meter.charge_values(2)?;
            parts.push(Value::text(part));
        }
    }
    Ok(Value::list(parts))
}

pub(super) fn join(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let Value::List(list) = arg(args, 0)? else { return Err(Stop::no_overload()) };
    let separator = if args.len() > 1 { text(args, 1)? } else { "" };
    let mut joined = String::new();
    for (position, element) in list.iter().enumerate() {
        let Value::Text(element) = element else { return Err(Stop::no_overload()) };
        let separator = if position > 0 { separator } else { "" };
        run.meter.charge(1)?;
        run.meter.charge_bytes(separator.len() + element.len())?;
        joined.push_str(separator);
        joined.push_str(element);
    }
    Ok(Value::text(joined))
}

pub(super) fn index_of(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let Value::Text(of) = arg(args, 0)? else { return lists::index_of(run, args, false) };
    let wanted = text(args, 1)?;
    let start = maybe_int(args, 2)?.unwrap_or_default();
    charge_search(run, of)?;
    if wanted.is_empty() {
        return Ok(Value::Int(start));
    }
    let from = byte_at(of, start).ok_or_else(|| outside("indexOf", start))?;
    let rest = of.get(from..).unwrap_or_default();
    Ok(match rest.find(wanted) {
        Some(at) => count(chars(of.get(..from + at).unwrap_or_default())),
        None => Value::Int(-1),
    })
}

pub(super) fn last_index_of(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let Value::Text(of) = arg(args, 0)? else { return lists::index_of(run, args, true) };
    let wanted = text(args, 1)?;
    let last = maybe_int(args, 2)?;
    charge_search(run, of)?;
    if wanted.is_empty() {
        return Ok(last.map_or_else(|| count(chars(of)), Value::Int));
    }
    // This is the last position at which the match may begin; the match may end after it.
    let end = match last {
        Some(last) => {
            let begin = byte_at(of, last).ok_or_else(|| outside("lastIndexOf", last))?;
            let mut end = begin.saturating_add(wanted.len()).min(of.len());
            while !of.is_char_boundary(end) {
                end += 1;
            }
            end
        }
        None => of.len(),
    };
    let searched = of.get(..end).unwrap_or_default();
    Ok(match searched.rfind(wanted) {
        Some(at) => count(chars(of.get(..at).unwrap_or_default())),
        None => Value::Int(-1),
    })
}
