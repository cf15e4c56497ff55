//! Reads the targets of a GPU's NVLinks.

use super::{DeviceHandle, Result, check, text};
use crate::nvlink::Links;
use crate::{NvmlCode, pci};
use nvml_wrapper_sys::bindings as sys;

/// The kind of device that a link leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Switch,
    Gpu,
}

impl DeviceHandle<'_> {
    /// Returns the targets of the links. Whether they lead to NVSwitches is always answered. If it cannot be
    /// found out, they count as leading to NVSwitches, because a virtual machine without its fabric has no
    /// CUDA.
    pub(crate) fn nvlinks(self) -> Links {
        match self.fabric() {
            Ok(domain) => Links::Fabric(domain),
            Err(NvmlCode::NOT_SUPPORTED | NvmlCode::FUNCTION_NOT_FOUND) => self.links(),
            Err(_) => Links::Fabric(None),
        }
    }

    /// Returns the domain of the fabric that the GPU takes part in (Hopper and newer), if it takes part by
    /// now. GPUs register with their fabric after the driver's start.
    fn fabric(self) -> Result<Option<String>> {
        // SAFETY: an all-zero struct of integers is valid.
        let mut info: sys::nvmlGpuFabricInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: a handle of this library; `info` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetGpuFabricInfo(self.handle, &mut info)) }?;
        match u32::from(info.state) {
            sys::NVML_GPU_FABRIC_STATE_NOT_SUPPORTED => Err(NvmlCode::NOT_SUPPORTED),
            sys::NVML_GPU_FABRIC_STATE_COMPLETED if check(info.status).is_ok() => {
                Ok(Some(crate::nvlink::fabric_domain(info.clusterUuid, info.cliqueId)))
            }
            _ => Ok(None),
        }
    }

    /// Reads the links one by one. All links of a GPU lead to the same kind of device, so the first one that
    /// reports its kind decides.
    fn links(self) -> Links {
        let (mut peers, mut all_up) = (Vec::new(), true);
        for link in 0..sys::NVML_NVLINK_MAX_LINKS {
            match self.end_of(link) {
                Ok(Some(End::Switch)) => return Links::Switches,
                Ok(Some(End::Gpu)) => match self.peer(link) {
                    Ok(Some(peer)) => peers.push(peer),
                    Ok(None) | Err(_) => all_up = false,
                },
                Ok(None) => all_up = false,
                // This board does not have the link; others may come after it.
                Err(NvmlCode::NOT_SUPPORTED | NvmlCode::INVALID_ARGUMENT) => {}
                Err(NvmlCode::FUNCTION_NOT_FOUND) => break,
                Err(_) => all_up = false,
            }
        }
        Links::Gpus { peers, all_up }
    }

    /// Returns the kind of device that a link leads to, if it is known.
    fn end_of(self, link: u32) -> Result<Option<End>> {
        let mut kind = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
        // SAFETY: a handle of this library; `kind` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetNvLinkRemoteDeviceType(self.handle, link, &mut kind)) }?;
        Ok(match kind {
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => Some(End::Switch),
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => Some(End::Gpu),
            _ => None,
        })
    }

    /// Returns the PCI address of the GPU that a link leads to, as the kernel writes it. Returns `None` if
    /// the link is down.
    fn peer(self, link: u32) -> Result<Option<String>> {
        let mut state = 0;
        // SAFETY: a handle of this library; `state` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetNvLinkState(self.handle, link, &mut state)) }?;
        if state != sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED {
            return Ok(None);
        }
        // SAFETY: an all-zero struct of integers is valid.
        let mut info: sys::nvmlPciInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: a handle of this library; `info` outlives the call.
        unsafe { call!(self.lib, nvmlDeviceGetNvLinkRemotePciInfo_v2(self.handle, link, &mut info)) }?;
        Ok(pci::bus_id(&text(&info.busId)))
    }
}
