//! Events of the node (XID and ECC errors), and busy time.

use std::time::Duration;

use crate::error::NodeError;
use crate::layout::{BUSY_WINDOW_NS, BUSY_WINDOWS, Busy, EventSlot, MAX_EVENTS, State};
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
        drop(state);
        let word = self.map.shared_word(futex);
        word.fetch_add(1, std::sync::atomic::Ordering::Release);
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
            let found = self.events_after(after)?.into_iter().find(&mut wanted);
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

    /// Adds time in which work of this process ran on a GPU, ending at `end_ns` on [`crate::now_ns`]'s clock.
    ///
    /// `alone` says that no other process's work was counted for the same time; only then does the GPU's
    /// own busy time grow, so that overlapping work counts once.
    pub fn record_busy(&self, gpu: usize, busy_ns: u64, end_ns: u64, alone: bool) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        if let Some(slot) = self.own_slot(&state)
            && let Some(busy) = state.procs.get_mut(slot).and_then(|p| p.busy.get_mut(gpu))
        {
            busy.add(busy_ns, end_ns);
        }
        if alone && let Some(gpu) = state.gpus.get_mut(gpu) {
            gpu.busy.add(busy_ns, end_ns);
        }
        Ok(())
    }

    /// Percent of the last second in which any work ran on a GPU.
    pub fn utilization(&self, gpu: usize) -> Result<u32, NodeError> {
        self.gpu(gpu)?;
        let state = self.lock()?;
        Ok(state.gpus.get(gpu).map_or(0, |g| g.busy.percent(now_ns())))
    }

    /// Percent of the last second in which work of each process ran on a GPU, by process slot.
    pub fn process_utilization(&self, gpu: usize) -> Result<Vec<(usize, u32)>, NodeError> {
        self.gpu(gpu)?;
        let state = self.lock()?;
        let now = now_ns();
        let running = state.procs.iter().enumerate().filter(|(_, p)| p.in_use == 1);
        Ok(running
            .filter_map(|(slot, p)| p.busy.get(gpu).map(|busy| (slot, busy.percent(now))))
            .filter(|(_, percent)| *percent > 0)
            .collect())
    }
}

impl Busy {
    /// Adds a stretch of time that ends at `end_ns`, spread over the windows that it lies in.
    pub(crate) fn add(&mut self, busy_ns: u64, end_ns: u64) {
        self.total_ns = self.total_ns.saturating_add(busy_ns);
        self.turn_to(end_ns / BUSY_WINDOW_NS);
        let (mut left, mut end) = (busy_ns, end_ns);
        for _ in 0..BUSY_WINDOWS {
            let window = end.saturating_sub(1) / BUSY_WINDOW_NS;
            let part = left.min(end.saturating_sub(window * BUSY_WINDOW_NS));
            if let Some(ns) = self.window_mut(window) {
                *ns = ns.saturating_add(part).min(BUSY_WINDOW_NS);
            }
            left -= part;
            end = end.saturating_sub(part);
            if left == 0 {
                break;
            }
        }
    }

    /// Percent of the second of whole windows before the one that `now_ns` lies in.
    pub(crate) fn percent(&self, now_ns: u64) -> u32 {
        let current = now_ns / BUSY_WINDOW_NS;
        let recent = (1..=6)
            .filter_map(|back| current.checked_sub(back))
            .filter(|w| *w <= self.window && w + (BUSY_WINDOWS as u64) > self.window)
            .filter_map(|w| usize::try_from(w % BUSY_WINDOWS as u64).ok().and_then(|i| self.ns.get(i)))
            .sum::<u64>();
        u32::try_from(recent * 100 / (6 * BUSY_WINDOW_NS)).unwrap_or(100).min(100)
    }

    fn turn_to(&mut self, window: u64) {
        if window <= self.window {
            return;
        }
        let first_new = (self.window + 1).max(window.saturating_sub(BUSY_WINDOWS as u64 - 1));
        for fresh in first_new..=window {
            if let Some(ns) =
                usize::try_from(fresh % BUSY_WINDOWS as u64).ok().and_then(|i| self.ns.get_mut(i))
            {
                *ns = 0;
            }
        }
        self.window = window;
    }

    fn window_mut(&mut self, window: u64) -> Option<&mut u64> {
        if window > self.window || window + BUSY_WINDOWS as u64 <= self.window {
            return None;
        }
        usize::try_from(window % BUSY_WINDOWS as u64).ok().and_then(|i| self.ns.get_mut(i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The start of a window, late enough that there are windows before it.
    const NOW: u64 = 100 * BUSY_WINDOW_NS;

    fn busy(stretches: &[(u64, u64)]) -> Busy {
        let mut busy = Busy::IDLE;
        for &(ns, end) in stretches {
            busy.add(ns, end);
        }
        busy
    }

    #[test]
    fn a_second_of_work_is_all_of_the_last_second_and_none_of_the_next() {
        let busy = busy(&[(6 * BUSY_WINDOW_NS, NOW)]);
        assert_eq!(busy.percent(NOW), 100);
        assert_eq!(busy.percent(NOW + 3 * BUSY_WINDOW_NS), 50);
        assert_eq!(busy.percent(NOW + 6 * BUSY_WINDOW_NS), 0);
    }

    #[test]
    fn work_is_spread_over_the_windows_it_lies_in() {
        let half = BUSY_WINDOW_NS / 2;
        assert_eq!(busy(&[(half, NOW)]).percent(NOW), 8);
        assert_eq!(busy(&[(2 * half, NOW - half)]).percent(NOW), 16);
        assert_eq!(busy(&[(half, NOW), (half, NOW + half)]).percent(NOW + BUSY_WINDOW_NS), 16);
    }

    #[test]
    fn windows_that_come_round_again_start_empty() {
        let later = NOW + 5 * BUSY_WINDOWS as u64 * BUSY_WINDOW_NS;
        let busy = busy(&[(6 * BUSY_WINDOW_NS, NOW), (1, later)]);
        assert_eq!(busy.percent(later), 0);
        assert_eq!(busy.total_ns, 6 * BUSY_WINDOW_NS + 1);
    }

    #[test]
    fn more_than_all_the_time_is_all_the_time() {
        assert_eq!(busy(&[(20 * BUSY_WINDOW_NS, NOW), (6 * BUSY_WINDOW_NS, NOW)]).percent(NOW), 100);
    }
}
