//! Opens NVML, at the start and again whenever [`Reopening`] asks for it.

use crate::args::Args;
use crate::driver::{find_library, find_program};
use crate::http::Readiness;
use crate::{inventory, notice};
use aliquot_nvml::{GpuError, NvmlGpus, Opened, Operation, Options, Pauses, Reopening};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// How often it is tried at the start.
const RETRY: Duration = Duration::from_secs(5);

/// Where NVML is looked for, each time that it is opened: the driver may be another one by then.
#[derive(Clone)]
struct Places {
    library: Option<PathBuf>,
    driver_root: PathBuf,
    sys_root: PathBuf,
}

impl Places {
    fn of(args: &Args) -> Self {
        Self {
            library: args.nvml_library.clone(),
            driver_root: args.driver_root.clone(),
            sys_root: args.sys_root.clone(),
        }
    }

    /// The library by its own name and not by a link to it: under the name of one that is loaded the dynamic loader
    /// gives that one, wherever the link leads by then.
    fn options(&self) -> Options {
        let library = self.library.clone().or_else(|| find_library(&self.driver_root, "libnvidia-ml.so.1"));
        let library = library.map(|path| path.canonicalize().unwrap_or(path));
        Options {
            library: library.unwrap_or_else(|| "libnvidia-ml.so.1".into()),
            sys_root: self.sys_root.clone(),
            nvidia_smi: find_program(&self.driver_root, "nvidia-smi"),
        }
    }

    fn open(&self) -> Result<Opened, GpuError> {
        NvmlGpus::open(self.options()).map(NvmlGpus::opened)
    }
}

/// Opens NVML, again and again: the driver may come up after us.
pub(crate) async fn open(
    args: &Args,
    limit: Duration,
    readiness: &Readiness,
    cancel: &CancellationToken,
) -> Option<Arc<Reopening>> {
    loop {
        let places = Places::of(args);
        let operation = Operation::Load(places.options().library);
        let (opened, opening) = oneshot::channel();
        let tell = move |gpus| drop(opened.send(gpus));
        let open = places.clone();
        if let Err(error) = readiness.calls.detached(&operation, limit, move || open.open(), tell) {
            tracing::error!(%error, "no thread to open NVML on, trying again");
        }
        let opening = tokio::select! {
            () = cancel.cancelled() => return None,
            opening = opening => opening,
        };
        match opening {
            Ok(Ok(library)) => {
                let reopening = Reopening::new(library, Pauses::default(), move || places.open());
                return Some(Arc::new(reopening));
            }
            Ok(Err(error)) => {
                readiness.notes.set(inventory::NOTE, vec![notice::no_driver_yet(&error)]);
                tracing::error!(%error, "NVML cannot be opened, trying again");
            }
            Err(error) => tracing::error!(%error, "opening NVML ended abnormally, trying again"),
        }
        tokio::select! {
            () = cancel.cancelled() => return None,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}
