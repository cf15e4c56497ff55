//! Metrics, as a scraper reads them.

use crate::cluster::{Cluster, SYSTEM};
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

/// A ServiceAccount of the namespace default that may read metrics, by the values that tests install with.
pub const READER: &str = "default";

/// What a scraper is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The page.
    Page(String),
    /// A status, and why.
    Refused(u16, String),
}

impl Cluster {
    /// A token of a ServiceAccount.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn token(&self, namespace: &str, account: &str) -> Result<String> {
        let token = self.kubectl(&["-n", namespace, "create", "token", account])?;
        Ok(token.trim().to_owned())
    }

    /// The metrics of one of our pods, for who may read them.
    ///
    /// # Errors
    /// If they are not served, or not to us.
    pub async fn metrics(&self, pod: &str) -> Result<String> {
        match self.scrape(pod, Some(&self.token("default", READER)?)).await? {
            Answer::Page(text) => Ok(text),
            Answer::Refused(status, why) => bail!("{pod} answers {status}: {why}"),
        }
    }

    /// Asks one of our pods for its metrics at their own port, with a token or none.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn scrape(&self, pod: &str, token: Option<&str>) -> Result<Answer> {
        let mut server = kube::Config::new(format!("https://{}", self.page(pod, "metrics").await?).parse()?);
        server.accept_invalid_certs = true;
        ask(server, token).await
    }

    /// The same, of who trusts one certificate (DER) alone, and knows whose it is.
    ///
    /// # Errors
    /// If it does not answer, or serves another certificate.
    pub async fn scrape_trusting(
        &self,
        pod: &str,
        token: &str,
        certificate: &[u8],
        name: &str,
    ) -> Result<Answer> {
        let mut server = kube::Config::new(format!("https://{}", self.page(pod, "metrics").await?).parse()?);
        server.root_cert = Some(vec![certificate.to_vec()]);
        server.tls_server_name = Some(name.to_owned());
        ask(server, Some(token)).await
    }

    /// Asks one of our pods for the metrics at the port that has its probes.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn scrape_plainly(&self, pod: &str) -> Result<Answer> {
        let addr = self.page(pod, "http").await?;
        ask(kube::Config::new(format!("http://{addr}").parse()?), None).await
    }

    /// The address of a pod's port.
    async fn page(&self, pod: &str, port: &str) -> Result<String> {
        let found = Api::<Pod>::namespaced(self.client.clone(), SYSTEM).get(pod).await?;
        let ports =
            found.spec.iter().flat_map(|spec| &spec.containers).flat_map(|one| one.ports.iter().flatten());
        let number =
            ports.filter(|one| one.name.as_deref() == Some(port)).map(|one| one.container_port).next();
        let number = number.with_context(|| format!("{pod} has no port {port}"))?;
        let ip =
            found.status.and_then(|status| status.pod_ip).with_context(|| format!("{pod} has no address"))?;
        Ok(format!("{ip}:{number}"))
    }
}

async fn ask(server: kube::Config, token: Option<&str>) -> Result<Answer> {
    let asked = server.cluster_url.to_string();
    let client = kube::Client::try_from(server)?;
    let mut request = http::Request::get("/metrics");
    if let Some(token) = token {
        request = request.header(http::header::AUTHORIZATION, format!("Bearer {token}"));
    }
    let request = request.body(kube::client::Body::empty())?;
    let answer = client.send(request).await.with_context(|| format!("asking {asked}"))?;
    let status = answer.status();
    let text = String::from_utf8(answer.into_body().collect_bytes().await?.to_vec())?;
    Ok(if status.is_success() {
        Answer::Page(text)
    } else {
        Answer::Refused(status.as_u16(), text.trim().to_owned())
    })
}
