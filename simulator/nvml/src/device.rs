//! What a device is called, and how much memory it has.

use std::ffi::{c_char, c_int, c_uint};

use aliquot_sim_node::{Gpu, Pool};
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{Handle, Out, field, version_of};
use crate::call::{Code, Done, Session, export};

export! {
    fn nvmlDeviceGetName(device: Handle, name: Out<c_char>, length: c_uint) |session| {
        let product = session.parent(device)?.board.product;
        match session.mig_device(device)? {
            None => name.put_text(product, length),
            Some(mig) => name.put_text(&format!("{product} MIG {}", mig.name), length),
        }
    }

    fn nvmlDeviceGetUUID(device: Handle, uuid: Out<c_char>, length: c_uint) |session| {
        match session.mig_device(device)? {
            None => uuid.put_text(&session.gpu(device)?.uuid, length),
            Some(mig) => uuid.put_text(&mig.uuid, length),
        }
    }

    fn nvmlDeviceGetIndex(device: Handle, index: Out<c_uint>) |session| {
        let place = match session.mig_device(device)? {
            None => {
                let gpu = session.gpu(device)?;
                session.gpus().position(|g| g.index == gpu.index)
            }
            Some(mig) => session.mig_devices(mig.ci.gpu)?.iter().position(|d| d.uuid == mig.uuid),
        };
        index.put(place.ok_or(Code::INVALID_ARGUMENT)? as c_uint)
    }

    fn nvmlDeviceGetMinorNumber(device: Handle, minor: Out<c_uint>) |session| {
        if session.mig_device(device)?.is_some() {
            return Err(Code::NOT_SUPPORTED);
        }
        minor.put(session.node.minor(session.gpu(device)?.index)?)
    }

    fn nvmlDeviceGetSerial(device: Handle, serial: Out<c_char>, length: c_uint) |session| {
        serial.put_text(&session.parent(device)?.serial, length)
    }

    fn nvmlDeviceGetBrand(device: Handle, brand: Out<c_uint>) |session| {
        brand.put(session.parent(device)?.board.brand)
    }

    fn nvmlDeviceGetArchitecture(device: Handle, architecture: Out<c_uint>) |session| {
        architecture.put(session.parent(device)?.board.architecture as c_uint)
    }

    fn nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<c_int>, minor: Out<c_int>) |session| {
        let (high, low) = session.parent(device)?.board.compute_capability;
        major.put(high as c_int)?;
        minor.put(low as c_int)
    }

    fn nvmlDeviceGetNumGpuCores(device: Handle, cores: Out<c_uint>) |session| {
        let board = session.gpu(device)?.board;
        cores.put(board.multiprocessors * board.cores_per_multiprocessor)
    }

    fn nvmlDeviceGetPciInfo(device: Handle, pci: Out<sys::nvmlPciInfo_t>) |session| {
        pci.put(pci_info(session.parent(device)?))
    }

    fn nvmlDeviceGetPciInfo_v2(device: Handle, pci: Out<sys::nvmlPciInfo_t>) |session| {
        pci.put(pci_info(session.parent(device)?))
    }

    fn nvmlDeviceGetPciInfo_v3(device: Handle, pci: Out<sys::nvmlPciInfo_t>) |session| {
        pci.put(pci_info(session.parent(device)?))
    }

    fn nvmlDeviceGetMemoryInfo(device: Handle, memory: Out<sys::nvmlMemory_t>) |session| {
        let now = session.node.memory(pool(session, device)?)?;
        // Version 1 has no field for what the driver reserves: it counts as used.
        memory.put(sys::nvmlMemory_t { total: now.total, free: now.free, used: now.total - now.free })
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: Out<sys::nvmlMemory_v2_t>) |session| {
        let version = memory.get()?.version;
        if version != version_of::<sys::nvmlMemory_v2_t>(2) {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let now = session.node.memory(pool(session, device)?)?;
        memory.put(sys::nvmlMemory_v2_t {
            version,
            total: now.total,
            reserved: now.reserved,
            free: now.free,
            used: now.used,
        })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(device: Handle, memory: Out<sys::nvmlBAR1Memory_t>) |session| {
        let gpu = session.gpu(device)?;
        // The smallest power of two that covers the memory, as large-BAR boards have it.
        let total = gpu.memory_bytes().next_power_of_two();
        let used = 4 << 20;
        memory.put(sys::nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - used, bar1Used: used })
    }

    fn nvmlDeviceGetAttributes(device: Handle, attributes: Out<sys::nvmlDeviceAttributes_t>) |session| {
        attributes_of(session, device, attributes)
    }

    fn nvmlDeviceGetAttributes_v2(device: Handle, attributes: Out<sys::nvmlDeviceAttributes_t>) |session| {
        attributes_of(session, device, attributes)
    }

    fn nvmlDeviceGetComputeMode(device: Handle, mode: Out<c_uint>) |session| {
        mode.put(session.node.settings(session.parent(device)?.index)?.compute_mode)
    }

    fn nvmlDeviceSetComputeMode(device: Handle, mode: c_uint) |session| {
        // 1 was exclusive thread, which no driver of today has.
        if mode > 3 || mode == 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        Ok(session.node.set_compute_mode(session.gpu(device)?.index, mode)?)
    }

    fn nvmlDeviceGetPersistenceMode(device: Handle, mode: Out<c_uint>) |session| {
        mode.put(session.node.settings(session.parent(device)?.index)?.persistence.into())
    }

    fn nvmlDeviceSetPersistenceMode(device: Handle, mode: c_uint) |session| {
        if mode > 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        Ok(session.node.set_persistence(session.gpu(device)?.index, mode == 1)?)
    }
}

pub(crate) fn pci_info(gpu: &Gpu) -> sys::nvmlPciInfo_t {
    sys::nvmlPciInfo_t {
        busIdLegacy: field(&gpu.bdf().to_ascii_uppercase()),
        domain: 0,
        bus: gpu.bus,
        device: 0,
        pciDeviceId: gpu.board.pci_device_id,
        pciSubSystemId: gpu.board.pci_subsystem_id,
        busId: field(&gpu.nvml_bus_id()),
    }
}

/// The memory that a device handle speaks of.
pub(crate) fn pool(session: &Session, device: Handle) -> Result<Pool, Code> {
    Ok(match session.mig_device(device)? {
        None => Pool::whole(session.whole(device)?.index),
        Some(mig) => Pool::instance(mig.gi.gpu, mig.gi.id),
    })
}

fn attributes_of(session: &Session, device: Handle, attributes: Out<sys::nvmlDeviceAttributes_t>) -> Done {
    // Only a MIG device has them.
    let mig = session.mig_device(device)?.ok_or(Code::NOT_SUPPORTED)?;
    let engines = mig.gi.profile.engines;
    attributes.put(sys::nvmlDeviceAttributes_t {
        multiprocessorCount: mig.multiprocessors,
        sharedCopyEngineCount: engines.copy,
        sharedDecoderCount: engines.decoder,
        sharedEncoderCount: engines.encoder,
        sharedJpegCount: engines.jpeg,
        sharedOfaCount: engines.ofa,
        gpuInstanceSliceCount: mig.gi.profile.slices,
        computeInstanceSliceCount: mig.ci.size,
        memorySizeMB: mig.gi.profile.memory_mib,
    })
}
