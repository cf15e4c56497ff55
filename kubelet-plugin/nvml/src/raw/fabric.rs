//! Where a GPU's NVLinks lead.

use super::{DeviceHandle, Result, check};
use crate::NvmlCode;
use nvml_wrapper_sys::bindings as sys;

impl DeviceHandle<'_> {
    /// Whether the GPU is connected to NVSwitches: it takes part in a fabric (`nvmlDeviceGetGpuFabricInfo`, Hopper and
    /// newer), or its links lead to switches. Where that cannot be told it is: a virtual machine without its fabric has no
    /// CUDA.
    pub(crate) fn is_on_nvswitch(self) -> bool {
        match self.is_in_fabric() {
            Ok(true) => true,
            Ok(false) | Err(NvmlCode::NOT_SUPPORTED | NvmlCode::FUNCTION_NOT_FOUND) => {
                self.is_linked_to_switch()
            }
            Err(_) => true,
        }
    }

    fn is_in_fabric(self) -> Result<bool> {
        // SAFETY: an all-zero struct of integers is valid.
        let mut info: sys::nvmlGpuFabricInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: a handle of this library; `info` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetGpuFabricInfo(self.handle, &mut info)) }?;
        Ok(u32::from(info.state) != sys::NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)
    }

    /// All links of a GPU lead to the same kind of device, so the first that tells decides.
    fn is_linked_to_switch(self) -> bool {
        let known = |kind: &sys::nvmlIntNvLinkDeviceType_t| {
            *kind != sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN
        };
        let links = (0..sys::NVML_NVLINK_MAX_LINKS).map(|link| self.remote_kind(link));
        // A board without links says so of the first.
        let mut there = links.take_while(|kind| !matches!(kind, Err(NvmlCode::NOT_SUPPORTED)));
        there.find_map(|kind| kind.ok().filter(known))
            == Some(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH)
    }

    fn remote_kind(self, link: u32) -> Result<sys::nvmlIntNvLinkDeviceType_t> {
        let mut kind = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
        // SAFETY: a handle of this library; `kind` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetNvLinkRemoteDeviceType(self.handle, link, &mut kind)) }?;
        Ok(kind)
    }
}
