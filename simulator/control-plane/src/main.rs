//! `aliquot-control-plane`: the embedded control plane as a program.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;

use aliquot_control_plane::{Controllers, Gates, Options, PodDeletion, ServerVersion, serve};
use anyhow::{Context as _, bail};
use clap::Parser;

/// A Kubernetes control plane in memory, for demos and tests. It has no security: anybody who
/// can connect is an administrator.
#[derive(Debug, Parser)]
#[command(name = "aliquot-control-plane", version)]
struct Args {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// File to write a kubeconfig to.
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// User named in the kubeconfig.
    #[arg(long, default_value = "admin")]
    user: String,
    /// Release to behave like: 1.34, 1.35, 1.36 or 1.37.
    #[arg(long, default_value = "1.36")]
    kubernetes_version: ServerVersion,
    /// Feature gates, as in DRAPartitionableDevices=false.
    #[arg(long, value_delimiter = ',')]
    feature_gates: Vec<String>,
    /// API versions to serve besides the defaults, as in resource.k8s.io/v1beta2.
    #[arg(long, value_delimiter = ',')]
    runtime_config: Vec<String>,
    /// Run no controllers: an API server alone.
    #[arg(long)]
    no_controllers: bool,
    /// Delete pods on nodes at once, for lack of a kubelet.
    #[arg(long)]
    no_kubelet: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let args = Args::parse();
    let mut gates = Gates::of(args.kubernetes_version);
    for setting in &args.feature_gates {
        let (name, value) =
            setting.split_once('=').context("a feature gate is set as NAME=true or NAME=false")?;
        let on =
            value.parse().with_context(|| format!("feature gate {name}: {value:?} is not true or false"))?;
        if !gates.set(name, on) {
            bail!("feature gate {name} is not modelled");
        }
    }
    let options = Options {
        listen: args.listen,
        version: args.kubernetes_version,
        gates: Some(gates),
        runtime_config: args.runtime_config.into_iter().collect(),
        controllers: if args.no_controllers { Controllers::NONE } else { Controllers::ALL },
        pod_deletion: if args.no_kubelet { PodDeletion::Immediate } else { PodDeletion::Graceful },
        ..Options::default()
    };
    let handle = serve(options).await?;
    if let Some(path) = &args.kubeconfig {
        handle.write_kubeconfig(path, &args.user)?;
    }
    println!("{}", handle.url());
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        r = tokio::signal::ctrl_c() => r?,
        _ = terminate.recv() => {}
    }
    handle.shutdown().await;
    Ok(())
}
