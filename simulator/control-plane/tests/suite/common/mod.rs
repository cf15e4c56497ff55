//! A control plane and clients for it.

use std::time::Duration;

use aliquot_control_plane::{Handle, Options, serve};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};

pub(crate) async fn start(options: Options) -> (Handle, Client) {
    let handle = serve(options).await.unwrap();
    let client = client(&handle, "admin").await;
    (handle, client)
}

/// A client through the kubeconfig that the control plane writes.
pub(crate) async fn client(handle: &Handle, user: &str) -> Client {
    let kubeconfig = Kubeconfig::from_yaml(&handle.kubeconfig(user)).unwrap();
    let mut config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    // The client's own retries would hide the faults, and take long about it.
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

/// Waits until something holds; fails after a time that no machine should need.
pub(crate) async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..2000 {
        if let Some(found) = check().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never happened: {what}");
}

pub(crate) fn code<T: std::fmt::Debug>(result: kube::Result<T>) -> (u16, String) {
    match result {
        Err(kube::Error::Api(status)) => (status.code, status.reason),
        other => panic!("expected an API error, got {other:?}"),
    }
}
