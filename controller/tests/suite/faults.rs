//! What goes wrong between the controller and the API server, and what must come out all the same.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "test code")]

use crate::common;

use aliquot_control_plane::{Fault, FaultRule, Matcher};
use common::{Cluster, auditor, eventually, fixtures};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use rstest::rstest;
use serde_json::json;
use std::time::Duration;

/// Claims and pods that need every partition of the node, and more.
async fn crowd(cluster: &Cluster, pods: usize) {
    for number in 0..pods {
        let name = format!("p{number}");
        let requests = match number % 3 {
            0 => vec![fixtures::partition("r", "1g.10gb")],
            1 => vec![fixtures::partition("r", "2g.20gb"), fixtures::partition("s", "1g.10gb")],
            _ => vec![fixtures::share("r", "8Gi", "5")],
        };
        cluster.claim(&name, &requests).await;
        cluster.pod(&name, &[&name]).await;
    }
}

async fn all_bound(cluster: &Cluster, pods: usize) {
    for number in 0..pods {
        cluster.bound(&format!("p{number}")).await;
    }
}

fn claims(verb: &str) -> Matcher {
    Matcher::new(verb, "resourceclaims").by("c1")
}

#[rstest]
#[case::conflicts_on_the_finalizer(FaultRule::first(9, claims("patch").subresource(""), Fault::Conflict))]
#[case::conflicts_on_the_status(FaultRule::first(9, claims("patch").subresource("status"), Fault::Conflict))]
#[case::lost_answers(FaultRule::first(6, claims("patch"), Fault::DropAfter))]
#[case::lost_requests(FaultRule::first(6, claims("patch"), Fault::DropBefore))]
#[case::time_outs(FaultRule::first(6, claims("patch"), Fault::Timeout))]
#[case::late_answers(FaultRule::first(20, claims("patch"), Fault::Latency { millis: 40 }))]
#[case::overload(FaultRule::first(6, Matcher::verb("patch").by("c1"), Fault::Status {
    code: 429, reason: "TooManyRequests".to_owned(), message: "slow down".to_owned(), retry_after: Some(0),
}))]
#[case::gates_conflict(FaultRule::first(9, Matcher::new("patch", "pods").by("c1"), Fault::Conflict))]
#[case::watches_end(FaultRule::first(40, Matcher::verb("watch").by("c1"), Fault::WatchClose { after_events: 2 }))]
#[case::watches_break(FaultRule::first(20, Matcher::verb("watch").by("c1"), Fault::WatchReset { after_events: 1 }))]
#[case::watches_expire(FaultRule::first(20, Matcher::verb("watch").by("c1"), Fault::WatchExpire { after_events: 1 }))]
#[case::watches_stall(FaultRule::first(6, Matcher::verb("watch").by("c1"), Fault::WatchStall { after_events: 3, millis: 300 }))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_get_their_devices_once_whatever_goes_wrong(#[case] rule: FaultRule) {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 4).await;
    cluster.add_node("n2", 4).await;
    cluster.handle.faults().add(rule);
    let controller = cluster.controller("c1", &[]).await;
    crowd(&cluster, 12).await;
    all_bound(&cluster, 12).await;
    auditor::check(&cluster.handle);
    for number in 0..12 {
        assert_eq!(auditor::allocations(&cluster.handle, &format!("p{number}")), 1, "p{number}");
    }
    controller.terminate().await;
}

/// All attempts of an allocation are given up on, and done by the API server long after: nobody else has its GPU by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_of_an_allocation_that_may_still_be_written_are_given_to_nobody() {
    const LATE: u64 = 14_000;
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    let mut matches = claims("patch").subresource("status");
    matches.name = Some("a".to_owned());
    let rule = cluster.handle.faults().add(FaultRule::always(matches, Fault::Latency { millis: LATE }));
    for name in ["a", "b"] {
        cluster.claim(name, &[fixtures::partition("r", "7g.80gb")]).await;
        cluster.pod(name, &[name]).await;
        // The second comes when the first has the GPU, as far as anybody knows.
        let hit = || cluster.handle.faults().rules().iter().any(|state| state.hits > 0);
        eventually("a write that hangs", async || hit().then_some(())).await;
    }
    let hits = || cluster.handle.faults().rules().iter().map(|state| state.hits).max();
    eventually("the last attempt", async || (hits()? >= 8).then_some(())).await;
    cluster.handle.faults().remove(rule);
    let bound = async |pod: &str| cluster.get_pod(pod).await?.spec?.node_name;
    eventually("one of the two", async || bound("a").await.or(bound("b").await)).await;
    // Until the last late write has come.
    tokio::time::sleep(Duration::from_millis(LATE)).await;
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

/// As before, and nobody may touch the claim, so that nothing can be done to make the late writes fail: the devices wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_wait_for_a_late_write_also_where_the_claim_cannot_be_changed() {
    const LATE: u64 = 14_000;
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 1).await;
    let controller = cluster.controller("c1", &[]).await;
    let named = |subresource: &str| claims("patch").subresource(subresource).named("a");
    let late = FaultRule::always(named("status"), Fault::Latency { millis: LATE });
    let late = cluster.handle.faults().add(late);
    let denied = FaultRule { skip: 1, ..FaultRule::always(named(""), status(403, "denied by a policy")) };
    let denied = cluster.handle.faults().add(denied);
    for name in ["a", "b"] {
        cluster.claim(name, &[fixtures::partition("r", "7g.80gb")]).await;
        cluster.pod(name, &[name]).await;
        eventually("a write that hangs", async || (cluster.handle.faults().hits(late) > 0).then_some(()))
            .await;
    }
    eventually("attempts to make it fail", async || (cluster.handle.faults().hits(denied) > 0).then_some(()))
        .await;
    assert_eq!(controller.metrics.parked("no_answer").get(), 1);
    cluster.handle.faults().remove(late);
    cluster.bound("a").await;
    // Until the last late write has come.
    tokio::time::sleep(Duration::from_millis(LATE)).await;
    auditor::check(&cluster.handle);
    assert_eq!(auditor::allocations(&cluster.handle, "b"), 0);
    assert_eq!(controller.metrics.parked("no_answer").get(), 0);
    controller.terminate().await;
}

fn status(code: u16, message: &str) -> Fault {
    Fault::Status { code, reason: String::new(), message: message.to_owned(), retry_after: None }
}

/// What one namespace's claims answer is uncertain, and stays so: three times as many as may be written at a time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_of_one_namespace_that_cannot_be_written_stop_no_other() {
    const BAD: usize = 200;
    let cluster = Cluster::start().await;
    for node in ["n1", "n2", "n3", "n4"] {
        cluster.add_node(node, 8).await;
    }
    let namespace = fixtures::object::<Namespace>(json!({"metadata": {"name": "bad"}}));
    cluster.create_global(&namespace).await;
    let in_bad = |subresource: &str| Matcher {
        namespace: Some("bad".to_owned()),
        ..claims("patch").subresource(subresource)
    };
    let fails = || status(500, "etcdserver: request timed out");
    let broken = cluster.handle.faults().add(FaultRule::always(in_bad("status"), fails()));
    let touched = FaultRule { skip: BAD as u64, ..FaultRule::always(in_bad(""), fails()) };
    let touched = cluster.handle.faults().add(touched);
    let controller = cluster.controller("c1", &[]).await;
    let spec = fixtures::spec(&[fixtures::share("r", "1Gi", "1")]);
    let bad: Vec<String> = (0..BAD).map(|number| format!("b{number}")).collect();
    for name in &bad {
        let mut claim = fixtures::claim(name, &spec);
        claim.metadata.namespace = Some("bad".to_owned());
        cluster.create(&claim).await;
        let mut pod = fixtures::pod(name, &[name]);
        pod.metadata.namespace = Some("bad".to_owned());
        cluster.create(&pod).await;
    }
    // As many as were ever written at a time, each to its last attempt and beyond.
    eventually("writes that cannot be made sure", async || {
        let faults = cluster.handle.faults();
        (faults.hits(broken) >= 64 * 8 && faults.hits(touched) > 0).then_some(())
    })
    .await;
    crowd(&cluster, 6).await;
    all_bound(&cluster, 6).await;
    auditor::check(&cluster.handle);
    eventually("all are parked", async || {
        (controller.metrics.parked("server_error").get() == BAD as i64).then_some(())
    })
    .await;
    for rule in [broken, touched] {
        cluster.handle.faults().remove(rule);
    }
    // None of them waits for ever, nor is a turn left with anybody.
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "bad");
    for name in ["b0", "b199"] {
        eventually(&format!("{name} is bound"), async || pods.get(name).await.ok()?.spec?.node_name).await;
    }
    auditor::check(&cluster.handle);
    let metrics = controller.metrics.clone();
    controller.terminate().await;
    assert_eq!(metrics.parked("server_error").get(), 0, "with the leadership everything parked is dropped");
}

/// Claims that the store never takes, beside claims of the same namespace that it takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_that_repeats_for_one_claim_slows_that_claim_alone() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 8).await;
    let large = |number: usize| {
        let matches = claims("patch").subresource("status").named(&format!("large{number}"));
        FaultRule::always(matches, status(500, "etcdserver: request is too large"))
    };
    let rules: Vec<u64> = (0..10).map(|number| cluster.handle.faults().add(large(number))).collect();
    let controller = cluster.controller("c1", &[]).await;
    for number in 0..rules.len() {
        let name = format!("large{number}");
        cluster.claim(&name, &[fixtures::partition("r", "1g.10gb")]).await;
        cluster.pod(&name, &[&name]).await;
    }
    crowd(&cluster, 6).await;
    all_bound(&cluster, 6).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    for rule in rules {
        let hits = cluster.handle.faults().hits(rule);
        assert!((1..=12).contains(&hits), "{hits} attempts, although each answer was definite");
    }
    let events: Api<Event> = Api::namespaced(cluster.client.clone(), "default");
    let about = async |name: &str| {
        let events = events.list(&Default::default()).await.expect("listed").items;
        events.into_iter().find(|event| {
            event.reason.as_deref() == Some("AllocationWriteFailed")
                && event.regarding.as_ref().and_then(|object| object.name.as_deref()) == Some(name)
        })
    };
    let event = about("large0").await.expect("the pod is told");
    assert!(event.note.expect("a note").contains("request is too large"));
    assert!(about("p0").await.is_none());
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_of_the_api_server_is_survived() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 4).await;
    let controller = cluster.controller("c1", &[]).await;
    crowd(&cluster, 3).await;
    all_bound(&cluster, 3).await;
    let user = Matcher { user: Some("c1".to_owned()), ..Matcher::default() };
    let outage = cluster.handle.faults().add(FaultRule::always(user, Fault::DropBefore));
    // Longer than the lease: the controller has to stand back.
    eventually("the controller stands back", async || (controller.metrics.leading.get() == 0).then_some(()))
        .await;
    cluster.claim("late", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.pod("late", &["late"]).await;
    cluster.handle.faults().remove(outage);
    cluster.bound("late").await;
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

/// A controller that dies after `writes` status writes of a pod with three claims, and its
/// successor. kube-scheduler, too, is away in between.
#[rstest]
#[case::before_the_finalizer("patch", "", 1)]
#[case::between_finalizer_and_status("patch", "status", 1)]
#[case::between_the_claims("patch", "status", 2)]
#[case::before_the_last_claim("patch", "status", 3)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_controller_began_its_successor_completes(
    #[case] verb: &str,
    #[case] subresource: &str,
    #[case] nth: u64,
) {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    cluster.add_node("n2", 2).await;
    let matcher = claims(verb).subresource(subresource);
    cluster.handle.faults().add(FaultRule {
        matches: matcher,
        skip: nth - 1,
        times: None,
        fault: Fault::Hang { millis: 600_000 },
    });
    let first = cluster.controller("c1", &[]).await;
    for claim in ["a", "b", "c"] {
        cluster.claim(claim, &[fixtures::partition("r", "2g.20gb")]).await;
    }
    cluster.pod("p", &["a", "b", "c"]).await;
    eventually("the first controller hangs in its writes", async || {
        cluster.handle.faults().rules().iter().any(|state| state.hits >= 4 - nth).then_some(())
    })
    .await;
    first.kill();
    let second = cluster.controller("c2", &[]).await;
    let node = cluster.bound("p").await;
    for claim in ["a", "b", "c"] {
        let devices = cluster.devices(claim).await;
        assert!(devices[0].starts_with(&format!("{node}/")), "{devices:?}");
        assert_eq!(auditor::allocations(&cluster.handle, claim), 1);
    }
    auditor::check(&cluster.handle);
    second.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_terminated_hands_over_at_once() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 4).await;
    // A lease that nobody would wait for.
    let first = cluster.controller("c1", &["--lease-duration", "600s", "--retry-period", "50ms"]).await;
    crowd(&cluster, 3).await;
    all_bound(&cluster, 3).await;
    let second = cluster.controller("c2", &["--lease-duration", "600s", "--retry-period", "50ms"]).await;
    first.terminate().await;
    cluster.claim("late", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.pod("late", &["late"]).await;
    cluster.bound("late").await;
    auditor::check(&cluster.handle);
    second.terminate().await;
}

/// Who holds the lease, and when it was renewed.
fn lease(cluster: &Cluster) -> Option<(String, String)> {
    let lease = cluster.handle.object("coordination.k8s.io", "leases", "default", "aliquot-controller")?;
    let text = |field: &str| lease["spec"][field].as_str().map(str::to_owned);
    Some((text("holderIdentity")?, text("renewTime")?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lease_is_renewed_while_the_leaders_work_keeps_its_runtime() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    let controller = cluster.controller("c1", &["--stall-timeout", "1h"]).await;
    crowd(&cluster, 1).await;
    all_bound(&cluster, 1).await;
    let busy = controller.block();
    let mut seen = std::collections::BTreeSet::new();
    // So often that the lease would have run out three times: it lasts 3 s, and is renewed every 0.4 s.
    eventually("renewals", async || {
        let (holder, renewed) = lease(&cluster)?;
        assert_eq!(holder, "c1");
        seen.insert(renewed);
        (seen.len() > 24).then_some(())
    })
    .await;
    drop(busy);
    cluster.claim("late", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.pod("late", &["late"]).await;
    cluster.bound("late").await;
    controller.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_whose_decisions_stand_still_gives_the_lease_up_and_ends() {
    let cluster = Cluster::start().await;
    cluster.add_node("n1", 2).await;
    // Nobody would wait for such a lease to run out.
    let patient = ["--lease-duration", "600s", "--renew-deadline", "599s", "--retry-period", "50ms"];
    let mut first = cluster.controller("c1", &[&patient[..], &["--stall-timeout", "1s"]].concat()).await;
    crowd(&cluster, 1).await;
    all_bound(&cluster, 1).await;
    let second = cluster.controller("c2", &patient).await;
    let stuck = first.block();
    cluster.claim("late", &[fixtures::partition("r", "1g.10gb")]).await;
    cluster.pod("late", &["late"]).await;
    // While the first is stuck still.
    cluster.bound("late").await;
    assert_eq!(lease(&cluster).expect("a lease").0, "c2");
    assert!(first.pulse.stalled().is_some());
    drop(stuck);
    let said = first.end().await.expect_err("it ends by itself");
    assert!(format!("{said:#}").contains("decisions have not turned"), "{said:#}");
    auditor::check(&cluster.handle);
    second.terminate().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_pods_at_once_never_overlap_while_pods_come_and_go() {
    let cluster = Cluster::start().await;
    for node in ["n1", "n2"] {
        cluster.add_node(node, 2).await;
    }
    cluster.handle.faults().add(FaultRule {
        matches: claims("patch"),
        skip: 5,
        times: Some(15),
        fault: Fault::Conflict,
    });
    let controller = cluster.controller("c1", &[]).await;
    for round in 0..3 {
        for number in 0..10 {
            let name = format!("r{round}-{number}");
            let profile = ["1g.10gb", "2g.20gb", "3g.40gb"][number % 3];
            cluster.claim(&name, &[fixtures::partition("r", profile)]).await;
            cluster.pod(&name, &[&name]).await;
        }
        if round > 0 {
            for number in 0..10 {
                cluster.delete_pod(&format!("r{}-{number}", round - 1)).await;
            }
        }
    }
    for number in 0..10 {
        cluster.bound(&format!("r2-{number}")).await;
    }
    auditor::check(&cluster.handle);
    controller.terminate().await;
}

mod processes {
    //! The real binary, which can be stopped and continued.

    use super::*;
    use std::process::{Child, Command, Stdio};

    struct Process(Child);

    impl Process {
        fn start(cluster: &Cluster, identity: &str, directory: &std::path::Path) -> Self {
            let kubeconfig = directory.join(identity);
            cluster.handle.write_kubeconfig(&kubeconfig, identity).expect("written");
            let child = Command::new(env!("CARGO_BIN_EXE_aliquot-controller"))
                .args(["--namespace", "default", "--identity", identity, "--lease-duration", "2s"])
                .args(["--webhook-addr", "off", "--http-addr", "127.0.0.1:0", "--kubeconfig"])
                .arg(&kubeconfig)
                .stderr(Stdio::null())
                .spawn()
                .expect("started");
            Self(child)
        }

        fn signal(&self, signal: &str) {
            // The shell's own kill: a bare machine has no program of that name.
            let kill = format!("kill {signal} {}", self.0.id());
            let status = Command::new("sh").args(["-c", &kill]).status().expect("a shell runs");
            assert!(status.success());
        }
    }

    impl Drop for Process {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn holder(cluster: &Cluster) -> Option<String> {
        let lease =
            cluster.handle.object("coordination.k8s.io", "leases", "default", "aliquot-controller")?;
        lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_controller_that_slept_through_its_lease_does_not_write_when_it_wakes() {
        let cluster = Cluster::start().await;
        cluster.add_node("n1", 4).await;
        let directory = tempfile::tempdir().expect("a directory");
        let first = Process::start(&cluster, "c1", directory.path());
        cluster.claim("warm", &[fixtures::partition("r", "1g.10gb")]).await;
        cluster.pod("warm", &["warm"]).await;
        cluster.bound("warm").await;
        // Its status writes hang, so that it is stopped with writes under way.
        let hang = cluster
            .handle
            .faults()
            .add(FaultRule::always(claims("patch").subresource("status"), Fault::Hang { millis: 200 }));
        crowd(&cluster, 6).await;
        eventually("writes are under way", async || {
            cluster.handle.faults().rules().iter().any(|state| state.hits > 0).then_some(())
        })
        .await;
        first.signal("-STOP");
        cluster.handle.faults().remove(hang);
        let second = Process::start(&cluster, "c2", directory.path());
        eventually("the second leads", async || (holder(&cluster)? == "c2").then_some(())).await;
        let elected = cluster.handle.revision();
        all_bound(&cluster, 6).await;
        first.signal("-CONT");
        crowd_later(&cluster).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let late: Vec<String> = cluster
            .handle
            .audit(elected)
            .iter()
            .filter(|entry| entry.origin.user == "c1")
            .filter(|entry| matches!(entry.origin.resource.as_str(), "resourceclaims" | "pods" | "nodes"))
            .map(|entry| format!("{} {} {}", entry.origin.verb, entry.origin.resource, entry.name))
            .collect();
        assert_eq!(late, Vec::<String>::new());
        assert_eq!(holder(&cluster).as_deref(), Some("c2"));
        auditor::check(&cluster.handle);
        drop((first, second));
    }

    async fn crowd_later(cluster: &Cluster) {
        for number in 0..4 {
            let name = format!("later{number}");
            cluster.claim(&name, &[fixtures::partition("r", "1g.10gb")]).await;
            cluster.pod(&name, &[&name]).await;
        }
        for number in 0..4 {
            cluster.bound(&format!("later{number}")).await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn gates_are_lifted_when_the_controller_is_switched_off() {
        let cluster = Cluster::start().await;
        for name in ["a", "b"] {
            cluster.claim(name, &[fixtures::partition("r", "1g.10gb")]).await;
            cluster.pod(name, &[name]).await;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let kubeconfig = directory.path().join("admin");
        cluster.handle.write_kubeconfig(&kubeconfig, "admin").expect("written");
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_aliquot-controller"));
        let output =
            command.arg("--lift-gates").arg("--kubeconfig").arg(&kubeconfig).output().await.expect("runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for name in ["a", "b"] {
            let gates = cluster.get_pod(name).await.and_then(|pod| pod.spec?.scheduling_gates);
            assert!(gates.is_none_or(|gates| gates.is_empty()));
        }
    }
}
