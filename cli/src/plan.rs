//! `aliquot plan --compact`: shows which pods the controller would move to fill gaps, and what that frees.
//! Nothing is written.

use crate::args::PlanArgs;
use crate::client::{check_namespace, connect};
use crate::output::written;
use crate::snapshot;
use aliquot_allocator::api_time::time;
use aliquot_allocator::compaction::{ALLOWANCE, Allowance, Gaps, Outline, Stays, Terms, in_the_way};
use aliquot_controller::reconciler::{Reserving, Settings, plan_compaction};
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit of the search.
const PATIENCE: Duration = Duration::from_secs(60);
/// The most moves in an hour, if neither the controller nor the command line states it.
const PER_HOUR: usize = 20;

/// Runs `aliquot plan`.
///
/// # Errors
/// If the API server does not answer.
pub(crate) async fn run(args: PlanArgs) -> Result<()> {
    let client = connect(&args.cluster).await?;
    check_namespace(&client, &args.namespace).await.context("--namespace has to be that of Aliquot")?;
    let index = snapshot::gather(&client, &args.driver_name).await.context("cannot read the cluster")?;
    let allowance = allowance(&client, &args).await.context("cannot read which pods were moved")?;
    let staying = in_the_way(&index);
    let terms = Terms { per_gpu: args.moves_per_gpu.get(), ..Terms::default() };
    let until = Instant::now() + PATIENCE;
    // Reserved places are found by their pods, whatever the terms of the reservations are.
    let settings = Settings { reserving: Some(Reserving::default()), ..Settings::default() };
    let now = Timestamp::now();
    let outline = plan_compaction(index, settings, terms, now, &mut || Instant::now() >= until);
    let pace = Pace::of(&outline, &allowance, now.as_second());
    match args.output.format() {
        Some(format) => say!("{}", written(&as_json(&outline, &pace), format)?),
        None => say!("{}", as_text(&outline, &staying, terms.per_gpu, &pace).trim_end()),
    }
    Ok(())
}

/// Returns what the controller recorded about moves of the last hour.
async fn allowance(client: &Client, args: &PlanArgs) -> Result<Allowance> {
    let maps = Api::<ConfigMap>::namespaced(client.clone(), &args.namespace);
    let found = maps.get_opt(ALLOWANCE).await?.as_ref().and_then(Allowance::read);
    let mut allowance = found.unwrap_or_else(|| Allowance::new(PER_HOUR));
    allowance.per_hour = args.moves_per_hour.unwrap_or(allowance.per_hour);
    Ok(allowance)
}

/// How fast a plan can be carried out.
struct Pace {
    per_hour: usize,
    left: usize,
    more_at: Option<i64>,
    /// The wait of each step.
    waits: Vec<Wait>,
}

/// How long a step has to wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    No,
    Until(i64),
    /// The step takes more moves than an hour allows.
    Always,
}

impl Pace {
    fn of(outline: &Outline, allowance: &Allowance, now: i64) -> Self {
        let times = allowance.times(outline.steps.iter().map(|step| step.moves.len()), now);
        let wait = |time: Option<i64>| match time {
            Some(at) if at <= now => Wait::No,
            Some(at) => Wait::Until(at),
            None => Wait::Always,
        };
        let (left, more_at) = (allowance.left(now), allowance.more_at(now));
        Self { per_hour: allowance.per_hour, left, more_at, waits: times.into_iter().map(wait).collect() }
    }

    fn limits(&self) -> bool {
        self.waits.iter().any(|wait| *wait != Wait::No)
    }
}

fn gpus(thousandths: i64) -> String {
    format!("{}.{}", thousandths / 1000, thousandths % 1000 / 100)
}

fn gaps(gaps: Gaps) -> String {
    format!(
        "{} GPUs are free as a whole, {} in gaps of GPUs that are partly held: fragmentation {} %",
        gpus(gaps.whole),
        gpus(gaps.partial),
        gaps.fragmentation() / 10
    )
}

/// The reasons why pods stay, by node and GPU.
type Staying = BTreeMap<(Arc<str>, u32), BTreeSet<Stays>>;

fn as_text(outline: &Outline, staying: &Staying, moves_per_gpu: usize, pace: &Pace) -> String {
    let mut text = format!("now: {}\n", gaps(outline.before));
    if outline.steps.is_empty() {
        text.push_str(if staying.is_empty() {
            "no GPU is partly held: there is nothing to gain\n"
        } else {
            "no GPU can be emptied:\n"
        });
        for ((node, gpu), who) in staying {
            let why: Vec<String> = who.iter().map(ToString::to_string).collect();
            let _ = match why.as_slice() {
                [] => writeln!(
                    text,
                    "  gpu-{gpu} of node {node}: its pods may be moved, but do not fit into the gaps of other GPUs, or \
                     are more than {moves_per_gpu} (--moves-per-gpu)"
                ),
                why => writeln!(text, "  gpu-{gpu} of node {node}: {}", why.join("; ")),
            };
        }
        return text;
    }
    for (step, wait) in outline.steps.iter().zip(&pace.waits) {
        let when = match wait {
            Wait::No => String::new(),
            Wait::Until(at) => format!(", not before {}", time(*at)),
            Wait::Always => format!(", never: an hour allows {} move(s)", pace.per_hour),
        };
        let _ = writeln!(text, "\nempty gpu-{} of node {}{when}:", step.gpu, step.node);
        for one in &step.moves {
            let _ = writeln!(
                text,
                "  move pod {} from {} to node {}, {}",
                one.pod,
                one.from.join(", "),
                one.to_node,
                one.to.join(", ")
            );
        }
    }
    let moves: usize = outline.steps.iter().map(|step| step.moves.len()).sum();
    let _ = writeln!(text, "\nafter moving {moves} pod(s): {}", gaps(outline.after));
    if pace.limits() {
        let more = pace.more_at.map(|at| format!(", and more from {} on", time(at))).unwrap_or_default();
        let _ = writeln!(text, "{} of {} move(s) of this hour are left{more}", pace.left, pace.per_hour);
    }
    text.push_str("nothing was moved\n");
    text
}

fn as_json(outline: &Outline, pace: &Pace) -> serde_json::Value {
    let gaps = |gaps: Gaps| {
        json!({"wholeMilliGpus": gaps.whole, "partialMilliGpus": gaps.partial,
               "fragmentationPermille": gaps.fragmentation()})
    };
    let steps: Vec<_> = outline
        .steps
        .iter()
        .zip(&pace.waits)
        .map(|(step, wait)| {
            let moves: Vec<_> = step
                .moves
                .iter()
                .map(|one| {
                    json!({"namespace": &*one.pod.namespace, "pod": &*one.pod.name, "from": one.from,
                           "toNode": &*one.to_node, "to": one.to})
                })
                .collect();
            let not_before = match wait {
                Wait::No => None,
                Wait::Until(at) => Some(time(*at)),
                Wait::Always => Some("never".to_owned()),
            };
            json!({"node": &*step.node, "gpu": step.gpu, "moves": moves, "notBefore": not_before})
        })
        .collect();
    json!({"before": gaps(outline.before), "after": gaps(outline.after), "steps": steps,
           "movesPerHour": pace.per_hour, "movesLeft": pace.left, "moreMovesFrom": pace.more_at.map(time)})
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_allocator::compaction::{Move, Step};
    use aliquot_allocator::snapshot::{ObjectKey, Snapshot};

    #[test]
    fn a_plan_says_who_moves_where_and_what_it_gains() {
        let moves = vec![Move {
            pod: ObjectKey::new("team", "web-1"),
            uid: "u".into(),
            from: vec!["gpu-1-share".into()],
            to_node: "n2".into(),
            to: vec!["gpu-0-share".into()],
        }];
        let pool = Snapshot::new("gpu.aliquot.dev").intern("pool");
        let outline = Outline {
            before: Gaps { whole: 0, partial: 1500 },
            after: Gaps { whole: 1000, partial: 500 },
            steps: vec![Step { node: "n1".into(), pool, gpu: 1, moves }],
        };
        let text = |allowance: &Allowance| {
            as_text(&outline, &Staying::new(), 4, &Pace::of(&outline, allowance, 1_000))
        };
        assert_eq!(
            text(&Allowance::new(20)),
            "now: 0.0 GPUs are free as a whole, 1.5 in gaps of GPUs that are partly held: fragmentation 100 %\n\
             \nempty gpu-1 of node n1:\n  move pod team/web-1 from gpu-1-share to node n2, gpu-0-share\n\
             \nafter moving 1 pod(s): 1.0 GPUs are free as a whole, 0.5 in gaps of GPUs that are partly held: \
             fragmentation 33 %\nnothing was moved\n"
        );
        let mut allowance = Allowance::new(1);
        assert!(allowance.begin(&"another".into(), 0));
        let limited = text(&allowance);
        assert!(limited.contains("empty gpu-1 of node n1, not before 1970-01-01T01:00:00Z:"), "{limited}");
        let left = "0 of 1 move(s) of this hour are left, and more from 1970-01-01T01:00:00Z on\nnothing was moved\n";
        assert!(limited.ends_with(left), "{limited}");
        let json = as_json(&outline, &Pace::of(&outline, &allowance, 1_000));
        assert_eq!(
            (&json["movesLeft"], &json["steps"][0]["notBefore"]),
            (&json!(0), &json!("1970-01-01T01:00:00Z"))
        );
    }

    #[test]
    fn where_nothing_can_be_moved_each_gpu_says_why() {
        let nothing =
            Outline { before: Gaps { whole: 0, partial: 500 }, after: Gaps::default(), steps: Vec::new() };
        let pod = ObjectKey::new("team", "web-1");
        let mut staying = Staying::new();
        let pace = Pace::of(&nothing, &Allowance::new(20), 1_000);
        let text = as_text(&nothing, &staying, 4, &pace);
        assert!(text.ends_with("no GPU is partly held: there is nothing to gain\n"), "{text}");
        staying.insert(("n1".into(), 0), BTreeSet::from([Stays::Forbids(pod.clone()), Stays::Ends(pod)]));
        staying.insert(("n1".into(), 1), BTreeSet::new());
        let text = as_text(&nothing, &staying, 4, &pace);
        assert!(
            text.ends_with(
                "no GPU can be emptied:\n  gpu-0 of node n1: pod team/web-1 does not allow it (annotation \
                 aliquot.dev/compaction: Allow); pod team/web-1 is ending\n  gpu-1 of node n1: its pods may be moved, \
                 but do not fit into the gaps of other GPUs, or are more than 4 (--moves-per-gpu)\n"
            ),
            "{text}"
        );
    }
}
