//! Computes the least that a request can be given on the boards of this cluster.

use crate::quantity::Quantity;
use crate::quota::Amount;
use crate::quota::ledger::{of_published, part_of_gpu};
use crate::schedule::Matcher;
use crate::schedule::capacity::consumed;
use crate::snapshot::{Class, Layout, Snapshot};
use aliquot_model::{DeviceKind, DeviceName};
use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceRequest, DeviceSelector, ResourceClaimSpec,
};
use std::collections::BTreeSet;
use std::sync::Arc;

/// One way to satisfy a request: `exactly`, or an entry of `firstAvailable`.
#[derive(Debug, Clone)]
pub struct Wanted<'a> {
    /// Path of the request in the object.
    pub path: String,
    /// Name of the request.
    pub request: &'a str,
    /// Name of the alternative, if the request has alternatives.
    pub alternative: Option<&'a str>,
    /// Name of the DeviceClass.
    pub class: &'a str,
    /// Selectors of the request, without those of the class.
    pub selectors: &'a [DeviceSelector],
    /// The least number of devices.
    pub count: u64,
    /// True if the request asks for admin access.
    pub admin: bool,
    /// The capacities that are requested of each device.
    pub capacity: Option<&'a CapacityRequirements>,
}

impl Wanted<'_> {
    /// Returns the name by which configuration refers to the request.
    pub fn name(&self) -> String {
        match self.alternative {
            Some(alternative) => format!("{}/{alternative}", self.request),
            None => self.request.to_owned(),
        }
    }

    /// Returns the requested amount of one capacity; `None` if there is none or it is not a quantity.
    pub fn capacity_of(&self, driver: &str, name: &str) -> Option<Quantity> {
        let requests = self.capacity?.requests.as_ref()?;
        let qualified = format!("{driver}/{name}");
        requests.get(name).or_else(|| requests.get(&qualified))?.0.parse().ok()
    }
}

/// Returns the requests of a claim, each with its alternatives.
pub fn requests<'a>(spec: &'a ResourceClaimSpec, prefix: &str) -> Vec<Vec<Wanted<'a>>> {
    let requests = spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    requests
        .enumerate()
        .map(|(at, request)| alternatives(request, &format!("{prefix}.devices.requests[{at}]")))
        .collect()
}

fn alternatives<'a>(request: &'a DeviceRequest, path: &str) -> Vec<Wanted<'a>> {
    let count = |mode: Option<&str>, count: Option<i64>| match mode {
        // `All` takes at least one.
        Some("All") => 1,
        _ => u64::try_from(count.unwrap_or(1)).unwrap_or_default(),
    };
    let exactly = request.exactly.iter().map(|exact| Wanted {
        path: format!("{path}.exactly"),
        request: &request.name,
        alternative: None,
        class: &exact.device_class_name,
        selectors: exact.selectors.as_deref().unwrap_or_default(),
        count: count(exact.allocation_mode.as_deref(), exact.count),
        admin: exact.admin_access == Some(true),
        capacity: exact.capacity.as_ref(),
    });
    let first = request.first_available.iter().flatten().enumerate().map(|(at, sub)| Wanted {
        path: format!("{path}.firstAvailable[{at}]"),
        request: &request.name,
        alternative: Some(&sub.name),
        class: &sub.device_class_name,
        selectors: sub.selectors.as_deref().unwrap_or_default(),
        count: count(sub.allocation_mode.as_deref(), sub.count),
        admin: false,
        capacity: sub.capacity.as_ref(),
    });
    exactly.chain(first).collect()
}

/// What the boards of the cluster have for one way to satisfy a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Offer {
    /// Kinds of the devices that match. If none matches, the kinds that class and selectors demand. Empty if
    /// the kinds cannot be told.
    pub kinds: BTreeSet<DeviceKind>,
    /// The least amount that all devices of the request together can count; `None` if it cannot be told.
    pub least: Option<Amount>,
    /// Set if devices match but none of them ever gives the requested amount: the capacity, the requested
    /// amount, and the most that a device gives.
    pub too_much: Option<(&'static str, Quantity, Quantity)>,
}

/// Compares a request with every published device, one node for each make: this runs for every claim that is
/// created.
pub fn offer(index: &Snapshot, matcher: &mut Matcher, class: &Class, wanted: &Wanted<'_>) -> Offer {
    let own = wanted
        .selectors
        .iter()
        .map(|selector| selector.cel.as_ref().map(|cel| Arc::from(cel.expression.as_str())));
    let Some(expressions) = class.selectors.iter().cloned().chain(own).collect::<Option<Vec<Arc<str>>>>()
    else {
        return Offer::default();
    };
    // What is not known in time counts as unknown.
    let compiled = |e: &Arc<str>| matcher.compile_until(index.driver(), e);
    if expressions.iter().map(compiled).collect::<Result<Vec<_>, _>>().is_err() {
        return Offer::default();
    }
    let mut offer = Offer::default();
    let mut most: [Option<Quantity>; 2] = [None, None];
    let mut uncertain = false;
    for layout in matcher.layouts(index, &expressions) {
        let answers = expressions.iter().map(|e| matcher.answers_until(index, layout, e));
        let Ok(answers) = answers.collect::<Result<Vec<_>, _>>() else { return Offer::default() };
        for (position, device) in (0u32..).zip(layout.devices.iter()) {
            let verdicts = answers.iter().map(|answers| answers.get(position));
            match verdicts.fold(Some(true), and) {
                Some(true) => {}
                Some(false) => continue,
                None => {
                    uncertain = true;
                    continue;
                }
            }
            let Some(name) = DeviceName::parse(index.name(device.name)) else { continue };
            offer.kinds.insert(name.kind());
            if let Some(amount) = amount(index, layout, position, name.kind(), wanted, &mut most) {
                offer.least = Some(offer.least.map_or(amount, |least| least.min(amount)));
            }
        }
    }
    if uncertain {
        return Offer::default();
    }
    if offer.kinds.is_empty() {
        offer.kinds = demanded_kinds(index.driver(), matcher, &expressions);
        return offer;
    }
    if offer.least.is_none() {
        offer.too_much = [("memory", most[0]), ("cores", most[1])].into_iter().find_map(|(name, most)| {
            let (asked, most) = (wanted.capacity_of(index.driver(), name)?, most?);
            (asked > most).then_some((name, asked, most))
        });
    }
    offer.least = offer.least.map(|least| least.times(wanted.count));
    offer
}

/// Returns the kinds of which a device must be for the expressions to be true; empty if they cannot be told.
pub(super) fn demanded_kinds(
    driver: &str,
    matcher: &mut Matcher,
    expressions: &[Arc<str>],
) -> BTreeSet<DeviceKind> {
    let demanded = expressions.iter().find_map(|expression| {
        let compiled = matcher.compile_until(driver, expression).ok()?;
        let kinds = compiled.selector.demanded(driver, "type")?;
        kinds.into_iter().map(DeviceKind::parse).collect::<Option<BTreeSet<_>>>()
    });
    demanded.unwrap_or_default()
}

/// Combines the answers of selectors. If a selector fails on a device, the result is unknown, unless another
/// selector refuses the device.
fn and(sum: Option<bool>, answer: Option<&crate::schedule::matcher::Answer>) -> Option<bool> {
    match (sum, answer) {
        (Some(false), _) | (_, Some(Ok(false))) => Some(false),
        (sum, Some(Ok(true))) => sum,
        _ => None,
    }
}

/// Returns what one device would count; `None` if it does not give the requested amount.
fn amount(
    index: &Snapshot,
    layout: &Layout,
    position: u32,
    kind: DeviceKind,
    wanted: &Wanted<'_>,
    most: &mut [Option<Quantity>; 2],
) -> Option<Amount> {
    if wanted.admin || kind == DeviceKind::Admin {
        return Some(Amount::default());
    }
    let device = layout.devices.get(position as usize)?;
    let capacities = &index.shape(device).capacities;
    let mut taken = [Quantity::ZERO; 2];
    for ((slot, most), name) in taken.iter_mut().zip(most.iter_mut()).zip(["memory", "cores"]) {
        let asked = wanted.capacity_of(index.driver(), name);
        let Some(symbol) = index.find_qualified(name) else { continue };
        let found = capacities.iter().find(|(known, _)| *known == symbol);
        let Some((_, capacity)) = found else {
            // A capacity that the device lacks cannot be requested.
            match asked {
                Some(_) => return None,
                None => continue,
            }
        };
        *most = Some(most.unwrap_or_default().max(capacity.value));
        if kind.shareable() {
            *slot = consumed(capacity, asked)?;
        } else if asked.is_some_and(|asked| asked > capacity.value) {
            return None;
        }
    }
    if kind.shareable() {
        let [memory, cores] = taken.map(|quantity| quantity.to_u64().unwrap_or(u64::MAX));
        let part = part_of_gpu(index, layout, device.name).unwrap_or_default();
        return Some(Amount::of_device(kind, memory, part, cores));
    }
    of_published(index, layout, position, kind)
}
