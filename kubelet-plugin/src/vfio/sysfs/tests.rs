use super::*;
use aliquot_sim_node::{Hardware, PciBus, PciDevice};
use rstest::rstest;
use std::os::unix::fs::symlink;

const GPU: &str = "0000:17:00.0";

struct Idle;

impl Hardware for Idle {
    fn changed(&self, _: &str, _: Option<&str>) {}

    fn in_use(&self, _: &str) -> bool {
        false
    }
}

fn gpu() -> PciDevice {
    PciDevice { address: GPU.into(), class: 0x03_02_00, group: Some(15), driver: Some("nvidia") }
}

fn bus(sys: &Path, iommu_fd: bool) -> PciBus {
    PciBus::start(sys, [gpu()], iommu_fd, Idle).unwrap()
}

fn sysfs(sys: &Path) -> Sysfs {
    Sysfs::new(sys, Duration::from_millis(200))
}

fn change(sysfs: &Sysfs, writes: Vec<Write>) {
    for write in writes {
        sysfs.write(&write).unwrap();
        sysfs.await_effect(&write).unwrap();
    }
}

#[test]
fn a_group_is_read_as_the_kernel_shows_it_before_and_after_a_change_of_driver() {
    let sys = tempfile::tempdir().unwrap();
    let bus = bus(sys.path(), false);
    let sysfs = sysfs(sys.path());
    let before = sysfs.group(GPU).unwrap();
    assert_eq!((before.number, before.driver()), (Some(15), Some("nvidia")));
    assert_eq!(before.functions[0].wanted, None, "the kernel writes (null) for none");
    change(&sysfs, before.bind().unwrap());
    assert_eq!(bus.driver(GPU).as_deref(), Some("vfio-pci"));
    let bound = sysfs.group(GPU).unwrap();
    assert_eq!((bound.driver(), bound.functions[0].wanted.as_deref()), (Some("vfio-pci"), Some("vfio-pci")));
    change(&sysfs, bound.release());
    let after = sysfs.group(GPU).unwrap();
    assert_eq!((after.driver(), &after.functions[0].wanted), (Some("nvidia"), &None));
    assert!(matches!(sysfs.group("0000:18:00.0"), Err(VfioError::Absent { .. })));
}

#[rstest]
#[case::old(IommuBackend::Legacy, true, &[("/dev/vfio/vfio", 10, 196), ("/dev/vfio/15", 243, 15)])]
#[case::preferred(IommuBackend::PreferIommuFd, true, &[("/dev/iommu", 10, 123), ("/dev/vfio/devices/vfio15", 511, 15)])]
#[case::preferred_in_vain(IommuBackend::PreferIommuFd, false, &[("/dev/vfio/vfio", 10, 196), ("/dev/vfio/15", 243, 15)])]
#[case::new(IommuBackend::IommuFd, true, &[("/dev/iommu", 10, 123), ("/dev/vfio/devices/vfio15", 511, 15)])]
fn a_container_gets_the_devices_of_the_interface_that_it_asked_for(
    #[case] backend: IommuBackend,
    #[case] iommu_fd: bool,
    #[case] want: &[(&str, u32, u32)],
) {
    let sys = tempfile::tempdir().unwrap();
    let _bus = bus(sys.path(), iommu_fd);
    let sysfs = sysfs(sys.path());
    change(&sysfs, sysfs.group(GPU).unwrap().bind().unwrap());
    let nodes = |api_device| {
        let nodes = sysfs.nodes(GPU, Iommu { backend, api_device }).unwrap();
        nodes.into_iter().map(|node| (node.path, node.major, node.minor)).collect::<Vec<_>>()
    };
    let owned = |(path, major, minor): &(&str, u32, u32)| ((*path).to_owned(), *major, *minor);
    assert_eq!(nodes(true), want.iter().map(owned).collect::<Vec<_>>());
    assert_eq!(nodes(false), want[1..].iter().map(owned).collect::<Vec<_>>());
}

#[test]
fn iommufd_that_the_kernel_does_not_have_is_refused() {
    let sys = tempfile::tempdir().unwrap();
    let _bus = bus(sys.path(), false);
    let sysfs = sysfs(sys.path());
    change(&sysfs, sysfs.group(GPU).unwrap().bind().unwrap());
    let iommu = Iommu { backend: IommuBackend::IommuFd, api_device: true };
    assert!(matches!(sysfs.nodes(GPU, iommu), Err(VfioError::NoIommuFd { .. })));
}

/// As long as nobody reads a pipe, opening it takes as long as a driver that does not let go of its device.
#[test]
fn a_write_that_the_kernel_does_not_answer_is_given_up_and_not_made_a_second_time() {
    let sys = tempfile::tempdir().unwrap();
    let bus = bus(sys.path(), false);
    drop(bus);
    let sysfs = sysfs(sys.path());
    let unbind = Write::Unbind { address: GPU.into() };
    for _ in 0..3 {
        let error = sysfs.write(&unbind).unwrap_err();
        assert!(matches!(error, VfioError::Unanswered { .. }), "{error}");
    }
    assert!(sysfs.refuse_unanswered(GPU).is_err());
    assert!(sysfs.refuse_unanswered("0000:18:00.0").is_ok(), "another device is not concerned");
    assert_eq!(sysfs.unanswered.lock().len(), 1);
    // Somebody reads at last: what was written once is all that there is.
    let pipe = sys.path().join("bus/pci/drivers/nvidia/unbind");
    assert_eq!(fs::read_to_string(pipe).unwrap(), GPU);
    while sysfs.refuse_unanswered(GPU).is_err() {
        std::thread::sleep(LOOK);
    }
}

#[test]
fn nothing_is_made_where_the_kernel_has_no_such_file() {
    let sys = tempfile::tempdir().unwrap();
    let at = sys.path().join("bus/pci/devices").join(GPU);
    fs::create_dir_all(&at).unwrap();
    let keep = Write::Keep { address: GPU.into(), driver: None };
    assert!(matches!(sysfs(sys.path()).write(&keep), Err(VfioError::Io { .. })));
    assert!(!at.join("driver_override").exists());
    // No IOMMU: a group of its own that has no number.
    symlink("../../drivers/nvidia", at.join("driver")).unwrap();
    let group = sysfs(sys.path()).group(GPU).unwrap();
    assert_eq!((group.number, group.driver()), (None, Some("nvidia")));
}

#[rstest]
#[case::bars("0x00000000de000000 0x00000000deffffff 0x0000000000040200\n0x0000001000000000 0x0000001fffffffff 0x000000000014220c\n0x000000000000e000 0x000000000000e07f 0x0000000000040101\n", 128 << 30)]
#[case::none("", 0)]
fn memory_that_the_bars_address_is_rounded_up(#[case] resource: &str, #[case] want: u64) {
    assert_eq!(addressable(resource), want);
}
