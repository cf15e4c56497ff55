//! Opaque configuration as users write it: strictly decoded, and only where it can apply.

use super::check::Rules;
use super::least::{Offer, Wanted};
use crate::index::Class;
use aliquot_model::config::{self, Config, FailMode};
use aliquot_model::names::API_VERSION;
use aliquot_model::{DeviceKind, Quantity};
use k8s_openapi::api::resource::v1::OpaqueDeviceConfiguration;

/// Kinds of device that a configuration says something about.
const fn kinds(config: &Config) -> &'static [DeviceKind] {
    match config {
        Config::Gpu(_) => &[DeviceKind::Gpu, DeviceKind::TimeSlice],
        Config::Mig(_) => &[DeviceKind::Mig],
        Config::Share(_) => &[DeviceKind::Share, DeviceKind::MigShare],
        Config::Mps(_) => &[DeviceKind::Mps],
        Config::Vfio(_) => &[DeviceKind::Vfio],
        // Whatever it says nothing about it leaves alone.
        Config::Policy(_) => &DeviceKind::ALL,
    }
}

/// What is wrong with one entry, of a class or a claim.
pub(super) fn decode(
    opaque: Option<&OpaqueDeviceConfiguration>,
    driver: &str,
    path: &str,
) -> Option<Result<Config, String>> {
    let opaque = opaque.filter(|opaque| opaque.driver == driver)?;
    let decoded = config::decode_strict(&opaque.parameters.0);
    Some(decoded.map_err(|error| format!("{path}.opaque.parameters: {error}")))
}

/// More managed memory beyond a share than any node gives. It would be refused there, with the pod waiting.
pub(super) fn beyond(config: &Config, rules: Rules, path: &str) -> Option<String> {
    let Config::Share(share) = config else { return None };
    let (wanted, most) = (share.oversubscribe_bytes(), rules.oversubscribe_at_most);
    (wanted > most).then(|| {
        let (wanted, most) = (Quantity::from_u64(wanted), Quantity::from_u64(most));
        format!(
            "{path}.opaque.parameters: ShareConfig.oversubscribe: {wanted} is more managed memory beyond a share than \
             the nodes give, {most} at most (0: none; chart value kubeletPlugin.oversubscribeAtMost)"
        )
    })
}

/// Configurations of ours that are for a driver of another name, which does not read them.
pub(super) fn of_others(
    entries: &[k8s_openapi::api::resource::v1::DeviceClaimConfiguration],
    driver: &str,
    prefix: &str,
) -> Vec<String> {
    let text = |value: &serde_json::Value, field: &str| {
        value.get(field).and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
    };
    let stray = entries.iter().enumerate().filter_map(|(at, entry)| {
        let opaque = entry.opaque.as_ref().filter(|opaque| opaque.driver != driver)?;
        (text(&opaque.parameters.0, "apiVersion") == API_VERSION).then(|| {
            format!(
                "{prefix}.devices.config[{at}].opaque.driver: {} does not read {}; the driver that does is {driver}",
                opaque.driver,
                text(&opaque.parameters.0, "kind")
            )
        })
    });
    stray.collect()
}

/// Whether a class lets programs run without limits when the limiter cannot work.
fn fails_open(class: &Class, driver: &str) -> bool {
    class.config.iter().any(|entry| {
        let decoded = decode(entry.opaque.as_ref(), driver, "");
        matches!(decoded, Some(Ok(Config::Share(share))) if share.fail_mode == FailMode::Open)
    })
}

/// What is wrong with a claim's configuration, given what its requests can be satisfied with.
pub(super) fn of_claim(
    entries: &[k8s_openapi::api::resource::v1::DeviceClaimConfiguration],
    ways: &[(Wanted<'_>, Option<&Class>, Offer)],
    driver: &str,
    rules: Rules,
    prefix: &str,
) -> Vec<String> {
    let mut errors = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        let path = format!("{prefix}.devices.config[{at}]");
        let config = match decode(entry.opaque.as_ref(), driver, &path) {
            None => continue,
            Some(Err(error)) => {
                errors.push(error);
                continue;
            }
            Some(Ok(config)) => config,
        };
        let named = entry.requests.as_deref().unwrap_or_default();
        let concerned: Vec<_> = ways
            .iter()
            .filter(|(wanted, _, _)| {
                named.is_empty() || named.iter().any(|name| *name == wanted.request || *name == wanted.name())
            })
            .collect();
        errors.extend(misplaced(&config, named, &concerned, &path));
        errors.extend(beyond(&config, rules, &path));
        let open = matches!(&config, Config::Share(share) if share.fail_mode == FailMode::Open);
        if open && !concerned.iter().any(|(_, class, _)| class.is_some_and(|class| fails_open(class, driver)))
        {
            errors.push(format!(
                "{path}.opaque.parameters: ShareConfig.failMode: Open may only be set in a DeviceClass; remove it"
            ));
        }
        if matches!(&config, Config::Policy(policy) if policy.has_strategy()) {
            errors.push(format!(
                "{path}.opaque.parameters: AllocationPolicy.nodeStrategy and gpuStrategy may only be set in a DeviceClass; \
                 remove them"
            ));
        }
    }
    errors
}

/// A configuration for devices of another kind. An entry for several requests concerns those that it
/// fits; it is wrong when it fits none.
fn misplaced(
    config: &Config,
    named: &[String],
    concerned: &[&(Wanted<'_>, Option<&Class>, Offer)],
    path: &str,
) -> Option<String> {
    let fits = |offer: &Offer| {
        // What cannot be told may fit.
        offer.kinds.is_empty() || offer.kinds.iter().any(|kind| kinds(config).contains(kind))
    };
    let wrong = |(wanted, _, offer): &(Wanted<'_>, Option<&Class>, Offer)| {
        let found: Vec<&str> = offer.kinds.iter().map(|kind| kind.as_str()).collect();
        let right: Vec<&str> = kinds(config).iter().map(|kind| kind.as_str()).collect();
        format!(
            "{path}: {} is for devices of type {}, but request {} is for devices of type {}",
            config.kind(),
            right.join(" or "),
            wanted.name(),
            found.join(" or ")
        )
    };
    // The node is as strict: it refuses an entry that names exactly one request of another kind.
    let exact = concerned.iter().find(|(wanted, _, offer)| named.contains(&wanted.name()) && !fits(offer));
    let none = || concerned.first().filter(|_| !concerned.iter().any(|(_, _, offer)| fits(offer)));
    exact.or_else(none).map(|way| wrong(way))
}
