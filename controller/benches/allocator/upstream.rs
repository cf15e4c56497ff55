//! kube-scheduler's allocator on the same clusters and claims. It is given its best case: one node
//! searched, the first on which the claim fits, while ours weighs all of them.

use crate::claims;
use crate::cluster::{Cluster, Published, Shape};
use crate::fixtures::{self, spec};
use crate::random::Random;
use crate::speed::{Times, fill};
use crate::{Args, Figure};
use aliquot_allocator::schedule::{Decision, Options};
use serde_json::json;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Sizes of clusters, in nodes of eight H100.
const SIZES: [usize; 4] = [1, 10, 50, 100];
/// Claims that are decided on each.
const CLAIMS: usize = 200;

pub(crate) fn measure(args: &Args, command: &str) -> Vec<Figure> {
    let Some(program) = std::env::var("ALIQUOT_ORACLE").ok().filter(|program| !program.is_empty()) else {
        println!("SKIPPED: kube-scheduler's allocator beside ours: ALIQUOT_ORACLE is not set");
        return Vec::new();
    };
    let mut figures = Vec::new();
    for nodes in SIZES {
        let mut cluster = Cluster::new(Options::default());
        cluster.published = Some(Published::default());
        cluster.add_nodes(nodes, &[Shape::new(0)]);
        let mut random = Random::new(args.seed);
        fill(&mut cluster, nodes, &mut random);
        let published = cluster.published.take().expect("kept");
        let wishes: Vec<usize> = (0..CLAIMS).map(|_| claims::any_profile(&mut random)).collect();
        let wished: Vec<_> = wishes
            .iter()
            .enumerate()
            .map(|(number, profile)| {
                // Without our taint it would not be theirs to give.
                fixtures::claim(&format!("w{number}"), &spec(&[tolerant(claims::by_profile(*profile))]))
            })
            .collect();
        let load = json!({
            "nodes": published.nodes, "slices": published.slices, "classes": fixtures::classes(),
            "allocated": published.allocated, "claims": wished,
        });
        let theirs = upstream(&program, &load.to_string());
        let (mut ours, mut their_times) = (Times::default(), Times::default());
        for ((number, profile), theirs) in wishes.iter().enumerate().zip(theirs) {
            let name = format!("w{number}");
            let pod = cluster.ask(&name, &spec(&[claims::by_profile(*profile)]));
            let start = Instant::now();
            let decision = cluster.decide(&pod);
            let taken = start.elapsed();
            let fits = matches!(decision, Decision::Placed(_));
            assert_eq!(fits, theirs >= 0, "{nodes} nodes, claim {number}: {decision:?}");
            if let (true, Ok(theirs)) = (fits, u64::try_from(theirs)) {
                ours.0.push(taken);
                their_times.0.push(Duration::from_nanos(theirs));
            }
            cluster.end(&name);
        }
        println!("beside kube-scheduler's allocator: {nodes} nodes, {} claims that fit", ours.0.len());
        let name = format!("allocator.vs_upstream.nodes_{nodes}");
        figures.push(Figure::new(&name, ours.at(50), "us", command).against(their_times.at(50)));
    }
    figures
}

fn tolerant(mut request: serde_json::Value) -> serde_json::Value {
    request["exactly"]["tolerations"] = json!([{"operator": "Exists"}]);
    request
}

/// Nanoseconds for each claim; negative for those that fit nowhere.
fn upstream(program: &str, load: &str) -> Vec<i64> {
    let mut child = Command::new(program)
        .arg("-speed")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program of e2e/oracle");
    child.stdin.take().expect("piped").write_all(load.as_bytes()).expect("it reads");
    let out = child.wait_with_output().expect("it ends");
    assert!(out.status.success(), "{}", out.status);
    serde_json::from_slice(&out.stdout).expect("a list of numbers")
}
