//! The vocabulary of Aliquot: GPUs, MIG profiles and placements, shares, device names, opaque configuration,
//! and the layout that a node publishes.
//!
//! Everything here is a pure value or a pure function: no I/O, no clock, no async, no Kubernetes client.
//! `controller` and `kubelet-plugin` communicate only in these terms.
//!
//! Start with [`gpu::GpuInfo`] (what a node has), [`layout::publish`] (what it publishes) and
//! [`device::DeviceName`] (the names of devices).

pub mod acknowledge;
pub mod allocation;
mod annotation;
pub mod capability;
pub mod charge;
pub mod config;
pub mod cordon;
pub mod device;
pub mod duration;
pub mod event;
pub mod gpu;
pub mod hold;
pub mod layout;
pub mod names;
pub mod placement;
pub mod profile;
pub mod quantity;
pub mod version;

pub use capability::{DriverCapabilities, DriverCapability};
pub use charge::MicroGpus;
pub use device::{DeviceKind, DeviceName, PartitionOf};
pub use gpu::{Architecture, GpuInfo, GpuUuid, LiveMig, MigCapability, MigUuid};
pub use placement::Placement;
pub use profile::{Engines, MigProfile, ProfileName};
pub use quantity::Quantity;
