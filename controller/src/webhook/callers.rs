//! The authorities whose certificates callers must show: `--client-ca-file`, which is read again while the
//! webhook is served, because authorities change. A file that cannot be read changes nothing.

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The current authorities; `None` if everybody who reaches the port may ask.
pub(super) type Callers = watch::Receiver<Option<Arc<RootCertStore>>>;

/// The file, as it was read last.
#[derive(Debug)]
pub(super) struct CallersFile {
    path: PathBuf,
    text: Vec<u8>,
    callers: watch::Sender<Option<Arc<RootCertStore>>>,
}

impl CallersFile {
    /// Reads the file for the first time.
    ///
    /// # Errors
    /// If the file has no authority; the error names the file.
    pub(super) fn open(path: PathBuf) -> std::io::Result<Self> {
        let mut file = Self { path, text: Vec::new(), callers: watch::Sender::new(None) };
        file.take(std::fs::read(&file.path))?;
        Ok(file)
    }

    pub(super) fn callers(&self) -> Callers {
        self.callers.subscribe()
    }

    /// Reads the file again at each interval until `stop`.
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

    /// Reads the file again. Returns true if its content has changed.
    ///
    /// # Errors
    /// As [`Self::open`]; then the authorities stay as they were.
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

/// Returns the authorities in a PEM file.
fn authorities(text: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(text) {
        let der = certificate.map_err(|error| error.to_string())?;
        roots.add(der).map_err(|error| error.to_string())?;
    }
    if roots.is_empty() { Err("it has no certificate".to_owned()) } else { Ok(roots) }
}
