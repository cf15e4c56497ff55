//! Manifests that tests write, as JSON.

use serde_json::{Value, json};

/// Image with a shell and `cuda-probe`.
pub const TOOLS: &str = "aliquot.dev/tools:latest";

/// A request for one device of a class.
pub fn request(name: &str, class: &str) -> Value {
    json!({"name": name, "exactly": {"deviceClassName": class}})
}

/// A request for one device that a CEL expression selects.
pub fn selected(name: &str, class: &str, expression: &str) -> Value {
    let selectors = json!([{"cel": {"expression": expression}}]);
    json!({"name": name, "exactly": {"deviceClassName": class, "selectors": selectors}})
}

/// A request for a whole GPU by the product's name.
pub fn gpu_of(name: &str, product: &str) -> Value {
    let expression = format!(r#"device.attributes["gpu.aliquot.dev"].productName.contains("{product}")"#);
    selected(name, "gpu.aliquot.dev", &expression)
}

/// A request for a partition with this profile, of a product.
pub fn partition_of(name: &str, profile: &str, product: &str) -> Value {
    let expression = format!(
        r#"device.attributes["gpu.aliquot.dev"].profile == "{profile}" && device.attributes["gpu.aliquot.dev"].productName.contains("{product}")"#
    );
    selected(name, "mig.aliquot.dev", &expression)
}

/// A request for a share.
pub fn share(name: &str, memory: &str, cores: u32) -> Value {
    let capacity = json!({"requests": {"memory": memory, "cores": cores.to_string()}});
    json!({"name": name, "exactly": {"deviceClassName": "share.aliquot.dev", "capacity": capacity}})
}

/// A claim.
pub fn claim(namespace: &str, name: &str, requests: &[Value]) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"devices": {"requests": requests}},
    })
}

/// The same claim with one more annotation.
pub fn annotated(mut claim: Value, name: &str, value: &str) -> Value {
    if let Some(metadata) = claim.pointer_mut("/metadata").and_then(Value::as_object_mut) {
        let all = metadata.entry("annotations").or_insert_with(|| json!({}));
        if let Some(all) = all.as_object_mut() {
            all.insert(name.to_owned(), json!(value));
        }
    }
    claim
}

/// The same claim, with devices before any pod.
pub fn immediate(claim: Value) -> Value {
    annotated(claim, "aliquot.dev/binding", "Immediate")
}

/// The same claim, which keeps its devices for its next pod.
pub fn retained(claim: Value) -> Value {
    annotated(claim, "aliquot.dev/reclaim", "Retain")
}

/// A claim template.
pub fn template(namespace: &str, name: &str, requests: &[Value]) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"spec": {"devices": {"requests": requests}}},
    })
}

/// A pod that runs the probe.
#[derive(Debug, Clone)]
pub struct PodManifest {
    namespace: String,
    name: String,
    claims: Vec<Value>,
    containers: Vec<Value>,
    extra: serde_json::Map<String, Value>,
}

impl PodManifest {
    /// Without claims and containers.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            claims: Vec::new(),
            containers: Vec::new(),
            extra: serde_json::Map::new(),
        }
    }

    /// With one container `main` that has everything of one claim made from this template.
    pub fn of_template(namespace: &str, name: &str, template: &str) -> Self {
        Self::new(namespace, name).template("gpu", template).container("main", &[("gpu", None)])
    }

    /// With one container `main` that has everything of this claim.
    pub fn of_claim(namespace: &str, name: &str, claim: &str) -> Self {
        Self::new(namespace, name).claim("gpu", claim).container("main", &[("gpu", None)])
    }

    /// Adds a claim of its own, made from a template.
    #[must_use]
    pub fn template(mut self, entry: &str, template: &str) -> Self {
        self.claims.push(json!({"name": entry, "resourceClaimTemplateName": template}));
        self
    }

    /// Adds a claim that exists.
    #[must_use]
    pub fn claim(mut self, entry: &str, claim: &str) -> Self {
        self.claims.push(json!({"name": entry, "resourceClaimName": claim}));
        self
    }

    /// Adds a container that runs the probe with these claims, each all of it or one request of it.
    #[must_use]
    pub fn container(mut self, name: &str, claims: &[(&str, Option<&str>)]) -> Self {
        let claims: Vec<Value> = claims
            .iter()
            .map(|(claim, request)| match request {
                Some(request) => json!({"name": claim, "request": request}),
                None => json!({"name": claim}),
            })
            .collect();
        let resources = if claims.is_empty() { json!({}) } else { json!({"claims": claims}) };
        self.containers.push(json!({
            "name": name, "image": TOOLS, "imagePullPolicy": "Never",
            "command": ["cuda-probe", "--hold"], "resources": resources,
        }));
        self
    }

    /// Makes the last container ask for processors.
    #[must_use]
    pub fn cpu(mut self, cpu: &str) -> Self {
        if let Some(resources) = self.containers.last_mut().and_then(|c| c.get_mut("resources")) {
            resources["requests"] = json!({"cpu": cpu});
        }
        self
    }

    /// Makes the last container run a shell command instead.
    #[must_use]
    pub fn shell(mut self, script: &str) -> Self {
        if let Some(container) = self.containers.last_mut() {
            container["command"] = json!(["/usr/bin/bash", "-c", script]);
        }
        self
    }

    /// Sets a field of its spec.
    #[must_use]
    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.extra.insert(field.to_owned(), value);
        self
    }

    /// The object.
    pub fn build(self) -> Value {
        let mut spec = json!({
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 2, "dnsPolicy": "Default",
            "containers": self.containers,
        });
        if let Some(fields) = spec.as_object_mut() {
            if !self.claims.is_empty() {
                fields.insert("resourceClaims".into(), self.claims.into());
            }
            fields.extend(self.extra);
        }
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": spec,
        })
    }
}
