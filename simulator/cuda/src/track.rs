//! A context's own GPU time against the wall clock.
//!
//! Kernels are planned in the context's own time, which stands still while other contexts are served. This is the way
//! back: at which instant of the wall clock some point of it was reached.

use std::collections::VecDeque;

use aliquot_sim_node::compute::{Point, Tenant};

/// Corners that are kept at the most; beyond it the oldest stretch becomes a straight line.
const KEPT: usize = 4096;

/// What is known of a context's service, oldest first. Between two points time went at an even pace: at full speed,
/// not at all, or (where corners were lost) at the average of the two.
#[derive(Clone, Debug)]
pub(crate) struct Track {
    points: VecDeque<Point>,
    tail: Point,
    next_corner: u64,
}

impl Track {
    /// A context that starts now.
    pub(crate) fn new(tenant: Tenant<'_>, wall_ns: u64) -> Self {
        let tail = Point { wall_ns, served_ns: tenant.served_ns() };
        let (_, next_corner) = tenant.track(u64::MAX);
        Self { points: VecDeque::from([tail]), tail, next_corner }
    }

    /// Takes in what has happened up to `wall_ns`.
    pub(crate) fn update(&mut self, tenant: Tenant<'_>, wall_ns: u64) {
        let (corners, next) = tenant.track(self.next_corner);
        self.next_corner = next;
        self.extend(corners, Point { wall_ns, served_ns: tenant.served_ns() });
    }

    fn extend(&mut self, corners: Vec<Point>, tail: Point) {
        for corner in corners {
            if self.points.back().is_none_or(|last| last.wall_ns <= corner.wall_ns) {
                self.points.push_back(corner);
            }
        }
        self.tail = tail;
        while self.points.len() > KEPT {
            self.points.remove(1);
        }
    }

    /// The context's own time at the last update.
    pub(crate) fn served(&self) -> u64 {
        self.tail.served_ns
    }

    fn all(&self) -> impl DoubleEndedIterator<Item = Point> + '_ {
        self.points.iter().copied().chain([self.tail])
    }

    /// First instant at which that much had been served; `None` if it has not been yet.
    pub(crate) fn wall_at(&self, served_ns: u64) -> Option<u64> {
        if self.tail.served_ns < served_ns {
            return None;
        }
        let mut before: Option<Point> = None;
        for point in self.all() {
            if point.served_ns >= served_ns {
                return Some(match before {
                    None => point.wall_ns,
                    Some(from) => {
                        between((from.served_ns, from.wall_ns), (point.served_ns, point.wall_ns), served_ns)
                    }
                });
            }
            before = Some(point);
        }
        None
    }

    /// How much had been served at that instant.
    pub(crate) fn served_at(&self, wall_ns: u64) -> u64 {
        let mut before: Option<Point> = None;
        for point in self.all() {
            if point.wall_ns >= wall_ns {
                return match before {
                    None => point.served_ns,
                    Some(from) => {
                        between((from.wall_ns, from.served_ns), (point.wall_ns, point.served_ns), wall_ns)
                    }
                };
            }
            before = Some(point);
        }
        self.tail.served_ns
    }

    /// Drops what nobody will ask for: everything before the last point up to which `served_ns` was served.
    pub(crate) fn forget_before(&mut self, served_ns: u64) {
        while self.points.get(1).is_some_and(|second| second.served_ns < served_ns) {
            self.points.pop_front();
        }
    }
}

/// On the line through two points, the second coordinate at `x`; the first coordinates are ascending and contain it.
fn between(from: (u64, u64), to: (u64, u64), x: u64) -> u64 {
    let (run, rise) = (to.0 - from.0, to.1.saturating_sub(from.1));
    if run == 0 {
        return from.1;
    }
    let part = u128::from(rise) * u128::from(x.saturating_sub(from.0)) / u128::from(run);
    from.1 + u64::try_from(part).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track(points: &[(u64, u64)], tail: (u64, u64)) -> Track {
        let point = |(wall_ns, served_ns)| Point { wall_ns, served_ns };
        let points = points.iter().copied().map(point).collect();
        Track { points, tail: point(tail), next_corner: 0 }
    }

    #[test]
    fn a_point_is_reached_when_it_is_first_reached() {
        // Served from 10 to 20, not from 20 to 50, then again.
        let track = track(&[(10, 0), (20, 10), (50, 10)], (55, 15));
        assert_eq!(track.wall_at(0), Some(10));
        assert_eq!(track.wall_at(4), Some(14));
        assert_eq!(track.wall_at(10), Some(20));
        assert_eq!(track.wall_at(11), Some(51));
        assert_eq!(track.wall_at(15), Some(55));
        assert_eq!(track.wall_at(16), None);
        assert_eq!(track.served_at(0), 0);
        assert_eq!(track.served_at(15), 5);
        assert_eq!(track.served_at(40), 10);
        assert_eq!(track.served_at(52), 12);
    }

    #[test]
    fn what_is_forgotten_does_not_change_later_answers() {
        let mut track = track(&[(10, 0), (20, 10), (50, 10), (60, 20), (90, 20)], (95, 25));
        let answers: Vec<_> = (15..=25).map(|s| track.wall_at(s)).collect();
        track.forget_before(15);
        assert_eq!(track.points.len(), 3);
        assert_eq!((15..=25).map(|s| track.wall_at(s)).collect::<Vec<_>>(), answers);
    }
}
