//! Containers of the demo run their own programs, which can do nothing to this machine.

use super::{Build, ONE_SHARE, check, directory, output, report, row};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::Path;

/// A pod of which one program looks around and does harm as far as it can, one tries to get rights back, one breaks
/// after its first line, one floods, one is not on this machine, and one is its image's.
fn manifest(harm: &Path) -> String {
    let harm = harm.display();
    // Four lines, which is all that is kept.
    let looks = format!(
        "nvidia-smi | tail -n 1; echo $(NAME); kill -9 -1 2>/dev/null; \
         touch {harm} /host{harm}; sleep 600"
    );
    // Whoever had the rights of a namespace's root could get at the files, in each of these ways.
    let tries = format!(
        "(mount -o remount,bind,rw /host; umount /proc/sys; nsenter --mount=/proc/self/ns/mnt touch {harm}; \
         unshare -Ur true && echo got rights; touch /host{harm}; ipcmk -M 4096 >/dev/null) 2>/dev/null; \
         sed -n 's/^CapEff:.0*$/no capabilities/p' /proc/self/status; sleep 600"
    );
    let containers = [
        container("looks", shell(&looks)),
        container("tries", shell(&tries)),
        container("breaks", shell("echo starts; sleep 0.3; echo breaks >&2; exit 3")),
        container("floods", shell("printf '\\033[2Jred\\n'; head -c 100000000 /dev/zero; sleep 600")),
        container("absent", json!(["/no/such/program"])),
        container("image", Value::Null),
    ];
    pod(&containers)
}

fn shell(script: &str) -> Value {
    json!(["sh", "-c", script])
}

fn container(name: &str, command: Value) -> Value {
    json!({"name": name, "image": "none", "command": command,
        "env": [{"name": "NAME", "value": "named"}], "resources": {"claims": [{"name": "gpu"}]}})
}

/// A pod of these containers, with a share that all of them have.
fn pod(containers: &[Value]) -> String {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": {
        "containers": containers, "resourceClaims": [{"name": "gpu", "resourceClaimName": "share"}]}});
    let claim = ONE_SHARE.split("---").next().unwrap_or_default();
    format!("{claim}---\n{pod}\n")
}

/// The program of each container, by its name.
fn programs(report: &Value) -> Result<impl Fn(&str) -> Result<Value>> {
    check(report)?;
    Ok(|container: &str| {
        row(report, "one", container)?
            .get("program")
            .cloned()
            .with_context(|| format!("no program of {container}"))
    })
}

#[test]
fn sim_the_programs_of_pods_run_in_the_demo_and_cannot_harm_this_machine() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    // A container has a /tmp of its own; what else there is it sees.
    let seen = tempfile::tempdir_in(&build.programs)?;
    let harm = seen.path().join("harm");
    std::fs::write(dir.path().join("pod.yaml"), manifest(&harm))?;
    let report = report(&output(build.demo(dir.path(), &["--json", "-f", "pod.yaml"]))?)?;
    let program = programs(&report)?;
    if report.get("isolation").and_then(Value::as_str) != Some("user namespaces") {
        eprintln!("SKIPPED: no user namespaces here, so no program is run");
        return Ok(());
    }
    let looks = program("looks")?;
    let said = looks["said"].as_array().context("it says nothing")?;
    ensure!(looks["state"] == "running", "it outlives what it does to all others: {looks}");
    // Lines of both outputs, in whichever order they came.
    let limit = said.iter().filter_map(Value::as_str).any(|line| line.contains("/ 2048MiB |"));
    ensure!(limit, "NVIDIA's program sees the limit: {looks}");
    ensure!(said.contains(&json!("named")), "with its variables: {looks}");
    ensure!(looks.to_string().contains("Read-only file system"), "{looks}");
    let tries = program("tries")?;
    ensure!(tries["said"] == json!(["no capabilities"]), "{tries}");
    ensure!(!harm.exists(), "nothing of this machine is written: {looks} {tries}");
    let breaks = program("breaks")?;
    ensure!(breaks["state"] == "ended" && breaks["code"] == 3, "after its first line: {breaks}");
    ensure!(breaks["said"] == json!(["starts", "breaks"]), "{breaks}");
    let floods = program("floods")?;
    let first = floods["said"][0].as_str().unwrap_or_default();
    ensure!(first == " [2Jred", "a terminal obeys nothing of it: {floods}");
    let absent = program("absent")?;
    ensure!(absent["state"] == "ended" && absent["code"] == 127, "{absent}");
    ensure!(absent["said"].to_string().contains("/no/such/program"), "it says what is missing: {absent}");
    let image = program("image")?;
    ensure!(image["state"] == "notRun" && image.to_string().contains("no images"), "{image}");
    Ok(())
}

#[test]
fn sim_nothing_is_left_of_what_a_program_locks_on_its_simulated_node() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    if !super::is_root() {
        eprintln!("SKIPPED: needs root to run the demo as a user whom modes of files stop");
        return Ok(());
    }
    let script = "cd $ALIQUOT_SIM_NODE && mkdir -p locked/in && chmod 0 locked && echo locked; sleep 600";
    std::fs::write(dir.path().join("pod.yaml"), pod(&[container("locks", shell(script))]))?;
    let report = report(&output(build.demo_as_nobody(dir.path(), &["--json", "-f", "../pod.yaml"])?)?)?;
    let locks = programs(&report)?("locks")?;
    ensure!(locks["state"] == "notRun" || locks["said"] == json!(["locked"]), "{locks}");
    let left: Vec<_> = std::fs::read_dir(dir.path().join("home"))?.collect::<Result<_, _>>()?;
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

#[test]
fn sim_without_namespaces_no_program_of_a_pod_runs() -> Result<()> {
    let (build, dir) = (Build::find()?, directory()?);
    let harm = dir.path().join("harm");
    std::fs::write(dir.path().join("pod.yaml"), manifest(&harm))?;
    let arguments = ["--json", "--no-namespaces", "-f", "pod.yaml"];
    let report = report(&output(build.demo(dir.path(), &arguments))?)?;
    let program = programs(&report)?;
    for container in ["looks", "tries", "absent"] {
        let program = program(container)?;
        ensure!(program["state"] == "notRun" && program.to_string().contains("namespaces"), "{program}");
    }
    ensure!(!harm.exists());
    Ok(())
}
