//! Finds out whether the node has a GPU at all; its PCI bus shows this without a driver.

use std::fs;
use std::path::Path;

const NVIDIA: &str = "0x10de";
/// The first byte of `class` for VGA, 3D and other display controllers.
const DISPLAY: &str = "0x03";

/// Returns true if the node certainly has no GPU: the bus can be read, and no display controller on it is
/// NVIDIA's.
pub(super) fn has_no_gpu(sys_root: &Path) -> bool {
    let Ok(devices) = fs::read_dir(sys_root.join("bus/pci/devices")) else { return false };
    let begins = |file: &Path, with: &str| match fs::read_to_string(file) {
        Ok(text) => text.trim().starts_with(with),
        // The device may be a GPU.
        Err(_) => true,
    };
    let mut devices = devices.map(|device| device.map(|device| device.path()));
    devices.all(|device| {
        device.is_ok_and(|at| !(begins(&at.join("vendor"), NVIDIA) && begins(&at.join("class"), DISPLAY)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_no_gpu_only_where_the_bus_says_so() {
        for (devices, want) in [
            (None, false),
            (Some(vec![]), true),
            (Some(vec![("0x8086", "0x060000"), ("0x1a03", "0x030000")]), true),
            // A network card and a sound device of NVIDIA's.
            (Some(vec![("0x10de", "0x020700"), ("0x10de", "0x040300")]), true),
            (Some(vec![("0x8086", "0x060000"), ("0x10de", "0x030200")]), false),
            (Some(vec![("0x10de", "0x030000")]), false),
            (Some(vec![("0x10de", "")]), true),
        ] {
            let sys = tempfile::tempdir().unwrap();
            let bus = sys.path().join("bus/pci/devices");
            for (at, (vendor, class)) in devices.iter().flatten().enumerate() {
                let device = bus.join(at.to_string());
                fs::create_dir_all(&device).unwrap();
                fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
                fs::write(device.join("class"), format!("{class}\n")).unwrap();
            }
            if devices.is_some() {
                fs::create_dir_all(&bus).unwrap();
            }
            assert_eq!(has_no_gpu(sys.path()), want, "{devices:?}");
        }
        let sys = tempfile::tempdir().unwrap();
        fs::create_dir_all(sys.path().join("bus/pci/devices/unreadable")).unwrap();
        assert!(!has_no_gpu(sys.path()), "one that does not say what it is may be one");
    }
}
