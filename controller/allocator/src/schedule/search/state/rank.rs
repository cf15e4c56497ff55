//! The rank of devices, and what is left of GPUs, at the present state of the search.

use super::State;
use crate::quantity::Quantity;
use crate::schedule::ask::Alternative;
use crate::schedule::score::{GpuView, Rank, Strategy};
use crate::schedule::search::candidates::Candidate;
use crate::snapshot::worth::{Worth, thousandths};
use std::hash::{DefaultHasher, Hash, Hasher};

impl State<'_, '_> {
    /// Returns the rank of a device that could be taken now, and the position of its GPU for a stable order.
    pub(in crate::schedule::search) fn rank(
        &mut self,
        view: usize,
        candidate: &Candidate,
        alternative: &Alternative<'_>,
        strategy: Strategy,
    ) -> Option<(Rank, u32)> {
        if !self.is_free(None, alternative, view, candidate) {
            return None;
        }
        let device = self.device(view, candidate.position)?;
        if alternative.admin {
            return Some((Rank::default(), device.gpu));
        }
        let shared = self.is_shared(view, candidate.position);
        let before = self.worth_now(view, device.gpu);
        let after = if shared {
            before
        } else {
            self.draw(view, device, false);
            let after = self.worth_now(view, device.gpu);
            self.draw(view, device, true);
            after
        };
        let seen = GpuView {
            untouched: self.untouched_now(view, device.gpu),
            cost: before.until(after),
            free: if shared {
                self.share_left(view, candidate)
            } else {
                self.counters_left(view, device.gpu, false)
            },
        };
        Some((strategy.rank(seen), device.gpu))
    }

    /// Returns what is left of a shared device's scarcest capacity, in thousandths.
    fn share_left(&self, view: usize, candidate: &Candidate) -> i64 {
        let Some(device) = self.device(view, candidate.position) else { return 0 };
        let used = self.views.get(view).and_then(|view| view.pool.usage.devices.get(&candidate.position));
        let taken = self.taken(view, candidate.position);
        let shape = self.index.shape(device);
        shape
            .capacities
            .iter()
            .enumerate()
            .map(|(at, (_, capacity))| {
                let of = |list: Option<&[Quantity]>| {
                    list.and_then(|list| list.get(at)).copied().unwrap_or_default()
                };
                let held =
                    of(used.map(|used| &*used.consumed)) + of(taken.map(|taken| taken.consumed.as_slice()));
                thousandths(capacity.value - held, capacity.value)
            })
            .min()
            .unwrap_or_default()
    }

    fn untouched_now(&self, view: usize, gpu: u32) -> bool {
        self.untouched_at_start(view, gpu)
            && self.gpu(view, gpu).is_some_and(|gpu| {
                gpu.devices.iter().all(|position| {
                    self.taken(view, *position).is_none_or(|taken| !taken.exclusive && taken.shares == 0)
                })
            })
    }

    pub(in crate::schedule::search) fn untouched_at_start(&self, view: usize, gpu: u32) -> bool {
        let (Some(in_view), Some(of)) = (self.views.get(view), self.gpu(view, gpu)) else { return false };
        of.devices.iter().all(|position| !in_view.pool.usage.devices.contains_key(position))
    }

    /// Returns what a GPU can still be used for at the present state of the search.
    pub(in crate::schedule::search) fn worth_now(&mut self, view: usize, gpu: u32) -> Worth {
        self.worth(view, gpu, false)
    }

    /// Returns what a GPU could be used for before the search.
    pub(in crate::schedule::search) fn worth_at_start(&mut self, view: usize, gpu: u32) -> Worth {
        self.worth(view, gpu, true)
    }

    fn worth(&mut self, view: usize, number: u32, at_start: bool) -> Worth {
        let (Some(in_view), Some(gpu)) = (self.views.get(view), self.gpu(view, number)) else {
            return Worth::default();
        };
        let free = if at_start { Some(&in_view.pool.usage.free) } else { self.free.get(view) };
        let Some(free) = free else { return Worth::default() };
        let sets = gpu.sets.iter().filter_map(|set| in_view.layout.sets.get(usize::from(*set)));
        let counters = sets.flat_map(|set| free.get(set.offset..set.offset + set.counters.len()));
        let free: Vec<Quantity> = counters.flatten().copied().collect();
        let mut hasher = DefaultHasher::new();
        free.hash(&mut hasher);
        let key = (in_view.layout.id, number, hasher.finish());
        if let Some(known) = self.worths.get(&key) {
            return *known;
        }
        let worth = self.index.fleet().worth(gpu.board, &free);
        self.worths.insert(key, worth);
        worth
    }

    /// Returns the mean of what is left of a GPU's counters, in thousandths.
    fn counters_left(&self, view: usize, gpu: u32, at_start: bool) -> i64 {
        let (Some(in_view), Some(of)) = (self.views.get(view), self.gpu(view, gpu)) else { return 0 };
        let free = if at_start { Some(&in_view.pool.usage.free) } else { self.free.get(view) };
        let Some(free) = free else { return 0 };
        let mut sum = 0i64;
        let mut count = 0i64;
        for set in of.sets.iter().filter_map(|set| in_view.layout.sets.get(usize::from(*set))) {
            for (at, (_, total)) in set.counters.iter().enumerate() {
                if *total > Quantity::ZERO
                    && let Some(free) = free.get(set.offset + at)
                {
                    sum = sum.saturating_add(thousandths(*free, *total));
                    count += 1;
                }
            }
        }
        if count == 0 { 0 } else { sum / count }
    }

    /// Returns what is left of all GPUs of the node, in thousandths of one GPU.
    pub(in crate::schedule::search) fn left(&self) -> i64 {
        let mut left = 0i64;
        for (view, in_view) in self.views.iter().enumerate() {
            for gpu in &in_view.layout.gpus {
                left = left.saturating_add(self.counters_left(view, gpu.number, false));
                for position in &gpu.devices {
                    let shared = Candidate { position: *position, consumed: None, usable: true };
                    if self.is_shared(view, *position) {
                        left = left.saturating_add(self.share_left(view, &shared));
                    }
                }
            }
        }
        left
    }
}
