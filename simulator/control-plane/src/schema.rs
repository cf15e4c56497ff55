//! How lists and maps of our kinds merge: what the `x-kubernetes-list-type` and patch strategy
//! markers of the API types say, for the fields that somebody here applies or patches.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::kinds::Kind;
use crate::value::{list, text};

/// How a list merges under server-side apply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ListType {
    Atomic,
    Set,
    Map(Vec<String>),
}

/// How a list merges under a strategic merge patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PatchStrategy {
    Replace,
    /// Union of scalars.
    Merge,
    MergeBy(String),
}

/// The schema of one kind in one version, as far as merging needs it.
pub(crate) struct Schema<'a> {
    kind: &'a Kind,
    custom: Option<&'a Value>,
}

/// A path of field names; an element of a list is `[]`.
pub(crate) type Path = Vec<String>;

impl<'a> Schema<'a> {
    pub(crate) fn new(kind: &'a Kind, version: &str) -> Self {
        let custom = kind.custom.then(|| kind.schemas.get(version)).flatten();
        Self { kind, custom }
    }

    pub(crate) fn list_type(&self, path: &[String]) -> ListType {
        if let Some(keys) = metadata_list(path) {
            return keys;
        }
        if self.kind.custom {
            return self.custom_list(path);
        }
        let (scope, path) = self.scoped(path);
        let path = path.join(".");
        let keys: &[&str] = match (scope, path.as_str()) {
            (Scope::Pod, p) => match pod_list(p) {
                Some(keys) => keys,
                None => return ListType::Atomic,
            },
            (Scope::Claim, "status.devices") => &["driver", "device", "pool", "shareID"],
            (Scope::Claim, "status.reservedFor") => &["uid"],
            (Scope::Node, "status.addresses") => &["type"],
            (Scope::Node, "spec.podCIDRs") => return ListType::Set,
            (Scope::Webhook, "webhooks") => &["name"],
            (Scope::Policy, "spec.matchConditions" | "spec.variables") => &["name"],
            (Scope::ServiceAccount, "secrets") => &["name"],
            (Scope::Service, "spec.ports") => &["port", "protocol"],
            (_, "status.conditions" | "status.devices.[].conditions") => &["type"],
            (Scope::Webhook, "webhooks.[].matchConditions") => &["name"],
            _ => return ListType::Atomic,
        };
        ListType::Map(keys.iter().map(|k| (*k).to_owned()).collect())
    }

    pub(crate) fn patch_strategy(&self, path: &[String]) -> PatchStrategy {
        let joined = path.join(".");
        match joined.as_str() {
            // These merge under apply only.
            "status.devices" | "status.devices.[].conditions" => return PatchStrategy::Replace,
            _ => {}
        }
        match self.list_type(path) {
            ListType::Atomic => PatchStrategy::Replace,
            ListType::Set => PatchStrategy::Merge,
            ListType::Map(keys) => {
                keys.first().cloned().map_or(PatchStrategy::Replace, PatchStrategy::MergeBy)
            }
        }
    }

    /// Whether a map is owned as one value.
    pub(crate) fn atomic_map(&self, path: &[String]) -> bool {
        if self.kind.custom {
            return self.custom_node(path).is_some_and(|n| text(n, &["x-kubernetes-map-type"]) == "atomic");
        }
        let Some(last) = path.last() else { return false };
        match last.as_str() {
            // RawExtension; LabelSelector; NodeSelector; ObjectReference.
            "parameters" | "data" if self.kind.group == "resource.k8s.io" => true,
            "selector" | "labelSelector" | "namespaceSelector" | "objectSelector" | "nodeSelector" => true,
            "involvedObject" | "regarding" | "secretRef" | "configMapKeyRef" | "secretKeyRef"
            | "fieldRef" | "resourceFieldRef" => true,
            _ => false,
        }
    }

    /// Structs that are there in every object of the kind, so that nobody owns them.
    pub(crate) fn always_there(&self, path: &[String]) -> bool {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        match self.kind.plural.as_str() {
            _ if self.kind.custom => false,
            "pods" => matches!(path.as_slice(), ["spec", "containers"]),
            "resourceslices" => matches!(path.as_slice(), ["spec", "pool"]),
            "resourceclaims" => matches!(path.as_slice(), ["spec", "devices"]),
            "resourceclaimtemplates" => {
                matches!(path.as_slice(), ["spec", "metadata" | "spec"] | ["spec", "spec", "devices"])
            }
            "devicetaintrules" => matches!(path.as_slice(), ["spec", "taint"]),
            _ => false,
        }
    }

    /// Strips the way to a pod template, so that one table serves pods and their controllers.
    fn scoped<'p>(&self, path: &'p [String]) -> (Scope, &'p [String]) {
        let scope = match (self.kind.group.as_str(), self.kind.plural.as_str()) {
            ("", "pods") => Scope::Pod,
            ("", "nodes") => Scope::Node,
            ("", "serviceaccounts") => Scope::ServiceAccount,
            ("", "services") => Scope::Service,
            ("resource.k8s.io", "resourceclaims") => Scope::Claim,
            ("admissionregistration.k8s.io", p) if p.ends_with("webhookconfigurations") => Scope::Webhook,
            ("admissionregistration.k8s.io", _) => Scope::Policy,
            _ => Scope::Other,
        };
        let in_template =
            path.first().is_some_and(|p| p == "spec") && path.get(1).is_some_and(|p| p == "template");
        if in_template && matches!(scope, Scope::Other) {
            return (Scope::Pod, path.get(2..).unwrap_or_default());
        }
        (scope, path)
    }

    fn custom_node(&self, path: &[String]) -> Option<&'a Value> {
        let mut node = self.custom?;
        for step in path {
            node = if step == "[]" {
                node.get("items")?
            } else {
                node.get("properties")
                    .and_then(|p| p.get(step))
                    .or_else(|| node.get("additionalProperties"))?
            };
        }
        Some(node)
    }

    fn custom_list(&self, path: &[String]) -> ListType {
        let Some(node) = self.custom_node(path) else { return ListType::Atomic };
        match text(node, &["x-kubernetes-list-type"]) {
            "set" => ListType::Set,
            "map" => {
                let keys = list(node, &["x-kubernetes-list-map-keys"]);
                ListType::Map(keys.iter().filter_map(|k| k.as_str().map(str::to_owned)).collect())
            }
            _ => ListType::Atomic,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    Pod,
    Node,
    Claim,
    Webhook,
    Policy,
    ServiceAccount,
    Service,
    Other,
}

fn metadata_list(path: &[String]) -> Option<ListType> {
    match path {
        [.., meta, name] if meta == "metadata" && name == "ownerReferences" => {
            Some(ListType::Map(vec!["uid".into()]))
        }
        [.., meta, name] if meta == "metadata" && name == "finalizers" => Some(ListType::Set),
        [meta, name] if meta == "metadata" && name == "managedFields" => Some(ListType::Atomic),
        _ => None,
    }
}

fn pod_list(path: &str) -> Option<&'static [&'static str]> {
    Some(match path {
        "spec.containers"
        | "spec.initContainers"
        | "spec.ephemeralContainers"
        | "spec.volumes"
        | "spec.imagePullSecrets"
        | "spec.schedulingGates"
        | "spec.resourceClaims" => &["name"],
        "spec.hostAliases" => &["ip"],
        "spec.topologySpreadConstraints" => &["topologyKey", "whenUnsatisfiable"],
        "status.conditions" => &["type"],
        "status.resourceClaimStatuses" => &["name"],
        "status.podIPs" | "status.hostIPs" => &["ip"],
        _ => {
            let rest = ["spec.containers.[].", "spec.initContainers.[].", "spec.ephemeralContainers.[]."]
                .iter()
                .find_map(|p| path.strip_prefix(p))?;
            match rest {
                "env" | "resources.claims" => &["name"],
                "ports" => &["containerPort", "protocol"],
                "volumeMounts" => &["mountPath"],
                "volumeDevices" => &["devicePath"],
                _ => return None,
            }
        }
    })
}

/// The values of the keys that identify an element; absent ones are left out.
pub(crate) fn element_key(item: &Value, keys: &[String]) -> Vec<(String, Value)> {
    let mut out: Vec<(String, Value)> = Vec::new();
    for key in keys {
        match item.get(key) {
            Some(v) => out.push((key.clone(), v.clone())),
            // The default of the one key that has a default in our kinds.
            None if key == "protocol" => out.push((key.clone(), Value::from("TCP"))),
            None => {}
        }
    }
    out
}

/// Whether two elements of a list are the same element.
pub(crate) fn same_element(a: &Value, b: &Value, keys: &[String]) -> bool {
    element_key(a, keys) == element_key(b, keys)
}

/// Elements of a map list that carry one key twice.
pub(crate) fn duplicate_keys(items: &[Value], keys: &[String]) -> bool {
    let mut seen = BTreeSet::new();
    items.iter().any(|item| {
        let key = element_key(item, keys).into_iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>();
        !seen.insert(key)
    })
}
