//! Listens for errors of GPUs, each on a thread of its own. NVML's wait blocks, and a GPU that hangs must not
//! silence the others or keep the process from ending.

use aliquot_model::GpuUuid;
use aliquot_nvml::{EventSource, GpuError, GpuEvent, Gpus};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// The longest wait for one event; a switch of a GPU's MIG mode waits at most that long.
const LISTEN: Duration = Duration::from_secs(1);

/// The threads, one for each GPU that can be read.
pub(super) struct Listeners {
    gpus: Arc<dyn Gpus>,
    to: mpsc::Sender<GpuEvent>,
    cancel: CancellationToken,
    running: BTreeMap<GpuUuid, (CancellationToken, Option<JoinHandle<()>>)>,
    unheard: Unheard,
}

/// The GPUs whose errors are not listened for.
#[derive(Clone, Default)]
struct Unheard(Arc<Mutex<BTreeSet<GpuUuid>>>);

impl Unheard {
    /// Adds a GPU; logs it the first time.
    fn add(&self, gpu: &GpuUuid, error: &GpuError) {
        if self.0.lock().insert(gpu.clone()) {
            tracing::warn!(gpu.uuid = %gpu, %error, "errors of this GPU are not listened for");
        }
    }

    fn remove(&self, gpu: &GpuUuid) {
        self.0.lock().remove(gpu);
    }
}

impl Listeners {
    pub(super) fn new(gpus: Arc<dyn Gpus>, to: mpsc::Sender<GpuEvent>, cancel: CancellationToken) -> Self {
        Self { gpus, to, cancel, running: BTreeMap::new(), unheard: Unheard::default() }
    }

    /// Returns the GPUs whose errors are not listened for now.
    pub(super) fn unheard(&self) -> BTreeSet<GpuUuid> {
        self.unheard.0.lock().clone()
    }

    /// Listens to these GPUs and no others. A GPU that could not be listened to, or no longer, is tried
    /// again.
    pub(super) fn follow(&mut self, wanted: &BTreeSet<GpuUuid>) {
        self.running.retain(|gpu, (token, thread)| {
            let runs = thread.as_ref().is_some_and(|thread| !thread.is_finished());
            let stays = wanted.contains(gpu) && runs;
            if !stays {
                token.cancel();
            }
            if !wanted.contains(gpu) {
                self.unheard.remove(gpu);
            }
            stays
        });
        for gpu in wanted {
            if self.running.contains_key(gpu) {
                continue;
            }
            let token = self.cancel.child_token();
            let one = One {
                gpus: Arc::clone(&self.gpus),
                gpu: gpu.clone(),
                to: self.to.clone(),
                cancel: token.clone(),
                unheard: self.unheard.clone(),
            };
            let spawned =
                std::thread::Builder::new().name("gpu-events".to_owned()).spawn(move || one.listen());
            if let Err(error) = &spawned {
                tracing::error!(%error, "no thread to listen for errors of a GPU");
            }
            self.running.insert(gpu.clone(), (token, spawned.ok()));
        }
    }
}

/// The listener of one GPU.
struct One {
    gpus: Arc<dyn Gpus>,
    gpu: GpuUuid,
    to: mpsc::Sender<GpuEvent>,
    cancel: CancellationToken,
    unheard: Unheard,
}

impl One {
    fn listen(self) {
        let mut source = match self.gpus.watch(std::slice::from_ref(&self.gpu)) {
            Ok(source) => source,
            // The library is opened again in a moment, or whoever closed it knows.
            Err(error) if error.is_let_go() => return,
            Err(error) => return self.unheard.add(&self.gpu, &error),
        };
        if let Some((_, error)) = source.unmonitored().first() {
            return self.unheard.add(&self.gpu, error);
        }
        self.unheard.remove(&self.gpu);
        while !self.cancel.is_cancelled() && !self.to.is_closed() {
            match self.next(&mut *source) {
                Ok(()) => self.unheard.remove(&self.gpu),
                Err(error) if error.is_let_go() => return,
                Err(error) => {
                    self.unheard.add(&self.gpu, &error);
                    // An event set of a library that has lost its driver never works again, so it is let go
                    // of.
                    if error.code().is_some_and(|code| code.is_no_answer()) {
                        return;
                    }
                    std::thread::sleep(LISTEN);
                }
            }
        }
    }

    fn next(&self, source: &mut dyn EventSource) -> Result<(), GpuError> {
        if let Some(event) = source.next(LISTEN)? {
            // The receiver may be gone; the loop ends then.
            let _ = self.to.blocking_send(event);
        }
        Ok(())
    }
}
