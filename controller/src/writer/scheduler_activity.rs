//! Reads from the API server what schedulers may have under way: see [`aliquot_allocator::handover`].

use super::{Verdict, WriteError, Writer};
use aliquot_allocator::handover::may_be_bound;
use aliquot_api::{Kept, Lean, PAGE};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Instant;

/// Pods that a scheduler may be binding, and the claims of their namespaces, read after the pods.
#[derive(Debug, Default)]
pub struct Pending {
    /// Pods of all namespaces without a node or scheduling gate that have not ended.
    pub pods: Vec<Pod>,
    /// All claims of the namespaces in which such a pod has claims.
    pub claims: Vec<ResourceClaim>,
}

/// What schedulers may have under way, as the API server showed it at the time of the request or later.
#[derive(Debug)]
pub struct Look {
    /// A time before the first request.
    pub began: Instant,
    /// The pods and claims; an error if any page of a list could not be read.
    pub seen: Result<Pending, WriteError>,
}

impl Writer {
    /// Reads what schedulers may have under way; `began` is a time before the call. Nothing is retried: the
    /// next look reads anew.
    pub async fn look(&self, began: Instant) -> Look {
        Look { began, seen: self.pending().await }
    }

    async fn pending(&self) -> Result<Pending, WriteError> {
        let unbound = ListParams::default().fields("spec.nodeName=");
        let mut pods: Vec<Pod> =
            self.list("pods", &Api::all(self.client.clone()), unbound, may_be_bound).await?;
        pods.retain(|pod| pod.metadata.namespace.is_some());
        let with_claims = pods.iter().filter(|pod| {
            pod.spec
                .as_ref()
                .and_then(|spec| spec.resource_claims.as_ref())
                .is_some_and(|all| !all.is_empty())
        });
        let namespaces: BTreeSet<String> = with_claims.filter_map(ResourceExt::namespace).collect();
        let mut claims = Vec::new();
        for namespace in namespaces {
            let api: Api<Lean<ResourceClaim>> = Api::namespaced(self.client.clone(), &namespace);
            claims.extend(self.list("claims", &api, ListParams::default(), |_| true).await?);
        }
        Ok(Pending { pods, claims })
    }

    /// Reads all objects of a list as they are now: without a version the API server does not answer from its
    /// cache.
    async fn list<K>(
        &self,
        what: &str,
        api: &Api<Lean<K>>,
        params: ListParams,
        wanted: impl Fn(&K) -> bool,
    ) -> Result<Vec<K>, WriteError>
    where
        K: Kept + Clone + DeserializeOwned + Debug,
    {
        let mut found = Vec::new();
        let mut page = params.clone().limit(PAGE);
        loop {
            let list = match self.send("list", api.list(&page)).await? {
                Ok(list) => list,
                Err(Verdict::Never(message)) => {
                    return Err(WriteError::Unread { what: what.to_owned(), message });
                }
                // An API server that does not serve the kind, or not yet, shows nothing.
                Err(Verdict::NotFound) => {
                    let message = "the API server does not know it".to_owned();
                    return Err(WriteError::Unread { what: what.to_owned(), message });
                }
                Err(Verdict::Again(last) | Verdict::Unsure(_, last)) => {
                    return Err(WriteError::Exhausted { what: what.to_owned(), attempts: 1, last });
                }
            };
            found.extend(list.items.into_iter().map(|Lean(object)| object).filter(&wanted));
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = params.clone().limit(PAGE).continue_token(&token),
                None => return Ok(found),
            }
        }
    }
}
