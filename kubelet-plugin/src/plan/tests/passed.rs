//! GPUs for virtual machines.

use super::*;

/// A board whose mode is on without partitions is switched off first, and the GPU leaves the driver after all else.
#[test]
fn a_gpu_for_a_virtual_machine_is_taken_last_and_whole_and_its_facts_are_kept() {
    let mut world = World::of(vec![board(0, Some((true, false))), h100(1)]);
    let device = Passthrough { device_id: "0x2330".into(), ..Passthrough::default() };
    world.offers.insert(world.gpus[0].uuid.clone(), Ok(device.clone()));
    world.persistent.insert(world.gpus[0].uuid.clone());
    let wanted = request("a", &[("vm", "gpu-0-vfio"), ("s", "gpu-1-share")]);
    let plan = world.plan(&wanted).unwrap();
    let gpu = world.gpus[0].clone();
    let address = gpu.pci_bus_id.clone().unwrap();
    let [off, share, bind, spec] = plan.steps.as_slice() else { panic!("{plan}") };
    assert_eq!(off, &Step::SwitchMig { gpu: gpu.uuid.clone(), on: false });
    assert!(matches!((share, spec), (Step::MakeShare { .. }, Step::WriteSpec)), "{plan}");
    assert_eq!(bind, &Step::BindVfio { gpu: gpu.uuid.clone(), address: address.clone() });
    assert_eq!(bind.inverse(), Undo::UnbindVfio { gpu: gpu.uuid.clone(), address: address.clone() });
    assert_eq!(plan.devices[0].held, Some(Held::Whole));
    let kept = Passed { address, info: gpu, device, iommu: Iommu::default(), persistence: true };
    assert_eq!(plan.devices[0].passed.as_deref(), Some(&kept));
    world.hold(&wanted);
    for device in ["gpu-0", "gpu-0-vfio", "gpu-0-timeslice"] {
        let refused = world.plan(&request("b", &[("r", device)]));
        assert!(matches!(refused, Err(Refusal::Conflict { .. })), "{device}: {refused:?}");
    }
}

#[test]
fn a_gpu_that_no_virtual_machine_can_have_is_refused_with_what_is_missing() {
    let mut world = World::of(vec![h100(0)]);
    let reason = |world: &World, request: &Request| match world.plan(request) {
        Err(Refusal::NoPassthrough { reason, .. }) => reason.to_string(),
        other => panic!("{other:?}"),
    };
    let plain = request("a", &[("vm", "gpu-0-vfio")]);
    assert!(reason(&world, &plain).contains("--vfio"));
    let uuid = world.gpus[0].uuid.clone();
    world.offers.insert(uuid.clone(), Err(VfioError::NoVfioPci.into()));
    assert_eq!(reason(&world, &plain), VfioError::NoVfioPci.to_string());
    world.offers.insert(uuid, Ok(Passthrough::default()));
    assert!(world.plan(&plain).is_ok());
    let mut new = plain;
    let iommu = Iommu { backend: IommuBackend::IommuFd, api_device: true };
    new.devices[0].settings = Settings::Vfio(aliquot_model::config::VfioConfig { iommu });
    assert!(reason(&world, &new).contains("IOMMUFD"));
}
