//! Finds the position of a GPU in the machine, from the kernel's sysfs.

use std::fs;
use std::path::{Component, Path};

/// The position of a PCI device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PciPosition {
    /// The root complex, such as `pci0000:16`: the first directory under `/sys/devices` of the device's link.
    pub root: Option<String>,
    /// The NUMA node; `None` if the kernel reports -1 or nothing.
    pub numa_node: Option<u32>,
}

/// Converts NVML's address, such as `00000000:17:00.0`, to the form that the kernel writes, `0000:17:00.0`.
/// Returns `None` if it is not an address.
pub fn bus_id(nvml: &str) -> Option<String> {
    let (domain, rest) = nvml.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    let (domain, bus, device, function) = (hex(domain)?, hex(bus)?, hex(device)?, hex(function)?);
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

/// Reads the position of a device under a sysfs root (`/sys`). Values that cannot be read are absent: they
/// are only information for schedulers.
pub fn position(sys_root: &Path, bus_id: &str) -> PciPosition {
    let link = sys_root.join("bus/pci/devices").join(bus_id);
    let root = fs::read_link(&link).ok().and_then(|target| root_complex(&target));
    let numa_node = fs::read_to_string(link.join("numa_node")).ok().and_then(|text| text.trim().parse().ok());
    PciPosition { root, numa_node }
}

/// Returns the directory after `devices` in a link such as
/// `../../../devices/pci0000:16/0000:16:00.0/0000:17:00.0`.
fn root_complex(target: &Path) -> Option<String> {
    let mut components = target.components().filter_map(|component| match component {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    components.find(|&name| name == "devices")?;
    components.next().filter(|name| name.starts_with("pci")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::os::unix::fs::symlink;

    #[rstest]
    #[case("00000000:17:00.0", Some("0000:17:00.0"))]
    #[case("00000000:AF:00.0", Some("0000:af:00.0"))]
    #[case("00010000:01:00.0", Some("10000:01:00.0"))]
    #[case("0000:17:00.0", Some("0000:17:00.0"))]
    #[case("17:00.0", None)]
    #[case("", None)]
    #[case("zz:17:00.0", None)]
    fn addresses_are_written_as_the_kernel_writes_them(#[case] nvml: &str, #[case] want: Option<&str>) {
        assert_eq!(bus_id(nvml).as_deref(), want);
    }

    #[rstest]
    #[case::node("1\n", Some(1))]
    #[case::none("-1\n", None)]
    #[case::empty("", None)]
    fn root_complex_and_numa_node_come_from_sysfs(#[case] numa: &str, #[case] want: Option<u32>) {
        let sys = tempfile::tempdir().unwrap();
        let real = sys.path().join("devices/pci0000:16/0000:16:01.0/0000:17:00.0");
        fs::create_dir_all(&real).unwrap();
        fs::write(real.join("numa_node"), numa).unwrap();
        let links = sys.path().join("bus/pci/devices");
        fs::create_dir_all(&links).unwrap();
        symlink("../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0", links.join("0000:17:00.0")).unwrap();
        assert_eq!(
            position(sys.path(), "0000:17:00.0"),
            PciPosition { root: Some("pci0000:16".into()), numa_node: want }
        );
        assert_eq!(position(sys.path(), "0000:18:00.0"), PciPosition::default());
    }

    #[test]
    fn a_device_that_hangs_on_no_root_complex_has_none() {
        assert_eq!(root_complex(Path::new("../../../devices/platform/x")), None);
        assert_eq!(root_complex(Path::new("/elsewhere/pci0000:16/x")), None);
    }
}
