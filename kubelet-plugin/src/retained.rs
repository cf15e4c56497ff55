//! Compares claims that are kept without a pod with the API, to decide whether their GPU instances stay.

use crate::claim::{self, Request, still_allocated};
use crate::ledger::Record;
use crate::prepare::{Node, UnprepareError};
use aliquot_api::Lean;
use aliquot_model::hold::Hold;
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

const API_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of a parked claim in the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeping {
    /// The claim is kept, until this Unix time in seconds if there is one.
    Kept(Option<i64>),
    /// The claim is gone, has other devices or none, or is not kept any more.
    Ended,
    /// The API could not be asked.
    Unknown,
}

/// Evaluates a parked claim's object in the API. `object` is `None` if the claim is gone.
pub fn keeping(object: Option<&ResourceClaim>, driver: &str, record: &Record) -> Keeping {
    let same = object.filter(|object| object.metadata.uid.as_deref() == Some(&record.claim.uid));
    let allocated = same.filter(|object| still_allocated(object, driver, &record.keys()));
    match allocated.and_then(claim::hold) {
        None => Keeping::Ended,
        Some(Hold::InUse) => Keeping::Kept(None),
        Some(Hold::Until(second)) => Keeping::Kept(Some(second)),
    }
}

/// Asks the store itself, not a cache, because something is destroyed on the answer.
async fn ask(client: &Client, driver: &str, record: &Record) -> Keeping {
    let api: Api<Lean<ResourceClaim>> = Api::namespaced(client.clone(), &record.claim.namespace);
    match timeout(API_TIMEOUT, api.get_opt(&record.claim.name)).await {
        Ok(Ok(object)) => keeping(object.as_ref().map(|Lean(object)| object), driver, record),
        Ok(Err(error)) => {
            tracing::debug!(claim.uid = %record.claim.uid, %error, "cannot ask for the claim");
            Keeping::Unknown
        }
        Err(_) => Keeping::Unknown,
    }
}

async fn on_node<T: Send + 'static>(
    node: &Arc<Node>,
    work: impl FnOnce(&Node) -> Result<T, UnprepareError> + Send + 'static,
) -> Option<T> {
    let node = Arc::clone(node);
    match tokio::task::spawn_blocking(move || work(&node)).await {
        Ok(Ok(value)) => Some(value),
        Ok(Err(error)) => {
            tracing::warn!(%error, "a claim that is kept without a pod stays as it is");
            None
        }
        Err(error) => {
            tracing::error!(%error, "work on a claim that is kept without a pod ended abnormally");
            None
        }
    }
}

/// Ends a parked claim if its time is over or the API does not keep it. Returns true if the claim was ended.
pub async fn review(
    node: &Arc<Node>,
    client: &Client,
    driver: &str,
    record: &Record,
    now: Timestamp,
) -> bool {
    let Some(until) = record.parked_until() else { return false };
    let uid = record.claim.uid.clone();
    let why = if now.as_second() >= until {
        "its time without a pod is over"
    } else {
        match ask(client, driver, record).await {
            Keeping::Unknown | Keeping::Kept(None) => return false,
            Keeping::Kept(Some(second)) if second == until => return false,
            Keeping::Kept(Some(second)) => {
                on_node(node, move |node| Ok(node.note_end(&uid, second)?)).await;
                return false;
            }
            Keeping::Ended => "nobody keeps it any more",
        }
    };
    let ended = on_node(node, move |node| node.release_parked(&uid)).await.unwrap_or(false);
    if ended {
        tracing::info!(claim = %record.claim, why, "removed the GPU instances of a claim without a pod");
    }
    ended
}

/// Ends parked claims beside the devices of a claim that met a conflict. Returns true if any was ended.
pub async fn end_in_the_way(node: &Arc<Node>, client: &Client, driver: &str, request: &Request) -> bool {
    let wanted = request.clone();
    let beside = on_node(node, move |node| Ok(node.parked_beside(&wanted)?)).await.unwrap_or_default();
    let mut any = false;
    for record in beside {
        any |= review(node, client, driver, &record, Timestamp::now()).await;
    }
    any
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Device, Held, Retention, State};
    use crate::testing;
    use aliquot_model::{DriverCapabilities, GpuUuid, Placement};
    use rstest::rstest;
    use serde_json::{Value, json};

    fn record() -> Record {
        Record {
            claim: testing::claim("a"),
            state: State::Completed,
            boot_id: "boot".into(),
            since: 10,
            devices: vec![Device {
                result_id: "a-1".into(),
                request: "r".into(),
                pool: testing::POOL.into(),
                device: "gpu-0-mig-1g10gb-19-6".into(),
                share_id: None,
                gpu: GpuUuid::parse("GPU-00").unwrap(),
                held: Some(Held::Partition(Placement::new(6, 1))),
                partition: None,
                consumed: None,
                share: None,
                time_slice: None,
                mps: None,
                driver_capabilities: DriverCapabilities::default(),
                passed: None,
            }],
            indexed_env: false,
            metadata: None,
            charge: None,
            ended: None,
            retention: Some(Retention::Parked { until: 100 }),
            confirmed: true,
            steps: Vec::new(),
            numbers: Default::default(),
            extra: Default::default(),
        }
    }

    fn object(uid: &str, device: &str, consumers: Value) -> ResourceClaim {
        serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": "claim-a", "uid": uid},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": [{
                    "request": "r", "driver": testing::DRIVER, "pool": testing::POOL, "device": device,
                }]}},
                "reservedFor": consumers,
            },
        }))
        .unwrap()
    }

    const OURS: &str = "gpu-0-mig-1g10gb-19-6";

    fn entry(name: &str) -> Value {
        json!([{"apiGroup": "aliquot.dev", "resource": "holds", "name": name, "uid": "a"}])
    }

    #[rstest]
    #[case::kept(Some(object("a", OURS, entry("until-90"))), Keeping::Kept(Some(90)))]
    #[case::used_again(Some(object("a", OURS, entry("in-use"))), Keeping::Kept(None))]
    #[case::gone(None, Keeping::Ended)]
    #[case::another_of_its_name(Some(object("b", OURS, entry("until-90"))), Keeping::Ended)]
    #[case::allocated_otherwise(Some(object("a", "gpu-1", entry("until-90"))), Keeping::Ended)]
    #[case::not_kept_any_more(Some(object("a", OURS, json!([]))), Keeping::Ended)]
    #[case::kept_by_somebody_else(
        Some(object("a", OURS, json!([{"resource": "pods", "name": "until-90", "uid": "p"}]))), Keeping::Ended)]
    fn instances_stay_while_the_api_keeps_the_claim(
        #[case] found: Option<ResourceClaim>,
        #[case] want: Keeping,
    ) {
        let claim = testing::claim("a");
        let found = found.map(|mut object| {
            if object.metadata.uid.as_deref() == Some("a") {
                object.metadata.uid = Some(claim.uid);
            }
            object
        });
        assert_eq!(keeping(found.as_ref(), testing::DRIVER, &record()), want);
    }
}
