//! How busy a GPU has been lately, and by whom: read from the tracks that [`crate::compute`] keeps.
//!
//! The window is the last second, or as far back as the tracks go where tenants take turns often.

use std::collections::BTreeMap;

use crate::compute::{Domain, TRACK_LENGTH, domain_key};
use crate::error::NodeError;
use crate::map::now_ns;
use crate::node::Node;

const WINDOW_NS: u64 = 1_000_000_000;

/// Percent of the time in which work ran.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Utilization {
    /// Of anybody's.
    pub gpu: u32,
    /// Of each process's, by its place in the node's table; only those that had any.
    pub processes: Vec<(usize, u32)>,
}

impl Node {
    /// How busy a GPU with MIG off has been in the last second.
    pub fn utilization(&self, gpu: usize) -> Result<Utilization, NodeError> {
        self.gpu(gpu)?;
        let compute = self.compute()?;
        let Some(domain) = compute.existing(domain_key(gpu, None)) else { return Ok(Utilization::default()) };
        let now = now_ns();
        domain.advance(now);
        compute.reap(domain, now);
        Ok(measure(domain, now))
    }
}

/// One tenant's way through time: at a wall-clock instant it had received so much.
struct Way {
    slot: usize,
    points: Vec<(u64, u64)>,
    /// Whether earlier points have been overwritten.
    cut: bool,
}

impl Way {
    /// GPU time received up to `wall`; a straight line between points, which is what happened.
    fn served_at(&self, wall: u64) -> u64 {
        let after = self.points.partition_point(|(at, _)| *at <= wall);
        match (after.checked_sub(1).and_then(|i| self.points.get(i)), self.points.get(after)) {
            (Some(&(from, served)), Some(&(to, more))) => {
                let part =
                    u128::from(more - served) * u128::from(wall - from) / u128::from((to - from).max(1));
                served + u64::try_from(part).unwrap_or(0)
            }
            (Some(&(_, served)), None) | (None, Some(&(_, served))) => served,
            (None, None) => 0,
        }
    }
}

/// Percentages of a domain that has been advanced to `now`.
fn measure(domain: Domain<'_>, now: u64) -> Utilization {
    let ways: Vec<Way> = domain
        .tenants()
        .map(|(_, tenant)| {
            let (track, corners) = tenant.track(0);
            let end = (now, tenant.served_ns());
            let points = track.iter().map(|p| (p.wall_ns, p.served_ns)).chain([end]).collect();
            Way { slot: tenant.process_slot(), points, cut: corners > TRACK_LENGTH as u64 }
        })
        .collect();
    let known = ways.iter().filter(|w| w.cut).filter_map(|w| w.points.first()).map(|(at, _)| *at).max();
    let from = now.saturating_sub(WINDOW_NS).max(known.unwrap_or(0));
    let length = now.saturating_sub(from).max(1);
    let percent = |ns: u64| u32::try_from(ns.saturating_mul(100) / length).unwrap_or(100).min(100);
    let mut by_slot = BTreeMap::<usize, u64>::new();
    for way in &ways {
        *by_slot.entry(way.slot).or_default() += way.served_at(now).saturating_sub(way.served_at(from));
    }
    Utilization {
        gpu: percent(by_slot.values().sum()),
        processes: by_slot.iter().map(|(slot, ns)| (*slot, percent(*ns))).filter(|(_, p)| *p > 0).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::Slices;
    use crate::spec::NodeSpec;

    const SECOND: u64 = 1_000_000_000;
    const START: u64 = 100 * SECOND;

    /// Runs tenants with these demands from START on and measures at START + `after`.
    fn measured(demands: &[u64], slices: Slices, after: u64) -> Utilization {
        let dir = tempfile::tempdir().unwrap();
        let node = crate::create(dir.path(), &NodeSpec::new(["T4"])).unwrap();
        node.attach_process().unwrap();
        let compute = node.compute().unwrap();
        let domain = compute.domain(domain_key(0, None), slices, START).unwrap();
        for demand in demands {
            let index = compute.enter(domain, 0).unwrap();
            domain.tenant(index).set_demand(*demand);
        }
        domain.advance(START + after);
        measure(domain, START + after)
    }

    #[test]
    fn an_unused_gpu_is_idle() {
        let dir = tempfile::tempdir().unwrap();
        let node = crate::create(dir.path(), &NodeSpec::new(["T4"])).unwrap();
        assert_eq!(node.utilization(0).unwrap(), Utilization::default());
    }

    #[test]
    fn steady_work_is_all_of_the_time() {
        let found = measured(&[100 * SECOND], Slices::default(), 5 * SECOND);
        assert_eq!((found.gpu, found.processes.len(), found.processes[0].1), (100, 1, 100));
    }

    #[test]
    fn only_the_last_second_counts() {
        assert_eq!(measured(&[SECOND], Slices::default(), SECOND + SECOND / 4).gpu, 75);
        assert_eq!(measured(&[SECOND], Slices::default(), 2 * SECOND).gpu, 0);
        assert_eq!(measured(&[SECOND / 10], Slices::default(), SECOND / 2).gpu, 10);
    }

    #[test]
    fn turns_that_outrun_the_tracks_are_measured_over_what_is_known() {
        let slices = Slices { slice_ns: 2_000_000, switch_ns: 0 };
        let found = measured(&[100 * SECOND, 100 * SECOND], slices, 3 * SECOND);
        assert_eq!(found.gpu, 100);
    }
}
