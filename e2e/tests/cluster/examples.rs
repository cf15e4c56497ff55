//! The examples of `examples/` do on a real cluster what their READMEs say, seen from inside their
//! containers.

use crate::hold::hold_claims;
use crate::support::{GIB, on_any_cluster, on_cluster};
use aliquot_e2e::cluster::{Cluster, SIM};
use aliquot_e2e::objects::{self, PodManifest};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

async fn apply(cluster: &Cluster, example: &str) -> Result<()> {
    apply_file(cluster, &format!("{example}/{example}.yaml")).await
}

async fn apply_file(cluster: &Cluster, file: &str) -> Result<()> {
    let path = cluster.repo().join("examples").join(file);
    cluster.apply(&std::fs::read_to_string(&path).with_context(|| path.display().to_string())?)
}

/// Device nodes of GPUs, and capability nodes of partitions, that a container sees.
fn nodes(cluster: &Cluster, namespace: &str, pod: &str, container: &str) -> Result<(usize, usize)> {
    let script =
        "shopt -s nullglob; g=(/dev/nvidia[0-9]*); c=(/dev/nvidia-caps/nvidia-cap*); echo ${#g[@]} ${#c[@]}";
    let counts = cluster.shell(namespace, pod, container, script)?;
    let (gpus, capabilities) = counts.trim().split_once(' ').context("no two numbers")?;
    Ok((gpus.parse()?, capabilities.parse()?))
}

/// What a container sees of the limiter: the preload list, its files, the quota, the environment.
fn limiter(cluster: &Cluster, namespace: &str, pod: &str, container: &str) -> Result<String> {
    let script = "cat /etc/ld.so.preload; ls /usr/local/lib/aliquot/*/ /run/aliquot/quota/*/quota /run/aliquot/region/*/region; env";
    cluster.shell(namespace, pod, container, &format!("{{ {script}; }} 2>&1 || true"))
}

#[test]
fn a_whole_gpu_is_one_device_with_all_its_memory_and_no_limiter() -> Result<()> {
    on_any_cluster(async |cluster: &Cluster| {
        apply(cluster, "01-whole-gpu").await?;
        let got = cluster.probe("whole-gpu", "trainer", "main").await?;
        ensure!(got.allocated.len() == 1, "one device, got {got:?}");
        ensure!(got.allocated.iter().all(|bytes| *bytes > 40 * GIB), "all of its memory: {got:?}");
        ensure!(nodes(cluster, "whole-gpu", "trainer", "main")? == (1, 0));
        let seen = limiter(cluster, "whole-gpu", "trainer", "main")?;
        ensure!(!seen.contains("libaliquot"), "a whole GPU needs no limiter: {seen}");
        ensure!(seen.contains("ALIQUOT_DEVICE_"), "the device is in the environment: {seen}");
        cluster.delete_namespace("whole-gpu").await
    })
}

#[test]
fn a_partition_is_created_for_its_profile_and_destroyed_afterwards() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        ensure!(cluster.gpu_instances()?.is_empty(), "none to begin with");
        apply(cluster, "02-mig-by-profile").await?;
        let got = cluster.probe("mig-profile", "notebook", "main").await?;
        ensure!(
            got.allocated.len() == 1 && got.allocated.iter().all(|b| *b < 20 * GIB && *b > 17 * GIB),
            "a 2g.20gb has just under 20 GiB: {got:?}"
        );
        ensure!(got.names.iter().all(|n| n.contains("MIG 2g.20gb")), "{got:?}");
        ensure!(nodes(cluster, "mig-profile", "notebook", "main")? == (1, 2), "its GPU and two capabilities");
        let listed = "ls -l /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia-caps/*";
        let listed = cluster.shell("mig-profile", "notebook", "main", listed)?;
        let devices = listed.lines().filter(|line| line.starts_with('c')).count();
        ensure!(devices == 4 && listed.contains(", 255 "), "made by the driver's numbers: {listed}");
        ensure!(cluster.gpu_instances()?.len() == 1, "one instance: {:?}", cluster.gpu_instances()?);
        let seen = limiter(cluster, "mig-profile", "notebook", "main")?;
        ensure!(!seen.contains("libaliquot"), "a partition needs no limiter: {seen}");
        // That it is destroyed is part of `clean`.
        cluster.delete_namespace("mig-profile").await
    })
}

#[test]
fn a_partition_by_size_is_the_smallest_that_suffices() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "03-mig-by-size").await?;
        let got = cluster.probe("mig-size", "inference", "main").await?;
        ensure!(
            got.allocated.len() == 1 && got.allocated.iter().all(|b| *b > 15 * GIB && *b < 20 * GIB),
            "16 GiB asked, a profile of 20 GB given: {got:?}"
        );
        ensure!(nodes(cluster, "mig-size", "inference", "main")? == (1, 2));
        cluster.delete_namespace("mig-size").await
    })
}

#[test]
fn shares_of_a_partition_have_one_instance_which_goes_with_the_last_of_them() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        cluster.configure(&["kubeletPlugin.migShares.enabled=true"]).await?;
        ensure!(cluster.gpu_instances()?.is_empty(), "none to begin with");
        apply(cluster, "20-mig-share").await?;
        for pod in ["first", "second"] {
            let got = cluster.probe("mig-share", pod, "main").await?;
            ensure!(
                got.allocated.len() == 1 && got.allocated.iter().all(|b| *b <= 8 * GIB && *b > 7 * GIB),
                "{pod} asked for 8 GiB: {got:?}"
            );
            ensure!(got.names.iter().all(|n| n.contains("MIG 2g.20gb")), "{got:?}");
            ensure!(nodes(cluster, "mig-share", pod, "main")? == (1, 2), "its GPU and two capabilities");
            let seen = limiter(cluster, "mig-share", pod, "main")?;
            for wanted in ["libaliquot_core.so\n", "/quota\n", "/region\n", "uuid=MIG-"] {
                ensure!(seen.contains(wanted), "no {wanted:?} in:\n{seen}");
            }
        }
        let devices = [
            cluster.devices_of("mig-share", "first").await?,
            cluster.devices_of("mig-share", "second").await?,
        ];
        ensure!(devices[0] == devices[1], "packed into one partition: {devices:?}");
        ensure!(cluster.gpu_instances()?.len() == 1, "one instance: {:?}", cluster.gpu_instances()?);
        cluster.delete_pod("mig-share", "first").await?;
        ensure!(cluster.gpu_instances()?.len() == 1, "the second one has it: {:?}", cluster.gpu_instances()?);
        // That it is destroyed is part of `clean`.
        cluster.delete_namespace("mig-share").await
    })
}

/// How much of the GPU's time a `cuda-probe --busy` says it got.
fn gpu_percent(output: &str) -> Result<f64> {
    output
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find_map(|report| report.get("gpu_percent")?.as_f64())
        .with_context(|| format!("no gpu_percent in {output}"))
}

/// Of a GPU's time: half for a hard share, all of it for a soft one that is alone.
#[test]
fn a_share_gets_its_part_of_the_time_and_a_soft_one_what_is_idle() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("gpu-time").await?;
        let soft = serde_json::json!([{"opaque": {"driver": "gpu.aliquot.dev", "parameters": {
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "ShareConfig", "computePolicy": "Soft"}}}]);
        let mut elastic = objects::claim(&namespace, "elastic", &[objects::share("gpu", "2Gi", 20)]);
        if let Some(devices) = elastic.pointer_mut("/spec/devices") {
            devices["config"] = soft;
        }
        cluster.create(&[
            objects::claim(&namespace, "half", &[objects::share("gpu", "2Gi", 50)]),
            elastic,
            PodManifest::of_claim(&namespace, "half", "half").build(),
            PodManifest::of_claim(&namespace, "elastic", "elastic").build(),
        ])?;
        cluster.running(&namespace, "half").await?;
        cluster.running(&namespace, "elastic").await?;
        let busy = |pod| gpu_percent(&cluster.shell(&namespace, pod, "main", "cuda-probe --busy 5")?);
        let (half, elastic) = (busy("half")?, busy("elastic")?);
        ensure!((5.0..52.0).contains(&half), "{half} percent of the GPU's time instead of 50");
        ensure!((22.0..101.0).contains(&elastic), "{elastic} percent instead of more than its 20");
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_share_ends_at_its_limit_and_shows_its_quota_and_limiter() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "04-share").await?;
        let line = cluster.first_line("share", "chatbot", "main").await?;
        let taken = line.strip_suffix(" MiB, CUDA error 2").and_then(|taken| taken.parse::<u64>().ok());
        ensure!(
            taken.is_some_and(|mebibytes| (9 << 10..10 << 10).contains(&mebibytes)),
            "an ordinary program gets 10 GiB without what CUDA takes, and is told so: {line}"
        );
        let seen = cluster.shell(
            "share",
            "chatbot",
            "main",
            "nvidia-smi --query-gpu=memory.total --format=csv,noheader",
        )?;
        ensure!(seen.trim() == "10240 MiB", "NVML says the limit, too: {seen}");
        let got = cluster.probe("share", "chatbot", "main").await?;
        ensure!(
            got.allocated.len() == 1 && got.allocated.iter().all(|b| *b <= 10 * GIB && *b > 9 * GIB),
            "10 GiB asked: {got:?}"
        );
        let seen = limiter(cluster, "share", "chatbot", "main")?;
        for wanted in [
            "libaliquot_preload.so\n",
            "libaliquot_core.so\n",
            "CUDA_DEVICE_MEMORY_LIMIT_0=10240m",
            "CUDA_DEVICE_SM_LIMIT_0=30",
            "/quota\n",
            "/region\n",
        ] {
            ensure!(seen.contains(wanted), "no {wanted:?} in:\n{seen}");
        }
        let raised = cluster.shell(
            "share",
            "chatbot",
            "main",
            "CUDA_DEVICE_MEMORY_LIMIT_0=70g cuda-probe; CUDA_DEVICE_MEMORY_LIMIT_0=1g cuda-probe",
        )?;
        let bytes: Vec<u64> = raised
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter_map(|report| report.pointer("/devices/0/allocated_bytes")?.as_u64())
            .collect();
        ensure!(
            matches!(bytes.as_slice(), [raised, lowered] if *raised <= 10 * GIB && *lowered <= GIB && *lowered > 0),
            "the environment lowers a limit and never raises it: {raised}"
        );
        // A shell of the pod is in its share: it has 30 % of the GPU's time, counted in kernels of a millisecond.
        // A busy machine can only lower the figure; what is saved up is less than a point in five seconds.
        let busy = gpu_percent(&cluster.shell("share", "chatbot", "main", "cuda-probe --busy 5")?)?;
        ensure!((3.0..32.0).contains(&busy), "{busy} percent of the GPU's time instead of 30");
        let write = cluster.shell("share", "chatbot", "main", "echo x > $(echo /run/aliquot/quota/*/quota)");
        ensure!(write.is_err(), "a tenant cannot write its quota");
        cluster.delete_namespace("share").await
    })
}

#[test]
fn containers_of_one_pod_see_only_the_request_that_they_name() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "05-two-shares-one-pod").await?;
        let model = cluster.probe("two-shares", "pair", "model").await?;
        let embedder = cluster.probe("two-shares", "pair", "embedder").await?;
        let between = |got: &[u64], low: u64, high: u64| {
            got.len() == 1 && got.iter().all(|b| *b > low * GIB && *b <= high * GIB)
        };
        ensure!(between(&model.allocated, 11, 12), "12 GiB asked: {model:?}");
        ensure!(between(&embedder.allocated, 2, 3), "3 GiB asked: {embedder:?}");
        let quotas = cluster.shell("two-shares", "pair", "embedder", "ls /run/aliquot/quota | wc -l")?;
        ensure!(quotas.trim() == "1", "one quota each: {quotas}");
        cluster.delete_namespace("two-shares").await
    })
}

#[test]
fn two_pods_on_one_claim_both_run_and_share_one_limit() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "06-claim-shared-by-two-pods").await?;
        // Neither looks for the limit at its start: who comes while the other has it all gets nothing.
        for pod in ["first", "second"] {
            let line = cluster.first_line("shared-claim", pod, "main").await?;
            ensure!(line == "2048 MiB, CUDA error 0", "2 GiB each: {line}");
        }
        let left = left_of_share(cluster)?;
        ensure!(left <= 4 * GIB && left > 2 * GIB, "4 of 8 GiB are taken, {left} bytes were to be had");
        // What one takes the other lacks.
        cluster.shell(
            "shared-claim",
            "first",
            "main",
            "(setsid cuda-probe --hold --occupy $((2 << 30)) </dev/null >/tmp/occupied 2>&1 &); until grep -q devices /tmp/occupied; do sleep 0.1; done; cat /tmp/occupied",
        )?;
        let left = left_of_share(cluster)?;
        ensure!(left <= 2 * GIB && left > 0, "6 of 8 GiB are taken, {left} bytes were to be had");
        cluster.delete_namespace("shared-claim").await
    })
}

#[test]
fn a_statefulsets_pods_keep_their_places_for_the_ones_after_them() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply_file(cluster, "11-retain/statefulset.yaml").await?;
        cluster.probe("successors", "web-0", "main").await?;
        cluster.probe("successors", "web-1", "main").await?;
        let before = [
            cluster.devices_of("successors", "web-0").await?,
            cluster.devices_of("successors", "web-1").await?,
        ];
        let scale = |to: &str| cluster.kubectl(&["-n", "successors", "scale", "statefulset", "web", to]);
        scale("--replicas=0")?;
        hold_claims(cluster, "successors", 2).await?;
        cluster.pod_gone("successors", "web-0").await?;
        cluster.pod_gone("successors", "web-1").await?;
        scale("--replicas=2")?;
        cluster.probe("successors", "web-0", "main").await?;
        cluster.probe("successors", "web-1", "main").await?;
        let after = [
            cluster.devices_of("successors", "web-0").await?,
            cluster.devices_of("successors", "web-1").await?,
        ];
        ensure!(before == after, "{before:?}, then {after:?}");
        hold_claims(cluster, "successors", 0).await?;
        cluster.kubectl(&["-n", "successors", "delete", "statefulset", "web"])?;
        hold_claims(cluster, "successors", 0).await?;
        cluster.delete_namespace("successors").await
    })
}

#[test]
fn time_slices_are_set_for_the_claims_that_ask_and_set_back_after_the_last() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let set = || -> Result<Vec<u32>> {
            let node = cluster.hardware()?;
            (0..node.gpus().len()).map(|gpu| Ok(node.settings(gpu)?.timeslice)).collect::<Result<_>>()
        };
        let before = set()?;
        ensure!(before.iter().all(|slice| *slice == 0), "the driver's own to begin with: {before:?}");
        apply(cluster, "15-timeslice").await?;
        for pod in ["first", "second"] {
            let line = cluster.first_line("timeslice", pod, "main").await?;
            ensure!(line.starts_with("GPU 0: "), "its GPU: {line}");
            let got = cluster.shell("timeslice", pod, "main", "cuda-probe --occupy=8589934592")?;
            ensure!(got.contains("\"allocated_bytes\":8589934592"), "8 GiB: {got}");
        }
        let devices = [
            cluster.devices_of("timeslice", "first").await?,
            cluster.devices_of("timeslice", "second").await?,
        ];
        ensure!(devices[0] == devices[1], "packed onto one GPU: {devices:?}");
        ensure!(
            set()?.iter().filter(|slice| **slice == 3).count() == 1,
            "one GPU has long slices: {:?}",
            set()?
        );
        let seen = limiter(cluster, "timeslice", "first", "main")?;
        ensure!(!seen.contains("libaliquot"), "nobody limits it: {seen}");
        cluster.delete_pod("timeslice", "first").await?;
        ensure!(set()?.contains(&3), "the second one still has them: {:?}", set()?);
        cluster.delete_namespace("timeslice").await?;
        cluster.wait_for("the driver's own slices", || async { Ok((set()? == before).then_some(())) }).await
    })
}

#[test]
fn containers_of_one_claim_run_side_by_side_through_mps_and_nobody_gets_around_it() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        if let Err(reason) = install_mps(cluster) {
            eprintln!("SKIPPED: MPS with NVIDIA's control daemon: {reason:#}");
            return Ok(());
        }
        cluster.configure(&["kubeletPlugin.mps.enabled=true"]).await?;
        let outcome = through_mps(cluster).await;
        cluster.configure(&[]).await?;
        outcome
    })
}

/// Puts NVIDIA's control daemon, the real one, where the simulated driver is.
pub(crate) fn install_mps(cluster: &Cluster) -> Result<()> {
    let tool = cluster.repo().join("tools/real-driver");
    let said = std::process::Command::new(tool).args(["bookworm", "files"]).output()?;
    ensure!(said.status.success(), "tools/real-driver: {}", String::from_utf8_lossy(&said.stderr).trim());
    let files = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
    let bin = Path::new(SIM).join("root/usr/bin");
    std::fs::create_dir_all(&bin)?;
    std::fs::copy(files.join("usr/bin/nvidia-cuda-mps-control"), bin.join("nvidia-cuda-mps-control"))?;
    Ok(())
}

async fn through_mps(cluster: &Cluster) -> Result<()> {
    let modes = || -> Result<Vec<u32>> {
        let node = cluster.hardware()?;
        (0..node.gpus().len()).map(|gpu| Ok(node.settings(gpu)?.compute_mode)).collect()
    };
    let before = modes()?;
    ensure!(before.iter().all(|mode| *mode == 0), "all processes may use all GPUs to begin with: {before:?}");
    apply(cluster, "18-mps").await?;
    for container in ["encoder", "decoder"] {
        let line = cluster.first_line("mps", "pair", container).await?;
        ensure!(line.starts_with("GPU 0: "), "its GPU: {line}");
        let hold = "(setsid cuda-probe --hold --occupy=8589934592 </dev/null >/tmp/held 2>&1 &); \
                    until grep -q devices /tmp/held; do sleep 0.1; done; cat /tmp/held";
        let held = cluster.shell("mps", "pair", container, hold)?;
        ensure!(held.contains("\"allocated_bytes\":8589934592"), "8 GiB each, side by side: {held}");
    }
    let devices = cluster.devices_of("mps", "pair").await?;
    ensure!(devices.len() == 1 && devices.iter().all(|device| device.ends_with("-mps")), "{devices:?}");
    let exclusive = modes()?;
    ensure!(
        exclusive.iter().filter(|mode| **mode == 3).count() == 1,
        "one GPU has one process, the server: {exclusive:?}"
    );
    let shell = |container: &str, script: &str| cluster.shell("mps", "pair", container, script);
    for path in ["/tmp/nvidia-mps", "/dev/shm"] {
        let identity = format!("stat -c %d:%i {path}");
        let (one, other) = (shell("encoder", &identity)?, shell("decoder", &identity)?);
        ensure!(one == other, "{path} is one directory: {one}, {other}");
    }
    let around = "CUDA_MPS_PIPE_DIRECTORY=/nowhere cuda-probe --occupy=1048576";
    let went = shell("encoder", &format!("{around} 2>&1 && echo GOT-IT || true"))?;
    ensure!(!went.contains("GOT-IT"), "a program that goes around the daemon gets the GPU: {went}");
    shell("encoder", "cuda-probe --occupy=1048576").context("a client like the others")?;
    cluster.delete_namespace("mps").await?;
    cluster.wait_for("the GPU to be everybody's", || async { Ok((modes()? == before).then_some(())) }).await
}

/// Two boards of the node are equal and not in MIG mode, so these are linked.
#[test]
fn gpus_of_a_claim_that_asks_for_nvlink_are_linked() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        // Tests before may have left them in MIG mode, and the agent not have seen them in another.
        cluster.exchange_hardware(&[]).await?;
        let file = cluster.repo().join("examples/16-aligned-gpus/16-aligned-gpus.yaml");
        let (numa, nvlink) = ("resource.kubernetes.io/numaNode", "gpu.aliquot.dev/nvlinkDomain");
        let near = std::fs::read_to_string(file)?;
        ensure!(near.contains(numa), "the example has another constraint: {near}");
        // In a namespace of its own: the example's may still be about to go.
        cluster.apply(&near.replace(numa, nvlink).replace("aligned", "linked"))?;
        cluster.running("linked", "trainer").await?;
        let devices = cluster.devices_of("linked", "trainer").await?;
        let node = cluster.hardware()?;
        let equal = node.gpus().iter().filter(|gpu| gpu.board.key == "H100-80");
        let linked: BTreeSet<String> = equal.map(|gpu| format!("gpu-{}", gpu.minor)).collect();
        ensure!(
            devices.iter().cloned().collect::<BTreeSet<_>>() == linked,
            "{devices:?}, and not {linked:?}"
        );
        cluster.delete_namespace("linked").await
    })
}

/// Of the node's whole GPUs three are at one NUMA node, and one is at the other.
#[test]
fn gpus_of_a_claim_that_asks_for_it_are_at_one_numa_node() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let namespace = cluster.namespace("near").await?;
        cluster.create(&[
            objects::template(&namespace, "h100", &[objects::gpu_of("gpu", "H100")]),
            PodManifest::of_template(&namespace, "neighbour", "h100").build(),
        ])?;
        cluster.running(&namespace, "neighbour").await?;
        apply(cluster, "16-aligned-gpus").await?;
        let got = cluster.probe("aligned", "trainer", "main").await?;
        ensure!(got.allocated.len() == 2, "two devices: {got:?}");
        let node = cluster.hardware()?;
        let devices = cluster.devices_of("aligned", "trainer").await?;
        let numa: BTreeSet<i32> = node
            .gpus()
            .iter()
            .filter(|gpu| devices.contains(&format!("gpu-{}", gpu.minor)))
            .map(|gpu| gpu.numa_node)
            .collect();
        ensure!(numa.len() == 1, "{devices:?} are at {numa:?}");
        // The GPU that is left is alone at its NUMA node, so a second such pod waits.
        let file = cluster.repo().join("examples/16-aligned-gpus/16-aligned-gpus.yaml");
        let second = std::fs::read_to_string(file)?.replace("name: trainer", "name: second");
        cluster.apply(&second)?;
        cluster.event("aligned", "second").await?;
        cluster.delete_pod("aligned", "trainer").await?;
        cluster.running("aligned", "second").await?;
        ensure!(cluster.devices_of("aligned", "second").await? == devices, "the same two");
        cluster.delete_namespace("aligned").await?;
        cluster.delete_namespace(&namespace).await
    })
}

#[test]
fn a_monitor_sees_every_gpu_beside_whoever_holds_it_and_is_nobodys_without_the_label() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        apply(cluster, "01-whole-gpu").await?;
        cluster.probe("whole-gpu", "trainer", "main").await?;
        apply(cluster, "17-monitoring").await?;
        cluster.running("monitoring", "monitor").await?;
        let listed = cluster.shell("monitoring", "monitor", "main", "nvidia-smi -L")?;
        let gpus = listed.lines().filter(|line| line.starts_with("GPU ")).count();
        ensure!(gpus == cluster.hardware()?.gpus().len(), "all of the node's: {listed}");
        // Whoever has no such namespace is refused by Kubernetes itself.
        let claim = objects::claim(
            "whole-gpu",
            "look",
            &[serde_json::json!({"name": "gpus", "exactly":
            {"deviceClassName": "admin.aliquot.dev", "adminAccess": true, "allocationMode": "All"}})],
        );
        let refused = cluster.create(&[claim]).err().context("allowed without the label")?;
        ensure!(format!("{refused:#}").contains("admin-access"), "{refused:#}");
        cluster.delete_namespace("monitoring").await?;
        cluster.delete_namespace("whole-gpu").await
    })
}

/// The GPUs are on a bus that does what a kernel would, for as long as this test keeps it.
#[test]
fn a_gpu_of_a_virtual_machine_is_on_vfio_and_comes_back() -> Result<()> {
    on_cluster(async |cluster: &Cluster| {
        let node = cluster.hardware()?;
        let bus = node.pci_bus()?;
        let drivers = || node.gpus().iter().map(|gpu| bus.driver(&gpu.bdf())).collect::<Vec<_>>();
        let on = |driver: &str| drivers().iter().filter(|found| found.as_deref() == Some(driver)).count();
        cluster.configure(&["kubeletPlugin.vfio.enabled=true"]).await?;
        apply(cluster, "19-vfio").await?;
        cluster.running("machines", "machine").await?;
        let devices = cluster.devices_of("machines", "machine").await?;
        ensure!(devices.len() == 1 && devices.iter().all(|name| name.ends_with("-vfio")), "{devices:?}");
        ensure!((on("vfio-pci"), on("nvidia")) == (1, node.gpus().len() - 1), "{:?}", drivers());
        let shown =
            cluster.shell("machines", "machine", "main", "ls /dev/vfio; ls /dev | grep -c nvidia || true")?;
        let shown: Vec<&str> = shown.split_whitespace().collect();
        ensure!(shown.len() == 3 && shown.contains(&"vfio") && shown.last() == Some(&"0"), "{shown:?}");
        let path = "jsonpath={.items[*].status.devices[*].data.pciBusID}";
        let address = cluster.kubectl(&["-n", "machines", "get", "resourceclaims", "-o", path])?;
        ensure!(bus.driver(address.trim()).as_deref() == Some("vfio-pci"), "{address}: {:?}", drivers());
        cluster.delete_namespace("machines").await?;
        let all_back = || async { Ok((on("nvidia") == node.gpus().len()).then_some(())) };
        cluster.wait_for("every GPU with its own driver", all_back).await?;
        cluster.configure(&[]).await
    })
}

/// Bytes that a program in the second pod gets of the share.
fn left_of_share(cluster: &Cluster) -> Result<u64> {
    let found = cluster.shell("shared-claim", "second", "main", "cuda-probe")?;
    let report: serde_json::Value = serde_json::from_str(found.trim())?;
    let bytes = report.pointer("/devices/0/allocated_bytes").and_then(serde_json::Value::as_u64);
    bytes.with_context(|| format!("no figure in {found}"))
}
