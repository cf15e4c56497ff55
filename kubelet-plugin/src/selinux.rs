//! Sets the SELinux labels of this driver's files in containers.
//!
//! New files inherit the labels of the kubelet's directory or of `/opt`, which confined containers may not
//! read. The loader skips a file of the limiter that it cannot read, and then a share would have no limit. So
//! every file of this driver that is mounted into a container is labelled before its claim is prepared. Other
//! files, such as those of the NVIDIA driver, are never labelled; [`denied()`] checks them.

mod denied;
pub mod driver;
mod existing;
mod labels;

pub use denied::{CONTAINER, Denied, denied};
pub use existing::Existing;
pub use labels::{LabelError, Labelling, Labels, Pair, READ_ONLY, WRITABLE};
