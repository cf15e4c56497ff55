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
    ("governance.enabled=false,governance.failurePolicy=Fail", Some("governance.enabled is false")),
    (
        "mode=scheduler,controller.enabled=false,governance.failurePolicy=Fail",
        Some("controller.enabled is false"),
    ),
    (
        "mode=scheduler,controller.replicas=0,governance.failurePolicy=Fail",
        Some("nobody in the cluster could make"),
    ),
    ("mode=scheduler,controller.replicas=0", None),
    ("governance.failurePolicy=Fail", None),
    ("kubeletPlugin.audit.enabled=false,kubeletPlugin.audit.evict=true", Some("nobody would be found")),
    ("kubeletPlugin.vfio.onNvSwitch=true", Some("no GPU would be offered to virtual machines")),
    ("kubeletPlugin.vfio.enabled=true,kubeletPlugin.vfio.onNvSwitch=true", None),
    ("kubeletPlugin.mps.enabled=true", None),
    ("kubeletPlugin.mps.enabled=true,kubeletPlugin.regionStorage=directory", None),
    ("kubeletPlugin.mps.enabled=true,kubeletPlugin.mps.sharedMemory=8Gi", None),
    ("kubeletPlugin.mps.sharedMemory=0", Some("/kubeletPlugin/mps/sharedMemory")),
    ("kubeletPlugin.mps.on=true", Some("/kubeletPlugin/mps")),
    ("kubeletPlugin.audit.interval=0s", Some("/kubeletPlugin/audit/interval")),
    ("controller.gangTimeout=0s", Some("/controller/gangTimeout")),
    ("controller.gangTimeout=1500ms", None),
    ("webhook.port=8081", Some("webhook.port is 8081")),
    ("webhook.url=https://", Some("webhook.url is https://:")),
    ("webhook.url=https://10.1.2.3:8443", None),
    ("webhook.url=https://10.1.2.3:8443/", None),
    ("webhook.url=https://hooks.example.com/mutate-pods", None),
    ("webhook.url=https://[fd00::1]:8443", None),
    ("webhook.url=https://hooks.example.com?a=b", Some("webhook.url is https://hooks.example.com?a=b:")),
    (
        "webhook.url=https://hooks.example.com/a/path",
        Some("webhook.url is https://hooks.example.com/a/path:"),
    ),
    ("webhook.url=https://somebody@hooks.example.com", Some("webhook.url is https://somebody@")),
    ("webhook.url=https://hooks.example.com:99999", Some("webhook.url is https://hooks.example.com:99999:")),
    ("webhook.enabled=false,webhook.clientCAConfigMap=ca", Some("nothing would be kept from anybody")),
    (
        "mode=scheduler,controller.enabled=false,webhook.clientCAConfigMap=ca",
        Some("nothing would be kept from anybody"),
    ),
    (
        "mode=scheduler,controller.enabled=false,webhook.networkPolicy.enabled=true,webhook.networkPolicy.from[0].ipBlock.cidr=10.0.0.0/8",
        Some("nothing would be kept from anybody"),
    ),
    (
        "webhook.networkPolicy.enabled=true,controller.hostNetwork=true,webhook.networkPolicy.from[0].ipBlock.cidr=10.0.0.0/8",
        Some("pods of the host's network"),
    ),
    ("controller.hold.usual=90m,controller.hold.atMost=1h", Some("controller.hold.usual is 90m")),
    ("controller.hold.usual=61000ms,controller.hold.atMost=1m", Some("controller.hold.usual is 61000ms")),
    ("controller.hold.usual=3600s,controller.hold.atMost=1h", None),
    ("controller.hold.atMost=0s", None),
    ("controller.hold.atMost=99999999999999999999h", Some("/controller/hold/atMost")),
    ("controller.gangTimeout=99999999999999999999s", Some("/controller/gangTimeout")),
    ("webhook.certificateLife=99999999999999999999h", Some("/webhook/certificateLife")),
    ("kubeletPlugin.audit.timeBurst=99999999999999999999s", Some("/kubeletPlugin/audit/timeBurst")),
    ("controller.reservation.enabled=true", None),
    ("controller.reservation.enabled=true,controller.reservation.atMost=0m", Some("atMost is 0m")),
    ("controller.reservation.atMost=0s", None),
    ("controller.resources.limits.memory=128Mi", Some("controller.resources.limits.memory is 128Mi")),
    ("controller.resources.limits.memory=350Mi", Some("controller.resources.limits.memory is 350Mi")),
    ("controller.resources.limits.memory=0.3G", Some("controller.resources.limits.memory is 0.3G")),
    ("controller.resources.limits.memory=134217728", Some("controller.resources.limits.memory is 1")),
    ("controller.resources.limits.memory=512Mi", None),
    ("controller.resources.limits.memory=128Mi,webhook.enabled=false", None),
    ("controller.resources.limits=null", None),
    ("controller.resources=null", None),
    (
        "controller.hostNetwork=true,kubeletPlugin.hostNetwork=true,kubeletPlugin.metricsPort=8081",
        Some("kubeletPlugin.metricsPort is 8081"),
    ),
    (
        "controller.hostNetwork=true,kubeletPlugin.hostNetwork=true,kubeletPlugin.metricsPort=8443",
        Some("kubeletPlugin.metricsPort is 8443"),
    ),
    ("controller.hostNetwork=true,kubeletPlugin.hostNetwork=true", None),
    ("controller.hostNetwork=true,kubeletPlugin.metricsPort=8081", None),
    ("metrics.authentication.controllerPort=8081", Some("metrics.authentication.controllerPort is 8081")),
    ("metrics.authentication.controllerPort=8443", Some("where the webhook is served")),
    ("metrics.authentication.controllerPort=8443,webhook.enabled=false", None),
    ("metrics.authentication.controllerPort=8445", None),
    (
        "metrics.authentication.controllerPort=8445,controller.hostNetwork=true,kubeletPlugin.hostNetwork=true",
        Some("metrics.authentication.controllerPort is 8445, which agents have too"),
    ),
    (
        "metrics.authentication.kubeletPluginPort=8081,controller.hostNetwork=true,kubeletPlugin.hostNetwork=true",
        Some("metrics.authentication.kubeletPluginPort is 8081, which controllers have too"),
    ),
    (
        "metrics.authentication.kubeletPluginPort=8080",
        Some("metrics.authentication.kubeletPluginPort is 8080"),
    ),
    ("metrics.authentication.kubeletPluginPort=8080,metrics.authentication.enabled=false", None),
    (
        "metrics.authentication.readers[0].kind=ServiceAccount,metrics.authentication.readers[0].name=x",
        Some("ServiceAccount x without a namespace"),
    ),
    ("metrics.authentication.readers[0].kind=Group,metrics.authentication.readers[0].name=x", None),
    ("metrics.podMonitor.enabled=true,metrics.authentication.certificateSecret=metrics", None),
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

#[test]
fn without_the_webhook_the_controller_may_not_write_configurations_of_webhooks() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let chart = cluster.repo().join("deploy/helm/aliquot").display().to_string();
        for (values, may) in [("webhook.enabled=true", true), ("webhook.enabled=false", false)] {
            let arguments =
                ["template", "x", &chart, "-s", "templates/rbac-controller.yaml", "--set", values];
            let roles = command::run(cluster.setting("HELM")?, &arguments)?;
            ensure!(roles.contains("mutatingwebhookconfigurations") == may, "{values}: {roles}");
        }
        Ok(())
    })
}

/// Two instances on the host's network would wait for one port for ever.
#[test]
fn an_update_of_node_agents_on_the_hosts_network_ends_the_old_instance_first() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let chart = cluster.repo().join("deploy/helm/aliquot").display().to_string();
        for (values, first) in [
            ("kubeletPlugin.hostNetwork=true", "{maxSurge: 0, maxUnavailable: 1}"),
            ("kubeletPlugin.hostNetwork=false", "{maxSurge: 1, maxUnavailable: 0}"),
        ] {
            let arguments = ["template", "x", &chart, "-s", "templates/kubeletplugin.yaml", "--set", values];
            let agent = command::run(cluster.setting("HELM")?, &arguments)?;
            ensure!(agent.contains(first), "{values}: {agent}");
        }
        Ok(())
    })
}
