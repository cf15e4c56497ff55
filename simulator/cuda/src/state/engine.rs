//! Operations that are not done, and the contexts' places among those that share their devices.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::plan::Plan;
use crate::state::work::{HostCall, Work};
use crate::track::Track;

/// When an operation is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Something that it waits for is not done.
    Waiting,
    /// At this point of its context's own time.
    Served(u64),
    /// At this instant.
    Wall(u64),
    /// When somebody says so.
    Told,
}

/// Something that a stream was given to do.
pub(crate) struct Operation {
    pub(crate) context: u64,
    pub(crate) stream: u64,
    pub(crate) priority: i32,
    pub(crate) work: Work,
    /// What it was enqueued behind and was not done then.
    pub(crate) after: Vec<u64>,
    /// Those of them that must still be carried out before it can be planned.
    pub(crate) missing: usize,
    /// Operations that wait for this one to be carried out.
    pub(crate) dependents: Vec<u64>,
    /// When the last of what it waited for was carried out.
    pub(crate) ready_ns: u64,
    pub(crate) due: Due,
}

/// A context's place among those that share its device.
pub(crate) struct Lane {
    pub(crate) device: usize,
    pub(crate) tenant: usize,
    pub(crate) track: Track,
    pub(crate) plan: Plan,
    pub(crate) due: BTreeSet<(u64, u64)>,
    /// When each copy engine is free: to the device, from it.
    pub(crate) copiers: [u64; 2],
    /// Own time up to which everything has been carried out.
    pub(crate) settled: u64,
}

/// All operations of the process.
#[derive(Default)]
pub(crate) struct Engine {
    pub(crate) operations: BTreeMap<u64, Operation>,
    pub(crate) lanes: BTreeMap<u64, Lane>,
    pub(crate) on_wall: BTreeSet<(u64, u64)>,
    pub(crate) told: BTreeSet<u64>,
    pub(crate) ready_calls: VecDeque<(u64, HostCall)>,
    /// Outstanding operations by stream, and by context and priority.
    by_stream: BTreeMap<u64, usize>,
    by_priority: BTreeMap<(u64, i32), usize>,
    pub(crate) last: u64,
    /// Somebody has to be awake for what comes.
    pub(crate) needs_thread: bool,
}

impl Engine {
    /// Whether an operation has been carried out; 0 is none.
    pub(crate) fn is_done(&self, id: u64) -> bool {
        !self.operations.contains_key(&id)
    }

    /// The next function of the program to call.
    pub(crate) fn next_call(&mut self) -> Option<(u64, HostCall)> {
        self.ready_calls.pop_front()
    }

    /// Returns true if nothing of a context is outstanding.
    pub(crate) fn is_idle(&self, context: u64) -> bool {
        self.by_priority.range((context, i32::MIN)..=(context, i32::MAX)).next().is_none()
    }

    /// Outstanding operations of a stream.
    pub(crate) fn outstanding(&self, stream: u64) -> usize {
        self.by_stream.get(&stream).copied().unwrap_or(0)
    }

    /// Enters an operation.
    pub(crate) fn insert(&mut self, id: u64, operation: Operation) {
        *self.by_stream.entry(operation.stream).or_insert(0) += 1;
        *self.by_priority.entry((operation.context, operation.priority)).or_insert(0) += 1;
        self.operations.insert(id, operation);
    }

    /// Takes an operation out.
    pub(crate) fn remove(&mut self, id: u64) -> Option<Operation> {
        let operation = self.operations.remove(&id)?;
        count_down(&mut self.by_stream, operation.stream);
        count_down(&mut self.by_priority, (operation.context, operation.priority));
        Some(operation)
    }

    /// The point of the context's own time by which all of `after` will be done, if that is known already.
    pub(crate) fn planned_ahead(&self, context: u64, after: &[u64]) -> Option<u64> {
        let mut latest = self.lanes.get(&context)?.track.served();
        for id in after {
            let before = self.operations.get(id)?;
            match before.due {
                Due::Served(point) if before.context == context => latest = latest.max(point),
                _ => return None,
            }
        }
        Some(latest)
    }

    /// Whether operations of lower priority are outstanding.
    pub(crate) fn overtakes(&self, context: u64, priority: i32) -> bool {
        priority < i32::MAX
            && self.by_priority.range((context, priority + 1)..=(context, i32::MAX)).next().is_some()
    }

    /// What is due first, and when it was.
    pub(crate) fn next_due(&self, now: u64) -> Option<(u64, u64)> {
        let planned = self.lanes.values().filter_map(|lane| {
            let (point, id) = lane.due.first()?;
            // The context may have come to this point long ago and been idle since: nothing is done before it
            // was asked for.
            let asked = self.operations.get(id).map_or(0, |operation| operation.ready_ns);
            Some((lane.track.wall_at(*point)?.max(asked), *id))
        });
        let timed = self.on_wall.first().copied();
        planned.chain(timed).filter(|(wall, _)| *wall <= now).min()
    }
}

fn count_down<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) {
    if let Some(count) = counts.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&key);
        }
    }
}
