//! Decides who may read a page: a user whom Kubernetes allows to `get` its path, as for the API server's own
//! `/metrics` (TokenReview, then SubjectAccessReview of a non-resource URL).
//!
//! Everybody who reaches the port can cause requests to the API server. So an address has only one question
//! under way at a time, and after a refusal it has to wait, even if it closes the connection. A positive
//! answer is valid for a minute, so the API server is not asked at each request.

use crate::Place;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The time for which a positive answer is valid.
const HOLDS: Duration = Duration::from_secs(60);
/// The most positive answers that are remembered; few clients read.
const REMEMBERED: usize = 1024;
/// The delay of a refusal, during which the address can ask nothing else.
const REFUSED: Duration = Duration::from_secs(1);
/// The time limit for both questions to the API server; it is shorter than the time limit of a whole request.
const REVIEW: Duration = Duration::from_secs(5);

/// A hash of a token and a path, so that the token cannot be read from memory.
type Key = [u8; 32];

/// Asks who may read. Clones share their state.
#[derive(Clone)]
pub struct Guard {
    client: kube::Client,
    known: Arc<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    /// Tokens and paths with a positive answer, and until when it is valid.
    may: HashMap<Key, Instant>,
    /// Addresses with a question under way or a refusal, and until when they can ask nothing else.
    asking: HashMap<IpAddr, Instant>,
}

/// The reason of a refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Refusal {
    /// The request shows no token.
    NoToken,
    /// The address has a question under way already.
    Busy,
    /// The API server does not know the token.
    Unknown,
    /// The user may not read the path.
    MayNot { user: String, path: String },
    /// The API server could not be asked.
    Unanswered,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, why) = match self {
            Self::NoToken => (
                StatusCode::UNAUTHORIZED,
                "show a token of this cluster: Authorization: Bearer, with that of a ServiceAccount"
                    .to_owned(),
            ),
            Self::Busy => (
                StatusCode::TOO_MANY_REQUESTS,
                "another request of this address is being looked at: ask again in a second".to_owned(),
            ),
            Self::Unknown => {
                (StatusCode::UNAUTHORIZED, "the token is not one that this cluster knows".to_owned())
            }
            Self::MayNot { user, path } => (
                StatusCode::FORBIDDEN,
                format!(
                    "{user} may not get {path}: bind the ClusterRole aliquot-metrics-reader to it, or one with verb \
                     get for nonResourceURLs {path}"
                ),
            ),
            Self::Unanswered => (
                StatusCode::SERVICE_UNAVAILABLE,
                "the API server does not say whether the token is good: see the log".to_owned(),
            ),
        };
        let mut response = (status, format!("{why}\n")).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}

impl Guard {
    /// Returns a guard that asks with this client, which needs the right to create TokenReviews and
    /// SubjectAccessReviews.
    pub fn new(client: kube::Client) -> Self {
        Self { client, known: Arc::default() }
    }

    /// Returns an error if the owner of this token may not read a path.
    async fn may_read(&self, token: Option<&str>, path: &str, from: IpAddr) -> Result<(), Refusal> {
        let token = token.ok_or(Refusal::NoToken)?;
        let key = key(token, path);
        if self.known.lock().may_read(key) {
            return Ok(());
        }
        self.known.lock().begin(from)?;
        let answer = match tokio::time::timeout(REVIEW, self.review(token, path)).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no answer in {} s", REVIEW.as_secs())),
        };
        let refusal = match answer {
            Ok(Ok(())) => {
                self.known.lock().allow(key, from);
                return Ok(());
            }
            Ok(Err(refusal)) => refusal,
            Err(error) => {
                tracing::warn!(error, "nobody says who may read metrics");
                Refusal::Unanswered
            }
        };
        self.known.lock().asking.insert(from, Instant::now() + REFUSED);
        tokio::time::sleep(REFUSED).await;
        Err(refusal)
    }

    async fn review(&self, token: &str, path: &str) -> Result<Result<(), Refusal>, kube::Error> {
        let spec = TokenReviewSpec { token: Some(token.to_owned()), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let status = reviews.create(&PostParams::default(), &review).await?.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            return Ok(Err(Refusal::Unknown));
        }
        let user = status.user.unwrap_or_default();
        let named = user.username.clone().unwrap_or_default();
        let accesses: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let access = accesses.create(&PostParams::default(), &access(user, path)).await?;
        let allowed = access.status.is_some_and(|status| status.allowed && status.denied != Some(true));
        Ok(if allowed { Ok(()) } else { Err(Refusal::MayNot { user: named, path: path.to_owned() }) })
    }
}

impl Known {
    fn may_read(&self, key: Key) -> bool {
        self.may.get(&key).is_some_and(|until| Instant::now() < *until)
    }

    /// Notes that an address begins to ask. Unless it may read, only time ends that: closing the connection
    /// does not help.
    fn begin(&mut self, from: IpAddr) -> Result<(), Refusal> {
        let now = Instant::now();
        self.asking.retain(|_, until| now < *until);
        if self.asking.contains_key(&from) {
            return Err(Refusal::Busy);
        }
        self.asking.insert(from, now + REVIEW);
        Ok(())
    }

    fn allow(&mut self, key: Key, from: IpAddr) {
        self.asking.remove(&from);
        let now = Instant::now();
        self.may.retain(|_, until| now < *until);
        if self.may.len() < REMEMBERED {
            self.may.insert(key, now + HOLDS);
        }
    }
}

/// Returns the question whether a user may get a path.
fn access(user: UserInfo, path: &str) -> SubjectAccessReview {
    let non_resource_attributes =
        NonResourceAttributes { path: Some(path.to_owned()), verb: Some("get".to_owned()) };
    let spec = SubjectAccessReviewSpec {
        user: user.username,
        uid: user.uid,
        groups: user.groups,
        extra: user.extra,
        non_resource_attributes: Some(non_resource_attributes),
        ..SubjectAccessReviewSpec::default()
    };
    SubjectAccessReview { spec, ..SubjectAccessReview::default() }
}

fn key(token: &str, path: &str) -> Key {
    Sha256::new().chain_update(path).chain_update([0]).chain_update(token).finalize().into()
}

/// Returns the token that a request shows (RFC 6750).
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// Lets requests through that may read the page. Until then, their connection's place may be given to another
/// peer.
pub(crate) async fn guarded(
    State((guard, place)): State<(Guard, Place)>,
    request: Request,
    next: Next,
) -> Response {
    let token = bearer(request.headers());
    match guard.may_read(token, request.uri().path(), place.peer()).await {
        Ok(()) => {
            place.is_known();
            next.run(request).await
        }
        Err(refusal) => refusal.into_response(),
    }
}

#[cfg(test)]
mod tests;
