//! The health services: which devices work, for the kubelet to show in pods.

use crate::prepare::Overview;
use aliquot_model::{DeviceName, GpuUuid};
use aliquot_nvml::{EventKind, GpuEvent};
use aliquot_proto::dra_health::{v1, v1alpha1};
use futures::Stream;
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// XIDs that the application caused; the GPU is as good as before.
const OF_APPLICATIONS: [u64; 6] = [13, 31, 43, 45, 68, 109];
/// How long after its last error a GPU counts as unhealthy.
const MEMORY: SignedDuration = SignedDuration::from_mins(10);
/// A complete list is sent at least this often…
const REFRESH: Duration = Duration::from_secs(30);
/// …and counts for so long.
const TIMEOUT_SECONDS: i64 = 90;

/// Returns true for an error of the GPU itself that was not corrected.
pub fn is_grave(kind: EventKind) -> bool {
    match kind {
        EventKind::Xid(number) => !OF_APPLICATIONS.contains(&number),
        EventKind::EccDoubleBit => true,
        EventKind::EccSingleBit | EventKind::Other(_) => false,
    }
}

/// The last grave error of each GPU, and the GPUs that do not answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    errors: BTreeMap<GpuUuid, (Timestamp, String)>,
    stuck: BTreeMap<GpuUuid, String>,
}

impl Faults {
    /// Notes an event if it says something about the GPU's health.
    pub fn note(&mut self, event: &GpuEvent, now: Timestamp) {
        let what = match event.kind {
            kind if !is_grave(kind) => return,
            EventKind::Xid(number) => format!("XID {number}"),
            _ => "an uncorrectable memory error".to_owned(),
        };
        if let Some(gpu) = &event.gpu {
            self.errors.insert(gpu.clone(), (now, what));
        }
    }

    /// Notes which GPUs do not answer now, and to what.
    pub fn set_stuck(&mut self, stuck: impl IntoIterator<Item = (GpuUuid, String)>) {
        self.stuck = stuck.into_iter().collect();
    }

    /// Why a GPU is unhealthy now.
    pub fn of(&self, gpu: &GpuUuid, now: Timestamp) -> Option<String> {
        if let Some(what) = self.stuck.get(gpu) {
            return Some(what.clone());
        }
        let (at, what) = self.errors.get(gpu)?;
        (now.duration_since(*at) < MEMORY).then(|| format!("{what} at {at}"))
    }
}

/// A device and whether it works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Name.
    pub device: String,
    /// Why it does not, or `None`.
    pub fault: Option<String>,
}

/// The health of everything published.
pub fn judge(
    published: &[DeviceName],
    overview: &Overview,
    faults: &Faults,
    now: Timestamp,
) -> Vec<DeviceHealth> {
    published
        .iter()
        .map(|device| {
            let gpus = overview.inventory.iter().flat_map(|inventory| &inventory.gpus);
            let gpu = gpus.into_iter().find(|gpu| gpu.minor == device.minor());
            let fault = match gpu {
                Some(gpu) => faults.of(&gpu.uuid, now),
                None => {
                    // Which GPU it was is known from the ledger.
                    let bound = overview.ledger.bindings.get(&device.minor());
                    let known = bound.and_then(|binding| faults.of(&binding.gpu, now));
                    known.or_else(|| Some("the GPU cannot be read".to_owned()))
                }
            };
            DeviceHealth { device: device.to_string(), fault }
        })
        .collect()
}

/// Serves both versions.
#[derive(Debug, Clone)]
pub struct Service {
    /// Pool.
    pub pool: String,
    /// What is published.
    pub published: watch::Receiver<Arc<Vec<DeviceName>>>,
    /// The hardware.
    pub overview: watch::Receiver<Arc<Overview>>,
    /// Its errors.
    pub faults: watch::Receiver<Arc<Faults>>,
    /// Ends the streams, which would otherwise hold up the server's shutdown for ever.
    pub stop: CancellationToken,
}

impl Service {
    /// Lists without end: one now, one at each change, one every [`REFRESH`].
    fn lists(&self) -> impl Stream<Item = Vec<DeviceHealth>> + Send + 'static {
        let mut service = self.clone();
        service.published.mark_changed();
        futures::stream::unfold((service, None::<Vec<DeviceHealth>>), |(mut service, last)| async move {
            loop {
                let due = tokio::time::sleep(if last.is_none() { Duration::ZERO } else { REFRESH });
                let refresh = tokio::select! {
                    () = due => true,
                    Ok(()) = service.published.changed() => false,
                    Ok(()) = service.overview.changed() => false,
                    Ok(()) = service.faults.changed() => false,
                };
                let list = {
                    let published = Arc::clone(&service.published.borrow_and_update());
                    let overview = Arc::clone(&service.overview.borrow_and_update());
                    let faults = Arc::clone(&service.faults.borrow_and_update());
                    judge(&published, &overview, &faults, Timestamp::now())
                };
                if refresh || last.as_ref() != Some(&list) {
                    return Some((list.clone(), (service, Some(list))));
                }
            }
        })
    }
}

macro_rules! serve {
    ($version:ident) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for Service {
            type NodeWatchResourcesStream =
                Pin<Box<dyn Stream<Item = Result<$version::NodeWatchResourcesResponse, Status>> + Send>>;

            async fn node_watch_resources(
                &self,
                _: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                use futures::StreamExt;
                let stop = self.stop.clone().cancelled_owned();
                let pool = self.pool.clone();
                let stream = self.lists().map(move |list| {
                    let now = Timestamp::now().as_second();
                    let devices = list.into_iter().map(|device| $version::DeviceHealth {
                        device: Some($version::DeviceIdentifier {
                            pool_name: pool.clone(),
                            device_name: device.device,
                        }),
                        health: match &device.fault {
                            None => $version::HealthStatus::Healthy.into(),
                            Some(_) => $version::HealthStatus::Unhealthy.into(),
                        },
                        last_updated_time: now,
                        health_check_timeout_seconds: TIMEOUT_SECONDS,
                        message: device.fault.unwrap_or_default(),
                    });
                    Ok($version::NodeWatchResourcesResponse { devices: devices.collect() })
                });
                Ok(Response::new(Box::pin(stream.take_until(stop))))
            }
        }
    };
}

serve!(v1);
serve!(v1alpha1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::h100;
    use aliquot_nvml::{DriverInfo, Inventory};

    fn overview() -> Overview {
        let inventory = Inventory {
            driver: DriverInfo { driver_version: "1".into(), cuda_version: (13, 0) },
            gpus: vec![h100(0)],
            live: Vec::new(),
            unreadable: Vec::new(),
        };
        Overview { inventory: Some(inventory), ..Overview::default() }
    }

    fn event(kind: EventKind) -> GpuEvent {
        GpuEvent { gpu: Some(h100(0).uuid), gpu_instance: None, compute_instance: None, kind }
    }

    fn fault_after(kind: EventKind, seconds: i64) -> Option<String> {
        let at = Timestamp::from_second(1000).unwrap();
        let mut faults = Faults::default();
        faults.note(&event(kind), at);
        let now = Timestamp::from_second(1000 + seconds).unwrap();
        judge(&[DeviceName::gpu(0)], &overview(), &faults, now).remove(0).fault
    }

    #[test]
    fn grave_errors_count_for_a_while_and_the_applications_own_do_not() {
        assert!(fault_after(EventKind::Xid(79), 1).unwrap().contains("XID 79"));
        assert!(fault_after(EventKind::EccDoubleBit, 1).is_some());
        assert_eq!(fault_after(EventKind::Xid(79), 601), None);
        assert_eq!(fault_after(EventKind::Xid(31), 1), None);
        assert_eq!(fault_after(EventKind::EccSingleBit, 1), None);
    }

    #[test]
    fn a_gpu_that_does_not_answer_is_unhealthy_until_it_answers() {
        let mut faults = Faults::default();
        let gpu = h100(3).uuid;
        let mut overview = Overview::default();
        overview.ledger.bind([(3, gpu.clone())]);
        let judged = |faults: &Faults, overview: &Overview| {
            judge(&[DeviceName::gpu(3)], overview, faults, Timestamp::UNIX_EPOCH).remove(0).fault
        };
        faults.set_stuck([(gpu, "it is stuck".to_owned())]);
        assert_eq!(judged(&faults, &overview).as_deref(), Some("it is stuck"));
        faults.set_stuck([]);
        assert_eq!(judged(&faults, &overview).as_deref(), Some("the GPU cannot be read"));
    }

    #[test]
    fn a_gpu_that_cannot_be_read_is_unhealthy() {
        let got = judge(&[DeviceName::gpu(3)], &overview(), &Faults::default(), Timestamp::UNIX_EPOCH);
        assert!(got[0].fault.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_stream_begins_with_a_complete_list_and_repeats_it() {
        use futures::StreamExt;
        let (published, published_rx) = watch::channel(Arc::new(vec![DeviceName::gpu(0)]));
        let (_overview, overview_rx) = watch::channel(Arc::new(overview()));
        let (faults, faults_rx) = watch::channel(Arc::new(Faults::default()));
        let service = Service {
            pool: "p".into(),
            published: published_rx,
            overview: overview_rx,
            faults: faults_rx,
            stop: CancellationToken::new(),
        };
        let mut lists = Box::pin(service.lists());
        assert_eq!(lists.next().await.unwrap().len(), 1);
        assert_eq!(lists.next().await.unwrap().len(), 1);
        published.send_replace(Arc::new(vec![DeviceName::gpu(0), DeviceName::gpu(1)]));
        assert_eq!(lists.next().await.unwrap().len(), 2);
        faults.send_modify(|f| Arc::make_mut(f).note(&event(EventKind::Xid(79)), Timestamp::now()));
        assert!(lists.next().await.unwrap()[0].fault.is_some());
    }
}
