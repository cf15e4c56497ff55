//! Reads Kubernetes manifests; errors name file, line and reason.

use super::fields;
use super::workloads::pod_of;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// An object of a manifest.
#[derive(Debug, Clone)]
pub(crate) struct Document {
    pub(crate) place: Place,
    pub(crate) object: Value,
}

/// The place of an object in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    file: String,
    line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// The kinds that the demo can apply.
const KINDS: [(&str, &str); 14] = [
    ("v1", "Namespace"),
    ("v1", "Pod"),
    ("v1", "ConfigMap"),
    ("v1", "ServiceAccount"),
    ("resource.k8s.io/v1", "ResourceClaim"),
    ("resource.k8s.io/v1", "ResourceClaimTemplate"),
    ("resource.k8s.io/v1", "DeviceClass"),
    ("scheduling.k8s.io/v1", "PriorityClass"),
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    ("batch/v1", "Job"),
    ("policy/v1", "PodDisruptionBudget"),
    ("aliquot.dev/v1alpha1", "GpuBudget"),
    ("aliquot.dev/v1alpha1", "GpuQuota"),
];

/// The kind that the demo's control plane does not support; such objects are left out.
const LEFT_OUT: (&str, &str) = ("v1", "ResourceQuota");

/// Classes for which the demo's nodes have no devices, and the reasons.
const NOT_HERE: [(&str, &str); 2] = [
    ("mps.aliquot.dev", "it needs NVIDIA's MPS daemon on the node"),
    ("vfio.aliquot.dev", "it needs the kernel's drivers of PCI devices, and an IOMMU"),
];

/// The examples that are applied if no file is named.
pub(crate) const EXAMPLES: [(&str, &str); 6] = [
    (
        "examples/01-whole-gpu/01-whole-gpu.yaml",
        include_str!("../../../examples/01-whole-gpu/01-whole-gpu.yaml"),
    ),
    (
        "examples/02-mig-by-profile/02-mig-by-profile.yaml",
        include_str!("../../../examples/02-mig-by-profile/02-mig-by-profile.yaml"),
    ),
    (
        "examples/03-mig-by-size/03-mig-by-size.yaml",
        include_str!("../../../examples/03-mig-by-size/03-mig-by-size.yaml"),
    ),
    ("examples/04-share/04-share.yaml", include_str!("../../../examples/04-share/04-share.yaml")),
    (
        "examples/05-two-shares-one-pod/05-two-shares-one-pod.yaml",
        include_str!("../../../examples/05-two-shares-one-pod/05-two-shares-one-pod.yaml"),
    ),
    (
        "examples/06-claim-shared-by-two-pods/06-claim-shared-by-two-pods.yaml",
        include_str!("../../../examples/06-claim-shared-by-two-pods/06-claim-shared-by-two-pods.yaml"),
    ),
];

/// The rendered chart.
const CHART: &str = include_str!("../../../deploy/manifests/aliquot.yaml");

/// A DeviceClass that the chart contains only if it is enabled, as it is in the demo.
const MIG_SHARE: &str = r#"apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: mig-share.aliquot.dev}
spec:
  selectors:
    - cel:
        expression: device.driver == "gpu.aliquot.dev" && device.attributes["gpu.aliquot.dev"].type == "mig-share"
"#;

/// Returns the objects of the chart that the demo applies: DeviceClasses, definitions of this driver's kinds,
/// and webhooks.
pub(crate) fn installation() -> Result<Vec<Document>> {
    let mut documents = parse("deploy/manifests/aliquot.yaml", CHART)?;
    documents.extend(parse("mig-share.yaml", MIG_SHARE)?);
    documents.retain(|document| {
        [
            "DeviceClass",
            "CustomResourceDefinition",
            "MutatingWebhookConfiguration",
            "ValidatingWebhookConfiguration",
        ]
        .contains(&document.text("/kind"))
    });
    Ok(documents)
}

/// Returns true if the demo leaves an object out.
pub(crate) fn is_left_out(document: &Document) -> bool {
    (document.text("/apiVersion"), document.text("/kind")) == LEFT_OUT
}

/// Reads the objects of a file.
pub(crate) fn read(path: &Path) -> Result<Vec<Document>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&path.display().to_string(), &text)
}

/// Splits a text into its objects; empty documents are skipped.
pub(crate) fn parse(file: &str, text: &str) -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    for (line, chunk) in split(text) {
        let place = Place { file: file.to_owned(), line };
        if chunk.lines().all(|l| l.trim().is_empty() || l.trim_start().starts_with('#')) {
            continue;
        }
        // The empty lines keep the parser's line numbers equal to those of the file.
        let padded = "\n".repeat(line.saturating_sub(1)) + chunk;
        let object: Value = serde_saphyr::from_str(&padded)
            .map_err(|error| anyhow::anyhow!("{file}: malformed YAML: {error}"))?;
        if !object.is_object() {
            bail!("{place}: expected a Kubernetes object, found something else");
        }
        documents.push(Document { place, object });
    }
    Ok(documents)
}

/// Returns the documents of a stream, each with the number of its first line.
fn split(text: &str) -> Vec<(usize, &str)> {
    let mut chunks = Vec::new();
    let (mut start, mut first_line, mut offset) = (0, 1, 0);
    for (index, line) in text.split_inclusive('\n').enumerate() {
        if line.trim_end() == "---" {
            chunks.push((first_line, text.get(start..offset).unwrap_or_default()));
            start = offset.saturating_add(line.len());
            first_line = index.saturating_add(2);
        }
        offset = offset.saturating_add(line.len());
    }
    chunks.push((first_line, text.get(start..).unwrap_or_default()));
    chunks
}

impl Document {
    /// Returns a string of the object; empty if absent.
    pub(crate) fn text(&self, pointer: &str) -> &str {
        self.object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns the object's namespace; `default` if it has none.
    pub(crate) fn namespace(&self) -> &str {
        match self.text("/metadata/namespace") {
            "" => "default",
            namespace => namespace,
        }
    }

    /// Returns kind and name, for messages.
    pub(crate) fn label(&self) -> String {
        format!("{} {}", self.text("/kind"), self.text("/metadata/name"))
    }
}

/// Checks for mistakes that would leave a pod waiting without an explanation: unknown kinds, claims and
/// classes.
///
/// # Errors
/// If an object cannot work; the error has file, line and reason of the first one.
pub(crate) fn check(documents: &[Document], classes: &[Document]) -> Result<()> {
    let names = |kind: &str, from: &[Document]| -> BTreeSet<(String, String)> {
        let of_kind = from.iter().filter(|d| d.text("/kind") == kind);
        of_kind.map(|d| (d.namespace().to_owned(), d.text("/metadata/name").to_owned())).collect()
    };
    let known_classes: BTreeSet<String> = names("DeviceClass", classes)
        .into_iter()
        .chain(names("DeviceClass", documents))
        .map(|(_, name)| name)
        .collect();
    let claims = names("ResourceClaim", documents);
    let templates = names("ResourceClaimTemplate", documents);
    let pods: Vec<Document> = documents.iter().filter_map(pod_of).collect();
    for document in documents.iter().chain(&pods) {
        let place = &document.place;
        let kind = (document.text("/apiVersion"), document.text("/kind"));
        if kind == LEFT_OUT {
            continue;
        }
        if !KINDS.contains(&kind) {
            let known: Vec<String> = KINDS.iter().map(|(v, k)| format!("{k} ({v})")).collect();
            bail!("{place}: the demo knows no {} of {:?}; it knows {}", kind.1, kind.0, known.join(", "));
        }
        if document.text("/metadata/name").is_empty() {
            bail!("{place}: {} has no metadata.name", kind.1);
        }
        match fields::unknown(kind.1, &document.object) {
            Ok(None) => {}
            Ok(Some(field)) => bail!("{place}: {} has no field {field}; is it misspelt?", document.label()),
            Err(error) => bail!("{place}: {} is malformed: {error}", document.label()),
        }
        match kind.1 {
            "ResourceClaim" => check_classes(document, "/spec/devices/requests", &known_classes)?,
            "ResourceClaimTemplate" => {
                check_classes(document, "/spec/spec/devices/requests", &known_classes)?
            }
            "Pod" => check_pod(document, &claims, &templates)?,
            _ => {}
        }
    }
    Ok(())
}

fn check_classes(document: &Document, pointer: &str, known: &BTreeSet<String>) -> Result<()> {
    let place = &document.place;
    let requests = document.object.pointer(pointer).and_then(Value::as_array);
    let Some(requests) = requests.filter(|r| !r.is_empty()) else {
        bail!(
            "{place}: {} asks for nothing: {} is empty",
            document.label(),
            pointer.trim_start_matches('/').replace('/', ".")
        );
    };
    for request in requests {
        let exact = request.get("exactly").into_iter();
        let alternatives = request.get("firstAvailable").and_then(Value::as_array).into_iter().flatten();
        for ask in exact.chain(alternatives) {
            let class = ask.get("deviceClassName").and_then(Value::as_str).unwrap_or_default();
            if !known.contains(class) {
                if let Some((_, why)) = NOT_HERE.iter().find(|(absent, _)| *absent == class) {
                    bail!(
                        "{place}: {} asks for DeviceClass {class}, which the demo has not: {why}",
                        document.label()
                    );
                }
                let known: Vec<&str> = known.iter().map(String::as_str).collect();
                bail!(
                    "{place}: {} asks for DeviceClass {class:?}, which does not exist; there are {}",
                    document.label(),
                    known.join(", ")
                );
            }
        }
    }
    Ok(())
}

fn check_pod(
    pod: &Document,
    claims: &BTreeSet<(String, String)>,
    templates: &BTreeSet<(String, String)>,
) -> Result<()> {
    let place = &pod.place;
    let namespace = pod.namespace().to_owned();
    let entries = pod.object.pointer("/spec/resourceClaims").and_then(Value::as_array);
    if entries.is_none_or(Vec::is_empty) {
        bail!(
            "{place}: {} asks for no devices: it has no spec.resourceClaims, and the demo runs only pods that have. Name \
             a ResourceClaim or a ResourceClaimTemplate there",
            pod.label()
        );
    }
    let named = |claims: &Value| claims.as_array().is_some_and(|claims| !claims.is_empty());
    let containers = pod.object.pointer("/spec/containers").and_then(Value::as_array);
    if !containers.into_iter().flatten().any(|c| c.pointer("/resources/claims").is_some_and(named)) {
        bail!(
            "{place}: {}: no container uses its claims; name them in resources.claims of a container",
            pod.label()
        );
    }
    for claim in pod.object.pointer("/spec/resourceClaims").and_then(Value::as_array).into_iter().flatten() {
        for (field, kind, known) in [
            ("resourceClaimName", "ResourceClaim", claims),
            ("resourceClaimTemplateName", "ResourceClaimTemplate", templates),
        ] {
            if let Some(name) = claim.get(field).and_then(Value::as_str)
                && !known.contains(&(namespace.clone(), name.to_owned()))
            {
                bail!(
                    "{place}: {} names {kind} {name:?}, which is not in namespace {namespace:?} of these files",
                    pod.label()
                );
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[test]
    fn the_examples_parse_and_are_complete() {
        let classes = installation().unwrap();
        assert!(classes.iter().filter(|document| document.text("/kind") == "DeviceClass").count() >= 6);
        for (file, text) in EXAMPLES {
            check(&parse(file, text).unwrap(), &classes).unwrap();
        }
    }

    #[test]
    fn the_class_of_shares_of_partitions_is_the_chart_s() {
        let template = include_str!("../../../deploy/helm/aliquot/templates/deviceclass-migshare.yaml");
        let expression = |text: &str| {
            let line = text.lines().find_map(|line| line.trim().strip_prefix("expression: "));
            line.map(|line| line.replace("{{ .Values.driverName | quote }}", "\"gpu.aliquot.dev\""))
        };
        assert!(expression(MIG_SHARE).is_some());
        assert_eq!(expression(MIG_SHARE), expression(template));
    }

    #[test]
    fn documents_know_their_lines() {
        let documents = parse("f.yaml", "# one\n---\na: 1\n---\n\nb: 2\n").unwrap();
        let places: Vec<String> = documents.iter().map(|d| d.place.to_string()).collect();
        assert_eq!(places, ["f.yaml:3", "f.yaml:5"]);
    }

    const CLAIM: &str = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c}\nspec: {devices: {requests: [{name: a, exactly: {deviceClassName: CLASS}}]}}\n";

    #[rstest]
    #[case("a: [1\n", "malformed YAML")]
    #[case("- 1\n", "f.yaml:1: expected a Kubernetes object")]
    #[case("kind: Pod\n", "f.yaml:1: the demo knows no Pod of \"\"")]
    #[case("apiVersion: v1\nkind: Pod\n", "f.yaml:1: Pod has no metadata.name")]
    #[case(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c, resources: {claims: [{name: g}]}}], resourceClaims: [{name: g, resourceClaimName: none}]}\n",
        "f.yaml:2: Pod p names ResourceClaim \"none\""
    )]
    #[case(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [], resourceClaim: [{name: g}]}\n",
        "f.yaml:1: Pod p has no field spec.resourceClaim; is it misspelt?"
    )]
    #[case(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c}]}\n",
        "f.yaml:1: Pod p asks for no devices: it has no spec.resourceClaims"
    )]
    #[case(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c}], resourceClaims: [{name: g}]}\n",
        "f.yaml:1: Pod p: no container uses its claims"
    )]
    #[case(&CLAIM.replace("deviceClassName", "deviceClass"), "has no field spec.devices.requests[0].exactly.deviceClass;")]
    #[case(&CLAIM.replace("CLASS", "[1]"), "f.yaml:1: ResourceClaim c is malformed: invalid type: sequence")]
    fn mistakes_are_named_with_file_line_and_reason(#[case] text: &str, #[case] want: &str) {
        let result = parse("f.yaml", text).and_then(|d| check(&d, &installation().unwrap()));
        let error = format!("{:#}", result.unwrap_err());
        assert!(error.contains(want), "{error}");
    }

    #[test]
    fn an_unknown_class_is_named_with_those_that_exist() {
        let documents = parse("f.yaml", &CLAIM.replace("CLASS", "gpu.example.com")).unwrap();
        let error = check(&documents, &installation().unwrap()).unwrap_err().to_string();
        assert!(error.contains("gpu.example.com") && error.contains("share.aliquot.dev"), "{error}");
        check(
            &parse("f.yaml", &CLAIM.replace("CLASS", "share.aliquot.dev")).unwrap(),
            &installation().unwrap(),
        )
        .unwrap();
    }
}
