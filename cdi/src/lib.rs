//! The [Container Device Interface]: the file in which a driver tells a container runtime what to add to a
//! container for a device.
//!
//! The crate has spec types for CDI 0.5 to 1.1, their validation, the lowest version that a spec needs, the
//! resolution of device names as runtimes do it, and a directory of specs with atomic writes. It can be used
//! by itself; only [`SpecDir`] uses the file system.
//!
//! Invariants: a [`Spec`] that [`Spec::validate`] accepts is accepted by a runtime that knows its version,
//! and [`SpecDir::write`] writes no other. The rules are those of the runtimes, those that only the text of
//! the specification states, and one more: a hook has its own environment. A reader of the directory sees the
//! old file or the new one, never a part.
//!
//! Start with [`Spec`], then [`SpecDir`].
//!
//! [Container Device Interface]: https://github.com/cncf-tags/container-device-interface
#![forbid(unsafe_code)]

mod dir;
mod edits;
mod name;
mod spec;
mod validate;
mod version;

pub use dir::{DirError, SpecDir, Written};
pub use edits::{ResolveError, resolve};
pub use name::{DeviceName, Kind, NameError, QualifiedName};
pub use spec::{ContainerEdits, Device, DeviceNode, Hook, HookName, IntelRdt, Mount, NetDevice, Spec};
pub use validate::{Problem, Problems};
pub use version::{Version, VersionRange};
