//! Wires the agent together, and starts and stops its parts in order.
//!
//! Start: GPUs, recovery of the node, sockets, then the loops. Stop (SIGTERM, SIGINT): registration socket
//! first, so that the kubelet turns to the other instance, then the DRA socket once calls under way have
//! ended, then the loops. Slices, specs and hardware stay: pods go on running.

mod client;
mod farewell;
mod recovery;
mod sockets;

pub use client::client_of;

use crate::agent::Agent;
use crate::allocation_mode::Waits;
use crate::args::{Args, LogFormat};
use crate::audit::task::Audit;
use crate::driver::{Driver, Roots};
use crate::edits::Site;
use crate::events::Events;
use crate::execute::Machine;
use crate::health::{self, Monitor, Xids};
use crate::http::{self, Readiness};
use crate::hung_driver_calls::Teller;
use crate::inventory::Watcher;
use crate::limits::Follower;
use crate::metrics::{Metrics, Name};
use crate::mps::Mps;
use crate::orphans::Collector;
use crate::prepare::{GivenBack, Node, Overview};
use crate::probe::Probe;
use crate::publish::{Publisher, Settings};
use crate::report::Reporter;
use crate::selinux::{self, Labels, Pair};
use crate::socket::{self, Socket};
use crate::status::{self, StatusWriter};
use crate::store::Store;
use crate::trash::Trash;
use crate::vfio::Vfio;
use crate::{arbitrate, audit, driver_unload, library, partitioning};
use aliquot_cdi::SpecDir;
use aliquot_http::MetricsPort;
use aliquot_model::{DeviceName, names};
use aliquot_nvml::{Deadlines, Gpus, Reopening, Timed};
use anyhow::Context;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The time that calls under way get at shutdown; a call that is cut off is repaired at the next start.
const DRAIN: Duration = Duration::from_secs(5);
/// The time that the loops get at shutdown.
const LOOPS_END: Duration = Duration::from_secs(2);
/// The time after a signal at which the process ends, whatever hangs.
const LAST: Duration = Duration::from_secs(9);

/// Starts logging.
pub fn start_logging(format: LogFormat) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second start (tests in one process) changes nothing.
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}

/// Runs the agent until a signal, on the real NVML.
///
/// # Errors
/// Fails if the agent cannot start; later failures are retried.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let cancel = CancellationToken::new();
    let stop = cancel.clone();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        end_at_last();
        stop.cancel();
    });
    let client = if args.farewell { client::no_api() } else { client::client(&args).await? };
    let http =
        TcpListener::bind(args.http_addr).await.with_context(|| format!("cannot bind {}", args.http_addr))?;
    run_with(args, client, http, None, cancel).await
}

/// Ends the process some time from now. A call to the driver that hangs holds locks of the library, which its
/// clean-up at an ordinary exit may wait for. The state on disk is made for a kill at any moment.
fn end_at_last() {
    let spawned = std::thread::Builder::new().name("end".to_owned()).spawn(|| {
        std::thread::sleep(LAST);
        tracing::warn!("not stopped in time, ending at once");
        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread to end the process if it does not end by itself");
    }
}

/// Runs the agent until cancelled. `gpus` replaces NVML in tests.
///
/// # Errors
/// Fails if the agent cannot start.
pub async fn run_with(
    args: Args,
    client: kube::Client,
    http: TcpListener,
    gpus: Option<Arc<dyn Gpus>>,
    cancel: CancellationToken,
) -> anyhow::Result<()> {
    let _node = if args.farewell { None } else { farewell::claim_node(&args)? };
    let metrics = Metrics::default();
    let readiness = Arc::new(Readiness::default());
    tracing::info!(address = %http.local_addr()?, "serving health and metrics");
    let mut tasks = JoinSet::new();
    let loops = CancellationToken::new();
    // A farewell does not ask the API which clients may read metrics.
    let scraping = if args.farewell { None } else { MetricsPort::open(&args.scraping)? };
    if let Some(port) = &scraping {
        tracing::info!(address = %port.addr(), "serving metrics to those who may read them");
    }
    let scraping = scraping.map(|port| (port, client.clone()));
    tasks.spawn(http::serve(http, Arc::clone(&readiness), metrics.clone(), scraping, loops.clone()));
    let deadlines = Deadlines { read: args.gpu_read_timeout, change: args.gpu_change_timeout };
    let mut label = None;
    let (gpus, library) = match gpus {
        Some(gpus) => {
            readiness.gpus.store(true, Ordering::Relaxed);
            (gpus, None)
        }
        None => {
            if !args.farewell {
                label = driver_unload::label_now(&client, &args.node_name).await;
            }
            let library = Arc::new(library::closed(&args, label.as_deref()));
            (Arc::clone(&library) as Arc<dyn Gpus>, Some(library))
        }
    };
    let seconds = metrics.driver_call_duration.clone();
    let gpus: Arc<dyn Gpus> =
        Arc::new(Timed::new(gpus, deadlines, readiness.calls.clone()).observed(move |operation, took| {
            seconds.get_or_create(&Name { operation }).observe(took.as_secs_f64())
        }));
    if library.is_some() {
        // Recovery finds the library open if it can be opened; if not, recovery does not wait for it.
        let first = Arc::clone(&gpus);
        tokio::select! {
            _ = tokio::task::spawn_blocking(move || first.driver()) => {}
            () = cancel.cancelled() => return Ok(()),
        }
    }
    let events = Events::new(client.clone(), &args.node_name);
    let labels = Pair {
        read_only: args.selinux_read_only_label.clone(),
        writable: args.selinux_writable_label.clone(),
    };
    let labels = Labels::chosen(args.selinux_labels, labels, Path::new("/proc"))
        .context("cannot tell whether SELinux is on")?;
    let oci_hook = oci_hook(&args)?;
    let node = Arc::new(node_of(&args, oci_hook, gpus, labels, library.clone()));
    node.wish.set(label);
    tokio::select! {
        recovered = recovery::recover(&node, &events) => recovered?,
        () = cancel.cancelled() => return Ok(()),
    }
    let parts = Parts { args, client, metrics, readiness, events, node, library };
    parts.serve(cancel, loops, tasks).await
}

/// Returns the OCI hook that the arguments name. A hook that is missing keeps every container with a GPU from
/// starting, including those of running pods once they start again. So the agent refuses to start, and its
/// predecessor stays.
fn oci_hook(args: &Args) -> anyhow::Result<Option<PathBuf>> {
    let Some(named) = &args.oci_hook else { return Ok(None) };
    let path = args.limiter_dir.join(env!("CARGO_PKG_VERSION")).join(named);
    anyhow::ensure!(
        args.farewell || path.is_file(),
        "the OCI hook {}, as this process sees it, is not there, so no container with a GPU would start: install it (aliquot install-node-files, as \
         the chart's init container does), or name it with --oci-hook",
        path.display()
    );
    Ok(Some(path))
}

fn node_of(
    args: &Args,
    oci_hook: Option<PathBuf>,
    gpus: Arc<dyn Gpus>,
    labels: Labels,
    library: Option<Arc<Reopening>>,
) -> Node {
    let data_dir = args.data_dir();
    let driver = Driver::new(Roots {
        driver: args.driver_root.clone(),
        host: args.host_driver_root().to_owned(),
        proc: args.proc_root.clone(),
    });
    driver.files();
    let mps_dir = args.mps_dir.clone().unwrap_or_else(|| data_dir.join("mps"));
    Node {
        store: Store::new(&data_dir),
        machine: Machine {
            gpus,
            cdi: SpecDir::new(&args.cdi_dir),
            driver,
            site: Site {
                driver: args.driver_name.clone(),
                capabilities: args.driver_capabilities.clone(),
                mounts: args.container_mounts.clone(),
                shares_dir: data_dir.join("shares"),
                oci_hook,
            },
            regions: args.region_storage,
            mps: Mps::new(mps_dir, args.region_storage, args.mps_patience)
                .with_shared_memory(args.mps_shared_memory),
            labels,
            limiter_dir: args.limiter_dir.clone(),
            data_dir,
            proc_root: args.proc_root.clone(),
            sys_root: args.sys_root.clone(),
            vfio: Vfio {
                on_nvswitch: args.vfio_on_nvswitch,
                ..Vfio::new(args.vfio, &args.sys_root, &args.proc_root, library)
            },
            probe: Probe::default(),
        },
        slots: args.slots,
        oversubscribe_at_most: args.oversubscribe_at_most,
        lock_timeout: args.lock_timeout,
        report_usage: args.report_usage,
        device_metadata: args.device_metadata,
        // At a farewell no next pod is expected.
        hold_at_most: if args.farewell { Duration::ZERO } else { args.hold_at_most },
        partitioning: partitioning::Shared::default(),
        unclaimed: args.unclaimed_mig,
        wish: driver_unload::Wish::default(),
        given_back: GivenBack::default(),
    }
}

struct Parts {
    args: Args,
    client: kube::Client,
    metrics: Metrics,
    readiness: Arc<Readiness>,
    events: Events,
    node: Arc<Node>,
    /// The NVML library, if it is the real one.
    library: Option<Arc<Reopening>>,
}

impl Parts {
    async fn serve(
        self,
        cancel: CancellationToken,
        loops: CancellationToken,
        mut tasks: JoinSet<()>,
    ) -> anyhow::Result<()> {
        let args = &self.args;
        let pool = names::pool_name(&args.driver_name, &args.node_name);
        let changed = Arc::new(Notify::new());
        let (overview, overview_rx) = watch::channel(Arc::new(Overview::default()));
        let (vanished, vanished_rx) = watch::channel(Arc::new(BTreeSet::new()));
        let data_dir = args.data_dir();
        let boot_id = self.node.boot_id().context("cannot tell the boot")?;
        let monitor = Monitor::new(
            health::file::load(&data_dir, &boot_id),
            &args.driver_name,
            Xids::new(args.health_xids.iter().copied()),
            self.events.clone(),
            self.metrics.clone(),
        );
        let (published, published_rx) = watch::channel(Arc::new(Vec::<DeviceName>::new()));
        let status = StatusWriter::new(self.client.clone(), &args.driver_name);
        let status_follower = status::Follower { writer: status.clone(), overview: overview_rx.clone() };
        if !args.farewell {
            tasks.spawn(status_follower.run(loops.clone()));
        }
        let agent = Agent {
            node: Arc::clone(&self.node),
            client: self.client.clone(),
            driver: args.driver_name.clone(),
            pool: pool.clone(),
            metrics: self.metrics.clone(),
            events: self.events.clone(),
            status,
            changed: Arc::clone(&changed),
        };
        let stop_dra = CancellationToken::new();
        let health = health::Service {
            pool: pool.clone(),
            published: published_rx,
            overview: overview_rx.clone(),
            health: monitor.subscribe(),
            xids: Arc::clone(monitor.xids()),
            stop: stop_dra.clone(),
        };
        for stale in socket::remove_stale(&args.registrar_dir, "reg", &args.driver_name)
            .into_iter()
            .chain(socket::remove_stale(&data_dir, "dra", &args.driver_name))
        {
            tracing::info!(path = %stale.display(), "removed a stale socket");
        }
        let endpoint = socket::dra(&data_dir, &args.driver_name, &args.pod_uid)?;
        let (dra_socket, listener) = Socket::bind(&endpoint)?;
        let dra_server = tokio::spawn(sockets::serve_dra(listener, agent, health, stop_dra.clone()));
        let path = socket::registration(&args.registrar_dir, &args.driver_name, &args.pod_uid)?;
        let registrar = tokio::spawn({
            let (readiness, events) = (Arc::clone(&self.readiness), self.events.clone());
            let (driver, cancel) = (args.driver_name.clone(), cancel.clone());
            async move { sockets::register(&path, &driver, &endpoint, &readiness, &events, cancel).await }
        });
        let (over, began) = (Arc::new(AtomicBool::new(false)), SystemTime::now());
        if args.farewell {
            tasks.spawn(farewell::run(Arc::clone(&self.node), Arc::clone(&over), cancel.clone()));
        }
        let teller = Teller {
            calls: self.readiness.calls.clone(),
            metrics: self.metrics.clone(),
            events: self.events.clone(),
            health: monitor.clone(),
            changed: Arc::clone(&changed),
        };
        tasks.spawn(teller.run(loops.clone()));
        if !args.farewell {
            tasks.spawn(monitor.clone().keep(data_dir.clone(), boot_id, loops.clone()));
        }
        let watcher = Watcher {
            node: Arc::clone(&self.node),
            metrics: self.metrics.clone(),
            events: self.events.clone(),
            overview,
            health: monitor.clone(),
            sys_root: args.sys_root.clone(),
            readiness: Arc::clone(&self.readiness),
            changed: Arc::clone(&changed),
            interval: args.inventory_interval,
        };
        if !args.farewell {
            tasks.spawn(watcher.run(loops.clone()));
        }
        if let Some(library) = self.library.as_ref().filter(|_| !args.farewell) {
            let pauses = driver_unload::Pauses {
                node: Arc::clone(&self.node),
                wish: self.node.wish.clone(),
                library: Arc::clone(library),
                client: self.client.clone(),
                node_name: args.node_name.clone(),
                events: self.events.clone(),
                overview: overview_rx.clone(),
                changed: Arc::clone(&changed),
            };
            tasks.spawn(pauses.run(loops.clone()));
        }
        tokio::spawn(tell_of_driver(
            args.clone(),
            Arc::clone(&self.node),
            self.events.clone(),
            overview_rx.clone(),
            loops.clone(),
        ));
        let collector = Collector {
            node: Arc::clone(&self.node),
            client: self.client.clone(),
            driver: args.driver_name.clone(),
            pool,
            node_name: args.node_name.clone(),
            metrics: self.metrics.clone(),
            events: self.events.clone(),
            notes: self.readiness.notes.clone(),
            overview: overview_rx.clone(),
            vanished,
            changed: Arc::clone(&changed),
            interval: args.claim_check_interval,
            grace: args.orphan_grace,
        };
        if !args.farewell {
            tasks.spawn(collector.run(loops.clone()));
        }
        let reporter = Reporter {
            node: Arc::clone(&self.node),
            client: self.client.clone(),
            node_name: args.node_name.clone(),
            metrics: self.metrics.clone(),
            overview: overview_rx.clone(),
            interval: args.claim_check_interval,
        };
        if args.report_usage && !args.farewell {
            tasks.spawn(reporter.run(loops.clone()));
        }
        let audit = Audit {
            node: Arc::clone(&self.node),
            client: self.client.clone(),
            node_name: args.node_name.clone(),
            metrics: self.metrics.clone(),
            events: self.events.clone(),
            overview: overview_rx.clone(),
            settings: audit::Settings {
                memory_percent: args.audit_memory_percent,
                memory_per_process: args.audit_memory_per_process,
                time_points: args.audit_time_points,
                time_burst: args.audit_time_burst,
                looks: args.audit_looks,
            },
            interval: args.audit_interval,
            evict: args.audit_evict,
            proc: args.host_proc.clone(),
        };
        if args.audit && !args.farewell {
            tasks.spawn(audit.run(loops.clone()));
        }
        let follower = Follower {
            node: Arc::clone(&self.node),
            client: self.client.clone(),
            node_name: args.node_name.clone(),
            events: self.events.clone(),
            overview: overview_rx.clone(),
            changed: Arc::clone(&changed),
        };
        if args.elastic_shares && !args.farewell {
            tasks.spawn(follower.run(loops.clone()));
        }
        let publisher = Publisher::new(
            self.settings(),
            self.client.clone(),
            self.events.clone(),
            self.metrics.clone(),
            Arc::clone(&self.readiness),
            Arc::clone(&self.node),
            Arc::clone(&changed),
            overview_rx,
            vanished_rx,
            monitor.clone(),
            published,
        );
        if !args.farewell {
            tasks.spawn(publisher.run(loops.clone()));
        }

        tasks.spawn({
            let (data_dir, time_slice) = (args.data_dir(), args.gpu_time_slice);
            let (metrics, loops) = (self.metrics.clone(), loops.clone());
            async move { arbitrate::run(&data_dir, time_slice, &metrics, loops).await }
        });
        let shares = args.data_dir().join("shares");
        tasks.spawn(Trash::new(&shares, self.metrics.clone()).run(loops.clone()));

        // A loop that ends by itself has panicked; the agent then ends, to be started anew, rather than go on
        // without it.
        let failed = tokio::select! {
            biased;
            () = cancel.cancelled() => false,
            Some(_) = tasks.join_next() => !cancel.is_cancelled(),
        };
        cancel.cancel();
        // The registration socket is removed first, by the end of its task.
        let _ = registrar.await;
        dra_socket.remove();
        stop_dra.cancel();
        if tokio::time::timeout(DRAIN, dra_server).await.is_err() {
            tracing::warn!(
                "calls under way did not end in time; their claims are put right at the next start"
            );
        }
        loops.cancel();
        let ended = async { while tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(LOOPS_END, ended).await.is_err() {
            tracing::warn!("a part of the agent waits for the driver and is left behind");
        }
        anyhow::ensure!(!failed, "a part of the agent ended abnormally");
        if over.load(Ordering::Acquire) {
            let has_nothing = || self.node.has_nothing().unwrap_or(false);
            let is_mps_served = self.node.machine.mps.is_served();
            farewell::leave_nothing(args, began, farewell::PATIENCE, has_nothing, is_mps_served).await;
        }
        tracing::info!("stopped");
        Ok(())
    }

    fn settings(&self) -> Settings {
        let args = &self.args;
        Settings {
            driver: args.driver_name.clone(),
            node: args.node_name.clone(),
            mode: args.mode,
            slots: args.slots,
            mig_shares: args.mig_shares,
            waits: Waits {
                scheduler: args.scheduler_timeouts,
                absent_controller: args.absent_controller_grace,
            },
            other_driver_grace: args.other_driver_grace,
            pod_resources_socket: args.pod_resources_socket(),
            own_pod: args.pod_name.clone().map(|name| (args.pod_namespace.clone(), name)),
            lease_namespace: args.pod_namespace.clone(),
            lease_name: args.controller_lease_name.clone(),
            resync: args.resync_interval,
            data_dir: args.data_dir(),
        }
    }
}

/// Once the driver is there, reports the driver's files that SELinux keeps from containers.
async fn tell_of_driver(
    args: Args,
    node: Arc<Node>,
    events: Events,
    mut overview: watch::Receiver<Arc<Overview>>,
    cancel: CancellationToken,
) {
    let is_read = tokio::select! {
        () = cancel.cancelled() => false,
        found = overview.wait_for(|overview| overview.inventory.is_some()) => found.is_ok(),
    };
    if is_read {
        selinux::driver::tell(&args, &node, &events).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn an_agent_whose_hook_is_not_there_does_not_start_and_says_where_it_looked() {
        let dir = tempfile::tempdir().unwrap();
        let limiter = dir.path().to_str().unwrap();
        let own = dir.path().join(env!("CARGO_PKG_VERSION"));
        let hook = |more: &[&str]| {
            let line = ["agent", "--node-name=n1", "--limiter-dir", limiter];
            oci_hook(&Args::parse_from([&line, more].concat()))
        };
        assert_eq!(hook(&[]).unwrap(), None);
        let named = own.join("aliquot-oci-hook");
        let error = hook(&["--oci-hook=aliquot-oci-hook"]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("the OCI hook {}, ", named.display())), "{error}");
        // What it was is not needed to leave.
        assert_eq!(hook(&["--oci-hook=aliquot-oci-hook", "--farewell"]).unwrap(), Some(named.clone()));
        std::fs::create_dir(&own).unwrap();
        std::fs::write(&named, "").unwrap();
        // The version is that of the program, whatever the chart says that it is.
        assert_eq!(hook(&["--oci-hook=aliquot-oci-hook"]).unwrap(), Some(named));
        let other = dir.path().join("hook");
        std::fs::write(&other, "").unwrap();
        assert_eq!(hook(&["--oci-hook", other.to_str().unwrap()]).unwrap(), Some(other));
    }
}
