//! Looking at the cluster as its users do, and waiting for what it should become.

use crate::cluster::{Cluster, PATIENCE, SYSTEM};
use aliquot_model::names::{CLAIM_FINALIZER, DEFAULT_DRIVER, SCHEDULING_GATE, controller_taint, held_taint};
use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Event, Namespace, Pod};
use k8s_openapi::api::resource::v1::{AllocationResult, Device, ResourceClaim, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, LogParams, PostParams};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// What the probe found in a container.
#[derive(Debug, Clone)]
pub struct Report {
    /// Bytes that it got of each device before CUDA said no.
    pub allocated: Vec<u64>,
    /// UUIDs of the devices.
    pub uuids: Vec<String>,
    /// Names of the devices.
    pub names: Vec<String>,
}

impl Report {
    /// Reads what the probe printed.
    ///
    /// # Errors
    /// If CUDA did not say no because memory was used up.
    fn read(line: &str) -> Result<Self> {
        let report: Value = serde_json::from_str(line).with_context(|| format!("no report: {line:?}"))?;
        let devices = report.pointer("/devices").and_then(Value::as_array).cloned().unwrap_or_default();
        ensure!(report.get("error").is_none(), "the probe failed: {line}");
        for device in &devices {
            let code = device.get("refused_with").and_then(Value::as_i64);
            ensure!(code == Some(2), "not CUDA_ERROR_OUT_OF_MEMORY: {line}");
        }
        let text =
            |d: &Value, field: &str| d.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
        Ok(Report {
            allocated: devices
                .iter()
                .filter_map(|d| d.get("allocated_bytes").and_then(Value::as_u64))
                .collect(),
            uuids: devices.iter().map(|d| text(d, "uuid")).collect(),
            names: devices.iter().map(|d| text(d, "name")).collect(),
        })
    }
}

impl Cluster {
    /// Polls until the condition gives a value.
    ///
    /// # Errors
    /// After [`PATIENCE`], with the last error if there was one.
    pub async fn wait_for<T, F: Future<Output = Result<Option<T>>>>(
        &self,
        what: &str,
        look: impl FnMut() -> F,
    ) -> Result<T> {
        self.wait_at_most(PATIENCE, what, look).await
    }

    /// The same with a limit of its own.
    ///
    /// # Errors
    /// After that time, with the last error if there was one.
    pub async fn wait_at_most<T, F: Future<Output = Result<Option<T>>>>(
        &self,
        limit: Duration,
        what: &str,
        mut look: impl FnMut() -> F,
    ) -> Result<T> {
        let started = Instant::now();
        loop {
            let last = look().await;
            if let Ok(Some(value)) = last {
                return Ok(value);
            }
            if started.elapsed() > limit {
                let why = last.err().map(|e| format!(": {e:#}")).unwrap_or_default();
                bail!("waited {} s for {what}{why}", limit.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    }

    /// Sees to it that a condition holds for some time.
    ///
    /// # Errors
    /// What the condition says as soon as it does not.
    pub async fn holds_for<F: Future<Output = Result<()>>>(
        &self,
        time: Duration,
        mut look: impl FnMut() -> F,
    ) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < time {
            look().await?;
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        Ok(())
    }

    // --- namespaces ----------------------------------------------------------------------------

    /// A new namespace with a name that begins like this.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn namespace(&self, prefix: &str) -> Result<String> {
        let object: Namespace =
            serde_json::from_value(json!({"metadata": {"generateName": format!("{prefix}-")}}))?;
        let api = Api::<Namespace>::all(self.client.clone());
        let name = api.create(&PostParams::default(), &object).await?.name_any();
        // Pods wait for their service account otherwise, which kube-controller-manager makes.
        let accounts =
            Api::<k8s_openapi::api::core::v1::ServiceAccount>::namespaced(self.client.clone(), &name);
        self.wait_for("the default service account", || async { Ok(accounts.get_opt("default").await?) })
            .await?;
        Ok(name)
    }

    /// Deletes a namespace with everything in it; [`Cluster::clean`] sees whether it goes.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn delete_namespace(&self, namespace: &str) -> Result<()> {
        // Together, not one after the other as the namespace's own deletion does, with 5 s between.
        let all = (DeleteParams::default(), ListParams::default());
        Api::<Pod>::namespaced(self.client.clone(), namespace).delete_collection(&all.0, &all.1).await?;
        Api::<ResourceClaim>::namespaced(self.client.clone(), namespace)
            .delete_collection(&all.0, &all.1)
            .await?;
        let api = Api::<Namespace>::all(self.client.clone());
        match api.delete(namespace, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            other => Ok(other.map(drop)?),
        }
    }

    /// Namespaces that tests made.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn namespaces(&self) -> Result<Vec<String>> {
        let all = Api::<Namespace>::all(self.client.clone()).list(&ListParams::default()).await?;
        let names = all.items.iter().map(ResourceExt::name_any);
        Ok(names.filter(|n| n != "default" && n != SYSTEM && !n.starts_with("kube-")).collect())
    }

    // --- pods ----------------------------------------------------------------------------------

    /// Creates an object.
    ///
    /// # Errors
    /// What the API says.
    pub fn create(&self, objects: &[Value]) -> Result<()> {
        self.apply(&json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string())
    }

    /// A pod, if there is one.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>> {
        Ok(Api::<Pod>::namespaced(self.client.clone(), namespace).get_opt(name).await?)
    }

    /// The pod once it runs.
    ///
    /// # Errors
    /// If it does not run in time, with its events.
    pub async fn running(&self, namespace: &str, name: &str) -> Result<Pod> {
        let result = self
            .wait_for(&format!("pod {namespace}/{name} to run"), || async {
                let pod = self.pod(namespace, name).await?.filter(|p| phase(p) == "Running");
                let ready = |p: &Pod| statuses(p).iter().all(|s| s.ready);
                Ok(pod.filter(ready))
            })
            .await;
        match result {
            Ok(pod) => Ok(pod),
            Err(error) => {
                let state = self.pod(namespace, name).await?.map(|p| describe(&p)).unwrap_or_default();
                Err(error.context(format!("{state}\n{}", self.events(namespace).await.unwrap_or_default())))
            }
        }
    }

    /// Deletes a pod as a user does, without waiting.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn delete_pod(&self, namespace: &str, name: &str) -> Result<()> {
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        api.delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Waits until a pod is gone.
    ///
    /// # Errors
    /// If it does not go in time.
    pub async fn pod_gone(&self, namespace: &str, name: &str) -> Result<()> {
        self.wait_for(&format!("pod {namespace}/{name} to go"), || async {
            Ok(self.pod(namespace, name).await?.is_none().then_some(()))
        })
        .await
    }

    /// Names of our ready pods of a component that are to stay: one that ends is ready for a while yet.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn system_pods(&self, component: &str) -> Result<Vec<String>> {
        let ready = |p: &&Pod| {
            phase(p) == "Running"
                && statuses(p).iter().all(|s| s.ready)
                && p.metadata.deletion_timestamp.is_none()
        };
        Ok(self.all_of(component).await?.iter().filter(ready).map(ResourceExt::name_any).collect())
    }

    /// Waits until nothing of a component runs, pods that end included.
    ///
    /// # Errors
    /// If one does not go.
    pub async fn no_system_pods(&self, component: &str) -> Result<()> {
        self.wait_for(&format!("each {component} to go"), || async {
            Ok(self.all_of(component).await?.is_empty().then_some(()))
        })
        .await
    }

    async fn all_of(&self, component: &str) -> Result<Vec<Pod>> {
        let wanted = ListParams::default().labels(&format!("app.kubernetes.io/component={component}"));
        Ok(Api::<Pod>::namespaced(self.client.clone(), SYSTEM).list(&wanted).await?.items)
    }

    /// A namespace's events, a line each.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn events(&self, namespace: &str) -> Result<String> {
        let events =
            Api::<Event>::namespaced(self.client.clone(), namespace).list(&ListParams::default()).await?;
        let line = |e: &Event| {
            format!(
                "{} {} {}: {}",
                e.type_.as_deref().unwrap_or_default(),
                e.involved_object.name.as_deref().unwrap_or_default(),
                e.reason.as_deref().unwrap_or_default(),
                e.message.as_deref().unwrap_or_default()
            )
        };
        let noise = |e: &&Event| e.reason.as_deref() != Some("MissingClusterDNS");
        Ok(events.items.iter().filter(noise).map(line).collect::<Vec<_>>().join("\n"))
    }

    /// Waits for an event that contains a text.
    ///
    /// # Errors
    /// If it does not come in time, with the events that did.
    pub async fn event(&self, namespace: &str, text: &str) -> Result<String> {
        let found = self
            .wait_for(&format!("an event with {text:?}"), || async {
                let events = self.events(namespace).await?;
                Ok(events.lines().find(|line| line.contains(text)).map(str::to_owned))
            })
            .await;
        match found {
            Ok(line) => Ok(line),
            Err(error) => Err(error.context(self.events(namespace).await.unwrap_or_default())),
        }
    }

    /// What the probe in a container found.
    ///
    /// # Errors
    /// If the pod does not run, or CUDA did not say no because memory was used up.
    pub async fn report(&self, namespace: &str, pod: &str, container: &str) -> Result<Report> {
        Report::read(&self.first_line(namespace, pod, container).await?)
    }

    /// What a probe finds in a container that runs a program of its own, once that has said something.
    ///
    /// # Errors
    /// As [`Self::report`].
    pub async fn probe(&self, namespace: &str, pod: &str, container: &str) -> Result<Report> {
        self.first_line(namespace, pod, container).await?;
        Report::read(&self.shell(namespace, pod, container, "cuda-probe")?)
    }

    /// The first line that a container prints.
    ///
    /// # Errors
    /// If the pod does not run, or prints nothing in time.
    pub async fn first_line(&self, namespace: &str, pod: &str, container: &str) -> Result<String> {
        self.running(namespace, pod).await?;
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let wanted = LogParams { container: Some(container.to_owned()), ..LogParams::default() };
        self.wait_for(&format!("output of {namespace}/{pod} {container}"), || async {
            Ok(api.logs(pod, &wanted).await?.lines().next().map(str::to_owned))
        })
        .await
    }

    /// Runs a shell command in a container.
    ///
    /// # Errors
    /// What it says.
    pub fn shell(&self, namespace: &str, pod: &str, container: &str, script: &str) -> Result<String> {
        self.kubectl(&["-n", namespace, "exec", pod, "-c", container, "--", "/usr/bin/bash", "-c", script])
    }

    // --- devices and claims ----------------------------------------------------------------------

    /// Our driver's slices.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn slices(&self) -> Result<Vec<ResourceSlice>> {
        let of_driver = ListParams::default().fields(&format!("spec.driver={DEFAULT_DRIVER}"));
        Ok(Api::<ResourceSlice>::all(self.client.clone()).list(&of_driver).await?.items)
    }

    /// Our driver's devices, once each slice of the pool's generation is there.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn devices(&self) -> Result<Vec<Device>> {
        let slices = self.slices().await?;
        let Some(newest) = slices.iter().map(|s| s.spec.pool.generation).max() else { return Ok(Vec::new()) };
        let of_newest: Vec<_> = slices.into_iter().filter(|s| s.spec.pool.generation == newest).collect();
        let whole = of_newest.first().map(|s| s.spec.pool.resource_slice_count);
        if whole != i64::try_from(of_newest.len()).ok() {
            return Ok(Vec::new());
        }
        Ok(of_newest.into_iter().flat_map(|s| s.spec.devices.unwrap_or_default()).collect())
    }

    /// Values of the taint that hands devices to the controller; `None` stands for devices without it.
    /// Empty while nothing (complete) is published.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn controller_taints(&self) -> Result<BTreeSet<Option<String>>> {
        let key = controller_taint(DEFAULT_DRIVER);
        let of = |device: &Device| {
            let taint = device.taints.iter().flatten().find(|t| t.key == key);
            taint.map(|t| t.value.clone().unwrap_or_default())
        };
        Ok(self.devices().await?.iter().map(of).collect())
    }

    /// Devices with the taint of hardware whose claim is gone.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn held_devices(&self) -> Result<BTreeSet<String>> {
        let key = held_taint(DEFAULT_DRIVER);
        let held = |d: &&Device| d.taints.iter().flatten().any(|t| t.key == key);
        Ok(self.devices().await?.iter().filter(held).map(|d| d.name.clone()).collect())
    }

    /// All claims.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn claims(&self) -> Result<Vec<ResourceClaim>> {
        Ok(Api::<ResourceClaim>::all(self.client.clone()).list(&ListParams::default()).await?.items)
    }

    /// A claim, if there is one.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn claim(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>> {
        Ok(Api::<ResourceClaim>::namespaced(self.client.clone(), namespace).get_opt(name).await?)
    }

    /// Waits until a claim is allocated, and gives the allocation.
    ///
    /// # Errors
    /// If it is not allocated in time.
    pub async fn allocation(&self, namespace: &str, claim: &str) -> Result<AllocationResult> {
        self.wait_for(&format!("claim {namespace}/{claim} to be allocated"), || async {
            Ok(self.claim(namespace, claim).await?.and_then(|c| c.status?.allocation))
        })
        .await
    }

    /// The one claim that was made from a pod's template.
    ///
    /// # Errors
    /// If the pod has none.
    pub async fn claim_of(&self, namespace: &str, pod: &str) -> Result<String> {
        self.wait_for(&format!("the claim of pod {namespace}/{pod}"), || async {
            let pod = self.pod(namespace, pod).await?;
            let statuses = pod.and_then(|p| p.status?.resource_claim_statuses).unwrap_or_default();
            Ok(statuses.into_iter().find_map(|s| s.resource_claim_name))
        })
        .await
    }

    /// Names of the devices that a pod's own claim has.
    ///
    /// # Errors
    /// If it is not allocated in time.
    pub async fn devices_of(&self, namespace: &str, pod: &str) -> Result<Vec<String>> {
        let claim = self.claim_of(namespace, pod).await?;
        Ok(device_names(&self.allocation(namespace, &claim).await?))
    }

    // --- cleanliness -------------------------------------------------------------------------------

    /// What users of the product have left behind, in words; empty is clean.
    ///
    /// # Errors
    /// If something cannot be read.
    pub async fn leftovers(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for claim in self.claims().await? {
            let kept = claim.finalizers().iter().any(|f| f == CLAIM_FINALIZER);
            found.push(format!(
                "claim {}/{} (finalizer: {kept})",
                claim.namespace().unwrap_or_default(),
                claim.name_any()
            ));
        }
        for pod in Api::<Pod>::all(self.client.clone()).list(&ListParams::default()).await? {
            let gates = pod.spec.as_ref().and_then(|s| s.scheduling_gates.as_ref());
            let gated = gates.is_some_and(|g| g.iter().any(|g| g.name == SCHEDULING_GATE));
            let namespace = pod.namespace().unwrap_or_default();
            if gated || (namespace != SYSTEM && !namespace.starts_with("kube-")) {
                found.push(format!("pod {namespace}/{} (gated: {gated})", pod.name_any()));
            }
        }
        found.extend(self.held_devices().await?.into_iter().map(|d| format!("held taint on {d}")));
        found.extend(self.node_leftovers()?);
        Ok(found)
    }

    /// Waits until nothing is left.
    ///
    /// # Errors
    /// What is left after [`PATIENCE`].
    pub async fn clean(&self) -> Result<()> {
        let result = self
            .wait_for("everything to be released", || async {
                Ok(self.leftovers().await?.is_empty().then_some(()))
            })
            .await;
        match result {
            Ok(()) => Ok(()),
            Err(error) => Err(error.context(self.leftovers().await?.join("\n"))),
        }
    }

    /// The end of our programs' logs and the state of all pods, to understand a failure.
    pub fn diagnostics(&self) -> String {
        let ask = |args: &[&str]| self.kubectl(args).unwrap_or_else(|e| format!("{e:#}"));
        let logs = |component: &str| {
            let selector = format!("app.kubernetes.io/component={component}");
            ask(&["-n", SYSTEM, "logs", "-l", &selector, "--tail=25", "--prefix", "--all-containers"])
        };
        format!(
            "--- pods\n{}--- claims\n{}--- controller\n{}--- kubelet plugin\n{}",
            ask(&["get", "pods", "-A", "-o", "wide"]),
            ask(&["get", "resourceclaims", "-A"]),
            logs("controller"),
            logs("kubelet-plugin"),
        )
    }
}

/// A pod's phase.
pub fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or_default()
}

/// Whether our gate holds the pod.
pub fn gated(pod: &Pod) -> bool {
    let gates = pod.spec.as_ref().and_then(|s| s.scheduling_gates.as_ref());
    gates.is_some_and(|gates| gates.iter().any(|g| g.name == SCHEDULING_GATE))
}

/// Ids of a pod's containers with their restarts: equal as long as nothing was disturbed.
pub fn containers(pod: &Pod) -> BTreeMap<String, (Option<String>, i32)> {
    statuses(pod).iter().map(|s| (s.name.clone(), (s.container_id.clone(), s.restart_count))).collect()
}

/// Names of the devices in an allocation, in its order.
pub fn device_names(allocation: &AllocationResult) -> Vec<String> {
    let results = allocation.devices.iter().flat_map(|d| d.results.iter().flatten());
    results.map(|r| r.device.clone()).collect()
}

/// Who wrote an allocation, by the managed fields of its claim.
pub fn allocated_by(claim: &ResourceClaim) -> BTreeSet<String> {
    let fields = claim.metadata.managed_fields.iter().flatten();
    let wrote = fields.filter(|f| {
        let fields = f.fields_v1.as_ref().map(|f| f.0.to_string()).unwrap_or_default();
        f.subresource.as_deref() == Some("status") && fields.contains("f:allocation")
    });
    wrote.filter_map(|f| f.manager.clone()).collect()
}

fn statuses(pod: &Pod) -> &[k8s_openapi::api::core::v1::ContainerStatus] {
    pod.status.as_ref().and_then(|s| s.container_statuses.as_deref()).unwrap_or_default()
}

fn describe(pod: &Pod) -> String {
    let status = pod.status.clone().unwrap_or_default();
    let conditions = status.conditions.unwrap_or_default();
    let lines = conditions
        .iter()
        .map(|c| format!("{}={} {}", c.type_, c.status, c.message.as_deref().unwrap_or_default()));
    format!("phase {}, gated {}: {}", phase(pod), gated(pod), lines.collect::<Vec<_>>().join("; "))
}
