//! `aliquot explain`, as an operator uses it.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Result, ensure};

fn contains(text: &str, wanted: &[&str]) -> Result<()> {
    for words in wanted {
        ensure!(text.contains(words), "no {words:?} in:\n{text}");
    }
    Ok(())
}

#[test]
fn explain_says_why_a_claim_has_its_device_and_another_none() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("explain").await?;
        let node = cluster.setting("NODE_NAME")?.to_owned();
        cluster.create(&[
            objects::template(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            objects::claim(&namespace, "nothing", &[objects::gpu_of("gpu", "B999")]),
            PodManifest::of_template(&namespace, "first", "gpu").build(),
        ])?;
        cluster.running(&namespace, "first").await?;
        let claim = cluster.claim_of(&namespace, "first").await?;
        let text = cluster.explain(&["claim", &claim, "-n", &namespace])?;
        contains(
            &text,
            &[
                &format!("pod {namespace}/first"),
                &format!("claim {namespace}/{claim} has devices on node {node}, given by the controller"),
                "gpu: gpu-4",
                &format!("without them {node} would be chosen again"),
                "it fits on 1 of 1 node(s) with devices",
                "DevicesAllocated: allocated gpu-4",
            ],
        )?;
        cluster.create(&[PodManifest::of_template(&namespace, "second", "gpu").build()])?;
        cluster.event(&namespace, "second DevicesDoNotFit").await?;
        let text = cluster.explain(&["pod", "second", "-n", &namespace])?;
        contains(
            &text,
            &[
                "it fits on none of 1 node(s) with devices",
                &format!("1 ({node}) have not enough free devices for request gpu"),
                &format!("nearest: gpu-4 on node {node}, if 1 pod(s) ended: {namespace}/first"),
                "DevicesDoNotFit",
            ],
        )?;
        let text = cluster.explain(&["claim", "nothing", "-n", &namespace])?;
        contains(&text, &["no pod uses claim", "no published device is what it asks for"])?;
        let wrong = cluster.explain(&["claim", "absent", "-n", &namespace]);
        ensure!(wrong.is_err_and(|e| format!("{e:#}").contains("there is no ResourceClaim")), "it says so");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn explain_tells_a_tenant_what_view_in_his_namespace_shows_and_what_is_left_out() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("explain-tenant").await?;
        cluster.create(&[
            serde_json::json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
                "metadata": {"name": "alice", "namespace": namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
                "subjects": [{"kind": "User", "name": "alice", "apiGroup": "rbac.authorization.k8s.io"}],
            }),
            objects::claim(&namespace, "gpu", &[objects::gpu_of("gpu", "L40S")]),
            objects::claim(&namespace, "nothing", &[objects::gpu_of("gpu", "B999")]),
            PodManifest::of_claim(&namespace, "runs", "gpu").build(),
            PodManifest::of_claim(&namespace, "waits", "nothing").build(),
        ])?;
        cluster.running(&namespace, "runs").await?;
        cluster.event(&namespace, "waits DevicesDoNotFit").await?;
        let alice = |what: &str| cluster.explain(&[what, "-n", &namespace, "--as", "alice"]);
        let runs = alice("pod/runs")?;
        contains(&runs, &["given by the controller", "gpu: gpu-4", "list nodes of the whole cluster"])?;
        let waits = alice("pod/waits")?;
        contains(
            &waits,
            &[
                &format!("claim {namespace}/nothing has no devices"),
                "waits DevicesDoNotFit",
                "left out, because rights are missing",
                &format!("aliquot explain pod/waits -n {namespace}"),
            ],
        )?;
        cluster.delete_namespace(&namespace).await
    })
}
