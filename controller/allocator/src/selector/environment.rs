//! The environment of an expression: the functions of the library, and the device.

use super::conversion::{from_cel, to_cel};
use super::device::{AttributeValue, DeviceFacts};
use super::message::one_line;
use super::meter::{Meter, Stop};
use super::tree::{call, ident, node, text_literal};
use super::value::{Map, Value};
use crate::quantity::Quantity;
use cel::context::VariableResolver;
use cel::{Context, IdedExpr, ResolveResult};
use kube_cel::KubeCelExt;
use std::collections::BTreeMap;
use std::sync::Arc;

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
        let call = node(call(function, vec![text_literal(text)]));
        let value = cel::Value::resolve(&call, &self.root);
        let value = value.map_err(|error| Stop::failed(one_line(&error.to_string())))?;
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
        let call = node(call("string", vec![ident("@0")]));
        let value = self.resolve(&call, &One(to_cel(value, meter)?));
        from_cel(value.map_err(|error| Stop::failed(one_line(&error.to_string())))?, meter)
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
