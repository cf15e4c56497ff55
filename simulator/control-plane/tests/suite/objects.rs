//! Create, read, update, patch, delete through the kube client.

use crate::common::{code, start};
use aliquot_control_plane::{Controllers, Options};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Node, Pod};
use k8s_openapi::api::events::v1::Event as NewEvent;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::ApiResource;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn from<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn config_map(name: &str) -> ConfigMap {
    from(json!({"metadata": {"name": name, "labels": {"app": name}}, "data": {"a": "1"}}))
}

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    })
}

#[tokio::test]
async fn an_object_lives_from_creation_to_deletion() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "default");
    let made = api.create(&PostParams::default(), &config_map("a")).await.unwrap();
    assert!(made.metadata.uid.is_some() && made.metadata.creation_timestamp.is_some());
    let mut read = api.get("a").await.unwrap();
    assert_eq!(read, made);
    read.data.as_mut().unwrap().insert("b".into(), "2".into());
    let changed = api.replace("a", &PostParams::default(), &read).await.unwrap();
    assert_ne!(changed.metadata.resource_version, made.metadata.resource_version);
    // The first copy is outdated now.
    assert_eq!(code(api.replace("a", &PostParams::default(), &made).await), (409, "Conflict".into()));
    assert!(api.delete("a", &DeleteParams::default()).await.unwrap().is_right());
    assert_eq!(code(api.get("a").await), (404, "NotFound".into()));
    assert_eq!(code(api.delete("a", &DeleteParams::default()).await), (404, "NotFound".into()));
}

#[tokio::test]
async fn names_are_unique_and_can_be_generated() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    api.create(&PostParams::default(), &config_map("a")).await.unwrap();
    assert_eq!(
        code(api.create(&PostParams::default(), &config_map("a")).await),
        (409, "AlreadyExists".into())
    );
    let generated: ConfigMap = from(json!({"metadata": {"generateName": "x-"}}));
    let one = api.create(&PostParams::default(), &generated).await.unwrap();
    let two = api.create(&PostParams::default(), &generated).await.unwrap();
    assert!(one.metadata.name.as_deref().unwrap().starts_with("x-"));
    assert_ne!(one.metadata.name, two.metadata.name);
    let bad: ConfigMap = from(json!({"metadata": {"name": "Not_Good"}}));
    assert_eq!(code(api.create(&PostParams::default(), &bad).await), (422, "Invalid".into()));
    let nowhere: Api<ConfigMap> = Api::namespaced(client, "nowhere");
    assert_eq!(
        code(nowhere.create(&PostParams::default(), &config_map("a")).await),
        (404, "NotFound".into())
    );
}

#[tokio::test]
async fn a_write_that_changes_nothing_makes_no_new_version() {
    let (handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "default");
    let made = api.create(&PostParams::default(), &config_map("a")).await.unwrap();
    let before = handle.revision();
    let patch = Patch::Merge(json!({"data": {"a": "1"}}));
    let same = api.patch("a", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(same.metadata.resource_version, made.metadata.resource_version);
    assert_eq!(handle.revision(), before);
}

#[tokio::test]
async fn a_dry_run_leaves_no_trace() {
    let (handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "default");
    let before = handle.revision();
    api.create(&PostParams { dry_run: true, ..Default::default() }, &config_map("a")).await.unwrap();
    assert_eq!(handle.revision(), before);
    api.create(&PostParams::default(), &config_map("b")).await.unwrap();
    let before = handle.revision();
    api.delete("b", &DeleteParams { dry_run: true, ..Default::default() }).await.unwrap();
    assert_eq!(handle.revision(), before);
    api.get("b").await.unwrap();
}

#[tokio::test]
async fn deletion_keeps_to_its_preconditions() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "default");
    let made = api.create(&PostParams::default(), &config_map("a")).await.unwrap();
    let with = |uid: Option<String>| DeleteParams {
        preconditions: Some(Preconditions { uid, resource_version: None }),
        ..Default::default()
    };
    let other = uuid_like("0");
    assert_eq!(code(api.delete("a", &with(Some(other))).await), (409, "Conflict".into()));
    api.delete("a", &with(made.metadata.uid)).await.unwrap();
}

fn uuid_like(digit: &str) -> String {
    format!("{}-0000-0000-0000-000000000000", digit.repeat(8))
}

#[tokio::test]
async fn finalizers_hold_an_object_until_the_last_is_gone() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "default");
    let mut object = config_map("a");
    object.metadata.finalizers = Some(vec!["x/one".into(), "x/two".into()]);
    api.create(&PostParams::default(), &object).await.unwrap();
    let pending = api.delete("a", &DeleteParams::default()).await.unwrap().left().unwrap();
    assert!(pending.metadata.deletion_timestamp.is_some());
    let patch = |list: &[&str]| Patch::Merge(json!({"metadata": {"finalizers": list}}));
    // None may be added now.
    let more = patch(&["x/one", "x/two", "x/three"]);
    assert_eq!(code(api.patch("a", &PatchParams::default(), &more).await), (422, "Invalid".into()));
    api.patch("a", &PatchParams::default(), &patch(&["x/two"])).await.unwrap();
    assert!(api.get_opt("a").await.unwrap().is_some());
    api.patch("a", &PatchParams::default(), &patch(&[])).await.unwrap();
    assert!(api.get_opt("a").await.unwrap().is_none());
}

#[tokio::test]
async fn the_status_has_a_door_of_its_own() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<Pod> = Api::namespaced(client, "default");
    let made = api.create(&PostParams::default(), &from(pod("a"))).await.unwrap();
    assert_eq!(made.status.as_ref().unwrap().phase.as_deref(), Some("Pending"));
    let running = |spec: Value| Patch::Merge(json!({"status": {"phase": "Running"}, "spec": spec}));
    let by_front = api.patch("a", &PatchParams::default(), &running(json!({}))).await.unwrap();
    assert_eq!(by_front.status.unwrap().phase.as_deref(), Some("Pending"));
    let named = running(json!({"hostname": "no"}));
    assert_eq!(code(api.patch("a", &PatchParams::default(), &named).await), (422, "Invalid".into()));
    let by_side = api.patch_status("a", &PatchParams::default(), &named).await.unwrap();
    assert_eq!(by_side.status.unwrap().phase.as_deref(), Some("Running"));
    assert_eq!(by_side.spec.unwrap().hostname, None);
}

#[tokio::test]
async fn strategic_merge_goes_by_keys() {
    let (_handle, client) = start(Options { controllers: Controllers::NONE, ..Options::default() }).await;
    let api: Api<Pod> = Api::namespaced(client, "default");
    api.create(&PostParams::default(), &from(pod("a"))).await.unwrap();
    for kind in ["A", "B"] {
        let patch = Patch::Strategic(json!({"status": {"conditions": [{"type": kind, "status": "True"}]}}));
        api.patch_status("a", &PatchParams::default(), &patch).await.unwrap();
    }
    let conditions = api.get("a").await.unwrap().status.unwrap().conditions.unwrap();
    let kinds: Vec<_> = conditions.iter().map(|c| c.type_.as_str()).collect();
    // What is new comes first, as on the real server.
    assert_eq!(kinds, ["B", "A"]);
}

#[tokio::test]
async fn a_json_patch_can_test_first() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "default");
    api.create(&PostParams::default(), &config_map("a")).await.unwrap();
    let patch = |was: &str| {
        let ops = json!([{"op": "test", "path": "/data/a", "value": was}, {"op": "replace", "path": "/data/a", "value": "2"}]);
        Patch::<()>::Json(from(ops))
    };
    assert_eq!(code(api.patch("a", &PatchParams::default(), &patch("other")).await).0, 422);
    let done = api.patch("a", &PatchParams::default(), &patch("1")).await.unwrap();
    assert_eq!(done.data.unwrap()["a"], "2");
}

#[tokio::test]
async fn server_side_apply_owns_fields() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "default");
    let config = |data: Value| {
        Patch::Apply(
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}),
        )
    };
    let one = PatchParams::apply("one");
    let two = PatchParams::apply("two");
    api.patch("a", &one, &config(json!({"a": "1", "b": "1"}))).await.unwrap();
    api.patch("a", &two, &config(json!({"c": "1"}))).await.unwrap();
    assert_eq!(code(api.patch("a", &two, &config(json!({"a": "2"}))).await), (409, "Conflict".into()));
    let forced = api.patch("a", &two.clone().force(), &config(json!({"a": "2"}))).await.unwrap();
    let data = forced.data.unwrap();
    // `c` was two's alone and is no longer in its configuration.
    assert_eq!(data.into_iter().collect::<Vec<_>>(), [("a".into(), "2".into()), ("b".into(), "1".into())]);
    let managers = forced.metadata.managed_fields.unwrap();
    assert_eq!(managers.len(), 2);
}

#[tokio::test]
async fn applying_the_same_again_changes_nothing() {
    let (handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "default");
    let config = Patch::Apply(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "labels": {"x": "y"}}, "data": {"a": "1"},
    }));
    let params = PatchParams::apply("one").force();
    api.patch("a", &params, &config).await.unwrap();
    let before = handle.revision();
    api.patch("a", &params, &config).await.unwrap();
    assert_eq!(handle.revision(), before);
}

#[tokio::test]
async fn lists_select_and_page() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    for i in 0..7 {
        api.create(&PostParams::default(), &config_map(&format!("m{i}"))).await.unwrap();
    }
    let some = api.list(&ListParams::default().labels("app in (m1, m3)")).await.unwrap();
    assert_eq!(some.items.len(), 2);
    let named = api.list(&ListParams::default().fields("metadata.name=m2")).await.unwrap();
    assert_eq!(named.items.len(), 1);
    assert_eq!(code(api.list(&ListParams::default().fields("data.a=1")).await).0, 400);

    let first = api.list(&ListParams::default().limit(3)).await.unwrap();
    assert_eq!(first.metadata.remaining_item_count, Some(4));
    // What is made meanwhile is not in the later pages of the same list.
    api.create(&PostParams::default(), &config_map("m9")).await.unwrap();
    api.delete("m5", &DeleteParams::default()).await.unwrap();
    let mut names: Vec<String> = first.items.iter().map(|o| o.metadata.name.clone().unwrap()).collect();
    let mut token = first.metadata.continue_.clone();
    while let Some(t) = token {
        let page = api.list(&ListParams::default().limit(3).continue_token(&t)).await.unwrap();
        assert_eq!(page.metadata.resource_version, first.metadata.resource_version);
        names.extend(page.items.iter().map(|o| o.metadata.name.clone().unwrap()));
        token = page.metadata.continue_.filter(|t| !t.is_empty());
    }
    assert_eq!(names, ["m0", "m1", "m2", "m3", "m4", "m5", "m6"]);
}

#[tokio::test]
async fn collections_are_deleted_by_selector() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "default");
    for name in ["a", "b"] {
        api.create(&PostParams::default(), &config_map(name)).await.unwrap();
    }
    api.delete_collection(&DeleteParams::default(), &ListParams::default().labels("app=a")).await.unwrap();
    let left = api.list(&ListParams::default()).await.unwrap();
    assert_eq!(left.items.len(), 1);
}

#[tokio::test]
async fn a_lease_can_be_put_and_is_fenced_by_its_version() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<Lease> = Api::namespaced(client, "kube-system");
    let lease: Lease = from(json!({"metadata": {"name": "l"}, "spec": {"holderIdentity": "a"}}));
    let made = api.replace("l", &PostParams::default(), &lease).await.unwrap();
    // Leases take no unconditional update.
    assert_eq!(code(api.replace("l", &PostParams::default(), &lease).await), (422, "Invalid".into()));
    let mut taken = made.clone();
    taken.spec.as_mut().unwrap().holder_identity = Some("b".into());
    api.replace("l", &PostParams::default(), &taken).await.unwrap();
    assert_eq!(code(api.replace("l", &PostParams::default(), &made).await), (409, "Conflict".into()));
}

#[tokio::test]
async fn an_event_is_seen_through_both_groups() {
    let (_handle, client) = start(Options::default()).await;
    let new: Api<NewEvent> = Api::namespaced(client.clone(), "default");
    let event: NewEvent = from(json!({
        "metadata": {"name": "e"}, "eventTime": "2026-01-01T00:00:00.000000Z", "note": "hello", "reason": "Why",
        "regarding": {"kind": "Pod", "name": "p", "namespace": "default"}, "type": "Normal", "action": "Do",
        "reportingController": "me", "reportingInstance": "me-0",
    }));
    let made = new.create(&PostParams::default(), &event).await.unwrap();
    assert_eq!(made.note.as_deref(), Some("hello"));
    let old: Api<Event> = Api::namespaced(client, "default");
    let list = old.list(&ListParams::default().fields("involvedObject.name=p")).await.unwrap();
    assert_eq!(list.items[0].message.as_deref(), Some("hello"));
    let list = new.list(&ListParams::default().fields("regarding.name=p")).await.unwrap();
    assert_eq!(list.items.len(), 1);
}

#[tokio::test]
async fn nodes_keep_the_status_they_register_with() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<Node> = Api::all(client);
    let node: Node = from(json!({"metadata": {"name": "n"}, "status": {"capacity": {"cpu": "4"}}}));
    let made = api.create(&PostParams::default(), &node).await.unwrap();
    assert_eq!(made.status.unwrap().capacity.unwrap()["cpu"].0, "4");
}

#[tokio::test]
async fn custom_resources_are_served_once_defined() {
    let (_handle, client) = start(Options::default()).await;
    let crds: Api<
        k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    > = Api::all(client.clone());
    let crd = json!({
        "metadata": {"name": "budgets.aliquot.dev"},
        "spec": {
            "group": "aliquot.dev", "scope": "Namespaced",
            "names": {"kind": "Budget", "plural": "budgets"},
            "versions": [{
                "name": "v1alpha1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object", "properties": {
                    "rules": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                              "items": {"type": "object"}},
                }}}}},
            }],
        },
    });
    crds.create(&PostParams::default(), &from(crd)).await.unwrap();
    let resource = ApiResource {
        group: "aliquot.dev".into(),
        version: "v1alpha1".into(),
        api_version: "aliquot.dev/v1alpha1".into(),
        kind: "Budget".into(),
        plural: "budgets".into(),
    };
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &resource);
    let config = |name: &str| {
        Patch::Apply(json!({
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "Budget", "metadata": {"name": "b"},
            "spec": {"rules": [{"name": name, "max": 1}]},
        }))
    };
    api.patch("b", &PatchParams::apply("one"), &config("x")).await.unwrap();
    let both = api.patch("b", &PatchParams::apply("two"), &config("y")).await.unwrap();
    assert_eq!(both.data["spec"]["rules"].as_array().unwrap().len(), 2);
    assert_eq!(both.metadata.generation, Some(2));
    let status = Patch::Merge(json!({"status": {"used": 1}}));
    let after = api.patch_status("b", &PatchParams::default(), &status).await.unwrap();
    assert_eq!((after.metadata.generation, &after.data["status"]["used"]), (Some(2), &json!(1)));
    crds.delete("budgets.aliquot.dev", &DeleteParams::default()).await.unwrap();
    assert_eq!(code(api.get("b").await).0, 404);
}

#[tokio::test]
async fn discovery_leads_to_every_kind() {
    let (_handle, client) = start(Options::default()).await;
    let version = client.apiserver_version().await.unwrap();
    assert_eq!((version.major.as_str(), version.minor.as_str()), ("1", "36"));
    let discovery = kube::discovery::Discovery::new(client.clone()).run().await.unwrap();
    let gvk = kube::core::GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceClaim");
    let (resource, capabilities) = discovery.resolve_gvk(&gvk).unwrap();
    assert_eq!(resource.plural, "resourceclaims");
    assert_eq!(capabilities.subresources.len(), 1);
    let api: Api<ResourceClaim> = Api::all(client.clone());
    assert!(api.list(&ListParams::default()).await.unwrap().items.is_empty());
    let namespaces: Api<Namespace> = Api::all(client);
    assert!(namespaces.get("default").await.is_ok());
}

#[tokio::test]
async fn an_eviction_meant_for_another_pod_of_the_name_writes_nothing() {
    let (_handle, client) = start(Options::default()).await;
    let api: Api<Pod> = Api::namespaced(client, "default");
    let made = api.create(&PostParams::default(), &from(pod("e"))).await.unwrap();
    let eviction = |uid: &str| {
        json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "e"},
               "deleteOptions": {"preconditions": {"uid": uid}}})
    };
    let evict = async |uid: &str| {
        api.create_subresource::<Value, Value>("eviction", "e", &PostParams::default(), &eviction(uid)).await
    };
    assert_eq!(code(evict("another").await), (409, "Conflict".into()));
    let told = api.get("e").await.unwrap().status.and_then(|status| status.conditions).unwrap_or_default();
    assert!(told.iter().all(|condition| condition.type_ != "DisruptionTarget"), "{told:?}");
    evict(made.metadata.uid.as_deref().unwrap()).await.unwrap();
    assert_eq!(code(api.get("e").await), (404, "NotFound".into()));
}
