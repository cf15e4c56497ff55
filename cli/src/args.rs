//! The command line.

use aliquot_controller::args::StrategyArg;
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// GPUs for Kubernetes, by the part.
#[derive(Debug, Parser)]
#[command(name = "aliquot", version, about)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the whole product on this machine: simulated GPUs, an embedded control plane, the real
    /// controller and node agents, and real processes that meet their limits.
    Demo(DemoArgs),
    /// Say why a claim, or a pod's claims, got these devices on this node, or none.
    Explain(ExplainArgs),
    /// Take Aliquot out of a cluster while workloads run: afterwards nothing of ours blocks a pod or a claim.
    Uninstall(UninstallArgs),
    /// Say what the controller would do on a larger scale.
    Plan(PlanArgs),
    /// Free devices that claims keep without a pod (bound before their first, or retained after their last).
    Release(ReleaseArgs),
    /// Take one GPU of a node out of service: no claim gets it any more; pods that use it go on, or are evicted.
    Cordon(CordonArgs),
    /// Put a GPU that was cordoned into service again.
    Uncordon(UncordonArgs),
    /// Say that the errors of a GPU were looked at: their taints go, and errors from now on count again.
    Acknowledge(AcknowledgeArgs),
    /// Put the limiter's files and the OCI hook on a node (the node agent's init container runs this).
    InstallNodeFiles(InstallArgs),
    /// Become a container of the demo.
    #[command(name = "__container", hide = true)]
    Container(ContainerArgs),
    /// Become a program that ends with the demo.
    #[command(name = "__tether", hide = true)]
    Tether(TetherArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Manifests to apply in place of the built-in examples; repeatable.
    #[arg(short = 'f', long = "filename", value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// A fleet in place of the built-in one: `nodes: [{name: a, gpus: [{board: H100-80, count: 8, mig: false}]}]`.
    #[arg(long, value_name = "FILE")]
    pub(crate) fleet: Option<PathBuf>,
    /// Print the result as JSON; progress goes to stderr.
    #[arg(long)]
    pub(crate) json: bool,
    /// Directory for sockets, logs and simulated nodes, kept afterwards. Default: a temporary one.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Do without user namespaces: mounts become links in a scratch root, the limiter comes by LD_PRELOAD.
    #[arg(long)]
    pub(crate) no_namespaces: bool,
    /// Where the built programs and libraries lie. Default: beside this program.
    #[arg(long, value_name = "DIR")]
    pub(crate) build_dir: Option<PathBuf>,
    /// Where the limiter's two files and the OCI hook lie. Default: `../hook` beside this program.
    #[arg(long, value_name = "DIR")]
    pub(crate) limiter_build_dir: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// What to explain.
    #[arg(value_enum)]
    pub(crate) kind: ExplainKind,
    /// Its name.
    pub(crate) name: String,
    /// Its namespace. Default: the kubeconfig's.
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// Driver name that Aliquot was installed with.
    #[arg(long, default_value = aliquot_model::names::DEFAULT_DRIVER)]
    pub(crate) driver_name: String,
    /// The controller's strategy.
    #[arg(long, value_enum, default_value_t = StrategyArg::BinPack)]
    pub(crate) strategy: StrategyArg,
    /// Kubeconfig. Default: `KUBECONFIG`, `~/.kube/config`, else the pod's service account.
    #[arg(long)]
    pub(crate) kubeconfig: Option<PathBuf>,
}

/// What can be explained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ExplainKind {
    /// A ResourceClaim.
    #[value(alias = "resourceclaim")]
    Claim,
    /// A pod, with all its claims.
    Pod,
}

#[derive(Debug, clap::Args)]
pub(crate) struct UninstallArgs {
    /// Namespace that Aliquot is installed in.
    #[arg(long, default_value = "aliquot-system")]
    pub(crate) namespace: String,
    /// Driver name that it was installed with.
    #[arg(long, default_value = aliquot_model::names::DEFAULT_DRIVER)]
    pub(crate) driver_name: String,
    /// Kubeconfig. Default: `KUBECONFIG`, `~/.kube/config`, else the pod's service account.
    #[arg(long)]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Do it; without this flag the command only says what it would do.
    #[arg(long)]
    pub(crate) yes: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// Which pods to move so that GPUs that are partly held become free.
    #[arg(long, required = true)]
    pub(crate) compact: bool,
    /// Most pods that are moved to empty one GPU.
    #[arg(long, default_value = "4")]
    pub(crate) moves_per_gpu: NonZeroUsize,
    /// Most pods that are moved within any hour. Default: what the controller wrote down, else 20.
    #[arg(long)]
    pub(crate) moves_per_hour: Option<usize>,
    /// Namespace that Aliquot is installed in.
    #[arg(long, default_value = "aliquot-system")]
    pub(crate) namespace: String,
    /// Print the plan as JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Driver name that Aliquot was installed with.
    #[arg(long, default_value = aliquot_model::names::DEFAULT_DRIVER)]
    pub(crate) driver_name: String,
    /// Kubeconfig. Default: `KUBECONFIG`, `~/.kube/config`, else the pod's service account.
    #[arg(long)]
    pub(crate) kubeconfig: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "aliquot release <NAME> [--namespace <NAMESPACE>]\n       aliquot release --all [--namespace <NAMESPACE>]"
)]
pub(crate) struct ReleaseArgs {
    /// The claim.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub(crate) name: Option<String>,
    /// Every claim, of all namespaces unless one is named.
    #[arg(long)]
    pub(crate) all: bool,
    /// Namespace. Default for one claim: that of the kubeconfig's context.
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// Kubeconfig. Default: `KUBECONFIG`, `~/.kube/config`, else the pod's service account.
    #[arg(long)]
    pub(crate) kubeconfig: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CordonArgs {
    /// The GPU: its UUID (`GPU-…`), or `gpu-0` with `--node`.
    pub(crate) gpu: String,
    /// The GPU's node.
    #[arg(long)]
    pub(crate) node: Option<String>,
    /// Why, for whoever finds it so.
    #[arg(long)]
    pub(crate) reason: Option<String>,
    /// Evict the pods that use it, too.
    #[arg(long)]
    pub(crate) evict: bool,
    /// Driver name that Aliquot was installed with.
    #[arg(long, default_value = aliquot_model::names::DEFAULT_DRIVER)]
    pub(crate) driver_name: String,
    /// Kubeconfig. Default: `KUBECONFIG`, `~/.kube/config`, else the pod's service account.
    #[arg(long)]
    pub(crate) kubeconfig: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct UncordonArgs {
    /// The GPU: its UUID (`GPU-…`), or `gpu-0` with `--node`.
    pub(crate) gpu: String,
    /// The GPU's node.
    #[arg(long)]
    pub(crate) node: Option<String>,
    /// Driver name that Aliquot was installed with.
    #[arg(long, default_value = aliquot_model::names::DEFAULT_DRIVER)]
    pub(crate) driver_name: String,
    /// Kubeconfig. Default: `KUBECONFIG`, `~/.kube/config`, else the pod's service account.
    #[arg(long)]
    pub(crate) kubeconfig: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct AcknowledgeArgs {
    /// The GPU: its UUID (`GPU-…`), or `gpu-0` with `--node`.
    pub(crate) gpu: String,
    /// The GPU's node.
    #[arg(long)]
    pub(crate) node: Option<String>,
    /// Why, for whoever looks into it later.
    #[arg(long)]
    pub(crate) reason: Option<String>,
    /// Driver name that Aliquot was installed with.
    #[arg(long, default_value = aliquot_model::names::DEFAULT_DRIVER)]
    pub(crate) driver_name: String,
    /// Kubeconfig. Default: `KUBECONFIG`, `~/.kube/config`, else the pod's service account.
    #[arg(long)]
    pub(crate) kubeconfig: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct InstallArgs {
    /// Directory of the files in the image.
    #[arg(long)]
    pub(crate) from: PathBuf,
    /// Host directory; files go to `<to>/<version>/`.
    #[arg(long)]
    pub(crate) to: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ContainerArgs {
    /// What to become, as JSON.
    pub(crate) spec: PathBuf,
    /// Process id of the demo, to end with it.
    pub(crate) parent: u32,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TetherArgs {
    /// Process id of the demo.
    pub(crate) parent: u32,
    /// What to run.
    pub(crate) program: PathBuf,
    /// Its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) args: Vec<OsString>,
}
