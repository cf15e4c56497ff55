//! The command line. Every flag has an environment variable where a DaemonSet fills it from the
//! downward API or from chart values.

use crate::allocation_mode::Target;
use crate::edits::ExtraMount;
use crate::health::Verdict;
use crate::health::xid::parse_change;
use crate::partitioning::Unclaimed;
use crate::selinux::{self, Labelling};
use crate::share::RegionStorage;
use aliquot_http::MetricsArgs;
use aliquot_model::DriverCapabilities;
use aliquot_model::duration::{at_least, parse_duration};
use aliquot_model::names::{DEFAULT_DRIVER, parse_driver};
use aliquot_model::quantity::{BytesError, parse_bytes};
use aliquot_selinux::Label;
use clap::{Parser, ValueEnum};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines, one object a line.
    Json,
}

/// Node agent of the Aliquot DRA driver: publishes the node's GPUs, prepares and unprepares claims.
#[derive(Debug, Clone, Parser)]
#[command(name = "aliquot-kubelet-plugin", version)]
pub struct Args {
    /// Name of the node that this agent serves.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,

    /// Name of the DRA driver.
    #[arg(long, env = "DRIVER_NAME", default_value = DEFAULT_DRIVER, value_parser = parse_driver)]
    pub driver_name: String,

    /// UID of our pod. When given, the sockets carry it, so that two instances can run side by side
    /// during an update (kubelet 1.33 and newer).
    #[arg(long, env = "POD_UID", default_value = "")]
    pub pod_uid: String,

    /// Name of our pod. When given, the kubelet's word on what pods have counts only once it knows of that one: one
    /// that starts knows of none.
    #[arg(long, env = "POD_NAME")]
    pub pod_name: Option<String>,

    /// Namespace of our pod; the controller's Lease is looked for here.
    #[arg(long, env = "POD_NAMESPACE", default_value = "aliquot-system")]
    pub pod_namespace: String,

    /// Directory that the kubelet watches for registration sockets.
    #[arg(long, env = "REGISTRAR_DIR", default_value = "/var/lib/kubelet/plugins_registry")]
    pub registrar_dir: PathBuf,

    /// Directory under which our data directory `<plugin-dir>/<driver-name>` lies. The path must be
    /// the same on the host.
    #[arg(long, env = "PLUGIN_DIR", default_value = "/var/lib/kubelet/plugins")]
    pub plugin_dir: PathBuf,

    /// The container runtime's directory of transient CDI specs.
    #[arg(long, env = "CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// Root of the file system that holds the NVIDIA driver, as this process sees it.
    #[arg(long, env = "DRIVER_ROOT", default_value = "/")]
    pub driver_root: PathBuf,

    /// The same root as the host sees it; CDI specs name host paths. Default: `--driver-root`.
    #[arg(long, env = "HOST_DRIVER_ROOT")]
    pub host_driver_root: Option<PathBuf>,

    /// Which of the driver's files every container gets, named as in `NVIDIA_DRIVER_CAPABILITIES`: compute, utility,
    /// video, graphics, display, ngx, compat32, all.
    #[arg(long, env = "DRIVER_CAPABILITIES", default_value = "compute,utility")]
    pub driver_capabilities: DriverCapabilities,

    /// Where `/proc` is. The numbers of the driver's devices are read there.
    #[arg(long, env = "PROC_ROOT", default_value = "/proc")]
    pub proc_root: PathBuf,

    /// Where `/sys` is.
    #[arg(long, env = "SYS_ROOT", default_value = "/sys")]
    pub sys_root: PathBuf,

    /// Path of `libnvidia-ml.so.1`. Default: looked for under the driver root.
    #[arg(long, env = "NVML_LIBRARY")]
    pub nvml_library: Option<PathBuf>,

    /// Host directory that holds `<version>/libaliquot_preload.so` and `libaliquot_core.so`.
    #[arg(long, env = "LIMITER_DIR", default_value = "/opt/aliquot/limiter")]
    pub limiter_dir: PathBuf,

    /// The OCI hook: a path on the host, or its name in this release's folder of the limiter; without it the limiter is only
    /// mounted, not checked.
    #[arg(long, env = "OCI_HOOK")]
    pub oci_hook: Option<PathBuf>,

    /// What the regions of new shares lie in; the one file of ours that their containers write.
    #[arg(long, env = "REGION_STORAGE", value_enum, default_value_t = RegionStorage::Tmpfs)]
    pub region_storage: RegionStorage,

    /// Directory in which a supervisor of MPS daemons (`aliquot-mps`) finds what they are asked for. The path must be the
    /// same on the host. Default: `mps` in the data directory.
    #[arg(long, env = "MPS_DIR")]
    pub mps_dir: Option<PathBuf>,

    /// How long a claim's MPS daemon may take to start, and to end.
    #[arg(long, default_value = "25s", value_parser = at_least(Duration::from_secs(1)))]
    pub mps_patience: Duration,

    /// Shared memory of each claim through MPS, in bytes or as `64Mi`, from 1Mi to 1Ti: the `/dev/shm` of its containers
    /// together. Claims that are prepared already keep what they have.
    #[arg(long, env = "MPS_SHARED_MEMORY", default_value = "64Mi", value_parser = parse_shared_memory)]
    pub mps_shared_memory: u64,

    /// Whether what containers of shares find of ours gets SELinux labels. `auto`: where SELinux is on.
    #[arg(long, env = "SELINUX_LABELS", value_enum, default_value_t = Labelling::Auto)]
    pub selinux_labels: Labelling,

    /// SELinux label of what containers of shares read of ours: the limiter, its list, quotas.
    #[arg(long, env = "SELINUX_READ_ONLY_LABEL", value_name = "LABEL", default_value = selinux::READ_ONLY)]
    pub selinux_read_only_label: Label,

    /// SELinux label of what containers of shares write: their account.
    #[arg(long, env = "SELINUX_WRITABLE_LABEL", value_name = "LABEL", default_value = selinux::WRITABLE)]
    pub selinux_writable_label: Label,

    /// SELinux label of processes in confined containers, for which it is looked whether they may use the driver's
    /// files.
    #[arg(long, env = "SELINUX_CONTAINER_LABEL", value_name = "LABEL", default_value = selinux::CONTAINER)]
    pub selinux_container_label: Label,

    /// An extra mount for every container with a device of ours, `host:container[:ro|rw]`.
    #[arg(long = "container-mount", value_name = "HOST:CONTAINER[:ro|rw]")]
    pub container_mounts: Vec<ExtraMount>,

    /// Who allocates this node's devices, unless the Node says otherwise by label or annotation
    /// `aliquot.dev/allocator-mode`.
    #[arg(long, env = "MODE", default_value = "controller")]
    pub mode: Target,

    /// Most tenants of a shared GPU, and of a shared partition.
    #[arg(long, env = "SLOTS", default_value_t = aliquot_model::layout::DEFAULT_SLOTS,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub slots: u32,

    /// Offer shares of MIG partitions, too, which nearly doubles the devices of a GPU. Claims that have such shares keep
    /// them when it is switched off.
    #[arg(long, env = "MIG_SHARES", default_value_t = false, action = clap::ArgAction::Set)]
    pub mig_shares: bool,

    /// Most managed memory (bytes, or `8Gi`) that a share may have on top of its memory where its ShareConfig
    /// says `oversubscribe`. A claim that asks for more is not prepared. 0: none.
    #[arg(long, env = "OVERSUBSCRIBE_AT_MOST", default_value = "0", value_parser = parse_bytes)]
    pub oversubscribe_at_most: u64,

    /// Whether whole GPUs are also offered to virtual machines (devices `gpu-<minor>-vfio`): such a GPU leaves NVIDIA's
    /// driver for vfio-pci while a claim has it. Needs an IOMMU and the kernel module vfio-pci.
    #[arg(long, env = "VFIO", default_value_t = false, action = clap::ArgAction::Set)]
    pub vfio: bool,

    /// Whether GPUs that are connected to NVSwitches are offered to virtual machines as well. Somebody else has to see to
    /// it that Fabric Manager activates partitions for them.
    #[arg(long, env = "VFIO_ON_NVSWITCH", default_value_t = false, action = clap::ArgAction::Set)]
    pub vfio_on_nvswitch: bool,

    /// Address of `/healthz`, `/readyz`, and of `/metrics` if there is no --metrics-addr.
    #[arg(long, env = "HTTP_ADDR", default_value = "127.0.0.1:0")]
    pub http_addr: SocketAddr,

    /// Where metrics are served to those who may read them.
    #[command(flatten)]
    pub scraping: MetricsArgs,

    /// Kubeconfig file. Default: `KUBECONFIG`, else the pod's service account.
    #[arg(long)]
    pub kubeconfig: Option<PathBuf>,

    /// Log format.
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// Only say farewell: publish and prepare nothing new, answer the kubelet for what is prepared
    /// already, from the node's own ledger and without the API, and end when the ledger is empty. The data directory
    /// and what is in --limiter-dir are removed then, unless another agent is here by now. `aliquot uninstall` leaves
    /// such an agent on nodes.
    #[arg(long)]
    pub farewell: bool,

    /// How often claims that hold hardware here are looked up in the API.
    #[arg(long, default_value = "10s", value_parser = at_least(Duration::from_millis(50)))]
    pub claim_check_interval: Duration,

    /// How long hardware of a vanished claim that no pod uses is kept before this agent unprepares it
    /// itself. The kubelet does it first unless it lost its state.
    #[arg(long, default_value = "5m", value_parser = parse_duration)]
    pub orphan_grace: Duration,

    /// Say which claims hold GPUs and when they were released, in the node's NodeUsage, for budgets.
    #[arg(long, env = "REPORT_USAGE", default_value_t = false, action = clap::ArgAction::Set)]
    pub report_usage: bool,

    /// Give containers a file with what is published of their devices, for each request (KEP-5304), as readers of other
    /// drivers' files know them. Claims that are prepared already keep what they have.
    #[arg(long, env = "DEVICE_METADATA", default_value_t = false, action = clap::ArgAction::Set)]
    pub device_metadata: bool,

    /// How long GPU instances of a claim that is kept without a pod stay at most after its last pod,
    /// whatever the API says of it; as the controller's own option of that name. `0s`: not at all.
    #[arg(long, env = "HOLD_AT_MOST", default_value = "24h", value_parser = parse_duration)]
    pub hold_at_most: Duration,

    /// Compare what NVML counts for the processes of each share with its quota. Needs the host's pids.
    #[arg(long, env = "AUDIT", default_value_t = true, action = clap::ArgAction::Set)]
    pub audit: bool,

    /// How often; NVML tells the GPU time of about the last second.
    #[arg(long, default_value = "2s", value_parser = at_least(Duration::from_millis(50)))]
    pub audit_interval: Duration,

    /// Looks in a row after which a share that exceeds its quota is reported.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub audit_looks: u32,

    /// Percent of a share's memory that is forgiven, and memory for each of its processes besides: code
    /// that is loaded late and local memory are asked for by no call that the limiter sees.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub audit_memory_percent: u8,

    /// See `--audit-memory-percent`.
    #[arg(long, default_value = "256Mi", value_parser = parse_bytes)]
    pub audit_memory_per_process: u64,

    /// Percent of the GPU's time that is forgiven.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub audit_time_points: u8,

    /// GPU time beyond that which may come at once: a long kernel cannot be split.
    #[arg(long, default_value = "10s", value_parser = parse_duration)]
    pub audit_time_burst: Duration,

    /// Evict pods that go on using more memory or time than their share.
    #[arg(long, env = "AUDIT_EVICT", default_value_t = false, action = clap::ArgAction::Set)]
    pub audit_evict: bool,

    /// `/proc` with the host's processes, for the audit.
    #[arg(long, env = "HOST_PROC", default_value = "/proc")]
    pub host_proc: PathBuf,

    /// How long a process has a GPU while others wait for it, as `e2e/gpu` measures it. Shares that fill a GPU
    /// together are told by it whether their kernels' events show waits for each other.
    #[arg(long, default_value = "2ms", value_parser = parse_duration)]
    pub gpu_time_slice: Duration,

    /// Follow the node's NodeLimits: limits of shares that the controller raised or lowered while they run.
    #[arg(long, env = "ELASTIC_SHARES", default_value_t = false, action = clap::ArgAction::Set)]
    pub elastic_shares: bool,

    /// What becomes of GPU instances that no claim has, such as an administrator's.
    #[arg(long, env = "UNCLAIMED_MIG", value_enum, default_value_t = Unclaimed::Adopt)]
    pub unclaimed_mig: Unclaimed,

    /// How long kube-scheduler may still act on devices that it saw untainted: its filter time-out
    /// and its bind time-out together. Waited out before the controller gets the pool, unless the controller
    /// finds out before that kube-scheduler has nothing under way.
    #[arg(long, default_value = "610s", value_parser = parse_duration)]
    pub scheduler_timeouts: Duration,

    /// How long the controller's Lease must be expired or absent before a hand-over to kube-scheduler
    /// goes on without its acknowledgement.
    #[arg(long, default_value = "60s", value_parser = parse_duration)]
    pub absent_controller_grace: Duration,

    /// How long a device plugin or DRA driver that gave out GPUs of the node, too, must be away before
    /// claims get them again. A kubelet that starts forgets both until they come back.
    #[arg(long, default_value = "6m", value_parser = parse_duration)]
    pub other_driver_grace: Duration,

    /// The kubelet's socket that tells what pods have of other drivers and device plugins, which they keep when
    /// these have ended. Default: `pod-resources/kubelet.sock` beside `--plugin-dir`.
    #[arg(long, env = "POD_RESOURCES_SOCKET")]
    pub pod_resources_socket: Option<PathBuf>,

    /// Name of the controller's Lease.
    #[arg(long, env = "CONTROLLER_LEASE_NAME", default_value = "aliquot-controller")]
    pub controller_lease_name: String,

    /// How often everything published is compared with what should be, beside watching it.
    #[arg(long, default_value = "5m", value_parser = at_least(Duration::from_secs(1)))]
    pub resync_interval: Duration,

    /// How long a prepare or unprepare waits for the other instance's lock.
    #[arg(long, default_value = "20s", value_parser = at_least(Duration::from_secs(1)))]
    pub lock_timeout: Duration,

    /// How long the driver may take to read one GPU. A GPU that takes longer is marked as stuck and left out
    /// until the driver has answered.
    #[arg(long, default_value = "10s", value_parser = at_least(Duration::from_secs(1)))]
    pub gpu_read_timeout: Duration,

    /// How long the driver may take to change one GPU: MIG mode, instances, time slice.
    #[arg(long, default_value = "30s", value_parser = at_least(Duration::from_secs(1)))]
    pub gpu_change_timeout: Duration,

    /// What is made of an error that the driver reports by number, otherwise than the table in `docs/health.md` has
    /// it: `NUMBER=None|NoSchedule|NoExecute|Ignore`, such as `94=NoSchedule`. May be given several times.
    #[arg(long = "health-xid", value_name = "NUMBER=EFFECT", value_parser = parse_change)]
    pub health_xids: Vec<(u64, Verdict)>,

    /// How often the inventory is read again, beside NVML's events.
    #[arg(long, default_value = "60s", value_parser = at_least(Duration::from_millis(50)))]
    pub inventory_interval: Duration,
}

impl Args {
    /// `<plugin-dir>/<driver-name>`.
    pub fn data_dir(&self) -> PathBuf {
        self.plugin_dir.join(&self.driver_name)
    }

    /// The kubelet's pod-resources socket.
    pub fn pod_resources_socket(&self) -> PathBuf {
        let beside = || self.plugin_dir.with_file_name("pod-resources").join("kubelet.sock");
        self.pod_resources_socket.clone().unwrap_or_else(beside)
    }

    /// The driver root as the host sees it.
    pub fn host_driver_root(&self) -> &Path {
        self.host_driver_root.as_deref().unwrap_or(&self.driver_root)
    }
}

/// The fault in the size of a daemon's shared memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum SharedMemoryError {
    #[error(transparent)]
    Bytes(#[from] BytesError),
    #[error("{0:?} is out of range: use 1Mi to 1Ti")]
    Bounds(String),
}

fn parse_shared_memory(text: &str) -> Result<u64, SharedMemoryError> {
    let bytes = parse_bytes(text)?;
    if !(1 << 20..=1 << 40).contains(&bytes) {
        return Err(SharedMemoryError::Bounds(text.to_owned()));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[test]
    fn a_daemon_is_waited_for_until_its_supervisor_has_given_it_up_and_has_what_a_container_has() {
        let args = Args::try_parse_from(["agent", "--node-name=n1"]).unwrap();
        assert!(args.mps_patience > aliquot_mps::contract::ANSWER);
        assert_eq!(args.mps_shared_memory, crate::mps::Mps::SHARED_MEMORY);
    }

    #[rstest]
    #[case::usual("", None)]
    #[case::looks_all_the_time("--audit-interval 0s", Some("at least 50ms"))]
    #[case::reads_all_the_time("--inventory-interval 0s", Some("at least 50ms"))]
    #[case::asks_all_the_time("--claim-check-interval 1ms", Some("at least 50ms"))]
    #[case::compares_all_the_time("--resync-interval 0s", Some("at least 1s"))]
    #[case::every_gpu_hangs("--gpu-read-timeout 0s", Some("at least 1s"))]
    #[case::no_gpu_changes("--gpu-change-timeout 10ms", Some("at least 1s"))]
    #[case::nobody_waits("--lock-timeout 0s", Some("at least 1s"))]
    #[case::no_effect("--health-xid 79=Never", Some("no effect"))]
    #[case::no_tenants("--slots 0", Some("1..=1000"))]
    #[case::more_than_all("--audit-memory-percent 101", Some("0..=100"))]
    #[case::no_shared_memory("--mps-shared-memory 0", Some("use 1Mi to 1Ti"))]
    #[case::no_label("--selinux-writable-label container_file_t", Some("no SELinux label"))]
    #[case::no_name("--driver-name Bad_Name", Some("DNS"))]
    fn values_that_cannot_work_are_refused_with_the_reason(
        #[case] words: &str,
        #[case] reason: Option<&str>,
    ) {
        let line = format!("agent --node-name n {words}");
        let said = Args::try_parse_from(line.split_whitespace()).err().map(|error| error.to_string());
        match (&said, reason) {
            (None, None) => {}
            (Some(said), Some(reason)) if said.contains(reason) => {}
            _ => panic!("{words}: {said:?}, not {reason:?}"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
