//! Opaque configuration as users write it: decoded strictly, and accepted only where it can apply.

use super::least::{Offer, Wanted};
use super::rules::Rules;
use crate::snapshot::Class;
use aliquot_model::config::{self, Config, FailMode};
use aliquot_model::names::API_VERSION;
use aliquot_model::{DeviceKind, Quantity};
use k8s_openapi::api::resource::v1::OpaqueDeviceConfiguration;

/// Returns the kinds of device that a configuration applies to.
const fn kinds(config: &Config) -> &'static [DeviceKind] {
    match config {
        Config::Gpu(_) => &[DeviceKind::Gpu, DeviceKind::TimeSlice],
        Config::Mig(_) => &[DeviceKind::Mig],
        Config::Share(_) => &[DeviceKind::Share, DeviceKind::MigShare],
        Config::Mps(_) => &[DeviceKind::Mps],
        Config::Vfio(_) => &[DeviceKind::Vfio],
        // A policy does not affect kinds that it says nothing about.
        Config::Policy(_) => &DeviceKind::ALL,
    }
}

/// Decodes one entry of a class or a claim; `None` if it is for another driver.
pub(super) fn decode(
    opaque: Option<&OpaqueDeviceConfiguration>,
    driver: &str,
    path: &str,
) -> Option<Result<Config, String>> {
    let opaque = opaque.filter(|opaque| opaque.driver == driver)?;
    let decoded = config::decode_strict(&opaque.parameters.0);
    Some(decoded.map_err(|error| format!("{path}.opaque.parameters: {error}")))
}

/// Returns an error if a share asks for more managed memory beyond its size than any node gives. The node
/// would refuse it while the pod waits.
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

/// Returns warnings about configurations of this driver's kinds that name another driver, which does not read
/// them.
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

/// Returns true if a class lets programs run without limits when the limiter cannot work.
fn fails_open(class: &Class, driver: &str) -> bool {
    class.config.iter().any(|entry| {
        let decoded = decode(entry.opaque.as_ref(), driver, "");
        matches!(decoded, Some(Ok(Config::Share(share))) if share.fail_mode == FailMode::Open)
    })
}

/// Returns the errors in a claim's configuration, given what its requests can be satisfied with.
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

/// Returns an error if a configuration is for devices of another kind. An entry for several requests applies
/// to those that it fits; it is wrong if it fits none.
fn misplaced(
    config: &Config,
    named: &[String],
    concerned: &[&(Wanted<'_>, Option<&Class>, Offer)],
    path: &str,
) -> Option<String> {
    let fits = |offer: &Offer| {
        // If the kinds cannot be told, the configuration may fit.
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
    // The node is as strict: it refuses an entry that names exactly one request and that request is of
    // another kind.
    let exact = concerned.iter().find(|(wanted, _, offer)| named.contains(&wanted.name()) && !fits(offer));
    let none = || concerned.first().filter(|_| !concerned.iter().any(|(_, _, offer)| fits(offer)));
    exact.or_else(none).map(|way| wrong(way))
}
