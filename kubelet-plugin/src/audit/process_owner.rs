//! Finds the owner of a process on a GPU: its cgroup gives the pod, and the pod gives the shares that it may
//! use. Pure: it does no I/O.
//!
//! The kubelet puts each container into a cgroup whose path names pod and container. A process cannot leave
//! it without rights on the node.

use super::Subject;
use crate::ledger::{Device, Ledger, State};
use aliquot_model::{GpuUuid, MigUuid};
use k8s_openapi::api::core::v1::Pod;
use std::collections::{BTreeMap, BTreeSet};

/// The pod and container of a process.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// The UID of the pod.
    pub pod: String,
    /// The runtime's ID of the container.
    pub container: Option<String>,
}

/// Parses `/proc/<pid>/cgroup`. Returns `None` for a process that is in no container of a pod.
pub fn owner(cgroups: &str) -> Option<Owner> {
    cgroups.lines().find_map(|line| {
        let path = line.splitn(3, ':').nth(2)?;
        let mut parts = path.split('/');
        // The first match counts: below its own cgroup a container can make others of any name.
        let pod = parts.by_ref().find_map(pod_uid)?;
        Some(Owner { pod, container: parts.next().and_then(container_id) })
    })
}

fn pod_uid(part: &str) -> Option<String> {
    let name = part.strip_suffix(".slice").unwrap_or(part);
    let (before, uid) = name.rsplit_once("pod")?;
    let uid = uid.replace('_', "-");
    let groups: Vec<usize> = uid.split('-').map(str::len).collect();
    let is_uid = groups == [8, 4, 4, 4, 12] && uid.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    (is_uid && (before.is_empty() || before.ends_with('-'))).then_some(uid)
}

fn container_id(part: &str) -> Option<String> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let id = name.rsplit(['-', ':']).next().unwrap_or(name);
    (id.len() >= 32 && id.chars().all(|c| c.is_ascii_hexdigit())).then(|| id.to_owned())
}

/// The facts of a pod that the audit needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodFacts {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// Names of claims, by the name of their entry in the pod's spec; claims of extended resources by their
    /// own name.
    claims: BTreeMap<String, String>,
    /// Entry and request of each container's claims, by the container's ID.
    containers: BTreeMap<String, Vec<(String, Option<String>)>>,
}

impl PodFacts {
    /// Returns the UID and the facts of a pod.
    pub fn of(pod: &Pod) -> Option<(String, Self)> {
        let (spec, status) = (pod.spec.as_ref()?, pod.status.clone().unwrap_or_default());
        let mut facts = Self {
            namespace: pod.metadata.namespace.clone()?,
            name: pod.metadata.name.clone()?,
            ..Self::default()
        };
        for used in spec.resource_claims.iter().flatten() {
            let generated = status.resource_claim_statuses.iter().flatten().find(|s| s.name == used.name);
            let name = used.resource_claim_name.clone();
            if let Some(name) = name.or_else(|| generated?.resource_claim_name.clone()) {
                facts.claims.insert(used.name.clone(), name);
            }
        }
        if let Some(extended) = &status.extended_resource_claim_status {
            facts.claims.insert(extended.resource_claim_name.clone(), extended.resource_claim_name.clone());
        }
        let of_container = |name: &str| {
            let normal = spec.containers.iter().chain(spec.init_containers.iter().flatten());
            let found = normal.into_iter().find(|container| container.name == name)?;
            let claims = found.resources.as_ref()?.claims.clone()?;
            Some(claims.into_iter().map(|claim| (claim.name, claim.request)).collect::<Vec<_>>())
        };
        let statuses = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
        for status in statuses {
            // The ID has the form `containerd://<id>`.
            let id = status.container_id.as_deref().and_then(|id| id.split_once("://")).map(|(_, id)| id);
            if let (Some(id), Some(claims)) = (id, of_container(&status.name)) {
                facts.containers.insert(id.to_owned(), claims);
            }
        }
        Some((pod.metadata.uid.clone()?, facts))
    }

    /// Returns true if the claims of this container are known, or if no container is given.
    pub fn knows(&self, container: Option<&str>) -> bool {
        container.is_none_or(|id| self.containers.contains_key(id))
    }

    /// Returns true if the pod uses a claim.
    pub fn uses(&self, namespace: &str, claim: &str) -> bool {
        self.namespace == namespace && self.claims.values().any(|name| name == claim)
    }

    /// Returns true if the container may use a request of a claim. A container that is not known may use all
    /// claims of the pod.
    fn may_use(&self, container: Option<&str>, claim: &str, request: &str) -> bool {
        let entries = self.claims.iter().filter(|(_, name)| *name == claim).map(|(entry, _)| entry);
        let of_container = container.and_then(|id| self.containers.get(id));
        match of_container {
            None => entries.count() > 0,
            Some(list) => {
                let asked = |entry: &String, wanted: &Option<String>| {
                    list.iter().any(|(name, only)| name == entry && (only.is_none() || only == wanted))
                };
                // A container names `main/sub` as `main`.
                let main = request.split('/').next().map(str::to_owned);
                entries.into_iter().any(|entry| asked(entry, &main) || !self.is_an_entry(entry))
            }
        }
    }

    /// Returns true if a name is an entry that containers name. Claims of extended resources have no such
    /// entry.
    fn is_an_entry(&self, entry: &str) -> bool {
        self.claims.get(entry).is_some_and(|name| name != entry)
            || self.containers.values().flatten().any(|(name, _)| name == entry)
    }
}

/// The hardware that a process runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The MIG device on the GPU, if the process runs in one that is known.
    pub partition: Option<MigUuid>,
}

impl Hardware {
    fn is_of(&self, device: &Device) -> bool {
        let partition = device.partition.as_ref();
        device.gpu == self.gpu && partition.map(|own| own.uuid.as_ref()) == self.partition.as_ref().map(Some)
    }
}

/// Returns the shares of a GPU or partition that a process of this container may use; empty if there are
/// none.
pub fn shares(ledger: &Ledger, on: &Hardware, pod: &PodFacts, container: Option<&str>) -> Subject {
    let records = ledger.claims.values().filter(|record| record.state == State::Completed);
    let used = records.filter(|record| pod.uses(&record.claim.namespace, &record.claim.name));
    let devices = used.flat_map(|record| record.devices.iter().map(move |device| (record, device)));
    let there = devices.filter(|(_, device)| on.is_of(device) && device.share.is_some());
    there
        .filter(|(record, device)| pod.may_use(container, &record.claim.name, &device.request))
        .map(|(_, device)| device.result_id.clone())
        .collect::<BTreeSet<_>>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use rstest::rstest;
    use serde_json::{Value, json};

    const UID: &str = "0a1b2c3d-1111-2222-3333-444455556666";
    const ID: &str = "abcdefabcdefabcdefabcdefabcdefabcdefabcdefabcdefabcdefabcdefabcd";

    #[rstest]
    #[case::cgroupfs(format!("0::/kubepods/besteffort/pod{UID}/{ID}"), true)]
    #[case::guaranteed(format!("0::/kubepods/pod{UID}/{ID}"), true)]
    #[case::systemd(format!("0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice/cri-containerd-{ID}.scope", UID.replace('-', "_")), true)]
    #[case::crio(format!("0::/kubepods.slice/kubepods-pod{}.slice/crio-{ID}.scope/container", UID.replace('-', "_")), true)]
    #[case::seen_from_a_cgroup_namespace(format!("0::/../../pod{UID}/{ID}"), true)]
    #[case::version_1(format!("12:pids:/kubepods/burstable/pod{UID}/{ID}\n11:cpu:/kubepods/burstable/pod{UID}/{ID}"), true)]
    #[case::a_cgroup_of_its_own(format!("0::/kubepods/pod{UID}/{ID}/pod00000000-0000-0000-0000-000000000000/x"), true)]
    #[case::a_service("0::/system.slice/containerd.service".to_owned(), false)]
    #[case::no_pod("0::/kubepods.slice/podlike".to_owned(), false)]
    #[case::nothing(String::new(), false)]
    fn a_cgroup_names_pod_and_container(#[case] text: String, #[case] is_pod: bool) {
        let want = is_pod.then(|| Owner { pod: UID.to_owned(), container: Some(ID.to_owned()) });
        assert_eq!(owner(&text), want);
    }

    #[test]
    fn the_pause_container_and_the_pod_itself_have_no_id_of_a_container() {
        let owner = owner(&format!("0::/kubepods/pod{UID}/init")).unwrap();
        assert_eq!((owner.pod.as_str(), owner.container), (UID, None));
    }

    fn facts(pod: Value) -> PodFacts {
        let pod: Pod = serde_json::from_value(pod).unwrap();
        PodFacts::of(&pod).unwrap().1
    }

    /// Two containers: one has request `r` of claim-a, the other all of claim-b, which was made for the pod.
    fn two() -> PodFacts {
        let status = |name: &str, id: &str| {
            json!({"name": name, "containerID": format!("containerd://{id}"), "ready": true, "restartCount": 0,
                   "image": "i", "imageID": "i"})
        };
        facts(json!({
            "metadata": {"namespace": "ns", "name": "p", "uid": UID},
            "spec": {
                "containers": [
                    {"name": "one", "resources": {"claims": [{"name": "a", "request": "r"}]}},
                    {"name": "two", "resources": {"claims": [{"name": "b"}]}},
                ],
                "resourceClaims": [
                    {"name": "a", "resourceClaimName": "claim-a"},
                    {"name": "b", "resourceClaimTemplateName": "t"},
                ],
            },
            "status": {
                "resourceClaimStatuses": [{"name": "b", "resourceClaimName": "claim-b"}],
                "containerStatuses": [status("one", "1"), status("two", "2")],
            },
        }))
    }

    #[rstest]
    #[case(Some("1"), "claim-a", "r", true)]
    #[case(Some("1"), "claim-a", "r/sub", true)]
    #[case(Some("1"), "claim-a", "other", false)]
    #[case(Some("1"), "claim-b", "r", false)]
    #[case(Some("2"), "claim-b", "r", true)]
    #[case(Some("2"), "claim-a", "r", false)]
    #[case::unknown_container(Some("3"), "claim-a", "r", true)]
    #[case::no_container(None, "claim-b", "r", true)]
    #[case::unknown_claim(None, "claim-c", "r", false)]
    fn a_container_may_use_the_requests_that_it_names(
        #[case] container: Option<&str>,
        #[case] claim: &str,
        #[case] request: &str,
        #[case] want: bool,
    ) {
        assert_eq!(two().may_use(container, claim, request), want);
    }

    #[test]
    fn a_process_uses_the_shares_of_the_partition_that_it_runs_in() {
        let gpu = testing::h100(0);
        let named = |id: &str, device: Device| Device { result_id: id.into(), ..device };
        let ledger = testing::ledger_of(&[
            ("a", named("of-partition", testing::share_of_partition(&gpu, 1 << 30, 25))),
            ("b", named("of-gpu", testing::share_of(&gpu, 1 << 30, 25))),
        ]);
        let pod = facts(json!({
            "metadata": {"namespace": "ns", "name": "p", "uid": UID},
            "spec": {"containers": [], "resourceClaims": [
                {"name": "a", "resourceClaimName": "claim-a"}, {"name": "b", "resourceClaimName": "claim-b"}]},
        }));
        let own = MigUuid::parse("MIG-0d0f1c4e-0000-5000-8000-000000000001");
        let other = MigUuid::parse("MIG-0d0f1c4e-0000-5000-8000-000000000002");
        let of = |partition| shares(&ledger, &Hardware { gpu: gpu.uuid.clone(), partition }, &pod, None);
        assert_eq!(of(own), Subject::from(["of-partition".to_owned()]));
        assert_eq!(of(other), Subject::new());
        assert_eq!(of(None), Subject::from(["of-gpu".to_owned()]));
    }

    #[test]
    fn a_claim_of_an_extended_resource_is_the_whole_pods() {
        let pod = facts(json!({
            "metadata": {"namespace": "ns", "name": "p", "uid": UID},
            "spec": {"containers": [{"name": "one", "resources": {}}]},
            "status": {"extendedResourceClaimStatus": {"resourceClaimName": "claim-a", "requestMappings": []}},
        }));
        assert!(pod.uses("ns", "claim-a") && pod.may_use(Some("1"), "claim-a", "r"));
        assert!(!pod.uses("other", "claim-a"));
    }
}
