//! Finds the device nodes of a GPU that belong to the kernel's Direct Rendering Manager (DRM):
//! `/dev/dri/card1`, which drives screens, and `/dev/dri/renderD128`, which only renders. They exist if the
//! module nvidia-drm is loaded.
//!
//! The nodes are found in sysfs by the GPU's PCI address, with their numbers, so the content of `/dev` does
//! not matter. The links by that address are those that udev makes (`60-drm.rules` of systemd), whether or
//! not the host has udev.

use super::CharDevice;
use std::fs;
use std::path::Path;

/// The kind of a DRM node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrmKind {
    /// A node for screens and rendering. The first process that opens it may drive the screens, and names of
    /// buffers are common to all.
    Card,
    /// A node for rendering alone, separate for each opener.
    Render,
}

impl DrmKind {
    /// Returns the prefix of the names of such nodes, before their number.
    const fn prefix(self) -> &'static str {
        match self {
            Self::Card => "card",
            Self::Render => "renderD",
        }
    }

    /// Returns the suffix of the names of links to them.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Card => "card",
            Self::Render => "render",
        }
    }
}

/// A DRM node, and the link to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrmNode {
    /// The device of the node.
    pub device: CharDevice,
    /// The path of the link.
    pub link: String,
    /// The target of the link.
    pub target: String,
}

/// Returns the nodes of these kinds that a GPU has, sorted by device; none if nvidia-drm is not loaded.
/// `sys_root` is `/sys`, and `bus_id` is an address as the kernel writes it (`0000:17:00.0`).
pub fn nodes(sys_root: &Path, bus_id: &str, kinds: &[DrmKind]) -> Vec<DrmNode> {
    let dir = sys_root.join("bus/pci/devices").join(bus_id).join("drm");
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<DrmNode> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let kind = kinds.iter().find(|kind| is_number(name.strip_prefix(kind.prefix())))?;
            let (major, minor) = numbers(&fs::read_to_string(entry.path().join("dev")).ok()?)?;
            Some(DrmNode {
                link: format!("/dev/dri/by-path/pci-{bus_id}-{}", kind.suffix()),
                target: format!("../{name}"),
                device: CharDevice { path: format!("/dev/dri/{name}"), major, minor },
            })
        })
        .collect();
    found.sort_by(|a, b| a.device.cmp(&b.device));
    found
}

/// Returns the devices of all nodes that a GPU has; none if its address is not known.
pub fn all(sys_root: &Path, bus_id: Option<&str>) -> Vec<CharDevice> {
    let found = bus_id.map(|bus_id| nodes(sys_root, bus_id, &[DrmKind::Card, DrmKind::Render]));
    found.into_iter().flatten().map(|node| node.device).collect()
}

/// Returns true for a plain number. Connectors (`card1-DP-1`) are listed beside the cards, and are left out.
fn is_number(text: Option<&str>) -> bool {
    text.is_some_and(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Parses a device number such as `226:128`.
fn numbers(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_found_by_the_gpus_address_with_the_kernels_numbers() {
        let sys = tempfile::tempdir().unwrap();
        let add = |bus: &str, name: &str, dev: &str| {
            let dir = sys.path().join("bus/pci/devices").join(bus).join("drm").join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("dev"), dev).unwrap();
        };
        add("0000:17:00.0", "card1", "226:1\n");
        add("0000:17:00.0", "renderD128", "226:128\n");
        add("0000:17:00.0", "card1-DP-1", "");
        add("0000:17:00.0", "renderD", "226:9\n");
        add("0000:18:00.0", "card2", "226:2\n");
        add("0000:19:00.0", "card3", "no number");
        let of = |bus: &str, kinds: &[DrmKind]| {
            let told = |node: DrmNode| {
                let CharDevice { path, major, minor } = node.device;
                format!("{path} {major}:{minor} {} -> {}", node.link, node.target)
            };
            nodes(sys.path(), bus, kinds).into_iter().map(told).collect::<Vec<_>>()
        };
        let card = "/dev/dri/card1 226:1 /dev/dri/by-path/pci-0000:17:00.0-card -> ../card1";
        let render = "/dev/dri/renderD128 226:128 /dev/dri/by-path/pci-0000:17:00.0-render -> ../renderD128";
        assert_eq!(of("0000:17:00.0", &[DrmKind::Card, DrmKind::Render]), [card, render]);
        assert_eq!(of("0000:17:00.0", &[DrmKind::Render]), [render]);
        assert_eq!(of("0000:19:00.0", &[DrmKind::Card]), Vec::<String>::new());
        assert_eq!(of("0000:1a:00.0", &[DrmKind::Card]), Vec::<String>::new());
    }
}
