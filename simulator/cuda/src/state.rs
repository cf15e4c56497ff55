//! Everything that a process has made, by handle.

use std::collections::BTreeMap;

pub(crate) mod array;
pub(crate) mod capture;
pub(crate) mod context;
pub(crate) mod engine;
pub(crate) mod event;
pub(crate) mod exec;
pub(crate) mod graph;
pub(crate) mod memory;
pub(crate) mod module;
pub(crate) mod pool;
pub(crate) mod stream;
pub(crate) mod user_object;
pub(crate) mod vmm;
pub(crate) mod work;

use array::Arrays;
use capture::Capture;
use context::{Context, Primary};
use engine::Engine;
use event::Event;
use exec::Execs;
use graph::Graphs;
use memory::Memory;
use module::Modules;
use pool::Pools;
use stream::Stream;
use user_object::UserObjects;
use vmm::Vmm;

use crate::codes::{Code, Cu};
use crate::thread;

/// Handles are numbers that look like pointers and are never followed.
const FIRST_HANDLE: u64 = 0x5a5a_0000_0000;

/// The process's objects; behind the driver's lock.
#[derive(Default)]
pub(crate) struct State {
    handles: u64,
    pub(crate) contexts_made: u64,
    pub(crate) contexts: BTreeMap<u64, Context>,
    /// By device.
    pub(crate) primaries: Vec<Primary>,
    pub(crate) memory: Memory,
    pub(crate) pools: Pools,
    pub(crate) vmm: Vmm,
    pub(crate) arrays: Arrays,
    pub(crate) modules: Modules,
    pub(crate) engine: Engine,
    pub(crate) streams: BTreeMap<u64, Stream>,
    /// By context and thread; thread 0 is the legacy default stream.
    pub(crate) default_streams: BTreeMap<(u64, u64), u64>,
    pub(crate) events: BTreeMap<u64, Event>,
    pub(crate) captures: BTreeMap<u64, Capture>,
    pub(crate) graphs: Graphs,
    pub(crate) execs: Execs,
    pub(crate) user_objects: UserObjects,
}

impl State {
    /// Makes room for that many devices.
    pub(crate) fn start(&mut self, devices: usize) {
        self.primaries.resize_with(devices, Primary::default);
        for device in 0..devices {
            let handle = self.handle();
            self.pools.add_default(device, handle);
        }
    }

    /// Whether an operation of a stream has been carried out.
    pub(crate) fn is_done(&self, operation: u64) -> bool {
        self.engine.is_done(operation)
    }

    /// A handle that no object has had.
    pub(crate) fn handle(&mut self) -> u64 {
        self.handles += 1;
        FIRST_HANDLE + self.handles * 0x40
    }

    /// The context with that handle.
    pub(crate) fn context(&self, handle: u64) -> Cu<&Context> {
        match self.contexts.get(&handle) {
            Some(context) if context.alive => Ok(context),
            Some(_) => Err(Code::CONTEXT_IS_DESTROYED),
            None => Err(Code::INVALID_CONTEXT),
        }
    }

    /// The calling thread's context and its handle, if it can still be used.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` without one, `CONTEXT_IS_DESTROYED`, or the error that the context is stuck in.
    pub(crate) fn current(&self) -> Cu<(u64, &Context)> {
        let handle = thread::current_handle()?;
        let context = self.context(handle)?;
        context.usable()?;
        Ok((handle, context))
    }
}
