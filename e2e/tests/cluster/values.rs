//! Values of the chart that cannot work together are refused before anything is installed.

use crate::support::on_cluster;
use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::command;
use anyhow::{Result, ensure};

/// Values, and what is said of them; nothing if they can work.
const COMBINATIONS: &[(&str, Option<&str>)] = &[
    ("mode=controller", None),
    ("controller.enabled=false", Some("mode is controller, and there is none")),
    ("controller.replicas=0", Some("mode is controller, and there is none")),
    ("controller.enabled=false,mode=scheduler", None),
    ("webhook.enabled=false,governance.failurePolicy=Fail", Some("nothing would be checked")),
    ("kubeletPlugin.audit.enabled=false,kubeletPlugin.audit.evict=true", Some("nobody would be found")),
    ("kubeletPlugin.audit.interval=0s", Some("/kubeletPlugin/audit/interval")),
    ("controller.gangTimeout=0s", Some("/controller/gangTimeout")),
    ("controller.gangTimeout=1500ms", None),
    ("webhook.port=8081", Some("webhook.port is 8081")),
    ("webhook.url=https://", Some("webhook.url is https://:")),
    ("webhook.url=https://10.1.2.3:8443", None),
    ("webhook.enabled=false,webhook.clientCAConfigMap=ca", Some("nothing would be kept from anybody")),
    (
        "webhook.networkPolicy.enabled=true,controller.hostNetwork=true,webhook.networkPolicy.from[0].ipBlock.cidr=10.0.0.0/8",
        Some("pods of the host's network"),
    ),
    ("controller.hold.usual=90m,controller.hold.atMost=1h", Some("controller.hold.usual is 90m")),
    ("controller.hold.usual=61000ms,controller.hold.atMost=1m", Some("controller.hold.usual is 61000ms")),
    ("controller.hold.usual=3600s,controller.hold.atMost=1h", None),
    ("controller.hold.atMost=0s", None),
];

#[test]
fn values_that_cannot_work_together_are_refused_by_name() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let chart = cluster.repo().join("deploy/helm/aliquot").display().to_string();
        for (values, refusal) in COMBINATIONS {
            let rendered =
                command::run(cluster.setting("HELM")?, &["template", "x", &chart, "--set", values]);
            let said = rendered.err().map(|error| format!("{error:#}"));
            let is_right = match (&said, refusal) {
                (None, None) => true,
                (Some(said), Some(refusal)) => said.contains(refusal),
                _ => false,
            };
            ensure!(is_right, "{values}: {said:?}, not {refusal:?}");
        }
        Ok(())
    })
}
