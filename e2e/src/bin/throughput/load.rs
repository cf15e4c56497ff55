//! Pods that come all at once, and how long it takes until the last is bound.

use crate::fleet::FAKE;
use crate::usage;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects;
use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

/// What claims ask for, one after the other: 1g 40 %, 1g with double memory 10 %, 2g 25 %, 3g 15 %, 4g 5 %,
/// 7g 5 %.
pub(crate) const PROFILES: [&str; 20] = [
    "1g.10gb", "2g.20gb", "1g.10gb", "3g.40gb", "1g.10gb", "1g.20gb", "2g.20gb", "1g.10gb", "4g.40gb",
    "2g.20gb", "1g.10gb", "3g.40gb", "1g.10gb", "2g.20gb", "1g.20gb", "1g.10gb", "7g.80gb", "3g.40gb",
    "2g.20gb", "1g.10gb",
];
/// Label of pods that says what they are part of.
pub(crate) const PART: &str = "part";
/// Objects that are created at a time.
const AT_A_TIME: usize = 32;
/// Longest run.
const LONGEST: Duration = Duration::from_secs(400);

/// What the claim of this number asks for.
pub(crate) fn profile(number: usize) -> &'static str {
    PROFILES.get(number % PROFILES.len()).copied().unwrap_or("1g.10gb")
}

/// The number at the end of a name.
pub(crate) fn number_of(name: &str) -> Option<usize> {
    name.rsplit('-').next()?.parse().ok()
}

/// Where pods have their claims from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claims {
    /// Each has one that is there before.
    Own,
    /// kube-controller-manager makes one from a template when it sees the pod.
    Template,
}

impl Claims {
    /// For tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Own => "claim",
            Self::Template => "template",
        }
    }

    /// For the names of figures.
    pub(crate) const fn suffix(self) -> &'static str {
        match self {
            Self::Template => "_template",
            Self::Own => "",
        }
    }
}

/// A run.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    /// Pods.
    pub(crate) pods: usize,
    /// From the first request to create one to the last answer.
    pub(crate) created: Duration,
    /// From the first request to create one to the last that was seen bound.
    pub(crate) bound: Duration,
    /// Processor seconds meanwhile, by program.
    pub(crate) used: BTreeMap<String, f64>,
}

impl Measured {
    /// Pods a second.
    pub(crate) fn rate(&self) -> f64 {
        let pods = u32::try_from(self.pods).unwrap_or(u32::MAX);
        f64::from(pods) / self.bound.as_secs_f64()
    }

    /// Processor milliseconds a pod, of all programs of the cluster together: other programs on the machine
    /// change it little.
    pub(crate) fn cost(&self) -> f64 {
        let pods = u32::try_from(self.pods).unwrap_or(u32::MAX);
        self.used.values().sum::<f64>() * 1000.0 / f64::from(pods)
    }
}

/// A namespace to make pods in.
pub(crate) struct Load<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) client: Client,
    pub(crate) namespace: String,
}

impl<'a> Load<'a> {
    /// A namespace with a template for each profile.
    pub(crate) async fn new(cluster: &'a Cluster) -> Result<Self> {
        let namespace = cluster.namespace("throughput").await?;
        let load = Self { cluster, client: cluster.client.clone(), namespace };
        let templates: HashSet<&str> = PROFILES.into_iter().collect();
        for profile in templates {
            let object = objects::template(&load.namespace, &template_of(profile), &[request(profile)]);
            load.api::<ResourceClaimTemplate>()
                .create(&PostParams::default(), &serde_json::from_value(object)?)
                .await?;
        }
        Ok(load)
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Makes so many pods and waits until all are bound.
    pub(crate) async fn measure(&self, claims: Claims, count: usize) -> Result<Measured> {
        if claims == Claims::Own {
            let objects = (0..count).map(|number| {
                objects::claim(&self.namespace, &format!("claim-{number}"), &[request(profile(number))])
            });
            self.create::<ResourceClaim>(objects.collect()).await?;
        }
        let pods = (0..count).map(|number| {
            let claim = match claims {
                Claims::Own => json!({"name": "gpu", "resourceClaimName": format!("claim-{number}")}),
                Claims::Template => {
                    json!({"name": "gpu", "resourceClaimTemplateName": template_of(profile(number))})
                }
            };
            self.pod("pod", number, Some(claim))
        });
        self.measure_pods(pods.collect()).await
    }

    /// Makes these pods and waits until all are bound.
    pub(crate) async fn measure_pods(&self, pods: Vec<Value>) -> Result<Measured> {
        let count = pods.len();
        let wanted: HashSet<String> = pods
            .iter()
            .filter_map(|pod| pod.pointer("/metadata/name").and_then(Value::as_str).map(ToOwned::to_owned))
            .collect();
        // Only what is bound: the watch itself shall cost as little as it can.
        let bound = watcher::Config::default().fields("spec.nodeName!=");
        let mut bound = watcher(self.api::<PartialObjectMeta<Pod>>(), bound).boxed();
        let mut names: HashSet<String> = HashSet::new();
        while let Some(event) = bound.try_next().await? {
            match event {
                watcher::Event::InitApply(pod) if wanted.contains(&pod.name_any()) => {
                    bail!("pod {} is there before the start", pod.name_any())
                }
                watcher::Event::InitDone => break,
                _ => {}
            }
        }
        let used = usage::so_far();
        let started = Instant::now();
        let creating = async {
            self.create::<Pod>(pods).await?;
            Ok::<_, anyhow::Error>(started.elapsed())
        };
        let watching = async {
            while names.len() < count {
                match tokio::time::timeout(LONGEST, bound.try_next()).await {
                    Ok(Ok(Some(watcher::Event::Apply(pod)))) => {
                        let name = pod.name_any();
                        if wanted.contains(&name) {
                            names.insert(name);
                        }
                    }
                    Ok(Ok(_)) => {}
                    // A watch goes on by itself.
                    Ok(Err(error)) => eprintln!("watching pods: {error}"),
                    Err(_) => bail!("{} of {count} pods are bound, and no more for {LONGEST:?}", names.len()),
                }
            }
            Ok::<_, anyhow::Error>(started.elapsed())
        };
        let (created, bound) = tokio::try_join!(creating, watching)?;
        Ok(Measured { pods: count, created, bound, used: usage::since(&used) })
    }

    /// Creates objects, many at a time.
    pub(crate) async fn create<K>(&self, objects: Vec<Value>) -> Result<()>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>
            + serde::Serialize
            + serde::de::DeserializeOwned
            + Clone
            + std::fmt::Debug,
        K::DynamicType: Default,
    {
        let api = self.api::<K>();
        futures::stream::iter(objects)
            .map(|object| {
                let api = api.clone();
                async move {
                    let object: K = serde_json::from_value(object)?;
                    api.create(&PostParams::default(), &object).await?;
                    Ok::<_, anyhow::Error>(())
                }
            })
            .buffer_unordered(AT_A_TIME)
            .try_collect::<Vec<()>>()
            .await
            .context("cannot create")?;
        Ok(())
    }

    /// A pod for the nodes without machines, with a label that says what it is part of.
    pub(crate) fn pod(&self, part: &str, number: usize, claim: Option<Value>) -> Value {
        let uses = if claim.is_some() { json!([{"name": "gpu"}]) } else { json!([]) };
        json!({
            "metadata": {
                "name": format!("{part}-{number}"), "namespace": self.namespace, "labels": {PART: part},
            },
            "spec": {
                "nodeSelector": {FAKE: "true"},
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 0,
                "resourceClaims": claim.into_iter().collect::<Vec<_>>(),
                "containers": [{
                    "name": "main", "image": objects::TOOLS, "imagePullPolicy": "Never",
                    "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "claims": uses},
                }],
            },
        })
    }

    /// Deletes pods and claims, and waits until they are gone.
    pub(crate) async fn clean(&self) -> Result<()> {
        let now = DeleteParams::default().grace_period(0);
        let all = ListParams::default();
        let limit = Duration::from_secs(180);
        self.cluster
            .wait_at_most(limit, "pods and claims to go", || async {
                // The API server gives up on a request after a minute, and many take longer.
                self.api::<Pod>().delete_collection(&now, &all).await?;
                self.api::<ResourceClaim>().delete_collection(&now, &all).await?;
                let few = ListParams::default().limit(1);
                let pods = self.api::<Pod>().list_metadata(&few).await?;
                let claims = self.api::<ResourceClaim>().list_metadata(&few).await?;
                Ok((pods.items.is_empty() && claims.items.is_empty()).then_some(()))
            })
            .await
    }

    /// Sees to it that each of so many claims has devices and a pod.
    pub(crate) async fn all_allocated(&self, count: usize) -> Result<Vec<ResourceClaim>> {
        let claims = self.api::<ResourceClaim>().list(&ListParams::default()).await?.items;
        let given = claims.iter().filter(|claim| {
            let status = claim.status.as_ref();
            status.is_some_and(|status| status.allocation.is_some() && status.reserved_for.is_some())
        });
        let given = given.count();
        ensure!(
            given == count,
            "{given} of {count} claims have devices and a pod, though all pods are bound"
        );
        Ok(claims)
    }
}

/// A request for a partition.
pub(crate) fn request(profile: &str) -> Value {
    objects::partition_of("r", profile, "H100")
}

/// Name of the template of a profile.
pub(crate) fn template_of(profile: &str) -> String {
    format!("mig-{}", profile.replace('.', "-"))
}
