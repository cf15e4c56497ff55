//! AdmissionReviews, in and out.

use super::admission::{self, Verdict};
use super::knowledge::Knowledge;
use crate::budget::admission::{Lowered, Watched};
use crate::govern::Judgement;
use crate::hold::Wish;
use crate::metrics::Metrics;
use aliquot_model::names::HOLD_OF;
use axum::Json;
use axum::extract::State;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;

/// What requests are answered from.
#[derive(Clone)]
pub(super) struct App {
    pub(super) knowledge: Knowledge,
    pub(super) metrics: Arc<Metrics>,
    pub(super) governance: bool,
    pub(super) budgets: Option<Watched>,
    pub(super) substitution: bool,
    pub(super) elastic: bool,
}

/// `AdmissionResponse`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    uid: Value,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

impl Response {
    fn allow(patch: Option<&Value>) -> Self {
        let patch = patch.map(|patch| STANDARD.encode(patch.to_string()));
        Self { allowed: true, patch_type: patch.as_ref().map(|_| "JSONPatch"), patch, ..Self::default() }
    }

    fn of(judgement: Judgement) -> Self {
        let Judgement { errors, warnings } = judgement;
        let status = (!errors.is_empty())
            .then(|| json!({"code": 422, "reason": "Invalid", "message": errors.join("; ")}));
        Self { allowed: errors.is_empty(), status, warnings, ..Self::default() }
    }

    fn to(self, review: &Value) -> Json<Value> {
        let uid = review.pointer("/request/uid").cloned().unwrap_or_default();
        let response = Self { uid, ..self };
        Json(json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}))
    }
}

/// Whatever cannot be understood is let through as it is: the API server has checked its form.
pub(super) async fn mutate_pods(State(app): State<App>, Json(review): Json<Value>) -> Json<Value> {
    let mut patch = None;
    let mut warnings = Vec::new();
    if let Some(pod) = object::<Pod>(&review)
        && app.knowledge.judge_pod(namespace(&review), &pod).await == Verdict::Gate
    {
        app.metrics.gated.inc();
        let lowered = app.budgets.as_ref().map(|budgets| budgets.lower(namespace(&review), &pod));
        let Lowered { patch: more, warning } = lowered.unwrap_or_default();
        warnings.extend(warning);
        let mut operations = admission::patch(&pod);
        if let Some(operations) = operations.as_array_mut() {
            operations.extend(more);
            let written = review.pointer("/request/object").map(admission::note_group);
            operations.extend(written.into_iter().flatten());
        }
        patch = Some(operations);
    }
    Response { warnings, ..Response::allow(patch.as_ref()) }.to(&review)
}

/// Claims whose requests a larger profile may satisfy.
pub(super) async fn mutate_claims(State(app): State<App>, Json(review): Json<Value>) -> Json<Value> {
    // A hold claim asks for what was given already.
    let is_hold =
        |claim: &&Value| claim.pointer("/metadata/annotations").is_some_and(|all| all.get(HOLD_OF).is_some());
    let claim = review.pointer("/request/object").filter(|claim| app.substitution && !is_hold(claim));
    let expansion = claim.map(|claim| app.knowledge.expand(namespace(&review), claim)).unwrap_or_default();
    let patch = claim.and_then(|claim| expansion.patch(claim));
    Response::allow(patch.as_ref()).to(&review)
}

/// Wishes of claims for more or less of their shares.
pub(super) async fn validate_limits(State(app): State<App>, Json(review): Json<Value>) -> Json<Value> {
    let claim = object::<ResourceClaim>(&review).filter(|_| app.elastic);
    let errors = claim.map(|claim| app.knowledge.judge_limits(&claim)).unwrap_or_default();
    if !errors.is_empty() {
        app.metrics.refused.inc();
    }
    Response::of(Judgement { errors, warnings: Vec::new() }).to(&review)
}

/// Claims, templates and classes.
pub(super) async fn validate(State(app): State<App>, Json(review): Json<Value>) -> Json<Value> {
    if !app.governance {
        return Response::allow(None).to(&review);
    }
    let kind = review.pointer("/request/kind/kind").and_then(Value::as_str).unwrap_or_default();
    let (knowledge, namespace) = (&app.knowledge, namespace(&review));
    let judgement = match kind {
        // Its spec does not change, and what was wrong with it before must stay changeable.
        "ResourceClaim" if is_update(&review) => object::<ResourceClaim>(&review).map(|claim| {
            let before = at::<ResourceClaim>(&review, "/request/oldObject").unwrap_or_default();
            let mut errors = Wish::read(claim.metadata.annotations.as_ref()).mistakes;
            let known = Wish::read(before.metadata.annotations.as_ref()).mistakes;
            errors.retain(|mistake| !known.contains(mistake));
            Judgement { errors, warnings: Vec::new() }
        }),
        "ResourceClaimTemplate" if is_update(&review) => None,
        "ResourceClaim" => object::<ResourceClaim>(&review).map(|claim| {
            let mut judgement = knowledge.judge_claim(namespace, &claim.spec, "spec");
            judgement.errors.extend(Wish::read(claim.metadata.annotations.as_ref()).mistakes);
            judgement
        }),
        "ResourceClaimTemplate" => object::<ResourceClaimTemplate>(&review).map(|template| {
            let mut judgement = knowledge.judge_claim(namespace, &template.spec.spec, "spec.spec");
            let metadata = template.spec.metadata.as_ref();
            let wish = Wish::read(metadata.and_then(|metadata| metadata.annotations.as_ref()));
            judgement.errors.extend(wish.mistakes.iter().map(|mistake| format!("spec.metadata: {mistake}")));
            judgement
        }),
        "DeviceClass" => object::<DeviceClass>(&review).map(|class| {
            let mut judgement = knowledge.judge_class(&class.spec);
            // Changes of a class are looked at too, and one that is there must stay changeable.
            judgement.warnings.extend(Wish::read(class.metadata.annotations.as_ref()).mistakes);
            judgement
        }),
        _ => None,
    };
    let judgement = judgement.unwrap_or_default();
    if !judgement.errors.is_empty() {
        app.metrics.refused.inc();
        tracing::debug!(namespace, kind, errors = ?judgement.errors, "refused");
    }
    Response::of(judgement).to(&review)
}

fn object<T: DeserializeOwned>(review: &Value) -> Option<T> {
    at(review, "/request/object")
}

fn is_update(review: &Value) -> bool {
    review.pointer("/request/operation").and_then(Value::as_str) == Some("UPDATE")
}

fn at<T: DeserializeOwned>(review: &Value, path: &str) -> Option<T> {
    match serde_json::from_value(review.pointer(path).cloned().unwrap_or_default()) {
        Ok(object) => Some(object),
        Err(error) => {
            tracing::debug!(%error, "an admission request that is not understood");
            None
        }
    }
}

fn namespace(review: &Value) -> &str {
    review.pointer("/request/namespace").and_then(Value::as_str).unwrap_or_default()
}
