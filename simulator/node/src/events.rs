//! Events of the node: XID and ECC errors.

use std::time::Duration;

use crate::error::NodeError;
use crate::layout::{EventSlot, MAX_EVENTS, State};
use crate::map::{futex_wait, futex_wake, now_ns};
use crate::node::Node;

/// NVML's bit for a corrected ECC error.
pub const EVENT_SINGLE_BIT_ECC: u64 = 1;
/// NVML's bit for an uncorrected ECC error.
pub const EVENT_DOUBLE_BIT_ECC: u64 = 2;
/// NVML's bit for a critical XID.
pub const EVENT_XID: u64 = 8;
/// NVML's bit for a change of the MIG configuration.
pub const EVENT_MIG_CONFIG: u64 = 256;
/// Types that can be registered: those above, and P-state 4, clock 16 and power source 128, which nothing raises.
pub const ACCEPTED: u64 =
    EVENT_SINGLE_BIT_ECC | EVENT_DOUBLE_BIT_ECC | EVENT_XID | EVENT_MIG_CONFIG | 4 | 16 | 128;
/// The XID of a GPU that has fallen off the bus.
pub const XID_OFF_THE_BUS: u64 = 79;

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Its number on the node, from 1.
    pub number: u64,
    /// GPU index.
    pub gpu: usize,
    /// GPU instance, where it is about one.
    pub gi: Option<u32>,
    /// Compute instance, where it is about one.
    pub ci: Option<u32>,
    /// NVML's event type bit.
    pub kind: u64,
    /// The XID's number, or 0.
    pub data: u64,
}

fn futex(state: *mut State) -> *mut u32 {
    state.cast::<u8>().wrapping_add(std::mem::offset_of!(State, event_futex)).cast()
}

/// As much of an event's number as a word for waiting holds.
fn low(number: u64) -> u32 {
    u32::try_from(number & u64::from(u32::MAX)).unwrap_or_default()
}

impl Node {
    /// Reports an XID. 79 also takes the GPU off the bus until a reset.
    pub fn raise_xid(
        &self,
        gpu: usize,
        xid: u64,
        gi: Option<u32>,
        ci: Option<u32>,
    ) -> Result<u64, NodeError> {
        if xid == XID_OFF_THE_BUS {
            self.update_gpu(gpu, |g| g.lost = 1)?;
        }
        self.raise(gpu, EVENT_XID, xid, gi, ci)
    }

    /// Counts and reports ECC errors.
    pub fn raise_ecc(&self, gpu: usize, uncorrected: bool, count: u64) -> Result<u64, NodeError> {
        self.update_gpu(gpu, |g| {
            let counter = if uncorrected { &mut g.ecc_uncorrected } else { &mut g.ecc_corrected };
            *counter = counter.saturating_add(count);
        })?;
        self.raise(gpu, if uncorrected { EVENT_DOUBLE_BIT_ECC } else { EVENT_SINGLE_BIT_ECC }, 0, None, None)
    }

    fn raise(
        &self,
        gpu: usize,
        kind: u64,
        data: u64,
        gi: Option<u32>,
        ci: Option<u32>,
    ) -> Result<u64, NodeError> {
        self.gpu(gpu)?;
        let mut state = self.lock()?;
        let number = state.last_event + 1;
        state.last_event = number;
        let ring = MAX_EVENTS as u64;
        if let Some(slot) = usize::try_from(number % ring).ok().and_then(|i| state.events.get_mut(i)) {
            *slot = EventSlot {
                number,
                kind,
                data,
                gpu: u32::try_from(gpu).unwrap_or(u32::MAX),
                gi: gi.unwrap_or(u32::MAX),
                ci: ci.unwrap_or(u32::MAX),
                reserved: 0,
            };
        }
        let word = self.map.shared_word(futex);
        word.store(low(number), std::sync::atomic::Ordering::Release);
        drop(state);
        futex_wake(word);
        Ok(number)
    }

    /// Number of the newest event, to wait from.
    pub fn last_event(&self) -> Result<u64, NodeError> {
        Ok(self.lock()?.last_event)
    }

    /// The first event after number `after` that `wanted` accepts, waiting for it up to `timeout`.
    ///
    /// The ring keeps the latest 256 events; one that was overwritten is lost, as in the driver.
    pub fn wait_event(
        &self,
        after: u64,
        timeout: Duration,
        mut wanted: impl FnMut(&Event) -> bool,
    ) -> Result<Option<Event>, NodeError> {
        let deadline = now_ns().saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        let word = self.map.shared_word(futex);
        loop {
            let seen = word.load(std::sync::atomic::Ordering::Acquire);
            // The word is the number of the newest event, so that who waits takes the node's lock only where there is one.
            let found = if seen == low(after) {
                None
            } else {
                self.events_after(after)?.into_iter().find(&mut wanted)
            };
            let now = now_ns();
            if found.is_some() || now >= deadline {
                return Ok(found);
            }
            futex_wait(word, seen, deadline - now);
        }
    }

    /// The remembered events after number `after`, oldest first.
    pub fn events_after(&self, after: u64) -> Result<Vec<Event>, NodeError> {
        let state = self.lock()?;
        let known = |id: u32| (id != u32::MAX).then_some(id);
        let mut events: Vec<Event> = state
            .events
            .iter()
            .filter(|e| e.number > after)
            .map(|e| Event {
                number: e.number,
                gpu: e.gpu as usize,
                gi: known(e.gi),
                ci: known(e.ci),
                kind: e.kind,
                data: e.data,
            })
            .collect();
        events.sort_by_key(|e| e.number);
        Ok(events)
    }
}
