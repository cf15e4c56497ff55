//! Says whether an expression can be true for some device of a driver, if the device's attributes are not
//! known.
//!
//! It uses logic with three values. A part that reads attributes of the driver's own domain or of Kubernetes'
//! domain is unknown. Attributes of other domains are known not to exist on the driver's devices.

use super::device::DeviceFacts;
use super::environment::Environment;
use super::eval::Evaluation;
use super::meter::Meter;
use super::plan::plan;
use super::tree::{children, device_domain, device_field, is_device, literal_text};
use super::value::Value;
use cel::common::ast::{Expr, IdedExpr, operators};

const STANDARD_DOMAIN: &str = "resource.kubernetes.io";

/// The most steps of this evaluation; a part that takes more is unknown.
const MOST_STEPS: u64 = 50_000;

pub(super) fn may_be_true(expression: &IdedExpr, driver: &str, environment: &Environment) -> bool {
    let mut never = || false;
    let mut meter = Meter::new(MOST_STEPS, &mut never);
    [false, true].into_iter().any(|shareable| {
        let facts = DeviceFacts { driver, shareable, ..DeviceFacts::default() };
        evaluate(expression, &facts, &mut Leaves { environment, meter: &mut meter }) != Some(false)
    })
}

/// Evaluates the parts that do not depend on unknown attributes.
struct Leaves<'l, 'm> {
    environment: &'l Environment,
    meter: &'l mut Meter<'m>,
}

fn evaluate(expression: &IdedExpr, facts: &DeviceFacts<'_>, leaves: &mut Leaves<'_, '_>) -> Option<bool> {
    let Expr::Call(call) = &expression.expr else { return leaf(expression, facts, leaves) };
    if call.target.is_some() {
        return leaf(expression, facts, leaves);
    }
    let mut part = |part: &IdedExpr| evaluate(part, facts, leaves);
    match (call.func_name.as_str(), call.args.as_slice()) {
        (operators::LOGICAL_AND, [left, right]) => match (part(left), part(right)) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (Some(true), Some(true)) => Some(true),
            _ => None,
        },
        (operators::LOGICAL_OR, [left, right]) => match (part(left), part(right)) {
            (Some(true), _) | (_, Some(true)) => Some(true),
            (Some(false), Some(false)) => Some(false),
            _ => None,
        },
        (operators::LOGICAL_NOT, [inner]) => part(inner).map(|known| !known),
        (operators::CONDITIONAL, [condition, yes, no]) => match part(condition) {
            Some(true) => part(yes),
            Some(false) => part(no),
            None => {
                let (yes, no) = (part(yes), part(no));
                if yes == no { yes } else { None }
            }
        },
        (operators::IN, [domain, domains])
            if device_field(domains) == Some("attributes")
                && literal_text(domain).is_some_and(|domain| !known(domain, facts.driver)) =>
        {
            Some(false)
        }
        _ => leaf(expression, facts, leaves),
    }
}

/// Returns true if the driver's devices can have attributes of the domain.
fn known(domain: &str, driver: &str) -> bool {
    domain == driver || domain == STANDARD_DOMAIN
}

/// Evaluates a part. An error also counts as unknown: it stops the claim, and the controller has to report it
/// for the claim.
fn leaf(expression: &IdedExpr, facts: &DeviceFacts<'_>, leaves: &mut Leaves<'_, '_>) -> Option<bool> {
    if touches_unknown(expression, facts.driver) {
        return None;
    }
    let program = plan(expression).ok()?;
    match Evaluation::new(leaves.environment, facts, leaves.meter).eval(&program.root) {
        Ok(Value::Bool(value)) => Some(value),
        _ => None,
    }
}

fn touches_unknown(expression: &IdedExpr, driver: &str) -> bool {
    if let Some((_, domain)) = device_domain(expression) {
        return known(domain, driver);
    }
    match device_field(expression) {
        Some("driver" | "allowMultipleAllocations") => false,
        Some(_) => true,
        None if is_device(expression) => true,
        None => children(expression).into_iter().any(|child| touches_unknown(child, driver)),
    }
}
