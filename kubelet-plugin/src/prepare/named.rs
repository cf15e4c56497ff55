//! Reads which devices a CDI spec of this driver gives containers.

use crate::edits;
use aliquot_cdi::{Device, Spec};
use aliquot_model::DeviceName;

/// A device that a CDI spec names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The ID of the allocation result.
    pub result_id: String,
    /// The name of the device.
    pub device: DeviceName,
    /// The UUID of the GPU, or of the MIG device.
    pub uuid: String,
    /// True if the MIG device existed before the claim, and stays when the claim ends.
    pub adopted: bool,
    /// The PCI address, if the device is a GPU that a virtual machine has.
    pub passed: Option<String>,
}

/// Returns the name and UUID of the device that a device of this driver's spec gives containers, as the spec
/// tells them.
fn given(device: &Device) -> Option<(&str, &str)> {
    let mut variables = device.container_edits.environment().into_iter();
    variables.find_map(|(name, value)| value.split_once('=').filter(|_| name.starts_with(edits::DEVICE_ENV)))
}

/// Reads the devices that a spec of this driver gives containers.
pub(super) fn named(spec: &Spec) -> Vec<Named> {
    let named = spec.devices.iter().filter_map(|device| {
        let (name, uuid) = given(device)?;
        let (device_name, uuid) = (DeviceName::parse(name)?, uuid.to_owned());
        let adopted = edits::is_adopted(&device.container_edits);
        let passed = edits::passed_address(&device.container_edits);
        Some(Named { result_id: device.name.to_string(), device: device_name, uuid, adopted, passed })
    });
    named.collect()
}

/// Returns the first device in a spec of this driver whose name this release does not know: a newer release
/// wrote it.
pub(super) fn unknown(spec: &Spec) -> Option<&str> {
    let names = spec.devices.iter().filter_map(|device| given(device).map(|(name, _)| name));
    names.into_iter().find(|name| DeviceName::parse(name).is_none())
}
