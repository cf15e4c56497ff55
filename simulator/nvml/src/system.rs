//! Initialisation, and what is true for the whole node.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings as sys;

use crate::abi::{Handle, Out, Thing};
use crate::call::{Code, export, init, shutdown};

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> sys::nvmlReturn_t {
    init("nvmlInit")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> sys::nvmlReturn_t {
    init("nvmlInit_v2")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> sys::nvmlReturn_t {
    init("nvmlInitWithFlags")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> sys::nvmlReturn_t {
    shutdown()
}

/// Works before `nvmlInit`, as in the real library.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: sys::nvmlReturn_t) -> *const c_char {
    let text = match result {
        sys::nvmlReturn_enum_NVML_SUCCESS => c"Success",
        sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED => c"Uninitialized",
        sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => c"Invalid Argument",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => c"Not Supported",
        sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => c"Insufficient Permissions",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => c"Not Found",
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE => c"Insufficient Size",
        sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => c"Driver Not Loaded",
        sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => c"Timeout",
        sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => c"GPU is lost",
        sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => c"GPU requires reset",
        sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => c"Driver/library version mismatch",
        sys::nvmlReturn_enum_NVML_ERROR_IN_USE => c"In use by another client",
        sys::nvmlReturn_enum_NVML_ERROR_MEMORY => c"Insufficient Memory",
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES => c"Insufficient Resources",
        sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH => c"Argument Version Mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

export! {
    fn nvmlSystemGetDriverVersion(version: Out<c_char>, length: c_uint) |session| {
        version.put_text(&session.node.spec().driver_version, length)
    }

    fn nvmlSystemGetNVMLVersion(version: Out<c_char>, length: c_uint) |session| {
        let spec = session.node.spec();
        version.put_text(&format!("{}.{}", spec.cuda_version / 1000, spec.driver_version), length)
    }

    fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) |session| {
        version.put(session.node.spec().cuda_version)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) |session| {
        version.put(session.node.spec().cuda_version)
    }

    fn nvmlSystemGetProcessName(pid: c_uint, name: Out<c_char>, length: c_uint) |session| {
        for gpu in session.node.gpus() {
            for process in session.node.processes(gpu.index)? {
                let pids = [process.visible_pid, process.host_pid, Some(process.own_pid)];
                if pids.iter().flatten().any(|&p| c_uint::try_from(p) == Ok(pid)) {
                    return name.put_text(&process.name, length);
                }
            }
        }
        Err(Code::NOT_FOUND)
    }

    fn nvmlDeviceGetCount(count: Out<c_uint>) |session| {
        count.put(session.gpus().count() as c_uint)
    }

    fn nvmlDeviceGetCount_v2(count: Out<c_uint>) |session| {
        count.put(session.gpus().count() as c_uint)
    }

    fn nvmlDeviceGetHandleByIndex(index: c_uint, device: Out<Handle>) |session| {
        let gpu = session.gpus().nth(index as usize).ok_or(Code::INVALID_ARGUMENT)?;
        device.put(Thing::Gpu { index: gpu.index }.into())
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<Handle>) |session| {
        let gpu = session.gpus().nth(index as usize).ok_or(Code::INVALID_ARGUMENT)?;
        device.put(Thing::Gpu { index: gpu.index }.into())
    }

    fn nvmlDeviceGetHandleBySerial(serial: Out<c_char>, device: Out<Handle>) |session| {
        let serial = serial.text()?;
        let gpu = session.gpus().find(|g| g.serial == serial).ok_or(Code::NOT_FOUND)?;
        device.put(Thing::Gpu { index: gpu.index }.into())
    }

    fn nvmlDeviceGetHandleByUUID(uuid: Out<c_char>, device: Out<Handle>) |session| {
        let uuid = uuid.text()?;
        if let Some(gpu) = session.gpus().find(|g| g.uuid == uuid) {
            return device.put(Thing::Gpu { index: gpu.index }.into());
        }
        for gpu in session.gpus() {
            if let Some(mig) = session.mig_devices(gpu.index)?.into_iter().find(|d| d.uuid == uuid) {
                let (gi, ci, serial) = (mig.gi.id, mig.ci.id, mig.gi.serial);
                return device.put(Thing::MigDevice { gpu: gpu.index, gi, ci, serial }.into());
            }
        }
        Err(Code::NOT_FOUND)
    }

    fn nvmlDeviceGetHandleByPciBusId(bus_id: Out<c_char>, device: Out<Handle>) |session| {
        by_bus_id(session, bus_id, device)
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: Out<c_char>, device: Out<Handle>) |session| {
        by_bus_id(session, bus_id, device)
    }

    fn nvmlGetExcludedDeviceCount(count: Out<c_uint>) |_session| {
        count.put(0)
    }
}

fn by_bus_id(session: &crate::call::Session, bus_id: Out<c_char>, device: Out<Handle>) -> crate::call::Done {
    // Both lengths of the domain are accepted, and its absence.
    let wanted = bus_id.text()?.to_ascii_lowercase();
    let gpu = session
        .gpus()
        .find(|g| {
            let long = g.nvml_bus_id().to_ascii_lowercase();
            let (short, bare) = (g.bdf(), g.bdf().replacen("0000:", "", 1));
            [long, short, bare].contains(&wanted)
        })
        .ok_or(Code::NOT_FOUND)?;
    device.put(Thing::Gpu { index: gpu.index }.into())
}
