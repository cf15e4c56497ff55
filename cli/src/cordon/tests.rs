use super::*;
use crate::args::{AcknowledgeArgs, Args, Command};
use aliquot_control_plane::{Controllers, Handle, Options};
use clap::Parser;
use kube::api::PostParams;
use rstest::rstest;

const DRIVER: &str = names::DEFAULT_DRIVER;
const UUID: &str = "GPU-00000001-0000-0000-0000-000000000000";
const OTHER: &str = "GPU-00000002-0000-0000-0000-000000000000";

/// Node n1 with two GPUs, as its agent would publish them, with this taint on the first.
async fn cluster(taint: Option<&str>) -> (Handle, Client) {
    let options =
        Options { controllers: Controllers::NONE, namespaces: vec!["team".into()], ..Options::default() };
    let plane = aliquot_control_plane::serve(options).await.unwrap();
    let client = Client::try_from(kube::Config::new(plane.url().parse().unwrap())).unwrap();
    let node = serde_json::from_value(json!({"metadata": {"name": "n1"}})).unwrap();
    Api::<Node>::all(client.clone()).create(&PostParams::default(), &node).await.unwrap();
    let device = |name: &str, uuid: &str, tainted: bool| {
        let taint = taint
            .filter(|_| tainted)
            .map(|effect| json!({"key": names::cordoned_taint(DRIVER), "effect": effect}));
        json!({"name": name, "taints": taint.into_iter().collect::<Vec<_>>(),
               "attributes": {"uuid": {"string": uuid}, "productName": {"string": "NVIDIA T4"}}})
    };
    let slice = serde_json::from_value(json!({
        "metadata": {"name": "s1"},
        "spec": {
            "driver": DRIVER, "nodeName": "n1",
            "pool": {"name": names::pool_name(DRIVER, "n1"), "generation": 1, "resourceSliceCount": 1},
            "devices": [device("gpu-0", UUID, true), device("gpu-0-share", UUID, true),
                        device("gpu-0-admin", UUID, false), device("gpu-1", OTHER, false)],
        },
    }))
    .unwrap();
    Api::<ResourceSlice>::all(client.clone()).create(&PostParams::default(), &slice).await.unwrap();
    (plane, client)
}

/// A claim with this device, for this pod.
async fn claim(client: &Client, name: &str, device: &str, pod: Option<&str>) {
    let api: Api<ResourceClaim> = Api::namespaced(client.clone(), "team");
    let claim = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "c"}}]}},
    }))
    .unwrap();
    api.create(&PostParams::default(), &claim).await.unwrap();
    let pods: Vec<Value> =
        pod.iter().map(|pod| json!({"resource": "pods", "name": pod, "uid": format!("uid-{pod}")})).collect();
    let status = json!({"status": {"reservedFor": pods, "allocation": {"devices": {"results": [
        {"request": "r", "driver": DRIVER, "pool": names::pool_name(DRIVER, "n1"), "device": device}]}}}});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
}

fn cordon_args(line: &str) -> CordonArgs {
    match Args::try_parse_from(format!("aliquot cordon {line}").split_whitespace()).unwrap().command {
        Command::Cordon(args) => args,
        other => panic!("{other:?}"),
    }
}

fn uncordon_args(line: &str) -> UncordonArgs {
    match Args::try_parse_from(format!("aliquot uncordon {line}").split_whitespace()).unwrap().command {
        Command::Uncordon(args) => args,
        other => panic!("{other:?}"),
    }
}

async fn cordoned(client: &Client, args: &CordonArgs) -> Result<String> {
    let gpu = find(client, &args.driver_name, &args.gpu, args.node.as_deref()).await?;
    cordon(client, &gpu, args).await
}

fn acknowledge_args(line: &str) -> AcknowledgeArgs {
    match Args::try_parse_from(format!("aliquot acknowledge {line}").split_whitespace()).unwrap().command {
        Command::Acknowledge(args) => args,
        other => panic!("{other:?}"),
    }
}

async fn acknowledgement(client: &Client) -> Option<String> {
    let node = Api::<Node>::all(client.clone()).get("n1").await.unwrap();
    let key = aliquot_model::acknowledge::key(&GpuUuid::parse(UUID).unwrap());
    node.annotations().get(&key).cloned()
}

async fn annotation(client: &Client) -> Option<String> {
    let node = Api::<Node>::all(client.clone()).get("n1").await.unwrap();
    node.annotations().get(&key(&GpuUuid::parse(UUID).unwrap())).cloned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cordon_says_who_has_the_gpu_and_how_to_undo_it() {
    let (_plane, client) = cluster(None).await;
    claim(&client, "mine", "gpu-0-share", Some("web-1")).await;
    claim(&client, "kept", "gpu-0", None).await;
    claim(&client, "elsewhere", "gpu-1", Some("web-2")).await;
    let said = cordoned(&client, &cordon_args("gpu-0 --node n1 --reason INC-7")).await.unwrap();
    assert_eq!(
        said,
        format!(
            "gpu-0 of node n1 ({UUID}, NVIDIA T4): cordoned; its node's agent gives its devices the taint \
             {DRIVER}/cordoned:NoSchedule, and no claim gets one that does not tolerate it\n\
             2 claims use it now; pods keep running until they end:\n  team/kept: gpu-0, no pod\n  \
             team/mine: gpu-0-share, pod web-1\nto put it into service again: aliquot uncordon {UUID}"
        )
    );
    assert_eq!(annotation(&client).await.as_deref(), Some("NoSchedule: INC-7"));

    let said = cordoned(&client, &cordon_args(&format!("{UUID} --evict"))).await.unwrap();
    assert!(said.contains("/cordoned:NoExecute") && said.contains("pods are evicted"), "{said}");
    assert_eq!(annotation(&client).await.as_deref(), Some("NoExecute"));

    let said = uncordon(&client, &uncordon_args("gpu-0 --node n1")).await.unwrap();
    assert_eq!(said, format!("gpu-0 of node n1 ({UUID}, NVIDIA T4) is not cordoned any more"));
    assert_eq!(annotation(&client).await, None);
    let said = uncordon(&client, &uncordon_args(UUID)).await.unwrap();
    assert!(said.ends_with("is not cordoned"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_is_gone_can_be_uncordoned() {
    let (_plane, client) = cluster(None).await;
    cordoned(&client, &cordon_args(UUID)).await.unwrap();
    Api::<ResourceSlice>::all(client.clone()).delete("s1", &Default::default()).await.unwrap();
    let said = uncordon(&client, &uncordon_args(&format!("{UUID} --node n2"))).await.unwrap_err().to_string();
    assert!(said.contains("is not there"), "{said}");
    let said = uncordon(&client, &uncordon_args(UUID)).await.unwrap();
    assert_eq!(said, format!("GPU {UUID} of node n1, which is not published now, is not cordoned any more"));
    assert_eq!(annotation(&client).await, None);
}

#[rstest]
#[case("GPU-0badcafe", "GPU GPU-0badcafe is not on any node. One that is cordoned is not published")]
#[case("gpu-7 --node n1", "its UUID. There are:\n  gpu-0 of node n1 (GPU-00000001-")]
#[case("gpu-0 --node n2", "gpu-0 is not there: no GPU is published of node n2; is its node agent running")]
#[case("GPU-00000001-0000-0000-0000-000000000000 --node n2", "is not on node n2: it is gpu-0 of node n1")]
#[case("gpu-0", "say which with --node")]
#[case("gpu-0-share --node n1", "names no GPU")]
#[case("0", "names no GPU")]
#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_is_unknown_is_refused_with_those_that_there_are(
    #[case] line: &str,
    #[case] reason: &str,
) {
    let (_plane, client) = cluster(None).await;
    let said = cordoned(&client, &cordon_args(line)).await.unwrap_err().to_string();
    assert!(said.contains(reason), "{said}");
    let node = Api::<Node>::all(client).get("n1").await.unwrap();
    assert!(node.annotations().is_empty());
}

#[rstest]
#[case::not_yet(None, "", false)]
#[case::as_wanted(Some("NoSchedule"), "", true)]
#[case::milder_than_wanted(Some("NoSchedule"), " --evict", false)]
#[case::evicts(Some("NoExecute"), " --evict", true)]
#[tokio::test(flavor = "multi_thread")]
async fn what_the_nodes_agent_does_not_publish_is_said(
    #[case] published: Option<&str>,
    #[case] flags: &str,
    #[case] done: bool,
) {
    let (_plane, client) = cluster(published).await;
    let args = cordon_args(&format!("{UUID}{flags}"));
    let gpu = find(&client, DRIVER, UUID, None).await.unwrap();
    let waited = wait(&client, &gpu, &args, Duration::ZERO).await;
    match waited {
        Ok(published) => assert!(done && published == Published::Tainted),
        Err(error) => {
            let said = error.to_string();
            assert!(
                !done
                    && said.contains("agent of node n1")
                    && said.ends_with("Devices without the taint: gpu-0, gpu-0-share"),
                "{said}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_says_what_it_is_about_and_that_something_stays() {
    let (_plane, client) = cluster(None).await;
    let args = acknowledge_args("gpu-0 --node n1 --reason INC-7");
    let gpu = find(&client, DRIVER, "gpu-0", Some("n1")).await.unwrap();
    let now = "2026-11-24T18:00:00.25Z".parse().unwrap();
    let none = acknowledge::errors(&client, &gpu, DRIVER).await.unwrap();
    let said = acknowledge::acknowledge(&client, &gpu, &none, &args, now).await.unwrap();
    assert_eq!(
        said,
        format!(
            "gpu-0 of node n1 ({UUID}, NVIDIA T4): errors until 2026-11-24T18:00:00.25Z are acknowledged; no taint for \
             errors is published of it, as where the API server keeps no device taints (feature gate DRADeviceTaints), \
             so it was not verified that anything is cleared. The event GpuAcknowledged says what is: kubectl events \
             --for node/n1. What happens later counts again"
        )
    );
    assert_eq!(acknowledgement(&client).await.as_deref(), Some("2026-11-24T18:00:00.25Z INC-7"));
    acknowledge::wait(&client, &gpu, DRIVER, Duration::ZERO).await.unwrap();

    let taint =
        json!([{"key": names::condition_taint(DRIVER, "xid"), "value": "62", "effect": "NoSchedule"}]);
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let mut slice = serde_json::to_value(slices.get("s1").await.unwrap()).unwrap();
    slice["spec"]["devices"][1]["taints"] = taint;
    slices.replace("s1", &PostParams::default(), &serde_json::from_value(slice).unwrap()).await.unwrap();
    let shown = format!("{DRIVER}/xid=62:NoSchedule");
    let published = acknowledge::errors(&client, &gpu, DRIVER).await.unwrap();
    let said = acknowledge::acknowledge(&client, &gpu, &published, &args, now).await.unwrap();
    assert!(said.contains(&format!("published are {shown}")) && !said.contains("verified"), "{said}");
    let stays = acknowledge::wait(&client, &gpu, DRIVER, Duration::ZERO).await.unwrap_err().to_string();
    assert!(stays.contains(&shown) && stays.contains("errors since"), "{stays}");
    assert!(stays.contains("clocks differ") && stays.contains("AcknowledgementIgnored"), "{stays}");
    let other = find(&client, DRIVER, OTHER, None).await.unwrap();
    acknowledge::wait(&client, &other, DRIVER, Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_a_gpu_that_is_not_published_are_acknowledged_by_uuid_and_node_and_nothing_is_claimed() {
    let (_plane, client) = cluster(None).await;
    let now = "2026-11-24T18:00:00Z".parse().unwrap();
    let unpublished = async |line: &str| {
        let args = acknowledge_args(line);
        let unknown = find(&client, DRIVER, &args.gpu, args.node.as_deref()).await.unwrap_err();
        acknowledge::unpublished(&client, unknown, &args, now).await.map_err(|error| format!("{error:#}"))
    };
    // One that is published elsewhere, or is not named by its UUID, is not meant.
    for (line, reason) in [
        (format!("{UUID} --node n2"), "is not on node n2: it is gpu-0 of node n1"),
        ("gpu-7 --node n1".to_owned(), "gpu-7 is not on node n1"),
    ] {
        let said = unpublished(&line).await.unwrap_err();
        assert!(said.contains(reason), "{said}");
    }
    Api::<ResourceSlice>::all(client.clone()).delete("s1", &Default::default()).await.unwrap();
    let said = unpublished(UUID).await.unwrap_err();
    assert!(said.contains("--node") && said.contains("is not there"), "{said}");
    assert_eq!(acknowledgement(&client).await, None);
    let said = unpublished(&format!("{UUID} --node n1")).await.unwrap();
    assert!(said.contains("which is not published now") && said.contains("was not verified"), "{said}");
    assert_eq!(acknowledgement(&client).await.as_deref(), Some("2026-11-24T18:00:00Z"));
}
