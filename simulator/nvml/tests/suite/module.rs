//! What the library says while the kernel module is unloaded, and after it came back.

#![allow(unsafe_code, reason = "the tests call a C interface, with values that live as long as the call")]

use crate::common::{fixture, library_in, load};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

fn code<T>(result: Result<T, NvmlError>) -> u32 {
    result.err().unwrap().into()
}

const UNINITIALIZED: u32 = 1;
const DRIVER_NOT_LOADED: u32 = 9;
const LIB_RM_VERSION_MISMATCH: u32 = 18;

#[test]
fn calls_fail_while_the_driver_is_away_and_an_old_handle_never_works_again() {
    let f = fixture(&["T4"]);
    let count = || f.nvml.device_count();
    assert_eq!(count().unwrap(), 1);
    assert!(f.node.unload_module(false).unwrap_err().to_string().contains("NVML open"));
    f.node.unload_module(true).unwrap();
    assert_eq!(code(count()), DRIVER_NOT_LOADED);
    let open = || Nvml::builder().lib_path(library_in(&f.dir).as_os_str()).init();
    f.node.load_module(None).unwrap();
    assert_eq!(code(count()), UNINITIALIZED);
    drop(f.nvml);
    assert_eq!(load(&f.dir).device_count().unwrap(), 1);
    // Closed again, nobody holds the module.
    f.node.unload_module(false).unwrap();
    assert_eq!(code(open()), DRIVER_NOT_LOADED);
}

#[test]
fn a_library_of_another_version_than_the_driver_says_so_and_the_one_that_fits_works_beside_it() {
    let f = fixture(&["T4"]);
    f.node.unload_module(true).unwrap();
    f.node.load_module(Some("590.10.01")).unwrap();
    assert_eq!(code(f.nvml.device_count()), LIB_RM_VERSION_MISMATCH);
    // Under the name without a version the loader would give us the old one again.
    let new = std::fs::canonicalize(library_in(&f.dir)).unwrap();
    assert!(new.ends_with("libnvidia-ml.so.590.10.01"), "{}", new.display());
    let nvml = Nvml::builder().lib_path(new.as_os_str()).init().unwrap();
    assert_eq!(nvml.sys_driver_version().unwrap(), "590.10.01");
    assert_eq!(nvml.device_count().unwrap(), 1);
}
