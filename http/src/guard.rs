//! Who may read a page: whom Kubernetes lets `get` its path, as the API server's own `/metrics` (TokenReview, then
//! SubjectAccessReview of a non-resource URL).
//!
//! Whoever reaches the port can make us ask the API server. So an address has one question under way at a time, and
//! waits for a refusal, also when it breaks the connection off; who may read is asked for once a minute and not at each
//! request.

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

/// For how long an answer holds that somebody may read.
const HOLDS: Duration = Duration::from_secs(60);
/// How many such answers are remembered; few read.
const REMEMBERED: usize = 1024;
/// How long a refused one waits for his answer, in which his address asks nothing else.
const REFUSED: Duration = Duration::from_secs(1);
/// How long the API server may take for both questions; less than a request may take in all.
const REVIEW: Duration = Duration::from_secs(5);

/// A token and a path, not to be read out of memory.
type Key = [u8; 32];

/// Asks who may read. Clones are the same one.
#[derive(Clone)]
pub struct Guard {
    client: kube::Client,
    known: Arc<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    /// Who may read, until when.
    may: HashMap<Key, Instant>,
    /// Addresses with a question under way, or that were refused, and until when they ask nothing else.
    asking: HashMap<IpAddr, Instant>,
}

/// Why somebody gets nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Refusal {
    /// He shows no token.
    NoToken,
    /// His address asks already.
    Busy,
    /// The API server does not know the token.
    Unknown,
    /// Who that is may not.
    MayNot { user: String, path: String },
    /// Nobody could be asked.
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
    /// Who asks by this client; it needs to create TokenReviews and SubjectAccessReviews.
    pub fn new(client: kube::Client) -> Self {
        Self { client, known: Arc::default() }
    }

    /// Whether who shows this token may read a path.
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

    /// An address begins to ask. Nothing but time ends that unless it may read: who breaks a connection off is not sooner
    /// back.
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

/// May a user get a path?
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

/// The token that a request shows (RFC 6750).
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// Lets who may read through. Until then his connection's place is as anybody's.
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
