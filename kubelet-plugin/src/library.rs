//! How NVML is opened: with the first look at the GPUs, and again whenever [`Reopening`] asks for it.

use crate::args::Args;
use crate::driver::{find_library, find_program};
use aliquot_nvml::{GpuError, NvmlGpus, Opened, Options, Pauses, Reopening};
use std::path::PathBuf;

/// Where NVML is looked for, each time that it is opened: the driver may be another one by then.
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

/// NVML, not opened yet: the driver may come up after us, and claims that are over have to end without it. With a
/// label of the Node that asks for the driver it stays closed until that is gone.
pub(crate) fn closed(args: &Args, label: Option<&str>) -> Reopening {
    let why = label.map_or_else(|| "NVML has not been opened yet".to_owned(), crate::pause::closed_for);
    let places = Places::of(args);
    Reopening::closed(&why, label.is_none(), Pauses::default(), move || places.open())
}
