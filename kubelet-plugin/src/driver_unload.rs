//! Lets go of the driver when the GPU operator announces that it is about to be unloaded.
//!
//! Before its driver manager unloads the kernel module, the GPU operator labels the Node, so that every
//! program that holds the module ends. The agent does not end, because claims that are over have to be
//! unprepared. Instead it gives nothing out any more. Once no claim is prepared, it closes NVML, so that the
//! module is free, until the label is gone. The label is read before NVML is opened for the first time, so
//! that an agent that starts meanwhile does not block the module.

mod wish;

pub use wish::Wish;

use crate::events::Events;
use crate::notice;
use crate::prepare::{Node, Overview};
use crate::reasons;
use aliquot_model::layout::{Taint, TaintEffect};
use aliquot_model::names;
use aliquot_nvml::Reopening;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node as ApiNode;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

/// The operator's labels for components that hold GPUs as this agent does.
const LABELS: [&str; 3] = [
    "nvidia.com/gpu.deploy.dra-driver",
    "nvidia.com/gpu.deploy.client",
    "nvidia.com/gpu.deploy.device-plugin",
];
/// The prefix of the labels' values while the driver is to be unloaded.
const PAUSED: &str = "paused-for-";

/// The time that users of NVML in this process have to end after it was closed, and the interval between
/// checks.
const LETTING_GO: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);
/// The longest wait for the Node before NVML is opened for the first time.
const FIRST_LOOK: Duration = Duration::from_secs(5);

/// Returns the label that asks for the driver, as `name=value`.
pub fn asked(node: &ApiNode) -> Option<String> {
    let labels: &BTreeMap<String, String> = node.metadata.labels.as_ref()?;
    LABELS.iter().find_map(|name| {
        let value = labels.get(*name).filter(|value| value.starts_with(PAUSED))?;
        Some(format!("{name}={value}"))
    })
}

/// Reads the label now. An API server that does not answer in time does not keep the agent from the driver.
pub(crate) async fn label_now(client: &Client, node_name: &str) -> Option<String> {
    let nodes: Api<ApiNode> = Api::all(client.clone());
    match tokio::time::timeout(FIRST_LOOK, nodes.get_opt(node_name)).await {
        Ok(Ok(node)) => node.as_ref().and_then(asked),
        Ok(Err(error)) => {
            tracing::warn!(%error, "whether the driver is to be unloaded is not known yet: the Node cannot be read");
            None
        }
        Err(_) => {
            tracing::warn!(
                "whether the driver is to be unloaded is not known yet: the API server does not answer"
            );
            None
        }
    }
}

/// Returns the reason for closing the library, in words.
pub(crate) fn closed_for(label: &str) -> String {
    format!("it is closed, as label {label} of this Node asks")
}

/// Returns the taint that all devices have meanwhile.
pub fn taint(driver: &str) -> Taint {
    let key = names::driver_paused_taint(driver);
    Taint { key, value: String::new(), effect: TaintEffect::NoSchedule }
}

/// The action of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Nothing,
    /// This many claims are still prepared.
    Wait(usize),
    LetGo,
    /// A claim was prepared after all, and needs the driver to be unprepared.
    Reopen,
    Resume,
}

const fn step(asked: bool, closed: bool, prepared: usize) -> Step {
    match (asked, closed, prepared) {
        (true, false, 0) => Step::LetGo,
        (true, false, prepared) => Step::Wait(prepared),
        (false, true, _) => Step::Resume,
        (true, true, 0) | (false, false, _) => Step::Nothing,
        (true, true, _) => Step::Reopen,
    }
}

/// Counts the claims that may have the driver open, including those that are not fully known.
fn prepared(overview: &Overview) -> usize {
    let ledger = &overview.ledger;
    let claims = ledger.claims.values().filter(|record| !record.is_parked()).count();
    claims + ledger.newer.len() + overview.unaccounted.len()
}

/// The task that lets go of the driver.
pub struct Pauses {
    /// The wish, shared with the tasks that prepare claims: claims that are not prepared yet are refused
    /// meanwhile.
    pub wish: Wish,
    /// The node, whose claims are not to be held up.
    pub node: Arc<Node>,
    /// The library that is closed.
    pub library: Arc<Reopening>,
    /// The API client.
    pub client: Client,
    /// The name of the node.
    pub node_name: String,
    /// The event recorder.
    pub events: Events,
    /// The overview, which changes with the ledger.
    pub overview: watch::Receiver<Arc<Overview>>,
    /// Notified when the library was closed or may be opened.
    pub changed: Arc<Notify>,
}

impl std::fmt::Debug for Pauses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pauses").field("node", &self.node_name).finish_non_exhaustive()
    }
}

impl Pauses {
    /// Runs until cancelled.
    pub async fn run(mut self, cancel: CancellationToken) {
        // An agent that started while the label was set has not opened the library.
        let mut asked = self.wish.label();
        let (mut closed, mut told) = (asked.is_some(), false);
        let mut wishes = self.wishes();
        // Before the first look at the ledger it is not known what is prepared.
        tokio::select! {
            () = cancel.cancelled() => return,
            _ = self.overview.changed() => {}
        }
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                Some(wish) = wishes.next() => {
                    self.wish.set(wish.clone());
                    asked = wish;
                }
                Ok(()) = self.overview.changed() => {}
            }
            let prepared = prepared(&self.overview.borrow_and_update());
            let label = asked.as_deref().unwrap_or_default();
            if asked.is_some() && !told {
                self.events.node_normal(reasons::DRIVER_PAUSED, notice::driver_asked_for(label, prepared));
                if closed && prepared == 0 {
                    self.events.node_normal(reasons::DRIVER_LET_GO, notice::driver_let_go(label));
                }
                told = true;
            }
            match step(asked.is_some(), closed, prepared) {
                Step::Nothing if told && asked.is_none() => {
                    self.events.node_normal(reasons::DRIVER_RESUMED, notice::driver_kept());
                }
                Step::Nothing | Step::Wait(_) => {}
                Step::LetGo => {
                    if !self.let_go(label).await {
                        // The next look shows what is prepared by now.
                        self.changed.notify_one();
                        continue;
                    }
                    closed = true;
                    self.changed.notify_one();
                    if self.is_free(&cancel).await {
                        self.events.node_normal(reasons::DRIVER_LET_GO, notice::driver_let_go(label));
                    } else if !cancel.is_cancelled() {
                        self.events.node_warning(reasons::DRIVER_HELD, notice::driver_held(label));
                    }
                }
                Step::Reopen => {
                    self.library.resume();
                    closed = false;
                    self.changed.notify_one();
                }
                Step::Resume => {
                    self.library.resume();
                    self.events.node_normal(reasons::DRIVER_RESUMED, notice::driver_resumed());
                    closed = false;
                    self.changed.notify_one();
                }
            }
            told &= asked.is_some();
        }
    }

    /// Waits until nothing in this process holds the library any more: event sets end with the next look,
    /// calls with their answers. Returns false if that took too long.
    async fn is_free(&self, cancel: &CancellationToken) -> bool {
        let started = Instant::now();
        while self.library.is_held() {
            if started.elapsed() > LETTING_GO || cancel.is_cancelled() {
                return false;
            }
            tokio::time::sleep(LOOK).await;
        }
        true
    }

    /// Closes the library if nothing is prepared now and no claim is about to be. Returns true if it was
    /// closed.
    async fn let_go(&self, label: &str) -> bool {
        let (library, node, why) = (Arc::clone(&self.library), Arc::clone(&self.node), closed_for(label));
        // Closing the library calls the driver, which may take long.
        let closed = tokio::task::spawn_blocking(move || node.while_unused(|| library.let_go(&why))).await;
        match closed {
            Ok(Ok(closed)) => closed,
            Ok(Err(error)) => {
                tracing::info!(%error, "NVML is closed once nobody works on a GPU");
                false
            }
            Err(error) => {
                tracing::error!(%error, "closing NVML ended abnormally");
                false
            }
        }
    }

    /// Returns the Node's wishes as they change. This also works where another instance of the agent
    /// publishes.
    fn wishes(&self) -> Pin<Box<dyn Stream<Item = Option<String>> + Send>> {
        let nodes: Api<ApiNode> = Api::all(self.client.clone());
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.node_name));
        Box::pin(watcher(nodes, config).default_backoff().filter_map(|event| async move {
            match event {
                Ok(watcher::Event::Apply(node) | watcher::Event::InitApply(node)) => Some(asked(&node)),
                Ok(_) => None,
                Err(error) => {
                    tracing::debug!(%error, "watching the node");
                    None
                }
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("nvidia.com/gpu.deploy.dra-driver", "paused-for-driver-upgrade", true)]
    #[case("nvidia.com/gpu.deploy.client", "paused-for-mig-change", true)]
    #[case("nvidia.com/gpu.deploy.device-plugin", "paused-for-driver-upgrade", true)]
    #[case("nvidia.com/gpu.deploy.dra-driver", "true", false)]
    #[case("nvidia.com/gpu.deploy.dra-driver", "false", false)]
    #[case("nvidia.com/gpu.deploy.dcgm", "paused-for-driver-upgrade", false)]
    fn a_label_of_the_operator_asks_for_the_driver(
        #[case] name: &str,
        #[case] value: &str,
        #[case] asks: bool,
    ) {
        let mut node = ApiNode::default();
        assert_eq!(asked(&node), None);
        node.metadata.labels = Some([(name.to_owned(), value.to_owned())].into());
        assert_eq!(asked(&node), asks.then(|| format!("{name}={value}")));
    }

    #[rstest]
    #[case::as_usual(false, false, 3, Step::Nothing)]
    #[case::in_use(true, false, 3, Step::Wait(3))]
    #[case::idle(true, false, 0, Step::LetGo)]
    #[case::prepared_after_all(true, true, 1, Step::Reopen)]
    #[case::closed(true, true, 0, Step::Nothing)]
    #[case::over(false, true, 0, Step::Resume)]
    fn the_driver_is_let_go_of_when_no_claim_is_prepared_and_until_the_label_is_gone(
        #[case] asked: bool,
        #[case] closed: bool,
        #[case] prepared: usize,
        #[case] want: Step,
    ) {
        assert_eq!(step(asked, closed, prepared), want);
    }
}
