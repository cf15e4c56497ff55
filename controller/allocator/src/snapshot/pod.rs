//! Pods: those that have claims, and those that take room on a node.

use super::claims::key_of;
use super::{
    Affinity, Change, Claim, Gang, HostPort, Labels, ObjectKey, PodVolume, Snapshot, Uid, affinity, gang,
    node, storage,
};
use crate::quantity::Quantity;
use aliquot_model::names::{COMPACTION, SCHEDULING_GATE};
use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, NodeSelector, Pod as ApiPod, PodSpec, PreferredSchedulingTerm, Toleration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// A pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Pod {
    /// Namespace and name of the pod.
    pub key: ObjectKey,
    /// UID of the pod.
    pub uid: Uid,
    /// `resourceVersion` of the object that was read.
    pub version: String,
    /// When the pod was created, in seconds of Unix time.
    pub created: i64,
    /// Priority of the pod.
    pub priority: i32,
    /// Node that the pod is bound to.
    pub node: Option<Arc<str>>,
    /// Node on which kube-scheduler makes room for the pod.
    pub nominated: Option<Arc<str>>,
    /// True if kube-scheduler has tried and found no node that the pod fits.
    pub unschedulable: bool,
    /// The message of kube-scheduler about that.
    pub unschedulable_because: Option<Arc<str>>,
    /// True if the pod has ended.
    pub terminal: bool,
    /// True if a container of the pod was created, so its claims are prepared.
    pub started: bool,
    /// True if the pod is being deleted.
    pub deleting: bool,
    /// When the pod should have ended, in seconds of Unix time, if it is being deleted.
    pub ends_by: Option<i64>,
    /// True for `preemptionPolicy: Never`: no pod is evicted for this pod.
    pub never_preempts: bool,
    /// True if the pod has the scheduling gate of this driver.
    pub gated: bool,
    /// Names of all scheduling gates of the pod.
    pub gates: Vec<String>,
    /// True if the pod may be moved to fill gaps: its owner allows it, and it has a controller that creates
    /// it again.
    pub movable: bool,
    /// UID of the pod's controller, which creates another pod when this one goes.
    pub maker: Option<Uid>,
    /// Labels of the pod.
    pub labels: Labels,
    /// The group of pods that get their devices all together or not at all.
    pub gang: Option<Gang>,
    /// The PodGroup of Kubernetes' own API that the pod is in.
    pub group: Option<Arc<str>>,
    /// The affinity to other pods that the pod demands, if any.
    pub affinity: Option<Arc<Affinity>>,
    /// Volumes of the pod, as far as they limit where it can run.
    pub volumes: Vec<PodVolume>,
    /// The owner reference to the pod's controller.
    pub made_by: Option<Arc<OwnerReference>>,
    /// True if the pod was evicted, by whatever component, to make room for another.
    pub disrupted: bool,
    /// Claims of the pod, each once, under the first name that the pod has for it.
    pub claims: Vec<PodClaim>,
    /// The needs of the pod on a node.
    pub needs: Arc<PodNeeds>,
}

/// A claim of a pod, under its name in the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodClaim {
    /// Name of the claim in the pod.
    pub name: Arc<str>,
    /// Source of the claim.
    pub source: ClaimSource,
    /// The ResourceClaim that the name stands for.
    pub resolution: Resolution,
}

impl PodClaim {
    /// Returns true if this is the claim with this name.
    pub fn is(&self, claim: &str) -> bool {
        matches!(&self.resolution, Resolution::Claim(name) if **name == *claim)
    }
}

/// The source of a pod's claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimSource {
    /// An existing claim that the pod names.
    Named(Arc<str>),
    /// A claim that is generated for the pod from this template.
    Template(Arc<str>),
}

/// The ResourceClaim that a pod's claim stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// The claim with this name.
    Claim(Arc<str>),
    /// No claim is needed for the pod.
    NotNeeded,
    /// The claim is not created yet.
    NotMade,
}

/// The needs of a pod on a node, besides devices.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PodNeeds {
    /// Requests for CPU, memory and other resources.
    pub requests: BTreeMap<Arc<str>, Quantity>,
    /// `nodeSelector`
    pub node_selector: BTreeMap<String, String>,
    /// Required node affinity.
    pub affinity: Option<NodeSelector>,
    /// Preferred node affinity.
    pub preferred: Vec<PreferredSchedulingTerm>,
    /// Host ports.
    pub ports: Vec<HostPort>,
    /// Tolerations of node taints.
    pub tolerations: Vec<Toleration>,
    /// True if these needs stand for pods that are not known yet. Such pods are taken to tolerate the taints
    /// that an administrator put on nodes.
    pub unknown: bool,
}

impl Pod {
    /// Returns true if the pod waits for a node, and has neither ended nor is being deleted.
    pub fn is_pending(&self) -> bool {
        self.node.is_none() && !self.terminal && !self.deleting
    }

    /// Returns true if the pod has a scheduling gate other than that of this driver.
    pub fn is_held_by_others(&self) -> bool {
        self.gates.iter().any(|gate| gate != SCHEDULING_GATE)
    }

    /// Returns the claims of the pod that are known, in order.
    pub fn claim_keys(&self) -> impl Iterator<Item = ObjectKey> {
        self.claims.iter().filter_map(|claim| match &claim.resolution {
            Resolution::Claim(name) => {
                Some(ObjectKey { namespace: self.key.namespace.clone(), name: name.clone() })
            }
            Resolution::NotNeeded | Resolution::NotMade => None,
        })
    }

    /// Returns true if the pod names this claim itself: the claim is created by hand, not generated for the
    /// pod from a template.
    pub fn names(&self, claim: &ObjectKey) -> bool {
        claim.namespace == self.key.namespace
            && self
                .claims
                .iter()
                .any(|one| matches!(&one.source, ClaimSource::Named(name) if *name == claim.name))
    }

    /// Creates a pod that needs nothing but one claim, to decide for the claim alone.
    pub fn in_place_of(claim: &Claim) -> Self {
        Self {
            key: claim.key.clone(),
            uid: claim.uid.clone(),
            version: String::new(),
            created: claim.created,
            priority: 0,
            never_preempts: true,
            ends_by: None,
            movable: false,
            node: None,
            nominated: None,
            unschedulable: false,
            unschedulable_because: None,
            terminal: false,
            started: false,
            deleting: false,
            gated: false,
            gates: Vec::new(),
            maker: None,
            labels: Labels::new(),
            gang: None,
            group: None,
            affinity: None,
            volumes: Vec::new(),
            made_by: None,
            disrupted: false,
            claims: vec![PodClaim {
                name: claim.key.name.clone(),
                source: ClaimSource::Named(claim.key.name.clone()),
                resolution: Resolution::Claim(claim.key.name.clone()),
            }],
            needs: Arc::new(PodNeeds { unknown: true, ..PodNeeds::default() }),
        }
    }

    /// Returns true if the two pods do not differ in anything that a decision depends on.
    fn is_same(&self, other: &Self) -> bool {
        let unschedulable_because = other.unschedulable_because.clone();
        Self { version: other.version.clone(), unschedulable_because, ..self.clone() } == *other
    }

    /// Reads the API object; `None` if a part that must be there is missing.
    pub(crate) fn read(pod: &ApiPod) -> Option<Self> {
        let key = key_of(&pod.metadata)?;
        let spec = pod.spec.as_ref()?;
        let status = pod.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("");
        let made = |statuses: Option<&Vec<ContainerStatus>>| {
            statuses
                .into_iter()
                .flatten()
                .any(|status| status.container_id.as_deref().is_some_and(|id| !id.is_empty()))
        };
        let started = phase == "Running"
            || status.is_some_and(|s| {
                made(s.container_statuses.as_ref()) || made(s.init_container_statuses.as_ref())
            });
        let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let unschedulable = conditions.iter().find(|condition| {
            condition.type_ == "PodScheduled"
                && condition.status == "False"
                && condition.reason.as_deref() == Some("Unschedulable")
        });
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let gates: Vec<String> =
            spec.scheduling_gates.iter().flatten().map(|gate| gate.name.clone()).collect();
        Some(Self {
            uid: pod.metadata.uid.as_deref()?.into(),
            version: pod.metadata.resource_version.clone().unwrap_or_default(),
            created: pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            priority: spec.priority.unwrap_or(0),
            node: spec.node_name.as_deref().filter(|node| !node.is_empty()).map(Into::into),
            nominated: status
                .and_then(|status| status.nominated_node_name.as_deref())
                .filter(|node| !node.is_empty())
                .map(Into::into),
            unschedulable: unschedulable.is_some(),
            unschedulable_because: unschedulable
                .and_then(|condition| condition.message.as_deref())
                .map(Into::into),
            terminal: matches!(phase, "Succeeded" | "Failed"),
            started,
            deleting: pod.metadata.deletion_timestamp.is_some(),
            movable: is_movable(pod),
            ends_by: pod.metadata.deletion_timestamp.as_ref().map(|time| time.0.as_second()),
            never_preempts: spec.preemption_policy.as_deref() == Some("Never"),
            gated: gates.iter().any(|gate| gate == SCHEDULING_GATE),
            gates,
            maker: pod
                .metadata
                .owner_references
                .iter()
                .flatten()
                .find(|owner| owner.controller == Some(true))
                .map(|owner| owner.uid.as_str().into()),
            made_by: pod
                .metadata
                .owner_references
                .iter()
                .flatten()
                .find(|owner| owner.controller == Some(true))
                .map(|owner| Arc::new(owner.clone())),
            disrupted: status.and_then(|status| status.conditions.as_ref()).is_some_and(|conditions| {
                conditions
                    .iter()
                    .any(|condition| condition.type_ == "DisruptionTarget" && condition.status == "True")
            }),
            claims: claims(pod, spec),
            needs: Arc::new(needs(spec)),
            gang: Gang::read(&key.namespace, &pod.metadata),
            group: gang::group_of(&pod.metadata),
            affinity: affinity::read(&key.namespace, &labels, spec),
            volumes: storage::of_pod(&key.namespace, &key.name, spec),
            labels,
            key,
        })
    }
}

fn is_movable(pod: &ApiPod) -> bool {
    let said = pod.metadata.annotations.as_ref().and_then(|all| all.get(COMPACTION));
    let mut owners = pod.metadata.owner_references.iter().flatten();
    said.is_some_and(|value| value == "Allow") && owners.any(|owner| owner.controller == Some(true))
}

/// Returns the claims of a pod. A pod may name one claim several times. It is still one claim: it is decided,
/// written and reserved once.
fn claims(pod: &ApiPod, spec: &PodSpec) -> Vec<PodClaim> {
    let statuses = pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let made: HashMap<&str, _> = statuses.map(|status| (status.name.as_str(), status)).collect();
    let mut seen: HashSet<Arc<str>> = HashSet::new();
    spec.resource_claims
        .iter()
        .flatten()
        .filter_map(|claim| {
            let (source, resolution) = match (&claim.resource_claim_name, &claim.resource_claim_template_name)
            {
                (Some(name), _) => {
                    let name: Arc<str> = name.as_str().into();
                    (ClaimSource::Named(name.clone()), Resolution::Claim(name))
                }
                (None, Some(template)) => {
                    let resolution = match made.get(claim.name.as_str()) {
                        Some(status) => status
                            .resource_claim_name
                            .as_deref()
                            .map_or(Resolution::NotNeeded, |name| Resolution::Claim(name.into())),
                        None => Resolution::NotMade,
                    };
                    (ClaimSource::Template(template.as_str().into()), resolution)
                }
                // The pod has neither: this is a source of an unknown kind.
                (None, None) => return None,
            };
            Some(PodClaim { name: claim.name.as_str().into(), source, resolution })
        })
        .filter(|claim| match &claim.resolution {
            Resolution::Claim(name) => seen.insert(name.clone()),
            Resolution::NotNeeded | Resolution::NotMade => true,
        })
        .collect()
}

type Requests = BTreeMap<Arc<str>, Quantity>;

/// Returns what kube-scheduler counts for a pod. That is the sum of containers and sidecars, or the largest
/// step of initialization if that is more. Amounts that the pod states itself replace these. The overhead is
/// added.
fn needs(spec: &PodSpec) -> PodNeeds {
    let of = |container: &Container| {
        read(container.resources.as_ref().and_then(|resources| resources.requests.as_ref()))
    };
    let mut total = Requests::new();
    for container in &spec.containers {
        add(&mut total, &of(container));
    }
    let mut sidecars = Requests::new();
    let mut start = Requests::new();
    for container in spec.init_containers.iter().flatten() {
        let own = of(container);
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut sidecars, &own);
            raise(&mut start, &sidecars);
        } else {
            let mut step = sidecars.clone();
            add(&mut step, &own);
            raise(&mut start, &step);
        }
    }
    add(&mut total, &sidecars);
    raise(&mut total, &start);
    let pod_level = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    for (name, amount) in read(pod_level) {
        total.insert(name, amount);
    }
    add(&mut total, &read(spec.overhead.as_ref()));
    let node_affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    PodNeeds {
        unknown: false,
        requests: total,
        node_selector: spec.node_selector.clone().unwrap_or_default(),
        affinity: node_affinity
            .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.clone()),
        preferred: node_affinity
            .and_then(|affinity| affinity.preferred_during_scheduling_ignored_during_execution.clone())
            .unwrap_or_default(),
        ports: ports(spec),
        tolerations: spec.tolerations.clone().unwrap_or_default(),
    }
}

/// Returns the host ports that containers and sidecars want.
fn ports(spec: &PodSpec) -> Vec<HostPort> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    spec.containers
        .iter()
        .chain(sidecars)
        .flat_map(|container| container.ports.iter().flatten())
        .filter_map(|port| {
            let number = port.host_port.filter(|number| *number > 0)?;
            Some(HostPort::new(port.protocol.as_deref(), number, port.host_ip.as_deref()))
        })
        .collect()
}

fn read(requests: Option<&BTreeMap<String, ApiQuantity>>) -> Requests {
    node::resources_of(requests)
}

fn add(sum: &mut Requests, more: &Requests) {
    for (name, amount) in more {
        let entry = sum.entry(name.clone()).or_default();
        *entry = *entry + *amount;
    }
}

fn raise(most: &mut Requests, other: &Requests) {
    for (name, amount) in other {
        let entry = most.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}

impl Snapshot {
    /// Adds or replaces a pod.
    pub fn apply_pod(&mut self, pod: &ApiPod) -> Change {
        let Some(read) = Pod::read(pod) else { return Change::Nothing };
        let key = read.key.clone();
        let takes_room = read.node.is_some() && !read.terminal;
        if read.claims.is_empty() && !read.gated && !takes_room {
            return self.delete_pod(&key);
        }
        if let Some(known) = self.pods.get(&key)
            && known.uid == read.uid
            && super::claims::is_older(&read.version, &known.version)
        {
            return Change::Nothing;
        }
        let before = self.pods.remove(&key);
        let same = before.as_ref().is_some_and(|before| before.is_same(&read));
        let replaced = before.as_ref().is_some_and(|before| before.uid != read.uid);
        if let Some(before) = &before {
            self.unlink(before);
            let going = |pod: &Pod| (pod.deleting, pod.terminal, pod.ends_by, pod.priority);
            if replaced || going(before) != going(&read) {
                self.holders_changed();
            }
        }
        let mut room = false;
        if replaced && let Some(before) = &before {
            room |= self.unaccount(&before.uid);
        }
        for claim in read.claim_keys() {
            self.pods_of_claim.entry(claim).or_default().insert(key.clone());
        }
        if !read.claims.is_empty() {
            *self.priorities.entry(read.priority).or_default() += 1;
        }
        let interesting = !same && (read.gated || !read.claims.is_empty());
        room |=
            before.is_some_and(|before| before.labels != read.labels) && !self.companies.waiting.is_empty();
        self.companies.add(&read);
        self.gangs.add(&read);
        self.pods.insert(key.clone(), read);
        room |= self.account(&key);
        Change::of(if interesting { vec![key] } else { Vec::new() }, room)
    }

    /// Removes a pod.
    pub fn delete_pod(&mut self, key: &ObjectKey) -> Change {
        let Some(pod) = self.pods.remove(key) else { return Change::Nothing };
        self.unlink(&pod);
        self.holders_changed();
        let room = self.unaccount(&pod.uid);
        // The caller drops what it keeps for the pod.
        Change::of(vec![key.clone()], room)
    }

    /// Replaces all pods.
    pub fn reset_pods(&mut self, pods: &[ApiPod]) -> Change {
        let kept: HashSet<ObjectKey> = pods.iter().filter_map(|pod| key_of(&pod.metadata)).collect();
        let gone: Vec<ObjectKey> = self.pods.keys().filter(|key| !kept.contains(key)).cloned().collect();
        let mut changed = Vec::new();
        for key in gone {
            self.delete_pod(&key);
            changed.push(key);
        }
        for pod in pods {
            if let Change::Pods(more) | Change::PodsAndRoom(more) = self.apply_pod(pod) {
                changed.extend(more);
            }
        }
        Change::of(changed, true)
    }

    fn unlink(&mut self, pod: &Pod) {
        self.companies.remove(&pod.key);
        self.gangs.remove(pod);
        if !pod.claims.is_empty()
            && let Some(count) = self.priorities.get_mut(&pod.priority)
        {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.priorities.remove(&pod.priority);
            }
        }
        for claim in pod.claim_keys() {
            if let Some(pods) = self.pods_of_claim.get_mut(&claim) {
                pods.remove(&pod.key);
                if pods.is_empty() {
                    self.pods_of_claim.remove(&claim);
                }
            }
        }
    }

    /// Returns the node of the pod's allocated claims; `None` if there is none or the claims are on different
    /// nodes.
    pub fn pinned_node(&self, pod: &Pod) -> Option<Arc<str>> {
        let mut pinned = None;
        for claim in pod.claim_keys() {
            if let Some(node) = self.effective_allocation(&claim).and_then(|a| a.node.as_ref()) {
                match &pinned {
                    None => pinned = Some(node.clone()),
                    Some(other) if other == node => {}
                    Some(_) => return None,
                }
            }
        }
        pinned
    }
}
