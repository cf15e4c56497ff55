//! Compares the names of attributes and capacities in claims and classes with those that devices of this
//! driver have. A name that no device has is a mistake that would otherwise not be noticed: the claim waits
//! for ever.

use super::least::{Wanted, demanded_kinds};
use crate::schedule::Matcher;
use crate::selector::Field;
use crate::snapshot::{Class, Snapshot};
use aliquot_model::layout::{attribute_names, capacity_names, has_capacity};
use aliquot_model::{DeviceKind, DeviceName};
use k8s_openapi::api::resource::v1::{DeviceConstraint, DeviceSelector};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The similarity at which a name is proposed for another one: from 0 to 1, where 1 means the same.
const ALIKE: f64 = 0.8;

/// A name with its map and domain.
type Name<'a> = (Field, &'a str, &'a str);

/// The names that devices of some kinds have.
pub(super) struct Names<'a> {
    index: &'a Snapshot,
    kinds: BTreeSet<DeviceKind>,
    /// True if nothing else can be given: then names of other drivers' domains are mistakes too.
    only: bool,
    /// The devices that have these names, in words.
    who: String,
}

impl<'a> Names<'a> {
    /// Returns the names of the devices that a request can be given, as far as its own selectors and those of
    /// its class tell.
    pub(super) fn of_request(
        index: &'a Snapshot,
        matcher: &mut Matcher,
        class: &Class,
        wanted: &Wanted<'_>,
    ) -> Self {
        let own = wanted.selectors.iter().filter_map(|selector| selector.cel.as_ref());
        let own = own.map(|cel| Arc::from(cel.expression.as_str()));
        let expressions: Vec<Arc<str>> = class.selectors.iter().flatten().cloned().chain(own).collect();
        Self::demanded(index, matcher, &expressions, format!("device of class {}", wanted.class))
    }

    /// Returns the names of the devices that a class can select.
    pub(super) fn of_class(index: &'a Snapshot, matcher: &mut Matcher, selectors: &[DeviceSelector]) -> Self {
        let expressions = selectors.iter().filter_map(|selector| selector.cel.as_ref());
        let expressions: Vec<_> = expressions.map(|cel| Arc::from(cel.expression.as_str())).collect();
        Self::demanded(index, matcher, &expressions, "device of such a class".to_owned())
    }

    /// Returns the names of all devices of the driver.
    fn of_driver(index: &'a Snapshot) -> Self {
        let who = format!("device of driver {}", index.driver());
        Self { index, kinds: DeviceKind::ALL.into(), only: false, who }
    }

    fn demanded(index: &'a Snapshot, matcher: &mut Matcher, expressions: &[Arc<str>], who: String) -> Self {
        let kinds = demanded_kinds(index.driver(), matcher, expressions);
        let ours = |expression: &Arc<str>| {
            let compiled = matcher.compile_until(index.driver(), expression);
            compiled.is_ok_and(|compiled| compiled.selector.demands_driver(index.driver()))
        };
        let only = !kinds.is_empty() || expressions.iter().any(ours);
        let kinds = if kinds.is_empty() { DeviceKind::ALL.into() } else { kinds };
        Self { index, kinds, only, who }
    }

    /// Returns messages about requested capacities that no device for the request has.
    pub(super) fn unknown_capacities(&self, wanted: &Wanted<'_>) -> Vec<String> {
        let driver = self.index.driver();
        let asked = wanted.capacity.iter().flat_map(|capacity| capacity.requests.iter().flatten());
        let unknown = asked.map(|(asked, _)| asked.as_str()).filter_map(|asked| {
            let (domain, name) = asked.split_once('/').unwrap_or((driver, asked));
            if !self.only || self.has(Field::Capacity, domain, name) {
                return None;
            }
            let path = format!("{}.capacity.requests.{asked}", wanted.path);
            let shared = domain == driver && has_capacity(DeviceKind::Share, name);
            Some(if shared && !self.kinds.iter().any(|kind| kind.shareable()) {
                format!(
                    "{path}: devices of class {} are given as they are, and only shares of a GPU have {name}; leave it \
                     out, or use class share.aliquot.dev for a part of a GPU",
                    wanted.class
                )
            } else {
                let capacity = |(field, _, name): Name<'_>| (field == Field::Capacity).then(|| name.to_owned());
                format!("{path}: {}", self.advice(Field::Capacity, name, capacity))
            })
        });
        unknown.collect()
    }

    /// Returns messages about names in selectors that no selectable device has.
    pub(super) fn unknown_in(
        &self,
        matcher: &mut Matcher,
        selectors: &[DeviceSelector],
        path: &str,
    ) -> Vec<String> {
        let driver = self.index.driver();
        let mut unknown = Vec::new();
        for (at, selector) in selectors.iter().enumerate() {
            let Some(cel) = &selector.cel else { continue };
            let Ok(compiled) = matcher.compile_until(driver, &cel.expression.as_str().into()) else { break };
            for named in compiled.selector.named() {
                let (field, domain, name) = (named.field, named.domain.as_str(), named.name.as_str());
                // If devices of another driver can be selected too, only names of this driver's domain are
                // checked.
                if (self.only || domain == driver) && !self.has(field, domain, name) {
                    let advice = self.advice(field, name, |known| Some(expression(known)));
                    unknown.push(format!(
                        "{path}.selectors[{at}]: {}: {advice}",
                        expression((field, domain, name))
                    ));
                }
            }
        }
        unknown
    }

    /// Returns true if a device has the name. Nodes may be newer than the controller, so what they publish
    /// counts too.
    fn has(&self, field: Field, domain: &str, name: &str) -> bool {
        let driver = self.index.driver();
        let told = |kind: &DeviceKind| match field {
            Field::Attributes => {
                attribute_names(*kind).any(|known| qualified(driver, known) == (domain, name))
            }
            Field::Capacity => domain == driver && has_capacity(*kind, name),
        };
        self.kinds.iter().any(told) || self.is_published(field, domain, name)
    }

    fn is_published(&self, field: Field, domain: &str, name: &str) -> bool {
        let Some(symbol) = self.index.find_qualified(&format!("{domain}/{name}")) else { return false };
        self.index.makes_published().flat_map(|layout| layout.devices.iter()).any(|device| {
            let shape = self.index.shape(device);
            let has = match field {
                Field::Attributes => shape.attributes.contains(&symbol),
                Field::Capacity => shape.capacities.iter().any(|(known, _)| *known == symbol),
            };
            has && DeviceName::parse(self.index.name(device.name))
                .is_some_and(|name| self.kinds.contains(&name.kind()))
        })
    }

    /// Returns advice on what to write instead: the most similar name that can be shown, and all names.
    fn advice(&self, field: Field, name: &str, show: impl Fn(Name<'_>) -> Option<String>) -> String {
        let driver = self.index.driver();
        let mut known: BTreeSet<Name<'_>> = BTreeSet::new();
        for kind in &self.kinds {
            let attributes = attribute_names(*kind).map(|known| qualified(driver, known));
            known.extend(attributes.map(|(domain, name)| (Field::Attributes, domain, name)));
            known.extend(capacity_names(*kind).map(|name| (Field::Capacity, driver, name)));
        }
        let alike = |known: &str| strsim::jaro_winkler(&known.to_lowercase(), &name.to_lowercase());
        let likely = known.iter().filter(|(_, _, known)| alike(known) >= ALIKE);
        let shown = likely.filter_map(|known| Some((*known, show(*known)?)));
        // Of equally similar names, one in the same map is preferred.
        let nearest = shown.max_by(|((of, _, one), _), ((than, _, other), _)| {
            alike(one).total_cmp(&alike(other)).then((*of == field).cmp(&(*than == field)))
        });
        let meant = nearest.map(|(_, shown)| format!("; did you mean {shown}?")).unwrap_or_default();
        let legal = known.iter().filter(|(of, _, _)| *of == field).map(|(_, domain, name)| {
            if *domain == driver { (*name).to_owned() } else { format!("{domain}/{name}") }
        });
        let legal: Vec<String> = legal.collect();
        format!(
            "no {} has it{meant}{} legal are {}",
            self.who,
            if meant.is_empty() { ";" } else { "" },
            legal.join(", ")
        )
    }
}

/// Returns messages about constraints on attributes of the driver's domain that no device has; nothing can
/// satisfy them.
pub(super) fn unknown_in_constraints(
    index: &Snapshot,
    constraints: &[DeviceConstraint],
    prefix: &str,
) -> Vec<String> {
    let names = Names::of_driver(index);
    let mut unknown = Vec::new();
    for (at, constraint) in constraints.iter().enumerate() {
        let fields = [
            ("matchAttribute", &constraint.match_attribute),
            ("distinctAttribute", &constraint.distinct_attribute),
        ];
        for (field, attribute) in fields {
            let Some((domain, name)) = attribute.as_deref().and_then(|name| name.split_once('/')) else {
                continue;
            };
            if domain == index.driver() && !names.has(Field::Attributes, domain, name) {
                let attribute = |(field, domain, name): Name<'_>| {
                    (field == Field::Attributes).then(|| format!("{domain}/{name}"))
                };
                let advice = names.advice(Field::Attributes, name, attribute);
                unknown
                    .push(format!("{prefix}.devices.constraints[{at}].{field}: {domain}/{name}: {advice}"));
            }
        }
    }
    unknown
}

/// Splits a name into domain and name; a name without a domain is in the driver's domain.
fn qualified<'a>(driver: &'a str, name: &'a str) -> (&'a str, &'a str) {
    name.split_once('/').unwrap_or((driver, name))
}

/// Returns a name as a selector writes it.
fn expression((field, domain, name): Name<'_>) -> String {
    let map = match field {
        Field::Attributes => "attributes",
        Field::Capacity => "capacity",
    };
    format!("device.{map}[{domain:?}].{name}")
}
