//! Finds the pods of the node that have devices from other drivers, as the kubelet reports on its
//! pod-resources socket (KEP-606). Pods keep these devices when the driver that gave them out has ended.

use super::PublishError;
use aliquot_proto::podresources::v1::pod_resources_lister_client::PodResourcesListerClient;
use aliquot_proto::podresources::v1::{ListPodResourcesRequest, PodResources};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use tonic::transport::Endpoint;

/// The largest answer of the kubelet, in bytes; its own clients accept as much.
const MOST: usize = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(10);
/// The number of pods that are named.
const NAMED: usize = 3;

/// Describes each pod that has devices of `theirs`. `theirs` is called with names of extended resources and
/// of DRA drivers. The result is empty if the directory of the kubelet's socket does not exist, as on a
/// simulated node. `own_pod` is the namespace and name of a pod that runs for certain.
///
/// # Errors
/// Fails if the kubelet does not answer, or does not know its pods yet.
pub(super) async fn holders(
    socket: &Path,
    own_pod: Option<&(String, String)>,
    theirs: impl Fn(&str) -> bool,
) -> Result<Vec<String>, PublishError> {
    if socket.parent().is_some_and(|dir| !dir.exists()) {
        return Ok(Vec::new());
    }
    let failed = |source| PublishError::PodResources { socket: socket.to_owned(), source };
    let pods = list(socket).await.map_err(failed)?;
    let is_known = |(namespace, name): &(String, String)| {
        pods.iter().any(|pod| pod.namespace == *namespace && pod.name == *name)
    };
    if own_pod.is_some_and(|own| !is_known(own)) {
        return Err(failed("it does not know our own pod yet".into()));
    }
    let mut found: Vec<String> = pods.iter().filter_map(|pod| held(pod, &theirs)).collect();
    if let Some(others) = found.len().checked_sub(NAMED).filter(|others| *others > 0) {
        found.truncate(NAMED);
        found.push(format!("{others} more pods"));
    }
    Ok(found)
}

async fn list(socket: &Path) -> Result<Vec<PodResources>, Box<dyn std::error::Error + Send + Sync>> {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
    let channel = endpoint.connect_timeout(PATIENCE).timeout(PATIENCE).connect().await?;
    let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(MOST);
    Ok(client.list(ListPodResourcesRequest {}).await?.into_inner().pod_resources)
}

/// Describes what a pod has of `theirs`.
fn held(pod: &PodResources, theirs: &impl Fn(&str) -> bool) -> Option<String> {
    let mut has = BTreeMap::<&str, usize>::new();
    for container in &pod.containers {
        for devices in &container.devices {
            *has.entry(&devices.resource_name).or_default() += devices.device_ids.len();
        }
        for claimed in container.dynamic_resources.iter().flat_map(|claim| &claim.claim_resources) {
            *has.entry(&claimed.driver_name).or_default() += 1;
        }
    }
    let has: Vec<_> = has
        .into_iter()
        .filter(|(name, _)| theirs(name))
        .map(|(name, count)| format!("{name}: {count}"))
        .collect();
    (!has.is_empty()).then(|| format!("pod {}/{} still has {}", pod.namespace, pod.name, has.join(", ")))
}
