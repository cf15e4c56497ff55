//! The shipped programs on simulated GPUs and the embedded control plane: `aliquot demo`, as a user
//! runs it. Works without root, GPU, cluster and network.
//!
//! Programs are found beside this test; the limiter's two files in `ALIQUOT_HOOK_DIR`, else in `hook`
//! beside the build directory. `tools/test` builds both first.

#[path = "sim/ending.rs"]
mod ending;
#[path = "sim/programs.rs"]
mod programs;

use anyhow::{Context, Result, ensure};
use rstest::rstest;
use serde_json::Value;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const GIB: u64 = 1 << 30;

/// Where the programs lie.
struct Build {
    programs: PathBuf,
    limiter: PathBuf,
}

impl Build {
    fn find() -> Result<Self> {
        let own = std::env::current_exe()?;
        let programs = own.parent().and_then(Path::parent).context("no build directory")?.to_owned();
        let limiter = match std::env::var_os("ALIQUOT_HOOK_DIR") {
            Some(dir) => PathBuf::from(dir),
            None => programs.parent().context("no target directory")?.join("hook"),
        };
        for (file, how) in [
            (programs.join("aliquot"), "make build"),
            (programs.join("aliquot-controller"), "make build"),
            (programs.join("aliquot-kubelet-plugin"), "make build"),
            (programs.join("libcuda.so"), "make build"),
            (limiter.join("libaliquot_core.so"), "make build-hook"),
            (limiter.join("aliquot-oci-hook"), "make build-hook"),
        ] {
            ensure!(file.is_file(), "{} is not there: run `{how}`", file.display());
        }
        Ok(Self { programs, limiter })
    }

    /// `aliquot demo` with these arguments.
    fn demo(&self, dir: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("aliquot"));
        command.arg("demo").arg("--limiter-build-dir").arg(&self.limiter).args(arguments);
        // What it leaves behind in the usual place for temporary files can be seen here.
        command.env("TMPDIR", dir).current_dir(dir).stdin(Stdio::null());
        command
    }

    /// The same as somebody without any rights. Programs are copied, since that user may not be able to
    /// reach them.
    fn demo_as_nobody(&self, dir: &Path, arguments: &[&str]) -> Result<Command> {
        let copies = dir.join("build");
        std::fs::create_dir(&copies)?;
        for entry in std::fs::read_dir(&self.programs)? {
            let path = entry?.path();
            // The OCI hook that is shipped lies beside the limiter.
            let program = path.is_file()
                && path.extension().is_none_or(|e| e == "so")
                && !path.ends_with("aliquot-oci-hook");
            if program && path.file_name().is_some_and(|n| !n.to_string_lossy().starts_with('.')) {
                copy(&path, &copies)?;
            }
        }
        for file in ["libaliquot_core.so", "libaliquot_preload.so", "aliquot-oci-hook"] {
            copy(&self.limiter.join(file), &copies)?;
        }
        let home = dir.join("home");
        std::fs::create_dir(&home)?;
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755))?;
        std::fs::set_permissions(&home, std::fs::Permissions::from_mode(0o777))?;
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]);
        command.arg(copies.join("aliquot")).arg("demo").arg("--limiter-build-dir").arg(&copies);
        command
            .args(arguments)
            .env("TMPDIR", &home)
            .env("HOME", &home)
            .current_dir(&home)
            .stdin(Stdio::null());
        Ok(command)
    }
}

fn copy(file: &Path, to: &Path) -> Result<()> {
    let name = file.file_name().context("no file name")?;
    // A link costs no space; another file system needs a copy.
    if std::fs::hard_link(file, to.join(name)).is_err() {
        std::fs::copy(file, to.join(name)).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// A directory with a short name: unix sockets allow 107 bytes.
fn directory() -> Result<tempfile::TempDir> {
    Ok(tempfile::Builder::new().prefix("aq").tempdir_in("/tmp")?)
}

fn output(mut command: Command) -> Result<Output> {
    command.output().with_context(|| format!("{command:?}"))
}

/// A file of the examples.
fn example(file: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(file).display().to_string()
}

/// The JSON of a run that succeeded.
fn report(output: &Output) -> Result<Value> {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "the demo ended with {}:\n{out}\n{err}", output.status);
    serde_json::from_str(&out).with_context(|| format!("not JSON: {out}"))
}

/// What the JSON says of a container.
fn row<'a>(report: &'a Value, pod: &str, container: &str) -> Result<&'a Value> {
    let rows = report.pointer("/containers").and_then(Value::as_array).context("no containers")?;
    let is = |row: &&Value| {
        row.get("pod").and_then(Value::as_str) == Some(pod)
            && row.get("container").and_then(Value::as_str) == Some(container)
    };
    rows.iter().find(is).with_context(|| format!("no container {pod}/{container} in {report}"))
}

fn number(row: &Value, field: &str) -> Result<u64> {
    row.get(field).and_then(Value::as_u64).with_context(|| format!("no {field} in {row}"))
}

/// Every container met its limit, and nothing is left.
fn check(report: &Value) -> Result<()> {
    ensure!(report.get("clean") == Some(&Value::Bool(true)), "not clean: {report}");
    for row in report.pointer("/containers").and_then(Value::as_array).into_iter().flatten() {
        let (limit, got) = (number(row, "limitBytes")?, number(row, "gotBytes")?);
        ensure!(got <= limit, "more than promised: {row}");
        // The CUDA context is part of what is used; on small shares that is a large part.
        ensure!(got > limit / 2, "far less than promised: {row}");
        let refusals = row.get("refusedWith").and_then(Value::as_array).context("no refusals")?;
        ensure!(!refusals.is_empty() && refusals.iter().all(|code| code.as_i64() == Some(2)), "{row}");
    }
    Ok(())
}

/// The built-in examples on the built-in fleet.
fn check_examples(report: &Value) -> Result<()> {
    check(report)?;
    let rows = report.pointer("/containers").and_then(Value::as_array).context("no containers")?;
    ensure!(rows.len() == 8, "six examples have eight containers: {report}");
    ensure!(number(row(report, "chatbot", "main")?, "limitBytes")? == 10 * GIB);
    ensure!(number(row(report, "pair", "model")?, "limitBytes")? == 12 * GIB);
    ensure!(number(row(report, "pair", "embedder")?, "limitBytes")? == 3 * GIB);
    for pod in ["first", "second"] {
        ensure!(number(row(report, pod, "main")?, "limitBytes")? == 8 * GIB);
    }
    let devices = |pod: &str| -> Result<String> {
        Ok(row(report, pod, "main")?.get("devices").context("no devices")?.to_string())
    };
    ensure!(devices("notebook")?.contains("-mig-2g20gb-"), "{}", devices("notebook")?);
    ensure!(devices("inference")?.contains("-mig-"), "{}", devices("inference")?);
    ensure!(devices("first")? == devices("second")?, "one claim, one device");
    check_programs(report)
}

/// What the containers of the examples say of their own, where they can run.
fn check_programs(report: &Value) -> Result<()> {
    let can_run = report.get("isolation").and_then(Value::as_str) == Some("user namespaces");
    for (pod, container, line) in [
        ("trainer", "main", "GPU 0: "),
        ("notebook", "main", "  MIG 2g.20gb"),
        ("inference", "main", "  MIG 1g.20gb"),
        ("chatbot", "main", " MiB, CUDA error 2"),
        ("pair", "model", ", 12288 MiB"),
        ("pair", "embedder", ", 3072 MiB"),
        ("first", "main", "2048 MiB, CUDA error 0"),
        ("second", "main", "2048 MiB, CUDA error 0"),
    ] {
        let program = &row(report, pod, container)?["program"];
        // It is what this machine has of the programs that images have.
        if program["code"] == 127 && program["said"].to_string().contains("python3") {
            eprintln!("SKIPPED: no python3 here");
            continue;
        }
        let state = if can_run { "running" } else { "notRun" };
        ensure!(program["state"] == state, "{pod} {container}: {program}");
        let said = program["said"].as_array().map(Vec::as_slice).unwrap_or_default();
        let has_said = said.iter().filter_map(Value::as_str).any(|one| one.contains(line));
        ensure!(has_said == can_run, "{pod} {container} says {line:?}: {program}");
    }
    Ok(())
}

#[test]
fn sim_the_demo_runs_the_examples_and_every_limit_holds() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let report = report(&output(build.demo(dir.path(), &["--json"]))?)?;
    check_examples(&report)?;
    let nodes = report.pointer("/nodes").and_then(Value::as_array).context("no nodes")?;
    ensure!(nodes.len() == 3, "{nodes:?}");
    let left: Vec<OsString> =
        std::fs::read_dir(dir.path())?.map(|e| Ok(e?.file_name())).collect::<Result<_>>()?;
    ensure!(left.is_empty(), "left in the directory for temporary files: {left:?}");
    Ok(())
}

#[test]
fn sim_the_demo_does_without_namespaces_and_says_so() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let report = report(&output(build.demo(dir.path(), &["--json", "--no-namespaces"]))?)?;
    ensure!(report.get("isolation").and_then(Value::as_str) == Some("scratch roots"), "{report}");
    check_examples(&report)
}

#[test]
fn sim_the_demo_needs_no_rights() -> Result<()> {
    if !is_root() {
        eprintln!("SKIPPED: this user has no rights to drop; the other tests show it");
        return Ok(());
    }
    let (build, dir) = (Build::find()?, directory()?);
    let report = report(&output(build.demo_as_nobody(dir.path(), &["--json"])?)?)?;
    check_examples(&report)
}

#[test]
fn sim_people_get_a_picture_and_a_table() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let file = dir.path().join("one.yaml");
    std::fs::write(&file, ONE_SHARE)?;
    let fleet = dir.path().join("fleet.yaml");
    std::fs::write(&fleet, "nodes:\n- name: small\n  gpus: [{board: T4}]\n")?;
    let arguments = ["-f", "one.yaml", "--fleet", "fleet.yaml"];
    let output = output(build.demo(dir.path(), &arguments))?;
    let out = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{out}\n{}", String::from_utf8_lossy(&output.stderr));
    for wanted in ["small", "gpu-0", "POD", "LIMIT", "default/one", "2,048 MiB"] {
        ensure!(out.contains(wanted), "no {wanted:?} in:\n{out}");
    }
    Ok(())
}

const ONE_SHARE: &str = r#"apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: share}
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: share.aliquot.dev
        capacity: {requests: {memory: 2Gi, cores: "20"}}
---
apiVersion: v1
kind: Pod
metadata: {name: one}
spec:
  containers:
  - name: main
    image: none
    resources: {claims: [{name: gpu}]}
  resourceClaims: [{name: gpu, resourceClaimName: share}]
"#;

#[test]
fn sim_a_fleet_and_manifests_of_the_users_own_are_taken() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    std::fs::write(dir.path().join("mine.yaml"), ONE_SHARE)?;
    let fleet = "nodes:\n- name: left\n  gpus: [{board: L40S, count: 2}]\n- name: right\n  gpus: [{board: A30, mig: true}]\n";
    std::fs::write(dir.path().join("fleet.yaml"), fleet)?;
    let arguments = ["--json", "-f", "mine.yaml", "--fleet", "fleet.yaml"];
    let report = report(&output(build.demo(dir.path(), &arguments))?)?;
    check(&report)?;
    let row = row(&report, "one", "main")?;
    ensure!(
        row.get("node").and_then(Value::as_str) == Some("left"),
        "an A30 in MIG mode has no shares: {row}"
    );
    ensure!(number(row, "limitBytes")? == 2 * GIB, "{row}");
    Ok(())
}

#[rstest]
#[case::malformed("apiVersion: v1\nkind: [Pod\n", "mine.yaml", "malformed YAML")]
#[case::unknown_class(
    &ONE_SHARE.replace("share.aliquot.dev", "nothing.example.com"),
    "mine.yaml:1:",
    "asks for DeviceClass \"nothing.example.com\", which does not exist"
)]
#[case::unknown_claim(
    &ONE_SHARE.replace("resourceClaimName: share", "resourceClaimName: other"),
    "mine.yaml:12:",
    "names ResourceClaim \"other\""
)]
#[case::no_pod("apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n", "", "the files have no Pod")]
#[case::refused_by_the_api(
    &ONE_SHARE.replace("name: gpu\n      exactly", "name: GPU_1\n      exactly"),
    "mine.yaml:1:",
    "GPU_1"
)]
fn sim_bad_manifests_are_named_with_file_line_and_reason(
    #[case] manifest: &str,
    #[case] place: &str,
    #[case] reason: &str,
) -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    std::fs::write(dir.path().join("mine.yaml"), manifest)?;
    let output = output(build.demo(dir.path(), &["-f", "mine.yaml"]))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "it was taken: {}", String::from_utf8_lossy(&output.stdout));
    ensure!(said.contains(place) && said.contains(reason), "said: {said}");
    Ok(())
}

#[test]
fn sim_a_request_that_nothing_can_satisfy_is_explained_with_its_place() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    std::fs::write(dir.path().join("mine.yaml"), ONE_SHARE.replace("2Gi", "900Gi"))?;
    std::fs::write(dir.path().join("fleet.yaml"), "nodes:\n- name: small\n  gpus: [{board: T4}]\n")?;
    let output = output(build.demo(dir.path(), &["-f", "mine.yaml", "--fleet", "fleet.yaml"]))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "900 GiB of a T4?");
    ensure!(said.contains("mine.yaml:1: ResourceClaim share was refused"), "said: {said}");
    ensure!(said.contains("900Gi"), "by the admission webhook: {said}");
    Ok(())
}

#[test]
fn sim_a_pod_that_finds_no_room_is_explained_beside_those_that_run() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let second = ONE_SHARE.replace("2Gi", "14Gi").replace(": share}", ": large}").replace("one}", "two}");
    std::fs::write(dir.path().join("mine.yaml"), format!("{ONE_SHARE}---\n{second}"))?;
    std::fs::write(dir.path().join("fleet.yaml"), "nodes:\n- name: small\n  gpus: [{board: T4}]\n")?;
    let output = output(build.demo(dir.path(), &["-f", "mine.yaml", "--fleet", "fleet.yaml"]))?;
    let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(!output.status.success(), "16 GiB of a T4? {out}");
    ensure!(out.contains("default/one main") && out.contains("released:"), "{out}");
    ensure!(said.contains("mine.yaml:33: pod default/two cannot run: DevicesDoNotFit"), "said: {said}");
    Ok(())
}

/// Preemption, as the example's README tells it: files are applied one after the other.
#[test]
fn sim_a_pod_of_higher_priority_takes_the_gpu_and_both_are_shown() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let [first, urgent] = &["07-preemption/07-preemption.yaml", "07-preemption/urgent.yaml"].map(example);
    let report = report(&output(build.demo(dir.path(), &["--json", "-f", first, "-f", urgent]))?)?;
    ensure!(report.get("clean") == Some(&Value::Bool(true)), "{report}");
    let (training, inference) = (row(&report, "training", "main")?, row(&report, "inference", "main")?);
    ensure!(training["ended"].as_str().is_some_and(|why| why.starts_with("Preempted:")), "{training}");
    ensure!(inference.get("ended").is_none() && inference["devices"] == training["devices"], "{inference}");
    Ok(())
}

/// Every example that needs nothing of the nodes but GPUs, on one fleet, beside those that the demo runs unasked.
#[test]
fn sim_all_other_examples_run_in_the_demo_side_by_side() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let files = [
        "08-budget/08-budget.yaml",
        "08-budget/later.yaml",
        "09-substitution/neighbour.yaml",
        "09-substitution/09-substitution.yaml",
        "11-retain/11-retain.yaml",
        "11-retain/statefulset.yaml",
        "12-compaction/12-compaction.yaml",
        "13-resize/13-resize.yaml",
        "14-gang/14-gang.yaml",
        "14-gang/blue.yaml",
        "15-timeslice/15-timeslice.yaml",
        "16-aligned-gpus/16-aligned-gpus.yaml",
        "17-monitoring/17-monitoring.yaml",
        "20-mig-share/20-mig-share.yaml",
    ];
    let files = files.map(example);
    let arguments: Vec<&str> = files.iter().flat_map(|file| ["-f", file]).chain(["--json"]).collect();
    let report = report(&output(build.demo(dir.path(), &arguments))?)?;
    ensure!(report.get("clean") == Some(&Value::Bool(true)), "{report}");
    let rows = report.pointer("/containers").and_then(Value::as_array).context("no containers")?;
    ensure!(rows.len() == 23, "{} containers: {report}", rows.len());
    for row in rows {
        ensure!(row["program"]["state"] != "ended" && row.get("ended").is_none(), "{row}");
        let limit = row.get("limitBytes").and_then(Value::as_u64).unwrap_or(u64::MAX);
        ensure!((1..=limit).contains(&number(row, "gotBytes")?), "{row}");
    }
    let substitutes = rows.iter().filter(|row| row["namespace"] == "substitution");
    ensure!(
        substitutes.clone().all(|row| row["devices"].to_string().contains("1g10gb")),
        "a larger profile each"
    );
    ensure!(substitutes.count() == 2, "{report}");
    Ok(())
}

/// A quota lets one of two pods in, and the other is told why; what a quota of Kubernetes says is left out.
#[test]
fn sim_a_quota_holds_in_the_demo() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let [first, second] = &["10-governance/10-governance.yaml", "10-governance/second.yaml"].map(example);
    let output = output(build.demo(dir.path(), &["-f", first, "-f", second]))?;
    let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // Where lines end depends on how long the path of this checkout is.
    let words = out.split_whitespace().collect::<Vec<_>>().join(" ");
    ensure!(words.contains("governed/first main") && words.contains("ResourceQuota devices"), "{out}");
    ensure!(said.contains("pod governed/second cannot run: GpuQuotaExceeded:"), "{said}");
    Ok(())
}
