//! Watches: objects of each kind become inputs, and lists become resets. Lists of kinds with many or large
//! objects are passed on in steps.

use crate::reconciler::{Input, NamespaceOrVolume, Part, Seen};
use aliquot_allocator::snapshot::{POD_GROUP_APIS, TaintRule};
use aliquot_api::v1alpha1::{GpuBudget, GpuQuota, NodeLimits, NodeUsage, resource};
use aliquot_api::{Kept, Lean, PAGE};
use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::core::GroupVersionKind;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

/// Versions of DeviceTaintRule, newest first.
const TAINT_RULE_VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1alpha3"];

/// The least number of slices in a step of a list; steps end at whole pools.
const SLICES: usize = 4;
/// The number of objects in a step of a list, for other kinds.
const OBJECTS: usize = 256;

/// Pauses after a watch broke: 0.1 s, doubled up to 5 s, and reset when something is seen again. They are
/// short because the controller cannot decide on what it does not see; those of kube go up to 30 s.
#[derive(Debug, Default)]
pub(crate) struct Pauses {
    broken: u32,
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let doubled = 1u32.checked_shl(self.broken.min(6)).unwrap_or(64);
        self.broken = self.broken.saturating_add(1);
        let longest = Duration::from_millis(100).saturating_mul(doubled).min(Duration::from_secs(5));
        // Jitter, so that not all clients return at once after an outage: half of the pause, and a random
        // part of the other half.
        let random = uuid::Uuid::new_v4().as_bytes().first().copied().unwrap_or_default();
        Some(longest / 2 + longest.mul_f64(f64::from(random) / 512.0))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.broken = 0;
    }
}

/// Starts the watches that every leader needs. They end when the returned set is dropped.
pub fn start(
    client: &Client,
    driver: &str,
    taint_rules: Option<ApiResource>,
    quotas: bool,
    to: &mpsc::Sender<Input>,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let slices = watcher::Config::default().fields(&format!("spec.driver={driver}"));
    let all = watcher::Config::default;
    let api = Api::<ResourceSlice>::all(client.clone());
    tasks.spawn(follow_slices(api, slices, to.clone()));
    tasks.spawn(follow(Api::<DeviceClass>::all(client.clone()), all(), to.clone(), Input::Class));
    let claims = lean(Api::<Lean<ResourceClaim>>::all(client.clone()));
    let listed = |claims| in_steps(claims, OBJECTS, |_, _| true, Input::Claims);
    let asked = |ask| Some(Input::Claims(Part::Asked(ask)));
    tasks.spawn(follow_listed(claims, to.clone(), Input::Claim, asked, listed));
    let listed = |pods| in_steps(pods, OBJECTS, |_, _| true, Input::Pods);
    let asked = |ask| Some(Input::Pods(Part::Asked(ask)));
    let pods = lean(Api::<Lean<Pod>>::all(client.clone()));
    tasks.spawn(follow_listed(pods, to.clone(), Input::Pod, asked, listed));
    tasks.spawn(follow(Api::<Node>::all(client.clone()), all(), to.clone(), Input::Node));
    let namespaces = Api::<Namespace>::all(client.clone());
    tasks.spawn(follow(namespaces, all(), to.clone(), |seen| {
        Input::NamespaceOrVolume(NamespaceOrVolume::Namespace(seen))
    }));
    let claims = Api::<PersistentVolumeClaim>::all(client.clone());
    tasks.spawn(follow(claims, all(), to.clone(), |seen| {
        Input::NamespaceOrVolume(NamespaceOrVolume::VolumeClaim(seen))
    }));
    let volumes = Api::<PersistentVolume>::all(client.clone());
    tasks.spawn(follow(volumes, all(), to.clone(), |seen| {
        Input::NamespaceOrVolume(NamespaceOrVolume::Volume(seen))
    }));
    let classes = Api::<StorageClass>::all(client.clone());
    tasks.spawn(follow(classes, all(), to.clone(), |seen| {
        Input::NamespaceOrVolume(NamespaceOrVolume::StorageClass(seen))
    }));
    if quotas {
        tasks.spawn(follow(Api::<GpuQuota>::all(client.clone()), all(), to.clone(), Input::Quota));
    }
    if let Some(resource) = taint_rules {
        let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
        tasks.spawn(follow_rules(api, resource, to.clone()));
    }
    tasks
}

/// Returns true if the API server serves a kind of this driver, whose definition comes with the chart.
/// Returns an error if the API server cannot be asked.
pub async fn is_served<K: Resource<DynamicType = ()>>(client: &Client) -> Result<bool, kube::Error> {
    let plural = K::plural(&());
    match client.list_api_group_resources(&K::api_version(&())).await {
        Ok(resources) => Ok(resources.resources.iter().any(|resource| resource.name == plural)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}

/// The pause before the next question while a kind is not defined.
const DEFINED: Duration = Duration::from_secs(30);
/// The pause after a question that was not answered.
const UNANSWERED: Duration = Duration::from_secs(1);

/// Waits until a kind of this driver is defined; `absent` is called each time that it is not.
pub async fn wait_until_served<K: Resource<DynamicType = ()>>(client: &Client, absent: impl Fn()) {
    loop {
        let pause = match is_served::<K>(client).await {
            Ok(true) => return,
            Ok(false) => {
                absent();
                DEFINED
            }
            Err(error) => {
                tracing::warn!(%error, kind = %K::kind(&()), "it is not known yet whether the kind is defined");
                UNANSWERED
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Returns the newest served version of DeviceTaintRule; `None` if there is none.
pub async fn find_taint_rules(client: &Client) -> Result<Option<ApiResource>, kube::Error> {
    let groups = client.list_api_groups().await?;
    let served: Vec<String> = groups
        .groups
        .into_iter()
        .filter(|group| group.name == "resource.k8s.io")
        .flat_map(|group| group.versions)
        .map(|version| version.version)
        .collect();
    for version in TAINT_RULE_VERSIONS {
        if !served.iter().any(|served| served == version) {
            continue;
        }
        let resources = client.list_api_group_resources(&format!("resource.k8s.io/{version}")).await?;
        if resources.resources.iter().any(|resource| resource.name == "devicetaintrules") {
            let kind = GroupVersionKind::gvk("resource.k8s.io", version, "DeviceTaintRule");
            return Ok(Some(ApiResource::from_gvk_with_plural(&kind, "devicetaintrules")));
        }
    }
    Ok(None)
}

/// Returns the PodGroup kinds that are served, each with its API group.
pub async fn find_pod_groups(client: &Client) -> Result<Vec<(&'static str, ApiResource)>, kube::Error> {
    let groups = client.list_api_groups().await?.groups;
    let mut found = Vec::new();
    for (api, versions) in POD_GROUP_APIS {
        let served = groups.iter().filter(|group| group.name == api).flat_map(|group| &group.versions);
        let served: Vec<&str> = served.map(|version| version.version.as_str()).collect();
        for version in versions.iter().filter(|version| served.contains(version)) {
            let resources = client.list_api_group_resources(&format!("{api}/{version}")).await?;
            if resources.resources.iter().any(|resource| resource.name == "podgroups") {
                let kind = GroupVersionKind::gvk(api, version, "PodGroup");
                found.push((api, ApiResource::from_gvk_with_plural(&kind, "podgroups")));
                break;
            }
        }
    }
    Ok(found)
}

/// Starts the watches of PodGroups.
pub fn start_pod_groups(
    client: &Client,
    groups: &[(&'static str, ApiResource)],
    to: &mpsc::Sender<Input>,
    tasks: &mut JoinSet<()>,
) {
    for (api, resource) in groups {
        let api = *api;
        let objects = Api::<DynamicObject>::all_with(client.clone(), resource);
        let all = watcher::Config::default();
        tasks.spawn(follow(objects, all, to.clone(), move |seen| Input::PodGroup(api, seen)));
    }
}

/// Starts the watches of budgets and of the nodes' usage reports.
pub fn start_budgets(client: &Client, to: &mpsc::Sender<Input>, tasks: &mut JoinSet<()>) {
    let budgets = Api::<DynamicObject>::all_with(client.clone(), &resource::<GpuBudget>());
    let usages = Api::<DynamicObject>::all_with(client.clone(), &resource::<NodeUsage>());
    let all = watcher::Config::default;
    tasks.spawn(follow(budgets, all(), to.clone(), Input::Budget));
    tasks.spawn(follow(usages, all(), to.clone(), Input::NodeUsage));
}

/// Starts the watch of the limits of shares that nodes are told.
pub fn start_limits(client: &Client, to: &mpsc::Sender<Input>, tasks: &mut JoinSet<()>) {
    let limits = Api::<DynamicObject>::all_with(client.clone(), &resource::<NodeLimits>());
    tasks.spawn(follow(limits, watcher::Config::default(), to.clone(), Input::NodeLimits));
}

/// Reads once the retention records that earlier leaders wrote: which devices ended pods leave to the next.
pub fn read_retention_records(
    client: &Client,
    namespace: &str,
    to: &mpsc::Sender<Input>,
    tasks: &mut JoinSet<()>,
) {
    let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let to = to.clone();
    tasks.spawn(async move {
        let params =
            ListParams::default().labels(&format!("{}=true", aliquot_model::names::RETENTION_RECORD));
        let mut pauses = Pauses::default();
        loop {
            match api.list(&params).await {
                Ok(list) => {
                    // Nobody listens if the leadership is over.
                    let _ = to.send(Input::RetentionRecords(list.items)).await;
                    return;
                }
                Err(error) => tracing::warn!(%error, "cannot read what ended pods leave to the next"),
            }
            tokio::time::sleep(pauses.next().unwrap_or_default()).await;
        }
    });
}

/// Reads once which moves earlier leaders began.
pub fn read_moves(client: &Client, namespace: &str, to: &mpsc::Sender<Input>, tasks: &mut JoinSet<()>) {
    let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let to = to.clone();
    tasks.spawn(async move {
        let mut pauses = Pauses::default();
        loop {
            match api.get_opt(aliquot_allocator::compaction::ALLOWANCE).await {
                Ok(map) => {
                    // Nobody listens if the leadership is over.
                    let _ = to.send(Input::Moves(map.map(Box::new))).await;
                    return;
                }
                Err(error) => tracing::warn!(%error, "cannot read which pods were moved to fill gaps"),
            }
            tokio::time::sleep(pauses.next().unwrap_or_default()).await;
        }
    });
}

/// Follows the slices, for ever. A list comes in steps of a few slices, with the slices of a pool together,
/// so that the pool is built once. The steps are small because a slice has up to 128 devices and costs as
/// much as hundreds of other objects.
pub(crate) async fn follow_slices(api: Api<ResourceSlice>, config: watcher::Config, to: mpsc::Sender<Input>) {
    follow_listed(whole(api, config), to, Input::Slice, |_| None, slices_in_steps).await;
}

fn slices_in_steps(mut slices: Vec<ResourceSlice>) -> Vec<Input> {
    slices.sort_by(|one, other| one.spec.pool.name.cmp(&other.spec.pool.name));
    let end = |one: &ResourceSlice, next: &ResourceSlice| one.spec.pool.name != next.spec.pool.name;
    in_steps(slices, SLICES, end, Input::Slices)
}

/// Splits a list into steps of at least `size` objects; a step ends only between two objects for which `end`
/// is true.
fn in_steps<K>(
    objects: Vec<K>,
    size: usize,
    end: impl Fn(&K, &K) -> bool,
    input: impl Fn(Part<K>) -> Input,
) -> Vec<Input> {
    let mut steps = vec![input(Part::Begin)];
    let mut step: Vec<K> = Vec::new();
    for object in objects {
        if step.len() >= size && step.last().is_some_and(|last| end(last, &object)) {
            steps.push(input(Part::Some(std::mem::take(&mut step))));
        }
        step.push(object);
    }
    steps.push(input(Part::Some(step)));
    steps.push(input(Part::End));
    steps
}

/// Follows one kind, for ever; a broken watch is started again, after growing pauses.
pub(crate) async fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    to: mpsc::Sender<Input>,
    input: impl Fn(Seen<K>) -> Input,
) where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let listed = |all| vec![input(Seen::Reset(all))];
    follow_listed(whole(api, config), to, &input, |_| None, listed).await;
}

/// An event of a watch, or the error that broke it.
type Events<K> = watcher::Result<Event<K>>;

/// Watches whole objects without `managedFields`, which are half of every object and are not read here. A
/// broken watch is started again, after growing pauses.
pub(crate) fn whole<K>(api: Api<K>, config: watcher::Config) -> impl Stream<Item = Events<K>> + Send
where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    watch(api, config).backoff(Pauses::default()).modify(|object| object.meta_mut().managed_fields = None)
}

/// Watches objects that any user may create: only the fields that are read are decoded, and lists come in
/// small pages.
pub(crate) fn lean<K>(api: Api<Lean<K>>) -> impl Stream<Item = Events<K>> + Send
where
    K: Kept + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default + Clone,
{
    let config = watcher::Config::default().page_size(PAGE);
    watch(api, config).backoff(Pauses::default()).map_ok(|event| match event {
        Event::Apply(Lean(object)) => Event::Apply(object),
        Event::Delete(Lean(object)) => Event::Delete(object),
        Event::Init => Event::Init,
        Event::InitApply(Lean(object)) => Event::InitApply(object),
        Event::InitDone => Event::InitDone,
    })
}

/// Like [`follow`], with `inputs` for the steps of a list. `asked` announces that a list is about to be
/// requested. The request is sent once the announcement was answered, so everything known at that time is
/// known before the list.
async fn follow_listed<K>(
    events: impl Stream<Item = Events<K>> + Send,
    to: mpsc::Sender<Input>,
    input: impl Fn(Seen<K>) -> Input,
    asked: impl Fn(oneshot::Sender<()>) -> Option<Input>,
    inputs: impl Fn(Vec<K>) -> Vec<Input>,
) {
    let mut stream = events.boxed();
    let mut listed = Vec::new();
    loop {
        let seen = match stream.try_next().await {
            Ok(Some(Event::Apply(object))) => vec![input(Seen::Apply(Box::new(object)))],
            Ok(Some(Event::Delete(object))) => vec![input(Seen::Delete(Box::new(object)))],
            // This event comes before the request (kube_runtime::watcher::Event::Init).
            Ok(Some(Event::Init)) => {
                listed.clear();
                let (ask, answered) = oneshot::channel();
                if let Some(input) = asked(ask) {
                    if to.send(input).await.is_err() {
                        return;
                    }
                    // A dropped sender counts as an answer.
                    let _ = answered.await;
                }
                continue;
            }
            Ok(Some(Event::InitApply(object))) => {
                listed.push(object);
                continue;
            }
            Ok(Some(Event::InitDone)) => inputs(std::mem::take(&mut listed)),
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(kind = std::any::type_name::<K>(), %error, "watch broke");
                continue;
            }
        };
        for input in seen {
            if to.send(input).await.is_err() {
                return;
            }
        }
    }
}

async fn follow_rules(api: Api<DynamicObject>, resource: ApiResource, to: mpsc::Sender<Input>) {
    let read = |object: &DynamicObject| {
        let name = object.metadata.name.clone().unwrap_or_default();
        let rule = object.data.get("spec").and_then(|spec| TaintRule::read(&name, spec));
        if rule.is_none() {
            tracing::warn!(
                rule = name,
                version = resource.version,
                "a DeviceTaintRule selects by what is not known here; it is ignored"
            );
        }
        (name, rule)
    };
    let mut stream = watch(api, watcher::Config::default()).backoff(Pauses::default()).boxed();
    let mut listed = Vec::new();
    loop {
        let seen = match stream.try_next().await {
            Ok(Some(Event::Apply(object))) => Seen::Apply(Box::new(read(&object))),
            Ok(Some(Event::Delete(object))) => Seen::Delete(Box::new(read(&object))),
            Ok(Some(Event::Init)) => {
                listed.clear();
                continue;
            }
            Ok(Some(Event::InitApply(object))) => {
                listed.push(read(&object));
                continue;
            }
            Ok(Some(Event::InitDone)) => Seen::Reset(std::mem::take(&mut listed)),
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "watch of DeviceTaintRules broke");
                continue;
            }
        };
        if to.send(Input::TaintRule(seen)).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_allocator::fixtures;
    use aliquot_model::layout::AllocatorMode;
    use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
    use std::collections::BTreeSet;
    use std::convert::Infallible;

    /// The pages' objects are read without their large parts, which `aliquot_api` shows.
    #[tokio::test]
    async fn claims_pods_and_templates_are_listed_few_at_a_time() {
        async fn asked<K>() -> String
        where
            K: Kept<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
        {
            let (ask, mut asked) = mpsc::unbounded_channel();
            let service = tower::service_fn(move |request: axum::http::Request<kube::client::Body>| {
                let ask = ask.clone();
                async move {
                    let _ = ask.send(request.uri().to_string());
                    std::future::pending::<Result<axum::http::Response<kube::client::Body>, Infallible>>()
                        .await
                }
            });
            let mut events = lean(Api::<Lean<K>>::all(Client::new(service, "n"))).boxed();
            tokio::select! {
                Some(uri) = asked.recv() => uri,
                () = async { while events.next().await.is_some() {} } => panic!("the watch ended"),
            }
        }
        for uri in
            [asked::<ResourceClaim>().await, asked::<Pod>().await, asked::<ResourceClaimTemplate>().await]
        {
            assert!(uri.contains("limit=50&") || uri.ends_with("limit=50"), "{uri}");
        }
    }

    #[test]
    fn a_list_of_many_pools_comes_in_small_steps_each_of_whole_pools() {
        let one = fixtures::slices("n", 1, AllocatorMode::Controller, 1);
        let mut listed = Vec::new();
        // As the API server lists them: by name, so those of a pool far apart.
        for slice in &one {
            for node in 0..1500 {
                let mut slice = slice.clone();
                slice.spec.pool.name = format!("pool-{node}");
                listed.push(slice);
            }
        }
        let (most, all) = (SLICES + one.len(), listed.len());
        let (mut named, mut seen) = (BTreeSet::new(), 0);
        let steps = slices_in_steps(listed);
        assert!(matches!(steps.first(), Some(Input::Slices(Part::Begin))));
        assert!(matches!(steps.last(), Some(Input::Slices(Part::End))));
        for step in &steps {
            let Input::Slices(Part::Some(slices)) = step else { continue };
            assert!(slices.len() <= most, "{} slices in a step", slices.len());
            let pools: BTreeSet<&str> = slices.iter().map(|slice| slice.spec.pool.name.as_str()).collect();
            assert!(pools.iter().all(|pool| named.insert((*pool).to_owned())), "a pool in two steps");
            seen += slices.len();
        }
        assert_eq!((named.len(), seen), (1500, all));
    }
}
