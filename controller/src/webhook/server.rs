//! TLS, HTTP and AdmissionReview around the decision.

use super::admission::{self, KnownClaim, Verdict};
use super::keeper::Current;
use crate::decide::Matcher;
use crate::index::Class;
use crate::metrics::Metrics;
use crate::watch::Pauses;
use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::StreamExt;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// A claim is looked up for at most this long; then it counts as unknown.
const LOOK_UP: Duration = Duration::from_secs(2);

/// What the webhook knows of the cluster.
#[derive(Clone)]
pub(super) struct Knowledge {
    driver: Arc<str>,
    client: Client,
    classes: Store<DeviceClass>,
    templates: Store<ResourceClaimTemplate>,
    matcher: Arc<Mutex<Matcher>>,
}

impl Knowledge {
    /// Watches classes and templates until `stop`.
    pub(super) fn start(client: Client, driver: &str, stop: CancellationToken) -> Self {
        let (classes, writer) = reflector::store();
        let stream = watcher(Api::<DeviceClass>::all(client.clone()), watcher::Config::default());
        let class_stream = stream.backoff(Pauses::default()).reflect(writer).for_each(|_| async {});
        let (templates, writer) = reflector::store();
        let stream = watcher(Api::<ResourceClaimTemplate>::all(client.clone()), watcher::Config::default());
        let template_stream = stream.backoff(Pauses::default()).reflect(writer).for_each(|_| async {});
        tokio::spawn(async move {
            tokio::select! {
                ((), ()) = futures::future::join(class_stream, template_stream) => {}
                () = stop.cancelled() => {}
            }
        });
        Self { driver: driver.into(), client, classes, templates, matcher: Arc::default() }
    }

    async fn claim(&self, namespace: &str, claim: &PodResourceClaim) -> KnownClaim {
        if let Some(template) = &claim.resource_claim_template_name {
            let reference = ObjectRef::<ResourceClaimTemplate>::new(template).within(namespace);
            return match self.templates.get(&reference) {
                Some(template) => KnownClaim::Asks(template.spec.spec.clone()),
                None => KnownClaim::Unknown,
            };
        }
        let Some(name) = &claim.resource_claim_name else { return KnownClaim::Unknown };
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        match tokio::time::timeout(LOOK_UP, api.get_opt(name)).await {
            Ok(Ok(Some(claim)))
                if claim.status.as_ref().is_some_and(|status| status.allocation.is_some()) =>
            {
                KnownClaim::Allocated
            }
            Ok(Ok(Some(claim))) => KnownClaim::Asks(claim.spec),
            _ => KnownClaim::Unknown,
        }
    }

    async fn judge(&self, namespace: &str, pod: &Pod) -> Verdict {
        let mut claims = Vec::new();
        for claim in pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()) {
            claims.push(self.claim(namespace, claim).await);
        }
        let class =
            |name: &str| self.classes.get(&ObjectRef::new(name)).and_then(|class| Class::read(&class));
        admission::needs_gate(pod, &claims, &self.driver, class, &mut self.matcher.lock())
    }
}

#[derive(Clone)]
struct App {
    knowledge: Knowledge,
    metrics: Arc<Metrics>,
}

/// Whatever cannot be understood is let through as it is: the gate is a help, not a rule.
async fn mutate(State(app): State<App>, Json(review): Json<Value>) -> Json<Value> {
    let field = |name: &str| review.get("request").and_then(|request| request.get(name));
    let namespace = field("namespace").and_then(Value::as_str).unwrap_or_default();
    let mut patch = None;
    match serde_json::from_value::<Pod>(field("object").cloned().unwrap_or_default()) {
        Ok(pod) => {
            if app.knowledge.judge(namespace, &pod).await == Verdict::Gate {
                app.metrics.gated.inc();
                patch = Some(STANDARD.encode(admission::patch(&pod).to_string()));
            }
        }
        Err(error) => tracing::debug!(%error, "an admission request without a pod"),
    }
    let uid = field("uid");
    let response = match patch {
        Some(patch) => json!({"uid": uid, "allowed": true, "patchType": "JSONPatch", "patch": patch}),
        None => json!({"uid": uid, "allowed": true}),
    };
    Json(json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}))
}

/// Serves what the keeper has at the moment.
#[derive(Debug)]
struct Resolver(Current);

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().as_ref().map(|certificate| certificate.key.clone())
    }
}

pub(super) async fn serve(
    listener: TcpListener,
    current: Current,
    knowledge: Knowledge,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = match ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions() {
        Ok(builder) => builder,
        Err(error) => {
            tracing::error!(%error, "no TLS: the webhook is not served");
            return;
        }
    };
    let mut config = builder.with_no_client_auth().with_cert_resolver(Arc::new(Resolver(current)));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let router = Router::new().route("/mutate-pods", post(mutate)).with_state(App { knowledge, metrics });
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let (acceptor, router, stop) = (acceptor.clone(), router.clone(), stop.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        result = connection(stream, acceptor, router) => {
                            if let Err(error) = result {
                                tracing::debug!(%peer, %error, "a connection ended");
                            }
                        }
                        () = stop.cancelled() => {}
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    router: Router,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let stream = tokio::time::timeout(Duration::from_secs(10), acceptor.accept(stream)).await??;
    let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
    server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).await
}
