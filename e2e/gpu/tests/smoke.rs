//! The same runner as on hardware, on the simulated driver: whatever needs no Python package and no compiler runs
//! and keeps its promises, and what was measured is written down. Figures of time are not looked at.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test"
)]

use aliquot_sim_node::{CUDA_LIBRARY, NVML_LIBRARY, NodeSpec, built_library};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folder of the limiter's two files.
fn hook() -> PathBuf {
    let target = Path::new(env!("CARGO_BIN_EXE_gpu-check")).parent().and_then(Path::parent).unwrap();
    let hook = std::env::var_os("ALIQUOT_HOOK_DIR").map_or_else(|| target.join("hook"), PathBuf::from);
    assert!(hook.join("libaliquot_preload.so").is_file(), "run `make build-hook` first");
    hook
}

/// Folder of the simulated driver's libraries, by the names that programs open.
fn driver(folder: &Path) -> PathBuf {
    let driver = folder.join("driver");
    std::fs::create_dir(&driver).unwrap();
    for (built, name) in [(CUDA_LIBRARY, "libcuda.so.1"), (NVML_LIBRARY, "libnvidia-ml.so.1")] {
        let built = built_library(built).expect("`make build` builds it");
        std::os::unix::fs::symlink(built, driver.join(name)).unwrap();
    }
    driver
}

#[test]
fn every_case_runs_on_the_simulated_driver() {
    let folder = tempfile::tempdir().unwrap();
    let node = folder.path().join("node");
    aliquot_sim_node::create(&node, &NodeSpec::new(["H100-80"])).unwrap();
    let results = folder.path().join("results.json");
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .args(["run", "--quick", "--hook"])
        .arg(hook())
        .arg("--cases")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("cases"))
        .arg("--out")
        .arg(&results)
        .env("LD_LIBRARY_PATH", driver(folder.path()))
        .env("ALIQUOT_SIM_NODE", &node)
        .env("ALIQUOT_SIM_ROOT", node.join("root"))
        .env("PATH", format!("{}:{}", node.join("root/usr/bin").display(), std::env::var("PATH").unwrap()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    println!("{said}");
    assert!(output.status.success(), "a case failed");
    let report: Value = serde_json::from_slice(&std::fs::read(&results).unwrap()).unwrap();
    assert_eq!(report["simulated"], true);
    for fact in ["nvml_pids", "resolver", "context_bytes", "event_of_1ms_kernel", "release_after_sigkill"] {
        assert!(report["facts"][fact].get("unknown").is_none(), "{fact}: {}", report["facts"][fact]);
    }
    assert_eq!(report["facts"]["resolver"]["equal"], 12, "{}", report["facts"]["resolver"]);
    let cases = report["cases"].as_array().unwrap();
    for case in cases.iter().filter(|case| case["mode"] == "LD_PRELOAD") {
        let name = case["name"].as_str().unwrap();
        let needs_more = ["PyTorch", "CuPy", "nvcc"].iter().any(|what| name.contains(what));
        assert!(needs_more || case["outcome"] != "skipped", "{case}");
    }
    let passed = cases.iter().filter(|case| case["outcome"] == "passed").count();
    assert!(passed >= 5, "what is promised was tried: {passed}");
}
