//! GPUs of virtual machines, with the shipped binary and the real NVML wrapper: the library has every GPU open.

use super::{Sim, tainted, taints_of};
use crate::common::cluster::{devices, eventually};
use aliquot_sim_node::PciBus;
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::ListParams;
use serde_json::json;
use std::time::Duration;

const ON: &str = "--vfio=true";

fn drivers(sim: &Sim, bus: &PciBus) -> Vec<Option<String>> {
    sim.node.gpus().iter().map(|gpu| bus.driver(&gpu.bdf())).collect()
}

fn all_with_nvidia(sim: &Sim, bus: &PciBus) {
    assert_eq!(drivers(sim, bus), vec![Some("nvidia".to_owned()); sim.node.gpus().len()]);
}

/// The agent reads the GPUs: an error of one is heard of, and told by a taint.
async fn hears_of(sim: &Sim, gpu: usize) {
    let device = format!("gpu-{gpu}");
    eventually("an error is heard of", || async {
        sim.node.raise_xid(gpu, 62, None, None).unwrap();
        match taints_of(sim, &device).await {
            Some(taints) if taints == ["xid=62:NoSchedule"] => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_a_virtual_machine_has_stays_published_and_healthy_and_comes_back() {
    let sim = Sim::new(&["H100-80", "H100-80", "H100-80"]).await;
    let bus = sim.node.pci_bus().unwrap();
    let _agent = sim.start(&[ON]);
    let offers = |names: &[String]| (0..3).all(|gpu| names.contains(&format!("gpu-{gpu}-vfio")));
    let (_, before) = sim.cluster.pool_where("offered", |slices| offers(&devices(slices))).await;
    tainted(&sim, "gpu-1", &[]).await;
    let uid = sim.cluster.allocated_claim("c", &[("vm", "gpu-0-vfio")], json!([])).await;
    let first = sim.prepared("c", &uid).await;
    assert_eq!(drivers(&sim, &bus)[0].as_deref(), Some("vfio-pci"));
    // What the others have to say is heard again, so the library is open, and there were looks without the GPU.
    hears_of(&sim, 1).await;
    // The device for administration is withdrawn: there is nothing to open.
    let mut left = devices(&before);
    left.retain(|name| name != "gpu-0-admin");
    let is_left = |slices: &[_]| devices(slices) == left;
    sim.cluster.pool_where("without administration", is_left).await;
    tainted(&sim, "gpu-0", &[]).await;
    assert_eq!(sim.prepared("c", &uid).await, first);
    // Another claim works beside it.
    let other = sim.cluster.allocated_claim("other", &[("a", "gpu-2-mig-1g10gb-19-6")], json!([])).await;
    sim.prepared("other", &other).await;
    sim.unprepared("other", &other).await;
    sim.unprepared("c", &uid).await;
    all_with_nvidia(&sim, &bus);
    hears_of(&sim, 0).await;
    let api: Api<Event> = Api::all(sim.cluster.client.clone());
    let events = api.list(&ListParams::default()).await.unwrap().items;
    let warnings: Vec<_> = events
        .into_iter()
        .filter(|event| event.type_.as_deref() == Some("Warning"))
        .filter_map(|event| event.note)
        .filter(|note| !note.contains("xid") && !note.contains("XID"))
        .collect();
    assert_eq!(warnings, Vec::<String>::new(), "nobody is told of anything but the errors");
    sim.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sigkill_at_any_moment_leaves_no_gpu_without_its_driver() {
    let sim = Sim::new(&["H100-80", "H100-80"]).await;
    let bus = sim.node.pci_bus().unwrap();
    let uid =
        sim.cluster.allocated_claim("c", &[("vm", "gpu-0-vfio"), ("s", "gpu-1-share")], json!([])).await;
    let mut agent = sim.start(&[ON]);
    let first = sim.prepared("c", &uid).await;
    sim.unprepared("c", &uid).await;
    all_with_nvidia(&sim, &bus);
    let mut cut_off = 0;
    for round in 0..12_u64 {
        let delay = Duration::from_micros(2500 * round);
        let (answer, ()) = tokio::join!(sim.try_prepare("c", &uid), async {
            tokio::time::sleep(delay).await;
            agent.kill();
        });
        cut_off += u32::from(answer.is_none());
        agent = sim.start(&[ON]);
        assert_eq!(sim.prepared("c", &uid).await, first, "round {round}");
        assert_eq!(drivers(&sim, &bus)[0].as_deref(), Some("vfio-pci"), "round {round}");
        let (answer, ()) = tokio::join!(sim.try_unprepare("c", &uid), async {
            tokio::time::sleep(delay).await;
            agent.kill();
        });
        cut_off += u32::from(answer.is_none());
        // Also without the switch what is out comes back.
        agent = sim.start(&[]);
        sim.unprepared("c", &uid).await;
        all_with_nvidia(&sim, &bus);
        sim.assert_clean();
        agent.kill();
        agent = sim.start(&[ON]);
    }
    assert!(cut_off > 0, "no kill hit a call");
}
