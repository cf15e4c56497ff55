//! Checks a claim's wish on admission: what can never be granted is refused, with the reason.

use super::Wish;
use crate::quantity::Quantity;
use crate::snapshot::Snapshot;
use aliquot_model::DeviceName;
use aliquot_model::names::LIMITS;
use k8s_openapi::api::resource::v1::ResourceClaim;

/// The most unknown requests that are reported by name.
const NAMED: usize = 4;

/// Returns everything that is wrong with a claim's wish; empty if nothing is, or if the claim has no wish.
pub fn claim(index: &Snapshot, claim: &ResourceClaim) -> Vec<String> {
    let Some(text) = claim.metadata.annotations.as_ref().and_then(|all| all.get(LIMITS)) else {
        return Vec::new();
    };
    let wish = match Wish::parse(text) {
        Ok(wish) => wish,
        Err(error) => return vec![error.to_string()],
    };
    let made = || claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    let requests: Vec<&str> = made().map(|request| request.name.as_str()).collect();
    let is_there = |named: &str| match named.split_once('/') {
        None => requests.contains(&named),
        Some((main, sub)) => made()
            .filter(|request| request.name == main)
            .any(|request| request.first_available.iter().flatten().any(|known| known.name == sub)),
    };
    let mut errors = Vec::new();
    let named = wish.parts.iter().filter_map(|part| part.request.as_deref());
    for unknown in named.filter(|named| !is_there(named)).take(NAMED) {
        errors.push(format!(
            "annotation {LIMITS} names request {unknown}, which the claim does not have; it has {}",
            requests.join(", ")
        ));
    }
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.iter().flat_map(|allocation| &allocation.devices);
    let ours = results
        .flat_map(|devices| devices.results.iter().flatten())
        .filter(|result| result.driver == index.driver());
    for result in ours {
        let main = result.request.split('/').next().unwrap_or_default();
        let meant = wish
            .parts
            .iter()
            .any(|part| part.request.as_deref().is_none_or(|named| named == result.request || named == main));
        let named = wish.parts.iter().any(|part| {
            part.request.as_deref().is_some_and(|named| named == result.request || named == main)
        });
        let share = DeviceName::parse(&result.device).is_some_and(|name| name.kind().limited());
        if !meant {
            continue;
        }
        if !share && (named || requests.len() == 1) {
            errors.push(format!(
                "annotation {LIMITS}: request {} has device {}, and only shares (class share.aliquot.dev) can \
                 be given more or less",
                result.request, result.device
            ));
        } else if share {
            let asked = wish.of(&result.request, super::Size::ZERO).memory;
            if let Some(most) = memory_of(index, &result.pool, &result.device)
                && Quantity::from_u64(asked) > most
            {
                errors.push(format!(
                    "annotation {LIMITS}: request {} asks for {} of memory, but its device ({}) has {most}",
                    result.request,
                    Quantity::from_u64(asked),
                    result.device
                ));
            }
        }
    }
    errors
}

fn memory_of(index: &Snapshot, pool: &str, device: &str) -> Option<Quantity> {
    let layout = index.pool(index.sym(pool)?)?.layout.as_ref()?;
    let device = layout.devices.get(layout.position(index.sym(device)?)? as usize)?;
    let name = index.find_qualified("memory")?;
    let capacities = &index.shape(device).capacities;
    capacities.iter().find(|(known, _)| *known == name).map(|(_, capacity)| capacity.value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{self, object, share};
    use rstest::rstest;
    use serde_json::json;

    fn index() -> Snapshot {
        let mut index = Snapshot::new(fixtures::DRIVER);
        index.reset_slices(&fixtures::slices_with_mig_shares("n1", 1));
        index
    }

    fn judge(wish: &str, device: Option<&str>) -> Vec<String> {
        let status = device.map(|device| {
            json!({"allocation": {"devices": {"results": [{
                "request": "a", "driver": fixtures::DRIVER, "pool": "gpu.aliquot.dev/n1", "device": device}]}}})
        });
        let made: ResourceClaim = object(json!({
            "metadata": {"name": "c", "namespace": "default", "annotations": {LIMITS: wish}},
            "spec": fixtures::spec(&[share("a", "1Gi", "1")]), "status": status.unwrap_or_else(|| json!({})),
        }));
        claim(&index(), &made)
    }

    #[rstest]
    #[case::fine("memory=2Gi", Some("gpu-0-share"), None)]
    #[case::before_it_is_allocated("a: memory=2Gi", None, None)]
    #[case::malformed("memory=0", None, Some("is not between"))]
    #[case::no_such_request(
        "b: cores=3",
        None,
        Some("names request b, which the claim does not have; it has a")
    )]
    #[case::no_such_alternative(
        "a/large: cores=3",
        None,
        Some("names request a/large, which the claim does not have; it has a")
    )]
    #[case::no_share("memory=2Gi", Some("gpu-0"), Some("only shares"))]
    #[case::share_of_a_partition("memory=2Gi", Some("gpu-0-mig-1g10gb-19-0-share"), None)]
    #[case::more_than_the_partition(
        "memory=11Gi",
        Some("gpu-0-mig-1g10gb-19-0-share"),
        Some("its device (gpu-0-mig-1g10gb-19-0-share) has 10Gi")
    )]
    #[case::more_than_the_gpu(
        "memory=81Gi",
        Some("gpu-0-share"),
        Some("asks for 81Gi of memory, but its device (gpu-0-share) has 80Gi")
    )]
    fn what_can_never_be_is_refused(
        #[case] wish: &str,
        #[case] device: Option<&str>,
        #[case] words: Option<&str>,
    ) {
        let errors = judge(wish, device);
        match words {
            None => assert_eq!(errors, Vec::<String>::new()),
            Some(words) => assert!(errors.len() == 1 && errors[0].contains(words), "{errors:?}"),
        }
    }
}
