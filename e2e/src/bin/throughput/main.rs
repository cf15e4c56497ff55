//! Throughput of the allocator on a real Kubernetes: nodes without machines, published as the node agent
//! publishes them, and the product's own chart with the controller built beside this program.
//!
//! Measured from the first pod that is created to the last that kube-scheduler has bound. Beside the
//! controller stand, on the same cluster and in turn with it, a writer that decides nothing
//! ([`writer`]) and kube-scheduler alone. What all of it says goes into a table and into
//! `target/bench/throughput.json`.
#![forbid(unsafe_code)]

mod backlog;
mod etcd;
mod fleet;
mod load;
mod product;
mod report;
mod settings;
mod usage;
mod writer;

use aliquot_e2e::cluster::Cluster;
use aliquot_e2e::figure::Figure;
use aliquot_model::layout::AllocatorMode;
use anyhow::{Context, Result};
use clap::Parser as _;
use fleet::Fleet;
use load::{Claims, Load};
use product::Product;
use report::Report;
use settings::Settings;
use writer::Writer;

#[tokio::main]
async fn main() -> Result<()> {
    let settings = Settings::parse();
    eprintln!("bringing the cluster up");
    let cluster = Cluster::join().await?;
    let mut report = Report::new(&settings)?;
    let product = Product::install(&cluster, &settings).await?;
    eprintln!("publishing {} nodes", settings.nodes);
    let mut fleet = Fleet::create(&cluster, settings.nodes).await?;
    fleet.publish(AllocatorMode::Controller).await?;
    etcd::measure(&cluster, &fleet, &mut report).await?;
    let load = Load::new(&cluster).await?;
    product.settle(&load).await?;
    for claims in settings.claims().into_iter().filter(|_| settings.rounds > 0) {
        beside_the_writer(&product, &load, &fleet, &settings, claims, &mut report).await?;
    }
    if settings.backlog > 0 {
        backlog::measure(&load, &fleet, &settings, &mut report).await?;
    }
    if settings.native > 0 {
        product.switch_off().await?;
        fleet.publish(AllocatorMode::Scheduler).await?;
        native(&load, &settings, &mut report).await?;
    }
    report.finish()
}

/// The controller and the writer in turn.
async fn beside_the_writer(
    product: &Product<'_>,
    load: &Load<'_>,
    fleet: &Fleet,
    settings: &Settings,
    claims: Claims,
    report: &mut Report,
) -> Result<()> {
    let (mut controller, mut writer) = (Vec::new(), Vec::new());
    for round in 0..settings.rounds {
        controller.push(load.measure(claims, settings.pods).await.context("with the controller")?);
        report.line("controller", claims.name(), round, &controller);
        load.clean().await?;
        let standing_by = product.stand_by().await?;
        let hands = Writer::start(load, fleet, settings.pods)?;
        writer.push(load.measure(claims, settings.pods).await.context("with the writer")?);
        hands.finish().await?;
        report.line("writer", claims.name(), round, &writer);
        load.clean().await?;
        standing_by.end().await?;
        product.settle(load).await?;
    }
    let name = format!("allocator.throughput.nodes_{}{}", settings.nodes, claims.suffix());
    let unit = "pods/s from the first created to the last bound; baseline: a writer that decides nothing";
    report.compare(&name, unit, (&controller, &writer));
    Ok(())
}

/// kube-scheduler alone.
async fn native(load: &Load<'_>, settings: &Settings, report: &mut Report) -> Result<()> {
    let measured =
        load.measure(Claims::Template, settings.native).await.context("with kube-scheduler alone")?;
    report.line("kube-scheduler", "template", 0, std::slice::from_ref(&measured));
    let controller = report.value(&format!("allocator.throughput.nodes_{}_template", settings.nodes));
    report.add(Figure {
        name: format!("allocator.throughput.native_nodes_{}", settings.nodes),
        value: measured.rate(),
        unit: format!(
            "pods/s of {} pods, kube-scheduler allocates; baseline: the controller",
            settings.native
        ),
        baseline: controller,
        ratio: measured.rate() / controller,
        command: settings.command(),
        assumed: Vec::new(),
    });
    load.clean().await
}
