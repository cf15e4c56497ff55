//! A GPU as a PCI device for a virtual machine; the names are those of NVIDIA's driver.

use super::{Attribute, Capacity};
use crate::Quantity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Facts of a GPU that can be given to a virtual machine through vfio-pci, in addition to those of the GPU
/// itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Passthrough {
    /// PCI vendor as sysfs writes it: `0x10de`.
    pub vendor_id: String,
    /// PCI device as sysfs writes it, for example `0x2330`.
    pub device_id: String,
    /// True if the kernel offers IOMMUFD beside the older interface.
    pub iommu_fd: bool,
    /// Bytes that the device's memory regions (BARs) address; 0 if that is not known.
    pub addressable_bytes: u64,
}

impl Passthrough {
    pub(super) fn tell(
        &self,
        attributes: &mut BTreeMap<String, Attribute>,
        capacity: &mut BTreeMap<String, Capacity>,
    ) {
        attributes.insert("vendorID".into(), Attribute::Text(self.vendor_id.clone()));
        attributes.insert("deviceID".into(), Attribute::Text(self.device_id.clone()));
        attributes.insert("iommuFDEnabled".into(), Attribute::Bool(self.iommu_fd));
        if self.addressable_bytes > 0 {
            let value = Quantity::from_u64(self.addressable_bytes);
            capacity.insert("addressableMemory".into(), Capacity { value, policy: None });
        }
    }
}
