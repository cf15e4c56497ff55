//! Functions that are taken from `kube-cel` as they are: quantities, versions, addresses, URLs, formats and
//! dates. All of them take little time on the arguments that the meter lets through.

use super::conversion::{from_cel, to_cel};
use super::environment::Environment;
use super::message::one_line;
use super::meter::{Meter, Stop};
use super::tree::{ident, node};
use super::value::Value;
use cel::common::ast::{CallExpr, Expr, IdedExpr};
use cel::context::VariableResolver;
use std::sync::OnceLock;

/// The steps that each of these calls costs.
const CALL: u64 = 10;

/// The most digits that `format` may be asked for.
const MOST_DIGITS: usize = 1_000;

/// The name of the value that a method is called on.
const TARGET: &str = "@0";

/// A library function, to be called with values.
#[derive(Debug)]
pub(super) struct Bridge {
    call: IdedExpr,
    /// True if all arguments are constants.
    constant: bool,
    /// The result of a call with constant arguments.
    known: OnceLock<Value>,
}

impl Bridge {
    /// Creates the call of a function or method with this number of arguments, including the target.
    /// `constant` is true if all arguments are constants.
    pub(super) fn new(
        namespace: Option<&str>,
        name: &str,
        arity: usize,
        method: bool,
        constant: bool,
    ) -> Self {
        let argument = |position: usize| ident(&format!("@{position}"));
        let target = if method { Some(TARGET) } else { namespace };
        let call = CallExpr {
            func_name: name.to_owned(),
            target: target.map(|name| Box::new(ident(name))),
            args: (usize::from(method)..arity).map(argument).collect(),
        };
        Self { call: node(Expr::Call(call)), constant, known: OnceLock::new() }
    }

    /// Returns the result if it is already known.
    pub(super) fn known(&self) -> Option<&Value> {
        self.known.get()
    }

    /// Calls the function with these arguments, the target first.
    pub(super) fn call(
        &self,
        environment: &Environment,
        args: Vec<Value>,
        meter: &mut Meter<'_>,
    ) -> Result<Value, Stop> {
        meter.charge(CALL)?;
        if let Expr::Call(call) = &self.call.expr
            && call.func_name == "format"
            && let Some(Value::Text(text)) = args.first()
        {
            few_digits(text)?;
        }
        let mut taken = Vec::with_capacity(args.len());
        for arg in args {
            taken.push(to_cel(&arg, meter)?);
        }
        let value = environment
            .resolve(&self.call, &Arguments(taken))
            .map_err(|error| Stop::failed(one_line(&error.to_string())))?;
        let value = from_cel(value, meter)?;
        // Only small results are kept, as they stay as long as the expression does.
        if self.constant
            && !matches!(value, Value::Text(_) | Value::Bytes(_) | Value::List(_) | Value::Map(_))
        {
            return Ok(self.known.get_or_init(|| value).clone());
        }
        Ok(value)
    }
}

/// Positional arguments as variables.
struct Arguments(Vec<cel::Value>);

impl VariableResolver for Arguments {
    fn resolve(&self, variable: &str) -> Option<cel::Value> {
        let position: usize = variable.strip_prefix('@')?.parse().ok()?;
        self.0.get(position).cloned()
    }
}

/// Refuses a `format` with too many digits, because the library writes all digits of a precision without a
/// limit.
fn few_digits(format: &str) -> Result<(), Stop> {
    let digits = format.split("%.").skip(1).map(|after| {
        let end = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        after.get(..end).unwrap_or_default().parse::<usize>()
    });
    for digits in digits {
        if digits.unwrap_or(usize::MAX) > MOST_DIGITS {
            return Err(Stop::of_function("format", format_args!("the precision is above {MOST_DIGITS}")));
        }
    }
    Ok(())
}
