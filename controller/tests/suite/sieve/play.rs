//! One run of a scenario: what goes wrong in it, and whether all is well all the same.

use super::case::{Case, Write, Wrong, writes};
use super::judge;
use super::scenarios::Scenario;
use super::world::World;
use crate::common::{Running, eventually};
use aliquot_control_plane::{Fault, FaultRule, Matcher};
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// A container that is started anew is in the same pod, so it has the same name.
const IDENTITY: &str = "controller";

/// The controllers of a run: one after the other, each a user of its own to the API server.
struct Line {
    world: Arc<World>,
    args: &'static [&'static str],
    generation: u32,
    now: Option<Running>,
}

impl Line {
    fn user(&self) -> String {
        format!("c{}", self.generation)
    }

    async fn start(&mut self) {
        self.now = Some(self.next(IDENTITY).await);
    }

    async fn next(&mut self, identity: &str) -> Running {
        self.generation += 1;
        let args = [&["--lease-duration", "30s", "--retry-period", "400ms"][..], self.args].concat();
        self.world.cluster.controller_as(&self.user(), identity, &args).await
    }

    /// The controller is told to end while another one, in another pod, stands by.
    async fn hand_over(&mut self) {
        let old = self.now.take().expect("a controller");
        let next = self.next("standby").await;
        old.terminate().await;
        self.now = Some(next);
    }

    fn kill(&mut self) {
        if let Some(old) = self.now.take() {
            old.kill();
        }
    }
}

/// Does something in a runtime of its own, on this thread.
pub fn alone<T>(what: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, what)
}

/// Runs a scenario to learn which writes there are in it.
pub async fn learn(scenario: &'static Scenario) -> Vec<Write> {
    let (mut line, kubelets) = begin(scenario).await;
    let world = line.world.clone();
    let all = Matcher::verb("write").by("c1");
    let rule = world.cluster.handle.faults().add(FaultRule::always(all, Fault::Note));
    line.start().await;
    (scenario.play)(world.clone()).await;
    rest(&world, scenario).await;
    world.cluster.handle.faults().remove(rule);
    let calls = world.cluster.handle.faults().noted();
    end(line, kubelets, false).await;
    writes(&world.cluster, &calls)
}

/// Runs a scenario in which something goes wrong; whether the write came at which it does, or what is not as it must be
/// then.
pub async fn play(scenario: &'static Scenario, case: Case) -> Result<bool, String> {
    let (line, kubelets) = begin(scenario).await;
    let world = line.world.clone();
    let run = AssertUnwindSafe(play_in(line, kubelets, scenario, case)).catch_unwind().await;
    run.map_err(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        format!("{said}\nwrites:\n{}", judge::story(&world))
    })
}

async fn play_in(mut line: Line, kubelets: JoinHandle<()>, scenario: &'static Scenario, case: Case) -> bool {
    let world = line.world.clone();
    let faults = world.cluster.handle.faults();
    let rule = faults.add(case.write.rule("c1", case.wrong.fault()));
    line.start().await;
    let tenants = tokio::task::spawn_local({
        let world = world.clone();
        async move {
            (scenario.play)(world.clone()).await;
            rest(&world, scenario).await;
        }
    });
    let struck = strikes(&world, rule, case.wrong, &tenants).await;
    if struck {
        go_wrong(&mut line, scenario, case.wrong).await;
    }
    if let Err(error) = tenants.await {
        std::panic::resume_unwind(error.into_panic());
    }
    rest(&world, scenario).await;
    end(line, kubelets, case.wrong.is_stale()).await;
    struck
}

async fn begin(scenario: &'static Scenario) -> (Line, JoinHandle<()>) {
    let world = Arc::new(World::new(scenario.nodes, scenario.deletion).await);
    (scenario.prepare)(world.clone()).await;
    let kubelets = tokio::task::spawn_local(world.clone().goes_on());
    (Line { world, args: scenario.args, generation: 0, now: None }, kubelets)
}

/// Waits for the write; false if the scenario ended without it.
async fn strikes(world: &World, rule: u64, wrong: Wrong, tenants: &JoinHandle<()>) -> bool {
    let faults = world.cluster.handle.faults();
    let struck = || match wrong {
        Wrong::HandOver | Wrong::Stale(_) | Wrong::Unseen(_) => faults.hits(rule) > 0,
        _ => faults.hits(rule) > 0 && faults.is_cut_off("c1"),
    };
    while !struck() && !tenants.is_finished() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let struck = struck();
    // Not later.
    faults.remove(rule);
    struck || faults.is_cut_off("c1")
}

async fn go_wrong(line: &mut Line, scenario: &Scenario, wrong: Wrong) {
    let world = line.world.clone();
    let faults = world.cluster.handle.faults();
    match wrong {
        Wrong::CrashAfter | Wrong::CrashBefore => {
            line.kill();
            line.start().await;
        }
        Wrong::HandOver => line.hand_over().await,
        Wrong::Stale(kind) => {
            world.jolt(kind, scenario.jolt, scenario.bound_only).await;
            world.calm().await;
            faults.end_silence(None);
        }
        Wrong::Unseen(kind) => {
            world.jolt(kind, scenario.jolt, scenario.bound_only).await;
            faults.end_silence(Some(aliquot_control_plane::WatchEnd::Expire));
        }
        Wrong::StaleAfterCrash(kind) => {
            line.kill();
            line.start().await;
            // It has listed then.
            let watch = Matcher::new("watch", kind.resource()).by(&line.user());
            faults.silence(watch.clone());
            eventually("the watch", async || (faults.open_watches(&watch) > 0).then_some(())).await;
            world.jolt(kind, scenario.jolt, scenario.bound_only).await;
            world.calm().await;
            faults.end_silence(None);
        }
    }
}

/// Waits until everything is as it should be.
async fn rest(world: &World, scenario: &Scenario) {
    none("it comes to rest", || judge::at_rest(world, scenario.wait)).await;
}

/// Waits until a list is empty; fails with what is in it.
async fn none(what: &str, look: impl Fn() -> Vec<String>) {
    for _ in 0..1500 {
        if look().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never happened: {what}; {:#?}", look());
}

/// Everything goes, and nothing may be left of it, neither in the API nor in what the controller remembers.
async fn end(mut line: Line, kubelets: JoinHandle<()>, is_stale: bool) {
    let world = line.world.clone();
    world.clear().await;
    none("nothing is left", || judge::left(&world)).await;
    world.probe().await;
    if let Some(controller) = line.now.take() {
        let parked = controller.metrics.text();
        let parked = parked.lines().filter(|line| line.contains("parked_writes{") && !line.ends_with(" 0"));
        assert_eq!(parked.collect::<Vec<_>>(), Vec::<&str>::new(), "writes that wait for ever");
        controller.terminate().await;
    }
    kubelets.abort();
    let wrong = judge::ever(&world, is_stale);
    assert!(wrong.is_empty(), "{wrong:#?}");
}
