//! Memory that one process exports and another imports.

use super::driver::at;
use super::memory::Held;
use super::{Probe, size};
use std::ffi::c_void;
use std::os::fd::AsRawFd;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn of_hex(text: &str) -> [u8; 64] {
    std::array::from_fn(|i| u8::from_str_radix(&text[i * 2..i * 2 + 2], 16).unwrap())
}

fn open(path: &str) -> std::fs::File {
    std::fs::File::options().read(true).write(true).open(path).unwrap()
}

impl Probe {
    pub fn sharing(&mut self, verb: &[&str]) -> Option<String> {
        Some(match *verb {
            // Lets another process open what was allocated last.
            ["ipcexport"] => {
                let Some(Held::Plain(address)) = self.held.last() else { panic!("nothing to export") };
                let mut handle = [0_u8; 64];
                self.driver.ok("cuIpcGetMemHandle", &[at(&mut handle), *address]);
                hex(&handle)
            }
            ["ipcopen", handle] => self.open_ipc(of_hex(handle)).to_string(),
            ["ipcclose"] => self.driver.call("cuIpcCloseMemHandle", &[self.opened]).to_string(),
            // Makes physical memory that another process can open by a path.
            ["fdexport", bytes] => {
                let mut properties = [0_u32; 8];
                (properties[0], properties[1], properties[2]) = (1, 1, 1);
                let (mut handle, mut fd) = (0_u64, 0_i32);
                let properties = properties.as_ptr() as u64;
                self.driver.ok("cuMemCreate", &[at(&mut handle), size(bytes), properties, 0]);
                self.driver.ok("cuMemExportToShareableHandle", &[at(&mut fd), handle, 1, 0]);
                self.held.push(Held::Handle(handle));
                format!("/proc/{}/fd/{fd}", std::process::id())
            }
            ["fdimport", path, bytes] => self.import_physical(path, size(bytes)).to_string(),
            ["poolexport", bytes] => self.export_from_pool(size(bytes)),
            ["poolimport", path, data] => self.import_from_pool(path, of_hex(data)).to_string(),
            _ => return None,
        })
    }

    fn open_ipc(&mut self, handle: [u8; 64]) -> i32 {
        #[repr(C)]
        struct Handle([u8; 64]);
        type Open = unsafe extern "C" fn(*mut u64, Handle, u32) -> i32;
        // SAFETY: cuIpcOpenMemHandle's type and arguments.
        unsafe {
            let open = std::mem::transmute::<*mut c_void, Open>(self.driver.find("cuIpcOpenMemHandle_v2"));
            open(&mut self.opened, Handle(handle), 1)
        }
    }

    fn import_physical(&mut self, path: &str, bytes: u64) -> i32 {
        let file = open(path);
        let (mut handle, mut address) = (0_u64, 0_u64);
        let fd = file.as_raw_fd() as u64;
        self.driver.ok("cuMemImportFromShareableHandle", &[at(&mut handle), fd, 1]);
        self.driver.ok("cuMemAddressReserve", &[at(&mut address), bytes, 0, 0, 0]);
        let code = self.driver.call("cuMemMap", &[address, bytes, 0, handle, 0]);
        self.driver.ok("cuMemRelease", &[handle]);
        self.held.push(Held::Mapped { address, bytes });
        code
    }

    /// Makes memory of a pool that another process can open by the path of the pool and a handle.
    fn export_from_pool(&mut self, bytes: u64) -> String {
        let mut properties = [0_u32; 22];
        (properties[0], properties[1], properties[2]) = (1, 1, 1);
        let (mut pool, mut fd, mut address, mut data) = (0_u64, 0_i32, 0_u64, [0_u8; 64]);
        let driver = &self.driver;
        driver.ok("cuMemPoolCreate", &[at(&mut pool), properties.as_ptr() as u64]);
        driver.ok("cuMemAllocFromPoolAsync", &[at(&mut address), bytes, pool, 0]);
        driver.ok("cuStreamSynchronize", &[0]);
        driver.ok("cuMemPoolExportToShareableHandle", &[at(&mut fd), pool, 1, 0]);
        driver.ok("cuMemPoolExportPointer", &[at(&mut data), address]);
        self.held.push(Held::Async(address));
        format!("/proc/{}/fd/{fd}:{}", std::process::id(), hex(&data))
    }

    fn import_from_pool(&mut self, path: &str, data: [u8; 64]) -> i32 {
        let file = open(path);
        let (mut pool, mut address) = (0_u64, 0_u64);
        let fd = file.as_raw_fd() as u64;
        self.driver.ok("cuMemPoolImportFromShareableHandle", &[at(&mut pool), fd, 1, 0]);
        let code =
            self.driver.call("cuMemPoolImportPointer", &[at(&mut address), pool, data.as_ptr() as u64]);
        self.held.push(Held::Plain(address));
        code
    }
}
