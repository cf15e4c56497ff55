//! An explanation for programs. Field names stay the same from release to release; the texts for people do
//! not.

use super::{Explanation, Given, Nearest, Ranking, devices};
use crate::schedule::NoFit;
use serde_json::{Value, json};

impl Explanation {
    /// Returns the explanation as JSON; `state` determines which other fields there are.
    pub fn to_json(&self) -> Value {
        let mut value = json!({"state": self.state().as_str()});
        let mut add = |name: &str, what: Value| {
            if let Some(fields) = value.as_object_mut() {
                fields.insert(name.to_owned(), what);
            }
        };
        match self {
            Self::Has { given, ranking } => {
                add("claims", given.iter().map(claim).collect());
                if let Some(ranking) = ranking {
                    add("fits", fits(ranking));
                    add("reasons", reasons(&ranking.others));
                }
            }
            Self::Fits { plan, ranking } => {
                add("wouldGet", json!({"node": &*plan.node, "devices": devices(plan)}));
                add("fits", fits(ranking));
                add("reasons", reasons(&ranking.others));
            }
            Self::None { reasons: none, nearest } => {
                add("reasons", reasons(none));
                add("nearest", near(nearest));
            }
            Self::Other { words, .. } => add("message", json!(words)),
        }
        value
    }
}

fn claim(given: &Given) -> Value {
    let devices =
        given.devices.iter().map(|(request, device)| json!({"request": &**request, "device": device}));
    json!({
        "name": &*given.claim.name,
        "node": given.node.as_deref(),
        "allocatedByController": given.by_us,
        "devices": devices.collect::<Vec<_>>(),
    })
}

fn fits(ranking: &Ranking) -> Value {
    let line = |(score, node): &(crate::schedule::score::Score, std::sync::Arc<str>)| {
        let facts = ranking.options.strategy.facts(*score);
        json!({
            "node": &**node,
            "alternative": score.alternatives,
            "opensGpus": facts.opened,
            "uselessMilliGpus": facts.cost.stranded,
            "lostMilliGpus": facts.cost.lost,
            "freeMilliGpus": facts.left,
        })
    };
    ranking.fits.iter().map(line).collect()
}

fn reasons(reasons: &NoFit) -> Value {
    let line = |(reason, nodes, node): (crate::schedule::NodeReason, usize, &std::sync::Arc<str>)| json!({"nodes": nodes, "suchAs": &**node, "message": reason.to_string()});
    reasons.each().map(line).collect()
}

fn near(nearest: &Nearest) -> Value {
    match nearest {
        Nearest::IfEnded(room, lower) => json!({
            "node": &*room.plan.node,
            "devices": devices(&room.plan),
            "ifEnded": room.victims.iter().map(|victim| victim.pod.to_string()).collect::<Vec<_>>(),
            "ofLowerPriority": lower,
        }),
        Nearest::Obstacle(node, reason) => json!({"node": &**node, "message": reason.to_string()}),
        Nearest::Nowhere => Value::Null,
    }
}
