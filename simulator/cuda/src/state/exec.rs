//! Graphs that can run by handle, and the memory that their allocation nodes take.

use std::collections::BTreeMap;

use crate::codes::{Code, Cu};
use crate::state::graph::NodeKind;
use crate::state::memory::Memory;

/// One node of an instantiated graph.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// The node of the graph that it came from.
    pub(crate) node: u64,
    pub(crate) kind: NodeKind,
    /// Steps by position.
    pub(crate) after: Vec<usize>,
    pub(crate) enabled: bool,
}

/// An instantiated graph.
#[derive(Clone, Debug)]
pub(crate) struct Exec {
    pub(crate) context: u64,
    pub(crate) flags: u64,
    pub(crate) steps: Vec<Step>,
    /// The most that its allocations take at a time, by device.
    pub(crate) footprint: BTreeMap<usize, u64>,
    /// Whether that memory is reserved.
    pub(crate) backed: bool,
    /// Allocated by a launch and not freed yet: address and size.
    pub(crate) live: BTreeMap<u64, u64>,
    pub(crate) running: u32,
    /// What it was instantiated from, for captures of its launches.
    pub(crate) source: u64,
    /// The end of its last launch.
    pub(crate) last: u64,
    pub(crate) doomed: bool,
}

/// Memory of graphs on one device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GraphMemory {
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
}

/// All of the process.
#[derive(Default)]
pub(crate) struct Execs {
    pub(crate) execs: BTreeMap<u64, Exec>,
    memory: BTreeMap<usize, GraphMemory>,
}

impl Execs {
    pub(crate) fn get(&self, handle: u64) -> Cu<&Exec> {
        self.execs.get(&handle).filter(|e| !e.doomed).ok_or(Code::INVALID_VALUE)
    }

    pub(crate) fn memory_of(&self, device: usize) -> GraphMemory {
        self.memory.get(&device).copied().unwrap_or_default()
    }

    pub(crate) fn memory_mut(&mut self, device: usize) -> &mut GraphMemory {
        self.memory.entry(device).or_default()
    }

    /// The step that came from a node.
    pub(crate) fn step_mut(&mut self, handle: u64, node: u64) -> Cu<&mut Step> {
        let exec = self.execs.get_mut(&handle).filter(|e| !e.doomed).ok_or(Code::INVALID_VALUE)?;
        exec.steps.iter_mut().find(|s| s.node == node).ok_or(Code::INVALID_VALUE)
    }

    /// The last operation of a launch has been carried out.
    pub(crate) fn launch_ended(&mut self, handle: u64) {
        if let Some(exec) = self.execs.get_mut(&handle) {
            exec.running = exec.running.saturating_sub(1);
        }
    }

    /// Counts anew what launches have allocated on each device.
    pub(crate) fn count_used(&mut self, memory: &Memory) {
        let mut used: BTreeMap<usize, u64> = BTreeMap::new();
        for (address, bytes) in self.execs.values().flat_map(|e| &e.live) {
            let device = memory.at(*address).map_or(0, |range| range.device);
            *used.entry(device).or_default() += bytes;
        }
        for (device, counted) in &mut self.memory {
            counted.used = used.get(device).copied().unwrap_or(0);
            counted.used_high = counted.used_high.max(counted.used);
        }
    }

    /// An allocation of a graph was freed, by whatever means.
    pub(crate) fn freed(&mut self, memory: &Memory, address: u64) {
        for exec in self.execs.values_mut() {
            exec.live.remove(&address);
        }
        self.count_used(memory);
    }

    /// Whether a launch has allocated that address and nobody has freed it.
    pub(crate) fn is_live(&self, address: u64) -> bool {
        self.execs.values().any(|e| e.live.contains_key(&address))
    }
}
