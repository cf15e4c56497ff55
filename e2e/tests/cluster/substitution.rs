//! A larger profile where the asked one is free nowhere, on a node with boards of two kinds: 1g.5gb is a
//! profile of the A100 with 40 GB alone.

use crate::support::{GIB, on_cluster, without_controller};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::look::allocated_by;
use aliquot_e2e::objects::{self, PodManifest};
use aliquot_e2e::process;
use aliquot_sim_node::GpuSpec;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Runs a test on a node that has an A100 with 40 GB too.
fn with_small_board(test: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let more = [GpuSpec::new("A100-40").with_mig()];
        let outcome = match cluster.exchange_hardware(&more).await {
            Ok(()) => test(cluster).await,
            failed => failed,
        };
        let outcome = match outcome {
            Ok(()) => cluster.clean().await,
            failed => failed,
        };
        let restored = cluster.exchange_hardware(&[]).await;
        outcome.and(restored)
    })
}

fn small(name: &str, count: u32) -> Value {
    let expression = r#"device.attributes["gpu.aliquot.dev"].profile == "1g.5gb""#;
    let selectors = json!([{"cel": {"expression": expression}}]);
    json!({"name": name, "exactly": {"deviceClassName": "mig.aliquot.dev", "selectors": selectors, "count": count}})
}

/// A namespace whose claims may be given more than they ask for.
async fn lenient(cluster: &Cluster, name: &str, policy: &str) -> Result<String> {
    let namespace = cluster.namespace(name).await?;
    let annotation = format!("aliquot.dev/allocation-policy={policy}");
    cluster.kubectl(&["annotate", "namespace", &namespace, &annotation])?;
    expands(cluster, &namespace).await?;
    Ok(namespace)
}

/// Waits until claims are expanded to larger profiles: one that is created while no webhook answers, or while
/// the one that answers has not seen the policy, asks for exactly what it says.
async fn expands(cluster: &Cluster, namespace: &str) -> Result<()> {
    let claims = Api::<ResourceClaim>::namespaced(cluster.client.clone(), namespace);
    let claim = serde_json::from_value(objects::claim(namespace, "probe", &[small("gpu", 1)]))?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    cluster
        .wait_for("claims to be expanded", || async {
            let made = claims.create(&dry, &claim).await?;
            let requests = made.spec.devices.and_then(|d| d.requests).unwrap_or_default();
            Ok(requests.iter().any(|r| r.first_available.is_some()).then_some(()))
        })
        .await
}

/// Takes all seven partitions of the small board, in a namespace of their own.
async fn fill(cluster: &Cluster) -> Result<String> {
    let namespace = cluster.namespace("fill").await?;
    cluster.create(&[
        objects::claim(&namespace, "all", &[small("gpu", 7)]),
        PodManifest::of_claim(&namespace, "filler", "all").build(),
    ])?;
    cluster.running(&namespace, "filler").await?;
    Ok(namespace)
}

/// The only allocation result's request, as the API has it.
async fn result(cluster: &Cluster, namespace: &str, pod: &str) -> Result<(String, Vec<String>)> {
    let name = cluster.claim_of(namespace, pod).await?;
    cluster.allocation(namespace, &name).await?;
    let claim = cluster.claim(namespace, &name).await?.context("no claim")?;
    let writers = allocated_by(&claim).into_iter().collect();
    let allocation = claim.status.and_then(|s| s.allocation).context("no allocation")?;
    let results = allocation.devices.and_then(|d| d.results).unwrap_or_default();
    let result = results.first().context("no result")?;
    Ok((result.request.clone(), writers))
}

#[test]
fn a_larger_profile_is_given_where_the_asked_one_is_free_nowhere_and_the_pod_is_told() -> Result<()> {
    with_small_board(async |cluster: &Cluster| {
        let namespace = lenient(cluster, "substitute", r#"{"substitution":"Larger"}"#).await?;
        cluster.create(&[
            objects::template(&namespace, "small", &[small("gpu", 1)]),
            PodManifest::of_template(&namespace, "before", "small").build(),
        ])?;
        // Free: as asked.
        cluster.running(&namespace, "before").await?;
        ensure!(result(cluster, &namespace, "before").await?.0 == "gpu/1g5gb");
        cluster.delete_pod(&namespace, "before").await?;
        cluster.pod_gone(&namespace, "before").await?;
        let filler = fill(cluster).await?;
        cluster.create(&[PodManifest::of_template(&namespace, "user", "small").build()])?;
        let got = cluster.report(&namespace, "user", "main").await?;
        ensure!(got.names.iter().all(|n| n.contains("1g.10gb")), "{got:?}");
        ensure!(got.allocated.iter().all(|b| *b > 8 * GIB && *b < 10 * GIB), "{got:?}");
        ensure!(result(cluster, &namespace, "user").await?.0 == "gpu/1g10gb");
        cluster
            .event(&namespace, "request gpu: 1g.5gb was free nowhere, so the larger 1g10gb is given, as the allocation policy says; the pod keeps it until it ends")
            .await?;
        cluster.delete_namespace(&filler).await?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn kube_scheduler_gives_the_larger_profile_too() -> Result<()> {
    with_small_board(async |cluster: &Cluster| {
        let namespace = lenient(cluster, "native", r#"{"substitution":"Larger"}"#).await?;
        cluster.allocator(Some("scheduler")).await?;
        let outcome = async {
            let filler = fill(cluster).await?;
            cluster.create(&[
                objects::template(&namespace, "small", &[small("gpu", 1)]),
                PodManifest::of_template(&namespace, "user", "small").build(),
            ])?;
            let got = cluster.report(&namespace, "user", "main").await?;
            ensure!(got.names.iter().all(|n| n.contains("1g.10gb")), "{got:?}");
            let (request, writers) = result(cluster, &namespace, "user").await?;
            ensure!(request == "gpu/1g10gb" && writers == ["kube-scheduler"], "{request} {writers:?}");
            cluster.event(&namespace, "1g.5gb was free nowhere, so the larger 1g10gb is given").await?;
            cluster.delete_namespace(&filler).await?;
            cluster.delete_namespace(&namespace).await
        }
        .await;
        let back = cluster.allocator(None).await;
        outcome.and(back)
    })
}

/// A request of an H100's profile, of which each has one, or a larger one, as an author writes it.
fn media_or_larger() -> Value {
    let of = |name: &str, profile: &str| {
        let request = objects::partition_of(name, profile, "H100");
        let selectors = request.pointer("/exactly/selectors").cloned();
        json!({"name": name, "deviceClassName": "mig.aliquot.dev", "selectors": selectors})
    };
    json!({"name": "gpu", "firstAvailable": [of("media", "1g.10gb+me"), of("larger", "2g.20gb")]})
}

#[test]
fn a_substitute_that_was_given_while_no_controller_looked_is_charged_as_the_budget_says() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("unseen").await?;
        let mut media = objects::partition_of("gpu", "1g.10gb+me", "H100");
        media["exactly"]["count"] = json!(2);
        cluster.create(&[
            json!({
                "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuBudget",
                "metadata": {"name": "gpu", "namespace": namespace},
                "spec": {"gpuHours": 10, "window": {"calendar": "Month"}, "chargeSubstitutesAs": "Asked"},
            }),
            objects::claim("default", "both", &[media]),
            PodManifest::of_claim("default", "filler", "both").build(),
        ])?;
        cluster.running("default", "filler").await?;
        cluster.allocator(Some("scheduler")).await?;
        let mut began = Instant::now();
        let outcome = without_controller(cluster, async || {
            cluster.create(&[
                objects::template(&namespace, "media", &[media_or_larger()]),
                PodManifest::of_template(&namespace, "user", "media").build(),
            ])?;
            cluster.running(&namespace, "user").await?;
            began = Instant::now();
            let (request, writers) = result(cluster, &namespace, "user").await?;
            ensure!(request == "gpu/larger" && writers == ["kube-scheduler"], "{request} {writers:?}");
            let node = cluster.setting("NODE_NAME")?;
            cluster
                .wait_for("the node to say what was asked", || async {
                    let usage = cluster.kubectl(&["get", "nodeusage", node, "-o", "json"])?;
                    let usage: Value = serde_json::from_str(&usage)?;
                    let held = usage.pointer("/spec/held").and_then(Value::as_array).cloned();
                    let own = held.unwrap_or_default().into_iter().find(|c| c["namespace"] == *namespace);
                    let part = |own: &Value, of: &str| own.get(of).and_then(Value::as_u64).unwrap_or(0);
                    Ok(own.filter(|own| {
                        (230_000..280_000).contains(&part(own, "microGpus"))
                            && (110_000..140_000).contains(&part(own, "askedMicroGpus"))
                    }))
                })
                .await?;
            tokio::time::sleep(Duration::from_secs(30)).await;
            Ok(())
        })
        .await;
        let back = cluster.allocator(None).await;
        outcome.and(back)?;
        // An eighth of a GPU, where what it got is a quarter. Hours have three decimals, 3.6 s each.
        let parts = cluster
            .wait_for("the use to be counted", || async {
                let path = "jsonpath={.status.used}";
                let used = cluster.kubectl(&["-n", &namespace, "get", "gpubudget", "gpu", "-o", path])?;
                let hours: f64 = used.trim().parse().unwrap_or(0.0);
                Ok((hours >= 0.003).then(|| hours * 3600.0 / began.elapsed().as_secs_f64()))
            })
            .await?;
        ensure!((0.09..0.2).contains(&parts), "charged {parts} of a GPU");
        cluster.delete_pod(&namespace, "user").await?;
        cluster.pod_gone(&namespace, "user").await?;
        cluster.kubectl(&["delete", "pod/filler", "resourceclaim/both"])?;
        cluster.delete_namespace(&namespace).await
    })
}

/// What the running pods of a namespace were given.
async fn given(cluster: &Cluster, namespace: &str) -> Result<Vec<String>> {
    let claims = cluster.kubectl(&[
        "-n",
        namespace,
        "get",
        "resourceclaims",
        "-o",
        "jsonpath={range .items[*]}{.status.allocation.devices.results[0].request} {.metadata.deletionTimestamp}{\"\\n\"}{end}",
    ])?;
    Ok(claims.lines().map(|line| line.trim().to_owned()).collect())
}

#[test]
fn pods_go_back_one_by_one_when_what_they_asked_for_becomes_free() -> Result<()> {
    with_small_board(async |cluster: &Cluster| {
        let namespace = lenient(cluster, "back", r#"{"substitution":"Larger","goBack":true}"#).await?;
        let filler = fill(cluster).await?;
        let labels = json!({"app": "user"});
        let pod = PodManifest::of_template(&namespace, "user", "small").build();
        let mut spec = pod.get("spec").cloned().context("no spec")?;
        spec.as_object_mut().context("no object")?.remove("restartPolicy");
        cluster.create(&[
            objects::template(&namespace, "small", &[small("gpu", 1)]),
            json!({
                "apiVersion": "apps/v1", "kind": "Deployment",
                "metadata": {"name": "user", "namespace": namespace},
                "spec": {
                    "replicas": 2, "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": spec},
                },
            }),
            json!({
                "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
                "metadata": {"name": "user", "namespace": namespace},
                "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}},
            }),
        ])?;
        cluster.kubectl(&["-n", &namespace, "rollout", "status", "--timeout=120s", "deployment/user"])?;
        let before = given(cluster, &namespace).await?;
        ensure!(before == ["gpu/1g10gb", "gpu/1g10gb"], "{before:?}");
        let told = "1g.5gb was free nowhere, so the larger 1g10gb is given, as the allocation policy says; the pod goes back when that is free";
        cluster.event(&namespace, told).await?;
        cluster.delete_namespace(&filler).await?;
        cluster
            .wait_for("both pods to be back", || async {
                let available = cluster.kubectl(&[
                    "-n",
                    &namespace,
                    "get",
                    "deployment",
                    "user",
                    "-o",
                    "jsonpath={.status.availableReplicas}",
                ])?;
                ensure!(matches!(available.as_str(), "1" | "2"), "the budget was broken: {available:?}");
                let now = given(cluster, &namespace).await?;
                Ok((now == ["gpu/1g5gb", "gpu/1g5gb"] && available == "2").then_some(()))
            })
            .await?;
        cluster.event(&namespace, "what this pod asked for is free").await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// A pod that goes back ends when it is told to, and its StatefulSet makes the next one after that: until then
/// the place is held for a pod that does not exist, and only the note on the node tells the next leader.
#[test]
fn the_place_of_a_pod_that_goes_back_is_held_on_when_the_controllers_are_killed() -> Result<()> {
    with_small_board(async |cluster: &Cluster| {
        let namespace = lenient(cluster, "back-killed", r#"{"substitution":"Larger","goBack":true}"#).await?;
        let fill = cluster.namespace("fill").await?;
        cluster.create(&[
            objects::claim(&fill, "six", &[small("gpu", 6)]),
            objects::claim(&fill, "one", &[small("gpu", 1)]),
            PodManifest::of_claim(&fill, "stays", "six").build(),
            PodManifest::of_claim(&fill, "goes", "one").build(),
        ])?;
        cluster.running(&fill, "stays").await?;
        cluster.running(&fill, "goes").await?;
        let script = "trap 'until [ -e /tmp/end ]; do sleep 0.2; done; exit 0' TERM; sleep 1000000 & wait";
        let pod = PodManifest::of_template(&namespace, "user", "small").shell(script).build();
        let mut spec = pod.get("spec").cloned().context("no spec")?;
        let fields = spec.as_object_mut().context("no object")?;
        fields.remove("restartPolicy");
        fields.insert("terminationGracePeriodSeconds".to_owned(), json!(90));
        let labels = json!({"app": "user"});
        cluster.create(&[
            objects::template(&namespace, "small", &[small("gpu", 1)]),
            json!({
                "apiVersion": "apps/v1", "kind": "StatefulSet",
                "metadata": {"name": "user", "namespace": namespace},
                "spec": {
                    "replicas": 1, "serviceName": "user", "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": spec},
                },
            }),
        ])?;
        let first = cluster.running(&namespace, "user-0").await?;
        ensure!(result(cluster, &namespace, "user-0").await?.0 == "gpu/1g10gb");

        cluster.delete_pod(&fill, "goes").await?;
        cluster
            .wait_for("the pod to be on its way back", || async {
                let pod = cluster.pod(&namespace, "user-0").await?.context("it ended already")?;
                Ok(pod.metadata.deletion_timestamp.map(drop))
            })
            .await?;
        let note = noted_place(cluster)?;
        ensure!(note.contains("1g5gb"), "the node says what is held: {note:?}");
        for controller in cluster.system_pods("controller").await? {
            process::controller(&controller)?.kill()?;
        }
        cluster.create(&[
            objects::template(&fill, "small", &[small("gpu", 1)]),
            PodManifest::of_template(&fill, "rival", "small").build(),
        ])?;
        // The next leader has looked at it, and gives it nothing.
        cluster.event(&fill, "rival DevicesDoNotFit").await?;
        has_nothing(cluster, &fill, "rival").await.context("it was given the place")?;
        ensure!(noted_place(cluster)? == note, "it is the same place");
        let waiting = cluster.pod(&namespace, "user-0").await?.context("it ended by itself")?;
        ensure!(waiting.metadata.uid == first.metadata.uid);
        expands(cluster, &namespace).await?;
        cluster.shell(&namespace, "user-0", "main", "touch /tmp/end")?;
        cluster
            .wait_for("the next one to run", || async {
                let pod = cluster.pod(&namespace, "user-0").await?;
                Ok(pod.filter(|pod| pod.metadata.uid != first.metadata.uid).map(drop))
            })
            .await?;
        cluster.running(&namespace, "user-0").await?;
        ensure!(result(cluster, &namespace, "user-0").await?.0 == "gpu/1g5gb");
        cluster
            .wait_for("the note to go", || async { Ok(noted_place(cluster)?.is_empty().then_some(())) })
            .await?;
        has_nothing(cluster, &fill, "rival").await.context("all seven are in use")?;
        cluster.shell(&namespace, "user-0", "main", "touch /tmp/end")?;
        cluster.delete_namespace(&fill).await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// A pod's claim has no devices. Its gate says nothing: while no controller runs pods get none.
async fn has_nothing(cluster: &Cluster, namespace: &str, pod: &str) -> Result<()> {
    let claim = cluster.claim_of(namespace, pod).await?;
    let claim = cluster.claim(namespace, &claim).await?.context("no claim")?;
    let allocation = claim.status.and_then(|status| status.allocation);
    ensure!(allocation.is_none(), "{allocation:?}");
    Ok(())
}

/// What is written on the node of a place that is held for a pod that goes back.
fn noted_place(cluster: &Cluster) -> Result<String> {
    let path = r"jsonpath={.metadata.annotations.aliquot\.dev/going-back}";
    cluster.kubectl(&["get", "node", cluster.setting("NODE_NAME")?, "-o", path])
}

#[test]
fn the_example_is_given_more_while_its_neighbour_has_what_it_asked_for() -> Result<()> {
    with_small_board(async |cluster: &Cluster| {
        let folder = cluster.repo().join("examples/09-substitution");
        let apply = |file: &str| {
            let path = folder.join(file);
            cluster.apply(&std::fs::read_to_string(&path).with_context(|| path.display().to_string())?)
        };
        apply("neighbour.yaml")?;
        cluster.running("neighbour", "sweep").await?;
        apply("09-substitution.yaml")?;
        let rollout = ["-n", "substitution", "rollout", "status", "--timeout=120s", "deployment/inference"];
        cluster.kubectl(&rollout)?;
        ensure!(given(cluster, "substitution").await? == ["gpu/1g10gb", "gpu/1g10gb"]);
        cluster.delete_namespace("neighbour").await?;
        cluster
            .wait_for("both pods to be back", || async {
                Ok((given(cluster, "substitution").await? == ["gpu/1g5gb", "gpu/1g5gb"]).then_some(()))
            })
            .await?;
        cluster.kubectl(&rollout)?;
        cluster.delete_namespace("substitution").await
    })
}
