//! Clocks, power, temperature, links to the host, ECC: plausible figures that follow from the board.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use aliquot_sim_node::now_ns;
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{Handle, Out};
use crate::call::{Code, Done, Session, export};

/// An idle board draws this part of its limit.
const IDLE_POWER_DIVISOR: u32 = 8;
const FIELD_ECC_CURRENT: u32 = 1;
const FIELD_ECC_PENDING: u32 = 2;
const FIELD_ECC_CORRECTED: u32 = 3;
const FIELD_ECC_UNCORRECTED: u32 = 4;
const FIELD_NVLINK_COUNT: u32 = 91;

export! {
    fn nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, clock: Out<c_uint>) |session| {
        clock.put(clock_of(session, device, kind)?)
    }

    fn nvmlDeviceGetMaxClockInfo(device: Handle, kind: c_uint, clock: Out<c_uint>) |session| {
        clock.put(clock_of(session, device, kind)?)
    }

    fn nvmlDeviceGetApplicationsClock(device: Handle, kind: c_uint, clock: Out<c_uint>) |session| {
        clock.put(clock_of(session, device, kind)?)
    }

    fn nvmlDeviceGetPerformanceState(device: Handle, state: Out<c_uint>) |session| {
        session.gpu(device)?;
        state.put(0)
    }

    fn nvmlDeviceGetCurrentClocksEventReasons(device: Handle, reasons: Out<c_ulonglong>) |session| {
        session.gpu(device)?;
        reasons.put(0)
    }

    fn nvmlDeviceGetPowerManagementMode(device: Handle, mode: Out<c_uint>) |session| {
        session.gpu(device)?;
        mode.put(1)
    }

    fn nvmlDeviceGetPowerManagementLimit(device: Handle, limit: Out<c_uint>) |session| {
        limit.put(session.gpu(device)?.board.power_limit_mw)
    }

    fn nvmlDeviceGetPowerManagementDefaultLimit(device: Handle, limit: Out<c_uint>) |session| {
        limit.put(session.gpu(device)?.board.power_limit_mw)
    }

    fn nvmlDeviceGetEnforcedPowerLimit(device: Handle, limit: Out<c_uint>) |session| {
        limit.put(session.gpu(device)?.board.power_limit_mw)
    }

    fn nvmlDeviceGetPowerManagementLimitConstraints(
        device: Handle, least: Out<c_uint>, most: Out<c_uint>,
    ) |session| {
        let limit = session.gpu(device)?.board.power_limit_mw;
        least.put(limit / 3)?;
        most.put(limit)
    }

    fn nvmlDeviceGetPowerUsage(device: Handle, power: Out<c_uint>) |session| {
        let gpu = session.gpu(device)?;
        let limit = gpu.board.power_limit_mw;
        let idle = limit / IDLE_POWER_DIVISOR;
        power.put(idle + (limit - idle) / 100 * session.node.utilization(gpu.index)?.gpu)
    }

    fn nvmlDeviceGetTotalEnergyConsumption(device: Handle, energy: Out<c_ulonglong>) |session| {
        let gpu = session.gpu(device)?;
        // As if it had idled since the machine started; only ever grows.
        let idle = u64::from(gpu.board.power_limit_mw / IDLE_POWER_DIVISOR);
        energy.put(now_ns() / 1_000_000_000 * idle)
    }

    fn nvmlDeviceGetTemperature(device: Handle, sensor: c_uint, degrees: Out<c_uint>) |session| {
        let gpu = session.gpu(device)?;
        if sensor != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        degrees.put(30 + session.node.utilization(gpu.index)?.gpu / 2)
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration(device: Handle, generation: Out<c_uint>) |session| {
        generation.put(session.gpu(device)?.board.pcie.0)
    }

    fn nvmlDeviceGetCurrPcieLinkGeneration(device: Handle, generation: Out<c_uint>) |session| {
        generation.put(session.gpu(device)?.board.pcie.0)
    }

    fn nvmlDeviceGetMaxPcieLinkWidth(device: Handle, width: Out<c_uint>) |session| {
        width.put(session.gpu(device)?.board.pcie.1)
    }

    fn nvmlDeviceGetCurrPcieLinkWidth(device: Handle, width: Out<c_uint>) |session| {
        width.put(session.gpu(device)?.board.pcie.1)
    }

    fn nvmlDeviceGetMemoryBusWidth(device: Handle, width: Out<c_uint>) |session| {
        width.put(session.gpu(device)?.board.memory_bus_width)
    }

    fn nvmlDeviceGetBusType(device: Handle, kind: Out<c_uint>) |session| {
        session.gpu(device)?;
        kind.put(sys::NVML_BUS_TYPE_PCIE)
    }

    fn nvmlDeviceGetBoardId(device: Handle, id: Out<c_uint>) |session| {
        id.put(session.gpu(device)?.bus << 8)
    }

    fn nvmlDeviceGetMultiGpuBoard(device: Handle, multi: Out<c_uint>) |session| {
        session.gpu(device)?;
        multi.put(0)
    }

    fn nvmlDeviceGetVbiosVersion(device: Handle, version: Out<c_char>, length: c_uint) |session| {
        session.gpu(device)?;
        version.put_text("00.00.00.00.00", length)
    }

    fn nvmlDeviceGetVirtualizationMode(device: Handle, mode: Out<c_uint>) |session| {
        session.gpu(device)?;
        mode.put(0)
    }

    fn nvmlDeviceGetDisplayMode(device: Handle, mode: Out<c_uint>) |session| {
        session.gpu(device)?;
        mode.put(0)
    }

    fn nvmlDeviceGetDisplayActive(device: Handle, active: Out<c_uint>) |session| {
        session.gpu(device)?;
        active.put(0)
    }

    fn nvmlDeviceGetEccMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) |session| {
        session.gpu(device)?;
        current.put(1)?;
        pending.put(1)
    }

    fn nvmlDeviceGetTotalEccErrors(
        device: Handle, kind: c_uint, _counter: c_uint, count: Out<c_ulonglong>,
    ) |session| {
        let settings = session.node.settings(session.gpu(device)?.index)?;
        match kind {
            0 => count.put(settings.ecc_corrected),
            1 => count.put(settings.ecc_uncorrected),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetRetiredPagesPendingStatus(device: Handle, pending: Out<c_uint>) |session| {
        session.gpu(device)?;
        pending.put(0)
    }

    fn nvmlDeviceGetRemappedRows(
        device: Handle,
        corrected: Out<c_uint>,
        uncorrected: Out<c_uint>,
        pending: Out<c_uint>,
        failed: Out<c_uint>,
    ) |session| {
        session.gpu(device)?;
        for value in [corrected, uncorrected, pending, failed] {
            value.put(0)?;
        }
        Ok(())
    }

    fn nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: Out<sys::nvmlFieldValue_t>) |session| {
        let count = usize::try_from(count).map_err(|_| Code::INVALID_ARGUMENT)?;
        for index in 0..count {
            fill_field(session, device, values.at(index))?;
        }
        Ok(())
    }
}

/// Clocks by NVML's kinds: 0 graphics, 1 multiprocessors, 2 memory, 3 video.
fn clock_of(session: &Session, device: Handle, kind: c_uint) -> Result<c_uint, Code> {
    let board = session.gpu(device)?.board;
    match kind {
        0 | 1 => Ok(board.sm_clock_mhz),
        2 => Ok(board.memory_clock_mhz),
        3 => Ok(board.sm_clock_mhz / 10 * 9),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

/// A field that is not known fails by itself, not the whole call.
fn fill_field(session: &Session, device: Handle, place: Out<sys::nvmlFieldValue_t>) -> Done {
    let gpu = session.gpu(device)?;
    let settings = session.node.settings(gpu.index)?;
    let mut value = place.get()?;
    let found = match value.fieldId {
        FIELD_ECC_CURRENT | FIELD_ECC_PENDING => Some(1),
        FIELD_ECC_CORRECTED => Some(settings.ecc_corrected),
        FIELD_ECC_UNCORRECTED => Some(settings.ecc_uncorrected),
        FIELD_NVLINK_COUNT => Some(gpu.board.nvlinks.into()),
        _ => None,
    };
    value.timestamp = i64::try_from(now_ns() / 1000).unwrap_or(i64::MAX);
    value.latencyUsec = 0;
    match found {
        Some(number) => {
            value.nvmlReturn = sys::nvmlReturn_enum_NVML_SUCCESS;
            value.valueType = sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
            value.value = sys::nvmlValue_t { ullVal: number };
        }
        None => value.nvmlReturn = Code::NOT_SUPPORTED.0,
    }
    place.put(value)
}
