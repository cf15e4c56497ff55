//! Opens NVML with the first look at the GPUs, and again whenever [`Reopening`] asks for it.

use crate::args::Args;
use crate::driver::{find_library, find_program};
use aliquot_nvml::{GpuError, NvmlGpus, Opened, Options, Pauses, Reopening};
use std::path::PathBuf;

/// The places in which NVML is looked for each time that it is opened: the driver may be another one by then.
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

    /// Returns the library by its own name and not by a link to it. For the name of a library that is loaded,
    /// the dynamic loader returns that library, wherever the link leads by then.
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

/// Returns NVML without opening it: the driver may come up after the agent, and claims that are over have to
/// end without it. If a label of the Node asks for the driver, NVML stays closed until the label is gone.
pub(crate) fn closed(args: &Args, label: Option<&str>) -> Reopening {
    let why =
        label.map_or_else(|| "NVML has not been opened yet".to_owned(), crate::driver_unload::closed_for);
    let places = Places::of(args);
    Reopening::closed(&why, label.is_none(), Pauses::default(), move || places.open())
}
