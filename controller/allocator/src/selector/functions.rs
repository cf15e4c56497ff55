//! The functions that selectors may call. Functions whose cost depends on their arguments are here, and
//! charge their steps before they work; all others are those of the library, see [`super::bridge`].

mod convert;
mod lists;
mod regexes;
mod strings;

use super::meter::Stop;
use super::run::Run;
use super::tree::{DOMAIN, ENTRIES, FROM_ENTRIES, MERGE, SORT_BY};
use super::value::{Map, Value};

/// A function of the interpreter. Its arguments are the target and then the others.
pub(super) type Native = fn(&mut Run<'_, '_>, &[Value]) -> Result<Value, Stop>;

/// Names that come before the dot of functions that are not methods.
const NAMESPACES: [&str; 10] =
    ["optional", "sets", "lists", "strings", "math", "format", "ip", "cidr", "base64", "jsonpatch"];

pub(super) fn is_namespace(name: &str) -> bool {
    NAMESPACES.contains(&name)
}

/// Returns the function with this name and number of arguments, including the target.
pub(super) fn native(namespace: Option<&str>, name: &str, arity: usize) -> Option<Native> {
    Some(match (namespace, name, arity) {
        (Some("optional"), "of", 1) => |_, args| Ok(Value::some(arg(args, 0)?.clone())),
        (Some("optional"), "none", 0) => |_, _| Ok(Value::Optional(None)),
        (Some("optional"), "ofNonZeroValue", 1) => of_non_zero,
        (Some("sets"), "contains", 2) => lists::set_contains,
        (Some("sets"), "intersects", 2) => lists::set_intersects,
        (Some("sets"), "equivalent", 2) => lists::set_equivalent,
        (Some("lists"), "range", 1) => lists::range,
        (Some(_), ..) => return None,
        (None, "hasValue", 1) => |_, args| Ok(Value::Bool(optional(args)?.is_some())),
        (None, "value", 1) => value,
        (None, "or", 2) => |_, args| match optional(args)? {
            Some(_) => Ok(arg(args, 0)?.clone()),
            None => match arg(args, 1)? {
                other @ Value::Optional(_) => Ok(other.clone()),
                _ => Err(Stop::no_overload()),
            },
        },
        (None, "orValue", 2) => |_, args| match optional(args)? {
            Some(value) => Ok(value.clone()),
            None => Ok(arg(args, 1)?.clone()),
        },
        (None, DOMAIN, 2) => domain,
        (None, ENTRIES, 1) => lists::entries,
        (None, FROM_ENTRIES, 1) => lists::from_entries,
        (None, MERGE, 1) => lists::merge,
        (None, SORT_BY, 2) => lists::sort_by,
        (None, "dyn", 1) => |_, args| Ok(arg(args, 0)?.clone()),
        (None, "type", 1) => |_, args| Ok(Value::Type(arg(args, 0)?.type_name().into())),
        (None, "size", 1) => size,
        (None, "contains", 2) => strings::contains,
        (None, "startsWith", 2) => strings::starts_with,
        (None, "endsWith", 2) => strings::ends_with,
        (None, "charAt", 2) => strings::char_at,
        (None, "substring", 2 | 3) => strings::substring,
        (None, "lowerAscii", 1) => strings::lower_ascii,
        (None, "upperAscii", 1) => strings::upper_ascii,
        (None, "trim", 1) => strings::trim,
        (None, "replace", 3 | 4) => strings::replace,
        (None, "split", 2 | 3) => strings::split,
        (None, "join", 1 | 2) => strings::join,
        (None, "reverse", 1) => lists::reverse,
        (None, "indexOf", 2 | 3) => strings::index_of,
        (None, "lastIndexOf", 2 | 3) => strings::last_index_of,
        (None, "matches", 2) => regexes::matches,
        (None, "find", 2) => regexes::find,
        (None, "findAll", 2 | 3) => regexes::find_all,
        (None, "includes", 2) => lists::includes,
        (None, "isSorted", 1) => lists::is_sorted,
        (None, "sum", 1) => lists::sum,
        (None, "min", 1) => lists::min,
        (None, "max", 1) => lists::max,
        (None, "sort", 1) => lists::sort,
        (None, "slice", 3) => lists::slice,
        (None, "flatten", 1 | 2) => lists::flatten,
        (None, "distinct", 1) => lists::distinct,
        (None, "first", 1) => lists::first,
        (None, "last", 1) => lists::last,
        (None, "int", 1) => convert::int,
        (None, "uint", 1) => convert::uint,
        (None, "double", 1) => convert::double,
        (None, "bool", 1) => convert::bool,
        (None, "bytes", 1) => convert::bytes,
        (None, "string", 1) => convert::string,
        _ => return None,
    })
}

/// Returns an argument.
fn arg(args: &[Value], position: usize) -> Result<&Value, Stop> {
    args.get(position).ok_or_else(Stop::no_overload)
}

/// Returns an argument that must be a string.
fn text(args: &[Value], position: usize) -> Result<&str, Stop> {
    match args.get(position) {
        Some(Value::Text(text)) => Ok(text),
        _ => Err(Stop::no_overload()),
    }
}

/// Returns an argument that must be an `int`.
fn int(args: &[Value], position: usize) -> Result<i64, Stop> {
    match args.get(position) {
        Some(Value::Int(value)) => Ok(*value),
        _ => Err(Stop::no_overload()),
    }
}

/// Returns an argument that may be absent, and otherwise must be an `int`.
fn maybe_int(args: &[Value], position: usize) -> Result<Option<i64>, Stop> {
    args.get(position).map(|_| int(args, position)).transpose()
}

/// Returns the content of the optional that a method is called on.
fn optional(args: &[Value]) -> Result<Option<&Value>, Stop> {
    match args.first() {
        Some(Value::Optional(inner)) => Ok(inner.as_deref()),
        _ => Err(Stop::no_overload()),
    }
}

fn value(_: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    optional(args)?.cloned().ok_or_else(|| Stop::of_function("value", "optional.none() dereference"))
}

fn of_non_zero(_: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let value = arg(args, 0)?;
    let zero = match value {
        Value::Null | Value::Optional(None) => true,
        Value::Bool(value) => !value,
        Value::Int(value) => *value == 0,
        Value::Uint(value) => *value == 0,
        Value::Double(value) => *value == 0.0,
        Value::Text(text) => text.is_empty(),
        Value::Bytes(bytes) => bytes.is_empty(),
        Value::List(list) => list.len() == 0,
        Value::Map(map) => map.len() == 0,
        _ => false,
    };
    Ok(if zero { Value::Optional(None) } else { Value::some(value.clone()) })
}

/// Returns a domain in `device.attributes` or `device.capacity`; an unknown domain is empty.
fn domain(_: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    match args {
        [Value::Map(domains), Value::Text(name)] => {
            Ok(domains.named(name).cloned().unwrap_or_else(|| Value::map(Map::default())))
        }
        _ => Err(Stop::no_overload()),
    }
}

/// Returns the number of characters of a string, of elements of a list, or of entries of a map.
fn size(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let size = match arg(args, 0)? {
        Value::Text(text) => {
            run.meter.charge_bytes(text.len() / 4)?;
            text.chars().count() as u64
        }
        Value::Bytes(bytes) => bytes.len() as u64,
        Value::List(list) => list.len(),
        Value::Map(map) => map.len() as u64,
        _ => return Err(Stop::no_overload()),
    };
    Ok(count(size))
}

/// Returns a number as an `int`.
fn count(size: u64) -> Value {
    Value::Int(i64::try_from(size).unwrap_or(i64::MAX))
}
