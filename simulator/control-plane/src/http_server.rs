//! HTTP: paths, queries and bodies to requests, and answers back.

mod admin;
mod route;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use http::{Method, Request as HttpRequest, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::api::{ApiServer, Caller, DeleteOptions, ListOptions, Request, Target};
use crate::error::ApiError;
use crate::faults::{Call, Fault, Faults, answer};
use crate::patch::Patch;
use crate::selector::Selector;
use crate::value::{object, remove, set, text};
use crate::watching::{Broken, WatchOptions, partial, watch};

use route::Route;

/// The body of an answer; an error in it breaks the connection.
pub(crate) type Body = UnsyncBoxBody<Bytes, Broken>;

/// Everything that a request needs.
pub(crate) struct Server {
    pub(crate) api: Arc<ApiServer>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) shutdown: CancellationToken,
}

struct Ask {
    method: Method,
    path: String,
    query: HashMap<String, String>,
    caller: Caller,
    accept: String,
    content_type: String,
    body: Bytes,
}

impl Ask {
    fn param(&self, name: &str) -> &str {
        self.query.get(name).map_or("", String::as_str)
    }

    fn flag(&self, name: &str) -> bool {
        matches!(self.param(name), "true" | "1")
    }

    fn partial(&self) -> bool {
        self.accept.contains("as=PartialObjectMetadata")
    }

    fn json(&self) -> Result<Value, ApiError> {
        parse_body(&self.body, &self.content_type)
    }

    /// What an object is called that is to be made; as far as that is known before it is.
    fn new_name(&self, verb: &str) -> String {
        let body = if verb == "create" { self.json().unwrap_or_default() } else { Value::Null };
        let name = |field| text(&body, &["metadata", field]);
        (if name("name").is_empty() { name("generateName") } else { name("name") }).to_owned()
    }
}

fn parse_body(body: &[u8], content_type: &str) -> Result<Value, ApiError> {
    if content_type.contains("protobuf") || content_type.contains("cbor") {
        return Err(ApiError::new(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: application/json, application/yaml",
        ));
    }
    match serde_json::from_slice(body) {
        Ok(value) => Ok(value),
        Err(e) if content_type.contains("yaml") => {
            let text = std::str::from_utf8(body).map_err(|e| ApiError::bad_request(e.to_string()))?;
            serde_saphyr::from_str(text).map_err(|yaml| {
                ApiError::bad_request(format!("the body is neither JSON ({e}) nor YAML ({yaml})"))
            })
        }
        Err(e) => Err(ApiError::bad_request(format!("couldn't decode the body as JSON: {e}"))),
    }
}

impl Server {
    /// Answers one request; an error breaks the connection.
    pub(crate) async fn answer(
        self: Arc<Self>,
        request: HttpRequest<Incoming>,
    ) -> Result<Response<Body>, Broken> {
        let (parts, body) = request.into_parts();
        let header = |name: header::HeaderName| {
            parts.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned()
        };
        let token = header(header::AUTHORIZATION);
        let user = token.strip_prefix("Bearer ").unwrap_or("system:anonymous").to_owned();
        let query =
            form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()).into_owned().collect();
        let body = body.collect().await.map_err(|_| Broken)?.to_bytes();
        let ask = Ask {
            method: parts.method.clone(),
            path: parts.uri.path().to_owned(),
            query,
            caller: Caller { user, user_agent: header(header::USER_AGENT) },
            accept: header(header::ACCEPT),
            content_type: header(header::CONTENT_TYPE),
            body,
        };
        // By itself: what was asked is done, late as it may be, also when nobody waits for the answer any more.
        let answer = tokio::spawn(async move { self.dispatch(&ask).await });
        match answer.await.map_err(|_| Broken)? {
            Ok(response) => Ok(response),
            Err(Outcome::Failed(e)) => Ok(failure(&e)),
            Err(Outcome::Broken) => Err(Broken),
        }
    }

    async fn dispatch(&self, ask: &Ask) -> Result<Response<Body>, Outcome> {
        if let Some(response) = self.admin(ask)? {
            return Ok(response);
        }
        match route::parse(&ask.path) {
            Route::Document(path) => Ok(self.document(&path)?),
            Route::Resource(found) => {
                let known = self.api.kinds.find(&found.group, &found.version, &found.plural);
                let Some(kind) = known else {
                    // Of an unknown version nothing is known, not even that it speaks of objects.
                    if self.api.kinds.of(&found.group, &found.version).is_empty() {
                        return Ok(no_such_page());
                    }
                    return Err(ApiError::no_such_path().into());
                };
                if kind.namespaced && found.namespace.is_empty() && !found.name.is_empty() {
                    return Err(ApiError::no_such_path().into());
                }
                if !kind.namespaced && !found.namespace.is_empty() {
                    return Err(ApiError::no_such_path().into());
                }
                let target = Target {
                    kind,
                    version: found.version,
                    namespace: found.namespace,
                    name: found.name,
                    subresource: found.subresource,
                };
                self.resource(ask, target).await
            }
        }
    }

    fn document(&self, path: &[&str]) -> Result<Response<Body>, ApiError> {
        let api = &self.api;
        let value = match path {
            ["healthz" | "livez" | "readyz", ..] => return Ok(plain("ok")),
            ["version"] => api.version(),
            ["api"] => api.core_versions(),
            ["apis"] => api.group_list(),
            ["apis", group] => api.group(group)?,
            ["api", version] => api.resource_list("", version)?,
            ["apis", group, version] => api.resource_list(group, version)?,
            ["openapi", "v3"] => api.openapi_index(),
            ["openapi", "v3", "api", version] => api.openapi("", version)?,
            ["openapi", "v3", "apis", group, version] => api.openapi(group, version)?,
            _ => return Ok(no_such_page()),
        };
        Ok(json_response(StatusCode::OK, &value))
    }

    async fn resource(&self, ask: &Ask, target: Target) -> Result<Response<Body>, Outcome> {
        let verb = verb_of(ask, &target)?;
        let call = Call {
            verb: verb.to_owned(),
            group: target.kind.group.clone(),
            resource: target.kind.plural.clone(),
            subresource: target.subresource.clone(),
            namespace: target.namespace.clone(),
            name: if target.name.is_empty() { ask.new_name(verb) } else { target.name.clone() },
            user: ask.caller.user.clone(),
            user_agent: ask.caller.user_agent.clone(),
        };
        let verdict = self.faults.judge(&call);
        if !verdict.latency.is_zero() {
            tokio::time::sleep(verdict.latency).await;
        }
        match &verdict.fault {
            Some(Fault::DropBefore) => return Err(Outcome::Broken),
            Some(Fault::CutOff { carried_out: false }) => return self.no_answer().await,
            Some(Fault::Hang { millis }) => {
                tokio::time::sleep(Duration::from_millis(*millis)).await;
                return Err(Outcome::Broken);
            }
            Some(fault) => {
                if let Some(e) = answer(fault, &call) {
                    return Err(e.into());
                }
            }
            None => {}
        }
        let response = self.perform(ask, target, verb, call, verdict.fault.clone()).await;
        match verdict.fault {
            Some(Fault::DropAfter) => Err(Outcome::Broken),
            Some(Fault::CutOff { .. }) => {
                self.faults.was_carried_out(&ask.caller.user);
                self.no_answer().await
            }
            _ => Ok(response?),
        }
    }

    /// For whom is cut off.
    async fn no_answer(&self) -> Result<Response<Body>, Outcome> {
        self.shutdown.cancelled().await;
        Err(Outcome::Broken)
    }

    async fn perform(
        &self,
        ask: &Ask,
        target: Target,
        verb: &'static str,
        call: Call,
        fault: Option<Fault>,
    ) -> Result<Response<Body>, ApiError> {
        let selector = |target: &Target| {
            let mut fields = ask.param("fieldSelector").to_owned();
            if verb == "watch" && !target.name.is_empty() {
                fields = format!("metadata.name={}", target.name);
            }
            Selector::parse(&target.kind, ask.param("labelSelector"), &fields)
        };
        let request = |target: Target| Request {
            target,
            caller: ask.caller.clone(),
            verb,
            manager: ask.param("fieldManager").to_owned(),
            force: ask.flag("force"),
            dry_run: ask.param("dryRun") == "All",
        };
        match verb {
            "get" => {
                let object = self.api.get(&target)?;
                Ok(shown(ask, StatusCode::OK, &object))
            }
            "list" => {
                let selector = selector(&target)?;
                self.list(ask, &target, selector)
            }
            "watch" => {
                let selector = selector(&target)?;
                self.watch(ask, target, selector, call, fault)
            }
            "create" => {
                let body = ask.json()?;
                if !target.subresource.is_empty() {
                    let status = self.api.act(&request(target), body).await?;
                    return Ok(json_response(StatusCode::CREATED, &status));
                }
                let object = self.api.create(&request(target), body).await?;
                Ok(shown(ask, StatusCode::CREATED, &object))
            }
            "update" => {
                let body = ask.json()?;
                let (object, made) = self.api.update(&request(target), body).await?;
                Ok(shown(ask, if made { StatusCode::CREATED } else { StatusCode::OK }, &object))
            }
            "patch" | "apply" => {
                let patch = parse_patch(ask)?;
                let (object, made) = self.api.patch(&request(target), &patch).await?;
                Ok(shown(ask, if made { StatusCode::CREATED } else { StatusCode::OK }, &object))
            }
            "delete" => {
                let options = delete_options(ask)?;
                let kind = Arc::clone(&target.kind);
                let mut request = request(target);
                request.dry_run |= options.dry_run;
                let deleted = self.api.delete(&request, &options).await?;
                if deleted.gone && !kind.returns_deleted {
                    let uid = text(&deleted.object, &["metadata", "uid"]);
                    let status = crate::api::success_status(&request, uid);
                    return Ok(json_response(StatusCode::OK, &status));
                }
                Ok(shown(ask, StatusCode::OK, &deleted.object))
            }
            _ => {
                let options = delete_options(ask)?;
                let selector = selector(&target)?;
                let list = ListOptions { selector, ..ListOptions::default() };
                let page = self.api.list(&target, &list)?;
                for object in &page.items {
                    let mut one = target.clone();
                    text(object, &["metadata", "name"]).clone_into(&mut one.name);
                    text(object, &["metadata", "namespace"]).clone_into(&mut one.namespace);
                    match self.api.delete(&request(one), &options).await {
                        Err(e) if e.code == 404 => {}
                        other => {
                            other?;
                        }
                    }
                }
                Ok(json_response(StatusCode::OK, &list_value(ask, &target, &page)))
            }
        }
    }

    fn list(&self, ask: &Ask, target: &Target, selector: Selector) -> Result<Response<Body>, ApiError> {
        let options = ListOptions {
            selector,
            limit: ask.param("limit").parse().unwrap_or(0),
            continue_token: ask.param("continue").to_owned(),
            resource_version: ask.param("resourceVersion").to_owned(),
            resource_version_match: ask.param("resourceVersionMatch").to_owned(),
        };
        if !options.resource_version_match.is_empty() && options.resource_version.is_empty() {
            return Err(bad_match("resourceVersionMatch is forbidden unless resourceVersion is provided"));
        }
        let page = self.api.list(target, &options)?;
        Ok(json_response(StatusCode::OK, &list_value(ask, target, &page)))
    }

    fn watch(
        &self,
        ask: &Ask,
        target: Target,
        selector: Selector,
        call: Call,
        fault: Option<Fault>,
    ) -> Result<Response<Body>, ApiError> {
        let send_initial_events = ask.flag("sendInitialEvents");
        if send_initial_events && ask.param("resourceVersionMatch") != "NotOlderThan" {
            return Err(bad_match("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"));
        }
        let timeout = ask.param("timeoutSeconds").parse().ok().filter(|s| *s > 0).unwrap_or(1800);
        let options = WatchOptions {
            selector,
            resource_version: ask.param("resourceVersion").to_owned(),
            send_initial_events,
            bookmarks: ask.flag("allowWatchBookmarks"),
            timeout: Duration::from_secs(timeout),
            partial: ask.partial(),
        };
        let control = self.faults.register(call, self.shutdown.child_token());
        let stream = watch(Arc::clone(&self.api), target, options, control, fault)?;
        let body = StreamBody::new(stream.map_ok(Frame::data).boxed());
        let mut response = Response::new(BodyExt::boxed_unsync(body));
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
        Ok(response)
    }
}

/// Why there is no ordinary answer.
enum Outcome {
    Failed(ApiError),
    Broken,
}

impl From<ApiError> for Outcome {
    fn from(e: ApiError) -> Self {
        Self::Failed(e)
    }
}

fn bad_match(why: &str) -> ApiError {
    let message = format!("ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Forbidden: {why}");
    let mut e = ApiError::new(422, "Invalid", message);
    e.details = Some(json!({"group": "meta.k8s.io", "kind": "ListOptions", "causes": [{
        "reason": "FieldValueForbidden", "message": format!("Forbidden: {why}"), "field": "resourceVersionMatch",
    }]}));
    e
}

fn verb_of(ask: &Ask, target: &Target) -> Result<&'static str, ApiError> {
    let named = !target.name.is_empty();
    Ok(match (&ask.method, named) {
        (&Method::GET, _) if ask.flag("watch") => "watch",
        (&Method::GET, true) => "get",
        (&Method::GET, false) => "list",
        (&Method::POST, false) => "create",
        (&Method::POST, true) if !target.subresource.is_empty() => "create",
        (&Method::PUT, true) => "update",
        (&Method::PATCH, true) if ask.content_type.contains("apply-patch") => "apply",
        (&Method::PATCH, true) => "patch",
        (&Method::DELETE, true) => "delete",
        (&Method::DELETE, false) => "deletecollection",
        (method, _) => return Err(ApiError::method_not_allowed(method.as_str())),
    })
}

fn parse_patch(ask: &Ask) -> Result<Patch, ApiError> {
    let kind = ask.content_type.split(';').next().unwrap_or_default().trim();
    let body = || parse_body(&ask.body, &ask.content_type);
    Ok(match kind {
        "application/json-patch+json" => Patch::Json(body()?),
        "application/merge-patch+json" => Patch::Merge(body()?),
        "application/strategic-merge-patch+json" => Patch::Strategic(body()?),
        "application/apply-patch+yaml" => Patch::Apply(body()?),
        other => {
            return Err(ApiError::new(
                415,
                "UnsupportedMediaType",
                format!("the body of the request was in an unknown format: {other:?}"),
            ));
        }
    })
}

fn delete_options(ask: &Ask) -> Result<DeleteOptions, ApiError> {
    let mut body = if ask.body.is_empty() { json!({}) } else { ask.json()? };
    for name in ["propagationPolicy", "gracePeriodSeconds"] {
        if let Some(value) = ask.query.get(name) {
            let value = value.parse::<i64>().map_or_else(|_| json!(value), |n| json!(n));
            set(&mut body, &[name], value);
        }
    }
    Ok(DeleteOptions::parse(&body))
}

fn list_value(ask: &Ask, target: &Target, page: &crate::api::ListPage) -> Value {
    let items: Vec<Value> = page
        .items
        .iter()
        .map(|object| {
            if ask.partial() {
                return partial(object);
            }
            let mut item = Value::clone(object);
            // Items of built-in kinds carry no type, those of custom resources do.
            if !target.kind.custom {
                remove(&mut item, &["kind"]);
                remove(&mut item, &["apiVersion"]);
            }
            item
        })
        .collect();
    let mut metadata = json!({"resourceVersion": page.revision.to_string()});
    if !page.continue_token.is_empty() {
        set(&mut metadata, &["continue"], page.continue_token.clone());
    }
    if let Some(remaining) = page.remaining {
        set(&mut metadata, &["remainingItemCount"], remaining);
    }
    let (kind, api_version) = if ask.partial() {
        ("PartialObjectMetadataList".to_owned(), "meta.k8s.io/v1".to_owned())
    } else {
        (format!("{}List", target.kind.kind), target.api_version())
    };
    json!({"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": items})
}

fn shown(ask: &Ask, code: StatusCode, object: &Value) -> Response<Body> {
    let status_object = object.get("kind").and_then(Value::as_str) == Some("Status");
    if ask.partial() && !status_object && self::object(object, &["metadata"]).is_some() {
        return json_response(code, &partial(object));
    }
    json_response(code, object)
}

fn failure(e: &ApiError) -> Response<Body> {
    let code = StatusCode::from_u16(e.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(code, &e.status());
    if let Some(seconds) = e.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from(seconds));
    }
    response
}

fn json_response(code: StatusCode, value: &Value) -> Response<Body> {
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    respond(code, "application/json", bytes)
}

fn no_such_page() -> Response<Body> {
    respond(StatusCode::NOT_FOUND, "text/plain; charset=utf-8", b"404 page not found\n".to_vec())
}

fn plain(text: &'static str) -> Response<Body> {
    respond(StatusCode::OK, "text/plain", text.as_bytes().to_vec())
}

fn respond(code: StatusCode, content_type: &'static str, bytes: Vec<u8>) -> Response<Body> {
    let body = Full::new(Bytes::from(bytes)).map_err(|never: Infallible| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}
