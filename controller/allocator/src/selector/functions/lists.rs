//! Functions of lists, sets and maps.

use super::super::meter::{Meter, Stop};
use super::super::operator::add;
use super::super::run::Run;
use super::super::value::{Key, List, Map, Value};
use super::{arg, int, maybe_int};
use std::cmp::Ordering;
use std::collections::HashSet;
use std::sync::Arc;

/// The longest list that `lists.range` creates, as in upstream.
const LONGEST_RANGE: i64 = 1_000_000;

fn list(args: &[Value], position: usize) -> Result<&Arc<List>, Stop> {
    match args.get(position) {
        Some(Value::List(list)) => Ok(list),
        _ => Err(Stop::no_overload()),
    }
}

/// Returns the order of two elements; an error if they have none.
fn order(a: &Value, b: &Value, meter: &mut Meter<'_>) -> Result<Ordering, Stop> {
    meter.charge(1)?;
    a.order(b, meter)?.ok_or_else(Stop::no_overload)
}

/// Returns the pairs of a map, or the elements of a list with their positions.
pub(super) fn entries(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let pair = |first: Value, second: &Value| Value::list(vec![first, second.clone()]);
    let mut pairs = Vec::new();
    match arg(args, 0)? {
        Value::Map(map) => {
            run.meter.charge_values(map.len().saturating_mul(6))?;
            pairs.extend(map.iter().map(|(key, value)| pair(key.clone(), value)));
        }
        Value::List(list) => {
            run.meter.charge(list.len().saturating_mul(12))?;
            pairs.extend(list.iter().zip(0..).map(|(value, position)| pair(Value::Int(position), value)));
        }
        _ => return Err(Stop::no_overload()),
    }
    Ok(Value::list(pairs))
}

/// Builds a map from a list of pairs.
pub(super) fn from_entries(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let mut pairs = Vec::new();
    for pair in list(args, 0)?.iter() {
        let Value::List(pair) = pair else { return Err(Stop::no_overload()) };
        let (Some(key), Some(value)) = (pair.get(0), pair.get(1)) else { return Err(Stop::no_overload()) };
        run.meter.charge_values(6)?;
        pairs.push((key.clone(), value.clone()));
    }
    Ok(Value::map(Map::new(pairs)?))
}

/// Merges a list of maps, which must not have keys in common, into one map.
pub(super) fn merge(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let mut pairs = Vec::new();
    for map in list(args, 0)?.iter() {
        let Value::Map(map) = map else { return Err(Stop::no_overload()) };
        run.meter.charge_values(map.len().saturating_mul(6))?;
        pairs.extend(map.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
    Ok(Value::map(Map::distinct(pairs)?))
}

/// Tests one value, or each element of a list, for equality with a wanted value (KEP-5491).
pub(super) fn includes(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let wanted = arg(args, 1)?;
    match arg(args, 0)? {
        Value::List(list) => Ok(Value::Bool(has(list, wanted, run.meter)?)),
        other => Ok(Value::Bool(other.equals(wanted, run.meter)?)),
    }
}

fn has(list: &List, wanted: &Value, meter: &mut Meter<'_>) -> Result<bool, Stop> {
    for element in list.iter() {
        meter.charge(1)?;
        if element.equals(wanted, meter)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn has_all(of: &List, wanted: &List, meter: &mut Meter<'_>) -> Result<bool, Stop> {
    for wanted in wanted.iter() {
        if !has(of, wanted, meter)? {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(super) fn set_contains(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    Ok(Value::Bool(has_all(list(args, 0)?, list(args, 1)?, run.meter)?))
}

pub(super) fn set_equivalent(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (a, b) = (list(args, 0)?, list(args, 1)?);
    Ok(Value::Bool(has_all(a, b, run.meter)? && has_all(b, a, run.meter)?))
}

pub(super) fn set_intersects(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (a, b) = (list(args, 0)?, list(args, 1)?);
    for wanted in b.iter() {
        if has(a, wanted, run.meter)? {
            return Ok(Value::Bool(true));
        }
    }
    Ok(Value::Bool(false))
}

pub(super) fn range(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let end = int(args, 0)?;
    if !(0..=LONGEST_RANGE).contains(&end) {
        let why = format_args!("{end} is not between 0 and {LONGEST_RANGE}");
        return Err(Stop::of_function("lists.range", why));
    }
    run.meter.charge_values(usize::try_from(end).unwrap_or(usize::MAX))?;
    Ok(Value::list((0..end).map(Value::Int).collect()))
}

pub(super) fn index_of(run: &mut Run<'_, '_>, args: &[Value], last: bool) -> Result<Value, Stop> {
    let wanted = arg(args, 1)?;
    let mut found = -1;
    for (element, position) in list(args, 0)?.iter().zip(0..) {
        run.meter.charge(1)?;
        if element.equals(wanted, run.meter)? {
            found = position;
            if !last {
                break;
            }
        }
    }
    Ok(Value::Int(found))
}

pub(super) fn is_sorted(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let mut before: Option<&Value> = None;
    for element in list(args, 0)?.iter() {
        if let Some(before) = before
            && order(before, element, run.meter)?.is_gt()
        {
            return Ok(Value::Bool(false));
        }
        before = Some(element);
    }
    Ok(Value::Bool(true))
}

pub(super) fn sum(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let mut elements = list(args, 0)?.iter();
    let Some(first) = elements.next() else { return Ok(Value::Int(0)) };
    let mut sum = first.clone();
    for element in elements {
        run.meter.charge(1)?;
        sum = match (&sum, element) {
            (Value::Int(_) | Value::Uint(_) | Value::Double(_) | Value::Foreign(_), _) => {
                add(sum, element.clone(), run.meter)?
            }
            _ => return Err(Stop::no_overload()),
        };
    }
    Ok(sum)
}

pub(super) fn min(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    extreme(run, args, "min", Ordering::is_lt)
}

pub(super) fn max(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    extreme(run, args, "max", Ordering::is_gt)
}

fn extreme(
    run: &mut Run<'_, '_>,
    args: &[Value],
    name: &str,
    better: fn(Ordering) -> bool,
) -> Result<Value, Stop> {
    let mut best: Option<&Value> = None;
    for element in list(args, 0)?.iter() {
        let improves = match best {
            Some(best) => better(order(element, best, run.meter)?),
            None => true,
        };
        if improves {
            best = Some(element);
        }
    }
    best.cloned().ok_or_else(|| Stop::of_function(name, format_args!("cannot call {name} on empty list")))
}

pub(super) fn sort(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let keys = list(args, 0)?.flat(run.meter)?;
    Ok(Value::list(sorted(run, &keys, &keys)?))
}

/// Returns the elements in the order of their keys.
pub(super) fn sort_by(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let elements = list(args, 0)?.flat(run.meter)?;
    let keys = list(args, 1)?.flat(run.meter)?;
    Ok(Value::list(sorted(run, &elements, &keys)?))
}

fn sorted(run: &mut Run<'_, '_>, elements: &[Value], keys: &[Value]) -> Result<Vec<Value>, Stop> {
    run.meter.charge_values(elements.len().saturating_mul(2))?;
    let mut pairs: Vec<(&Value, &Value)> = keys.iter().zip(elements).collect();
    // After a failure all elements count as equal, so the sort ends soon.
    let mut failed = None;
    pairs.sort_by(|a, b| {
        if failed.is_some() {
            return Ordering::Equal;
        }
        order(a.0, b.0, run.meter).unwrap_or_else(|stop| {
            failed = Some(stop);
            Ordering::Equal
        })
    });
    match failed {
        Some(stop) => Err(stop),
        None => Ok(pairs.into_iter().map(|(_, element)| element.clone()).collect()),
    }
}

pub(super) fn slice(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let (of, start, end) = (list(args, 0)?, int(args, 1)?, int(args, 2)?);
    let outside = || Stop::of_function("slice", format_args!("({start}, {end}) is out of range"));
    let (Ok(from), Ok(to)) = (usize::try_from(start), usize::try_from(end)) else { return Err(outside()) };
    if from > to || to as u64 > of.len() {
        return Err(outside());
    }
    run.meter.charge_values(to - from)?;
    if let List::Flat(elements) = &**of {
        return Ok(Value::list(elements.get(from..to).unwrap_or_default().to_vec()));
    }
    run.meter.charge_values(from)?;
    Ok(Value::list(of.iter().skip(from).take(to - from).cloned().collect()))
}

pub(super) fn flatten(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let levels = maybe_int(args, 1)?.unwrap_or(1);
    if levels < 0 {
        return Err(Stop::of_function("flatten", "level must be non-negative"));
    }
    let mut flat = Vec::new();
    flatten_into(&mut flat, list(args, 0)?, levels, run.meter)?;
    Ok(Value::list(flat))
}

fn flatten_into(flat: &mut Vec<Value>, list: &List, levels: i64, meter: &mut Meter<'_>) -> Result<(), Stop> {
    for element in list.iter() {
        meter.charge_values(1)?;
        match element {
            Value::List(inner) if levels > 0 => flatten_into(flat, inner, levels - 1, meter)?,
            other => flat.push(other.clone()),
        }
    }
    Ok(())
}

/// Returns the list with only the first of equal elements.
pub(super) fn distinct(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let mut seen = HashSet::new();
    let mut unhashed: Vec<Value> = Vec::new();
    let mut kept = Vec::new();
    for element in list(args, 0)?.iter() {
        run.meter.charge_values(4)?;
        let new = match Key::of(element) {
            Some(key) => seen.insert(key),
            None => {
                let mut known = false;
                for other in &unhashed {
                    run.meter.charge(1)?;
                    known = known || other.equals(element, run.meter)?;
                }
                if !known {
                    unhashed.push(element.clone());
                }
                !known
            }
        };
        if new {
            kept.push(element.clone());
        }
    }
    Ok(Value::list(kept))
}

pub(super) fn reverse(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    match arg(args, 0)? {
        Value::List(list) => {
            let mut elements = list.flat(run.meter)?.into_owned();
            run.meter.charge_values(elements.len())?;
            elements.reverse();
            Ok(Value::list(elements))
        }
        Value::Text(text) => {
            run.meter.charge_bytes(text.len().saturating_mul(2))?;
            Ok(Value::text(text.chars().rev().collect::<String>()))
        }
        _ => Err(Stop::no_overload()),
    }
}

pub(super) fn first(_: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    Ok(Value::Optional(list(args, 0)?.get(0).cloned().map(Arc::new)))
}

pub(super) fn last(_: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let list = list(args, 0)?;
    let last = list.len().checked_sub(1).and_then(|last| list.get(last));
    Ok(Value::Optional(last.cloned().map(Arc::new)))
}
