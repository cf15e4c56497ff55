//! Match conditions of webhooks: CEL over the object and the request.

use std::collections::HashMap;
use std::sync::Arc;

use cel::{Context, Program};
use serde_json::Value;

use crate::value::{list, text};

/// Whether all conditions hold. One that is false decides alone; one that fails is an error
/// otherwise, which the failure policy then judges. An expression that the library here cannot
/// read counts as true: the webhook is rather asked too often.
pub(super) fn hold(hook: &Value, review: &Value) -> Result<bool, String> {
    let conditions = list(hook, &["matchConditions"]);
    if conditions.is_empty() {
        return Ok(true);
    }
    let request = review.get("request").unwrap_or(&Value::Null);
    let mut context = Context::default();
    for (name, field) in [("object", "object"), ("oldObject", "oldObject")] {
        context.add_variable_from_value(name, to_cel(request.get(field).unwrap_or(&Value::Null)));
    }
    context.add_variable_from_value("request", to_cel(request));
    let mut failure = None;
    for condition in conditions {
        let name = text(condition, &["name"]);
        let program = match Program::compile(text(condition, &["expression"])) {
            Ok(program) => program,
            Err(error) => {
                tracing::warn!(condition = name, %error, "cannot be read here, and counts as true");
                continue;
            }
        };
        match program.execute(&context) {
            Ok(cel::Value::Bool(true)) => {}
            Ok(cel::Value::Bool(false)) => return Ok(false),
            Ok(_) => failure = Some(format!("match condition {name:?} is neither true nor false")),
            Err(e) => failure = Some(format!("match condition {name:?}: {e}")),
        }
    }
    failure.map_or(Ok(true), Err)
}

fn to_cel(value: &Value) -> cel::Value {
    match value {
        Value::Null => cel::Value::Null,
        Value::Bool(b) => cel::Value::Bool(*b),
        Value::Number(n) => match n.as_i64() {
            Some(i) => cel::Value::Int(i),
            None => cel::Value::Float(n.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(s) => cel::Value::String(Arc::new(s.clone())),
        Value::Array(items) => cel::Value::List(Arc::new(items.iter().map(to_cel).collect())),
        Value::Object(map) => {
            let map: HashMap<String, cel::Value> = map.iter().map(|(k, v)| (k.clone(), to_cel(v))).collect();
            cel::Value::Map(map.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[rstest::rstest]
    #[case::present("has(object.spec.resourceClaims) && size(object.spec.resourceClaims) > 0", Ok(true))]
    #[case::absent("has(object.spec.volumes)", Ok(false))]
    #[case::request("request.userInfo.username == 'me'", Ok(true))]
    #[case::unreadable("object.(", Ok(true))]
    #[case::no_bool("object.spec.n + 1", Err(()))]
    #[case::missing("object.spec.none == 1", Err(()))]
    fn conditions_are_evaluated(#[case] expression: &str, #[case] want: Result<bool, ()>) {
        let hook = json!({"matchConditions": [{"name": "c", "expression": expression}]});
        let review = json!({"request": {
            "object": {"spec": {"resourceClaims": [{"name": "a"}], "n": 1}}, "userInfo": {"username": "me"},
        }});
        assert_eq!(hold(&hook, &review).map_err(|_| ()), want);
    }

    #[test]
    fn a_false_condition_outweighs_a_failing_one() {
        let hook = json!({"matchConditions": [
            {"name": "a", "expression": "object.none.x"}, {"name": "b", "expression": "false"},
        ]});
        assert_eq!(hold(&hook, &json!({"request": {"object": {}}})), Ok(false));
    }
}
