//! A cluster in an index: nodes as the node agent publishes them, claims that come and go.

use crate::fixtures::{self, DRIVER, object};
use aliquot_allocator::schedule::{Decision, LeftOut, Matcher, NoFit, Options, Plan, decide};
use aliquot_allocator::snapshot::{FINGERPRINT, ObjectKey, Pod, Snapshot, fingerprint};
use aliquot_model::layout::{AllocatorMode, GpuState};
use aliquot_model::{GpuInfo, names};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// GPUs of a node.
pub(crate) const GPUS: u32 = 8;
/// Node shapes: products by driver versions.
pub(crate) const PRODUCTS: [&str; 4] =
    ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H800"];
pub(crate) const DRIVERS: [&str; 5] = ["550.54.15", "560.35.3", "565.57.1", "570.86.15", "575.51.3"];

/// The slices of one make of node, to be copied.
pub(crate) struct Shape(Vec<ResourceSlice>);

impl Shape {
    /// The make of this number.
    pub(crate) fn new(number: usize) -> Self {
        Self::with(usize::try_from(GPUS).expect("few"), |info| {
            info.product_name = PRODUCTS[number % PRODUCTS.len()].to_owned();
            info.driver_version = DRIVERS[number / PRODUCTS.len() % DRIVERS.len()].to_owned();
        })
    }

    /// A node with so many H100, changed.
    pub(crate) fn with(gpus: usize, change: impl Fn(&mut GpuInfo)) -> Self {
        let gpus: Vec<GpuState> = (0..u32::try_from(gpus).expect("few"))
            .map(|minor| {
                let mut info = fixtures::h100("shape", minor);
                change(&mut info);
                GpuState {
                    info,
                    live: Vec::new(),
                    held: Vec::new(),
                    standing: Vec::new(),
                    taints: Vec::new(),
                }
            })
            .collect();
        Self(fixtures::slices_of("shape", &gpus, AllocatorMode::Controller, 1))
    }

    fn slices(&self, node: &str, number: usize) -> Vec<ResourceSlice> {
        let mut slices = self.0.clone();
        for slice in &mut slices {
            let name = slice.metadata.name.take().expect("named").replace("shape", node);
            slice.metadata.name = Some(name);
            slice.spec.node_name = Some(node.to_owned());
            slice.spec.pool.name = names::pool_name(DRIVER, node);
            for attribute in
                slice.spec.devices.iter_mut().flatten().filter_map(|d| d.attributes.as_mut()).flatten()
            {
                if let (true, Some(text)) =
                    (attribute.0.to_lowercase().ends_with("uuid"), &mut attribute.1.string)
                {
                    let (_, minor) = text.rsplit_once('-').expect("a UUID");
                    *text = format!("GPU-{number:08x}-{minor}");
                }
            }
        }
        slices
    }
}

/// Objects as the API has them.
#[derive(Debug, Default)]
pub(crate) struct Published {
    pub(crate) nodes: Vec<Node>,
    pub(crate) slices: Vec<ResourceSlice>,
    pub(crate) allocated: Vec<ResourceClaim>,
}

/// A cluster.
pub(crate) struct Cluster {
    /// What was added, for others to decide on: nodes, slices; claims with devices.
    pub(crate) published: Option<Published>,
    pub(crate) index: Snapshot,
    pub(crate) matcher: Matcher,
    pub(crate) options: Options,
    version: u64,
    specs: HashMap<String, Value>,
}

impl Cluster {
    pub(crate) fn new(options: Options) -> Self {
        let mut index = Snapshot::new(DRIVER);
        index.reset_classes(&fixtures::classes());
        Self { published: None, index, matcher: Matcher::new(), options, version: 0, specs: HashMap::new() }
    }

    /// Adds nodes; the time that the index took for it.
    pub(crate) fn add_nodes(&mut self, nodes: usize, shapes: &[Shape]) -> Duration {
        let resources = [("cpu", "2048"), ("memory", "16Ti"), ("pods", "1000")];
        self.add(0..nodes, shapes, &resources.map(|(name, amount)| (name, amount.to_owned())))
    }

    /// Adds nodes of these numbers with these resources.
    pub(crate) fn add(
        &mut self,
        numbers: Range<usize>,
        shapes: &[Shape],
        resources: &[(&str, String)],
    ) -> Duration {
        let mut taken = Duration::ZERO;
        for number in numbers {
            let name = node_name(number);
            let slices = shapes[number % shapes.len()].slices(&name, number);
            let mut node = fixtures::node(&name);
            let allocatable = node.status.as_mut().expect("set").allocatable.as_mut().expect("set");
            for (resource, amount) in resources {
                allocatable.insert((*resource).to_owned(), object(json!(amount)));
            }
            let start = Instant::now();
            self.index.apply_node(&node);
            for slice in &slices {
                self.index.apply_slice(slice);
            }
            taken += start.elapsed();
            if let Some(published) = &mut self.published {
                published.nodes.push(node);
                published.slices.extend(slices);
            }
        }
        taken
    }

    fn claim_object(&mut self, name: &str, spec: &Value) -> ResourceClaim {
        self.version += 1;
        let mut claim = fixtures::claim(name, spec);
        claim.metadata.uid = Some(format!("uid-{name}"));
        claim.metadata.resource_version = Some(self.version.to_string());
        claim
    }

    /// A claim, and a pod for it.
    pub(crate) fn ask(&mut self, name: &str, spec: &Value) -> Pod {
        let claim = self.claim_object(name, spec);
        self.index.apply_claim(&claim);
        let mut pod = fixtures::pod(name, &[name]);
        pod.metadata.uid = Some(format!("pod-{name}"));
        self.index.apply_pod(&pod);
        self.specs.insert(name.to_owned(), spec.clone());
        self.index.pod(&ObjectKey::new("default", name)).expect("kept").clone()
    }

    /// A claim, and a pod for it that asks for such resources too.
    pub(crate) fn ask_for(&mut self, name: &str, spec: &Value, requests: &[(&str, String)]) -> Pod {
        self.ask(name, spec);
        self.put_pod(name, None, requests)
    }

    /// Shows that a pod is on a node.
    pub(crate) fn bind(&mut self, name: &str, node: &str, requests: &[(&str, String)]) {
        self.put_pod(name, Some(node), requests);
    }

    fn put_pod(&mut self, name: &str, node: Option<&str>, requests: &[(&str, String)]) -> Pod {
        let mut pod = fixtures::pod(name, &[name]);
        pod.metadata.uid = Some(format!("pod-{name}"));
        let spec = pod.spec.as_mut().expect("set");
        spec.node_name = node.map(ToOwned::to_owned);
        if node.is_some() {
            spec.scheduling_gates = None;
        }
        let resources = spec.containers[0].resources.as_mut().expect("set");
        let requests = requests.iter().map(|(name, amount)| ((*name).to_owned(), object(json!(amount))));
        resources.requests = Some(requests.collect());
        self.index.apply_pod(&pod);
        self.index.pod(&ObjectKey::new("default", name)).expect("kept").clone()
    }

    /// Decides.
    pub(crate) fn decide(&mut self, pod: &Pod) -> Decision {
        self.decide_within(pod, &mut || false)
    }

    /// Decides unless time runs out.
    pub(crate) fn decide_within(&mut self, pod: &Pod, expired: &mut dyn FnMut() -> bool) -> Decision {
        decide(&self.index, &mut self.matcher, pod, &LeftOut::new(), self.options, expired)
    }

    /// Lets the index learn of a refusal, as the controller does.
    pub(crate) fn refused(&mut self, reason: &NoFit) {
        for (board, place) in reason.wanted() {
            self.index.note_asked(*board, *place);
        }
    }

    /// Lets the API show a decision.
    pub(crate) fn show(&mut self, plan: &Plan) {
        for draft in &plan.drafts {
            let mut share = 0;
            let allocation = draft.finish(Timestamp::from_second(1_000).expect("a time"), || {
                share += 1;
                format!("share-{}-{share}", draft.claim.name)
            });
            let name = draft.claim.name.to_string();
            let spec = self.specs[&name].clone();
            self.hold(&name, &spec, &allocation);
        }
    }

    /// Lets the API show an allocation.
    pub(crate) fn hold(&mut self, name: &str, spec: &Value, allocation: &AllocationResult) {
        let mut claim = self.claim_object(name, spec);
        let seconds = allocation.allocation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
        let results = allocation.devices.as_ref().and_then(|d| d.results.clone()).unwrap_or_default();
        let mark = fingerprint(&format!("uid-{name}"), seconds, &results);
        claim.metadata.annotations = Some([(FINGERPRINT.to_owned(), mark)].into());
        claim.status = Some(object(json!({
            "allocation": allocation,
            "reservedFor": [{"resource": "pods", "name": name, "uid": format!("pod-{name}")}],
        })));
        self.index.apply_claim(&claim);
        if let Some(published) = &mut self.published {
            published.allocated.push(claim);
        }
    }

    /// Ends a claim and its pod.
    pub(crate) fn end(&mut self, name: &str) {
        let key = ObjectKey::new("default", name);
        self.index.delete_claim(&key, None);
        self.index.delete_pod(&key);
        self.specs.remove(name);
    }
}

/// Name of a node.
pub(crate) fn node_name(number: usize) -> String {
    format!("node-{number:05}")
}
