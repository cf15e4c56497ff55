//! `aliquot demo`: the whole line on one machine, with nothing faked that is ours.
//!
//! Simulated are the GPUs (stand-ins for NVIDIA's two libraries) and the Kubernetes control plane. Real
//! are the controller, the node agents, their sockets, the CDI specs, the limiter, and the processes
//! that run into it. This module plays kubelet and container runtime in between.

mod api;
mod clean;
mod cluster;
mod fields;
mod fleet;
mod lines;
mod manifests;
mod picture;
mod processes;
mod program;
mod progress;
mod report;
mod runtime;
mod work_dir;

use crate::args::DemoArgs;
use crate::output::written;
use aliquot_model::{DeviceKind, DeviceName};
use anyhow::{Context, Result, bail};
use cluster::Cluster;
use fleet::Fleet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use manifests::Document;
use program::{Program, State};
use progress::Progress;
use report::{Report, Row};
use runtime::{Container, Runtime};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};
use work_dir::WorkDir;

/// How long a pod may wait without anything happening before the demo says why.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same where the controller has said of every pod that waits that it does not fit: containers keep what they have
/// while others wait, so what does not fit now would not later. It is what an event may take that says otherwise.
const TOLD: Duration = Duration::from_secs(2);
/// How long the containers' programs may take to say something.
const SAY: Duration = Duration::from_secs(3);
/// What stands below the table.
const EXPLANATION: &str =
    "The figures are those of a program that takes memory until CUDA refuses more. What is
missing to a limit is what CUDA itself takes: its context counts too. Then the
container's own command ran ($), with this machine's files.";
/// How often the demo looks at the API.
const LOOK: Duration = Duration::from_millis(100);

/// Runs the demo.
///
/// # Errors
/// Bad manifests and fleets with file, line and reason; a pod that cannot be placed with the
/// controller's reason; a limit that did not hold; anything that was left behind.
pub(crate) async fn run(args: DemoArgs) -> Result<()> {
    let mut ending = Ending::listen()?;
    tokio::select! {
        biased;
        // What the demo started has ended, and its files are gone, before this is said.
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
    let classes = manifests::device_classes()?;
    let documents = documents(&args)?;
    manifests::check(&documents, &classes)?;
    let build = processes::Build::find(args.build_dir.as_deref(), args.limiter_build_dir.as_deref())?;
    let work_dir = WorkDir::make(args.dir.as_deref())?;
    let dir = work_dir.path();

    let mut progress = Progress::new(7);
    let gpus: u32 = fleet.nodes.iter().flat_map(|n| &n.gpus).map(|g| g.count).sum();
    progress.step(&format!(
        "start {} nodes with {gpus} simulated GPUs, control plane and controller",
        fleet.nodes.len()
    ));
    let mut cluster = Cluster::start(dir, &fleet, &build, &classes).await?;
    progress.step("publish devices as ResourceSlices");
    let nodes = cluster.wait_for_devices().await?;
    progress.step(&format!("apply {} objects", documents.len()));
    for document in &documents {
        api::create(&cluster.client, document).await?;
    }
    let runtime = runtime(&args, dir, &build)?;
    let isolation = if runtime.namespaces { "user namespaces" } else { "scratch roots" };
    progress.step(&format!("allocate, prepare and probe, each container in {isolation}"));
    let mut played = play(&mut cluster, &runtime, &documents, &progress).await?;
    progress.step("run the containers' own programs");
    run_programs(&mut played).await?;
    progress.step("draw what is held");
    let pictures = cluster.pictures(&played.claims).await?;
    progress.step("delete everything and look for leftovers");
    let mut rows: Vec<Row> = played.containers.iter().map(|(row, _)| row.clone()).collect();
    rows.sort_by(|a, b| (&a.namespace, &a.pod, &a.container).cmp(&(&b.namespace, &b.pod, &b.container)));
    release(&mut cluster, played).await?;
    let leftovers = clean::leftovers(&cluster).await?;
    cluster.stop().await?;
    progress.done();

    let report = Report { isolation, nodes, containers: rows, clean: leftovers.is_empty() };
    print(&args, &report, &pictures)?;
    verdict(&report, &leftovers)
}

fn documents(args: &DemoArgs) -> Result<Vec<Document>> {
    if args.files.is_empty() {
        let parsed: Result<Vec<_>> =
            manifests::EXAMPLES.iter().map(|(file, text)| manifests::parse(file, text)).collect();
        return Ok(parsed?.into_iter().flatten().collect());
    }
    let parsed: Result<Vec<_>> = args.files.iter().map(|file| manifests::read(file)).collect();
    let documents: Vec<Document> = parsed?.into_iter().flatten().collect();
    if !documents.iter().any(|d| d.text("/kind") == "Pod") {
        bail!("nothing to run: the files have no Pod");
    }
    Ok(documents)
}

fn runtime(args: &DemoArgs, dir: &std::path::Path, build: &processes::Build) -> Result<Runtime> {
    let own_program = std::env::current_exe()?;
    let containers = dir.join("containers");
    std::fs::create_dir_all(&containers)?;
    let namespaces = !args.no_namespaces
        && aliquot_sim_kubelet::container::namespaces_work(&own_program, &containers.join("probe"));
    Ok(Runtime { own_program, probe: build.file("cuda-probe")?, namespaces, dir: containers })
}

/// What runs, and what was found.
struct Played {
    containers: Vec<(Row, Container)>,
    pods: Vec<Pod>,
    claims: Vec<ResourceClaim>,
}

/// Starts every pod as it is bound, and probes one container after the other so that the figures are their own.
async fn play(
    cluster: &mut Cluster,
    runtime: &Runtime,
    documents: &[Document],
    progress: &Progress,
) -> Result<Played> {
    let wanted = documents.iter().filter(|d| d.text("/kind") == "Pod").count();
    let mut played = Played { containers: Vec::new(), pods: Vec::new(), claims: Vec::new() };
    let mut done: BTreeSet<String> = BTreeSet::new();
    let mut last_change = Instant::now();
    while done.len() < wanted {
        cluster.check()?;
        let mut ready = Vec::new();
        let mut waiting = Vec::new();
        for pod in api::pods(&cluster.client).await? {
            if done.contains(&pod.uid().unwrap_or_default()) {
                continue;
            }
            let bound = pod.spec.as_ref().is_some_and(|s| s.node_name.is_some());
            if bound { ready.push(pod) } else { waiting.push(pod) }
        }
        if ready.is_empty() {
            let quiet = last_change.elapsed();
            if quiet > TOLD {
                let reasons = reasons(cluster, &waiting).await;
                let refused = |reason: &Option<String>| reason.as_deref().is_some_and(is_refusal);
                if quiet > PATIENCE || (!waiting.is_empty() && reasons.iter().all(refused)) {
                    return Err(why_waiting(documents, &waiting, reasons));
                }
            }
            tokio::time::sleep(LOOK).await;
            continue;
        }
        for pod in ready {
            progress.detail(&format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()));
            run_pod(cluster, runtime, &pod, &mut played).await?;
            done.insert(pod.uid().unwrap_or_default());
            played.pods.push(pod);
            last_change = Instant::now();
        }
    }
    Ok(played)
}

/// Runs the programs that can, side by side, until each has said something or ended.
async fn run_programs(played: &mut Played) -> Result<()> {
    let can_run = |row: &Row| !matches!(row.program.state, State::NotRun { .. });
    for (_, container) in played.containers.iter_mut().filter(|(row, _)| can_run(row)) {
        container.start_program().await?;
    }
    let started = Instant::now();
    loop {
        let mut silent = false;
        for (row, container) in played.containers.iter_mut().filter(|(row, _)| can_run(row)) {
            (row.program.state, row.program.said) = container.program()?;
            silent |= row.program.state == State::Running && row.program.said.is_empty();
        }
        if !silent || started.elapsed() > SAY {
            return Ok(());
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Returns true if a warning says that a pod gets no devices as things are.
fn is_refusal(warning: &str) -> bool {
    use aliquot_controller::brain::reasons::{CLAIM_REJECTED, DOES_NOT_FIT, QUOTA};
    [CLAIM_REJECTED, DOES_NOT_FIT, QUOTA].iter().any(|reason| warning.starts_with(&format!("{reason}:")))
}

/// What was said of each pod that waits.
async fn reasons(cluster: &Cluster, waiting: &[Pod]) -> Vec<Option<String>> {
    let mut reasons = Vec::new();
    for pod in waiting {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        reasons.push(api::warning(&cluster.client, &namespace, &name).await.ok().flatten());
    }
    reasons
}

/// Why pods are not placed, with each one's place in the files.
fn why_waiting(documents: &[Document], waiting: &[Pod], reasons: Vec<Option<String>>) -> anyhow::Error {
    let mut lines = Vec::new();
    for (pod, reason) in waiting.iter().zip(reasons) {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        let place = documents
            .iter()
            .find(|d| {
                d.text("/kind") == "Pod" && d.namespace() == namespace && d.text("/metadata/name") == name
            })
            .map(|d| format!("{}: ", d.place))
            .unwrap_or_default();
        lines.push(format!(
            "{place}pod {namespace}/{name} cannot run: {}",
            reason.as_deref().unwrap_or("nobody said why")
        ));
    }
    if lines.is_empty() {
        lines.push("the pods have vanished".to_owned());
    }
    anyhow::anyhow!(lines.join("\n"))
}

async fn run_pod(cluster: &mut Cluster, runtime: &Runtime, pod: &Pod, played: &mut Played) -> Result<()> {
    let namespace = pod.namespace().unwrap_or_default();
    let spec = pod.spec.clone().unwrap_or_default();
    let node = spec.node_name.clone().unwrap_or_default();
    let all = api::claims(&cluster.client).await?;
    let mut prepared = BTreeMap::new();
    for entry in spec.resource_claims.iter().flatten() {
        let name = api::claim_name(pod, &entry.name)
            .with_context(|| format!("pod {namespace}/{} has no claim {:?}", pod.name_any(), entry.name))?;
        let claim = all
            .iter()
            .find(|c| c.namespace().as_deref() == Some(&namespace) && c.name_any() == name)
            .with_context(|| format!("claim {namespace}/{name} is not there"))?;
        let devices =
            cluster.kubelet(&node)?.prepare(&namespace, &name, &claim.uid().unwrap_or_default()).await?;
        prepared.insert(entry.name.clone(), (claim.clone(), devices));
        if !played.claims.iter().any(|c| c.uid() == claim.uid()) {
            played.claims.push(claim.clone());
        }
    }
    for container in &spec.containers {
        let uses = container.resources.iter().flat_map(|r| r.claims.iter().flatten());
        let (mut ids, mut devices, mut names, mut limit) = (Vec::new(), Vec::new(), BTreeSet::new(), 0u64);
        let mut requests = BTreeSet::new();
        for used in uses {
            let (claim, answers) = prepared.get(&used.name).with_context(|| {
                format!("container {} names claim {:?}, which the pod lacks", container.name, used.name)
            })?;
            names.insert(claim.name_any());
            requests.insert((claim.name_any(), used.request.clone()));
            let asked = |requests: &[String]| match &used.request {
                Some(request) => requests.is_empty() || requests.contains(request),
                None => true,
            };
            ids.extend(answers.iter().filter(|d| asked(&d.requests)).flat_map(|d| d.cdi_ids.clone()));
            for (device, bytes) in cluster.promised(claim, used.request.as_deref()) {
                devices.push(device);
                limit = limit.saturating_add(bytes);
            }
        }
        if ids.is_empty() {
            continue;
        }
        let mut unique = BTreeSet::new();
        ids.retain(|id| unique.insert(id.clone()));
        let edits = aliquot_sim_kubelet::cdi::edits(&cluster.cdi_dir(&node)?, &ids)?;
        let env: BTreeMap<String, String> =
            container.env.iter().flatten().filter_map(|e| Some((e.name.clone(), e.value.clone()?))).collect();
        let name = format!("{namespace}-{}-{}", pod.name_any(), container.name);
        let argv = program::argv(container, &env, runtime.namespaces);
        let state =
            argv.as_ref().map_or_else(|why| State::NotRun { reason: why.clone() }, |_| State::Running);
        let running = runtime.run(&name, &edits, env, &argv.unwrap_or_default()).await?;
        let row = Row {
            namespace: namespace.clone(),
            pod: pod.name_any(),
            container: container.name.clone(),
            claim: names.into_iter().collect::<Vec<_>>().join(","),
            node: node.clone(),
            limit_bytes: devices.iter().all(|device| is_limited(device)).then_some(limit),
            devices,
            got_bytes: running.devices.iter().map(|d| d.allocated_bytes).sum(),
            refused_with: running.devices.iter().map(|d| d.refused_with).collect(),
            program: Program { command: program::shown(container), state, said: Vec::new() },
            uses: requests,
        };
        played.containers.push((row, running));
    }
    api::mark_running(&cluster.client, pod).await
}

/// Whether somebody holds the user of a device to its memory: in turns and beside others nobody does.
fn is_limited(device: &str) -> bool {
    match DeviceName::parse(device) {
        Some(DeviceName::Plain { kind, .. }) => !matches!(kind, DeviceKind::TimeSlice | DeviceKind::Admin),
        _ => true,
    }
}

/// Ends containers, unprepares and deletes, as kubelet and user would.
async fn release(cluster: &mut Cluster, played: Played) -> Result<()> {
    drop(played.containers);
    for claim in &played.claims {
        let (namespace, name, uid) =
            (claim.namespace().unwrap_or_default(), claim.name_any(), claim.uid().unwrap_or_default());
        for node in cluster.nodes_of(claim) {
            cluster.kubelet(&node)?.unprepare(&namespace, &name, &uid).await?;
        }
    }
    for pod in &played.pods {
        api::remove_pod(&cluster.client, pod).await?;
    }
    for claim in played.claims.iter().filter(|c| c.owner_references().is_empty()) {
        api::remove_claim(&cluster.client, claim).await?;
    }
    Ok(())
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
    Ok(())
}
