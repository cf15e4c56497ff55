//! The few driver entry points that the probe calls, loaded as CUDA programs load them.
#![allow(unsafe_code, reason = "calls a C library")]

use crate::table::Table;
use libloading::os::unix::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;

type Call<A> = unsafe extern "C" fn(A) -> c_int;
type Call2<A, B> = unsafe extern "C" fn(A, B) -> c_int;
type Call3<A, B, C> = unsafe extern "C" fn(A, B, C) -> c_int;

/// `cuLaunchKernel`
type Launch = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

/// A kernel that keeps a multiprocessor for a millisecond of the GPU's clock.
const SPIN: &CStr = c"
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin_us_1000()
{
  .reg .u64 %t<4>;
  .reg .pred %p;
  mov.u64 %t1, %globaltimer;
again:
  mov.u64 %t2, %globaltimer;
  sub.u64 %t3, %t2, %t1;
  setp.lt.u64 %p, %t3, 1000000;
  @%p bra again;
  ret;
}
";

/// The driver, initialised.
pub(crate) struct Cuda {
    device_get_count: Call<*mut c_int>,
    device_get: Call2<*mut c_int, c_int>,
    device_get_name: Call3<*mut c_char, c_int, c_int>,
    device_get_uuid: Call2<*mut [u8; 16], c_int>,
    device_total_mem: Call2<*mut usize, c_int>,
    primary_ctx_retain: Call2<*mut *mut c_void, c_int>,
    ctx_set_current: Call<*mut c_void>,
    mem_get_info: Call2<*mut usize, *mut usize>,
    mem_alloc: Call2<*mut u64, usize>,
    mem_alloc_managed: Call3<*mut u64, usize, c_uint>,
    mem_free: Call<u64>,
    module_load_data: Call2<*mut *mut c_void, *const c_char>,
    module_get_function: Call3<*mut *mut c_void, *mut c_void, *const c_char>,
    launch_kernel: Launch,
    ctx_synchronize: unsafe extern "C" fn() -> c_int,
    /// Last, so that it outlives the pointers above.
    _library: Library,
}

/// Why CUDA said no.
#[derive(Debug)]
pub(crate) enum CudaError {
    /// The driver library or a symbol of it is absent.
    Load(libloading::Error),
    /// A call failed.
    Call(&'static str, c_int),
    /// The loaded library's table of symbols does not read.
    Table(String),
}

impl CudaError {
    /// The `CUresult`, −1 if there was no call.
    pub(crate) fn code(&self) -> c_int {
        match self {
            Self::Load(_) | Self::Table(_) => -1,
            Self::Call(_, code) => *code,
        }
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(error) => write!(f, "cannot load the CUDA driver: {error}"),
            Self::Table(what) => write!(f, "cannot read the CUDA driver's symbols: {what}"),
            Self::Call(name, code) => write!(f, "{name} failed with CUDA error {code}"),
        }
    }
}

fn check(name: &'static str, code: c_int) -> Result<(), CudaError> {
    if code == 0 { Ok(()) } else { Err(CudaError::Call(name, code)) }
}

impl Cuda {
    /// Loads `libcuda.so.1` and calls `cuInit`; `direct` takes the functions from the library's own table of
    /// symbols, past every library that stands between it and programs.
    pub(crate) fn load(direct: bool) -> Result<Self, CudaError> {
        // SAFETY: loading the driver runs its constructors, which every CUDA program does.
        let library = unsafe { Library::open(Some("libcuda.so.1"), 2) }.map_err(CudaError::Load)?;
        let table = if direct { Some(Table::of_loaded("libcuda.so")?) } else { None };
        macro_rules! symbol {
            ($name:literal) => {
                match &table {
                    Some(table) => {
                        let address = table.address($name)?;
                        // SAFETY: the address of the function, with the signature that cuda.h gives this name.
                        unsafe { std::mem::transmute_copy(&address) }
                    }
                    None => {
                        // SAFETY: the name and the signature at its use below are those of cuda.h.
                        let found = unsafe { library.get(concat!($name, "\0").as_bytes()) };
                        *found.map_err(CudaError::Load)?
                    }
                }
            };
        }
        let init: Call<c_uint> = symbol!("cuInit");
        // SAFETY: cuInit takes flags, which must be 0.
        check("cuInit", unsafe { init(0) })?;
        Ok(Self {
            device_get_count: symbol!("cuDeviceGetCount"),
            device_get: symbol!("cuDeviceGet"),
            device_get_name: symbol!("cuDeviceGetName"),
            device_get_uuid: symbol!("cuDeviceGetUuid_v2"),
            device_total_mem: symbol!("cuDeviceTotalMem_v2"),
            primary_ctx_retain: symbol!("cuDevicePrimaryCtxRetain"),
            ctx_set_current: symbol!("cuCtxSetCurrent"),
            mem_get_info: symbol!("cuMemGetInfo_v2"),
            mem_alloc: symbol!("cuMemAlloc_v2"),
            mem_alloc_managed: symbol!("cuMemAllocManaged"),
            mem_free: symbol!("cuMemFree_v2"),
            module_load_data: symbol!("cuModuleLoadData"),
            module_get_function: symbol!("cuModuleGetFunction"),
            launch_kernel: symbol!("cuLaunchKernel"),
            ctx_synchronize: symbol!("cuCtxSynchronize"),
            _library: library,
        })
    }

    pub(crate) fn device_count(&self) -> Result<c_int, CudaError> {
        let mut count = 0;
        // SAFETY: writes one int.
        check("cuDeviceGetCount", unsafe { (self.device_get_count)(&mut count) })?;
        Ok(count)
    }

    pub(crate) fn device(&self, ordinal: c_int) -> Result<c_int, CudaError> {
        let mut device = 0;
        // SAFETY: writes one int.
        check("cuDeviceGet", unsafe { (self.device_get)(&mut device, ordinal) })?;
        Ok(device)
    }

    pub(crate) fn name(&self, device: c_int) -> Result<String, CudaError> {
        let mut name = [0u8; 128];
        // SAFETY: writes at most the given number of bytes, NUL included.
        check("cuDeviceGetName", unsafe { (self.device_get_name)(name.as_mut_ptr().cast(), 127, device) })?;
        Ok(name.iter().take_while(|c| **c != 0).map(|c| char::from(*c)).collect())
    }

    pub(crate) fn uuid(&self, device: c_int) -> Result<String, CudaError> {
        let mut uuid = [0u8; 16];
        // SAFETY: writes 16 bytes.
        check("cuDeviceGetUuid_v2", unsafe { (self.device_get_uuid)(&mut uuid, device) })?;
        let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
        let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
        Ok(format!("GPU-{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)))
    }

    pub(crate) fn total_memory(&self, device: c_int) -> Result<u64, CudaError> {
        let mut bytes = 0usize;
        // SAFETY: writes one size_t.
        check("cuDeviceTotalMem_v2", unsafe { (self.device_total_mem)(&mut bytes, device) })?;
        Ok(bytes as u64)
    }

    /// Makes the device's primary context current on this thread.
    pub(crate) fn make_current(&self, device: c_int) -> Result<(), CudaError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check("cuDevicePrimaryCtxRetain", unsafe { (self.primary_ctx_retain)(&mut context, device) })?;
        // SAFETY: the context was just given and is never released.
        check("cuCtxSetCurrent", unsafe { (self.ctx_set_current)(context) })
    }

    /// Free and total bytes of the current context's device.
    pub(crate) fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: writes two size_t.
        check("cuMemGetInfo_v2", unsafe { (self.mem_get_info)(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    pub(crate) fn allocate(&self, bytes: u64) -> Result<u64, CudaError> {
        let mut pointer = 0u64;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: writes one device pointer.
        check("cuMemAlloc_v2", unsafe { (self.mem_alloc)(&mut pointer, size) })?;
        Ok(pointer)
    }

    /// Memory that the driver moves between host and device.
    pub(crate) fn allocate_managed(&self, bytes: u64) -> Result<u64, CudaError> {
        /// `CU_MEM_ATTACH_GLOBAL`
        const GLOBAL: c_uint = 1;
        let mut pointer = 0u64;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: writes one pointer.
        check("cuMemAllocManaged", unsafe { (self.mem_alloc_managed)(&mut pointer, size, GLOBAL) })?;
        Ok(pointer)
    }

    pub(crate) fn free(&self, pointer: u64) -> Result<(), CudaError> {
        // SAFETY: the pointer came from cuMemAlloc or cuMemAllocManaged and is freed once.
        check("cuMemFree_v2", unsafe { (self.mem_free)(pointer) })
    }

    /// Loads the kernel that spins for a millisecond into the current context.
    pub(crate) fn spinner(&self) -> Result<Kernel, CudaError> {
        self.kernel(SPIN, c"spin_us_1000")
    }

    /// Runs code that takes so many bytes of device memory, as the simulated driver reads it.
    pub(crate) fn run_code(&self, bytes: u64) -> Result<(), CudaError> {
        let text = format!("aliquot-sim-module 1\nimage {bytes}\nkernel load us=5\n\0");
        let image = CStr::from_bytes_until_nul(text.as_bytes()).unwrap_or_default();
        self.launch(&self.kernel(image, c"load")?)?;
        self.wait()
    }

    fn kernel(&self, image: &CStr, name: &CStr) -> Result<Kernel, CudaError> {
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: writes one handle; the image is terminated text.
        check("cuModuleLoadData", unsafe { (self.module_load_data)(&mut module, image.as_ptr()) })?;
        // SAFETY: writes one handle; the module was just given.
        let code = unsafe { (self.module_get_function)(&mut function, module, name.as_ptr()) };
        check("cuModuleGetFunction", code)?;
        Ok(Kernel(function))
    }

    /// Launches a kernel of one block.
    pub(crate) fn launch(&self, kernel: &Kernel) -> Result<(), CudaError> {
        let none = std::ptr::null_mut();
        // SAFETY: a function of the current context that takes no parameters, on the default stream.
        let code = unsafe {
            (self.launch_kernel)(
                kernel.0,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                none,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", code)
    }

    /// Waits for everything that was launched.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: takes nothing.
        check("cuCtxSynchronize", unsafe { (self.ctx_synchronize)() })
    }
}

/// A function on the device.
pub(crate) struct Kernel(*mut c_void);

// SAFETY: a handle, which any thread may launch.
unsafe impl Sync for Kernel {}
