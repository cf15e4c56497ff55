//! Admission in the run: the webhook is served, and called for what the chart's rendered configurations say, and
//! tenants make mistakes that it must answer.

use super::common::{Cluster, connection, eventually, fixtures, reviewed};
use super::dice::Dice;
use super::tenants::{TENANTS, tenant};
use aliquot_allocator::admission::Rules;
use aliquot_allocator::substitution::ANNOTATION;
use aliquot_control_plane::AuditEntry;
use aliquot_controller::http::Health;
use aliquot_controller::metrics::Metrics;
use aliquot_controller::watchdog::Pulse;
use aliquot_controller::webhook::{self, Config, FailurePolicy};
use aliquot_model::names::{LIMITS, SCHEDULING_GATE};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// What the chart renders to.
const MANIFESTS: &str = include_str!("../../../deploy/manifests/aliquot.yaml");
/// The service that the configurations name.
pub const SERVICE: &str = "aliquot-system/aliquot-webhook";
/// Whose writes are not looked at.
const OURS: &str = "request.userInfo.username != 'system:serviceaccount:aliquot-system:aliquot-controller'";
/// The same here, where every controller has a name of its own.
const OURS_HERE: &str = "request.userInfo.username.matches('^c[0-9]+$') == false";
/// How long the API server waits for an answer: here as long as it may, as nobody knows how busy this machine is.
const SOON: &str = "timeoutSeconds: 5";

/// The webhook, as a replica that is never killed serves it.
pub struct Webhook {
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    mistakes: u64,
}

/// Where it will be served.
pub fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("an address");
    (listener, addr)
}

/// A configuration of the chart. A call that is not answered fails here, or what is not called would look fine.
fn configuration<T: DeserializeOwned>(kind: &str) -> T {
    let has = |document: &&str| document.lines().any(|line| line == format!("kind: {kind}"));
    let document = MANIFESTS.split("\n---\n").find(has).expect("a configuration");
    assert!(document.contains(OURS), "{kind} looks at our controller's own writes");
    assert!(document.contains(SOON), "{kind} has a bound on the time of a call");
    let here = document
        .replace(OURS, OURS_HERE)
        .replace("failurePolicy: Ignore", "failurePolicy: Fail")
        .replace(SOON, "timeoutSeconds: 30");
    serde_saphyr::from_str(&here).expect("YAML")
}

impl Webhook {
    /// Serves it and waits until it knows the cluster.
    pub async fn serve(cluster: &Cluster, listener: TcpListener) -> Self {
        let config = Config {
            driver: fixtures::DRIVER.to_owned(),
            namespace: "default".to_owned(),
            secret: "aliquot-webhook-tls".to_owned(),
            configuration: "aliquot".to_owned(),
            names: vec!["aliquot-webhook.aliquot-system.svc".to_owned()],
            substitution: true,
            elastic: true,
            governance: true,
            rules: Rules::default(),
            // A loaded machine checks everything, too.
            review_deadline: Duration::from_secs(60),
            failure: FailurePolicy::Fail,
            budgets: true,
            certificate_life: Duration::from_secs(3600),
            client_ca: None,
            interval: Duration::from_secs(1),
        };
        let (metrics, stop) = (Arc::new(Metrics::new()), CancellationToken::new());
        let health = Health::new(metrics.clone(), Pulse::default());
        let connection = connection(&cluster.handle, "webhook").await;
        // It ends with the run.
        drop(
            webhook::serve(listener, connection, config, metrics.clone(), health, stop.clone())
                .expect("threads"),
        );
        cluster
            .create_global::<MutatingWebhookConfiguration>(&configuration("MutatingWebhookConfiguration"))
            .await;
        cluster
            .create_global::<ValidatingWebhookConfiguration>(&configuration("ValidatingWebhookConfiguration"))
            .await;
        let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &tenant(0));
        // Until somebody answers it is refused as well.
        eventually("the webhook knows boards and classes", async || {
            let request = fixtures::partition("r", "9g.1gb");
            let claim = fixtures::claim("probe", &fixtures::spec(&[request]));
            let claim = in_namespace(claim, &tenant(0));
            match api.create(&PostParams::default(), &claim).await {
                Err(kube::Error::Api(status)) => status.message.contains("has the MIG profile").then_some(()),
                _ => {
                    drop(api.delete("probe", &DeleteParams::default()).await);
                    None
                }
            }
        })
        .await;
        Self { metrics, stop, mistakes: 1 }
    }

    /// A tenant asks for what can never be right, and is told what is wrong with it.
    pub async fn mistake(&mut self, cluster: &Cluster, dice: &mut Dice) {
        let namespace = tenant(usize::try_from(dice.roll(TENANTS as u64)).unwrap());
        let config = json!({"opaque": {"driver": fixtures::DRIVER, "parameters": {
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuConfig", "slice": "Long"}}});
        let mut spec = fixtures::spec(&[fixtures::share("r", "8Gi", "5")]);
        let mut wish = None;
        let words = match dice.roll(5) {
            0 => {
                spec = fixtures::spec(&[fixtures::partition("r", "9g.1gb")]);
                "no board of this cluster has the MIG profile \"9g.1gb\""
            }
            1 => {
                spec = fixtures::spec(&[fixtures::share("r", "200Gi", "5")]);
                "requests[0].exactly.capacity.requests.memory: no device"
            }
            2 => {
                spec["devices"]["config"] = json!([config]);
                "config[0].opaque.parameters: GpuConfig.slice: unknown field `slice`"
            }
            3 => {
                wish = Some("memory=lots");
                "memory \"lots\" is no quantity"
            }
            _ => {
                wish = Some("other:memory=4Gi");
                "names request other, which the claim does not have"
            }
        };
        let mut claim = in_namespace(fixtures::claim("mistake", &spec), &namespace);
        claim.metadata.annotations = wish.map(|wish| [(LIMITS.to_owned(), wish.to_owned())].into());
        let api: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &namespace);
        match reviewed(async || api.create(&PostParams::default(), &claim).await).await {
            Err(kube::Error::Api(status)) if status.message.contains(words) => self.mistakes += 1,
            other => panic!("expected a refusal with {words:?}, got {other:?}"),
        }
    }

    /// Looks at what admission did to pods and claims, and ends it.
    pub fn judge(&self, record: &[AuditEntry]) -> String {
        self.stop.cancel();
        let made = |resource: &str| {
            let of: Vec<&Value> = record
                .iter()
                .filter(|e| {
                    e.origin.resource == resource && e.origin.subresource.is_empty() && e.before.is_none()
                })
                .filter_map(|e| e.after.as_deref())
                .collect();
            of
        };
        let (pods, claims) = (made("pods"), made("resourceclaims"));
        let gated = |pod: &&Value| {
            let gates = pod["spec"]["schedulingGates"].as_array().into_iter().flatten();
            gates.into_iter().any(|gate| gate["name"] == SCHEDULING_GATE)
        };
        let ungated: Vec<&Value> =
            pods.iter().filter(|pod| !gated(pod)).map(|pod| &pod["metadata"]["name"]).collect();
        assert_eq!(ungated, Vec::<&Value>::new(), "pods that were made without the gate");
        let asked = |claim: &&Value| {
            let record = claim["metadata"]["annotations"][ANNOTATION].as_str().unwrap_or_default();
            let list = &claim["spec"]["devices"]["requests"][0]["firstAvailable"];
            record.contains("\"1g.10gb\"") && list.as_array().is_some_and(|list| list.len() > 1)
        };
        let expanded = claims.iter().filter(|claim| asked(claim)).count();
        let lowered = lowered(record);
        let refused = self.metrics.refused.get();
        assert!(refused >= self.mistakes && self.mistakes > 1, "{refused} refused of {}", self.mistakes);
        assert!(expanded > 0, "no claim was expanded");
        format!(
            "{} pods gated, {lowered} of a lower class, {expanded} claims expanded, {refused} refused",
            pods.len()
        )
    }
}

/// How many pods of the tenant with `LowerPriority` got the lower class after its budget was used up.
fn lowered(record: &[AuditEntry]) -> usize {
    let namespace = tenant(0);
    let over = |e: &&AuditEntry| {
        e.origin.resource == "gpubudgets" && e.after.as_ref().is_some_and(|b| b["status"]["state"] == "Over")
    };
    let over = record.iter().filter(|e| e.namespace == namespace).find(over).map_or(u64::MAX, |e| e.revision);
    let later = record.iter().filter(|e| e.namespace == namespace && e.revision > over);
    let made = later.filter(|e| e.origin.resource == "pods" && e.before.is_none());
    let (low, other): (Vec<&Value>, Vec<&Value>) =
        made.filter_map(|e| e.after.as_deref()).partition(|pod| pod["spec"]["priorityClassName"] == "low");
    // The webhook hears of it a moment later; without it one in six would be.
    assert!(
        low.len() + other.len() < 8 || low.len() > other.len(),
        "{} of a lower class, {} not",
        low.len(),
        other.len()
    );
    low.len()
}

fn in_namespace(mut claim: ResourceClaim, namespace: &str) -> ResourceClaim {
    claim.metadata.namespace = Some(namespace.to_owned());
    claim
}

/// A pod as its owner makes it: the gate is the webhook's.
pub fn ungated(mut pod: Pod) -> Pod {
    if let Some(spec) = &mut pod.spec {
        spec.scheduling_gates = None;
    }
    pod
}
