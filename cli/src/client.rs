//! How commands reach the cluster.

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::api::core::v1::Namespace;
use kube::config::{Config, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client};
use std::error::Error;
use std::path::Path;

/// By the kubeconfig that is named; else `KUBECONFIG`, `~/.kube/config`, or the pod's service account.
///
/// # Errors
/// If there is none, or it cannot be used.
pub(crate) async fn connect(kubeconfig: Option<&Path>) -> Result<Client> {
    let Some(path) = kubeconfig else {
        let config = Config::infer().await.map_err(|error| {
            // Of the two ways that were tried people mean the file.
            let of_file = error.source().and_then(|source| source.downcast_ref::<KubeconfigError>());
            let why = of_file.map_or_else(|| error.to_string(), |error| reason(None, error));
            anyhow!(
                "no cluster to talk to: {why}; set KUBECONFIG or --kubeconfig (a pod uses its service account)"
            )
        })?;
        return Client::try_from(config).context("cannot make a client");
    };
    let wrong = |error: KubeconfigError| anyhow!(reason(Some(path), &error));
    let file = Kubeconfig::read_from(path).map_err(wrong)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    Client::try_from(config.map_err(wrong)?).context("cannot make a client")
}

/// Says so if a namespace does not exist. Who may not look is not held up.
///
/// # Errors
/// If it does not exist.
pub(crate) async fn check_namespace(client: &Client, namespace: &str) -> Result<()> {
    match Api::<Namespace>::all(client.clone()).get_opt(namespace).await {
        Ok(None) => {
            bail!("there is no namespace {namespace}; `kubectl get namespaces` shows those that there are")
        }
        Ok(Some(_)) | Err(_) => Ok(()),
    }
}

/// What is wrong with a kubeconfig, which it names once.
fn reason(path: Option<&Path>, error: &KubeconfigError) -> String {
    let named =
        path.map_or_else(|| "the kubeconfig".to_owned(), |path| format!("kubeconfig {}", path.display()));
    match error {
        KubeconfigError::ReadConfig(error, path) => {
            format!("kubeconfig {} cannot be read: {error}", path.display())
        }
        // The parser goes on to show the place.
        KubeconfigError::Parse(error) => {
            let text = error.to_string();
            format!(
                "{named} is no kubeconfig: {}",
                text.lines().next().unwrap_or(&text).trim_start_matches("error: ")
            )
        }
        other => format!("{named} cannot be used: {other}"),
    }
}

/// An error in words: what the API server said, not how its answer looks in a program.
pub(crate) fn told(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        let (text, last) = match cause.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(status)) => (status.message.clone(), true),
            Some(kube::Error::Service(_) | kube::Error::HyperError(_)) => {
                let mut root = cause;
                while let Some(source) = root.source() {
                    root = source;
                }
                (format!("the API server of the kubeconfig cannot be reached: {root}"), true)
            }
            _ => (cause.to_string(), false),
        };
        // Some say what their cause says.
        if parts.last().is_none_or(|before| !before.ends_with(&text)) {
            parts.push(text);
        }
        if last {
            break;
        }
    }
    parts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    #[test]
    fn what_the_api_server_said_is_told_once() {
        let answer = kube::Error::Api(Box::new(Status::failure("pods is forbidden: no rights", "Forbidden")));
        let error = anyhow::Error::new(answer).context("pods").context("cannot read the cluster");
        assert_eq!(super::told(&error), "cannot read the cluster: pods: pods is forbidden: no rights");
        let refused = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "connection refused");
        let error =
            anyhow::Error::new(kube::Error::Service(Box::new(refused))).context("cannot read the cluster");
        assert_eq!(
            super::told(&error),
            "cannot read the cluster: the API server of the kubeconfig cannot be reached: connection refused"
        );
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_namespace_that_does_not_exist_is_named() {
        let plane = aliquot_control_plane::serve(Default::default()).await.expect("an API");
        let config = Config::new(plane.url().parse().expect("a URL"));
        let client = Client::try_from(config).expect("a client");
        check_namespace(&client, "default").await.expect("it exists");
        let said = check_namespace(&client, "nowhere").await.unwrap_err().to_string();
        assert!(said.starts_with("there is no namespace nowhere; "), "{said}");
    }

    async fn told(path: &Path) -> String {
        format!("{:#}", connect(Some(path)).await.err().expect("it cannot be used"))
    }

    #[tokio::test]
    async fn a_kubeconfig_that_cannot_be_used_is_named_once_with_the_reason() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config");
        let name = path.display();
        assert_eq!(
            told(&path).await,
            format!("kubeconfig {name} cannot be read: No such file or directory (os error 2)")
        );
        std::fs::write(&path, "vm\n").expect("written");
        assert_eq!(
            told(&path).await,
            format!("kubeconfig {name} is no kubeconfig: line 1 column 1: expected mapping start")
        );
        std::fs::write(&path, "{apiVersion: v1, kind: Config}\n").expect("written");
        let said = told(&path).await;
        assert!(said.starts_with(&format!("kubeconfig {name} cannot be used: ")), "{said}");
    }
}
