//! Puts simulated GPUs and the product on the cluster of `e2e/cluster`, bringing it up if it is not,
//! and says how to reach it. `make cluster` runs this. Arguments are values for the chart.
#![forbid(unsafe_code)]

use aliquot_e2e::cluster::Cluster;
use anyhow::Result;

#[tokio::main]
async fn main() -> Result<()> {
    let values: Vec<String> = std::env::args().skip(1).collect();
    eprintln!("bringing the cluster up");
    let cluster = Cluster::join().await?;
    eprintln!("simulating GPUs in {}, building images", aliquot_e2e::cluster::SIM);
    cluster.start_anew().await?;
    eprintln!("installing the chart");
    cluster.install(&values.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    println!("export KUBECONFIG={}", cluster.setting("KUBECONFIG")?);
    println!("export PATH={}:$PATH", cluster.setting("CLUSTER_BIN")?);
    println!("# take it down with: e2e/cluster/down");
    Ok(())
}
