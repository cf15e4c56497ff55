//! One HTTPS request to a webhook.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{Request, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::value::{at, text};

/// Why a webhook gave no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("{0}")]
    Config(String),
    #[error("cannot connect to {0}: {1}")]
    Connect(String, std::io::Error),
    #[error("TLS with {0} failed: {1}")]
    Tls(String, std::io::Error),
    #[error("the request failed: {0}")]
    Http(#[from] hyper::Error),
    #[error("the answer has status {0}")]
    Status(u16),
    #[error("the answer is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("no answer within {0:?}: context deadline exceeded")]
    Timeout(Duration),
}

/// Where a webhook is, and by what name its certificate goes.
struct Place {
    address: String,
    name: String,
    path: String,
}

/// Posts a review and reads the answer.
pub(super) async fn call(
    hook: &Value,
    services: &BTreeMap<String, SocketAddr>,
    review: &Value,
) -> Result<Value, CallError> {
    let seconds = hook.get("timeoutSeconds").and_then(Value::as_u64).unwrap_or(10);
    let limit = Duration::from_secs(seconds);
    let place = place(hook, services)?;
    let bundle = text(hook, &["clientConfig", "caBundle"]);
    let config = tls_config(bundle)?;
    let body = serde_json::to_vec(review)?;
    tokio::time::timeout(limit, exchange(place, config, body)).await.map_err(|_| CallError::Timeout(limit))?
}

fn place(hook: &Value, services: &BTreeMap<String, SocketAddr>) -> Result<Place, CallError> {
    let config = |why: String| CallError::Config(why);
    if let Some(url) = at(hook, &["clientConfig", "url"]).and_then(Value::as_str) {
        let uri: Uri = url.parse().map_err(|e| config(format!("{url:?} is no URL: {e}")))?;
        if uri.scheme_str() != Some("https") {
            return Err(config(format!("{url:?}: the scheme must be https")));
        }
        let host = uri.host().ok_or_else(|| config(format!("{url:?} has no host")))?;
        let port = uri.port_u16().unwrap_or(443);
        let path = uri.path_and_query().map_or("/", |p| p.as_str()).to_owned();
        return Ok(Place {
            address: format!("{host}:{port}"),
            name: host.trim_matches(['[', ']']).to_owned(),
            path,
        });
    }
    let service = at(hook, &["clientConfig", "service"])
        .ok_or_else(|| config("clientConfig has neither url nor service".into()))?;
    let (namespace, name) = (text(service, &["namespace"]), text(service, &["name"]));
    let address = services
        .get(&format!("{namespace}/{name}"))
        .ok_or_else(|| config(format!("service {namespace}/{name} is not known to this control plane")))?;
    let path = match text(service, &["path"]) {
        "" => "/",
        path => path,
    };
    Ok(Place { address: address.to_string(), name: format!("{name}.{namespace}.svc"), path: path.to_owned() })
}

fn tls_config(bundle: &str) -> Result<ClientConfig, CallError> {
    let wrong = |why: String| CallError::Config(format!("caBundle: {why}"));
    let pem = STANDARD.decode(bundle).map_err(|e| wrong(e.to_string()))?;
    let certificates: Vec<CertificateDer<'static>> =
        CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>().map_err(|e| wrong(e.to_string()))?;
    if certificates.is_empty() {
        return Err(wrong("there is no certificate in it".into()));
    }
    let mut roots = RootCertStore::empty();
    for certificate in &certificates {
        roots.add(certificate.clone()).map_err(|e| wrong(e.to_string()))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
        .build()
        .map_err(|e| wrong(e.to_string()))?;
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong(e.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier { inner, certificates }))
        .with_no_client_auth();
    Ok(config)
}

/// The usual checks; besides, as Go has it, a certificate that is itself in the bundle is good.
#[derive(Debug)]
struct Verifier {
    inner: Arc<WebPkiServerVerifier>,
    certificates: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let usual = self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        if usual.is_err() && self.certificates.iter().any(|c| c.as_ref() == end_entity.as_ref()) {
            let parsed = ParsedCertificate::try_from(end_entity)?;
            rustls::client::verify_server_name(&parsed, server_name)?;
            return Ok(ServerCertVerified::assertion());
        }
        usual
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

async fn exchange(place: Place, config: ClientConfig, body: Vec<u8>) -> Result<Value, CallError> {
    let stream =
        TcpStream::connect(&place.address).await.map_err(|e| CallError::Connect(place.address.clone(), e))?;
    let name = ServerName::try_from(place.name.clone())
        .map_err(|e| CallError::Config(format!("{:?} is no server name: {e}", place.name)))?;
    let stream = TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
        .map_err(|e| CallError::Tls(place.address.clone(), e))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let driver = tokio::spawn(connection);
    let request = Request::post(&place.path)
        .header(header::HOST, place.name.as_str())
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, "application/json")
        .header(header::CONNECTION, "close")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| CallError::Config(e.to_string()))?;
    let response = sender.send_request(request).await?;
    let status = response.status();
    let bytes = response.into_body().collect().await?.to_bytes();
    // The webhook has closed it then, and counts it no more. How it ended says nothing about the answer.
    let _ = driver.await;
    if !status.is_success() {
        return Err(CallError::Status(status.as_u16()));
    }
    Ok(serde_json::from_slice(&bytes)?)
}
