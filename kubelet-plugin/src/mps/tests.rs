use super::*;
use aliquot_mps::contract::Sole;
use aliquot_nvml::ProcessKind;

/// What a supervisor that follows another one does not know is known by the driver.
#[test]
fn a_claim_whose_supervisor_is_done_has_not_ended_while_the_driver_lists_a_process() {
    let temp = tempfile::tempdir().unwrap();
    let mps = Mps::new(temp.path(), RegionStorage::Directory, Duration::ZERO);
    let dir = mps.claim("c-1").unwrap();
    fs::create_dir(dir.path()).unwrap();
    let _served = Sole::take(&MpsDir::new(temp.path())).unwrap().announce().unwrap();
    let process = GpuProcess {
        pid: 4711,
        name: None,
        kind: ProcessKind::Compute,
        memory_bytes: None,
        gpu_instance: None,
        compute_instance: None,
    };
    let error = mps.wait_until_ended(&dir, &|| Ok(vec![process.clone()])).unwrap_err().to_string();
    assert!(error.contains("4711") && error.contains("c-1"), "{error}");
    mps.wait_until_ended(&dir, &|| Ok(Vec::new())).unwrap();
}
