//! Serves the health services: they report which devices work, and the kubelet shows this in pods.

use super::state::Health;
use super::xid::Xids;
use crate::notice;
use crate::prepare::Overview;
use aliquot_model::DeviceName;
use aliquot_proto::dra_health::{v1, v1alpha1};
use futures::Stream;
use jiff::Timestamp;
use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// The longest interval between complete lists.
const REFRESH: Duration = Duration::from_secs(30);
/// Seconds for which a list is valid.
const TIMEOUT_SECONDS: i64 = 90;

/// The health of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    /// The name of the device.
    pub device: String,
    /// The fault of the device, or `None` if it works.
    pub fault: Option<String>,
}

/// Judges the health of all published devices.
pub fn judge(
    published: &[DeviceName],
    overview: &Overview,
    health: &Health,
    xids: &Xids,
) -> Vec<DeviceHealth> {
    let gone = |device: &str| {
        let mut gone = overview.gone.iter().filter(|gone| gone.device == device);
        gone.next().map(notice::partition_gone)
    };
    // Devices that claims have still belong to them when they are not published any more.
    let names: BTreeSet<String> = published.iter().map(ToString::to_string).collect();
    let unpublished = overview.gone.iter().filter(|gone| !names.contains(&gone.device));
    let unpublished = unpublished
        .map(|gone| DeviceHealth { device: gone.device.clone(), fault: Some(notice::partition_gone(gone)) });
    let judged = published.iter().map(|device| {
        let gpus = overview.inventory.iter().flat_map(|inventory| &inventory.gpus);
        let gpu = gpus.into_iter().find(|gpu| gpu.minor == device.minor());
        let fault = match gpu {
            Some(gpu) => health.fault(&gpu.uuid, xids),
            None => {
                // The ledger knows which GPU it was.
                let bound = overview.ledger.bindings.get(&device.minor());
                let known = bound.and_then(|binding| health.fault(&binding.gpu, xids));
                known.or_else(|| Some("the GPU cannot be read".to_owned()))
            }
        };
        let device = device.to_string();
        DeviceHealth { fault: gone(&device).or(fault), device }
    });
    judged.chain(unpublished).collect()
}

/// The service, which serves both versions.
#[derive(Debug, Clone)]
pub struct Service {
    /// The name of the pool.
    pub pool: String,
    /// The names of the published devices.
    pub published: watch::Receiver<Arc<Vec<DeviceName>>>,
    /// The overview of the hardware.
    pub overview: watch::Receiver<Arc<Overview>>,
    /// The health of the GPUs.
    pub health: watch::Receiver<Arc<Health>>,
    /// The meaning of XIDs.
    pub xids: Arc<Xids>,
    /// Ends the streams, which would otherwise hold up the server's shutdown for ever.
    pub stop: CancellationToken,
}

impl Service {
    /// Returns an endless stream of lists: one now, one at each change, one every [`REFRESH`].
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
                    Ok(()) = service.health.changed() => false,
                };
                let list = {
                    let published = Arc::clone(&service.published.borrow_and_update());
                    let overview = Arc::clone(&service.overview.borrow_and_update());
                    let health = Arc::clone(&service.health.borrow_and_update());
                    judge(&published, &overview, &health, &service.xids)
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
    use crate::lost_partitions::GonePartition;
    use crate::testing::{claim, h100};
    use aliquot_model::{GpuUuid, Placement};
    use aliquot_nvml::{DriverInfo, EventKind, GpuEvent, Inventory};

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

    fn fault_after(kind: EventKind) -> Option<String> {
        let mut health = Health::default();
        health.event(&event(kind), &Xids::default(), Timestamp::UNIX_EPOCH);
        judge(&[DeviceName::gpu(0)], &overview(), &health, &Xids::default()).remove(0).fault
    }

    #[test]
    fn errors_of_the_gpu_make_it_unhealthy_and_the_applications_own_and_informational_ones_do_not() {
        assert!(fault_after(EventKind::Xid(79)).unwrap().contains("XID 79"));
        assert!(fault_after(EventKind::EccDoubleBit).is_some());
        assert_eq!(fault_after(EventKind::Xid(31)), None);
        assert_eq!(fault_after(EventKind::Xid(94)), None);
        assert_eq!(fault_after(EventKind::EccSingleBit), None);
    }

    #[test]
    fn a_gpu_that_does_not_answer_is_unhealthy_until_it_answers() {
        let mut health = Health::default();
        let gpu = h100(3).uuid;
        let mut overview = Overview::default();
        overview.ledger.bind([(3, gpu.clone())]);
        let judged = |health: &Health, overview: &Overview| {
            judge(&[DeviceName::gpu(3)], overview, health, &Xids::default()).remove(0).fault
        };
        let stuck: [(Option<GpuUuid>, Option<u32>, String); 1] =
            [(Some(gpu), None, "it is stuck".to_owned())];
        health.set_stuck(&stuck, Timestamp::UNIX_EPOCH);
        assert_eq!(judged(&health, &overview).as_deref(), Some("it is stuck"));
        health.set_stuck(&[], Timestamp::UNIX_EPOCH);
        assert_eq!(judged(&health, &overview).as_deref(), Some("the GPU cannot be read"));
    }

    #[test]
    fn a_gpu_that_cannot_be_read_is_unhealthy() {
        let got = judge(&[DeviceName::gpu(3)], &overview(), &Health::default(), &Xids::default());
        assert!(got[0].fault.is_some());
    }

    #[test]
    fn a_partition_that_is_gone_is_unhealthy_also_where_it_is_published_no_more() {
        let device = DeviceName::parse("gpu-0-mig-1g10gb-19-6").unwrap();
        let gone = GonePartition {
            claim: claim("a"),
            device: device.to_string(),
            gpu: h100(0).uuid,
            placement: Placement::new(6, 1),
        };
        let overview = Overview { gone: vec![gone], ..overview() };
        let published = [DeviceName::gpu(0), device.clone()];
        for published in [&published[..], &published[..1]] {
            let got = judge(published, &overview, &Health::default(), &Xids::default());
            assert_eq!((got.len(), got[0].fault.as_ref()), (2, None));
            assert_eq!(got[1].device, device.to_string());
            assert!(got[1].fault.as_ref().unwrap().contains("Delete the pods"), "{got:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_stream_begins_with_a_complete_list_and_repeats_it() {
        use futures::StreamExt;
        let (published, published_rx) = watch::channel(Arc::new(vec![DeviceName::gpu(0)]));
        let (_overview, overview_rx) = watch::channel(Arc::new(overview()));
        let (health, health_rx) = watch::channel(Arc::new(Health::default()));
        let service = Service {
            pool: "p".into(),
            published: published_rx,
            overview: overview_rx,
            health: health_rx,
            xids: Arc::default(),
            stop: CancellationToken::new(),
        };
        let mut lists = Box::pin(service.lists());
        assert_eq!(lists.next().await.unwrap().len(), 1);
        assert_eq!(lists.next().await.unwrap().len(), 1);
        published.send_replace(Arc::new(vec![DeviceName::gpu(0), DeviceName::gpu(1)]));
        assert_eq!(lists.next().await.unwrap().len(), 2);
        health.send_modify(|health| {
            Arc::make_mut(health).event(&event(EventKind::Xid(79)), &Xids::default(), Timestamp::now());
        });
        assert!(lists.next().await.unwrap()[0].fault.is_some());
    }
}
