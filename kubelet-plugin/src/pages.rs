//! Lists objects of the API, page by page. Each page has its own time limit, and no answer is larger than a
//! page. Fields that nothing reads are not kept.

use aliquot_api::{Kept, Lean, PAGE};
use kube::api::{Api, ListParams};
use kube::core::NamespaceResourceScope;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::time::Duration;
use tokio::time::timeout;

/// The reason why a list could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The API server refused, or cannot be reached.
    #[error("cannot list the {plural} (page {page}): {source}")]
    Api {
        /// The kind of the objects, in the plural.
        plural: String,
        /// The number of the page, from 1 on.
        page: u32,
        /// The reason.
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time.
    #[error("cannot list the {plural} (page {page}): no answer within {waited:?}")]
    Timeout {
        /// The kind of the objects, in the plural.
        plural: String,
        /// The number of the page, from 1 on.
        page: u32,
        /// The time limit.
        waited: Duration,
    },
}

/// Returns all objects as they are now: without a resource version the API server does not answer from its
/// cache. `limit` is the time for one page; `keep` selects what is kept of each object.
///
/// # Errors
/// Fails with [`ListError`] for the first page that cannot be read.
pub async fn all<K>(
    api: &Api<Lean<K>>,
    params: ListParams,
    limit: Duration,
    keep: impl Fn(K) -> Option<K>,
) -> Result<Vec<K>, ListError>
where
    K: Kept<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let plural = || format!("{}s", K::kind(&()));
    let mut found = Vec::new();
    let mut params = params.limit(PAGE);
    for page in 1.. {
        let list = match timeout(limit, api.list(&params)).await {
            Ok(Ok(list)) => list,
            Ok(Err(source)) => {
                return Err(ListError::Api { plural: plural(), page, source: Box::new(source) });
            }
            Err(_) => return Err(ListError::Timeout { plural: plural(), page, waited: limit }),
        };
        found.extend(list.items.into_iter().filter_map(|Lean(object)| keep(object)));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => break,
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{Request, Response};
    use k8s_openapi::api::resource::v1::ResourceClaim;
    use kube::Client;
    use kube::client::Body;
    use serde_json::json;
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    /// A server with 101 claims that fails at page `fails`; what it was asked.
    fn server(fails: usize) -> (Api<Lean<ResourceClaim>>, Arc<Mutex<Vec<String>>>) {
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = Arc::clone(&asked);
        let service = tower::service_fn(move |request: Request<Body>| {
            let query = request.uri().query().unwrap_or_default().to_owned();
            let page = {
                let mut asked = log.lock().unwrap();
                asked.push(query);
                asked.len()
            };
            let items: Vec<_> = (0..if page < 3 { 50 } else { 1 })
                .map(|at| json!({"metadata": {"name": format!("c-{page}-{at}")}, "spec": {}}))
                .collect();
            let token = if page < 3 { format!("from-{page}") } else { String::new() };
            let (code, body) = if page == fails {
                (
                    410,
                    json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old",
                    "status": "Failure"}),
                )
            } else {
                (
                    200,
                    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimList",
                    "metadata": {"continue": token}, "items": items}),
                )
            };
            let answer = Response::builder().status(code).body(Body::from(body.to_string().into_bytes()));
            async move { Ok::<_, Infallible>(answer.unwrap()) }
        });
        (Api::all(Client::new(service, "default")), asked)
    }

    #[tokio::test]
    async fn a_list_is_asked_for_in_pages() {
        let (api, asked) = server(0);
        let params = ListParams::default().fields("spec.nodeName=n1");
        let listed = all(&api, params, Duration::from_secs(60), Some).await.unwrap();
        assert_eq!(listed.len(), 101);
        let asked = asked.lock().unwrap();
        assert_eq!(asked.len(), 3);
        assert!(
            asked.iter().all(|query| query.contains("limit=50") && query.contains("nodeName")),
            "{asked:?}"
        );
        assert!(asked[1].contains("continue=from-1") && asked[2].contains("continue=from-2"), "{asked:?}");
    }

    #[tokio::test]
    async fn an_error_says_what_was_listed_and_how_far_it_came() {
        let (api, _) = server(2);
        let error =
            all(&api, ListParams::default(), Duration::from_secs(60), Some).await.unwrap_err().to_string();
        assert!(error.starts_with("cannot list the ResourceClaims (page 2)"), "{error}");
        assert!(error.contains("too old"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn each_page_has_the_time_limit_of_its_own() {
        let service = tower::service_fn(|_: Request<Body>| {
            std::future::pending::<Result<Response<Body>, Infallible>>()
        });
        let api: Api<Lean<ResourceClaim>> = Api::all(Client::new(service, "default"));
        let error =
            all(&api, ListParams::default(), Duration::from_secs(10), Some).await.unwrap_err().to_string();
        assert_eq!(error, "cannot list the ResourceClaims (page 1): no answer within 10s");
    }
}
