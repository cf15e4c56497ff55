//! The certificate of a port: one that the administrator provides, read again as it is renewed, or a
//! self-signed one, which does not prove an identity but encrypts the traffic.

use rcgen::{CertificateParams, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::io::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// The interval at which the files are read.
const LOOK: Duration = Duration::from_secs(60);
/// The time for which a self-signed certificate is served; it is valid for longer.
const OWN: Duration = Duration::from_secs(30 * 24 * 3600);
/// The name in a self-signed certificate. A client that checks names needs a certificate from the
/// administrator.
const OWN_NAME: &str = "aliquot-metrics";

/// The paths of a certificate and its key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The certificate chain, with the leaf first.
    pub certificate: PathBuf,
    /// The key of the leaf.
    pub key: PathBuf,
}

impl Files {
    fn read(&self) -> Result<(Vec<u8>, Vec<u8>)> {
        let read = |path: &PathBuf| {
            std::fs::read(path).map_err(|error| Error::other(format!("{}: {error}", path.display())))
        };
        Ok((read(&self.certificate)?, read(&self.key)?))
    }

    fn parse(&self, chain: &[u8], key: &[u8]) -> Result<CertifiedKey> {
        let fail =
            |path: &PathBuf, why: &dyn std::fmt::Display| Error::other(format!("{}: {why}", path.display()));
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
            .collect::<std::result::Result<_, _>>()
            .map_err(|error| fail(&self.certificate, &error))?;
        if chain.is_empty() {
            return Err(fail(&self.certificate, &"it has no certificate in PEM"));
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| fail(&self.key, &error))?;
        let key =
            rustls::crypto::ring::sign::any_supported_type(&key).map_err(|error| fail(&self.key, &error))?;
        let certified = CertifiedKey::new(chain, key);
        match certified.keys_match() {
            // A key that cannot be compared is left to the clients to judge.
            Ok(()) | Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => Ok(certified),
            Err(_) => Err(fail(&self.key, &format!("it is not the key of {}", self.certificate.display()))),
        }
    }
}

/// The certificate that is served now.
#[derive(Debug)]
struct Current(watch::Receiver<Arc<CertifiedKey>>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.borrow().clone())
    }
}

/// A certificate that is kept current.
#[derive(Debug)]
pub struct Certificate {
    files: Option<Files>,
    /// The content of the files when they were last accepted.
    text: (Vec<u8>, Vec<u8>),
    made: Instant,
    current: watch::Sender<Arc<CertifiedKey>>,
}

impl Certificate {
    /// Opens the certificate in the files, or makes a self-signed one if there are no files.
    ///
    /// # Errors
    /// If the files do not contain a certificate and its key; the error names the file.
    pub fn open(files: Option<Files>) -> Result<Self> {
        let (text, key) = match &files {
            Some(files) => {
                let text = files.read()?;
                let key = files.parse(&text.0, &text.1)?;
                (text, key)
            }
            None => ((Vec::new(), Vec::new()), own()?),
        };
        Ok(Self { files, text, made: Instant::now(), current: watch::Sender::new(Arc::new(key)) })
    }

    /// Returns a TLS acceptor with this certificate.
    ///
    /// # Errors
    /// If TLS cannot be configured.
    pub fn acceptor(&self) -> Result<TlsAcceptor> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(Error::other)?.with_no_client_auth();
        let mut config = builder.with_cert_resolver(Arc::new(Current(self.current.subscribe())));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    /// Keeps the certificate current until `stop`. Files that cannot be read change nothing.
    pub async fn keep(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = stop.cancelled() => return,
            }
            match self.look() {
                Ok(true) => tracing::info!("another certificate is served from now on"),
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "the certificate stays as it was"),
            }
        }
    }

    /// Renews the certificate if necessary; returns true if another one is served now.
    fn look(&mut self) -> Result<bool> {
        let key = match &self.files {
            Some(files) => {
                let text = files.read()?;
                if text == self.text {
                    return Ok(false);
                }
                let key = files.parse(&text.0, &text.1)?;
                self.text = text;
                key
            }
            None if self.made.elapsed() < OWN => return Ok(false),
            None => own()?,
        };
        self.made = Instant::now();
        self.current.send_replace(Arc::new(key));
        Ok(true)
    }
}

fn own() -> Result<CertifiedKey> {
    let key = KeyPair::generate().map_err(Error::other)?;
    let parameters = CertificateParams::new([OWN_NAME.to_owned()]).map_err(Error::other)?;
    let certificate = parameters.self_signed(&key).map_err(Error::other)?;
    let der = PrivateKeyDer::try_from(key.serialize_der()).map_err(Error::other)?;
    let signing = rustls::crypto::ring::sign::any_supported_type(&der).map_err(Error::other)?;
    Ok(CertifiedKey::new(vec![certificate.der().clone()], signing))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &std::path::Path) -> Files {
        Files { certificate: dir.join("tls.crt"), key: dir.join("tls.key") }
    }

    fn write(files: &Files) -> KeyPair {
        let key = KeyPair::generate().expect("a key");
        let made =
            CertificateParams::new(["here".to_owned()]).expect("a name").self_signed(&key).expect("signed");
        std::fs::write(&files.certificate, made.pem()).expect("written");
        std::fs::write(&files.key, key.serialize_pem()).expect("written");
        key
    }

    #[test]
    fn a_renewed_certificate_is_served_and_a_broken_one_changes_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = files(dir.path());
        write(&files);
        let mut certificate = Certificate::open(Some(files.clone())).expect("opened");
        let first = certificate.current.borrow().clone();
        assert!(!certificate.look().expect("read"), "nothing changed");

        std::fs::write(&files.key, KeyPair::generate().expect("a key").serialize_pem()).expect("written");
        let error = certificate.look().expect_err("another's key").to_string();
        assert!(error.contains("tls.key: it is not the key of") && error.contains("tls.crt"), "{error}");
        assert!(Arc::ptr_eq(&first, &certificate.current.borrow()));

        write(&files);
        assert!(certificate.look().expect("read"));
        assert!(!Arc::ptr_eq(&first, &certificate.current.borrow()));
    }

    #[test]
    fn what_is_no_certificate_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = files(dir.path());
        let error = Certificate::open(Some(files.clone())).expect_err("nothing is there").to_string();
        assert!(error.contains("tls.crt: No such file"), "{error}");
        write(&files);
        std::fs::write(&files.certificate, "nothing").expect("written");
        let error = Certificate::open(Some(files)).expect_err("no certificate").to_string();
        assert!(error.contains("tls.crt: it has no certificate in PEM"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn one_of_our_own_is_made_anew_each_month() {
        let mut certificate = Certificate::open(None).expect("made");
        assert!(!certificate.look().expect("looked"));
        tokio::time::advance(OWN).await;
        assert!(certificate.look().expect("looked"));
    }
}
