//! What is written in which order, and what comes of it when things go wrong.

use super::*;
use crate::budget::account::{Account, Allocated, Sight, Site};
use aliquot_api::v1alpha1::{NodeUsageSpec, NodeUsageStatus};
use aliquot_model::MicroGpus;
use aliquot_model::charge::HeldClaim;
use kube::api::DynamicObject;
use rstest::rstest;
use serde_json::json;

/// A book, and the API server that it writes to.
struct World {
    book: Book,
    budget: DynamicObject,
    usage: NodeReport,
    version: u64,
    claims: Vec<AllocatedClaim>,
    nodes: HashSet<Arc<str>>,
    asked: HashMap<Arc<str>, MicroGpus>,
    told: Vec<(bool, String)>,
    /// Writes that fail, by kind.
    broken: &'static str,
}

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

impl World {
    fn new(spec: Value) -> Self {
        let budget = object(json!({
            "apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuBudget",
            "metadata": {"namespace": "team", "name": "gpu", "uid": "b", "resourceVersion": "1", "generation": 1},
            "spec": spec,
        }));
        let spec = NodeUsageSpec { ledger: "l1".to_owned(), ..NodeUsageSpec::default() };
        let usage = NodeReport {
            node: "n1".into(),
            version: String::new(),
            spec,
            status: NodeUsageStatus::default(),
        };
        let mut world = Self {
            book: Book::default(),
            budget,
            usage,
            version: 1,
            claims: Vec::new(),
            nodes: HashSet::from(["n1".into()]),
            asked: HashMap::new(),
            told: Vec::new(),
            broken: "",
        };
        world.restart(0);
        world
    }

    /// Another controller, which knows what is stored.
    fn restart(&mut self, now: i64) {
        self.book = Book::default();
        self.book.reset_budgets(vec![Budget::read(&self.budget).unwrap()], now);
        self.book.reset_usages(vec![self.usage.clone()]);
    }

    /// Tells the book of claims and nodes what the cluster shows.
    fn tell(&mut self) {
        let key = |claim: &AllocatedClaim| ObjectKey::new("team", &claim.uid);
        let asked = |claim: &AllocatedClaim| self.asked.get(&claim.uid).copied();
        let claims = self.claims.iter().map(|c| (key(c), AllocatedClaim { asked: asked(c), ..c.clone() }));
        self.book.read_again();
        self.book.read_claims(claims.collect::<Vec<_>>());
        let presence = if self.nodes.contains("n1") { Presence::Heard } else { Presence::Gone };
        self.book.presence("n1", presence);
    }

    /// One step; every write is done at once and seen by the watch. The kinds of the writes.
    fn step(&mut self, now: i64) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        self.tell();
        for action in self.book.step(now) {
            match action {
                Action::Store { key, uid, version, status, revision } => {
                    kinds.push("store");
                    let current = self.budget.metadata.resource_version.clone().unwrap();
                    if self.broken == "store" || version != current {
                        self.book.stored(&key, &uid, revision, None, now);
                        continue;
                    }
                    self.version += 1;
                    self.budget.data["status"] = status;
                    self.budget.metadata.resource_version = Some(self.version.to_string());
                    self.book.stored(&key, &uid, revision, Some(self.version.to_string()), now);
                    self.book.apply_budget(Budget::read(&self.budget).unwrap(), now);
                }
                Action::Acknowledge { ledger, number, .. } => {
                    kinds.push("acknowledge");
                    if self.broken != "acknowledge" {
                        self.usage.status = NodeUsageStatus { ledger, acknowledged: number };
                        self.book.apply_usage(self.usage.clone());
                    }
                }
                Action::Forget { .. } => kinds.push("forget"),
                Action::Tell { over, note, .. } => self.told.push((over, note)),
            }
        }
        kinds
    }

    fn claim(&mut self, uid: &str, since: i64) {
        self.claims.push(AllocatedClaim {
            uid: uid.into(),
            since: Some(since),
            part: Some(MicroGpus::WHOLE),
            asked: None,
            node: Some("n1".into()),
            most: MicroGpus::WHOLE,
            created: since,
        });
    }

    /// A claim that a controller saw at a second, and that is gone.
    fn ran(&mut self, uid: &str, since: i64, now: i64) {
        self.claim(uid, since);
        self.step(now);
        self.claims.retain(|claim| *claim.uid != *uid);
        self.step(now);
    }

    fn held(&self, uid: &str, since: i64) -> HeldClaim {
        HeldClaim {
            namespace: "team".to_owned(),
            name: uid.to_owned(),
            uid: uid.to_owned(),
            micro_gpus: MicroGpus::WHOLE,
            asked_micro_gpus: self.asked.get(uid).copied(),
            since,
        }
    }

    fn hold(&mut self, uid: &str, since: i64) {
        self.usage.spec.held.push(self.held(uid, since));
        self.book.apply_usage(self.usage.clone());
    }

    fn release(&mut self, number: u64, uid: &str, since: i64, until: i64) {
        let claim = self.held(uid, since);
        self.usage.spec.released.push(Release { number, claim, until });
        self.book.apply_usage(self.usage.clone());
    }

    fn status(&self, field: &str) -> String {
        self.budget.data["status"][field].as_str().unwrap_or_default().to_owned()
    }
}

fn terms(hours: &str) -> Value {
    json!({"gpuHours": hours, "window": {"rolling": "24h"}, "enforcement": "Refuse"})
}

#[test]
fn a_release_is_acknowledged_only_after_its_account_is_stored() {
    let mut world = World::new(terms("10"));
    assert_eq!(world.step(10), ["store"], "once, so that it says something");
    world.ran("a", 0, 20);
    world.release(1, "a", 0, 3600);
    world.broken = "store";
    for now in 4000..4010 {
        assert!(!world.step(now).contains(&"acknowledge"));
    }
    world.broken = "";
    let mut writes = Vec::new();
    for now in 4010..4020 {
        writes.extend(world.step(now));
    }
    assert_eq!(writes, ["store", "acknowledge"]);
    assert_eq!(world.status("used"), "1.000");
}

#[test]
fn a_controller_that_dies_before_it_acknowledges_does_not_count_twice() {
    let mut world = World::new(terms("10"));
    world.ran("a", 0, 10);
    world.release(1, "a", 0, 3600);
    world.broken = "acknowledge";
    for now in 4000..4020 {
        world.step(now);
        world.restart(now);
    }
    world.broken = "";
    for now in 4020..4060 {
        world.step(now);
    }
    assert_eq!(world.status("used"), "1.000");
    assert_eq!(world.usage.status.acknowledged, 1);
    // The node forgets it, and the account keeps it.
    world.usage.spec.released.clear();
    world.restart(4060);
    for now in 4060..4100 {
        world.step(now);
    }
    assert_eq!(world.status("used"), "1.000");
    assert_eq!(world.book.pending_releases(), 0);
}

#[test]
fn a_node_that_lost_its_ledger_begins_a_new_count() {
    let mut world = World::new(terms("10"));
    world.ran("a", 0, 10);
    world.release(1, "a", 0, 3600);
    for now in 4000..4010 {
        world.step(now);
    }
    assert_eq!(world.usage.status.acknowledged, 1);
    world.usage.spec = NodeUsageSpec { ledger: "l2".to_owned(), ..NodeUsageSpec::default() };
    world.ran("b", 4000, 4010);
    world.release(1, "b", 4000, 7600);
    for now in 8000..8040 {
        world.step(now);
    }
    assert_eq!((world.usage.status.ledger.as_str(), world.usage.status.acknowledged), ("l2", 1));
    assert_eq!(world.status("used"), "2.000");
}

#[test]
fn used_grows_while_a_claim_runs_and_stops_when_it_ends() {
    let mut world = World::new(terms("10"));
    world.claim("a", 0);
    let mut stores = 0;
    for now in 1..=3600 {
        stores += world.step(now).iter().filter(|kind| **kind == "store").count();
    }
    assert!(
        (3600 / HEARTBEAT - 5..=3600 / HEARTBEAT + 5).contains(&i64::try_from(stores).unwrap()),
        "{stores}"
    );
    assert!(
        ["0.999", "1.000", "0.997", "0.996", "0.998"].contains(&world.status("used").as_str()),
        "{}",
        world.status("used")
    );
    world.claims.clear();
    let mut stores = 0;
    for now in 3601..=7200 {
        stores += world.step(now).len();
    }
    assert!(stores <= 3, "nothing changes, nothing is written: {stores}");
    assert_eq!(world.status("used"), "1.000");
}

#[test]
fn a_used_up_budget_is_told_once_also_by_the_next_controller_and_again_when_it_is_back() {
    let mut world =
        World::new(json!({"gpuHours": "1", "window": {"rolling": "2h"}, "enforcement": "Refuse"}));
    world.claim("a", 0);
    for now in 1..=3700 {
        world.step(now);
    }
    assert_eq!(world.told.len(), 1);
    assert!(world.told[0].0 && world.told[0].1.contains("new pods wait"), "{:?}", world.told);
    let verdict = world.book.verdict("team").unwrap();
    assert!(verdict.note.contains("team/gpu") && verdict.note.contains("of 1 GPU-hours"), "{}", verdict.note);
    assert!(world.book.verdict("other").is_none(), "a namespace without a budget is not limited");
    world.restart(3700);
    world.step(3701);
    assert_eq!(world.told.len(), 1);
    world.claims.clear();
    for now in 3702..=11_000 {
        world.step(now);
    }
    assert_eq!(world.told.iter().map(|told| told.0).collect::<Vec<_>>(), [true, false]);
    assert!(world.book.verdict("team").is_none());
    assert_eq!(world.status("state"), "Within");
}

#[test]
fn a_stored_account_that_somebody_else_wrote_is_taken_over() {
    let mut world = World::new(terms("10"));
    for now in 1..30 {
        world.step(now);
    }
    // Another controller led for a while.
    let mut other = Account::new(0);
    let (part, site) = (MicroGpus::WHOLE, Some(Site::of("n1")));
    let allocated = Some(Allocated { since: Some(0), part: Some(part), site, most: part, born: 0 });
    let seen = [("x".into(), Sight { allocated, ..Sight::default() })];
    other.observe(seen, Extent::All, -100_000, 7200);
    other.observe([], Extent::All, -100_000, 7200);
    world.budget.data["status"]["account"] = json!(other.store());
    world.version += 1;
    world.budget.metadata.resource_version = Some(world.version.to_string());
    world.book.apply_budget(Budget::read(&world.budget).unwrap(), 7200);
    for now in 7200..7240 {
        world.step(now);
    }
    assert_eq!(world.status("used"), "2.000");
}

#[test]
fn a_lost_conflict_is_tried_again_with_what_is_there() {
    let mut world = World::new(terms("10"));
    world.step(1);
    // Somebody changes the spec; the watch has not shown it yet.
    world.version += 1;
    world.budget.metadata.resource_version = Some(world.version.to_string());
    world.claim("a", 0);
    assert_eq!(world.step(20), ["store"]);
    world.book.apply_budget(Budget::read(&world.budget).unwrap(), 20);
    for now in 21..30 {
        world.step(now);
    }
    assert_eq!(world.budget.data["status"]["claims"], 1);
}

#[test]
fn a_budget_that_cannot_be_written_keeps_a_bounded_number_of_stored_forms() {
    let mut world = World::new(terms("10"));
    world.broken = "store";
    for hour in 0..50 {
        world.hold(&format!("c{hour}"), hour * 3600);
        assert!(world.step(hour * 3600).contains(&"store"), "it is tried again");
    }
    let kept = world.book.budgets.values().map(|entry| entry.ours.len()).max();
    assert!(kept <= Some(3), "{kept:?}");
}

#[test]
fn a_budget_that_cannot_be_understood_says_so_and_limits_nothing() {
    let mut world =
        World::new(json!({"gpuHours": "many", "window": {"rolling": "24h"}, "enforcement": "Refuse"}));
    world.step(1);
    assert_eq!(world.status("state"), "Invalid");
    assert!(world.budget.data["status"]["conditions"][0]["message"].as_str().unwrap().contains("gpuHours"));
    assert!(world.book.verdict("team").is_none());
}

#[test]
fn what_a_node_said_is_dropped_when_the_node_is_gone_and_everything_is_counted() {
    let mut world = World::new(terms("10"));
    world.ran("a", 0, 10);
    world.release(1, "a", 0, 3600);
    world.nodes.clear();
    let mut writes = Vec::new();
    for now in 4000..4010 {
        writes.extend(world.step(now));
    }
    assert!(!writes.contains(&"forget"), "{writes:?}");
    world.usage.spec.released.clear();
    world.book.apply_usage(world.usage.clone());
    assert!(world.step(4010).contains(&"forget"));
}

#[test]
fn a_release_that_a_node_could_list_anew_is_remembered_until_no_window_has_it() {
    let mut world = World::new(terms("10"));
    world.ran("a", 0, 10);
    world.release(1, "a", 0, 3600);
    let day = 24 * 3600;
    world.nodes.clear();
    for now in (4000..3600 + day).step_by(100) {
        assert!(!world.step(now).contains(&"forget"), "at {now}");
    }
    let writes: Vec<_> = (3600 + day..3610 + day).flat_map(|now| world.step(now)).collect();
    assert!(writes.contains(&"forget"), "{writes:?}");
    world.book.delete_usage("n1");
    // The same ledger again, and nobody answered for its release as far as it knows.
    world.usage.status = NodeUsageStatus::default();
    world.nodes.insert("n1".into());
    world.book.apply_usage(world.usage.clone());
    for now in 3620 + day..3650 + day {
        world.step(now);
    }
    assert_eq!((world.usage.status.acknowledged, world.status("used")), (1, "0.000".to_owned()));
}

#[test]
fn what_a_node_said_stays_while_a_claim_that_it_held_has_its_devices() {
    let mut world = World::new(terms("10"));
    world.claim("a", 0);
    world.hold("a", 0);
    world.step(10);
    world.nodes.clear();
    for now in 11..600 {
        assert!(!world.step(now).contains(&"forget"));
    }
    world.claims.clear();
    let writes: Vec<_> = (600..610).flat_map(|now| world.step(now)).collect();
    assert!(writes.contains(&"forget"), "{writes:?}");
    assert_eq!(world.status("used"), "0.166", "600 s, until it lost them");
    world.book.delete_usage("n1");
    // It comes back, and says what it did meanwhile.
    world.usage.spec.held.clear();
    world.nodes.insert("n1".into());
    world.release(1, "a", 0, 900);
    for now in 1000..1040 {
        world.step(now);
    }
    assert_eq!((world.usage.status.acknowledged, world.status("used")), (1, "0.250".to_owned()));
}

#[test]
fn releases_of_namespaces_without_a_budget_are_acknowledged_at_once() {
    let mut world = World::new(terms("10"));
    world.step(1);
    world.release(1, "a", 0, 10);
    world.usage.spec.released[0].claim.namespace = "other".to_owned();
    world.book.apply_usage(world.usage.clone());
    assert_eq!(world.step(20), ["acknowledge"]);
}

#[test]
fn pods_of_a_used_up_budget_stand_below_all_others_in_their_own_order() {
    let terms = json!({
        "gpuHours": 0, "window": {"rolling": "24h"}, "enforcement": "LowerPriority", "lowerPriorityClassName": "low",
    });
    let mut world = World::new(terms);
    world.step(1);
    let book = &world.book;
    assert!(book.has_first_victims());
    let stand = |priority| book.standing("team", priority);
    assert!(stand(1_000_000_000) < book.standing("other", -1_000_000_000));
    assert!(stand(-5) < stand(0) && stand(0) < stand(1000));
    assert_eq!(stand(2_000_001_000), 2_000_001_000, "what keeps the cluster running stays");
    assert_eq!(book.standing("other", 7), 7);
    let mut world = World::new(terms_of("10", "LowerPriority"));
    world.step(1);
    assert!(!world.book.has_first_victims());
    assert_eq!(world.book.standing("team", 7), 7, "within its budget nothing is different");
}

fn terms_of(hours: &str, enforcement: &str) -> Value {
    json!({
        "gpuHours": hours, "window": {"rolling": "24h"}, "enforcement": enforcement, "lowerPriorityClassName": "low",
    })
}

/// A claim of a whole GPU that asked for a quarter, from second 0 to 7200, charged as a budget says; its
/// release says what it had.
#[rstest]
#[case::by_default(json!({}), "2.000")]
#[case::given(json!({"chargeSubstitutesAs": "Given"}), "2.000")]
#[case::asked(json!({"chargeSubstitutesAs": "Asked"}), "0.500")]
fn a_substitute_is_charged_as_the_budget_says(#[case] more: Value, #[case] used: &str) {
    let mut spec = terms("10");
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut world = World::new(spec);
    world.asked.insert("x".into(), MicroGpus(250_000));
    world.claim("x", 0);
    world.step(10);
    world.restart(3600);
    world.step(3600);
    world.claims.clear();
    world.release(1, "x", 0, 7200);
    world.step(7200);
    assert_eq!(world.status("used"), used);
}

/// The same of a use that no controller saw, of a claim that one saw: the node says what it had and what it asked for.
#[rstest]
#[case::by_default(json!({}), "2.000")]
#[case::asked(json!({"chargeSubstitutesAs": "Asked"}), "0.500")]
fn a_substitute_of_a_use_that_no_controller_saw_is_charged_as_the_budget_says(
    #[case] more: Value,
    #[case] used: &str,
    #[values(true, false)] still_held: bool,
) {
    let mut spec = terms("10");
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut world = World::new(spec);
    world.step(10);
    world.asked.insert("x".into(), MicroGpus(250_000));
    world.ran("x", 20, 20);
    world.restart(3600);
    if still_held {
        world.hold("x", 100);
        world.step(3700);
        world.usage.spec.held.clear();
    }
    world.release(1, "x", 100, 7300);
    world.step(7300);
    assert_eq!(world.status("used"), used);
}

#[test]
fn what_a_node_holds_counts_while_the_node_is_heard() {
    let mut world = World::new(terms("10"));
    world.ran("a", 0, 5);
    world.hold("a", 0);
    world.step(10);
    let charged = |world: &World| world.book.standings().next().unwrap().1.claims;
    assert_eq!(charged(&world), 1);
    for (presence, claims) in [(Presence::Silent, 0), (Presence::Heard, 1)] {
        world.nodes.clear();
        world.book.presence("n1", presence);
        // Past what tells the book of nodes.
        world.book.step(20);
        assert_eq!(charged(&world), claims, "{presence:?}");
    }
}

#[test]
fn a_large_account_is_not_written_for_each_claim_but_no_later_than_a_heartbeat() {
    let mut world = World::new(terms("1000000"));
    let uid = |number| format!("5b6d8a0e-3c1f-4e7a-9d2b-{number:012}");
    for number in 0..3000 {
        world.claim(&uid(number), number * 7);
    }
    let start = 100_000;
    let (mut stores, mut bytes) = (0, 0);
    for second in 0..150 {
        world.claim(&uid(10_000 + second), start + second);
        if world.step(start + second).contains(&"store") {
            stores += 1;
            bytes += world.budget.data["status"]["account"].to_string().len();
        }
    }
    assert!(stores >= 10 && bytes / 150 <= 48 * 1024, "{stores} writes, {bytes} bytes in 150 s");
    world.restart(start + 150);
    for second in 151..160 {
        world.step(start + second);
    }
    let (_, standing) = world.book.standings().next().unwrap();
    assert_eq!(standing.claims, 3150);
}

/// A node that says of a claim of the namespace what it likes.
fn stolen(claim: &str, released: bool) -> NodeReport {
    let claim = HeldClaim {
        namespace: "team".to_owned(),
        name: claim.to_owned(),
        uid: claim.to_owned(),
        micro_gpus: MicroGpus(1_000_000_000_000),
        asked_micro_gpus: None,
        since: 1_000_000,
    };
    let (held, released) = match released {
        true => (Vec::new(), vec![Release { number: 1, claim, until: 1_900_000 }]),
        false => (vec![claim], Vec::new()),
    };
    let spec = NodeUsageSpec { ledger: "l".to_owned(), held, released };
    NodeReport { node: "stolen".into(), version: String::new(), spec, status: NodeUsageStatus::default() }
}

#[rstest]
fn what_a_node_says_of_claims_that_have_nothing_of_it_uses_up_no_budget(
    #[values("no-such-claim", "runs-elsewhere", "ran-elsewhere")] claim: &str,
    #[values(false, true)] released: bool,
    #[values(false, true)] by_the_next_controller: bool,
) {
    let mut world = World::new(terms("1000"));
    world.claim("runs-elsewhere", 1_999_000);
    world.ran("ran-elsewhere", 1_999_000, 2_000_000);
    world.book.apply_usage(stolen(claim, released));
    world.book.presence("stolen", Presence::Heard);
    for now in 2_000_001..2_000_010 {
        world.step(now);
    }
    if by_the_next_controller {
        world.restart(2_000_010);
        world.book.apply_usage(stolen(claim, released));
        world.book.presence("stolen", Presence::Heard);
        world.step(2_000_010);
    }
    world.book.delete_usage("stolen");
    world.step(2_000_020);
    assert!(!world.book.refuses("team"));
    assert_eq!(world.book.standings().next().unwrap().1.used, 2020 * 1_000_000);
}
