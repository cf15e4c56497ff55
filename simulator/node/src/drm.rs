//! What the module nvidia-drm shows of the GPUs: their entries in sysfs, the nodes that the kernel makes for them, and
//! udev's links to these.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::dev;
use crate::spec::Gpu;

/// Major number of the simulated nodes, of those for local use as well; the kernel's own is 226.
const MAJOR: u32 = 123;
/// The first number of a render node.
const FIRST_RENDER: u32 = 128;

/// Shows the GPUs under a root whose PCI devices are there.
pub(crate) fn show(root: &Path, gpus: &[Gpu]) -> io::Result<()> {
    let dri = root.join("dev/dri");
    fs::create_dir_all(dri.join("by-path"))?;
    for (number, gpu) in (0_u32..).zip(gpus) {
        // The first card is the screen of the server's own management, as on most servers.
        let nodes = [("card", "card", number + 1), ("renderD", "render", number + FIRST_RENDER)];
        for (prefix, kind, minor) in nodes {
            let name = format!("{prefix}{minor}");
            let entry = root.join("sys/bus/pci/devices").join(gpu.bdf()).join("drm").join(&name);
            fs::create_dir_all(&entry)?;
            fs::write(entry.join("dev"), format!("{MAJOR}:{minor}\n"))?;
            dev::make(&dri.join(&name))?;
            let link = dri.join("by-path").join(format!("pci-{}-{kind}", gpu.bdf()));
            dev::gone(fs::remove_file(&link))?;
            symlink(format!("../{name}"), link)?;
        }
    }
    Ok(())
}

/// Hides them.
pub(crate) fn hide(root: &Path) -> io::Result<()> {
    dev::gone(fs::remove_dir_all(root.join("dev/dri")))?;
    for device in fs::read_dir(root.join("sys/bus/pci/devices"))? {
        dev::gone(fs::remove_dir_all(device?.path().join("drm")))?;
    }
    Ok(())
}
