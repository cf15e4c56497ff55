//! The answers of admission: everything that is wrong with an object, in words for its author.
//!
//! Admission refuses only what can never be right. What merely has no room now is accepted and waits.

use super::configs;
use super::least::{self, Offer, Wanted};
use super::names::{self, Names};
use super::rules::{Rules, Unknown};
use crate::quantity::Quantity;
use crate::quota::Limit;
use crate::schedule::Matcher;
use crate::schedule::ask::MOST_RESULTS;
use crate::snapshot::profiles::profiles;
use crate::snapshot::{Class, ObjectKey, Snapshot};
use aliquot_api::v1alpha1::GpuQuota;
use aliquot_api::v1alpha1::gpu_quota::Given;
use aliquot_model::{DeviceKind, DeviceName};
use k8s_openapi::api::resource::v1::{DeviceClassSpec, ResourceClaimSpec};
use std::sync::Arc;

/// What admission knows of the cluster.
pub struct Scene<'a> {
    /// The snapshot with slices and classes.
    pub index: &'a Snapshot,
    /// The compiled selectors.
    pub matcher: &'a mut Matcher,
    /// The rules.
    pub rules: Rules,
    /// The quotas of the object's namespace.
    pub quotas: Vec<(ObjectKey, GpuQuota)>,
}

/// The answer of admission.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Judgement {
    /// The reasons for the refusal; empty if the object is accepted.
    pub errors: Vec<String>,
    /// Warnings about the object.
    pub warnings: Vec<String>,
}

/// Returns true if a claim asks for devices of a class that can select devices of this driver. A class that
/// does not exist yet may do so later; until then the claim cannot be compared with anything.
pub fn asks_for_ours(index: &Snapshot, matcher: &mut Matcher, spec: &ResourceClaimSpec) -> bool {
    let mut ways = least::requests(spec, "").into_iter().flatten();
    ways.any(|wanted| class_of(index, matcher, &wanted).is_some())
}

/// Returns the class that is asked for, if it can select devices of this driver. Classes of other drivers are
/// not judged.
fn class_of<'i>(index: &'i Snapshot, matcher: &mut Matcher, wanted: &Wanted<'_>) -> Option<&'i Class> {
    index.class(wanted.class).filter(|class| matcher.may_select(index.driver(), class))
}

/// Judges the spec of a claim; `prefix` is the path of the spec in the object.
pub fn claim(scene: &mut Scene<'_>, spec: &ResourceClaimSpec, prefix: &str) -> Judgement {
    let mut judgement = Judgement::default();
    let requests = least::requests(spec, prefix);
    let index = scene.index;
    let mut looked = Vec::new();
    for request in requests {
        let mut ways = Vec::new();
        for wanted in request {
            let class = class_of(index, scene.matcher, &wanted);
            let offer = match class {
                // A request that is not checked in time may be correct.
                Some(class) if !scene.matcher.is_late() => {
                    let offer = least::offer(index, scene.matcher, class, &wanted);
                    judge_way(scene, &wanted, &offer, &mut judgement);
                    let names = Names::of_request(index, scene.matcher, class, &wanted);
                    judgement.errors.extend(names.unknown_capacities(&wanted));
                    let unknown = names.unknown_in(scene.matcher, wanted.selectors, &wanted.path);
                    judgement.warnings.extend(unknown);
                    offer
                }
                _ => Offer::default(),
            };
            ways.push((wanted, class, offer));
        }
        looked.push(ways);
    }
    judge_amounts(scene, &looked, prefix, &mut judgement.errors);
    let all: Vec<_> = looked.into_iter().flatten().collect();
    let constraints = spec.devices.as_ref().and_then(|devices| devices.constraints.as_deref());
    judgement.errors.extend(names::unknown_in_constraints(index, constraints.unwrap_or_default(), prefix));
    let entries = spec.devices.as_ref().and_then(|devices| devices.config.as_deref()).unwrap_or_default();
    judgement.warnings.extend(configs::of_others(entries, index.driver(), prefix));
    judgement.errors.extend(configs::of_claim(entries, &all, index.driver(), scene.rules, prefix));
    judgement
}

/// Judges the spec of a DeviceClass.
pub fn class(index: &Snapshot, matcher: &mut Matcher, rules: Rules, spec: &DeviceClassSpec) -> Judgement {
    let driver = index.driver();
    let entries = spec.config.iter().flatten().enumerate();
    let errors = entries.filter_map(|(at, entry)| {
        let path = format!("spec.config[{at}]");
        match configs::decode(entry.opaque.as_ref(), driver, &path)? {
            Ok(config) => configs::beyond(&config, rules, &path),
            Err(error) => Some(error),
        }
    });
    let selectors = spec.selectors.as_deref().unwrap_or_default();
    let warnings = Names::of_class(index, matcher, selectors).unknown_in(matcher, selectors, "spec");
    Judgement { errors: errors.collect(), warnings }
}

fn judge_way(scene: &mut Scene<'_>, wanted: &Wanted<'_>, offer: &Offer, judgement: &mut Judgement) {
    let path = &wanted.path;
    let only = |kind: DeviceKind| offer.kinds.len() == 1 && offer.kinds.contains(&kind);
    if only(DeviceKind::Mps) && !is_published(scene.index, DeviceKind::Mps) {
        judgement.warnings.push(format!(
            "{path}.deviceClassName: {} gives GPUs through MPS, which no node serves now, so its pods wait; an \
             administrator switches it on with the chart value kubeletPlugin.mps.enabled",
            wanted.class
        ));
    }
    if only(DeviceKind::Admin) && !wanted.admin {
        judgement.errors.push(format!(
            "{path}: devices of class {} are for monitoring and need adminAccess: true; for work use \
             gpu.aliquot.dev, mig.aliquot.dev or share.aliquot.dev",
            wanted.class
        ));
    }
    if usize::try_from(wanted.count).is_ok_and(|count| count > MOST_RESULTS) {
        judgement.errors.push(format!(
            "{path}.count: {} devices are more than the {MOST_RESULTS} that a claim can hold; use several claims",
            wanted.count
        ));
    }
    if only(DeviceKind::Share) || only(DeviceKind::MigShare) {
        judgement.warnings.extend(little_memory(scene.index.driver(), wanted));
    }
    let unknown = match scene.rules.unknown {
        Unknown::Refuse => &mut judgement.errors,
        Unknown::Warn => &mut judgement.warnings,
        Unknown::Allow => return,
    };
    unknown.extend(unknown_profile(scene.index, scene.matcher, wanted));
    if let Some((name, asked, most)) = offer.too_much {
        unknown.push(format!(
            "{path}.capacity.requests.{name}: no device of this cluster gives {asked}; the most is {most}"
        ));
    }
}

/// The least memory, in bytes, in which a program may start: a CUDA context alone takes more.
const LEAST_FOR_CUDA: u64 = 64 << 20;

/// Returns a warning if no program can start in a share of this size. Usually a unit was forgotten: HAMi and
/// others take figures in MiB.
fn little_memory(driver: &str, wanted: &Wanted<'_>) -> Option<String> {
    let requests = wanted.capacity?.requests.as_ref()?;
    let full = format!("{driver}/memory");
    let (name, asked) = requests.iter().find(|(name, _)| *name == "memory" || **name == full)?;
    let bytes = asked.0.parse::<Quantity>().ok()?.to_u64()?;
    (bytes < LEAST_FOR_CUDA).then(|| {
        let mebibytes =
            asked.0.chars().all(|c| c.is_ascii_digit()).then(|| format!("; {0} MiB are {0}Mi", asked.0));
        format!(
            "{}.capacity.requests.{name}: {} is {bytes} bytes, in which no CUDA program starts{}",
            wanted.path,
            asked.0,
            mebibytes.unwrap_or_default()
        )
    })
}

/// Returns true if some node publishes a device of a kind.
fn is_published(index: &Snapshot, kind: DeviceKind) -> bool {
    let devices = index.makes_published().flat_map(|layout| layout.devices.iter());
    let mut kinds = devices.filter_map(|device| Some(DeviceName::parse(index.name(device.name))?.kind()));
    kinds.any(|published| published == kind)
}

/// Returns a message if no board of the cluster has the demanded profile; the message lists those that exist.
fn unknown_profile(index: &Snapshot, matcher: &mut Matcher, wanted: &Wanted<'_>) -> Option<String> {
    wanted.selectors.iter().enumerate().find_map(|(at, selector)| {
        let expression: Arc<str> = selector.cel.as_ref()?.expression.as_str().into();
        let compiled = matcher.compile_until(index.driver(), &expression).ok()?;
        let demanded = compiled.selector.demanded(index.driver(), "profile")?;
        let legal = profiles(index);
        // If no partition is published, there is nothing to compare with.
        if legal.is_empty() || demanded.iter().any(|name| legal.values().any(|names| names.contains(*name))) {
            return None;
        }
        let boards: Vec<String> = legal
            .iter()
            .map(|(board, names)| {
                format!("{board}: {}", names.iter().cloned().collect::<Vec<_>>().join(", "))
            })
            .collect();
        Some(format!(
            "{}.selectors[{at}]: no board of this cluster has the MIG profile {}; legal are {}",
            wanted.path,
            demanded.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(" or "),
            boards.join("; ")
        ))
    })
}

/// Compares the least that the whole claim asks for with the namespace's quotas.
fn judge_amounts(
    scene: &Scene<'_>,
    requests: &[Vec<(Wanted<'_>, Option<&Class>, Offer)>],
    prefix: &str,
    errors: &mut Vec<String>,
) {
    let mut sum = crate::quota::Amount::default();
    let mut devices = 0u64;
    for ways in requests {
        let ours: Vec<_> = ways.iter().filter(|(_, class, _)| class.is_some()).collect();
        devices =
            devices.saturating_add(ours.iter().map(|(wanted, _, _)| wanted.count).min().unwrap_or_default());
        // If the amount of one alternative is unknown, that alternative may be small.
        let amounts: Option<Vec<_>> = ways.iter().map(|(_, _, offer)| offer.least).collect();
        let least = amounts.into_iter().flatten().reduce(crate::quota::Amount::min).unwrap_or_default();
        sum = sum + least;
    }
    for (key, quota) in &scene.quotas {
        let (hard, per_claim) = (&quota.spec.hard, &quota.spec.per_claim);
        let figures: [(Limit, u64, Option<Given>, &str); 6] = [
            (Limit::Memory, sum.memory, per_claim.memory, "one claim may have"),
            (Limit::Cores, sum.cores, per_claim.cores, "one claim may have"),
            (Limit::Devices, devices, per_claim.devices, "one claim may have"),
            (Limit::Memory, sum.memory, hard.memory, "the whole namespace may have"),
            (Limit::Cores, sum.cores, hard.cores, "the whole namespace may have"),
            (Limit::Gpus, sum.gpus, hard.gpus, "the whole namespace may have"),
        ];
        let over = figures.into_iter().find(|(_, asked, most, _)| most.is_some_and(|most| *asked > most.0));
        if let Some((limit, asked, Some(most), who)) = over {
            errors.push(format!(
                "{prefix}.devices: asks for at least {} of {}, but {who} {} (GpuQuota {key})",
                limit.show(asked),
                match limit {
                    Limit::Memory => "GPU memory",
                    Limit::Cores => "cores (percent of a GPU)",
                    Limit::Gpus => "whole GPUs",
                    Limit::Devices => "devices",
                },
                limit.show(most.0)
            ));
        }
    }
}

#[cfg(test)]
#[path = "check/tests.rs"]
mod tests;
