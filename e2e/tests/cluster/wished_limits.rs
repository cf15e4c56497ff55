//! The policy on what claims wish their shares to have, on a real API server. It reads how long a wish is; what the
//! wish says is the webhook's.

use crate::policies::{accepted, before_us, dry, refused};
use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::objects;
use aliquot_model::names::LIMITS;
use anyhow::{Result, ensure};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

/// The policy.
const POLICY: &str = "aliquot-limits";
/// Characters of a wish that are let through at most.
const MOST: usize = 32_768;

/// A wish that is right, and so long.
fn wish(characters: usize) -> String {
    let text = "memory=2Gi";
    format!("{text}{}", " ".repeat(characters.saturating_sub(text.len())))
}

/// What it says of a wish that is too long.
fn too_long(characters: usize) -> String {
    format!("has {characters} characters, and {MOST} are the most")
}

fn claim(namespace: &str, name: &str, wish: &str) -> Value {
    objects::annotated(objects::claim(namespace, name, &[objects::share("gpu", "1Gi", 5)]), LIMITS, wish)
}

fn template(namespace: &str, wish: &str) -> Value {
    let claim = claim(namespace, "t", wish);
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t", "namespace": namespace},
        "spec": {"metadata": {"annotations": claim.pointer("/metadata/annotations")}, "spec": claim.get("spec")},
    })
}

#[test]
fn a_wish_that_is_longer_than_any_claim_can_need_is_refused_to_everybody() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("wishes").await?;
        cluster.create(&[json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": "alice", "namespace": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
            "subjects": [{"kind": "User", "name": "alice", "apiGroup": "rbac.authorization.k8s.io"}],
        })])?;
        let alice = cluster.client_of_user("alice").await?;
        for (who, client) in [("a user", alice), ("an administrator", cluster.client.clone())] {
            let claims = Api::<ResourceClaim>::namespaced(client.clone(), &namespace);
            let templates = Api::<ResourceClaimTemplate>::namespaced(client, &namespace);
            for (characters, is_fine) in [(10, true), (MOST, true), (MOST + 1, false), (100_000, false)] {
                let text = wish(characters);
                let made = serde_json::from_value(claim(&namespace, "c", &text))?;
                let made = claims.create(&dry(), &made).await;
                let of_template = serde_json::from_value(template(&namespace, &text))?;
                let of_template = templates.create(&dry(), &of_template).await;
                let what = format!("a wish of {characters} characters by {who}");
                if is_fine {
                    accepted(&what, made)?;
                    accepted(&format!("a template with {what}"), of_template)?;
                } else {
                    let words = too_long(characters);
                    refused(&what, made, &format!("of ResourceClaim {namespace}/c {words}"))?;
                    let named = format!("of ResourceClaimTemplate {namespace}/t {words}");
                    refused(&format!("a template with {what}"), of_template, &named)?;
                }
            }
            let mut other = claim(&namespace, "c", "memory=2Gi");
            other["metadata"]["annotations"]["example.com/notes"] = json!("x".repeat(100_000));
            let other = serde_json::from_value(other)?;
            accepted("another annotation, however long", claims.create(&dry(), &other).await)?;
            let plain = objects::claim(&namespace, "c", &[objects::share("gpu", "1Gi", 5)]);
            accepted("no wish", claims.create(&dry(), &serde_json::from_value(plain)?).await)?;
        }
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_claim_whose_wish_was_too_long_before_us_can_be_updated_shortened_and_deleted() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("old-wishes").await?;
        let claims = Api::<ResourceClaim>::namespaced(cluster.client.clone(), &namespace);
        let patch = async |name: &str, params: &PatchParams, patch: Value| {
            claims.patch(name, params, &Patch::Merge(patch)).await
        };
        let (stored, tried) =
            (PatchParams::default(), PatchParams { dry_run: true, ..PatchParams::default() });
        let wished = |text: String| json!({"metadata": {"annotations": {LIMITS: text}}});
        let names = ["updated", "shortened", "freed"];
        before_us(cluster, &[POLICY], async || {
            for name in names {
                let old = serde_json::from_value(claim(&namespace, name, &wish(MOST + 2)))?;
                cluster
                    .wait_for("a claim from before the policy", || async {
                        Ok(claims.create(&PostParams::default(), &old).await.ok())
                    })
                    .await?;
            }
            Ok(())
        })
        .await?;
        let new = serde_json::from_value(claim(&namespace, "new", &wish(MOST + 1)))?;
        cluster
            .wait_for("the policy", || async {
                let said = claims.create(&dry(), &new).await.err().map(|error| error.to_string());
                Ok(said.filter(|said| said.contains(POLICY)))
            })
            .await?;
        let label = json!({"metadata": {"labels": {"team": "a"}}});
        for name in names {
            accepted("a label", patch(name, &stored, label.clone()).await)?;
            let other = json!({"metadata": {"annotations": {"example.com/notes": "x"}}});
            accepted("another annotation", patch(name, &stored, other).await)?;
            let status = json!({"status": {"devices": null}});
            let written = claims.patch_status(name, &stored, &Patch::Merge(status)).await;
            accepted("its status", written)?;
            for characters in [MOST + 1, MOST + 3] {
                let answer = patch(name, &tried, wished(wish(characters))).await;
                refused("another wish that is too long", answer, &too_long(characters))?;
            }
        }
        accepted("a shorter wish", patch("shortened", &stored, wished(wish(MOST))).await)?;
        let none = json!({"metadata": {"annotations": {LIMITS: null}}});
        accepted("no wish any more", patch("freed", &stored, none).await)?;
        for name in names {
            let kept = json!({"metadata": {"finalizers": ["example.com/kept"]}});
            accepted("a finalizer", patch(name, &stored, kept).await)?;
            accepted("the deletion", claims.delete(name, &DeleteParams::default()).await)?;
            let free = json!({"metadata": {"finalizers": null}});
            accepted("its end", patch(name, &stored, free).await)?;
            ensure!(claims.get_opt(name).await?.is_none(), "{name} is still there");
        }
        cluster.delete_namespace(&namespace).await
    })
}
