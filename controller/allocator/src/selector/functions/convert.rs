//! Conversions between types.

use super::super::meter::Stop;
use super::super::run::Run;
use super::super::value::Value;
use super::arg;

fn fails(function: &str, value: &Value) -> Stop {
    Stop::of_function(function, format_args!("cannot convert a value of type {}", value.type_name()))
}

pub(super) fn int(_: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let overflow = || Stop::of_function("int", "integer overflow");
    match arg(args, 0)? {
        Value::Int(value) => Ok(Value::Int(*value)),
        Value::Uint(value) => i64::try_from(*value).map(Value::Int).map_err(|_| overflow()),
        #[expect(clippy::cast_possible_truncation, reason = "it is in range, and the fraction is dropped")]
        Value::Double(value) if value.abs() < 9_223_372_036_854_775_807.0 => Ok(Value::Int(*value as i64)),
        Value::Double(_) => Err(overflow()),
        Value::Text(text) => text
            .parse()
            .map(Value::Int)
            .map_err(|e| Stop::of_function("int", format_args!("string parse error: {e}"))),
        Value::Foreign(foreign) => match &**foreign {
            cel::Value::Timestamp(at) => Ok(Value::Int(at.timestamp())),
            _ => Err(fails("int", arg(args, 0)?)),
        },
        other => Err(fails("int", other)),
    }
}

pub(super) fn uint(_: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    let overflow = || Stop::of_function("uint", "unsigned integer overflow");
    match arg(args, 0)? {
        Value::Uint(value) => Ok(Value::Uint(*value)),
        Value::Int(value) => u64::try_from(*value).map(Value::Uint).map_err(|_| overflow()),
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is in range, and the fraction is dropped"
        )]
        Value::Double(value) if (0.0..18_446_744_073_709_551_615.0).contains(value) => {
            Ok(Value::Uint(*value as u64))
        }
        Value::Double(_) => Err(overflow()),
        Value::Text(text) => text
            .parse()
            .map(Value::Uint)
            .map_err(|e| Stop::of_function("uint", format_args!("string parse error: {e}"))),
        other => Err(fails("uint", other)),
    }
}

#[expect(clippy::cast_precision_loss, reason = "as upstream converts")]
pub(super) fn double(_: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    match arg(args, 0)? {
        Value::Double(value) => Ok(Value::Double(*value)),
        Value::Int(value) => Ok(Value::Double(*value as f64)),
        Value::Uint(value) => Ok(Value::Double(*value as f64)),
        Value::Text(text) => text
            .parse()
            .map(Value::Double)
            .map_err(|e| Stop::of_function("double", format_args!("string parse error: {e}"))),
        other => Err(fails("double", other)),
    }
}

pub(super) fn bool(_: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    match arg(args, 0)? {
        Value::Bool(value) => Ok(Value::Bool(*value)),
        Value::Text(text) => match &**text {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(Value::Bool(true)),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(Value::Bool(false)),
            _ => Err(Stop::of_function("bool", "the string is no boolean")),
        },
        other => Err(fails("bool", other)),
    }
}

pub(super) fn bytes(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    match arg(args, 0)? {
        Value::Bytes(bytes) => Ok(Value::Bytes(bytes.clone())),
        Value::Text(text) => {
            run.meter.charge_bytes(text.len())?;
            Ok(Value::Bytes(text.as_bytes().into()))
        }
        other => Err(fails("bytes", other)),
    }
}

pub(super) fn string(run: &mut Run<'_, '_>, args: &[Value]) -> Result<Value, Stop> {
    Ok(match arg(args, 0)? {
        Value::Text(text) => Value::Text(text.clone()),
        Value::Bool(value) => Value::text(value.to_string()),
        Value::Int(value) => Value::text(value.to_string()),
        Value::Uint(value) => Value::text(value.to_string()),
        Value::Double(value) => Value::text(value.to_string()),
        Value::Bytes(bytes) => {
            run.meter.charge_bytes(bytes.len())?;
            let text = std::str::from_utf8(bytes);
            Value::text(text.map_err(|_| Stop::of_function("string", "invalid UTF-8 in bytes"))?)
        }
        // The library writes addresses, durations and timestamps itself.
        other @ Value::Foreign(_) => return run.environment.string(other, run.meter),
        other => return Err(fails("string", other)),
    })
}
