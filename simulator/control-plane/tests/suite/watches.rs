//! Watches and the reflector, when all is well and when connections break.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::{client, eventually, start};
use aliquot_control_plane::{Fault, FaultRule, Matcher, Options, WatchEnd};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, Client};
use serde_json::json;

async fn make(api: &Api<ConfigMap>, name: &str) -> ConfigMap {
    let object = serde_json::from_value(json!({"metadata": {"name": name, "labels": {"a": "b"}}})).unwrap();
    api.create(&PostParams::default(), &object).await.unwrap()
}

fn maps(client: &Client) -> Api<ConfigMap> {
    Api::namespaced(client.clone(), "default")
}

/// Tries again at once, nearly: the pauses of real controllers are not what is tested here.
#[derive(Clone)]
struct Quick;

impl Iterator for Quick {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(20))
    }
}

impl Backoff for Quick {
    fn reset(&mut self) {}
}

/// A store that follows the config maps, as a controller has it.
fn follow(client: &Client, config: watcher::Config) -> reflector::Store<ConfigMap> {
    let (store, writer) = reflector::store();
    let stream = watcher(maps(client), config).backoff(Quick).reflect(writer).touched_objects();
    tokio::spawn(stream.for_each(|_| async {}));
    store
}

fn names(store: &reflector::Store<ConfigMap>) -> BTreeSet<String> {
    store.state().iter().filter_map(|o| o.metadata.name.clone()).collect()
}

async fn until_names(store: &reflector::Store<ConfigMap>, want: &[&str]) {
    let want: BTreeSet<String> = want.iter().map(|s| (*s).to_owned()).collect();
    eventually(&format!("the store holds {want:?}"), async || (names(store) == want).then_some(())).await;
}

#[tokio::test]
async fn a_watch_goes_on_from_a_version() {
    let (_handle, client) = start(Options::default()).await;
    let api = maps(&client);
    let first = make(&api, "a").await;
    make(&api, "b").await;
    api.patch("a", &PatchParams::default(), &Patch::Merge(json!({"data": {"x": "y"}}))).await.unwrap();
    api.delete("b", &DeleteParams::default()).await.unwrap();
    let version = first.metadata.resource_version.unwrap();
    let events: Vec<_> =
        api.watch(&WatchParams::default(), &version).await.unwrap().take(3).try_collect().await.unwrap();
    let shown: Vec<String> = events
        .iter()
        .map(|e| match e {
            WatchEvent::Added(o) => format!("added {}", o.metadata.name.as_deref().unwrap()),
            WatchEvent::Modified(o) => format!("modified {}", o.metadata.name.as_deref().unwrap()),
            WatchEvent::Deleted(o) => format!("deleted {}", o.metadata.name.as_deref().unwrap()),
            other => format!("{other:?}"),
        })
        .collect();
    assert_eq!(shown, ["added b", "modified a", "deleted b"]);
}

#[tokio::test]
async fn an_object_that_leaves_the_selection_is_shown_as_deleted() {
    let (_handle, client) = start(Options::default()).await;
    let api = maps(&client);
    let version = make(&api, "a").await.metadata.resource_version.unwrap();
    let patch = |label| Patch::Merge(json!({"metadata": {"labels": {"a": label}}}));
    api.patch("a", &PatchParams::default(), &patch("other")).await.unwrap();
    api.patch("a", &PatchParams::default(), &patch("b")).await.unwrap();
    let params = WatchParams::default().labels("a=b");
    let events: Vec<_> = api.watch(&params, &version).await.unwrap().take(2).try_collect().await.unwrap();
    assert!(
        matches!(&events[0], WatchEvent::Deleted(_)) && matches!(&events[1], WatchEvent::Added(_)),
        "{events:?}"
    );
}

#[tokio::test]
async fn a_version_out_of_history_is_gone() {
    let (handle, client) = start(Options::default()).await;
    let api = maps(&client);
    let version = make(&api, "a").await.metadata.resource_version.unwrap();
    make(&api, "b").await;
    handle.compact();
    let events: Vec<_> =
        api.watch(&WatchParams::default(), &version).await.unwrap().take(1).try_collect().await.unwrap();
    assert!(matches!(&events[0], WatchEvent::Error(e) if e.code == 410), "{events:?}");
}

#[tokio::test]
async fn idle_watches_get_bookmarks() {
    let options = Options { bookmark_interval: Duration::from_millis(20), ..Options::default() };
    let (handle, client) = start(options).await;
    let api = maps(&client);
    let version = make(&api, "a").await.metadata.resource_version.unwrap();
    // A write elsewhere moves the version on.
    let pods: Api<k8s_openapi::api::core::v1::ServiceAccount> = Api::namespaced(client.clone(), "default");
    pods.create(&PostParams::default(), &serde_json::from_value(json!({"metadata": {"name": "s"}})).unwrap())
        .await
        .unwrap();
    let mut events = api.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    let event = events.try_next().await.unwrap().unwrap();
    let WatchEvent::Bookmark(bookmark) = event else { panic!("{event:?}") };
    assert_eq!(bookmark.metadata.resource_version, handle.revision().to_string());
}

#[rstest::rstest]
#[case::list_then_watch(watcher::Config::default())]
#[case::paged(watcher::Config::default().page_size(1))]
#[case::streaming_list(watcher::Config::default().streaming_lists())]
#[tokio::test]
async fn a_reflector_follows_all_changes(#[case] config: watcher::Config) {
    let (_handle, client) = start(Options::default()).await;
    let api = maps(&client);
    make(&api, "a").await;
    make(&api, "b").await;
    let store = follow(&client, config);
    until_names(&store, &["a", "b"]).await;
    make(&api, "c").await;
    api.delete("a", &DeleteParams::default()).await.unwrap();
    until_names(&store, &["b", "c"]).await;
}

#[rstest::rstest]
#[case::closed(WatchEnd::Close)]
#[case::reset(WatchEnd::Reset)]
#[case::expired(WatchEnd::Expire)]
#[tokio::test]
async fn a_reflector_survives_the_end_of_its_watch(#[case] end: WatchEnd) {
    let (handle, client) = start(Options::default()).await;
    let api = maps(&client);
    let matcher = Matcher::new("watch", "configmaps");
    let store = follow(&client, watcher::Config::default());
    for name in ["a", "b", "c"] {
        eventually("a watch is open", async || (handle.faults().open_watches(&matcher) == 1).then_some(()))
            .await;
        assert_eq!(handle.faults().end_watches(&matcher, end), 1);
        make(&api, name).await;
    }
    until_names(&store, &["a", "b", "c"]).await;
}

#[tokio::test]
async fn watches_that_break_again_and_again_lose_nothing() {
    let (handle, client) = start(Options::default()).await;
    let api = maps(&client);
    let reader = crate::common::client(&handle, "reader").await;
    let rule = FaultRule::first(
        4,
        Matcher::new("watch", "configmaps").by("reader"),
        Fault::WatchReset { after_events: 1 },
    );
    let id = handle.faults().add(rule);
    let store = follow(&reader, watcher::Config::default());
    for i in 0..8 {
        make(&api, &format!("m{i}")).await;
    }
    until_names(&store, &["m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7"]).await;
    assert!(handle.faults().hits(id) >= 1);
}

#[tokio::test]
async fn an_outage_ends_and_the_reflector_catches_up() {
    let (handle, client) = start(Options::default()).await;
    let store = follow(&client, watcher::Config::default());
    make(&maps(&client), "a").await;
    until_names(&store, &["a"]).await;
    handle.faults().set_outage(true);
    let other = crate::common::client(&handle, "other").await;
    assert!(maps(&other).get("a").await.is_err());
    handle.faults().set_outage(false);
    eventually("the server answers again", async || maps(&other).get("a").await.ok()).await;
    make(&maps(&other), "b").await;
    until_names(&store, &["a", "b"]).await;
}

#[tokio::test]
async fn many_control_planes_live_side_by_side() {
    let (one, first) = start(Options::default()).await;
    let (two, _) = start(Options::default()).await;
    make(&maps(&first), "a").await;
    let second = client(&two, "admin").await;
    assert!(maps(&second).get_opt("a").await.unwrap().is_none());
    assert_ne!(one.url(), two.url());
    one.shutdown().await;
    assert!(maps(&first).get("a").await.is_err());
    assert!(maps(&second).get_opt("a").await.unwrap().is_none());
}

#[rstest::rstest]
#[case::seen_late(None, &["+a", "-a", "+a"])]
#[case::never_seen(Some(WatchEnd::Expire), &["list", "+a"])]
#[tokio::test]
async fn what_a_silent_watch_did_not_say_is(#[case] how: Option<WatchEnd>, #[case] wanted: &[&str]) {
    let (handle, client) = start(Options::default()).await;
    let api = maps(&client);
    let mut stream = watcher(api.clone(), watcher::Config::default()).backoff(Quick).boxed();
    while !matches!(stream.try_next().await.unwrap(), Some(watcher::Event::InitDone)) {}
    // The write at which it begins is not seen either.
    let silence = Fault::Silence { resource: "configmaps".to_owned() };
    handle.faults().add(FaultRule::nth(1, Matcher::new("create", "configmaps").named("a"), silence));
    let first = make(&api, "a").await;
    api.delete("a", &DeleteParams::default()).await.unwrap();
    make(&api, "a").await;
    let waits = tokio::time::timeout(Duration::from_millis(100), stream.try_next()).await;
    assert!(waits.is_err(), "{waits:?}");
    handle.faults().end_silence(how);
    let mut seen = Vec::new();
    while seen.len() < wanted.len() {
        match stream.next().await.unwrap() {
            Ok(watcher::Event::Apply(_) | watcher::Event::InitApply(_)) => seen.push("+a"),
            Ok(watcher::Event::Delete(gone)) => {
                assert_eq!(gone.metadata.uid, first.metadata.uid);
                seen.push("-a");
            }
            Ok(watcher::Event::Init) => seen.push("list"),
            Ok(watcher::Event::InitDone) | Err(_) => {}
        }
    }
    assert_eq!(seen, wanted);
}
