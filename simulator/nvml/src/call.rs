//! What every exported function goes through, and what the process keeps between calls.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_uint;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use aliquot_sim_node::{Gpu, MigDevice, ModuleHold, Node, NodeError, Sight, library_version};
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{Handle, Thing};

/// An `nvmlReturn_t` other than success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Code(pub(crate) c_uint);

/// What a function body comes to.
pub(crate) type Done = Result<(), Code>;

impl Code {
    pub(crate) const UNINITIALIZED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    pub(crate) const INVALID_ARGUMENT: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    pub(crate) const NOT_SUPPORTED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    pub(crate) const NO_PERMISSION: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
    pub(crate) const NOT_FOUND: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    pub(crate) const INSUFFICIENT_SIZE: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    pub(crate) const DRIVER_NOT_LOADED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    pub(crate) const TIMEOUT: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    pub(crate) const GPU_IS_LOST: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
    pub(crate) const LIB_RM_VERSION_MISMATCH: Self =
        Self(sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH);
    pub(crate) const IN_USE: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_IN_USE);
    pub(crate) const MEMORY: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_MEMORY);
    pub(crate) const INSUFFICIENT_RESOURCES: Self =
        Self(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES);
    pub(crate) const ARGUMENT_VERSION_MISMATCH: Self =
        Self(sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pub(crate) const UNKNOWN: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN);
}

impl From<NodeError> for Code {
    fn from(error: NodeError) -> Self {
        match error {
            NodeError::InvalidArgument(_) => Self::INVALID_ARGUMENT,
            NodeError::NotFound(_) => Self::NOT_FOUND,
            NodeError::NotSupported(_) => Self::NOT_SUPPORTED,
            NodeError::InUse(_) => Self::IN_USE,
            NodeError::InsufficientResources(_) => Self::INSUFFICIENT_RESOURCES,
            NodeError::NoPermission(_) => Self::NO_PERMISSION,
            NodeError::OutOfMemory { .. } => Self::MEMORY,
            NodeError::Rebooted => Self::GPU_IS_LOST,
            NodeError::Spec(_)
            | NodeError::Io { .. }
            | NodeError::Layout { .. }
            | NodeError::Lock(_)
            | NodeError::Full(_) => Self::UNKNOWN,
        }
    }
}

/// What the process keeps while NVML is initialised.
pub(crate) struct Session {
    pub(crate) node: Node,
    pub(crate) sight: Sight,
    /// The load of the kernel module that it was opened on, and what keeps that loaded.
    load: u32,
    _hold: Option<ModuleHold>,
    /// The GPUs that the driver had when it was opened, by index, each held open.
    listed: BTreeMap<usize, Option<ModuleHold>>,
    /// The event sets.
    pub(crate) event_sets: Mutex<HashMap<u64, EventSet>>,
}

/// An event set: the number of the last event seen, and what is listened to.
pub(crate) struct EventSet {
    pub(crate) after: u64,
    pub(crate) registered: Vec<Registered>,
}

/// A GPU in an event set, and the types of events. Its MIG mode stays as it is meanwhile.
pub(crate) struct Registered {
    pub(crate) gpu: usize,
    pub(crate) types: u64,
    pub(crate) _hold: Option<ModuleHold>,
}

/// The version of this library, by its file as it was when it was first asked for; the file may be gone later.
static VERSION: OnceLock<Option<String>> = OnceLock::new();

/// Whether this library and the driver that is loaded are of one version. A file without a version is of any.
fn fits(installed: &str) -> bool {
    let own = VERSION.get_or_init(|| library_version(fits as *const () as usize));
    own.as_ref().is_none_or(|own| own == installed)
}

impl Session {
    fn open() -> Result<Self, Code> {
        // Any function of this library has an address inside it.
        let node = Node::discover(init as *const () as usize).map_err(|_| Code::DRIVER_NOT_LOADED)?;
        let hold = node.hold_module();
        let load = node.module().ok_or(Code::DRIVER_NOT_LOADED)?;
        if !fits(&node.spec().driver_version) {
            return Err(Code::LIB_RM_VERSION_MISMATCH);
        }
        let sight = node.sight();
        let mut listed = BTreeMap::new();
        for gpu in node.gpus() {
            if sight.gpu(node.minor(gpu.index)?) && !node.settings(gpu.index)?.away {
                listed.insert(gpu.index, node.hold_gpu(gpu.index));
            }
        }
        Ok(Self { node, sight, load, _hold: hold, listed, event_sets: Mutex::default() })
    }

    /// Whether the module is still the one that it was opened on.
    fn check_module(&self) -> Done {
        match self.node.module() {
            Some(load) if load == self.load => Ok(()),
            Some(_) if !fits(&self.node.installed_version()?) => Err(Code::LIB_RM_VERSION_MISMATCH),
            Some(_) => Err(Code::UNINITIALIZED),
            None => Err(Code::DRIVER_NOT_LOADED),
        }
    }
}

static SESSION: Mutex<(u32, Option<Arc<Session>>)> = Mutex::new((0, None));

fn session() -> Option<Arc<Session>> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
}

/// `nvmlInit`: opens the node at the first call, counts further ones.
pub(crate) fn init(name: &'static str) -> c_uint {
    guarded(|| {
        let mut held = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        if held.1.is_none() {
            held.1 = Some(Arc::new(Session::open()?));
        }
        if let Some(code) = held.1.as_ref().and_then(|s| s.node.enter(name)) {
            if held.0 == 0 {
                held.1 = None;
            }
            return Err(Code(c_uint::try_from(code).unwrap_or(Code::UNKNOWN.0)));
        }
        held.0 += 1;
        Ok(())
    })
}

/// `nvmlShutdown`: closes the node at the last call.
pub(crate) fn shutdown() -> c_uint {
    guarded(|| {
        let mut held = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        let left = held.0.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
        held.0 = left;
        if left == 0 {
            held.1 = None;
        }
        Ok(())
    })
}

/// Runs the body of an exported function.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&Session) -> Done) -> c_uint {
    guarded(|| {
        let session = session().ok_or(Code::UNINITIALIZED)?;
        session.check_module()?;
        match session.node.enter(name) {
            Some(code) => Err(Code(c_uint::try_from(code).unwrap_or(Code::UNKNOWN.0))),
            None => {
                CURRENT.set(Some(name));
                body(&session)
            }
        }
    })
}

thread_local! {
    /// The function that runs, until it is known which GPU it is about.
    static CURRENT: Cell<Option<&'static str>> = const { Cell::new(None) };
}

fn guarded(body: impl FnOnce() -> Done) -> c_uint {
    // A panic must not cross into C; nothing that outlives the call is left half-changed by one.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => sys::nvmlReturn_enum_NVML_SUCCESS,
        Ok(Err(code)) => code.0,
        Err(_) => Code::UNKNOWN.0,
    }
}

impl Session {
    /// The GPUs that this process sees, in NVML's order.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &Gpu> {
        let seen = |index| self.node.minor(index).is_ok_and(|minor| self.sight.gpu(minor));
        self.node.gpus().iter().filter(move |g| self.listed.contains_key(&g.index) && seen(g.index))
    }

    /// The MIG devices of a GPU that this process sees.
    pub(crate) fn mig_devices(&self, gpu: usize) -> Result<Vec<MigDevice>, Code> {
        let minor = self.node.minor(gpu)?;
        let mut devices = self.node.mig_devices(gpu)?;
        devices.retain(|d| self.sight.mig_device(minor, d.gi.id, d.ci.id));
        Ok(devices)
    }

    /// The GPU that a device handle stands for; of a MIG device its parent.
    pub(crate) fn parent(&self, device: Handle) -> Result<&Gpu, Code> {
        let index = match device.thing() {
            Some(Thing::Gpu { index }) => index,
            Some(Thing::MigDevice { gpu, .. }) => gpu,
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        self.working(index)
    }

    /// The GPU that a device handle stands for; refuses MIG devices.
    pub(crate) fn gpu(&self, device: Handle) -> Result<&Gpu, Code> {
        match device.thing() {
            Some(Thing::Gpu { index }) => self.working(index),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// The GPU that a device handle stands for, where this process may learn of it as a whole: who has some of its
    /// partitions may not.
    pub(crate) fn whole(&self, device: Handle) -> Result<&Gpu, Code> {
        let gpu = self.gpu(device)?;
        let is_divided = gpu.board.has_mig() && self.node.mig_mode(gpu.index)?.current;
        if is_divided && !self.sight.all_partitions() { Err(Code::NO_PERMISSION) } else { Ok(gpu) }
    }

    /// The MIG device that a handle stands for, if it still exists.
    pub(crate) fn mig_device(&self, device: Handle) -> Result<Option<MigDevice>, Code> {
        match device.thing() {
            Some(Thing::Gpu { index }) => self.working(index).map(|_| None),
            Some(Thing::MigDevice { gpu, gi, ci, serial }) => {
                self.working(gpu)?;
                let same = |d: &MigDevice| (d.gi.id, d.ci.id, d.gi.serial & 0xfff_ffff) == (gi, ci, serial);
                self.mig_devices(gpu)?.into_iter().find(same).map(Some).ok_or(Code::INVALID_ARGUMENT)
            }
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn working(&self, index: usize) -> Result<&Gpu, Code> {
        let gpu = self.node.gpus().get(index).ok_or(Code::INVALID_ARGUMENT)?;
        if let Some(code) = CURRENT.take().and_then(|name| self.node.enter_on(name, Some(index))) {
            return Err(Code(c_uint::try_from(code).unwrap_or(Code::UNKNOWN.0)));
        }
        let now = self.node.settings(index)?;
        if now.lost || now.away { Err(Code::GPU_IS_LOST) } else { Ok(gpu) }
    }
}

/// Defines exported functions. The body sees the session under the given name and ends in [`Done`].
macro_rules! export {
    ($( fn $name:ident($($arg:ident: $kind:ty),* $(,)?) |$session:ident| $body:block )*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $kind),*) -> nvml_wrapper_sys::bindings::nvmlReturn_t {
                $crate::call::call(stringify!($name), |$session| -> $crate::call::Done { $body })
            }
        )*
    };
}
pub(crate) use export;
