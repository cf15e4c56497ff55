//! Memory of other processes.

use crate::codes::Code;
use crate::entry::api;
use crate::ffi::Out;
use crate::ipc;
use crate::types::Bytes;

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

    Init fn cuIpcCloseMemHandle(pointer: u64) {
        ipc::close(driver, &mut driver.lock(), pointer)
    }
}
