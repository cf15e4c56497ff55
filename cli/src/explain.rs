//! `aliquot explain`: reads what the controller reads, decides again, and says why. Nothing is written.
//!
//! A user who may not read the whole cluster is shown what the rights in the object's namespace show, and
//! told what is left out.

mod events;
mod object;
mod strategy;
#[cfg(test)]
mod tests;

use crate::args::{ExplainArgs, Kind, Target};
use crate::client::{check_namespace, connect};
use crate::output::written;
use crate::rights::Right;
use crate::snapshot::{self, Gathered};
use aliquot_allocator::explain::{self, Explanation, State};
use aliquot_allocator::schedule::{Matcher, Options};
use aliquot_allocator::snapshot::{ObjectKey, Pod, Snapshot};
use anyhow::{Context, Result, bail};
use events::Said;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use object::Object;
use serde_json::{Value, json};
use std::fmt::{Display, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use strategy::Known;

/// Time limit of the search.
const PATIENCE: Duration = Duration::from_secs(20);
/// The most events that are shown.
const EVENTS: usize = 8;
/// The name of the pod that stands in for the first pod of a claim without pods.
const STAND_IN: &str = "aliquot-explain";

/// The result for scripts, as exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The object has its devices, or can have them.
    Well,
    /// The object cannot be placed now.
    NotNow,
    /// The object has no devices, and rights are missing to say more.
    Unknown,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Well => Self::SUCCESS,
            Verdict::NotNow => Self::from(3),
            Verdict::Unknown => Self::from(4),
        }
    }
}

/// The answer, as text and as JSON.
struct Answer {
    text: String,
    json: Value,
    verdict: Verdict,
}

/// Runs `aliquot explain`.
///
/// # Errors
/// If the API server does not answer, or the object does not exist or may not be read.
pub(crate) async fn run(args: ExplainArgs) -> Result<ExitCode> {
    let target = args.target().map_err(anyhow::Error::msg)?;
    let client = connect(&args.cluster).await?;
    let answer = answer(&client, &args, &target).await?;
    match args.output.format() {
        Some(format) => say!("{}", written(&answer.json, format)?),
        None => say!("{}", answer.text.trim_end()),
    }
    Ok(answer.verdict.into())
}

async fn answer(client: &Client, args: &ExplainArgs, target: &Target) -> Result<Answer> {
    let namespace = args.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
    check_namespace(client, &namespace).await?;
    let mut object = Object::read(client, &namespace, target).await?;
    if object.asks_for_nothing() {
        let words = format!(
            "pod {namespace}/{} asks for no devices: it has no spec.resourceClaims. A pod gets devices by naming a \
             ResourceClaim or a ResourceClaimTemplate there",
            target.name
        );
        let json = json!({"state": "NotOurs", "namespace": namespace, "message": words});
        return Ok(Answer { text: words, json, verdict: Verdict::Well });
    }
    let gathered =
        snapshot::gather_readable(client, &args.driver_name).await.context("cannot read the cluster")?;
    if gathered.missing.is_empty() {
        judged(client, args, target, &object, gathered).await
    } else {
        object.read_quotas(client).await;
        let said = events::read(client, &namespace, &object.names(), &object.uids()).await?;
        Ok(seen(target, &object, said, &gathered.missing))
    }
}

/// Returns what the rights of a tenant show, and what is left out.
fn seen(target: &Target, object: &Object, said: Result<Vec<Said>, Right>, cluster: &[Right]) -> Answer {
    let mut here = object.missing.clone();
    let said = said.unwrap_or_else(|right| {
        here.push(right);
        Vec::new()
    });
    let (state, verdict) = match said.last() {
        _ if object.is_allocated() => ("Allocated", Verdict::Well),
        Some(last) if last.is_refusal() => ("DoesNotFit", Verdict::NotNow),
        _ => ("Unknown", Verdict::Unknown),
    };
    let mut text = String::new();
    add_lines(&mut text, "", object.lines());
    write_said(&mut text, &said);
    let _ = writeln!(text, "left out, because rights are missing:");
    add_lines(&mut text, "  what takes the right to ", &here);
    let what = match verdict {
        Verdict::Well => "how its node compares with others",
        _ => "on which nodes it fits, why not on the others, and what would have to end",
    };
    let _ = writeln!(text, "  {what}: this takes the right to");
    add_lines(&mut text, "    ", cluster);
    let command = format!("aliquot explain {}/{} -n {}", target.kind, target.name, object.namespace);
    if let Some(right) = here.iter().chain(cluster).next() {
        let _ = writeln!(text, "`{}` asks for one; whoever has them can run `{command}`", right.question());
    }
    let rights: Vec<Value> = here
        .iter()
        .chain(cluster)
        .map(|right| json!({"verb": right.verb, "resource": right.resource, "namespace": right.namespace}))
        .collect();
    let mut json = object.to_json();
    put(&mut json, "state", json!(state));
    put(&mut json, "namespace", json!(object.namespace));
    put(&mut json, "events", said.iter().map(Said::to_json).collect());
    put(&mut json, "missingRights", Value::Array(rights));
    Answer { text, json, verdict }
}

/// Returns the answer after making the decision again.
async fn judged(
    client: &Client,
    args: &ExplainArgs,
    target: &Target,
    object: &Object,
    gathered: Gathered,
) -> Result<Answer> {
    let Gathered { mut index, mut lesser, .. } = gathered;
    let key = ObjectKey::new(&object.namespace, &target.name);
    let pod = match target.kind {
        Kind::Pod => match index.pod(&key) {
            Some(pod) => pod.clone(),
            None => bail!("pod {key} is gone"),
        },
        Kind::Claim => user_of(&mut index, &key)?,
    };
    let known = strategy::find(client, &args.driver_name, args.strategy).await;
    let options = Options { strategy: known.strategy };
    let until = Instant::now() + PATIENCE;
    let wall = Timestamp::now().as_second();
    let explanation = explain::explain(&mut index, &mut Matcher::new(), &pod, options, wall, &mut || {
        Instant::now() >= until
    });
    let mut names: Vec<String> = pod.claim_keys().map(|key| key.name.to_string()).collect();
    names.extend([pod.key.name.to_string(), target.name.clone()]);
    let claims = pod.claim_keys().filter_map(|key| index.claim(&key).map(|claim| claim.uid.to_string()));
    let uids: Vec<String> = claims.chain([pod.uid.to_string()]).chain(object.uids()).collect();
    let said = events::read(client, &object.namespace, &names, &uids).await?.unwrap_or_else(|right| {
        lesser.push(right);
        Vec::new()
    });
    let stands_in = *pod.key.name == *STAND_IN;
    let mut text = String::new();
    let _ = match stands_in {
        true => writeln!(text, "no pod uses claim {key}; explained as for a pod that has nothing else\n"),
        false => writeln!(text, "pod {}, priority {}", pod.key, pod.priority),
    };
    text.push_str(&explanation.to_string());
    if let Some(line) = judged_by(&explanation, &known) {
        let _ = writeln!(text, "{line}");
    }
    let held_back = match explanation.state() {
        State::Fits => {
            let gates = match stands_in {
                true => None,
                false => object.other_gates(client, &pod.key.name).await?,
            };
            held_back(gates, &said)
        }
        _ => Vec::new(),
    };
    add_lines(&mut text, "", &held_back);
    let kept = explain::kept(&index, &pod);
    add_lines(&mut text, "", &kept);
    write_said(&mut text, &said);
    if !lesser.is_empty() {
        let _ = writeln!(text, "left out, because rights are missing:");
        add_lines(&mut text, "  what takes the right to ", &lesser);
    }
    let mut json = explanation.to_json();
    put(&mut json, "namespace", json!(object.namespace));
    put(&mut json, "pod", if stands_in { Value::Null } else { json!(&*pod.key.name) });
    put(
        &mut json,
        "strategy",
        json!({"words": strategy::words(explanation.strategy().unwrap_or(known.strategy)), "source": known.source}),
    );
    put(&mut json, "heldBack", json!(held_back));
    put(&mut json, "kept", json!(kept));
    put(&mut json, "events", said.iter().map(Said::to_json).collect());
    let well = explanation.state().is_well() && held_back.is_empty();
    let verdict = if well { Verdict::Well } else { Verdict::NotNow };
    Ok(Answer { text, json, verdict })
}

/// Returns why a pod that fits still gets nothing: a quota or budget refuses it, or it waits for another
/// scheduling gate.
fn held_back(gates: Option<String>, said: &[Said]) -> Vec<String> {
    let refused = said.last().filter(|last| last.is_forbidden());
    let refused =
        refused.map(|last| format!("there is room, but the controller refuses it: {}", last.words()));
    gates.into_iter().chain(refused).collect()
}

/// Returns the strategy by which nodes were compared; `None` if they were not.
fn judged_by(explanation: &Explanation, known: &Known) -> Option<String> {
    let used = explanation.strategy()?;
    let words = strategy::words(used);
    Some(if used == known.strategy {
        format!("strategy: {words} ({})", known.source)
    } else {
        format!("strategy: {words} (as its DeviceClass says)")
    })
}

fn write_said(text: &mut String, said: &[Said]) {
    if !said.is_empty() {
        text.push_str("the controller said:\n");
        add_lines(text, "  ", said.iter().map(Said::line));
    }
}

fn add_lines(text: &mut String, before: &str, lines: impl IntoIterator<Item = impl Display>) {
    for line in lines {
        let _ = writeln!(text, "{before}{line}");
    }
}

fn put(json: &mut Value, name: &str, value: Value) {
    if let Some(fields) = json.as_object_mut() {
        fields.insert(name.to_owned(), value);
    }
}

/// Returns a pod that uses the claim: the one for which it is reserved, any other, or a stand-in.
fn user_of(index: &mut Snapshot, key: &ObjectKey) -> Result<Pod> {
    let Some(claim) = index.claim(key).cloned() else { bail!("ResourceClaim {key} is gone") };
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
