//! `aliquot explain`: reads what the controller reads, decides again, and says why. Nothing is written.

use crate::args::{ExplainArgs, ExplainKind};
use crate::client::{check_namespace, connect};
use crate::snapshot;
use aliquot_controller::decide::{Matcher, Options};
use aliquot_controller::explain;
use aliquot_controller::index::{Index, ObjectKey, Pod};
use anyhow::{Context, Result, bail};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, ListParams};
use serde_json::json;
use std::time::{Duration, Instant};

/// Longest search.
const PATIENCE: Duration = Duration::from_secs(20);
/// Events that are shown, at most.
const EVENTS: usize = 8;
const CONTROLLER: &str = "aliquot-controller";
/// Name of the pod that stands in for the first one of a claim that no pod uses.
const STAND_IN: &str = "aliquot-explain";

/// Runs it.
///
/// # Errors
/// If the API does not answer, or the object does not exist.
pub(crate) async fn run(args: ExplainArgs) -> Result<()> {
    let client = connect(args.kubeconfig.as_deref()).await?;
    let namespace = args.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
    check_namespace(&client, &namespace).await?;
    let mut index = snapshot::gather(&client, &args.driver_name).await.context("cannot read the cluster")?;
    let key = ObjectKey::new(&namespace, &args.name);
    let pod = match args.kind {
        ExplainKind::Pod => match index.pod(&key) {
            Some(pod) => pod.clone(),
            None => bail!("there is no pod {key} with claims"),
        },
        ExplainKind::Claim => user_of(&mut index, &key)?,
    };
    if *pod.key.name == *STAND_IN {
        say!("no pod uses claim {key}; explained as for a pod that has nothing else\n");
    } else {
        say!("pod {}, priority {}", pod.key, pod.priority);
    }
    let options = Options { strategy: args.strategy.into() };
    let until = Instant::now() + PATIENCE;
    let wall = Timestamp::now().as_second();
    let explanation = explain::explain(&mut index, &mut Matcher::new(), &pod, options, wall, &mut || {
        Instant::now() >= until
    });
    say!("{}", explanation.to_string().trim_end_matches('\n'));
    explain::kept(&index, &pod).iter().for_each(|line| say!("{line}"));
    let events = events(&client, &pod, &args).await.context("cannot read events")?;
    if !events.is_empty() {
        say!("the controller said:");
        events.iter().for_each(|line| say!("  {line}"));
    }
    Ok(())
}

/// A pod that uses the claim: the one that it is reserved for, any other, or a stand-in.
fn user_of(index: &mut Index, key: &ObjectKey) -> Result<Pod> {
    let Some(claim) = index.claim(key).cloned() else { bail!("there is no ResourceClaim {key}") };
    let mut pods: Vec<&Pod> = index.pods_of_claim(key).filter(|pod| !pod.terminal).collect();
    pods.sort_by_key(|pod| (!claim.is_reserved_for(pod), pod.created, pod.key.clone()));
    if let Some(pod) = pods.first() {
        return Ok((*pod).clone());
    }
    let uid = claim.owner_pod.as_deref().unwrap_or(STAND_IN);
    let pod = json!({
        "metadata": {"name": STAND_IN, "namespace": &*key.namespace, "uid": uid},
        "spec": {"containers": [], "resourceClaims": [{"name": "claim", "resourceClaimName": &*key.name}]},
    });
    index.apply_pod(&serde_json::from_value(pod).context("the stand-in")?);
    let stand_in = ObjectKey::new(&key.namespace, STAND_IN);
    index.pod(&stand_in).cloned().context("the stand-in is not known")
}

/// What the controller said of the pod and its claims, oldest first.
async fn events(client: &Client, pod: &Pod, args: &ExplainArgs) -> Result<Vec<String>> {
    let api: Api<Event> = Api::namespaced(client.clone(), &pod.key.namespace);
    let mut names: Vec<String> = pod.claim_keys().map(|key| key.name.to_string()).collect();
    names.extend([pod.key.name.to_string(), args.name.clone()]);
    let events = api.list(&ListParams::default()).await?.items;
    let mut found: Vec<_> = events
        .into_iter()
        .filter(|event| event.reporting_controller.as_deref() == Some(CONTROLLER))
        .filter_map(|event| {
            let name = event.regarding?.name.filter(|name| names.contains(name))?;
            let time = event.event_time.map(|time| time.0.to_string()).unwrap_or_default();
            let seconds = time.split('.').next().unwrap_or_default().to_owned();
            Some((time, format!("{seconds} {name} {}: {}", event.reason?, event.note.unwrap_or_default())))
        })
        .collect();
    found.sort();
    let skipped = found.len().saturating_sub(EVENTS);
    Ok(found.into_iter().skip(skipped).map(|(_, line)| line).collect())
}
