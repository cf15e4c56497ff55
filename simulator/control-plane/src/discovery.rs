//! What clients ask before they know which kinds there are.

use serde_json::{Value, json};

use crate::api::ApiServer;
use crate::error::ApiError;
use crate::kinds::Kind;

impl ApiServer {
    /// `/version`.
    pub(crate) fn version(&self) -> Value {
        let minor = self.options.version.minor();
        json!({
            "major": "1",
            "minor": minor.to_string(),
            "gitVersion": format!("v1.{minor}.0+aliquot-control-plane"),
            "gitCommit": "0000000000000000000000000000000000000000",
            "gitTreeState": "clean",
            "buildDate": "1970-01-01T00:00:00Z",
            "goVersion": "none",
            "compiler": "rustc",
            "platform": "linux/amd64",
        })
    }

    /// `/api`.
    pub(crate) fn core_versions(&self) -> Value {
        json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
    }

    /// `/apis`.
    pub(crate) fn group_list(&self) -> Value {
        let groups: Vec<Value> = self
            .kinds
            .groups()
            .into_iter()
            .filter(|(g, _)| !g.is_empty())
            .map(|(g, v)| group(&g, &v))
            .collect();
        json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
    }

    /// `/apis/{group}`.
    pub(crate) fn group(&self, name: &str) -> Result<Value, ApiError> {
        let versions = self.kinds.groups().remove(name).ok_or_else(ApiError::no_such_path)?;
        let mut out = group(name, &versions);
        crate::value::set(&mut out, &["kind"], "APIGroup");
        crate::value::set(&mut out, &["apiVersion"], "v1");
        Ok(out)
    }

    /// `/api/v1` and `/apis/{group}/{version}`.
    pub(crate) fn resource_list(&self, group: &str, version: &str) -> Result<Value, ApiError> {
        let kinds = self.kinds.of(group, version);
        if kinds.is_empty() {
            return Err(ApiError::no_such_path());
        }
        let mut resources = Vec::new();
        for kind in kinds {
            resources.push(resource(&kind));
            for (name, shown, verbs) in subresources(&kind) {
                resources.push(json!({
                    "name": format!("{}/{name}", kind.plural), "singularName": "", "namespaced": kind.namespaced,
                    "kind": shown, "verbs": verbs,
                }));
            }
        }
        let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
        Ok(json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources,
        }))
    }

    /// `/openapi/v3`: enough for kubectl to see that the server checks fields itself.
    pub(crate) fn openapi_index(&self) -> Value {
        let mut paths = serde_json::Map::new();
        for (group, versions) in self.kinds.groups() {
            for version in versions {
                let path = if group.is_empty() {
                    format!("api/{version}")
                } else {
                    format!("apis/{group}/{version}")
                };
                let url = format!("/openapi/v3/{path}");
                paths.insert(path, json!({"serverRelativeURL": url}));
            }
        }
        json!({"paths": paths})
    }

    /// `/openapi/v3/…` of one group and version.
    pub(crate) fn openapi(&self, group: &str, version: &str) -> Result<Value, ApiError> {
        let kinds = self.kinds.of(group, version);
        if kinds.is_empty() {
            return Err(ApiError::no_such_path());
        }
        let prefix =
            if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") };
        let parameter = |name: &str| json!({"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": true}});
        let mut paths = serde_json::Map::new();
        let mut schemas = serde_json::Map::new();
        for kind in kinds {
            let scope = if kind.namespaced { "/namespaces/{namespace}" } else { "" };
            let gvk = json!({"group": group, "version": version, "kind": kind.kind});
            let operation = json!({
                "x-kubernetes-group-version-kind": gvk,
                "parameters": [parameter("dryRun"), parameter("fieldManager"), parameter("fieldValidation")],
                "responses": {"200": {"description": "OK"}},
            });
            let path = format!("{prefix}{scope}/{}/{{name}}", kind.plural);
            paths.insert(path, json!({"patch": operation, "put": operation}));
            schemas.insert(
                format!("{}.{version}.{}", if group.is_empty() { "core" } else { group }, kind.kind),
                json!({"type": "object", "x-kubernetes-group-version-kind": [gvk]}),
            );
        }
        Ok(json!({
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": format!("v1.{}.0", self.options.version.minor())},
            "paths": paths,
            "components": {"schemas": schemas},
        }))
    }
}

fn group(name: &str, versions: &[String]) -> Value {
    let entry = |v: &String| json!({"groupVersion": format!("{name}/{v}"), "version": v});
    let list: Vec<Value> = versions.iter().map(entry).collect();
    json!({"name": name, "versions": list, "preferredVersion": versions.first().map(entry)})
}

fn resource(kind: &Kind) -> Value {
    let mut out = json!({
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
    });
    if !kind.short.is_empty() {
        crate::value::set(&mut out, &["shortNames"], json!(kind.short));
    }
    if !kind.categories.is_empty() {
        crate::value::set(&mut out, &["categories"], json!(kind.categories));
    }
    out
}

fn subresources(kind: &Kind) -> Vec<(&'static str, &str, Vec<&'static str>)> {
    let mut out = Vec::new();
    if kind.status {
        out.push(("status", kind.kind.as_str(), vec!["get", "patch", "update"]));
    }
    if kind.is("", "pods") {
        out.push(("binding", "Binding", vec!["create"]));
        out.push(("eviction", "Eviction", vec!["create"]));
    }
    out
}
