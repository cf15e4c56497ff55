//! `/_faults` and `/_audit`: the control plane's own doors, beside the API.

use http::{Method, Response, StatusCode};
use serde_json::{Value, json};

use super::{Ask, Body, Server, json_response};
use crate::error::ApiError;
use crate::faults::{FaultRule, Matcher, WatchEnd};

impl Server {
    /// Answers paths that begin with an underscore.
    pub(super) fn admin(&self, ask: &Ask) -> Result<Option<Response<Body>>, ApiError> {
        let path: Vec<&str> = ask.path.split('/').filter(|p| !p.is_empty()).collect();
        let ok = |value: Value| Ok(Some(json_response(StatusCode::OK, &value)));
        match (&ask.method, path.as_slice()) {
            (&Method::GET, ["_faults"]) => ok(json!({"rules": self.faults.rules()})),
            (&Method::POST, ["_faults"]) => {
                let rule: FaultRule = serde_json::from_slice(&ask.body)
                    .map_err(|e| ApiError::bad_request(format!("fault rule: {e}")))?;
                ok(json!({"id": self.faults.add(rule)}))
            }
            (&Method::DELETE, ["_faults"]) => {
                self.faults.clear();
                ok(json!({}))
            }
            (&Method::DELETE, ["_faults", id]) => {
                let removed = id.parse().is_ok_and(|id| self.faults.remove(id));
                if removed { ok(json!({})) } else { Err(ApiError::no_such_path()) }
            }
            (&Method::POST, ["_faults", "end-watches"]) => {
                let matcher: Matcher = if ask.body.is_empty() {
                    Matcher::default()
                } else {
                    serde_json::from_slice(&ask.body)
                        .map_err(|e| ApiError::bad_request(format!("matcher: {e}")))?
                };
                let how = match ask.param("how") {
                    "" | "close" => WatchEnd::Close,
                    "reset" => WatchEnd::Reset,
                    "expire" => WatchEnd::Expire,
                    other => {
                        return Err(ApiError::bad_request(format!("how={other}: close, reset or expire")));
                    }
                };
                ok(json!({"ended": self.faults.end_watches(&matcher, how)}))
            }
            (&Method::POST, ["_faults", "compact"]) => {
                self.api.store.compact();
                ok(json!({}))
            }
            (&Method::GET, ["_audit"]) => {
                let since = ask.param("since").parse().unwrap_or(0);
                let entries = self.api.store.audit(|a| a.since(since));
                let wanted = ask.param("resource");
                let items: Vec<Value> = entries
                    .iter()
                    .filter(|e| wanted.is_empty() || e.origin.resource == wanted)
                    .map(crate::audit::AuditEntry::to_json)
                    .collect();
                ok(json!({"revision": self.api.store.revision(), "items": items}))
            }
            (_, [first, ..]) if first.starts_with('_') => Err(ApiError::no_such_path()),
            _ => Ok(None),
        }
    }
}
