//! Whose certificates callers have to show: the authorities in `--client-ca-file`, which is read anew while the webhook
//! is served, as authorities change. What cannot be read changes nothing.

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The authorities at the moment; none if whoever reaches the port may ask.
pub(super) type Callers = watch::Receiver<Option<Arc<RootCertStore>>>;

/// The file, as it was read last.
#[derive(Debug)]
pub(super) struct CallersFile {
    path: PathBuf,
    text: Vec<u8>,
    callers: watch::Sender<Option<Arc<RootCertStore>>>,
}

impl CallersFile {
    /// Reads it for the first time.
    ///
    /// # Errors
    /// If there is no authority in it; the error names it.
    pub(super) fn open(path: PathBuf) -> std::io::Result<Self> {
        let mut file = Self { path, text: Vec::new(), callers: watch::Sender::new(None) };
        file.take(std::fs::read(&file.path))?;
        Ok(file)
    }

    pub(super) fn callers(&self) -> Callers {
        self.callers.subscribe()
    }

    /// Reads it again and again until `stop`.
    pub(super) async fn run(mut self, interval: Duration, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = stop.cancelled() => return,
            }
            match self.look().await {
                Ok(true) => tracing::info!(file = %self.path.display(), "callers have other authorities now"),
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "the authorities of callers stay as they were"),
            }
        }
    }

    /// Reads it again. Returns whether it says something else.
    ///
    /// # Errors
    /// As [`Self::open`]; the authorities are those from before then.
    pub(super) async fn look(&mut self) -> std::io::Result<bool> {
        let text = tokio::fs::read(&self.path).await;
        self.take(text)
    }

    fn take(&mut self, text: std::io::Result<Vec<u8>>) -> std::io::Result<bool> {
        let read = text.map_err(|error| error.to_string()).and_then(|text| {
            if text == self.text && self.callers.borrow().is_some() {
                return Ok(None);
            }
            authorities(&text).map(|roots| Some((text, roots)))
        });
        let read = read.map_err(|why| {
            let what =
                format!("--client-ca-file {}: {why}; it must hold certificates in PEM", self.path.display());
            std::io::Error::other(what)
        })?;
        let Some((text, roots)) = read else { return Ok(false) };
        self.text = text;
        self.callers.send_replace(Some(Arc::new(roots)));
        Ok(true)
    }
}

/// What a file says.
fn authorities(text: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(text) {
        let der = certificate.map_err(|error| error.to_string())?;
        roots.add(der).map_err(|error| error.to_string())?;
    }
    if roots.is_empty() { Err("it has no certificate".to_owned()) } else { Ok(roots) }
}
