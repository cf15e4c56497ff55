//! Builds the client of the API server.

use crate::args::Args;
use anyhow::Context;

pub(super) async fn client(args: &Args) -> anyhow::Result<kube::Client> {
    let config = match &args.kubeconfig {
        Some(path) => {
            let file = kube::config::Kubeconfig::read_from(path)
                .with_context(|| format!("cannot read kubeconfig {}", path.display()))?;
            kube::Config::from_custom_kubeconfig(file, &kube::config::KubeConfigOptions::default())
                .await
                .with_context(|| format!("cannot use kubeconfig {}", path.display()))?
        }
        None => kube::Config::infer().await.context("no kubeconfig and no service account")?,
    };
    client_of(config)
}

/// Builds a client that sends the agent's name and version. The machine's certificates are looked for only if
/// the API server uses TLS.
///
/// # Errors
/// Fails if the configuration does not make a client.
pub fn client_of(mut config: kube::Config) -> anyhow::Result<kube::Client> {
    let agent = concat!("aliquot-kubelet-plugin/", env!("CARGO_PKG_VERSION"));
    if config.cluster_url.scheme_str() == Some("http") {
        // Otherwise a machine without any certificate is an error, although none is needed.
        config.root_cert.get_or_insert_default();
    }
    config.headers.push((axum::http::header::USER_AGENT, axum::http::HeaderValue::from_static(agent)));
    kube::Client::try_from(config).context("cannot make an API client")
}

/// Builds a client that reaches no server: a farewell works from local state, and every look-up fails at
/// once. It has no TLS either, because the farewell's pod and the agent's image hold no certificate
/// authority.
pub(super) fn no_api() -> kube::Client {
    let nobody = tower::service_fn(async |_: axum::http::Request<kube::client::Body>| {
        Err::<axum::http::Response<kube::client::Body>, _>(std::io::Error::other("a farewell asks no API"))
    });
    kube::Client::new(nobody, "default")
}
