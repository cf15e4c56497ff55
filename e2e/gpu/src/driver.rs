//! NVIDIA's two libraries, called by name with words as arguments, as CUDA programs load them.
#![allow(unsafe_code, reason = "calls C libraries")]

use aliquot_kubelet_plugin::driver::find_library;
use anyhow::{Result, bail};
use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;

/// Words of the longest call.
const WORDS: usize = 12;
type Call = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> i32;

/// A library that is loaded.
pub(crate) struct Library {
    name: String,
    handle: *mut c_void,
}

/// A function of one, found once.
#[derive(Clone, Copy)]
pub(crate) struct Function(Call);

/// The address of a place that a call writes to or reads from.
pub(crate) fn at<T: ?Sized>(place: &mut T) -> u64 {
    std::ptr::from_mut(place).cast::<u8>() as u64
}

impl Library {
    /// `libcuda.so.1`, where programs find it.
    pub(crate) fn cuda() -> Result<Self> {
        Self::open(Path::new("libcuda.so.1"))
    }

    /// `libnvidia-ml.so.1`, initialised: that of a driver's root, or where there is none the one that programs find.
    pub(crate) fn nvml(root: Option<&Path>) -> Result<Self> {
        const NAME: &str = "libnvidia-ml.so.1";
        let of_root = root.and_then(|root| find_library(root, NAME));
        let nvml = Self::open(of_root.as_deref().unwrap_or_else(|| Path::new(NAME)))?;
        nvml.must("nvmlInit_v2", &[])?;
        Ok(nvml)
    }

    fn open(path: &Path) -> Result<Self> {
        let (name, text) = (path.display().to_string(), CString::new(path.as_os_str().as_bytes())?);
        // SAFETY: a terminated name; loading the driver runs its constructors, as in every CUDA program.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            bail!("{name} cannot be loaded: is an NVIDIA driver installed?");
        }
        Ok(Self { name, handle })
    }

    /// Address of a symbol; null if there is none.
    pub(crate) fn address(&self, symbol: &str) -> *mut c_void {
        let Ok(symbol) = CString::new(symbol) else { return std::ptr::null_mut() };
        // SAFETY: a handle of dlopen and a terminated name.
        unsafe { libc::dlsym(self.handle, symbol.as_ptr()) }
    }

    /// A function.
    pub(crate) fn function(&self, symbol: &str) -> Result<Function> {
        let found = self.address(symbol);
        if found.is_null() {
            bail!("{} has no {symbol}", self.name);
        }
        // SAFETY: a function that takes words or nothing; more words than it takes are ignored by the C calling
        // conventions of x86-64 and aarch64.
        Ok(Function(unsafe { std::mem::transmute::<*mut c_void, Call>(found) }))
    }

    /// Calls a function; its code.
    pub(crate) fn call(&self, symbol: &str, words: &[u64]) -> Result<i32> {
        Ok(self.function(symbol)?.call(words))
    }

    /// Calls a function that has to succeed.
    pub(crate) fn must(&self, symbol: &str, words: &[u64]) -> Result<()> {
        match self.call(symbol, words)? {
            0 => Ok(()),
            code => bail!("{symbol} failed with {code}"),
        }
    }
}

impl Function {
    /// Calls it with at most twelve words.
    pub(crate) fn call(self, words: &[u64]) -> i32 {
        let mut w = [0_u64; WORDS];
        for (to, from) in w.iter_mut().zip(words) {
            *to = *from;
        }
        let [a, b, c, d, e, f, g, h, i, j, k, l] = w;
        // SAFETY: the words are those of the function that the caller named.
        unsafe { (self.0)(a, b, c, d, e, f, g, h, i, j, k, l) }
    }
}

/// Nanoseconds of the monotonic clock, which all processes have in common.
pub(crate) fn now_ns() -> u64 {
    aliquot_arbiter::files::now_ns().unwrap_or(0)
}

/// Sends SIGKILL.
pub(crate) fn kill(pid: u32) {
    if let Ok(pid) = i32::try_from(pid) {
        // SAFETY: sends a signal to a process that this program started.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

/// What NVML says of a GPU. Only reads.
pub(crate) struct Board {
    pub(crate) nvml: Rc<Library>,
    pub(crate) device: u64,
}

/// NVML's code for what a board does not have.
pub(crate) const NOT_SUPPORTED: i32 = 3;

impl Board {
    /// All GPUs of a driver's root.
    pub(crate) fn all(root: &Path) -> Result<Vec<Self>> {
        let nvml = Rc::new(Library::nvml(Some(root))?);
        let mut count = 0_u32;
        nvml.must("nvmlDeviceGetCount_v2", &[at(&mut count)])?;
        let one = |index: u32| {
            let mut device = 0_u64;
            nvml.must("nvmlDeviceGetHandleByIndex_v2", &[index.into(), at(&mut device)])?;
            Ok(Self { nvml: Rc::clone(&nvml), device })
        };
        (0..count).map(one).collect()
    }

    /// The GPU of a UUID, as a CUDA program finds it.
    pub(crate) fn of_uuid(uuid: &str) -> Result<Self> {
        let nvml = Rc::new(Library::nvml(None)?);
        let (text, mut device) = (CString::new(uuid)?, 0_u64);
        nvml.must("nvmlDeviceGetHandleByUUID", &[text.as_ptr() as u64, at(&mut device)])?;
        Ok(Self { nvml, device })
    }

    /// Why this GPU is not for the cases, which fill its memory and keep it busy.
    pub(crate) fn why_not(&self) -> Option<String> {
        let [mut mig, mut pending, mut mode] = [0_u32; 3];
        let nvml = &self.nvml;
        let code = nvml.call("nvmlDeviceGetMigMode", &[self.device, at(&mut mig), at(&mut pending)]);
        let mig = match code.unwrap_or(NOT_SUPPORTED) {
            0 => Ok(mig),
            NOT_SUPPORTED => Ok(0),
            code => Err(code),
        };
        let compute = nvml.must("nvmlDeviceGetComputeMode", &[self.device, at(&mut mode)]);
        why_not(mig, compute.map(|()| mode), self.processes().map(|all| all.len()))
    }

    fn text(&self, symbol: &str, of_device: bool) -> String {
        let mut text = [0_u8; 96];
        let (place, room) = (text.as_mut_ptr() as u64, text.len() as u64);
        let words = if of_device { vec![self.device, place, room] } else { vec![place, room] };
        let code = self.nvml.call(symbol, &words).unwrap_or(-1);
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        let said = String::from_utf8_lossy(text.get(..end).unwrap_or_default()).into_owned();
        if code == 0 { said } else { format!("unknown ({symbol}: {code})") }
    }

    /// UUID.
    pub(crate) fn uuid(&self) -> String {
        self.text("nvmlDeviceGetUUID", true)
    }

    /// Product.
    pub(crate) fn name(&self) -> String {
        self.text("nvmlDeviceGetName", true)
    }

    /// Version of the driver.
    pub(crate) fn driver(&self) -> String {
        self.text("nvmlSystemGetDriverVersion", false)
    }

    /// Total and used bytes.
    pub(crate) fn memory(&self) -> Result<(u64, u64)> {
        // total, free, used
        let mut info = [0_u64; 3];
        self.nvml.must("nvmlDeviceGetMemoryInfo", &[self.device, at(&mut info)])?;
        let [total, _, used] = info;
        Ok((total, used))
    }

    /// Processes with contexts, and the bytes of each; `None` where they are not counted.
    pub(crate) fn processes(&self) -> Result<Vec<(u32, Option<u64>)>> {
        // pid, bytes, and the ids of instances
        let (mut count, mut rows) = (64_u32, [[0_u64; 3]; 64]);
        let symbol = "nvmlDeviceGetComputeRunningProcesses_v3";
        self.nvml.must(symbol, &[self.device, at(&mut count), at(&mut rows)])?;
        let rows = rows.iter().take(count as usize);
        Ok(rows.map(|[pid, bytes, _]| (*pid as u32, Some(*bytes).filter(|b| *b != u64::MAX))).collect())
    }
}

/// Why a GPU is not for the cases, by its MIG mode or NVML's code instead of it, its compute mode, and how many
/// processes use it. Pure.
fn why_not(mig: Result<u32, i32>, compute: Result<u32>, processes: Result<usize>) -> Option<String> {
    match (mig, compute, processes) {
        (Err(code), _, _) => Some(format!("NVML does not tell its MIG mode ({code})")),
        (Ok(1..), _, _) => Some("its MIG mode is on".to_owned()),
        (_, Err(error), _) => Some(format!("NVML does not tell its compute mode ({error:#})")),
        (_, Ok(1..), _) => Some("its compute mode does not let several programs in".to_owned()),
        (_, _, Err(error)) => Some(format!("{error:#}")),
        (_, _, Ok(0)) => None,
        (_, _, Ok(count)) => Some(format!("processes that use it: {count}")),
    }
}

/// Calls `cuIpcOpenMemHandle_v2`, which takes its handle by value; its code.
pub(crate) fn open_handle(open: *mut c_void, address: &mut u64, handle: &[u64]) -> i32 {
    #[repr(C)]
    struct Handle([u64; 8]);
    type Open = unsafe extern "C" fn(*mut u64, Handle, u32) -> i32;
    let mut by_value = Handle([0; 8]);
    for (to, from) in by_value.0.iter_mut().zip(handle) {
        *to = *from;
    }
    // SAFETY: the function of that name; flag 1 asks for peer access where it is needed, as its header wants.
    unsafe { std::mem::transmute::<*mut c_void, Open>(open)(address, by_value, 1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn a_gpu_of_which_nvml_does_not_tell_all_is_not_for_the_cases() {
        let failed = || anyhow!("nvmlX failed with 999");
        for (found, reason) in [
            (why_not(Ok(0), Ok(0), Ok(0)), None),
            (why_not(Err(999), Ok(0), Ok(0)), Some("NVML does not tell its MIG mode (999)")),
            (why_not(Ok(1), Ok(0), Ok(0)), Some("its MIG mode is on")),
            (
                why_not(Ok(0), Err(failed()), Ok(0)),
                Some("NVML does not tell its compute mode (nvmlX failed with 999)"),
            ),
            (why_not(Ok(0), Ok(3), Ok(0)), Some("its compute mode does not let several programs in")),
            (why_not(Ok(0), Ok(0), Err(failed())), Some("nvmlX failed with 999")),
            (why_not(Ok(0), Ok(0), Ok(2)), Some("processes that use it: 2")),
        ] {
            assert_eq!(found.as_deref(), reason);
        }
    }
}
