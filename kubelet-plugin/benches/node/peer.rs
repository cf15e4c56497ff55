//! NVIDIA's own plugin on the same node, where it is at hand: `ALIQUOT_PEER` names its program, `gpu-kubelet-plugin` of
//! <https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu>, which a Go toolchain builds. Its
//! slices stay unwritten, as the API server here takes JSON alone.

use crate::agent::{Bench, resident_mib};
use crate::common::cluster::{claim, dial, eventually};
use crate::figure::Figure;
use crate::prepare::{prepare, unprepare};
use crate::times::Times;
use aliquot_proto::dra::v1::dra_plugin_client::DraPluginClient;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DRIVER: &str = "gpu.nvidia.com";
const SAMPLES: usize = 100;

/// A process of the peer; killed when dropped.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What it takes to start, to prepare a whole GPU, and of the node's memory.
pub(crate) async fn figures(bench: &Bench, figure: &impl Fn(&str, f64, &str, f64) -> Figure) -> Vec<Figure> {
    let Some(program) = std::env::var_os("ALIQUOT_PEER") else { return Vec::new() };
    let dir = bench.cluster.world.dir.path();
    let root = dir.join("root");
    // It does not start without one, and runs it for MIG and time slices only.
    let smi = root.join("usr/bin/nvidia-smi");
    fs::create_dir_all(smi.parent().expect("a folder")).expect("made");
    fs::write(&smi, "#!/bin/sh\n").expect("written");
    fs::set_permissions(&smi, fs::Permissions::from_mode(0o755)).expect("set");
    let own = |name: &str| dir.join("peer").join(name);
    let plugins = own("plugins");
    fs::create_dir_all(own("registry")).expect("made");
    let log = fs::File::create(std::env::temp_dir().join("aliquot-bench-peer.log")).expect("a log");
    let path = |flag: &str, path: PathBuf| format!("--{flag}={}", path.display());
    let spawn = || {
        let child = Command::new(&program)
            .args([
                "--node-name=n1",
                "--namespace=ns",
                "--image-name=none",
                "--nvidia-cdi-hook-path=/bin/true",
            ])
            .arg(path("cdi-root", own("cdi")))
            .arg(path("nvidia-driver-root", root.clone()))
            .arg(path("container-driver-root", root.clone()))
            .arg(path("kubelet-registrar-directory-path", own("registry")))
            .arg(path("kubelet-plugins-directory-path", plugins.clone()))
            .arg(path("kubeconfig", dir.join("kubeconfig")))
            .stdout(Stdio::null())
            .stderr(log.try_clone().expect("a log"))
            .spawn()
            .expect("the peer");
        Peer(child)
    };
    let socket = plugins.join(DRIVER).join("dra.sock");
    let started = Instant::now();
    let peer = spawn();
    let channel =
        eventually("the peer's socket (see aliquot-bench-peer.log)", || dial(&socket, "http://localhost"));
    let mut kubelet = DraPluginClient::new(channel.await);
    let start = started.elapsed();
    // Its slices follow.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let mut figures = vec![
        figure(
            "node.peer.start_s",
            start.as_secs_f64(),
            "s of NVIDIA's plugin until it answers; baseline: the goal",
            1.0,
        ),
        figure(
            "node.peer.rss_mib",
            resident_mib(peer.0.id()),
            "MiB of NVIDIA's plugin; baseline: our goal",
            20.0,
        ),
    ];
    let uid = allocated(bench).await;
    let (mut prepared, mut unprepared) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES {
        // Its client of the API takes five requests a second by default, which is no part of a call's cost.
        tokio::time::sleep(Duration::from_millis(250)).await;
        let started = Instant::now();
        prepare(&mut kubelet, vec![claim("peer", &uid)]).await;
        prepared.push(started.elapsed());
        let started = Instant::now();
        unprepare(&mut kubelet, vec![claim("peer", &uid)]).await;
        unprepared.push(started.elapsed());
    }
    for (call, times) in [("prepare", Times::of(prepared)), ("unprepare", Times::of(unprepared))] {
        for percent in [50, 99] {
            let name = format!("node.peer.{call}.whole.p{percent}_ms");
            let unit = "ms of NVIDIA's plugin at the kubelet's end; baseline: our goal";
            figures.push(figure(&name, times.percentile(percent), unit, 2.0));
        }
    }
    figures
}

/// A claim that has its first GPU.
async fn allocated(bench: &Bench) -> String {
    let api: Api<ResourceClaim> = Api::namespaced(bench.cluster.client.clone(), "ns");
    let requests = json!([{"name": "r", "exactly": {"deviceClassName": "c"}}]);
    let object =
        json!({"metadata": {"name": "peer", "namespace": "ns"}, "spec": {"devices": {"requests": requests}}});
    let object = serde_json::from_value(object).expect("a claim");
    let made = api.create(&PostParams::default(), &object).await.expect("created");
    let results = json!([{"request": "r", "driver": DRIVER, "pool": "n1", "device": "gpu-0"}]);
    let status = json!({"status": {"allocation": {"devices": {"results": results}}}});
    api.patch_status("peer", &PatchParams::default(), &Patch::Merge(status)).await.expect("allocated");
    made.metadata.uid.expect("a UID")
}
