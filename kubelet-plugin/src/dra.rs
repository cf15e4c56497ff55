//! Implements the DRA services: decode, call, encode. `v1` and `v1beta1` differ only in the share ID.

use crate::agent::{Agent, CallError};
use crate::claim::ClaimRef;
use crate::prepare::Prepared;
use aliquot_proto::dra::{v1, v1beta1};
use std::collections::HashMap;
use tonic::{Request, Response, Status};

/// The service, which serves both versions.
#[derive(Debug, Clone)]
pub struct Service(pub Agent);

impl Service {
    async fn prepare_all(&self, claims: Vec<ClaimRef>) -> HashMap<String, Result<Vec<Prepared>, CallError>> {
        let mut answers = HashMap::with_capacity(claims.len());
        // Claims are prepared one after the other: the node's lock would order them anyway. Every claim gets
        // an entry.
        for claim in claims {
            let uid = claim.uid.clone();
            answers.insert(uid, self.0.prepare(claim).await);
        }
        answers
    }

    async fn unprepare_all(&self, claims: Vec<ClaimRef>) -> HashMap<String, Result<(), CallError>> {
        let mut answers = HashMap::with_capacity(claims.len());
        for claim in claims {
            let uid = claim.uid.clone();
            answers.insert(uid, self.0.unprepare(claim).await);
        }
        answers
    }
}

macro_rules! serve {
    ($version:ident, $device:expr) => {
        #[tonic::async_trait]
        impl $version::dra_plugin_server::DraPlugin for Service {
            #[tracing::instrument(skip_all, name = "NodePrepareResources", fields(version = stringify!($version)))]
            async fn node_prepare_resources(
                &self,
                request: Request<$version::NodePrepareResourcesRequest>,
            ) -> Result<Response<$version::NodePrepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(|claim| ClaimRef {
                    namespace: claim.namespace,
                    name: claim.name,
                    uid: claim.uid,
                });
                let answers = self.prepare_all(claims.collect()).await.into_iter().map(|(uid, answer)| {
                    let answer = match answer {
                        Ok(devices) => $version::NodePrepareResourceResponse {
                            devices: devices.into_iter().map($device).collect(),
                            error: String::new(),
                        },
                        Err(error) => $version::NodePrepareResourceResponse {
                            devices: Vec::new(),
                            error: error.to_string(),
                        },
                    };
                    (uid, answer)
                });
                Ok(Response::new($version::NodePrepareResourcesResponse { claims: answers.collect() }))
            }

            #[tracing::instrument(skip_all, name = "NodeUnprepareResources", fields(version = stringify!($version)))]
            async fn node_unprepare_resources(
                &self,
                request: Request<$version::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$version::NodeUnprepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(|claim| ClaimRef {
                    namespace: claim.namespace,
                    name: claim.name,
                    uid: claim.uid,
                });
                let answers = self.unprepare_all(claims.collect()).await.into_iter().map(|(uid, answer)| {
                    let error = answer.err().map(|error| error.to_string()).unwrap_or_default();
                    (uid, $version::NodeUnprepareResourceResponse { error })
                });
                Ok(Response::new($version::NodeUnprepareResourcesResponse { claims: answers.collect() }))
            }
        }
    };
}

serve!(v1, |device: Prepared| v1::Device {
    request_names: vec![device.request],
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: device.cdi,
    share_id: device.share_id,
});
serve!(v1beta1, |device: Prepared| v1beta1::Device {
    request_names: vec![device.request],
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: device.cdi,
});
