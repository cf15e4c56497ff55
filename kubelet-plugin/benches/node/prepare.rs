//! Prepares and unprepares, timed at the kubelet's end of the socket.

use crate::agent::{Agent, Bench};
use crate::common::cluster::claim;
use crate::figure::Figure;
use crate::times::Times;
use aliquot_proto::dra::v1;
use futures::future::join_all;
use serde_json::json;
use std::time::{Duration, Instant};
use tonic::transport::Channel;

type Kubelet = v1::dra_plugin_client::DraPluginClient<Channel>;

/// What is timed, and the device of each.
const KINDS: [(&str, &str); 3] =
    [("whole", "gpu-0"), ("partition", "gpu-1-mig-1g10gb-19-6"), ("share", "gpu-2-share")];

pub(crate) async fn prepare(kubelet: &mut Kubelet, claims: Vec<v1::Claim>) {
    let request = v1::NodePrepareResourcesRequest { claims };
    let answer = kubelet.node_prepare_resources(request).await.expect("an answer").into_inner();
    for (uid, claim) in answer.claims {
        assert_eq!(claim.error, "", "claim {uid}");
    }
}

pub(crate) async fn unprepare(kubelet: &mut Kubelet, claims: Vec<v1::Claim>) {
    let request = v1::NodeUnprepareResourcesRequest { claims };
    let answer = kubelet.node_unprepare_resources(request).await.expect("an answer").into_inner();
    for (uid, claim) in answer.claims {
        assert_eq!(claim.error, "", "claim {uid}");
    }
}

/// How long the API server takes for a claim, as the text that an agent gets.
async fn asked(bench: &Bench, name: &str) -> Duration {
    let path = format!("/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/{name}");
    let request = axum::http::Request::get(path).body(Vec::new()).expect("a request");
    let started = Instant::now();
    bench.cluster.client.request_text(request).await.expect("a claim");
    started.elapsed()
}

/// What calls took.
#[derive(Default)]
struct Taken {
    all: Vec<Duration>,
    driver: Vec<Duration>,
    ours: Vec<Duration>,
}

impl Taken {
    /// Times one, of which the API server takes about `api`.
    async fn time(&mut self, agent: &Agent, api: Duration, call: impl Future<Output = ()>) {
        let before = agent.driver_time().await;
        let started = Instant::now();
        call.await;
        let all = started.elapsed();
        let driver = agent.driver_time().await.saturating_sub(before);
        self.all.push(all);
        self.driver.push(driver);
        self.ours.push(all.saturating_sub(driver + api));
    }
}

/// Of whole GPUs, partitions and shares, each alone.
pub(crate) async fn figures(
    bench: &Bench,
    agent: &Agent,
    samples: usize,
    figure: &impl Fn(&str, f64, &str, f64) -> Figure,
) -> Vec<Figure> {
    let mut kubelet = bench.cluster.kubelet().await;
    // The GPU stays in MIG mode with it: what a switch of the mode takes is the driver's.
    let uid = bench.cluster.allocated_claim("stays", &[("r", "gpu-1-mig-1g10gb-19-0")], json!([])).await;
    prepare(&mut kubelet, vec![claim("stays", &uid)]).await;
    let mut empty = Vec::new();
    for _ in 0..samples {
        let started = Instant::now();
        prepare(&mut kubelet, Vec::new()).await;
        empty.push(started.elapsed());
    }
    let empty = Times::of(empty);
    let mut figures = Vec::new();
    for (kind, device) in KINDS {
        let uid = bench.cluster.allocated_claim(kind, &[("r", device)], json!([])).await;
        let claims = || vec![claim(kind, &uid)];
        let (mut prepares, mut unprepares) = (Taken::default(), Taken::default());
        for _ in 0..samples {
            let asked = asked(bench, kind).await;
            prepares.time(agent, asked, prepare(&mut kubelet, claims())).await;
            unprepares.time(agent, Duration::ZERO, unprepare(&mut kubelet, claims())).await;
        }
        for (call, taken) in [("prepare", prepares), ("unprepare", unprepares)] {
            let ours = Times::of(taken.ours).percentile(99);
            let unit = "ms without what the API server and the driver took; baseline: the goal";
            figures.push(figure(&format!("node.{call}.{kind}.ours_p99_ms"), ours, unit, 2.0));
            let (all, driver) = (Times::of(taken.all), Times::of(taken.driver));
            for percent in [50, 99] {
                figures.push(figure(
                    &format!("node.{call}.{kind}.p{percent}_ms"),
                    all.percentile(percent),
                    "ms at the kubelet's end; baseline: the same of a call without claims",
                    empty.percentile(percent),
                ));
            }
            let unit = "ms of that in the driver; baseline: all of it";
            let name = format!("node.{call}.{kind}.driver_p50_ms");
            figures.push(figure(&name, driver.percentile(50), unit, all.percentile(50)));
        }
        let cpu = agent.cpu();
        for _ in 0..samples {
            prepare(&mut kubelet, claims()).await;
            unprepare(&mut kubelet, claims()).await;
        }
        let each = (agent.cpu() - cpu).as_secs_f64() * 1e3 / samples as f64;
        let unit = "ms of processors for one of each, and what follows from them; baseline: 4";
        figures.push(figure(&format!("node.{kind}.cpu_ms"), each, unit, 4.0));
    }
    unprepare(&mut kubelet, vec![claim("stays", &uid)]).await;
    figures
}

/// Claims of many pods at once: shares of six GPUs, and partitions of two.
pub(crate) struct Hundred(Vec<v1::Claim>);

impl Hundred {
    pub(crate) async fn allocate(bench: &Bench) -> Self {
        let mut claims = Vec::new();
        for at in 0..86 {
            let capacity = json!({"memory": "4Gi", "cores": "5", "slots": "1"});
            let result = json!({"request": "r", "device": format!("gpu-{}-share", 2 + at % 6),
                "shareID": format!("0d5f5f9e-0b6c-4e0d-8a44-6c1d0d4f3f{at:02x}"), "consumedCapacity": capacity});
            let name = format!("share-{at}");
            claims.push((bench.cluster.allocated(&name, vec![result], json!([])).await, name));
        }
        for at in 0..14 {
            let device = format!("gpu-{}-mig-1g10gb-19-{}", at / 7, at % 7);
            let name = format!("partition-{at}");
            claims.push((bench.cluster.allocated_claim(&name, &[("r", &device)], json!([])).await, name));
        }
        Self(claims.iter().map(|(uid, name)| claim(name, uid)).collect())
    }

    /// Milliseconds until the last of them is prepared, a call each.
    pub(crate) async fn prepare(&self, bench: &Bench) -> f64 {
        let kubelet = bench.cluster.kubelet().await;
        let started = Instant::now();
        join_all(self.0.iter().map(|claim| {
            let mut kubelet = kubelet.clone();
            async move { prepare(&mut kubelet, vec![claim.clone()]).await }
        }))
        .await;
        started.elapsed().as_secs_f64() * 1e3
    }

    pub(crate) async fn unprepare(&self, bench: &Bench) {
        unprepare(&mut bench.cluster.kubelet().await, self.0.clone()).await;
    }
}

/// Prepares and unprepares one share so many times.
pub(crate) async fn cycles(bench: &Bench, uid: &str, count: usize) {
    let mut kubelet = bench.cluster.kubelet().await;
    for _ in 0..count {
        prepare(&mut kubelet, vec![claim("cycled", uid)]).await;
        unprepare(&mut kubelet, vec![claim("cycled", uid)]).await;
    }
}
