//! Initialisation, version, errors and the resolver.

use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::entry::api;
use crate::ffi::{Out, Text};
use crate::resolver::{Status, resolve};

fn address_of(driver: &Driver, symbol: Text, version: i32, flags: u64) -> Cu<(u64, Status)> {
    Ok(match resolve(symbol.get()?, version, flags, driver.cuda_version())? {
        Ok(found) => {
            let entry = if driver.config.resolver_aliases { found.alias } else { found.export };
            (entry.0 as usize as u64, Status::Success)
        }
        Err(status) => (0, status),
    })
}

api! { (driver, flavour)
    Node fn cuInit(flags: u32) {
        driver.initialise(flags)
    }

    Node fn cuDriverGetVersion(version: Out<i32>) {
        version.put(driver.cuda_version())
    }

    Init fn cuProfilerStart() {
        driver.lock().current().map(|_| ())
    }

    Init fn cuProfilerStop() {
        driver.lock().current().map(|_| ())
    }

    Nothing fn cuGetErrorName(error: i32, text: Out<u64>) {
        text.put(Code::describe(error).map_or(0, |(name, _)| name.as_ptr() as u64))?;
        Code::describe(error).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    Nothing fn cuGetErrorString(error: i32, text: Out<u64>) {
        text.put(Code::describe(error).map_or(0, |(_, text)| text.as_ptr() as u64))?;
        Code::describe(error).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    Node fn cuGetProcAddress(symbol: Text, function: Out<u64>, version: i32, flags: u64) {
        function.check()?;
        let (address, status) = address_of(driver, symbol, version, flags)?;
        function.put(address)?;
        // Without a place to say what was wrong, it is an error.
        if status == Status::Success { Ok(()) } else { Err(Code::NOT_FOUND) }
    }

    Node fn cuGetProcAddress_v2(symbol: Text, function: Out<u64>, version: i32, flags: u64, status: Out<i32>) {
        function.check()?;
        let (address, found) = address_of(driver, symbol, version, flags)?;
        function.put(address)?;
        status.offer(found as i32);
        // What is not there is a null address, not an error.
        Ok(())
    }
}
