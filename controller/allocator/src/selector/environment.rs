//! The environment of an expression: the functions of the library, and the device.

use super::bridge::{from_cel, to_cel};
use super::meter::{Meter, Stop};
use super::value::{Map, Value};
use super::{AttributeValue, DeviceFacts};
use crate::quantity::Quantity;
use cel::context::VariableResolver;
use cel::{Context, IdedExpr, ResolveResult};
use kube_cel::KubeCelExt;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Name of the function that looks up a domain in `device.attributes` or `device.capacity`; an unknown domain
/// is empty.
pub(super) const DOMAIN: &str = "@domain";
/// Name of the function that returns the pairs of a map, or the elements of a list with their positions, for
/// macros with two variables.
pub(super) const ENTRIES: &str = "@entries";
/// Name of the function that builds a map from a list of pairs.
pub(super) const FROM_ENTRIES: &str = "@fromEntries";
/// Name of the function that merges a list of maps into one map.
pub(super) const MERGE: &str = "@merge";
/// Name of the function that sorts the elements of a list in the order of another list.
pub(super) const SORT_BY: &str = "@sortBy";

/// The Kubernetes libraries. They are built once and used for every evaluation, by any number of threads at
/// once.
pub struct Environment {
    root: Context<'static>,
}

impl std::fmt::Debug for Environment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Environment")
    }
}

impl Default for Environment {
    fn default() -> Self {
        Self::new()
    }
}

impl Environment {
    /// Creates the environment with the libraries that selectors may call.
    pub fn new() -> Self {
        Self { root: Context::default().with_all() }
    }

    /// Calls a function of the library with these variables as arguments.
    pub(super) fn resolve(&self, call: &IdedExpr, variables: &dyn VariableResolver) -> ResolveResult {
        let mut scope = self.root.new_inner_scope();
        scope.set_variable_resolver(variables);
        cel::Value::resolve(call, &scope)
    }

    /// Creates a value of one of Kubernetes' own types with the library function that reads it.
    fn construct(&self, function: &str, text: &str) -> Result<Value, Stop> {
        let call = IdedExpr {
            id: 0,
            expr: super::rewrite::call(function, vec![super::rewrite::text_literal(text)]),
        };
        let value = cel::Value::resolve(&call, &self.root);
        let value = value.map_err(|error| Stop::failed(super::one_line(&error.to_string())))?;
        Ok(Value::Foreign(Arc::new(value)))
    }

    /// Returns the value of an attribute.
    pub(super) fn attribute(&self, value: &AttributeValue) -> Result<Value, Stop> {
        Ok(match value {
            AttributeValue::Int(value) => Value::Int(*value),
            AttributeValue::Bool(value) => Value::Bool(*value),
            AttributeValue::Text(value) => Value::Text(value.clone()),
            AttributeValue::Version(value) => self.construct("semver", value)?,
        })
    }

    /// Returns the value of a capacity.
    pub(super) fn quantity(&self, value: Quantity) -> Result<Value, Stop> {
        self.construct("quantity", &value.to_string())
    }

    /// Returns the text that the library writes for one of its values.
    pub(super) fn string(&self, value: &Value, meter: &mut Meter<'_>) -> Result<Value, Stop> {
        struct One(cel::Value);
        impl VariableResolver for One {
            fn resolve(&self, _: &str) -> Option<cel::Value> {
                Some(self.0.clone())
            }
        }
        let call = super::rewrite::call("string", vec![super::rewrite::ident("@0")]);
        let value = self.resolve(&IdedExpr { id: 0, expr: call }, &One(to_cel(value, meter)?));
        from_cel(value.map_err(|error| Stop::failed(super::one_line(&error.to_string())))?, meter)
    }

    /// Returns the whole of `device`, for expressions that use its maps.
    pub(super) fn device(&self, device: &DeviceFacts<'_>) -> Result<Value, Stop> {
        let mut attributes: BTreeMap<&str, Vec<(Value, Value)>> = BTreeMap::new();
        for (name, value) in &device.attributes {
            let (domain, id) = split(name);
            attributes.entry(domain).or_default().push((Value::text(id), self.attribute(value)?));
        }
        let mut capacities: BTreeMap<&str, Vec<(Value, Value)>> = BTreeMap::new();
        for (name, value) in &device.capacities {
            let (domain, id) = split(name);
            capacities.entry(domain).or_default().push((Value::text(id), self.quantity(*value)?));
        }
        Ok(Value::map(Map::new(vec![
            (Value::text("driver"), Value::text(device.driver)),
            (Value::text("allowMultipleAllocations"), Value::Bool(device.shareable)),
            (Value::text("attributes"), nested(attributes)?),
            (Value::text("capacity"), nested(capacities)?),
        ])?))
    }
}

/// Splits a qualified name into domain and ID.
fn split(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("", name))
}

fn nested(domains: BTreeMap<&str, Vec<(Value, Value)>>) -> Result<Value, Stop> {
    let maps =
        domains.into_iter().map(|(domain, inner)| Ok((Value::text(domain), Value::map(Map::new(inner)?))));
    Ok(Value::map(Map::new(maps.collect::<Result<_, Stop>>()?)?))
}
