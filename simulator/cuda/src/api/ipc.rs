//! Memory of other processes.

use crate::codes::Code;
use crate::entry::api;
use crate::ffi::{In, Out};
use crate::ipc;
use crate::types::Bytes;
use crate::vmm;

api! { (driver, flavour)
    Init fn cuIpcGetMemHandle(handle: Out<Bytes<64>>, pointer: u64) {
        handle.check()?;
        let made = ipc::export(driver, &mut driver.lock(), pointer)?;
        handle.put(made)
    }

    Init fn cuIpcOpenMemHandle(pointer: Out<u64>, handle: Bytes<64>, flags: u32) {
        pointer.check()?;
        if flags & !1 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = driver.lock();
        let (context, _) = state.current()?;
        let base = ipc::open(driver, &mut state, context, &handle)?;
        pointer.put(base)
    }

    Init fn cuIpcOpenMemHandle_v2(pointer: Out<u64>, handle: Bytes<64>, flags: u32) {
        pointer.check()?;
        if flags & !1 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut state = driver.lock();
        let (context, _) = state.current()?;
        let base = ipc::open(driver, &mut state, context, &handle)?;
        pointer.put(base)
    }

    Init fn cuMemPoolExportToShareableHandle(result: Out<i32>, pool: u64, kind: i32, flags: u64) {
        result.check()?;
        if kind != vmm::POSIX_FD || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let fd = ipc::export_pool(driver, &driver.lock(), pool)?;
        result.put(fd)
    }

    Init fn cuMemPoolImportFromShareableHandle(pool: Out<u64>, os_handle: u64, kind: i32, flags: u64) {
        pool.check()?;
        if kind != vmm::POSIX_FD || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let fd = i32::try_from(os_handle).map_err(|_| Code::INVALID_VALUE)?;
        let made = ipc::import_pool(driver, &mut driver.lock(), fd)?;
        pool.put(made)
    }

    Init fn cuMemPoolExportPointer(data: Out<Bytes<64>>, pointer: u64) {
        data.check()?;
        let made = ipc::export_pointer(driver, &mut driver.lock(), pointer)?;
        data.put(made)
    }

    Init fn cuMemPoolImportPointer(pointer: Out<u64>, pool: u64, data: In<Bytes<64>>) {
        pointer.check()?;
        let made = ipc::import_pointer(driver, &mut driver.lock(), pool, &data.get()?)?;
        pointer.put(made)
    }

    Init fn cuIpcCloseMemHandle(pointer: u64) {
        ipc::close(driver, &mut driver.lock(), pointer)
    }
}
