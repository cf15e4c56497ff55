//! Metrics tell of all tenants, and are for those who may read them.

use crate::support::on_any_cluster;
use aliquot_e2e::cluster::{Cluster, SYSTEM};
use aliquot_e2e::scrape::{Answer, READER};
use anyhow::{Context, Result, ensure};

/// A pod of controllers and one of agents, with something that is among its metrics.
async fn pods(cluster: &Cluster) -> Result<[(String, &'static str); 2]> {
    let controller = cluster.system_pods("controller").await?.into_iter().next().context("a controller")?;
    let agent = cluster.system_pods("kubelet-plugin").await?.into_iter().next().context("an agent")?;
    Ok([(controller, "aliquot_controller_leading"), (agent, "dra_gpu_prepared_claims")])
}

fn is_refused(answer: &Answer, status: u16, word: &str) -> bool {
    matches!(answer, Answer::Refused(answered, why) if *answered == status && why.contains(word))
}

#[test]
fn metrics_are_read_by_who_may_get_them_and_by_nobody_else() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        cluster.kubectl(&["create", "serviceaccount", "tenant", "-n", "default"])?;
        let tenant = cluster.token("default", "tenant")?;
        let outcome = readers(cluster, &tenant).await;
        cluster.kubectl(&["delete", "serviceaccount", "tenant", "-n", "default"])?;
        cluster.configure(&[]).await?;
        outcome
    })
}

async fn readers(cluster: &Cluster, tenant: &str) -> Result<()> {
    for (pod, metric) in pods(cluster).await? {
        let text = cluster.metrics(&pod).await?;
        ensure!(text.contains(metric), "{pod}: no {metric} in {text}");
        let answer = cluster.scrape(&pod, Some(tenant)).await?;
        let may_not = "system:serviceaccount:default:tenant may not get /metrics";
        ensure!(is_refused(&answer, 403, may_not), "{pod}: {answer:?}");
        let answer = cluster.scrape(&pod, None).await?;
        ensure!(is_refused(&answer, 401, "show a token"), "{pod}: {answer:?}");
        let answer = cluster.scrape(&pod, Some("made.up.token")).await?;
        ensure!(is_refused(&answer, 401, "not one that this cluster knows"), "{pod}: {answer:?}");
        let answer = cluster.scrape_plainly(&pod).await?;
        ensure!(is_refused(&answer, 403, "metrics are at port"), "{pod}: {answer:?}");
    }
    // Who may not read is told what would let it, and then does.
    let binding = ["create", "clusterrolebinding", "tenant-metrics", "--clusterrole=aliquot-metrics-reader"];
    cluster.kubectl(&[&binding[..], &["--serviceaccount=default:tenant"]].concat())?;
    let outcome = async {
        for (pod, metric) in pods(cluster).await? {
            cluster
                .wait_for("the binding to count", || async {
                    let answer = cluster.scrape(&pod, Some(tenant)).await?;
                    Ok(matches!(answer, Answer::Page(text) if text.contains(metric)).then_some(()))
                })
                .await?;
        }
        anyhow::Ok(())
    }
    .await;
    cluster.kubectl(&["delete", "clusterrolebinding", "tenant-metrics"])?;
    outcome?;
    cluster.configure(&["metrics.authentication.enabled=false"]).await?;
    for (pod, metric) in pods(cluster).await? {
        let answer = cluster.scrape_plainly(&pod).await?;
        ensure!(matches!(&answer, Answer::Page(text) if text.contains(metric)), "{pod}: {answer:?}");
        ensure!(cluster.scrape(&pod, Some(tenant)).await.is_err(), "{pod} has no other port");
    }
    Ok(())
}

#[test]
fn metrics_are_served_with_the_certificate_of_a_secret() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        let key = rcgen::KeyPair::generate()?;
        let certificate = rcgen::CertificateParams::new(["metrics.example".to_owned()])?.self_signed(&key)?;
        let dir = tempfile::tempdir()?;
        let file = |name: &str, text: String| -> Result<String> {
            let path = dir.path().join(name);
            std::fs::write(&path, text)?;
            Ok(path.display().to_string())
        };
        let (cert, key) = (file("tls.crt", certificate.pem())?, file("tls.key", key.serialize_pem())?);
        let create = ["-n", SYSTEM, "create", "secret", "tls", "metrics-certificate"];
        let files = [format!("--cert={cert}"), format!("--key={key}")];
        cluster.kubectl(&[&create[..], &[files[0].as_str(), files[1].as_str()]].concat())?;
        let token = cluster.token("default", READER)?;
        let outcome = async {
            cluster.configure(&["metrics.authentication.certificateSecret=metrics-certificate"]).await?;
            for (pod, _) in pods(cluster).await? {
                let answer =
                    cluster.scrape_trusting(&pod, &token, certificate.der(), "metrics.example").await?;
                ensure!(matches!(&answer, Answer::Page(_)), "{pod}: {answer:?}");
            }
            anyhow::Ok(())
        }
        .await;
        cluster.configure(&[]).await?;
        cluster.kubectl(&["-n", SYSTEM, "delete", "secret", "metrics-certificate"])?;
        outcome
    })
}
