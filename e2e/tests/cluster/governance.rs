//! What tenants may ask for and hold: answers at admission, and quotas where claims are allocated.

use crate::support::{on_any_cluster, on_cluster, without_controller};
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// What the API server says when an object is created, and that it refuses it.
pub(crate) fn refusal(cluster: &Cluster, object: Value) -> Result<String> {
    match cluster.create(std::slice::from_ref(&object)) {
        Ok(()) => anyhow::bail!("accepted: {object}"),
        Err(error) => Ok(format!("{error:#}")),
    }
}

fn with_config(mut claim: Value, named: &[&str], parameters: Value) -> Value {
    let opaque = json!({"driver": "gpu.aliquot.dev", "parameters": parameters});
    if let Some(devices) = claim.pointer_mut("/spec/devices").and_then(Value::as_object_mut) {
        devices.insert("config".into(), json!([{"requests": named, "opaque": opaque}]));
    }
    claim
}

fn quota(namespace: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuQuota",
        "metadata": {"name": "limits", "namespace": namespace}, "spec": spec,
    })
}

fn field(cluster: &Cluster, namespace: &str, path: &str) -> Result<String> {
    cluster.kubectl(&["-n", namespace, "get", "gpuquota", "limits", "-o", &format!("jsonpath={{{path}}}")])
}

#[test]
fn each_kind_of_bad_input_is_refused_with_its_reason() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("bad-input").await?;
        let ours = |kind: &str| json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": kind});
        let share = || objects::claim(&namespace, "c", &[objects::share("r", "4Gi", 10)]);
        let typo = json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "priorty": 5});
        let all = json!({"name": "r", "exactly": {
            "deviceClassName": "gpu.aliquot.dev", "allocationMode": "All", "count": 2,
        }});
        let asking = |class: &str, capacity: Value| json!({"name": "r", "exactly": {"deviceClassName": class, "capacity": {"requests": capacity}}});
        let profile = |profile: &str| objects::partition_of("r", profile, "H100");
        let table = [
            (
                with_config(share(), &[], typo),
                "spec.devices.config[0].opaque.parameters: ShareConfig.priorty: unknown field `priorty`, expected one of `computePolicy`, `priority`, `failMode`, `oversubscribe`, `driverCapabilities`",
            ),
            (
                with_config(share(), &["r"], ours("MigConfig")),
                "spec.devices.config[0]: MigConfig is for devices of type mig, but request r is for devices of type share",
            ),
            (
                with_config(share(), &[], ours("MpsConfig")),
                "MpsConfig is for devices of type mps, but request r is for devices of type share",
            ),
            (
                objects::claim(&namespace, "c", &[profile("1g.11gb")]),
                "no board of this cluster has the MIG profile \"1g.11gb\"; legal are NVIDIA A100-SXM4-80GB: 1g.10gb,",
            ),
            (
                objects::template(&namespace, "t", &[profile("1g.11gb")]),
                "spec.spec.devices.requests[0].exactly.selectors[0]: no board of this cluster has the MIG profile",
            ),
            (
                objects::claim(&namespace, "c", &[objects::share("r", "200Gi", 5)]),
                "spec.devices.requests[0].exactly.capacity.requests.memory: no device of this cluster gives 200Gi",
            ),
            (
                objects::claim(&namespace, "c", &[objects::request("r", "admin.aliquot.dev")]),
                "devices of class admin.aliquot.dev are for monitoring and need adminAccess: true",
            ),
            (
                with_config(
                    share(),
                    &[],
                    json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "priority": 300}),
                ),
                "ShareConfig.priority: must be from -100 to 100",
            ),
            (
                objects::annotated(share(), "aliquot.dev/reclaim", "keep"),
                "annotation aliquot.dev/reclaim is \"keep\"; it can be Delete or Retain",
            ),
            (
                objects::annotated(share(), "aliquot.dev/hold-priority", "5"),
                "annotation aliquot.dev/hold-priority is \"5\"; it must be a number of at most 0",
            ),
            (
                objects::claim(&namespace, "c", &[asking("share.aliquot.dev", json!({"mem": "10Gi"}))]),
                "spec.devices.requests[0].exactly.capacity.requests.mem: no device of class share.aliquot.dev has it; did you mean memory? legal are cores, memory, slots",
            ),
            (
                objects::template(&namespace, "t", &[asking("gpu.aliquot.dev", json!({"cores": "50"}))]),
                "spec.spec.devices.requests[0].exactly.capacity.requests.cores: devices of class gpu.aliquot.dev are given as they are, and only shares of a GPU have cores; leave it out, or use class share.aliquot.dev",
            ),
            // Kubernetes itself has an answer to this one.
            (objects::claim(&namespace, "c", &[all]), "must not be specified when allocationMode is 'All'"),
        ];
        for (object, words) in table {
            let said = refusal(cluster, object)?;
            ensure!(said.contains(words), "expected {words:?}, was told {said}");
        }
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn shares_state_what_their_namespace_demands() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("complete").await?;
        let bare =
            |name: &str| objects::claim(&namespace, name, &[objects::request("gpu", "share.aliquot.dev")]);
        cluster.create(&[bare("before")])?;
        cluster.kubectl(&[
            "annotate",
            "namespace",
            &namespace,
            "aliquot.dev/share-requires=memory, cores",
        ])?;
        let words = format!(
            "ResourceClaim {namespace}/after: request gpu must state memory and cores, as annotation \
             aliquot.dev/share-requires of namespace {namespace} demands; write, for example, \
             capacity: {{requests: {{memory: 10Gi, cores: 20}}}}"
        );
        cluster
            .wait_for("the namespace's demand to be in force", || async {
                match cluster.create(&[bare("after")]) {
                    Ok(()) => {
                        cluster.kubectl(&["-n", &namespace, "delete", "resourceclaim", "after"])?;
                        Ok(None)
                    }
                    Err(error) => Ok(format!("{error:#}").contains(&words).then_some(())),
                }
            })
            .await?;
        let half = json!({"name": "gpu", "exactly": {
            "deviceClassName": "share.aliquot.dev", "capacity": {"requests": {"memory": "4Gi"}},
        }});
        let said = refusal(cluster, objects::template(&namespace, "half", &[half]))?;
        let words =
            format!("ResourceClaimTemplate {namespace}/half: request gpu must state memory and cores, as");
        ensure!(said.contains(&words), "{said}");
        cluster.create(&[
            objects::claim(&namespace, "whole", &[objects::share("gpu", "4Gi", 10)]),
            objects::claim(&namespace, "other", &[objects::request("gpu", "gpu.aliquot.dev")]),
        ])?;
        cluster.delete_namespace(&namespace).await
    })
}

/// A demand that nobody can meet is told to whoever makes it; where it was made before, those who ask are told
/// whose mistake it is.
#[test]
fn a_demand_that_no_share_can_meet_is_answered_by_name() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("demanding").await?;
        let annotate = |value: &str| {
            let word = format!("aliquot.dev/share-requires={value}");
            cluster.kubectl(&["annotate", "--overwrite", "namespace", &namespace, &word])
        };
        let words = format!(
            "annotation aliquot.dev/share-requires of namespace {namespace} demands what no share has (mem); it can be \
             memory, cores, both with a comma between, or nothing"
        );
        let said = annotate("mem,cores").err().map(|error| format!("{error:#}")).context("accepted")?;
        ensure!(said.contains(&words), "{said}");
        annotate("cores, memory")?;
        annotate("")?;
        // As it was made before there was the policy.
        let binding = ["validatingadmissionpolicybinding", "aliquot-share-demands"];
        let there = cluster.kubectl(&["get", binding[0], binding[1], "-o", "json"])?;
        cluster.kubectl(&["delete", binding[0], binding[1]])?;
        let share = objects::claim(&namespace, "c", &[objects::share("r", "1Gi", 5)]);
        let said = async {
            let unchecked = || async { Ok(annotate("mem").is_ok().then_some(())) };
            cluster.wait_for("the policy to be out of force", unchecked).await?;
            let refused = || async {
                let Err(error) = cluster.create(std::slice::from_ref(&share)) else {
                    cluster.kubectl(&["-n", &namespace, "delete", "resourceclaim", "c"])?;
                    return Ok(None);
                };
                Ok(Some(format!("{error:#}")))
            };
            cluster.wait_for("the demand to be in force", refused).await
        }
        .await;
        let mut there: Value = serde_json::from_str(&there)?;
        if let Some(metadata) = there.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.retain(|field, _| ["name", "labels", "annotations"].contains(&field.as_str()));
        }
        cluster.create(&[there])?;
        let said = said?;
        let words = format!(
            "annotation aliquot.dev/share-requires of namespace {namespace} demands of requests for shares what no \
             share has (mem)"
        );
        ensure!(said.contains(&words) && said.contains("aliquot.dev/share-requires=memory,cores"), "{said}");
        cluster.delete_namespace(&namespace).await
    })
}

/// Annotations can be written later, too; what was accepted stays changeable.
#[test]
fn what_a_claim_says_about_keeping_devices_is_checked_whenever_it_changes() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("kept-otherwise").await?;
        cluster.create(&[objects::claim(&namespace, "c", &[objects::share("r", "1Gi", 5)])])?;
        let annotate = |word: &str| {
            cluster.kubectl(&["-n", &namespace, "annotate", "--overwrite", "resourceclaim", "c", word])
        };
        for (word, words) in [
            (
                "aliquot.dev/reclaim=keep",
                "annotation aliquot.dev/reclaim is \"keep\"; it can be Delete or Retain",
            ),
            ("aliquot.dev/binding=Now", "annotation aliquot.dev/binding is \"Now\"; it can be Immediate or"),
            ("aliquot.dev/hold-for=soon", "annotation aliquot.dev/hold-for: \"soon\" is not a duration"),
            (
                "aliquot.dev/hold-priority=5",
                "annotation aliquot.dev/hold-priority is \"5\"; it must be a number",
            ),
        ] {
            let said = annotate(word).err().map(|error| format!("{error:#}")).context("accepted")?;
            ensure!(said.contains(words), "expected {words:?}, was told {said}");
        }
        annotate("aliquot.dev/reclaim=Retain")?;
        annotate("example.com/note=x")?;
        cluster.delete_namespace(&namespace).await
    })
}

/// A selector may be meant for devices that come later: it is accepted, with a warning.
#[test]
fn a_selector_that_reads_what_no_device_has_is_warned_of() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("misspelt").await?;
        let read = |name: &str| {
            let expression = format!("device.attributes[\"gpu.aliquot.dev\"].{name}.contains(\"H100\")");
            let request = json!({"name": "r", "exactly": {
                "deviceClassName": "gpu.aliquot.dev", "selectors": [{"cel": {"expression": expression}}],
            }});
            cluster.warnings(&objects::claim(&namespace, &name.to_lowercase(), &[request]).to_string())
        };
        let said = read("productNme");
        let words = "Warning: spec.devices.requests[0].exactly.selectors[0]: \
                     device.attributes[\"gpu.aliquot.dev\"].productNme: no device of class gpu.aliquot.dev has it; did \
                     you mean device.attributes[\"gpu.aliquot.dev\"].productName? legal are";
        ensure!(said.contains(words), "{said}");
        let said = read("productName");
        ensure!(said.is_empty(), "{said}");
        cluster.kubectl(&["-n", &namespace, "get", "resourceclaim", "productnme", "productname"])?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_quota_holds_pods_back_and_lets_them_go_when_there_is_room() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("quota").await?;
        cluster.create(&[
            quota(
                &namespace,
                json!({"hard": {"memory": "12Gi", "cores": 100}, "perClaim": {"memory": "10Gi"}}),
            ),
            objects::template(&namespace, "share", &[objects::share("gpu", "8Gi", 20)]),
        ])?;
        // What could never be allocated is refused at once.
        cluster
            .wait_for("the quota to be known", || async {
                let answer =
                    cluster.create(&[objects::claim(&namespace, "big", &[objects::share("gpu", "11Gi", 5)])]);
                match answer {
                    Ok(()) => {
                        cluster.kubectl(&["-n", &namespace, "delete", "resourceclaim", "big"])?;
                        Ok(None)
                    }
                    Err(error) => Ok(Some(format!("{error:#}"))),
                }
            })
            .await
            .and_then(|said| {
                let words = "asks for at least 11Gi of GPU memory, but one claim may have 10Gi (GpuQuota";
                ensure!(said.contains(words), "{said}");
                Ok(())
            })?;
        // Both at once: exactly one gets in.
        let pods: Vec<Value> = ["a", "b"]
            .iter()
            .map(|name| PodManifest::of_template(&namespace, name, "share").build())
            .collect();
        cluster.create(&pods)?;
        cluster.event(&namespace, "is exceeded: memory: hard 12Gi, used 8Gi, asked 8Gi").await?;
        let (runs, waits) = cluster
            .wait_for("one of the two to run", || async {
                for (one, other) in [("a", "b"), ("b", "a")] {
                    let pod = cluster.pod(&namespace, one).await?.context("no pod")?;
                    if aliquot_e2e::look::phase(&pod) == "Running" {
                        return Ok(Some((one, other)));
                    }
                }
                Ok(None)
            })
            .await?;
        let waiting = cluster.pod(&namespace, waits).await?.context("no pod")?;
        ensure!(aliquot_e2e::look::gated(&waiting), "the other waits");
        cluster
            .wait_for("the quota's status", || async {
                let seen = (
                    field(cluster, &namespace, ".status.used.memory")?,
                    field(cluster, &namespace, ".status.used.cores")?,
                    field(cluster, &namespace, ".status.claims")?,
                );
                Ok((seen == ("8Gi".into(), "20".into(), "1".into())).then_some(()))
            })
            .await?;
        // Room by a released claim.
        cluster.delete_pod(&namespace, runs).await?;
        cluster.running(&namespace, waits).await?;
        // Room by a raised quota.
        cluster.create(&[PodManifest::of_template(&namespace, "c", "share").build()])?;
        cluster.event(&namespace, "pod waits until claims").await?;
        let raise = r#"{"spec":{"hard":{"memory":"16Gi"}}}"#;
        cluster.kubectl(&["-n", &namespace, "patch", "gpuquota", "limits", "--type=merge", "-p", raise])?;
        cluster.running(&namespace, "c").await?;
        ensure!(field(cluster, &namespace, ".spec.hard.memory")? == "16Gi");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_quota_that_is_no_quantity_is_refused() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("odd-quota").await?;
        for (spec, words) in [
            (json!({"hard": {"memory": "40GiB"}}), "must be a quantity of at least 0, for example 40Gi"),
            (json!({"hard": {"cores": -1}}), "must be a quantity of at least 0, for example 40Gi"),
        ] {
            let said = refusal(cluster, quota(&namespace, spec))?;
            ensure!(said.contains(words), "{said}");
        }
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn with_no_controller_claims_are_accepted_and_the_mistake_comes_to_light_later() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("unanswered").await?;
        without_controller(cluster, async || {
            let wrong = with_config(
                objects::claim(&namespace, "wrong", &[objects::share("gpu", "1Gi", 5)]),
                &[],
                json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "priorty": 5}),
            );
            cluster.create(&[wrong, PodManifest::of_claim(&namespace, "user", "wrong").build()])
        })
        .await?;
        // The controller is back and allocates; the node refuses to prepare, and says why to the pod.
        cluster.event(&namespace, "ShareConfig.priorty: unknown field").await?;
        cluster.delete_namespace(&namespace).await
    })
}

/// The recipe of examples/10-governance for counts, which Kubernetes' own quota keeps.
#[test]
fn kubernetes_own_quota_counts_the_devices_of_a_class() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("count").await?;
        let key = "share.aliquot.dev.deviceclass.resource.k8s.io/devices";
        cluster.create(&[json!({
            "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "devices", "namespace": namespace},
            "spec": {"hard": {key: "1", "count/resourceclaims.resource.k8s.io": "5"}},
        })])?;
        cluster
            .wait_for("the quota to be counted", || async {
                let path = format!("jsonpath={{.status.hard.{}}}", key.replace('.', "\\."));
                let hard =
                    cluster.kubectl(&["-n", &namespace, "get", "resourcequota", "devices", "-o", &path])?;
                Ok((hard == "1").then_some(()))
            })
            .await?;
        cluster.create(&[objects::claim(&namespace, "one", &[objects::share("r", "1Gi", 5)])])?;
        let said = refusal(cluster, objects::claim(&namespace, "two", &[objects::share("r", "1Gi", 5)]))?;
        let words = format!("exceeded quota: devices, requested: {key}=1, used: {key}=1, limited: {key}=1");
        ensure!(said.contains(&words), "{said}");
        cluster.create(&[objects::claim(
            &namespace,
            "whole",
            &[objects::request("r", "gpu.aliquot.dev")],
        )])?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn the_example_refuses_its_mistakes_and_runs_one_of_its_two_pods() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let folder = cluster.repo().join("examples/10-governance");
        let read = |file: &str| {
            let path = folder.join(file);
            std::fs::read_to_string(&path).with_context(|| path.display().to_string())
        };
        // Both pods at the same time.
        cluster.apply(&format!("{}---\n{}", read("10-governance.yaml")?, read("second.yaml")?))?;
        cluster.event("governed", "memory: hard 16Gi, used 10Gi, asked 10Gi").await?;
        for (file, words) in [
            ("unknown-profile", "no board of this cluster has the MIG profile \"1g.11gb\"; legal are"),
            ("malformed-config", "ShareConfig.priorty: unknown field `priorty`"),
            ("too-much", "asks for at least 12Gi of GPU memory, but one claim may have 10Gi"),
            (
                "incomplete",
                "request share must state memory and cores, as annotation aliquot.dev/share-requires of namespace governed",
            ),
            (
                "wrong-kind",
                "MigConfig is for devices of type mig, but request share is for devices of type share",
            ),
            (
                "undivided",
                "devices of class mig.aliquot.dev are given as they are, and only shares of a GPU have cores",
            ),
        ] {
            let answer = cluster.apply(&read(&format!("refused/{file}.yaml"))?);
            let said = format!("{:#}", answer.err().with_context(|| format!("{file} was accepted"))?);
            ensure!(said.contains(words), "{file}: {said}");
        }
        let said = cluster.warnings(&read("warned/misspelt-attribute.yaml")?);
        ensure!(said.contains("profle: no device of class mig.aliquot.dev has it; did you mean"), "{said}");
        cluster.delete_namespace("governed").await
    })
}
