//! Habits of the CUDA driver that the simulated one has, tried by a program without the limiter.

use crate::node::line::Line;
use crate::stage::{Mode, Stage};
use serde_json::Value;

const OF: &str = "CUDA";
/// What of the answer of the role `habits` the simulated driver assumes (`simulator/cuda/README.md`).
const HABITS: [(&str, &str, u64); 8] = [
    ("first_byte", "bytes that the first small allocation takes: a slab", 2 << 20),
    ("second_byte", "bytes that the next small allocation takes", 0),
    ("three_mib", "bytes that an allocation of 3 MiB takes", 4 << 20),
    ("granularity", "least granularity of cuMemCreate in bytes", 2 << 20),
    ("pool_growth", "bytes by which a pool grows for a small allocation", 32 << 20),
    ("graph_node", "bytes that an allocation node takes when it is instantiated", 0),
    ("graph_launch", "bytes that a node of 64 MiB takes when it is launched first", 64 << 20),
    ("queue", "launches that may be outstanding on a stream", 1024),
];

/// All comparisons; those are `unknown` that the driver does not answer.
pub(crate) fn lines(stage: &Stage) -> Vec<Line> {
    let said = stage.run(Mode::Bare, None, &["habits"]).map_err(|error| format!("{error:#}"));
    HABITS.iter().map(|(field, what, assumed)| line(field, what, *assumed, said.as_ref())).collect()
}

fn line(field: &str, what: &str, assumed: u64, said: Result<&Value, &String>) -> Line {
    let value = match said {
        Ok(said) => said.get(field),
        Err(error) => return Line::unknown(OF, what, assumed, error.clone()),
    };
    match value {
        Some(Value::Number(seen)) => Line::compare(OF, what, assumed, seen),
        Some(Value::String(why)) => Line::unknown(OF, what, assumed, why.clone()),
        _ => Line::unknown(OF, what, assumed, "the program did not say it"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]
mod tests {
    use super::*;
    use crate::node::line::Verdict;
    use serde_json::json;

    #[test]
    fn a_habit_is_held_differs_or_is_unknown_with_the_reason() {
        let said = json!({"a": 5, "b": "cuX failed with 801"});
        assert_eq!(line("a", "x", 5, Ok(&said)).verdict, Verdict::Held);
        assert_eq!(line("a", "x", 6, Ok(&said)).verdict, Verdict::Differs);
        let unknown = line("b", "x", 6, Ok(&said));
        assert_eq!((unknown.verdict, unknown.reason.as_str()), (Verdict::Unknown, "cuX failed with 801"));
        assert_eq!(line("c", "x", 6, Err(&"no CUDA".to_owned())).reason, "no CUDA");
    }
}
