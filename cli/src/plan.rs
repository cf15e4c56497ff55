//! `aliquot plan --compact`: which pods the controller would move to fill gaps, and what that frees.
//! Nothing is written.

use crate::args::PlanArgs;
use crate::client::connect;
use crate::snapshot;
use aliquot_controller::compact::{Gaps, Outline, Stays, Terms, in_the_way, outline};
use aliquot_controller::decide::{Matcher, Options};
use anyhow::{Context, Result};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest search.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs it.
///
/// # Errors
/// If the API does not answer.
pub(crate) async fn run(args: PlanArgs) -> Result<()> {
    let client = connect(args.kubeconfig.as_deref()).await?;
    let mut index = snapshot::gather(&client, &args.driver_name).await.context("cannot read the cluster")?;
    let terms = Terms { per_gpu: args.moves_per_gpu.get(), ..Terms::default() };
    let until = Instant::now() + PATIENCE;
    let options = Options::default();
    let outline =
        outline(&mut index, &mut Matcher::new(), options, terms, &|_| true, &mut || Instant::now() >= until);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&as_json(&outline))?);
    } else {
        print!("{}", as_text(&outline, &in_the_way(&index), terms.per_gpu));
    }
    Ok(())
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

/// Those who stay, by node and GPU.
type Staying = BTreeMap<(Arc<str>, u32), BTreeSet<Stays>>;

fn as_text(outline: &Outline, staying: &Staying, moves_per_gpu: usize) -> String {
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
    for step in &outline.steps {
        let _ = writeln!(text, "\nempty gpu-{} of node {}:", step.gpu, step.node);
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
    let _ = writeln!(text, "\nafter moving {moves} pod(s): {}\nnothing was moved", gaps(outline.after));
    text
}

fn as_json(outline: &Outline) -> serde_json::Value {
    let gaps = |gaps: Gaps| {
        json!({"wholeMilliGpus": gaps.whole, "partialMilliGpus": gaps.partial,
               "fragmentationPermille": gaps.fragmentation()})
    };
    let steps: Vec<_> = outline
        .steps
        .iter()
        .map(|step| {
            let moves: Vec<_> = step
                .moves
                .iter()
                .map(|one| {
                    json!({"namespace": &*one.pod.namespace, "pod": &*one.pod.name, "from": one.from,
                           "toNode": &*one.to_node, "to": one.to})
                })
                .collect();
            json!({"node": &*step.node, "gpu": step.gpu, "moves": moves})
        })
        .collect();
    json!({"before": gaps(outline.before), "after": gaps(outline.after), "steps": steps})
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_controller::compact::{Move, Step};
    use aliquot_controller::index::{Index, ObjectKey};

    #[test]
    fn a_plan_says_who_moves_where_and_what_it_gains() {
        let moves = vec![Move {
            pod: ObjectKey::new("team", "web-1"),
            uid: "u".into(),
            from: vec!["gpu-1-share".into()],
            to_node: "n2".into(),
            to: vec!["gpu-0-share".into()],
        }];
        let pool = Index::new("gpu.aliquot.dev").intern("pool");
        let outline = Outline {
            before: Gaps { whole: 0, partial: 1500 },
            after: Gaps { whole: 1000, partial: 500 },
            steps: vec![Step { node: "n1".into(), pool, gpu: 1, moves }],
        };
        assert_eq!(
            as_text(&outline, &Staying::new(), 4),
            "now: 0.0 GPUs are free as a whole, 1.5 in gaps of GPUs that are partly held: fragmentation 100 %\n\
             \nempty gpu-1 of node n1:\n  move pod team/web-1 from gpu-1-share to node n2, gpu-0-share\n\
             \nafter moving 1 pod(s): 1.0 GPUs are free as a whole, 0.5 in gaps of GPUs that are partly held: \
             fragmentation 33 %\nnothing was moved\n"
        );
    }

    #[test]
    fn where_nothing_can_be_moved_each_gpu_says_why() {
        let nothing =
            Outline { before: Gaps { whole: 0, partial: 500 }, after: Gaps::default(), steps: Vec::new() };
        let pod = ObjectKey::new("team", "web-1");
        let mut staying = Staying::new();
        let text = as_text(&nothing, &staying, 4);
        assert!(text.ends_with("no GPU is partly held: there is nothing to gain\n"), "{text}");
        staying.insert(("n1".into(), 0), BTreeSet::from([Stays::Forbids(pod.clone()), Stays::Ends(pod)]));
        staying.insert(("n1".into(), 1), BTreeSet::new());
        let text = as_text(&nothing, &staying, 4);
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
