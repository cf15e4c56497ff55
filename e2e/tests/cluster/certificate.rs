//! The certificate of the webhook: admission goes on while it is renewed.

use crate::governance::refusal;
use crate::support::on_cluster;
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};

/// When the webhook's certificate was made, and until when it is good.
async fn certificate(cluster: &Cluster) -> Result<(Timestamp, Timestamp)> {
    let secrets = Api::<Secret>::namespaced(cluster.client.clone(), SYSTEM);
    let notes = secrets.get("aliquot-webhook-tls").await?.metadata.annotations.context("no annotations")?;
    let time = |name: &str| -> Result<Timestamp> {
        Ok(notes.get(name).with_context(|| format!("no {name}"))?.parse()?)
    };
    Ok((time("aliquot.dev/made")?, time("aliquot.dev/expires")?))
}

#[test]
fn admission_works_on_while_the_webhooks_certificate_is_renewed_and_the_old_one_expires() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster.configure(&["webhook.certificateLife=36s"]).await?;
        let outcome = async {
            let namespace = cluster.namespace("renewed").await?;
            cluster.create(&[objects::template(&namespace, "share", &[objects::share("gpu", "1Gi", 5)])])?;
            let pods = Api::<Pod>::namespaced(cluster.client.clone(), &namespace);
            let pod: Pod =
                serde_json::from_value(PodManifest::of_template(&namespace, "user", "share").build())?;
            let dry = PostParams { dry_run: true, ..PostParams::default() };
            // Nobody else refuses this one, or sets the gate: both are asked of the webhook.
            let odd = objects::claim(&namespace, "odd", &[objects::share("r", "200Gi", 5)]);
            let works = async || -> Result<()> {
                let made = pods.create(&dry, &pod).await?;
                ensure!(aliquot_e2e::look::gated(&made), "a pod went past the webhook");
                let said = refusal(cluster, odd.clone())?;
                ensure!(said.contains("no device of this cluster gives 200Gi"), "{said}");
                Ok(())
            };
            cluster
                .wait_for("a short-lived certificate in use", || async {
                    let (made, expires) = certificate(cluster).await?;
                    Ok((expires.duration_since(made).as_secs() == 36 && works().await.is_ok()).then_some(()))
                })
                .await?;
            let (first, expires) = certificate(cluster).await?;
            let mut seen = vec![first];
            // Nothing that is good for longer is around: the third certificate is served when the first is over.
            while seen.len() < 3 || Timestamp::now() <= expires {
                works().await.with_context(|| format!("after {} renewals", seen.len() - 1))?;
                let (made, _) = certificate(cluster).await?;
                if seen.last() != Some(&made) {
                    seen.push(made);
                }
                let late = Timestamp::now().duration_since(first).as_secs();
                ensure!(late < 240, "only {} renewals in {late} s", seen.len() - 1);
            }
            works().await?;
            // Who lets certificates last for longer again gets one in time.
            cluster.configure(&[]).await?;
            let lasts = async || -> Result<i64> {
                let (made, expires) = certificate(cluster).await?;
                Ok(expires.duration_since(made).as_secs())
            };
            while lasts().await? == 36 {
                works().await.context("before the last renewal")?;
            }
            works().await?;
            cluster.delete_namespace(&namespace).await
        }
        .await;
        let restored = cluster.configure(&[]).await;
        outcome.and(restored)
    })
}
