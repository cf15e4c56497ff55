//! The command line.

mod target;

use aliquot_controller::args::StrategyArg;
use aliquot_model::duration::parse_duration;
use clap::{CommandFactory, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;
pub(crate) use target::{Kind, Target};

/// Exit codes that all commands have.
const CODES: &str =
    "Exit codes: 0 done, 1 error, 2 wrong usage; `explain` has more, see `aliquot explain --help`.";
/// Exit codes of `explain`.
const EXPLAIN_CODES: &str = "\
Examples:
  aliquot explain pod/web -n team
  aliquot explain resourceclaim web-gpu -n team -o json

Exit codes:
  0  it has its devices, fits, or asks for none of this driver
  1  error
  2  wrong usage
  3  it cannot be placed now, or a quota, a budget or another scheduling gate holds it back
  4  it has no devices, and your rights do not let this be judged";
/// How completion is switched on.
const COMPLETION_HELP: &str = "\
Switch it on:
  bash: aliquot completion bash > ~/.local/share/bash-completion/completions/aliquot
  zsh:  aliquot completion zsh > \"${fpath[1]}/_aliquot\"
  fish: aliquot completion fish > ~/.config/fish/completions/aliquot.fish

The same scripts complete `kubectl-aliquot`. For `kubectl aliquot` put a link to this program, called
kubectl_complete-aliquot, where kubectl-aliquot is: kubectl asks it.";

/// GPUs for Kubernetes, by the part.
#[derive(Debug, Parser)]
#[command(name = "aliquot", version, about, after_help = CODES)]
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
    #[command(after_help = EXPLAIN_CODES)]
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
    /// Print a script that completes this command in a shell.
    #[command(after_help = COMPLETION_HELP)]
    Completion(CompletionArgs),
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
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "the demo runs on Linux alone"))]
pub(crate) struct DemoArgs {
    /// Manifests to apply in place of the built-in examples. May be given several times: the pods of one file have their
    /// devices, or wait, before the next is applied.
    #[arg(short = 'f', long = "filename", value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// A fleet in place of the built-in one: `nodes: [{name: a, gpus: [{board: H100-80, count: 8, mig: false}]}]`.
    #[arg(long, value_name = "FILE")]
    pub(crate) fleet: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
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

/// The cluster that a command talks to.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ClusterArgs {
    /// Kubeconfig. Default: `KUBECONFIG`, `~/.kube/config`, else the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig. Default: its current one.
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// User to act as, who has other rights.
    #[arg(long = "as", value_name = "USER")]
    pub(crate) as_user: Option<String>,
}

/// A form for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// The form of what is printed, where programs read it.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub(crate) struct OutputArgs {
    /// Print it for programs.
    #[arg(short = 'o', long = "output", value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
    /// The same as `-o json`.
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

impl OutputArgs {
    /// The form that was asked for; `None` is text for people.
    pub(crate) fn format(self) -> Option<Format> {
        self.output.or_else(|| self.json.then_some(Format::Json))
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// A pod, with all its claims, or a ResourceClaim: `pod/NAME`, `claim/NAME`, or kind and name apart.
    #[arg(required = true, num_args = 1..=2, value_name = "KIND/NAME")]
    what: Vec<String>,
    /// Its namespace. Default: the kubeconfig's.
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Driver name that Aliquot was installed with.
    #[arg(long, default_value = aliquot_model::names::DEFAULT_DRIVER)]
    pub(crate) driver_name: String,
    /// A strategy to judge by. Default: the controller's own.
    #[arg(long, value_enum)]
    pub(crate) strategy: Option<StrategyArg>,
    /// The cluster.
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
}

impl ExplainArgs {
    /// The object that is named.
    ///
    /// # Errors
    /// How it is to be named, if it is not.
    pub(crate) fn target(&self) -> Result<Target, String> {
        Target::parse(&self.what)
    }
}

/// A shell that commands can be completed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    /// GNU bash.
    Bash,
    /// Z shell.
    Zsh,
    /// Fish.
    Fish,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    /// The shell.
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

impl Args {
    /// Reads the command line; wrong usage ends the program with exit code 2.
    pub(crate) fn read() -> Self {
        let args = Self::parse();
        if let Command::Explain(explain) = &args.command
            && let Err(why) = explain.target()
        {
            let mut command = Self::command();
            command.build();
            let explain = command.find_subcommand_mut("explain").map(std::mem::take).unwrap_or_default();
            explain.clone().error(clap::error::ErrorKind::ValueValidation, why).exit();
        }
        args
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct UninstallArgs {
    /// Namespace that Aliquot is installed in.
    #[arg(short, long, default_value = "aliquot-system")]
    pub(crate) namespace: String,
    /// Driver name that it was installed with.
    #[arg(long, default_value = aliquot_model::names::DEFAULT_DRIVER)]
    pub(crate) driver_name: String,
    /// The cluster.
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
    /// How long controller, node agents and farewell pods may each take, as in 90s or 10m.
    #[arg(long, default_value = "2m", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
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
    #[arg(short, long, default_value = "aliquot-system")]
    pub(crate) namespace: String,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Driver name that Aliquot was installed with.
    #[arg(long, default_value = aliquot_model::names::DEFAULT_DRIVER)]
    pub(crate) driver_name: String,
    /// The cluster.
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
}

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "aliquot release <NAME> [--namespace <NAMESPACE>]\n       aliquot release --all [--namespace <NAMESPACE>]\n       aliquot release --all-namespaces"
)]
pub(crate) struct ReleaseArgs {
    /// The claim.
    #[arg(required_unless_present_any = ["all", "all_namespaces"], conflicts_with = "all")]
    pub(crate) name: Option<String>,
    /// Every claim, of all namespaces unless one is named.
    #[arg(long)]
    pub(crate) all: bool,
    /// Every claim of all namespaces.
    #[arg(short = 'A', long, conflicts_with_all = ["all", "name", "namespace"])]
    pub(crate) all_namespaces: bool,
    /// Namespace. Default for one claim: that of the kubeconfig's context.
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// The cluster.
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
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
    /// The cluster.
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
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
    /// The cluster.
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
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
    /// The cluster.
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
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
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "the demo runs on Linux alone"))]
pub(crate) struct ContainerArgs {
    /// What to become, as JSON.
    pub(crate) spec: PathBuf,
    /// Process id of the demo, to end with it.
    pub(crate) parent: u32,
}

#[derive(Debug, clap::Args)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "the demo runs on Linux alone"))]
pub(crate) struct TetherArgs {
    /// Process id of the demo.
    pub(crate) parent: u32,
    /// What to run.
    pub(crate) program: PathBuf,
    /// Its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) args: Vec<OsString>,
}
