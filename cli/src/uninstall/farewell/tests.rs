use super::*;
use crate::args::UninstallArgs;
use aliquot_control_plane::{Controllers, Options};
use aliquot_model::names::{DEFAULT_DRIVER, pool_name};
use kube::api::Patch;
use rstest::rstest;
use serde_json::{Value, json};

#[test]
fn a_farewell_pod_stays_on_its_node_and_needs_no_rights() {
    let template: PodSpec = serde_json::from_value(json!({
        "serviceAccountName": "aliquot-kubelet-plugin",
        "initContainers": [{"name": "install"}],
        "hostNetwork": true,
        "containers": [{
            "name": "kubelet-plugin", "args": ["--mode=controller", "--http-addr=0.0.0.0:8080"], "livenessProbe": {},
            "ports": [{"name": "http", "containerPort": 8080, "hostPort": 8080}],
            "volumeMounts": [{"name": "cdi", "mountPath": "/cdi"}, {"name": "kube-api-access-x", "mountPath": "/t"}],
        }],
        "volumes": [{"name": "cdi"}, {"name": "kube-api-access-x"}],
    }))
    .unwrap();
    let spec = pod(&template, "node-a").spec.unwrap();
    assert_eq!(spec.node_name.as_deref(), Some("node-a"));
    let tolerations = serde_json::to_value(spec.tolerations).unwrap();
    assert_eq!(
        tolerations,
        json!([{"operator": "Exists", "effect": "NoExecute"}]),
        "also while its node is away"
    );
    assert_eq!(spec.service_account_name.as_deref(), Some("aliquot-kubelet-plugin"), "what SCCs go by");
    assert_eq!(spec.automount_service_account_token, Some(false));
    assert_eq!(spec.init_containers, None);
    assert_eq!((spec.affinity, spec.node_selector), (None, None));
    assert_eq!(
        spec.containers[0].args.as_deref(),
        Some(&["--mode=controller", "--http-addr=127.0.0.1:0", "--farewell"].map(str::to_owned)[..])
    );
    assert_eq!(spec.volumes.as_ref().map(Vec::len), Some(1), "no token: {:?}", spec.volumes);
    assert_eq!(spec.containers[0].volume_mounts.as_ref().map(Vec::len), Some(1));
    assert_eq!(spec.containers[0].liveness_probe, None);
    assert_eq!(spec.containers[0].ports, None, "the agent has them while both are there");
}

#[test]
fn a_farewell_pod_can_be_made_of_another_one() {
    let template = object(json!({
        "containers": [{"name": "kubelet-plugin", "args": ["--mode=controller", "--http-addr=0.0.0.0:8080"]}],
    }));
    let first = pod(&template, "node-a");
    let args = |pod: &Pod| pod.spec.clone().unwrap().containers[0].args.clone();
    let second = pod(&first.spec.clone().unwrap(), "node-a");
    assert_eq!(args(&second), args(&first));
}

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A cluster with agents, and a pod with a GPU on n1; a claim of a node that is gone has one, too.
async fn cluster() -> (aliquot_control_plane::Handle, Uninstall) {
    // The claims' pods are only names.
    let options = Options { controllers: Controllers::NONE, ..Options::default() };
    let handle = aliquot_control_plane::serve(options).await.unwrap();
    let config = kube::config::Kubeconfig::from_yaml(&handle.kubeconfig("admin")).unwrap();
    let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await.unwrap();
    let args = UninstallArgs {
        namespace: "default".to_owned(),
        driver_name: DEFAULT_DRIVER.to_owned(),
        cluster: crate::args::ClusterArgs::default(),
        timeout: Duration::from_secs(120),
        yes: true,
    };
    let uninstall = Uninstall { client: kube::Client::try_from(config).unwrap(), args };
    let labels = json!({"app": "agent"});
    let agent = object(json!({
        "metadata": {"name": AGENT},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "kubelet-plugin", "image": "aliquot"}]},
            },
        },
    }));
    let params = PostParams::default();
    uninstall.own::<DaemonSet>().create(&params, &agent).await.unwrap();
    uninstall.all::<Node>().create(&params, &object(json!({"metadata": {"name": "n1"}}))).await.unwrap();
    for node in ["n1", "gone"] {
        let claims = uninstall.own::<ResourceClaim>();
        let claim = object(json!({
            "metadata": {"name": node},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}},
        }));
        claims.create(&params, &claim).await.unwrap();
        let result = json!({
            "request": "r", "driver": DEFAULT_DRIVER, "pool": pool_name(DEFAULT_DRIVER, node), "device": "gpu-0",
        });
        let status = json!({"status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "user", "uid": "u"}],
        }});
        claims.patch_status(node, &Default::default(), &Patch::Merge(status)).await.unwrap();
    }
    (handle, uninstall)
}

const NAME: &str = "aliquot-farewell-n1";

/// As the kubelet says; the pod's UID.
async fn set_phase(uninstall: &Uninstall, phase: &str) -> String {
    set_phase_of(NAME, uninstall, phase).await
}

async fn set_phase_of(name: &str, uninstall: &Uninstall, phase: &str) -> String {
    let status = Patch::Merge(json!({"status": {"phase": phase}}));
    let pods = uninstall.own::<Pod>();
    loop {
        if let Ok(pod) = pods.patch_status(name, &Default::default(), &status).await {
            return pod.metadata.uid.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agents_stay_until_a_farewell_pod_runs_and_one_that_failed_is_made_anew() {
    let (_handle, uninstall) = cluster().await;
    let handing_over = hand_over(&uninstall);
    let kubelet = async {
        let first = set_phase(&uninstall, "Failed").await;
        let pods = uninstall.own::<Pod>();
        let second = loop {
            let pod = pods.get_opt(NAME).await.unwrap();
            if let Some(uid) = pod.and_then(|pod| pod.metadata.uid).filter(|uid| *uid != first) {
                break uid;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        // Longer than it looks: it waits.
        tokio::time::sleep(LOOK * 3).await;
        second
    };
    tokio::pin!(handing_over);
    let second = tokio::select! {
        result = &mut handing_over => panic!("over before a farewell pod ran: {result:?}"),
        second = kubelet => second,
    };
    assert_eq!(set_phase(&uninstall, "Running").await, second);
    handing_over.await.unwrap();
    let pods = uninstall.own::<Pod>().list(&ListParams::default()).await.unwrap();
    assert_eq!(
        pods.iter().map(ResourceExt::name_any).collect::<Vec<_>>(),
        [NAME],
        "none for a node that is gone"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_farewell_pod_of_an_earlier_uninstall_is_none_of_this_one() {
    let (_handle, uninstall) = cluster().await;
    let earlier = pod(&object(json!({"containers": [{"name": "a", "image": "a"}]})), "n1");
    uninstall.own::<Pod>().create(&PostParams::default(), &earlier).await.unwrap();
    let earlier = set_phase(&uninstall, "Succeeded").await;
    let kubelet = async {
        while set_phase(&uninstall, "Succeeded").await == earlier {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (result, ()) = tokio::join!(hand_over(&uninstall), kubelet);
    result.unwrap();
}

#[rstest]
#[case::first(Standing::Absent, false, true, false, Step::Make)]
#[case::answers_for_claims(Standing::Runs, false, true, false, Step::Leave)]
#[case::works(Standing::Runs, true, false, false, Step::Wait)]
#[case::found_claims(Standing::Runs, true, false, true, Step::Leave)]
#[case::cleaned_up(Standing::Completed, true, false, false, Step::Remove)]
#[case::cleaned_up_in_the_end(Standing::Completed, true, false, true, Step::Remove)]
#[case::beside_an_agent(Standing::Completed, true, true, false, Step::Replace)]
#[case::an_agent_that_stays(Standing::Completed, true, true, true, Step::GiveUp)]
#[case::of_an_earlier_run(Standing::Completed, false, false, false, Step::Replace)]
#[case::refused(Standing::Failed, true, false, false, Step::Replace)]
#[case::node_is_down(Standing::Starting, true, true, true, Step::GiveUp)]
#[case::never_ran(Standing::Starting, false, false, true, Step::GiveUp)]
#[case::being_deleted_by_somebody(Standing::Ending, false, false, true, Step::Leave)]
fn a_farewell_pod_comes_in_each_agents_place(
    #[case] standing: Standing,
    #[case] made: bool,
    #[case] agent: bool,
    #[case] late: bool,
    #[case] expected: Step,
) {
    assert_eq!(next(standing, made, agent, late), expected);
}

async fn names(uninstall: &Uninstall) -> Vec<String> {
    let pods = uninstall.own::<Pod>().list(&ListParams::default()).await.unwrap();
    pods.iter().map(ResourceExt::name_any).collect()
}

/// An agent's pod on a node.
async fn agent_on(uninstall: &Uninstall, node: &str) {
    let labels =
        json!({"app.kubernetes.io/name": "aliquot", "app.kubernetes.io/component": "kubelet-plugin"});
    let agent = object(json!({
        "metadata": {"name": format!("agent-{node}"), "labels": labels},
        "spec": {"nodeName": node, "containers": [{"name": "kubelet-plugin", "image": "aliquot"}]},
    }));
    uninstall.own::<Pod>().create(&PostParams::default(), &agent).await.unwrap();
}

/// As kubelets end the pods that are to be deleted.
async fn end(uninstall: &Uninstall, name: &str) {
    let now = DeleteParams::default().grace_period(0);
    let pods = uninstall.own::<Pod>();
    while let Some(pod) = pods.get_opt(name).await.unwrap() {
        if pod.metadata.deletion_timestamp.is_some() {
            let _ = pods.delete(name, &now).await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_go_with_the_agents_also_after_a_command_that_was_interrupted() {
    let (_handle, uninstall) = cluster().await;
    let params = PostParams::default();
    for node in ["n2", "n3"] {
        uninstall.all::<Node>().create(&params, &object(json!({"metadata": {"name": node}}))).await.unwrap();
    }
    let template = template(&uninstall).await.unwrap().unwrap();
    for node in ["n1", "n2"] {
        uninstall.own::<Pod>().create(&params, &pod(&template, node)).await.unwrap();
    }
    // One answers for claims. The other completed while the agent was there, whose files it left alone.
    set_phase(&uninstall, "Running").await;
    let earlier = set_phase_of("aliquot-farewell-n2", &uninstall, "Succeeded").await;
    for node in ["n1", "n2", "n3", "gone"] {
        agent_on(&uninstall, node).await;
    }
    // As after an interruption: the agents are known by their pods alone.
    let alone =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    uninstall.own::<DaemonSet>().delete(AGENT, &alone).await.unwrap();
    let kubelets = async {
        for node in ["n1", "n2", "n3", "gone"] {
            end(&uninstall, &format!("agent-{node}")).await;
        }
        set_phase_of("aliquot-farewell-n3", &uninstall, "Succeeded").await;
        while set_phase_of("aliquot-farewell-n2", &uninstall, "Succeeded").await == earlier {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (kept, ()) = tokio::join!(replace_agents(&uninstall), kubelets);
    assert_eq!(kept.unwrap(), Vec::<String>::new());
    assert_eq!(names(&uninstall).await, [NAME]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_answer_keeps_its_files_and_is_named() {
    let (_handle, mut uninstall) = cluster().await;
    uninstall.args.timeout = Duration::from_secs(1);
    agent_on(&uninstall, "n1").await;
    // It was reached by nobody: its agent does not end, and its farewell pod does not begin.
    let agents = uninstall.own::<Pod>();
    let held = json!({"metadata": {"finalizers": ["example.com/node-is-down"]}});
    agents.patch("agent-n1", &Default::default(), &Patch::Merge(held)).await.unwrap();
    let refused = replace_agents(&uninstall).await.unwrap_err().to_string();
    assert!(
        refused.contains("claims are in use, and no farewell pod answers for them: node n1"),
        "{refused}"
    );
    assert_eq!(names(&uninstall).await, ["agent-n1", NAME], "it may come to run yet");
    uninstall.own::<ResourceClaim>().delete("n1", &DeleteParams::default()).await.unwrap();
    let kept = replace_agents(&uninstall).await.unwrap();
    assert_eq!(kept, ["node n1: Pending", "pod agent-n1 does not end"]);
    assert_eq!(names(&uninstall).await, ["agent-n1"]);
    // Nobody here takes off the finalizer by which its pods are let go.
    let agents = uninstall.own::<DaemonSet>().get_opt(AGENT).await.unwrap();
    assert!(agents.is_none_or(|agents| agents.metadata.deletion_timestamp.is_some()));
}

#[test]
fn why_a_farewell_pod_does_not_run_is_told() {
    let pod = object(json!({"status": {"phase": "Failed", "reason": "NodePorts", "message": ""}}));
    assert_eq!(told("n1", Some(&pod)), "node n1: Failed (NodePorts)");
    assert_eq!(told("n1", None), "node n1: not there");
    let leaving = object(json!({
        "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"phase": "Running"},
    }));
    assert_eq!(standing(Some(&leaving)), Standing::Ending);
}
