//! Limits how many moves may begin within an hour, and records which have begun. The record is written before
//! each move, so that a change of the leading controller does not affect the limit.

use crate::snapshot::Uid;
use k8s_openapi::api::core::v1::ConfigMap;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How long a move counts, in seconds.
pub(crate) const HOUR: i64 = 3600;
/// Name of the ConfigMap that stores the allowance. It is in the controller's own namespace, where tenants
/// cannot write.
pub const NAME: &str = "aliquot-moves";
/// Key of the only entry in the ConfigMap.
const ENTRY: &str = "moves";

/// The number of moves that an hour allows, and the moves that count against it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allowance {
    /// The most moves that may begin within any hour.
    pub per_hour: usize,
    /// When moves began, in seconds of Unix time, by the UID of the pod that was moved.
    begun: BTreeMap<String, i64>,
}

impl Allowance {
    /// Creates an allowance against which no moves count yet.
    pub const fn new(per_hour: usize) -> Self {
        Self { per_hour, begun: BTreeMap::new() }
    }

    /// Reads the allowance from its ConfigMap; `None` if it cannot be read.
    pub fn read(map: &ConfigMap) -> Option<Self> {
        serde_json::from_str(map.data.as_ref()?.get(ENTRY)?).ok()
    }

    /// Returns the ConfigMap with the current allowance written into it.
    pub fn write(&self, mut map: ConfigMap) -> Result<ConfigMap, serde_json::Error> {
        map.metadata.name = Some(NAME.to_owned());
        map.data = Some(BTreeMap::from([(ENTRY.to_owned(), serde_json::to_string(self)?)]));
        Ok(map)
    }

    /// Returns when each move that counts now stops counting, in ascending order.
    fn ends(&self, now: i64) -> Vec<i64> {
        let mut ends: Vec<i64> = self.begun.values().map(|at| at.saturating_add(HOUR)).collect();
        ends.retain(|end| *end > now);
        ends.sort_unstable();
        ends
    }

    /// Returns how many moves may begin now.
    pub fn left(&self, now: i64) -> usize {
        self.per_hour.saturating_sub(self.ends(now).len())
    }

    /// Returns when more moves may begin than now; `None` if no move counts against the limit.
    pub fn more_at(&self, now: i64) -> Option<i64> {
        // If the limit was lowered, more moves can count than it allows.
        let ends = self.ends(now);
        ends.get(ends.len().saturating_sub(self.per_hour)).copied()
    }

    /// Records that a pod is about to be moved. Returns false, and records nothing, if the hour allows no
    /// more moves.
    pub fn begin(&mut self, pod: &Uid, now: i64) -> bool {
        self.begun.retain(|_, at| at.saturating_add(HOUR) > now);
        let others = self.begun.keys().filter(|other| **other != **pod).count();
        let may = others < self.per_hour;
        if may {
            // The same pod can come again if its earlier eviction was refused.
            self.begun.insert(pod.to_string(), now);
        }
        may
    }

    /// Removes the record of a pod that was not moved after all.
    pub fn call_off(&mut self, pod: &Uid) {
        self.begun.remove(&**pod);
    }

    /// Returns when each step can begin, for steps of so many moves, one after the other. `None` stands for a
    /// step with more moves than an hour allows.
    pub fn times(&self, steps: impl IntoIterator<Item = usize>, now: i64) -> Vec<Option<i64>> {
        let mut ends = self.ends(now);
        let mut from = now;
        let time = |moves: usize| {
            let room = self.per_hour.checked_sub(moves)?;
            let too_many = ends.len().checked_sub(room.saturating_add(1));
            let at = too_many.and_then(|last| ends.get(last)).map_or(from, |end| from.max(*end));
            from = at;
            ends.extend(std::iter::repeat_n(at.saturating_add(HOUR), moves));
            Some(at)
        };
        steps.into_iter().map(time).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{Just, Strategy, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

    fn uid(number: usize) -> Uid {
        format!("uid-{number}").as_str().into()
    }

    #[derive(Debug, Clone)]
    enum Event {
        Pass(i64),
        Begin,
        /// The API server refuses the eviction.
        CallOff,
        /// Another controller, which knows what is written down.
        Change,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            3 => (0..2_000i64).prop_map(Event::Pass),
            6 => Just(Event::Begin),
            1 => Just(Event::CallOff),
            1 => Just(Event::Change),
        ]
    }

    proptest! {
        #[test]
        fn in_any_hour_at_most_so_many_moves_begin_and_none_waits_longer_than_that(
            per_hour in 1..6usize,
            events in prop::collection::vec(event(), 1..200),
        ) {
            let mut allowance = Allowance::new(per_hour);
            let (mut now, mut begun): (i64, Vec<(Uid, i64)>) = (1_000, Vec::new());
            for (at, event) in events.into_iter().enumerate() {
                match event {
                    Event::Pass(seconds) => now += seconds,
                    Event::Begin => {
                        let within = begun.iter().filter(|(_, at)| now - at < HOUR).count();
                        prop_assert_eq!(allowance.left(now), per_hour - within);
                        prop_assert_eq!(allowance.begin(&uid(at), now), within < per_hour);
                        if within < per_hour {
                            begun.push((uid(at), now));
                        }
                    }
                    Event::CallOff => {
                        if let Some((pod, _)) = begun.pop() {
                            allowance.call_off(&pod);
                        }
                    }
                    Event::Change => {
                        let map = allowance.write(ConfigMap::default()).expect("written");
                        prop_assert_eq!(Allowance::read(&map), Some(allowance.clone()));
                        allowance = Allowance::read(&map).expect("read");
                    }
                }
            }
            for (_, first) in &begun {
                let hour = begun.iter().filter(|(_, at)| (*first..first + HOUR).contains(at));
                prop_assert!(hour.count() <= per_hour);
            }
        }

        #[test]
        fn steps_can_begin_when_it_is_said_and_no_second_before(
            per_hour in 1..6usize,
            before in prop::collection::vec(0..HOUR, 0..6),
            steps in prop::collection::vec(1..5usize, 1..6),
        ) {
            let now = 10_000;
            let mut allowance = Allowance::new(per_hour);
            let mut sorted = before;
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            for (at, ago) in sorted.into_iter().enumerate() {
                allowance.begin(&uid(at), now - ago);
            }
            let times = allowance.times(steps.iter().copied(), now);
            for (at, (moves, time)) in steps.into_iter().zip(times).enumerate() {
                let Some(time) = time else {
                    prop_assert!(moves > per_hour);
                    continue;
                };
                if at == 0 && time > now {
                    prop_assert!(allowance.left(time - 1) < moves);
                }
                prop_assert!(allowance.left(time) >= moves);
                for one in 0..moves {
                    prop_assert!(allowance.begin(&uid(100 + at * 10 + one), time));
                }
            }
        }
    }

    #[test]
    fn more_is_allowed_when_the_oldest_of_the_moves_that_count_is_an_hour_old() {
        let mut allowance = Allowance::new(2);
        assert_eq!((allowance.left(50), allowance.more_at(50)), (2, None));
        assert!(allowance.begin(&uid(1), 100) && allowance.begin(&uid(2), 200));
        assert_eq!((allowance.left(300), allowance.more_at(300)), (0, Some(100 + HOUR)));
        assert!(!allowance.begin(&uid(3), 99 + HOUR) && allowance.begin(&uid(3), 100 + HOUR));
        // With a lower bound the second has to pass, too.
        let lower = Allowance { per_hour: 1, ..allowance };
        assert_eq!((lower.left(100 + HOUR), lower.more_at(100 + HOUR)), (0, Some(100 + 2 * HOUR)));
    }

    #[test]
    fn a_pod_that_is_asked_again_counts_once_and_from_then_on() {
        let mut allowance = Allowance::new(1);
        assert!(allowance.begin(&uid(1), 0) && allowance.begin(&uid(1), 1_000));
        assert_eq!(allowance.left(HOUR), 0);
        assert_eq!(allowance.left(1_000 + HOUR), 1);
    }
}
