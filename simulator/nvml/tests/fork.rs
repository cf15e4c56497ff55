//! A program of its own: while a process forks, nothing else of it may load or unload a library, as the C library goes
//! through the fork handlers of all of them.
#![allow(unsafe_code, reason = "forks")]

use aliquot_sim_node::{NVML_LIBRARY, NodeSpec, built_library, create};
use nvml_wrapper::Nvml;

#[test]
fn a_process_can_fork_after_the_library_was_unloaded() {
    let mut spec = NodeSpec::new(["T4"]);
    spec.nvml_library = Some(built_library(NVML_LIBRARY).expect("cargo builds the library beside its tests"));
    let dir = tempfile::tempdir().unwrap();
    create(dir.path(), &spec).unwrap();
    let library = dir.path().join("root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init().unwrap();
    nvml.shutdown().unwrap();
    // SAFETY: the child only ends itself.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(7) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), 7);
}
