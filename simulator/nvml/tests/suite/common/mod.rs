//! A node in a directory of its own, with the built library in its driver root, loaded by the real wrapper.
#![allow(unsafe_code, reason = "calls the C interface through its bindings")]

use aliquot_sim_node::{NVML_LIBRARY, Node, NodeSpec, built_library, create};
use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;

/// A node, NVML on it, and the directory that both live in.
pub(crate) struct Fixture {
    pub(crate) nvml: Nvml,
    pub(crate) node: Node,
    pub(crate) dir: tempfile::TempDir,
}

/// Makes the node that `spec` describes.
pub(crate) fn fixture_of(mut spec: NodeSpec) -> Fixture {
    let library = built_library(NVML_LIBRARY).expect("cargo builds the library beside its tests");
    spec.nvml_library = Some(library);
    let dir = tempfile::tempdir().unwrap();
    let node = create(dir.path(), &spec).unwrap();
    let nvml = load(&dir);
    Fixture { nvml, node, dir }
}

/// Loads the library of the node in `dir`, which finds the node by where it lies itself.
pub(crate) fn load(dir: &tempfile::TempDir) -> Nvml {
    Nvml::builder().lib_path(library_in(dir).as_os_str()).init().unwrap()
}

pub(crate) fn library_in(dir: &tempfile::TempDir) -> std::path::PathBuf {
    dir.path().join("root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")
}

/// A node of these boards; `:mig` behind a board puts it in MIG mode.
pub(crate) fn fixture(boards: &[&str]) -> Fixture {
    let mut spec = NodeSpec::new(boards.iter().map(|b| b.trim_end_matches(":mig")));
    for (gpu, board) in spec.gpus.iter_mut().zip(boards) {
        gpu.mig = board.ends_with(":mig");
    }
    fixture_of(spec)
}

/// Calls a function of the bindings by name and gives its return code.
#[macro_export]
macro_rules! nvml {
    ($nvml:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let function = $nvml.lib().$name.as_ref().expect(stringify!($name));
        #[allow(clippy::macro_metavars_in_unsafe, reason = "tests pass plain values")]
        // SAFETY: the arguments are of the types that the bindings ask for, and pointers are to live values.
        let code = unsafe { function($($arg),*) };
        code
    }};
}

/// The handle of a GPU.
pub(crate) fn gpu(nvml: &Nvml, index: u32) -> sys::nvmlDevice_t {
    let device = nvml.device_by_index(index).unwrap();
    // SAFETY: the handle is a number; the library stays loaded as long as `nvml` is borrowed by the test.
    unsafe { device.handle() }
}

pub(crate) const SUCCESS: u32 = sys::nvmlReturn_enum_NVML_SUCCESS;
pub(crate) const INVALID_ARGUMENT: u32 = sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
pub(crate) const NOT_SUPPORTED: u32 = sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
pub(crate) const NO_PERMISSION: u32 = sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION;
pub(crate) const NOT_FOUND: u32 = sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
pub(crate) const INSUFFICIENT_SIZE: u32 = sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
pub(crate) const IN_USE: u32 = sys::nvmlReturn_enum_NVML_ERROR_IN_USE;
pub(crate) const INSUFFICIENT_RESOURCES: u32 = sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES;
pub(crate) const RESET_REQUIRED: u32 = sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED;
pub(crate) const VERSION_MISMATCH: u32 = sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
pub(crate) const UNKNOWN: u32 = sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN;
