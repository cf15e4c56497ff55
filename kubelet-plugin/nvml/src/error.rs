//! The errors of GPU operations. An error names the GPU, the operation, the cause and the remedy.

use crate::GpuProcess;
use aliquot_model::{GpuUuid, Placement};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;
use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;

/// A return code of NVML (`nvmlReturn_t`), never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NvmlCode(pub u32);

macro_rules! codes {
    ($($name:ident = $constant:ident),* $(,)?) => {
        impl NvmlCode {
            $(#[doc = concat!("`NVML_ERROR_", stringify!($name), "`.")]
            pub const $name: Self = Self(sys::$constant);)*

            /// Returns NVML's name of the code without `NVML_ERROR_`.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$name => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}
codes! {
    UNINITIALIZED = nvmlReturn_enum_NVML_ERROR_UNINITIALIZED,
    INVALID_ARGUMENT = nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
    NOT_SUPPORTED = nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
    NO_PERMISSION = nvmlReturn_enum_NVML_ERROR_NO_PERMISSION,
    NOT_FOUND = nvmlReturn_enum_NVML_ERROR_NOT_FOUND,
    INSUFFICIENT_SIZE = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE,
    INSUFFICIENT_POWER = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER,
    DRIVER_NOT_LOADED = nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED,
    TIMEOUT = nvmlReturn_enum_NVML_ERROR_TIMEOUT,
    IRQ_ISSUE = nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE,
    LIBRARY_NOT_FOUND = nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND,
    FUNCTION_NOT_FOUND = nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND,
    CORRUPTED_INFOROM = nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM,
    GPU_IS_LOST = nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST,
    RESET_REQUIRED = nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED,
    OPERATING_SYSTEM = nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM,
    LIB_RM_VERSION_MISMATCH = nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    IN_USE = nvmlReturn_enum_NVML_ERROR_IN_USE,
    MEMORY = nvmlReturn_enum_NVML_ERROR_MEMORY,
    NO_DATA = nvmlReturn_enum_NVML_ERROR_NO_DATA,
    INSUFFICIENT_RESOURCES = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES,
    ARGUMENT_VERSION_MISMATCH = nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    DEPRECATED = nvmlReturn_enum_NVML_ERROR_DEPRECATED,
    NOT_READY = nvmlReturn_enum_NVML_ERROR_NOT_READY,
    GPU_NOT_FOUND = nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND,
    INVALID_STATE = nvmlReturn_enum_NVML_ERROR_INVALID_STATE,
    UNKNOWN = nvmlReturn_enum_NVML_ERROR_UNKNOWN,
}

impl NvmlCode {
    /// Returns true if the code says that nothing can be asked any more, of this GPU or of the library: the
    /// GPU is lost, or the kernel module is gone or is not the one that the library was opened for.
    pub const fn is_no_answer(self) -> bool {
        matches!(self, Self::GPU_IS_LOST) || self.is_no_driver()
    }

    /// Returns true if the code says that the kernel module is gone, or is not the one that the library was
    /// opened for.
    pub const fn is_no_driver(self) -> bool {
        matches!(self, Self::DRIVER_NOT_LOADED | Self::UNINITIALIZED | Self::LIB_RM_VERSION_MISMATCH)
    }
}

impl fmt::Display for NvmlCode {
    /// Writes the code as `IN_USE (19)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name().unwrap_or("an error of its own"), self.0)
    }
}

/// The operation that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Loading and starting the library at this path.
    Load(PathBuf),
    /// Reading the named fact.
    Read(&'static str),
    /// Switching MIG mode.
    SetMigMode {
        /// True to switch MIG mode on.
        on: bool,
    },
    /// Creating a GPU instance.
    CreateGpuInstance {
        /// The profile's ID, as `nvidia-smi mig -lgip` lists it.
        profile_id: u32,
        /// The placement of the new GPU instance.
        placement: Placement,
    },
    /// Creating the compute instance in a new GPU instance.
    CreateComputeInstance {
        /// The profile's ID of the GPU instance, as `nvidia-smi mig -lgip` lists it.
        profile_id: u32,
        /// The placement of the GPU instance.
        placement: Placement,
    },
    /// Destroying a compute instance.
    DestroyComputeInstance {
        /// The ID of the GPU instance.
        gpu_instance: u32,
        /// The ID of the compute instance.
        compute_instance: u32,
    },
    /// Destroying a GPU instance.
    DestroyGpuInstance {
        /// The ID of the GPU instance.
        gpu_instance: u32,
    },
    /// Setting the compute mode.
    SetComputeMode,
    /// Switching persistence mode.
    SetPersistenceMode {
        /// True to switch persistence mode on.
        on: bool,
    },
    /// Setting the time slice.
    SetTimeSlice,
    /// Listening for events.
    Watch,
    /// Any use of NVML.
    Use,
}

impl Operation {
    /// Returns the operation's name for counters. The name does not include which fact is read, nor the
    /// values of a change.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Load(_) => "load",
            Self::Read(_) => "read",
            Self::SetMigMode { .. } => "set-mig-mode",
            Self::CreateGpuInstance { .. } | Self::CreateComputeInstance { .. } => "create-instance",
            Self::DestroyComputeInstance { .. } | Self::DestroyGpuInstance { .. } => "destroy-instance",
            Self::SetComputeMode => "set-compute-mode",
            Self::SetPersistenceMode { .. } => "set-persistence-mode",
            Self::SetTimeSlice => "set-time-slice",
            Self::Watch => "watch",
            Self::Use => "use",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(path) => write!(f, "load {}", path.display()),
            Self::Read(fact) => write!(f, "read the {fact}"),
            Self::SetMigMode { on: true } => f.write_str("switch on the MIG mode"),
            Self::SetMigMode { on: false } => f.write_str("switch off the MIG mode"),
            Self::CreateGpuInstance { profile_id, placement } => {
                write!(f, "create a GPU instance of profile {profile_id} at {placement}")
            }
            Self::CreateComputeInstance { profile_id, placement } => {
                write!(
                    f,
                    "create the compute instance in the GPU instance of profile {profile_id} at {placement}"
                )
            }
            Self::DestroyComputeInstance { gpu_instance, compute_instance } => {
                write!(f, "destroy compute instance {compute_instance} of GPU instance {gpu_instance}")
            }
            Self::DestroyGpuInstance { gpu_instance } => write!(f, "destroy GPU instance {gpu_instance}"),
            Self::SetComputeMode => f.write_str("set the compute mode"),
            Self::SetPersistenceMode { on: true } => f.write_str("switch on the persistence mode"),
            Self::SetPersistenceMode { on: false } => f.write_str("switch off the persistence mode"),
            Self::SetTimeSlice => f.write_str("set the time slice"),
            Self::Watch => f.write_str("listen for errors"),
            Self::Use => f.write_str("use NVML"),
        }
    }
}

/// The reason why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// NVML returned this code.
    Nvml(NvmlCode),
    /// The library could not be loaded; the text is the loader's message.
    Library(String),
    /// The library returned an answer that makes no sense.
    Unexpected(String),
    /// A program of the driver failed or is missing.
    Program(String),
    /// The library was closed on purpose; the text says why.
    LetGo(String),
    /// The driver does not answer this call, or an earlier call on the same GPU.
    Stuck(String),
    /// The driver gave the GPU a minor number that belongs to another GPU, which the driver does not have now
    /// and which is to come back.
    NameTaken {
        /// The minor number.
        minor: u32,
        /// The GPU that had the number before.
        by: GpuUuid,
    },
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nvml(code) => write!(f, "NVML says {code}"),
            Self::Library(text)
            | Self::Unexpected(text)
            | Self::Program(text)
            | Self::LetGo(text)
            | Self::Stuck(text) => f.write_str(text),
            Self::NameTaken { minor, by } => {
                write!(
                    f,
                    "it has minor number {minor} now, whose name belongs to GPU {by}, which a virtual machine has"
                )
            }
        }
    }
}

impl From<NvmlCode> for Cause {
    fn from(code: NvmlCode) -> Self {
        Self::Nvml(code)
    }
}

impl From<NvmlError> for Cause {
    fn from(error: NvmlError) -> Self {
        match error {
            NvmlError::LibloadingError(error) => Self::Library(with_sources(&error)),
            NvmlError::FailedToLoadSymbol(_) => Self::Nvml(NvmlCode::FUNCTION_NOT_FOUND),
            NvmlError::Utf8Error(_)
            | NvmlError::NulError(_)
            | NvmlError::StringTooLong { .. }
            | NvmlError::IncorrectBits(_) => Self::Unexpected(format!("NVML answered nonsense: {error}")),
            // Codes that the wrapper does not know arrive under their number here.
            NvmlError::UnexpectedVariant(code) => Self::Nvml(NvmlCode(code)),
            error => Self::Nvml(NvmlCode(error.into())),
        }
    }
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The parts of an error. Reached through [`GpuError`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuErrorDetail {
    /// The GPU; `None` if the error is about the library as a whole.
    pub gpu: Option<GpuUuid>,
    /// The NVML index, if the GPU's UUID is not known.
    pub index: Option<u32>,
    /// The operation that was tried.
    pub operation: Operation,
    /// The reason why it failed.
    pub cause: Cause,
    /// The processes that block the operation.
    pub blocked_by: Vec<GpuProcess>,
    /// Words for what a failed undo left behind; the caller has to clean it up later.
    pub left_behind: Option<String>,
}

/// The error of a failed operation on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuError(Box<GpuErrorDetail>);

impl std::error::Error for GpuError {}

impl Deref for GpuError {
    type Target = GpuErrorDetail;
    fn deref(&self) -> &GpuErrorDetail {
        &self.0
    }
}

impl GpuError {
    /// Builds the error of an operation on a GPU.
    pub fn on(gpu: &GpuUuid, operation: Operation, cause: impl Into<Cause>) -> Self {
        Self::new(Some(gpu.clone()), None, operation, cause.into())
    }

    /// Builds the error of an operation on a GPU of which only the index is known.
    pub(crate) fn on_index(index: u32, operation: Operation, cause: impl Into<Cause>) -> Self {
        Self::new(None, Some(index), operation, cause.into())
    }

    /// Builds the error of an operation on the library as a whole.
    pub fn of_library(operation: Operation, cause: impl Into<Cause>) -> Self {
        Self::new(None, None, operation, cause.into())
    }

    fn new(gpu: Option<GpuUuid>, index: Option<u32>, operation: Operation, cause: Cause) -> Self {
        Self(Box::new(GpuErrorDetail {
            gpu,
            index,
            operation,
            cause,
            blocked_by: Vec::new(),
            left_behind: None,
        }))
    }

    /// Adds the processes that block the operation.
    #[must_use]
    pub fn blocked_by(mut self, processes: Vec<GpuProcess>) -> Self {
        self.0.blocked_by = processes;
        self
    }

    /// Adds a description of what an undo could not remove.
    #[must_use]
    pub fn leaving(mut self, what: String) -> Self {
        self.0.left_behind = Some(what);
        self
    }

    /// Returns NVML's code, if NVML returned one.
    pub fn code(&self) -> Option<NvmlCode> {
        match self.cause {
            Cause::Nvml(code) => Some(code),
            _ => None,
        }
    }

    /// Returns true if the driver does not offer this operation on that GPU, now or ever.
    pub fn is_not_supported(&self) -> bool {
        matches!(self.code(), Some(NvmlCode::NOT_SUPPORTED | NvmlCode::FUNCTION_NOT_FOUND))
    }

    /// Returns true if the driver does not answer.
    pub fn is_stuck(&self) -> bool {
        matches!(self.cause, Cause::Stuck(_))
    }

    /// Returns true if the GPU is not there any more, so that nothing on it needs undoing.
    pub fn is_gone(&self) -> bool {
        self.is_lost() || matches!(self.code(), Some(NvmlCode::NOT_FOUND | NvmlCode::GPU_NOT_FOUND))
    }

    /// Returns true if the GPU has fallen off the bus.
    pub fn is_lost(&self) -> bool {
        self.code() == Some(NvmlCode::GPU_IS_LOST)
    }

    /// Returns true if the library was closed on purpose ([`crate::Reopening::let_go`]).
    pub fn is_let_go(&self) -> bool {
        matches!(self.cause, Cause::LetGo(_))
    }

    /// Returns true if the library has no driver to ask: the kernel module is gone or another one is loaded,
    /// or the library was closed on purpose.
    pub fn is_no_driver(&self) -> bool {
        self.code().is_some_and(NvmlCode::is_no_driver) || matches!(self.cause, Cause::LetGo(_))
    }

    /// Returns true if the library could not be loaded.
    pub fn is_no_library(&self) -> bool {
        matches!(self.cause, Cause::Library(_))
    }

    /// Returns true if the target of the change is in use.
    pub fn is_in_use(&self) -> bool {
        self.code() == Some(NvmlCode::IN_USE)
    }

    /// Returns what an administrator can do about the error.
    pub fn remedy(&self) -> &'static str {
        let code = match &self.cause {
            Cause::Nvml(code) => *code,
            Cause::Library(_) => {
                return "install the NVIDIA driver on the node, or name its libnvidia-ml.so.1 with --nvml-library";
            }
            Cause::Program(_) => return "see that the driver's nvidia-smi is under --driver-root and runs",
            Cause::Unexpected(_) => return "report this with the driver version",
            Cause::LetGo(_) => return "it is opened again when that is over",
            Cause::NameTaken { .. } => return "it can be used again when that virtual machine has ended",
            Cause::Stuck(_) => {
                return "nothing on this GPU is changed until the call comes back; see the kernel's log for NVRM and Xid messages, and if it does not come back drain the node and reboot it";
            }
        };
        match (&self.operation, code) {
            (_, NvmlCode::DRIVER_NOT_LOADED) => "load the nvidia kernel module",
            (_, NvmlCode::LIB_RM_VERSION_MISMATCH) => {
                "reboot the node or reload the nvidia kernel module: library and module are of different versions"
            }
            (_, NvmlCode::GPU_IS_LOST) => {
                "drain the node and reboot it; if the GPU is lost again, replace it"
            }
            (_, NvmlCode::RESET_REQUIRED) => "reset the GPU (nvidia-smi --gpu-reset) or reboot the node",
            (_, NvmlCode::NO_PERMISSION) => {
                "run as root with the capability SYS_ADMIN, and see /proc/driver/nvidia/capabilities"
            }
            (_, NvmlCode::FUNCTION_NOT_FOUND) => "the driver is too old: install a newer one",
            (_, NvmlCode::NOT_FOUND | NvmlCode::GPU_NOT_FOUND) => {
                "see whether the GPU is still in nvidia-smi -L"
            }
            (Operation::SetMigMode { .. }, NvmlCode::IN_USE) => {
                "stop what uses the GPU (also monitoring such as DCGM, and MIG instances) and try again"
            }
            (Operation::SetMigMode { .. }, NvmlCode::NOT_SUPPORTED) => {
                "the board has no MIG: ask for the whole GPU"
            }
            (Operation::CreateGpuInstance { .. }, NvmlCode::INSUFFICIENT_RESOURCES) => {
                "another instance holds the place or the engines: see nvidia-smi mig -lgi"
            }
            (Operation::CreateGpuInstance { .. }, NvmlCode::NOT_SUPPORTED) => {
                "see that MIG mode is on (nvidia-smi -q -d MIG)"
            }
            (Operation::CreateGpuInstance { .. }, NvmlCode::INVALID_ARGUMENT) => {
                "the board has no such profile at that place: see nvidia-smi mig -lgipp"
            }
            (
                Operation::DestroyComputeInstance { .. } | Operation::DestroyGpuInstance { .. },
                NvmlCode::IN_USE,
            ) => "stop what runs in the instance and try again",
            (_, NvmlCode::IN_USE) => "stop what uses the GPU and try again",
            _ => "see the kernel's log for NVRM messages",
        }
    }
}

impl fmt::Display for GpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}", self.operation)?;
        match (&self.gpu, self.index) {
            (Some(gpu), _) => write!(f, " of {gpu}")?,
            (None, Some(index)) => write!(f, " of the GPU with index {index}")?,
            (None, None) => {}
        }
        write!(f, ": {}", self.cause)?;
        if !self.blocked_by.is_empty() {
            f.write_str(", in use by process ")?;
            for (i, process) in self.blocked_by.iter().enumerate() {
                write!(f, "{}{process}", if i == 0 { "" } else { ", " })?;
            }
        }
        if let Some(left) = &self.left_behind {
            write!(f, "; left behind: {left}")?;
        }
        write!(f, "; {}", self.remedy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProcessKind;

    fn gpu() -> GpuUuid {
        GpuUuid::parse("GPU-8f6d2a10-0000-0000-0000-000000000001").unwrap()
    }

    #[test]
    fn an_error_names_the_gpu_the_operation_the_code_the_blocker_and_the_remedy() {
        let process = |pid, name: Option<&str>| GpuProcess {
            pid,
            name: name.map(str::to_owned),
            kind: ProcessKind::Compute,
            memory_bytes: None,
            gpu_instance: None,
            compute_instance: None,
        };
        let error = GpuError::on(&gpu(), Operation::SetMigMode { on: true }, NvmlCode::IN_USE)
            .blocked_by(vec![process(4711, Some("python3")), process(12, None)]);
        assert_eq!(
            error.to_string(),
            "cannot switch on the MIG mode of GPU-8f6d2a10-0000-0000-0000-000000000001: NVML says IN_USE (19), \
             in use by process 4711 (python3), 12; stop what uses the GPU (also monitoring such as DCGM, \
             and MIG instances) and try again"
        );
        assert!(error.is_in_use() && !error.is_lost() && !error.is_not_supported());
    }

    #[test]
    fn a_failed_undo_is_part_of_the_error() {
        let operation = Operation::CreateComputeInstance { profile_id: 19, placement: Placement::new(4, 1) };
        let error = GpuError::on(&gpu(), operation, NvmlCode::UNKNOWN).leaving("GPU instance 7".to_owned());
        let text = error.to_string();
        assert!(text.contains("profile 19 at {4}:1 of GPU-8f6d2a10"), "{text}");
        assert!(text.contains("UNKNOWN (999); left behind: GPU instance 7; "), "{text}");
    }

    #[test]
    fn codes_that_the_bindings_do_not_know_keep_their_number() {
        assert_eq!(NvmlCode(4242).to_string(), "an error of its own (4242)");
        assert_eq!(Cause::from(NvmlError::from(4242)), Cause::Nvml(NvmlCode(4242)));
        assert_eq!(Cause::from(NvmlError::from(23)), Cause::Nvml(NvmlCode::INSUFFICIENT_RESOURCES));
        assert_eq!(Cause::from(NvmlError::GpuLost), Cause::Nvml(NvmlCode::GPU_IS_LOST));
    }
}
