//! Writes of the controller, what goes wrong at them, and which of all that is run.

use crate::common::Cluster;
use aliquot_control_plane::{Call, Fault, FaultRule, Matcher};
use regex::Regex;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

/// A write, told from others by what it is about and how many like it came before.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Write {
    verb: String,
    resource: String,
    subresource: String,
    /// The object's name; where a part of it is made up, how it begins, and `*`.
    name: String,
    /// From 1.
    nth: u64,
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slash = if self.subresource.is_empty() { "" } else { "/" };
        let Self { verb, resource, subresource, name, nth } = self;
        write!(f, "{verb} {resource}{slash}{subresource} {name} #{nth}")
    }
}

impl Write {
    /// The rule under which this happens at the write of this user.
    pub fn rule(&self, user: &str, fault: Fault) -> FaultRule {
        let matches = Matcher::new(&self.verb, &self.resource).subresource(&self.subresource);
        FaultRule::nth(self.nth, matches.named(&self.name).by(user), fault)
    }
}

/// A UID, what an event has behind its object's name, or a companion behind its share's.
static MADE_UP: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(\.)?([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{20,}$|(?-u:\b)[0-9a-f]{6}$)")
        .expect("a pattern")
});

/// What is the same of a name in each run; `generated` are beginnings that the API server completed.
fn pattern(name: &str, generated: &BTreeSet<String>) -> String {
    let uid = MADE_UP.captures(name).and_then(|found| found.get(2)).map(|found| found.start());
    // `a-gpu-` of `a-gpu-x7k2p`, and of an event about that.
    let made = generated.iter().filter(|made| name.len() > made.len() && name.starts_with(*made));
    match uid.into_iter().chain(made.map(String::len)).min() {
        Some(end) => format!("{}*", &name[..end]),
        None => name.to_owned(),
    }
}

/// The writes among requests, in their order. Who leads is renewed by time, so that is none of them.
pub fn writes(cluster: &Cluster, calls: &[Call]) -> Vec<Write> {
    let generated: BTreeSet<String> = cluster
        .handle
        .audit(0)
        .iter()
        .filter_map(|entry| Some(entry.after.as_ref()?["metadata"]["generateName"].as_str()?.to_owned()))
        .collect();
    let mut counts: BTreeMap<[String; 4], u64> = BTreeMap::new();
    let mut writes = Vec::new();
    for call in calls.iter().filter(|call| call.resource != "leases") {
        let name = pattern(&call.name, &generated);
        let key = [call.verb.clone(), call.resource.clone(), call.subresource.clone(), name];
        let nth = counts.entry(key.clone()).or_default();
        *nth += 1;
        let [verb, resource, subresource, name] = key;
        writes.push(Write { verb, resource, subresource, name, nth: *nth });
    }
    writes
}

/// What the controller watches and decides on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Claims,
    Pods,
    Slices,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Claims, Self::Pods, Self::Slices];

    pub const fn resource(self) -> &'static str {
        match self {
            Self::Claims => "resourceclaims",
            Self::Pods => "pods",
            Self::Slices => "resourceslices",
        }
    }
}

/// What goes wrong at a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Wrong {
    /// It is carried out, its answer is lost, and the controller is dead.
    CrashAfter,
    /// It is not carried out, and the controller is dead.
    CrashBefore,
    /// The controller is told to end, and another one stands by.
    HandOver,
    /// From it on the controller sees nothing of a kind, while the world goes on; later it sees all of it.
    Stale(Kind),
    /// The controller is dead, and the next one sees nothing of a kind but its first list.
    StaleAfterCrash(Kind),
    /// The controller sees of what happens then to a kind only how it ends: its watch has expired.
    Unseen(Kind),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CrashAfter => f.write_str("crash-after"),
            Self::CrashBefore => f.write_str("crash-before"),
            Self::HandOver => f.write_str("hand-over"),
            Self::Stale(kind) => write!(f, "stale {}", kind.resource()),
            Self::StaleAfterCrash(kind) => write!(f, "crash-after, stale {}", kind.resource()),
            Self::Unseen(kind) => write!(f, "unseen {}", kind.resource()),
        }
    }
}

impl Wrong {
    fn all() -> impl Iterator<Item = Self> {
        let of_kinds =
            Kind::ALL.map(|kind| [Self::Stale(kind), Self::StaleAfterCrash(kind), Self::Unseen(kind)]);
        [Self::CrashAfter, Self::CrashBefore, Self::HandOver]
            .into_iter()
            .chain(of_kinds.into_iter().flatten())
    }

    /// Whether the controller sees late what happens.
    pub const fn is_stale(self) -> bool {
        matches!(self, Self::Stale(_) | Self::StaleAfterCrash(_) | Self::Unseen(_))
    }

    /// What happens at the write itself.
    pub fn fault(self) -> Fault {
        match self {
            Self::CrashAfter | Self::StaleAfterCrash(_) => Fault::CutOff { carried_out: true },
            Self::CrashBefore => Fault::CutOff { carried_out: false },
            Self::HandOver => Fault::Note,
            Self::Stale(kind) | Self::Unseen(kind) => Fault::Silence { resource: kind.resource().to_owned() },
        }
    }
}

/// One thing that goes wrong at one write of a scenario.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Case {
    pub scenario: &'static str,
    pub write: Write,
    pub wrong: Wrong,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.scenario, self.write, self.wrong)
    }
}

/// Of cases that are not a crash right after a write, one in so many is run usually.
const SAMPLE: u64 = 24;

/// Which cases are run: `ALIQUOT_SIEVE` is `all`, the name of one or a part of their names; a sample if it is not set.
/// `ALIQUOT_SIEVE_TIMES` says how often each.
pub fn selected(scenario: &'static str, writes: &[Write]) -> Vec<Case> {
    let wanted = std::env::var("ALIQUOT_SIEVE").unwrap_or_default();
    let times = std::env::var("ALIQUOT_SIEVE_TIMES").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let of_write = |write: &Write| {
        let write = write.clone();
        Wrong::all().map(move |wrong| Case { scenario, write: write.clone(), wrong })
    };
    let all: Vec<Case> = writes.iter().flat_map(of_write).collect();
    let is_one = all.iter().any(|case| case.to_string() == wanted);
    let is_selected = |case: &Case| match wanted.as_str() {
        "" => case.wrong == Wrong::CrashAfter || is_in_sample(case),
        "all" => true,
        name if is_one => case.to_string() == name,
        part => case.to_string().contains(part),
    };
    all.into_iter().filter(is_selected).flat_map(|case| std::iter::repeat_n(case, times)).collect()
}

fn is_in_sample(case: &Case) -> bool {
    let mut hasher = DefaultHasher::new();
    case.to_string().hash(&mut hasher);
    hasher.finish().is_multiple_of(SAMPLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_up_of_a_name_is_left_out() {
        let generated = BTreeSet::from(["a-gpu-".to_owned()]);
        let uid = "0b0dd2a4-3c5c-4c8e-9f0a-1f2e3d4c5b6a";
        for (name, wanted) in [
            ("a", "a"),
            ("a-gpu-x7k2p", "a-gpu-*"),
            ("a-gpu-", "a-gpu-"),
            (&format!("aliquot-hold-{uid}"), "aliquot-hold-*"),
            ("a-more-db9932", "a-more-*"),
            ("a.17f3a2b1c0d917f3a2b1c0d9", "a.*"),
            ("a-gpu-x7k2p.17f3a2b1c0d917f3a2b1c0d9", "a-gpu-*"),
        ] {
            assert_eq!(pattern(name, &generated), wanted, "{name}");
        }
    }
}
