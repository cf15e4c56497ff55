//! Serves the registration: tells the kubelet the driver's name and socket, and takes in its answer.

use aliquot_proto::pluginregistration::v1::registration_server::Registration;
use aliquot_proto::pluginregistration::v1::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use std::path::PathBuf;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

/// The kubelet's last answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Registered {
    /// The kubelet has not answered yet.
    #[default]
    Unknown,
    /// The kubelet uses the driver.
    Yes,
    /// The kubelet refused the driver, for this reason.
    No(String),
}

/// The service that answers the kubelet's plugin watcher.
#[derive(Debug, Clone)]
pub struct Registrar {
    driver: String,
    endpoint: PathBuf,
    state: watch::Sender<Registered>,
}

impl Registrar {
    /// Creates a registrar that points at the DRA socket `endpoint` and reports into `state`.
    pub fn new(driver: &str, endpoint: PathBuf, state: watch::Sender<Registered>) -> Self {
        Self { driver: driver.to_owned(), endpoint, state }
    }
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: aliquot_proto::PLUGIN_TYPE_DRA.to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: aliquot_proto::registered::ALL.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        let state = if status.plugin_registered {
            tracing::info!("registered with the kubelet");
            Registered::Yes
        } else {
            tracing::error!(error = %status.error, "the kubelet refused the registration");
            Registered::No(status.error)
        };
        self.state.send_replace(state);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
