//! Modules, libraries and the functions in them by handle.

use std::collections::BTreeMap;
use std::ffi::CString;

use crate::codes::{Code, Cu};
use crate::image::{Figures, Image};

/// A loaded module: of one context, or a library, which is loaded into each context that uses it.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    pub(crate) image: Image,
    /// The context; 0 for a library.
    pub(crate) context: u64,
    /// Contexts whose memory its code takes, with its global variables there.
    pub(crate) loaded: BTreeMap<u64, BTreeMap<String, u64>>,
    pub(crate) functions: BTreeMap<String, u64>,
}

/// A function of a module (`CUfunction`) or library (`CUkernel`, which can be launched as well).
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) name: CString,
    pub(crate) module: u64,
    pub(crate) figures: Figures,
    pub(crate) is_kernel: bool,
    pub(crate) attributes: BTreeMap<i32, i32>,
    /// For the launches of CUDA 3: block shape and parameters.
    pub(crate) block: [u32; 3],
    pub(crate) parameters: Vec<u8>,
}

/// All code of the process.
#[derive(Default)]
pub(crate) struct Modules {
    pub(crate) modules: BTreeMap<u64, Module>,
    pub(crate) functions: BTreeMap<u64, Function>,
}

impl Module {
    /// Whether its code is in a context's memory.
    pub(crate) fn is_loaded(&self, context: u64) -> bool {
        self.loaded.contains_key(&context)
    }
}

impl Modules {
    pub(crate) fn get(&self, handle: u64) -> Cu<&Module> {
        self.modules.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn function(&self, handle: u64) -> Cu<&Function> {
        self.functions.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn function_mut(&mut self, handle: u64) -> Cu<&mut Function> {
        self.functions.get_mut(&handle).ok_or(Code::INVALID_HANDLE)
    }

    /// The functions of a module that have been asked for or are listed.
    pub(crate) fn functions_of(&self, module: u64) -> Vec<u64> {
        self.functions.iter().filter(|(_, f)| f.module == module).map(|(handle, _)| *handle).collect()
    }
}
