//! The connection of commands to the cluster.

use crate::args::ClusterArgs;
use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::api::core::v1::Namespace;
use kube::config::{Config, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client};
use std::error::Error;
use std::path::Path;

/// Connects with the kubeconfig and context that the arguments name; otherwise with `KUBECONFIG`,
/// `~/.kube/config`, or the pod's service account.
///
/// # Errors
/// If there is no configuration, or it cannot be used.
pub(crate) async fn connect(cluster: &ClusterArgs) -> Result<Client> {
    let mut config = config(cluster).await?;
    if let Some(user) = &cluster.as_user {
        config.auth_info.impersonate = Some(user.clone());
    }
    Client::try_from(config).context("cannot make a client")
}

async fn config(cluster: &ClusterArgs) -> Result<Config> {
    let path = cluster.kubeconfig.as_deref();
    if path.is_none() && cluster.context.is_none() {
        return Config::infer().await.map_err(|error| {
            // Two ways were tried, and users mean the file.
            let of_file = error.source().and_then(|source| source.downcast_ref::<KubeconfigError>());
            let why = of_file.map_or_else(|| error.to_string(), |error| reason(None, error));
            anyhow!(
                "no cluster to talk to: {why}; set KUBECONFIG or --kubeconfig (a pod uses its service account)"
            )
        });
    }
    let wrong = |error: KubeconfigError| anyhow!(reason(path, &error));
    let file = path.map_or_else(Kubeconfig::read, Kubeconfig::read_from).map_err(wrong)?;
    if let Some(context) = &cluster.context
        && !file.contexts.iter().any(|known| known.name == *context)
    {
        let known: Vec<&str> = file.contexts.iter().map(|known| known.name.as_str()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        bail!("{} has no context {context:?}; it has {known}", named(path));
    }
    let options = KubeConfigOptions { context: cluster.context.clone(), ..KubeConfigOptions::default() };
    Config::from_custom_kubeconfig(file, &options).await.map_err(wrong)
}

/// Checks that a namespace exists. A user who may not read namespaces is not stopped.
///
/// # Errors
/// If the namespace does not exist.
pub(crate) async fn check_namespace(client: &Client, namespace: &str) -> Result<()> {
    match Api::<Namespace>::all(client.clone()).get_opt(namespace).await {
        Ok(None) => {
            bail!("there is no namespace {namespace}; `kubectl get namespaces` shows those that there are")
        }
        Ok(Some(_)) | Err(_) => Ok(()),
    }
}

fn named(path: Option<&Path>) -> String {
    path.map_or_else(|| "the kubeconfig".to_owned(), |path| format!("kubeconfig {}", path.display()))
}

/// Returns what is wrong with a kubeconfig, and names the file once.
fn reason(path: Option<&Path>, error: &KubeconfigError) -> String {
    let named = named(path);
    match error {
        KubeconfigError::ReadConfig(error, path) => {
            format!("kubeconfig {} cannot be read: {error}", path.display())
        }
        // Further lines of the parser's error show the place.
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

/// Returns an error as text for users: the message of the API server, not the debug form of its answer.
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
        // Some errors repeat the text of their cause.
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
        let cluster = ClusterArgs { kubeconfig: Some(path.to_owned()), ..ClusterArgs::default() };
        format!("{:#}", connect(&cluster).await.err().expect("it cannot be used"))
    }

    #[tokio::test]
    async fn the_api_server_is_told_as_whom_to_act() {
        let service = axum::Router::new().fallback(async |headers: axum::http::HeaderMap| {
            let user =
                headers.get("impersonate-user").map(|user| user.to_str().unwrap_or_default().to_owned());
            (axum::http::StatusCode::FORBIDDEN, format!("as {user:?}"))
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(axum::serve(listener, service).into_future());
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config");
        let text = format!(
            "{{apiVersion: v1, kind: Config, current-context: a, users: [{{name: u, user: {{}}}}], clusters: [{{name: c, \
             cluster: {{server: '{url}'}}}}], contexts: [{{name: a, context: {{cluster: c, user: u}}}}]}}\n"
        );
        std::fs::write(&path, text).expect("written");
        let cluster = ClusterArgs { kubeconfig: Some(path), as_user: Some("alice".into()), context: None };
        let client = connect(&cluster).await.expect("a client");
        let error = Api::<Namespace>::all(client).get("x").await.expect_err("refused");
        assert!(format!("{error:?}").contains("alice"), "{error:?}");
    }

    #[tokio::test]
    async fn the_context_that_is_named_is_used_and_one_that_is_not_there_is_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config");
        let text = "{apiVersion: v1, kind: Config, current-context: a, users: [{name: u, user: {}}],\n\
             clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], contexts: [\n\
             {name: a, context: {cluster: c, user: u, namespace: of-a}},\n\
             {name: b, context: {cluster: c, user: u, namespace: of-b}}]}\n";
        std::fs::write(&path, text).expect("written");
        let of = |context: Option<&str>| ClusterArgs {
            kubeconfig: Some(path.clone()),
            context: context.map(str::to_owned),
            as_user: None,
        };
        assert_eq!(connect(&of(None)).await.expect("the current one").default_namespace(), "of-a");
        assert_eq!(connect(&of(Some("b"))).await.expect("the other").default_namespace(), "of-b");
        let said = connect(&of(Some("x"))).await.err().expect("none").to_string();
        assert_eq!(said, format!("kubeconfig {} has no context \"x\"; it has a, b", path.display()));
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
