//! The table of kinds that are served, and how it grows with CustomResourceDefinitions.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use serde_json::{Value, json};

use crate::options::{Options, ServerVersion};
use crate::value::{at, list, text};

/// One kind and what the server does with it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Kind {
    pub(crate) group: String,
    pub(crate) kind: String,
    pub(crate) plural: String,
    pub(crate) singular: String,
    pub(crate) short: Vec<String>,
    pub(crate) categories: Vec<String>,
    /// Served versions, the preferred one first. Objects are kept in the first.
    pub(crate) versions: Vec<String>,
    pub(crate) namespaced: bool,
    /// There is a `/status`, and only it changes the status.
    pub(crate) status: bool,
    /// A status write does not claim fields of the metadata.
    pub(crate) status_without_metadata: bool,
    /// `metadata.generation` counts changes of the spec.
    pub(crate) generation: bool,
    /// A PUT without resourceVersion is accepted.
    pub(crate) unconditional: bool,
    /// A PUT of an unknown name makes the object.
    pub(crate) create_on_update: bool,
    /// A deletion answers with the object instead of a Status.
    pub(crate) returns_deleted: bool,
    /// Field selectors besides `metadata.name` and `metadata.namespace`.
    pub(crate) fields: Vec<String>,
    /// Where the objects are kept, when another group shows the same ones.
    pub(crate) storage: Option<String>,
    /// For custom resources: the version's `openAPIV3Schema`.
    pub(crate) schemas: BTreeMap<String, Value>,
    pub(crate) custom: bool,
}

impl Kind {
    /// `resourceclaims.resource.k8s.io`, or `pods`: the name in messages and the key of the store.
    pub(crate) fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// The table of the store that holds the objects.
    pub(crate) fn table(&self) -> String {
        self.storage.clone().unwrap_or_else(|| self.qualified())
    }

    /// The version in which objects are kept.
    pub(crate) fn storage_version(&self) -> &str {
        self.versions.first().map_or("v1", String::as_str)
    }

    /// `group/version`, or `v1`.
    pub(crate) fn api_version(&self, version: &str) -> String {
        if self.group.is_empty() { version.to_owned() } else { format!("{}/{version}", self.group) }
    }

    pub(crate) fn is(&self, group: &str, plural: &str) -> bool {
        self.group == group && self.plural == plural
    }
}

struct Row(Kind);

impl Row {
    fn new(group: &str, kind: &str, plural: &str) -> Self {
        Self(Kind {
            group: group.into(),
            kind: kind.into(),
            plural: plural.into(),
            singular: kind.to_lowercase(),
            versions: vec!["v1".into()],
            unconditional: true,
            ..Kind::default()
        })
    }
    fn namespaced(mut self) -> Self {
        self.0.namespaced = true;
        self
    }
    fn short(mut self, names: &[&str]) -> Self {
        self.0.short = names.iter().map(|s| (*s).to_owned()).collect();
        self
    }
    fn all(mut self) -> Self {
        self.0.categories = vec!["all".into()];
        self
    }
    fn status(mut self) -> Self {
        self.0.status = true;
        self
    }
    fn status_without_metadata(mut self, yes: bool) -> Self {
        self.0.status_without_metadata = yes;
        self
    }
    fn generation(mut self) -> Self {
        self.0.generation = true;
        self
    }
    fn returns_deleted(mut self) -> Self {
        self.0.returns_deleted = true;
        self
    }
    fn conditional(mut self) -> Self {
        self.0.unconditional = false;
        self
    }
    fn create_on_update(mut self) -> Self {
        self.0.create_on_update = true;
        self
    }
    fn fields(mut self, names: &[&str]) -> Self {
        self.0.fields = names.iter().map(|s| (*s).to_owned()).collect();
        self
    }
    fn versions(mut self, versions: &[&str]) -> Self {
        self.0.versions = versions.iter().map(|s| (*s).to_owned()).collect();
        self
    }
}

const EVENT_FIELDS: &[&str] = &[
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
    "reason",
    "reportingComponent",
    "source",
    "type",
];

fn core_kinds() -> Vec<Row> {
    vec![
        Row::new("", "Namespace", "namespaces").status().short(&["ns"]).fields(&["status.phase"]),
        Row::new("", "Node", "nodes").status().short(&["no"]).fields(&["spec.unschedulable"]),
        Row::new("", "Pod", "pods")
            .namespaced()
            .status()
            .generation()
            .all()
            .short(&["po"])
            .returns_deleted()
            .fields(&[
                "spec.nodeName",
                "spec.restartPolicy",
                "spec.schedulerName",
                "spec.serviceAccountName",
                "spec.hostNetwork",
                "status.phase",
                "status.podIP",
                "status.nominatedNodeName",
            ]),
        Row::new("", "Event", "events").namespaced().short(&["ev"]).create_on_update().fields(EVENT_FIELDS),
        Row::new("", "ServiceAccount", "serviceaccounts").namespaced().short(&["sa"]),
        Row::new("", "ConfigMap", "configmaps").namespaced().short(&["cm"]),
        Row::new("", "Secret", "secrets").namespaced().fields(&["type"]),
        Row::new("", "Service", "services").namespaced().status().all().short(&["svc"]),
        Row::new("", "PersistentVolume", "persistentvolumes").status().short(&["pv"]).returns_deleted(),
        Row::new("", "PersistentVolumeClaim", "persistentvolumeclaims")
            .namespaced()
            .status()
            .short(&["pvc"])
            .returns_deleted(),
        Row::new("apps", "Deployment", "deployments")
            .namespaced()
            .status()
            .generation()
            .all()
            .short(&["deploy"]),
        Row::new("apps", "DaemonSet", "daemonsets").namespaced().status().generation().all().short(&["ds"]),
        Row::new("apps", "ReplicaSet", "replicasets").namespaced().status().generation().all().short(&["rs"]),
        Row::new("apps", "StatefulSet", "statefulsets")
            .namespaced()
            .status()
            .generation()
            .all()
            .short(&["sts"]),
        Row::new("batch", "Job", "jobs").namespaced().status().generation().all(),
        Row::new("policy", "PodDisruptionBudget", "poddisruptionbudgets")
            .namespaced()
            .status()
            .generation()
            .short(&["pdb"]),
        Row::new("networking.k8s.io", "NetworkPolicy", "networkpolicies")
            .namespaced()
            .generation()
            .short(&["netpol"]),
        Row::new("rbac.authorization.k8s.io", "Role", "roles").namespaced(),
        Row::new("rbac.authorization.k8s.io", "RoleBinding", "rolebindings").namespaced(),
        Row::new("rbac.authorization.k8s.io", "ClusterRole", "clusterroles"),
        Row::new("rbac.authorization.k8s.io", "ClusterRoleBinding", "clusterrolebindings"),
        Row::new("coordination.k8s.io", "Lease", "leases").namespaced().create_on_update().conditional(),
        Row::new("scheduling.k8s.io", "PriorityClass", "priorityclasses").generation().short(&["pc"]),
        Row::new("storage.k8s.io", "StorageClass", "storageclasses").short(&["sc"]).returns_deleted(),
    ]
}

fn other_kinds(options: &Options) -> Vec<Row> {
    let admission = "admissionregistration.k8s.io";
    let mut rows = vec![
        Row::new(admission, "MutatingWebhookConfiguration", "mutatingwebhookconfigurations").generation(),
        Row::new(admission, "ValidatingWebhookConfiguration", "validatingwebhookconfigurations").generation(),
        Row::new(admission, "ValidatingAdmissionPolicy", "validatingadmissionpolicies").status().generation(),
        Row::new(admission, "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings")
            .generation(),
        Row::new("apiextensions.k8s.io", "CustomResourceDefinition", "customresourcedefinitions")
            .status()
            .generation()
            .conditional()
            .short(&["crd", "crds"]),
    ];
    let dra = "resource.k8s.io";
    let mut slice_fields = vec!["spec.nodeName", "spec.driver"];
    if options.version >= ServerVersion::V1_37 {
        slice_fields.push("spec.pool.name");
    }
    let mut versions = vec!["v1"];
    if options.runtime_config.contains("resource.k8s.io/v1beta2") {
        versions.push("v1beta2");
    }
    rows.extend([
        Row::new(dra, "ResourceSlice", "resourceslices")
            .generation()
            .returns_deleted()
            .fields(&slice_fields)
            .versions(&versions),
        Row::new(dra, "DeviceClass", "deviceclasses").generation().returns_deleted().versions(&versions),
        Row::new(dra, "ResourceClaim", "resourceclaims")
            .namespaced()
            .status()
            .status_without_metadata(options.version > ServerVersion::V1_34)
            .returns_deleted()
            .versions(&versions),
        Row::new(dra, "ResourceClaimTemplate", "resourceclaimtemplates")
            .namespaced()
            .returns_deleted()
            .versions(&versions),
    ]);
    let rules = taint_rule_versions(options);
    if !rules.is_empty() {
        rows.push(
            Row::new(dra, "DeviceTaintRule", "devicetaintrules")
                .status()
                .generation()
                .returns_deleted()
                .versions(&rules),
        );
    }
    rows
}

/// v1 from 1.37 on; v1beta2 (1.36 and later) and v1alpha3 where asked for.
fn taint_rule_versions(options: &Options) -> Vec<&'static str> {
    let asked = |v: &str| options.runtime_config.contains(&format!("resource.k8s.io/{v}"));
    let mut versions = Vec::new();
    if !options.effective_gates().device_taint_rules {
        return versions;
    }
    if options.version >= ServerVersion::V1_37 {
        versions.push("v1");
    }
    if options.version >= ServerVersion::V1_36 && asked("v1beta2") {
        versions.push("v1beta2");
    }
    if asked("v1alpha3") {
        versions.push("v1alpha3");
    }
    versions
}

/// All kinds, found by group, version and plural.
pub(crate) struct Registry {
    by_path: RwLock<BTreeMap<(String, String, String), Arc<Kind>>>,
}

impl Registry {
    pub(crate) fn new(options: &Options) -> Self {
        let registry = Self { by_path: RwLock::default() };
        for row in core_kinds().into_iter().chain(other_kinds(options)) {
            registry.add(row.0);
        }
        // The same events under a second group, with other field names.
        let mut events = Row::new("events.k8s.io", "Event", "events").namespaced().create_on_update().0;
        events.storage = Some("events".into());
        events.short = vec!["ev".into()];
        events.fields = EVENT_FIELDS.iter().map(|s| s.replace("involvedObject", "regarding")).collect();
        registry.add(events);
        registry
    }

    fn add(&self, kind: Kind) {
        let kind = Arc::new(kind);
        let mut map = self.by_path.write();
        for version in &kind.versions {
            map.insert((kind.group.clone(), version.clone(), kind.plural.clone()), Arc::clone(&kind));
        }
    }

    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Kind>> {
        self.by_path.read().get(&(group.to_owned(), version.to_owned(), plural.to_owned())).cloned()
    }

    /// The kind behind an owner reference or a manifest's `apiVersion` and `kind`.
    pub(crate) fn by_kind(&self, api_version: &str, kind: &str) -> Option<Arc<Kind>> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let map = self.by_path.read();
        map.iter()
            .find(|((g, v, _), k)| g == group && v == version && k.kind == kind)
            .map(|(_, k)| Arc::clone(k))
    }

    /// The kind with this group and plural, in whatever version.
    pub(crate) fn by_plural(&self, group: &str, plural: &str) -> Option<Arc<Kind>> {
        let map = self.by_path.read();
        map.iter().find(|((g, _, p), _)| g == group && p == plural).map(|(_, k)| Arc::clone(k))
    }

    /// Each kind once.
    pub(crate) fn all(&self) -> Vec<Arc<Kind>> {
        let mut seen = BTreeMap::new();
        for ((group, _, plural), kind) in self.by_path.read().iter() {
            seen.entry((group.clone(), plural.clone())).or_insert_with(|| Arc::clone(kind));
        }
        seen.into_values().collect()
    }

    /// Groups with their served versions, the preferred one first.
    pub(crate) fn groups(&self) -> BTreeMap<String, Vec<String>> {
        let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for kind in self.all() {
            let versions = groups.entry(kind.group.clone()).or_default();
            for v in &kind.versions {
                if !versions.contains(v) {
                    versions.push(v.clone());
                }
            }
        }
        for versions in groups.values_mut() {
            versions.sort_by_key(|v| version_rank(v));
        }
        groups
    }

    /// The kinds of one group and version.
    pub(crate) fn of(&self, group: &str, version: &str) -> Vec<Arc<Kind>> {
        let map = self.by_path.read();
        map.iter().filter(|((g, v, _), _)| g == group && v == version).map(|(_, k)| Arc::clone(k)).collect()
    }

    /// Serves what a CustomResourceDefinition defines.
    pub(crate) fn define(&self, crd: &Value) {
        let group = text(crd, &["spec", "group"]).to_owned();
        let plural = text(crd, &["spec", "names", "plural"]).to_owned();
        self.undefine(&group, &plural);
        let strings = |v: &[Value]| v.iter().filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>();
        let kind_name = text(crd, &["spec", "names", "kind"]).to_owned();
        let singular = match text(crd, &["spec", "names", "singular"]) {
            "" => kind_name.to_lowercase(),
            s => s.to_owned(),
        };
        let mut kind = Kind {
            group,
            plural,
            singular,
            kind: kind_name,
            short: strings(list(crd, &["spec", "names", "shortNames"])),
            categories: strings(list(crd, &["spec", "names", "categories"])),
            namespaced: text(crd, &["spec", "scope"]) == "Namespaced",
            generation: true,
            custom: true,
            ..Kind::default()
        };
        for version in list(crd, &["spec", "versions"]) {
            let name = text(version, &["name"]).to_owned();
            if at(version, &["served"]).and_then(Value::as_bool) == Some(false) {
                continue;
            }
            kind.status |= at(version, &["subresources", "status"]).is_some();
            for field in list(version, &["selectableFields"]) {
                kind.fields.push(text(field, &["jsonPath"]).trim_start_matches('.').to_owned());
            }
            let schema = at(version, &["schema", "openAPIV3Schema"]).cloned().unwrap_or_else(|| json!({}));
            kind.schemas.insert(name.clone(), schema);
            let stored = at(version, &["storage"]).and_then(Value::as_bool) == Some(true);
            let place = if stored { 0 } else { kind.versions.len() };
            kind.versions.insert(place, name);
        }
        self.add(kind);
    }

    /// Stops serving a custom resource.
    pub(crate) fn undefine(&self, group: &str, plural: &str) {
        self.by_path.write().retain(|(g, _, p), k| !(k.custom && g == group && p == plural));
    }
}

/// Orders versions as discovery does: stable, then beta, then alpha; newer first.
fn version_rank(version: &str) -> (u8, std::cmp::Reverse<u32>, std::cmp::Reverse<u32>) {
    let rest = version.trim_start_matches('v');
    let major: String = rest.chars().take_while(char::is_ascii_digit).collect();
    let tail = rest.get(major.len()..).unwrap_or_default();
    let (stage, number) = if tail.is_empty() {
        (0, "0")
    } else if let Some(n) = tail.strip_prefix("beta") {
        (1, n)
    } else if let Some(n) = tail.strip_prefix("alpha") {
        (2, n)
    } else {
        (3, "0")
    };
    let parse = |s: &str| std::cmp::Reverse(s.parse().unwrap_or(0));
    (stage, parse(&major), parse(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taint_rules_are_served_by_release_and_request() {
        let mut options = Options { version: ServerVersion::V1_36, ..Options::default() };
        assert!(Registry::new(&options).by_plural("resource.k8s.io", "devicetaintrules").is_none());
        let mut gates = options.effective_gates();
        gates.device_taint_rules = true;
        options.gates = Some(gates);
        options.runtime_config.insert("resource.k8s.io/v1beta2".into());
        let registry = Registry::new(&options);
        assert!(registry.find("resource.k8s.io", "v1beta2", "devicetaintrules").is_some());
        assert!(registry.find("resource.k8s.io", "v1", "devicetaintrules").is_none());
        options.version = ServerVersion::V1_37;
        assert!(Registry::new(&options).find("resource.k8s.io", "v1", "devicetaintrules").is_some());
    }

    #[test]
    fn versions_sort_as_discovery_prefers_them() {
        let mut v = vec!["v1alpha3", "v1beta1", "v2", "v1beta2", "v1"];
        v.sort_by_key(|v| version_rank(v));
        assert_eq!(v, ["v2", "v1", "v1beta2", "v1beta1", "v1alpha3"]);
    }
}
