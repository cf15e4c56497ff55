//! When kernels of one context run, in the context's own time.
//!
//! A kernel starts as soon as what it waits for is done and its part of the multiprocessors is free; kernels of
//! several streams overlap while their parts fit.

/// The whole GPU.
pub(crate) const WHOLE: u32 = 1000;

/// A kernel's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    id: u64,
    start: u64,
    end: u64,
    share: u32,
}

/// The kernels that run or will run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    slots: Vec<Slot>,
    end: u64,
}

impl Plan {
    /// Places a kernel no earlier than `earliest`; returns start and end. `share` is in thousandths of the GPU.
    pub(crate) fn place(&mut self, id: u64, earliest: u64, cost: u64, share: u32) -> (u64, u64) {
        let share = share.clamp(1, WHOLE);
        let mut start = earliest;
        // Each round either fits or moves on to the end of a kernel that is in the way.
        while let Some(next) = self.blocked_until(start, cost, share) {
            start = next;
        }
        let end = start + cost;
        self.slots.push(Slot { id, start, end, share });
        self.end = self.end.max(end);
        (start, end)
    }

    fn blocked_until(&self, start: u64, cost: u64, share: u32) -> Option<u64> {
        let end = start + cost.max(1);
        let overlapping = || self.slots.iter().filter(move |s| s.start < end && s.end > start);
        // The load changes only where a kernel starts.
        let instants = overlapping().map(|s| s.start.max(start)).chain([start]);
        let crowded = instants.filter(|at| {
            let load: u32 = overlapping().filter(|s| s.start <= *at && s.end > *at).map(|s| s.share).sum();
            load + share > WHOLE
        });
        crowded.flat_map(|at| overlapping().filter(move |s| s.start <= at && s.end > at)).map(|s| s.end).min()
    }

    /// Takes a kernel out that has not started.
    pub(crate) fn remove(&mut self, id: u64) {
        self.slots.retain(|s| s.id != id);
        self.end = self.slots.iter().map(|s| s.end).max().unwrap_or(0);
    }

    /// Where a kernel starts.
    pub(crate) fn start_of(&self, id: u64) -> Option<u64> {
        self.slots.iter().find(|s| s.id == id).map(|s| s.start)
    }

    /// Where the work ends.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Drops kernels that ended by then.
    pub(crate) fn forget_before(&mut self, served: u64) {
        self.slots.retain(|s| s.end > served);
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_kernels_follow_each_other() {
        let mut plan = Plan::default();
        assert_eq!(plan.place(1, 0, 10, WHOLE), (0, 10));
        assert_eq!(plan.place(2, 0, 5, WHOLE), (10, 15));
        assert_eq!(plan.place(3, 12, 5, 1), (15, 20));
        assert_eq!(plan.end(), 20);
    }

    #[test]
    fn small_kernels_overlap_while_they_fit() {
        let mut plan = Plan::default();
        assert_eq!(plan.place(1, 0, 10, 400), (0, 10));
        assert_eq!(plan.place(2, 2, 20, 400), (2, 22));
        assert_eq!(plan.place(3, 3, 10, 400), (10, 20), "waits for the first");
        assert_eq!(plan.place(4, 0, 4, 200), (0, 4), "fits beside them");
        plan.remove(3);
        assert_eq!(plan.start_of(3), None);
        assert_eq!(plan.end(), 22);
    }
}
