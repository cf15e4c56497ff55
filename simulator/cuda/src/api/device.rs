//! Devices.

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::{Out, Text, put_text};
use crate::types::Bytes;

fn total(driver: &Driver, ordinal: i32) -> Cu<u64> {
    let memory = driver.node()?.memory(driver.device(ordinal)?.pool).map_err(|_| Code::UNKNOWN)?;
    Ok(memory.total - memory.reserved)
}

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`, the one attribute that can change.
const COMPUTE_MODE: i32 = 20;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`, the one that a variant of the driver tells otherwise.
const MULTIPROCESSORS: i32 = 16;

/// `CUdevprop`.
#[repr(C)]
struct Properties {
    threads_per_block: i32,
    threads_dim: [i32; 3],
    grid_size: [i32; 3],
    shared_per_block: i32,
    constant: i32,
    simd_width: i32,
    pitch: i32,
    registers: i32,
    clock: i32,
    texture_align: i32,
}

api! { (driver, flavour)
    Init fn cuDeviceGetCount(count: Out<i32>) {
        count.put(i32::try_from(driver.devices().len()).unwrap_or(i32::MAX))
    }

    Init fn cuDeviceGet(device: Out<i32>, ordinal: i32) {
        driver.device(ordinal)?;
        device.put(ordinal)
    }

    Init fn cuDeviceGetName(name: Out<u8>, length: i32, device: i32) {
        put_text(name, length, &driver.device(device)?.name())
    }

    Init fn cuDeviceGetUuid(uuid: Out<Bytes<16>>, device: i32) {
        uuid.put(Bytes(driver.device(device)?.uuid(false)))
    }

    Init fn cuDeviceGetUuid_v2(uuid: Out<Bytes<16>>, device: i32) {
        uuid.put(Bytes(driver.device(device)?.uuid(true)))
    }

    Init fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) {
        let described = driver.device(device)?;
        if attribute == COMPUTE_MODE {
            let settings = driver.node()?.settings(described.gpu.index).map_err(|_| Code::UNKNOWN)?;
            return value.put(i32::try_from(settings.compute_mode).unwrap_or(0));
        }
        if let Some(told) = driver.config.multiprocessors.filter(|_| attribute == MULTIPROCESSORS) {
            return value.put(i32::try_from(told).unwrap_or(i32::MAX));
        }
        let found = described.attribute(attribute, driver.mps_daemon().is_some()).ok_or(Code::INVALID_VALUE)?;
        value.put(found)
    }

    Init fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, device: i32) {
        let capability = driver.device(device)?.capability();
        major.put(capability.0)?;
        minor.put(capability.1)
    }

    Init fn cuDeviceGetProperties(properties: Out<Properties>, device: i32) {
        let device = driver.device(device)?;
        let of = |attribute| device.attribute(attribute, false).unwrap_or(0);
        properties.put(Properties {
            threads_per_block: of(1),
            threads_dim: [of(2), of(3), of(4)],
            grid_size: [of(5), of(6), of(7)],
            shared_per_block: of(8),
            constant: of(9),
            simd_width: of(10),
            pitch: of(11),
            registers: of(12),
            clock: of(13),
            texture_align: of(14),
        })
    }

    Init fn cuDeviceTotalMem(bytes: Out<u32>, device: i32) {
        bytes.put(u32::try_from(total(driver, device)?).unwrap_or(u32::MAX))
    }

    Init fn cuDeviceTotalMem_v2(bytes: Out<u64>, device: i32) {
        bytes.put(total(driver, device)?)
    }

    Init fn cuDeviceGetPCIBusId(text: Out<u8>, length: i32, device: i32) {
        put_text(text, length, &driver.device(device)?.gpu.bdf().to_uppercase())
    }

    Init fn cuDeviceGetByPCIBusId(device: Out<i32>, text: Text) {
        let wanted = text.get()?.to_lowercase();
        // Tools write the domain with four or eight digits, or leave it out, and may leave the function out.
        let matches = |bdf: &str| {
            let short = bdf.split_once(':').map_or(bdf, |(_, rest)| rest);
            let trimmed = wanted.trim_start_matches('0').trim_start_matches(':');
            [bdf, short].iter().any(|b| *b == wanted || b.strip_suffix(".0") == Some(wanted.as_str()))
                || trimmed == short.trim_start_matches('0')
        };
        let found = driver.devices().iter().position(|d| matches(&d.gpu.bdf())).ok_or(Code::INVALID_DEVICE)?;
        device.put(i32::try_from(found).unwrap_or(0))
    }

    Init fn cuDeviceCanAccessPeer(result: Out<i32>, device: i32, peer: i32) {
        let (from, to) = (driver.device(device)?, driver.device(peer)?);
        let linked = from.gpu.index != to.gpu.index && from.mig.is_none() && to.mig.is_none();
        result.put(i32::from(linked && from.gpu.board.key == to.gpu.board.key))
    }

    Init fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: i32, source: i32, target: i32) {
        let (from, to) = (driver.device(source)?, driver.device(target)?);
        if from.gpu.index == to.gpu.index {
            return Err(Code::INVALID_DEVICE);
        }
        let linked = from.gpu.board.key == to.gpu.board.key && from.mig.is_none() && to.mig.is_none();
        match attribute {
            // Performance rank is best at 0; access, native atomics and array access follow from the link.
            1 => value.put(0),
            2 | 4 => value.put(i32::from(linked)),
            3 => value.put(i32::from(linked && from.gpu.board.nvlinks > 0)),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    Init fn cuDeviceGetTexture1DLinearMaxWidth(elements: Out<u64>, format: u32, channels: u32, device: i32) {
        driver.device(device)?;
        let shape = crate::types::Array3dDescriptor { width: 1, format, channels, ..Default::default() };
        elements.put((1 << 31) / crate::shape::element_bytes(&shape)?.max(1))
    }

    Init fn cuDeviceGetExecAffinitySupport(value: Out<i32>, kind: i32, device: i32) {
        driver.device(device)?;
        // SM affinity needs an MPS server.
        if kind == 0 { value.put(0) } else { Err(Code::INVALID_VALUE) }
    }

    Init fn cuFlushGPUDirectRDMAWrites(target: i32, scope: i32) {
        driver.lock().current().map(|_| ())
    }
}
