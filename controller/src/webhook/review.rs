//! Reads AdmissionReviews and writes their answers.

use super::FailurePolicy;
use super::admission::{self, Verdict};
use super::evaluators::{Time, Unchecked};
use super::origin::{Origin, Peer};
use super::reviewer::Reviewer;
use crate::metrics::Metrics;
use crate::webhook::budgets::{Lowered, Watched};
use aliquot_allocator::admission::Judgement;
use aliquot_allocator::hold::Wish;
use aliquot_allocator::selector;
use aliquot_model::names::HOLD_OF;
use axum::extract::State;
use axum::{Extension, Json};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// The longest expression in a warning, in bytes: the API server cuts warnings off after 256 bytes, and this
/// is what the rest of the text leaves.
const LONGEST_EXPRESSION: usize = 48;

/// Texts for a claim that was not expanded: the result, and what to do about it.
const UNEXPANDED: &str = "no larger profiles are considered for it";
const EXPAND: &str = "if the profile that it asks for is free nowhere, delete and create it again";

/// The state from which requests are answered.
#[derive(Clone)]
pub(super) struct App {
    pub(super) reviewer: Reviewer,
    pub(super) metrics: Arc<Metrics>,
    pub(super) governance: bool,
    pub(super) budgets: Option<Watched>,
    pub(super) substitution: bool,
    pub(super) elastic: bool,
    /// The time limit of a review.
    pub(super) deadline: Duration,
    /// What becomes of objects that could not be checked within the time limit.
    pub(super) failure: FailurePolicy,
}

impl App {
    /// Returns the result of a review; a missing result is counted, and its reason is returned as text.
    fn found<T>(&self, result: Result<T, Unchecked>) -> Result<T, String> {
        result.map_err(|unchecked| {
            self.metrics.unchecked(unchecked.reason().label());
            let limit = self.deadline.as_millis();
            match unchecked {
                Unchecked::Late(None) => {
                    format!("it was not evaluated within {limit} ms (--review-deadline)")
                }
                Unchecked::Late(Some(expression)) => format!(
                    "time was up ({limit} ms) within the CEL expression {}",
                    selector::quoted_within(&expression, LONGEST_EXPRESSION)
                ),
                Unchecked::Crowded => "too many others are being checked".to_owned(),
                Unchecked::OutOfMemory => {
                    "the reviews under way take all the memory that they may".to_owned()
                }
                Unchecked::TooLarge => "it is larger than what a review may hold".to_owned(),
                Unchecked::Unlisted => {
                    "this replica has just started and does not know the classes and devices yet".to_owned()
                }
                Unchecked::Broken => "the check failed, see the controller's log".to_owned(),
            }
        })
    }

    /// Returns the answer about an object, whether it could be checked or not.
    fn answer(&self, judgement: Result<Judgement, Unchecked>) -> Response {
        let why = match self.found(judgement) {
            Ok(judgement) => return Response::of(judgement),
            Err(why) => why,
        };
        match self.failure {
            FailurePolicy::Ignore => Response::warn(format!("accepted without aliquot's checks, as {why}"))
                .with("its events will name mistakes, if it has any; to have it checked now, delete and create it again"),
            FailurePolicy::Fail => Response::unavailable(&format!(
                "aliquot could not check it: {why}; try again, with simpler selectors if it is told so again \
                 (governance.failurePolicy is Fail)"
            )),
        }
    }
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

    fn warn(warning: String) -> Self {
        Self { warnings: vec![warning], ..Self::allow(None) }
    }

    fn with(mut self, warning: &str) -> Self {
        self.warnings.push(warning.to_owned());
        self
    }

    fn unavailable(message: &str) -> Self {
        let status = json!({"code": 503, "reason": "ServiceUnavailable", "message": message});
        Self { status: Some(status), ..Self::default() }
    }

    fn to(self, review: &Value) -> Json<Value> {
        let uid = review.pointer("/request/uid").cloned().unwrap_or_default();
        let response = Self { uid, ..self };
        Json(json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}))
    }
}

/// Returns the answer to a review of which only the UID was read.
pub(super) fn not_read(app: &App, path: &str, uid: &str, why: Unchecked) -> Json<Value> {
    let warn = |what: &str| match app.found::<()>(Err(why.clone())) {
        Ok(()) => Response::allow(None),
        Err(why) => Response::warn(format!("{what}, as {why}")),
    };
    let response = match path {
        "/mutate-pods" => warn("it is left to kube-scheduler without aliquot's scheduling gate")
            .with("if it stays pending, delete and create it again"),
        "/mutate-claims" => warn(UNEXPANDED).with(EXPAND),
        "/validate-limits" => warn("the limits that it asks for were not checked")
            .with("events of the claim say whether they are taken"),
        _ if app.governance => app.answer(Err(why)),
        _ => Response::allow(None),
    };
    response.to(&json!({"request": {"uid": uid}}))
}

/// Answers reviews of pods. An object that cannot be understood is let through unchanged, because the API
/// server has checked its form.
pub(super) async fn mutate_pods(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Json(review): Json<Value>,
) -> Json<Value> {
    let time = Time::from_now(app.deadline);
    let mut patch = None;
    let mut warnings = Vec::new();
    if let Some(pod) = object::<Pod>(&review)
        && app.reviewer.judge_pod(origin(peer, &review), &pod, time).await == Verdict::Gate
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

/// Answers reviews of claims whose requests a larger profile may satisfy. If there is no answer in time, the
/// claim is not expanded.
pub(super) async fn mutate_claims(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Json(review): Json<Value>,
) -> Json<Value> {
    // A hold claim requests what was allocated already.
    let is_hold =
        |claim: &&Value| claim.pointer("/metadata/annotations").is_some_and(|all| all.get(HOLD_OF).is_some());
    let Some(claim) = review.pointer("/request/object").filter(|claim| app.substitution && !is_hold(claim))
    else {
        return Response::allow(None).to(&review);
    };
    let expansion = app.reviewer.expand(origin(peer, &review), claim, Time::from_now(app.deadline)).await;
    match app.found(expansion) {
        Ok(expansion) => Response::allow(expansion.patch(claim).as_ref()),
        Err(why) => Response::warn(format!("{UNEXPANDED}, as {why}")).with(EXPAND),
    }
    .to(&review)
}

/// Answers reviews of the limits that claims request for their shares.
pub(super) async fn validate_limits(State(app): State<App>, Json(review): Json<Value>) -> Json<Value> {
    let claim = object::<ResourceClaim>(&review).filter(|_| app.elastic);
    let errors = claim.map(|claim| app.reviewer.judge_limits(&claim)).unwrap_or_default();
    if !errors.is_empty() {
        app.metrics.refused.inc();
    }
    Response::of(Judgement { errors, warnings: Vec::new() }).to(&review)
}

/// Answers reviews of claims, templates and classes.
pub(super) async fn validate(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Json(review): Json<Value>,
) -> Json<Value> {
    if !app.governance {
        return Response::allow(None).to(&review);
    }
    let kind = review.pointer("/request/kind/kind").and_then(Value::as_str).unwrap_or_default();
    let (reviewer, origin) = (&app.reviewer, origin(peer, &review));
    let time = Time::from_now(app.deadline);
    let judgement = match kind {
        // The spec of a claim does not change, and a claim with an old mistake must stay changeable.
        "ResourceClaim" if is_update(&review) => object::<ResourceClaim>(&review).map(|claim| {
            let before = at::<ResourceClaim>(&review, "/request/oldObject").unwrap_or_default();
            let mut errors = Wish::read(claim.metadata.annotations.as_ref()).mistakes;
            let known = Wish::read(before.metadata.annotations.as_ref()).mistakes;
            errors.retain(|mistake| !known.contains(mistake));
            Ok(Judgement { errors, warnings: Vec::new() })
        }),
        "ResourceClaimTemplate" if is_update(&review) => None,
        "ResourceClaim" => match object::<ResourceClaim>(&review) {
            Some(claim) => {
                let errors = Wish::read(claim.metadata.annotations.as_ref()).mistakes;
                Some(with(errors, reviewer.judge_claim(origin, claim.spec, "spec", time).await))
            }
            None => None,
        },
        "ResourceClaimTemplate" => match object::<ResourceClaimTemplate>(&review) {
            Some(ResourceClaimTemplate { spec, .. }) => {
                let metadata = spec.metadata.as_ref();
                let wish = Wish::read(metadata.and_then(|metadata| metadata.annotations.as_ref()));
                let errors =
                    wish.mistakes.iter().map(|mistake| format!("spec.metadata: {mistake}")).collect();
                Some(with(errors, reviewer.judge_claim(origin, spec.spec, "spec.spec", time).await))
            }
            None => None,
        },
        "DeviceClass" => match object::<DeviceClass>(&review) {
            Some(class) => {
                let judgement = reviewer.judge_class(origin, class.spec, time).await;
                // Changes of a class are checked too, and an existing class must stay changeable.
                let mistakes = Wish::read(class.metadata.annotations.as_ref()).mistakes;
                Some(judgement.map(|mut judgement| {
                    judgement.warnings.extend(mistakes);
                    judgement
                }))
            }
            None => None,
        },
        _ => None,
    };
    let judgement = judgement.unwrap_or_else(|| Ok(Judgement::default()));
    if let Ok(Judgement { errors, .. }) = &judgement
        && !errors.is_empty()
    {
        app.metrics.refused.inc();
        tracing::debug!(origin.namespace, kind, ?errors, "refused");
    }
    app.answer(judgement).to(&review)
}

/// Adds mistakes to a judgement; they count even if the rest could not be checked.
fn with(mistakes: Vec<String>, judgement: Result<Judgement, Unchecked>) -> Result<Judgement, Unchecked> {
    match judgement {
        Ok(mut judgement) => {
            judgement.errors.extend(mistakes);
            Ok(judgement)
        }
        Err(_) if !mistakes.is_empty() => Ok(Judgement { errors: mistakes, warnings: Vec::new() }),
        Err(unchecked) => Err(unchecked),
    }
}

fn object<T: DeserializeOwned>(review: &Value) -> Option<T> {
    at(review, "/request/object")
}

fn is_update(review: &Value) -> bool {
    review.pointer("/request/operation").and_then(Value::as_str) == Some("UPDATE")
}

fn at<T: DeserializeOwned>(review: &Value, path: &str) -> Option<T> {
    match T::deserialize(review.pointer(path).unwrap_or(&Value::Null)) {
        Ok(object) => Some(object),
        Err(error) => {
            tracing::debug!(%error, "an admission request that is not understood");
            None
        }
    }
}

fn origin(peer: Peer, review: &Value) -> Origin<'_> {
    Origin { peer, namespace: namespace(review) }
}

fn namespace(review: &Value) -> &str {
    review.pointer("/request/namespace").and_then(Value::as_str).unwrap_or_default()
}
