//! `aliquot demo`: runs the whole product on one machine, with no part of the product faked.
//!
//! The GPUs (stand-ins for NVIDIA's two libraries) and the Kubernetes control plane are simulated. The
//! controller, the node agents, their sockets, the CDI specs, the limiter and the processes that run into
//! their limits are real. This module plays kubelet and container runtime between them.

mod api;
mod clean;
mod cluster;
mod fields;
mod fleet;
mod lines;
mod manifests;
mod picture;
mod play;
mod processes;
mod program;
mod progress;
mod report;
mod runtime;
mod said;
mod waiting;
mod work_dir;
mod workloads;

use crate::args::{ContainerArgs, DemoArgs, TetherArgs};
use crate::client::told;
use crate::output::written;
use aliquot_sim_kubelet::{container, tether};
use anyhow::{Context, Result, bail};
use cluster::Cluster;
use fleet::Fleet;
use manifests::Document;
use play::Play;
use progress::Progress;
use report::Report;
use runtime::Runtime;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use work_dir::WorkDir;

/// The text below the table.
const EXPLANATION: &str =
    "The figures are those of a program that takes memory until CUDA refuses more. What is
missing to a limit is what CUDA itself takes: its context counts too. Then the
container's own command ran ($), with this machine's files.";
/// The interval at which the demo looks at the API.
const LOOK: Duration = Duration::from_millis(100);

/// Turns this process into a container of a running demo.
pub(crate) fn become_container(args: &ContainerArgs) -> ExitCode {
    container::run(&args.spec, args.parent)
}

/// Turns this process into a program that ends with the demo that started it.
pub(crate) fn become_tethered(args: &TetherArgs) -> ExitCode {
    tether::run(args.parent, &args.program, &args.args)
}

/// Runs the demo.
///
/// # Errors
/// Malformed manifests and fleets, with file, line and reason; a pod that cannot be placed, with the
/// controller's reason; a limit that did not hold; anything that was left behind.
pub(crate) async fn run(args: DemoArgs) -> Result<()> {
    // The cause is often a word of a manifest, which may contain control characters.
    run_or_end(args).await.map_err(|error| anyhow::Error::msg(said::printable(&told(&error))))
}

async fn run_or_end(args: DemoArgs) -> Result<()> {
    let mut ending = Ending::listen()?;
    tokio::select! {
        biased;
        // By the time of this message, all processes of the demo have ended and its files are removed.
        signal = ending.signal() => bail!("stopped by {signal}; everything that the demo started has ended"),
        result = run_through(args) => result,
    }
}

/// Signals that end a demo.
struct Ending {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Ending {
    fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    async fn signal(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hang_up.recv() => "SIGHUP",
        }
    }
}

async fn run_through(args: DemoArgs) -> Result<()> {
    let fleet = args.fleet.as_deref().map_or_else(|| Ok(Fleet::built_in()), Fleet::read)?;
    let installation = manifests::installation()?;
    let (files, left_out) = files(&args)?;
    let documents: Vec<Document> = files.iter().flatten().cloned().collect();
    manifests::check(&documents, &installation)?;
    let build = processes::Build::find(args.build_dir.as_deref(), args.limiter_build_dir.as_deref())?;
    let work_dir = WorkDir::make(args.dir.as_deref())?;
    let dir = work_dir.path();

    let mut progress = Progress::new(6);
    let gpus: u32 = fleet.nodes.iter().flat_map(|n| &n.gpus).map(|g| g.count).sum();
    progress.step(&format!(
        "start {} nodes with {gpus} simulated GPUs, control plane and controller",
        fleet.nodes.len()
    ));
    let mut cluster = Cluster::start(dir, &fleet, &build, &installation).await?;
    progress.step("publish devices as ResourceSlices");
    let nodes = cluster.wait_for_devices().await?;
    let runtime = runtime(&args, dir, &build)?;
    let isolation = if runtime.without.is_none() { "user namespaces" } else { "scratch roots" };
    progress.step(&format!("apply {} objects; allocate, prepare and probe in {isolation}", documents.len()));
    let mut play = Play::new(&mut cluster, &runtime);
    for file in &files {
        play.apply(file, &progress).await?;
    }
    progress.step("run the containers' own programs");
    play.run_programs().await?;
    progress.step("draw what is held");
    let pictures = play.cluster().pictures(&play.claims()).await?;
    let waiting: Vec<String> =
        play.waiting.iter().map(|pod| pod.line(&documents, play.workloads())).collect();
    progress.step("delete everything and look for leftovers");
    let rows = play.rows();
    play.release().await?;
    let leftovers = clean::leftovers(&cluster).await?;
    cluster.stop().await?;
    progress.done();

    let report =
        Report { isolation, nodes, containers: rows, waiting, left_out, clean: leftovers.is_empty() };
    print(&args, &report, &pictures)?;
    verdict(&report, &leftovers)
}

/// Returns the objects of each file, which are applied one after the other, and the objects that are left
/// out.
fn files(args: &DemoArgs) -> Result<(Vec<Vec<Document>>, Vec<String>)> {
    let mut files: Vec<Vec<Document>> = match args.files.as_slice() {
        [] => manifests::EXAMPLES
            .iter()
            .map(|(file, text)| manifests::parse(file, text))
            .collect::<Result<_>>()?,
        named => named.iter().map(|file| manifests::read(file)).collect::<Result<_>>()?,
    };
    let runs = |document: &Document| document.text("/kind") == "Pod" || workloads::is_workload(document);
    if !files.iter().flatten().any(runs) {
        bail!("nothing to run: the files have no Pod, Deployment, StatefulSet or Job");
    }
    let mut left_out = Vec::new();
    for file in &mut files {
        let out = file.iter().filter(|document| manifests::is_left_out(document));
        left_out.extend(out.map(|document| format!("{}: {}", document.place, document.label())));
        file.retain(|document| !manifests::is_left_out(document));
    }
    Ok((files, left_out))
}

fn runtime(args: &DemoArgs, dir: &std::path::Path, build: &processes::Build) -> Result<Runtime> {
    let own_program = std::env::current_exe()?;
    let containers = dir.join("containers");
    std::fs::create_dir_all(&containers)?;
    let without = match args.no_namespaces {
        true => Some("--no-namespaces".to_owned()),
        false => container::namespaces_work(&own_program, &containers.join("probe"))
            .err()
            .map(|error| format!("{error:#}")),
    };
    Ok(Runtime { own_program, probe: build.file("cuda-probe")?, without, dir: containers })
}

fn print(args: &DemoArgs, report: &Report, pictures: &[(String, Vec<picture::GpuPicture>)]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if let Some(format) = args.output.format() {
        writeln!(out, "{}", written(report, format)?)?;
        return Ok(());
    }
    let (no_color, term) = (std::env::var_os("NO_COLOR"), std::env::var_os("TERM"));
    let colour = lines::colours(out.is_terminal(), no_color.as_deref(), term.as_deref());
    writeln!(out)?;
    for (node, gpus) in pictures {
        writeln!(out, "{}", picture::draw(node, gpus, colour).trim_end())?;
    }
    writeln!(out, "\n{}", report::table(&report.containers).trim_end())?;
    write!(out, "{}", lines::wrapped(EXPLANATION, 0))?;
    for object in &report.left_out {
        write!(
            out,
            "{}",
            lines::wrapped(&format!("left out, as the demo keeps no such quota: {object}"), 0)
        )?;
    }
    if report.clean {
        writeln!(out, "\nreleased: no GPU instance, CDI file, checkpoint entry, claim, gate or taint left")?;
    }
    Ok(())
}

fn verdict(report: &Report, leftovers: &[String]) -> Result<()> {
    let broken: Vec<String> = report
        .containers
        .iter()
        .filter(|row| !row.held())
        .map(|row| {
            format!(
                "{}/{} {}: got {} of a limit of {}",
                row.namespace,
                row.pod,
                row.container,
                row.got_bytes,
                row.limit_bytes.map_or_else(|| "none".to_owned(), |limit| limit.to_string())
            )
        })
        .collect();
    if !broken.is_empty() {
        bail!("limits did not hold:\n{}", broken.join("\n"));
    }
    if !leftovers.is_empty() {
        bail!("not everything was released:\n{}", leftovers.join("\n"));
    }
    if !report.waiting.is_empty() {
        bail!("{}", report.waiting.join("\n"));
    }
    Ok(())
}
