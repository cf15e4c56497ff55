//! Arrays and mipmapped arrays by handle.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backing::Backing;
use crate::codes::{Code, Cu};
use crate::types::Array3dDescriptor;

/// One array, or one level of a mipmapped array.
#[derive(Clone)]
pub(crate) struct Array {
    pub(crate) device: usize,
    pub(crate) context: u64,
    pub(crate) shape: Array3dDescriptor,
    /// Device memory that it takes by itself.
    pub(crate) charged: u64,
    pub(crate) content: Arc<Backing>,
    /// The mipmapped array that it is a level of.
    pub(crate) parent: Option<u64>,
}

/// A mipmapped array.
#[derive(Clone, Debug)]
pub(crate) struct Mipmap {
    pub(crate) device: usize,
    pub(crate) context: u64,
    pub(crate) shape: Array3dDescriptor,
    pub(crate) charged: u64,
    pub(crate) levels: Vec<u64>,
}

/// All of the process.
#[derive(Default)]
pub(crate) struct Arrays {
    pub(crate) arrays: BTreeMap<u64, Array>,
    pub(crate) mipmaps: BTreeMap<u64, Mipmap>,
}

impl Arrays {
    pub(crate) fn get(&self, handle: u64) -> Cu<&Array> {
        self.arrays.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn mipmap(&self, handle: u64) -> Cu<&Mipmap> {
        self.mipmaps.get(&handle).ok_or(Code::INVALID_HANDLE)
    }
}
