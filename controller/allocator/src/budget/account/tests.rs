//! The account against an accountant that sees everything and counts second by second.

mod lagging;
mod reference;

use super::*;
use crate::budget::profile::MOST_POINTS;
use aliquot_api::v1alpha1::gpu_budget;
use proptest::prelude::*;
use reference::Simple;

const PART: MicroGpus = MicroGpus(250_000);

/// The node.
fn n1() -> Site {
    Site::of("n1")
}

/// An allocation of its devices.
fn given(since: Option<i64>, part: u64) -> Allocated {
    let part = MicroGpus(part);
    Allocated { since, part: Some(part), site: Some(n1()), most: part, born: 0 }
}

/// All that is seen at one moment.
#[derive(Debug, Clone, Default)]
struct Look {
    claims: Vec<(String, Allocated)>,
    held: Vec<(String, Taken)>,
    released: Vec<(String, Released)>,
    listed: HashSet<String>,
}

impl Look {
    fn sights(&self) -> BTreeMap<Arc<str>, Sight> {
        let mut sights: BTreeMap<Arc<str>, Sight> = BTreeMap::new();
        for (uid, claim) in &self.claims {
            sights.entry(uid.as_str().into()).or_default().allocated = Some(*claim);
        }
        for (uid, held) in &self.held {
            sights.entry(uid.as_str().into()).or_default().held.push(*held);
        }
        for (uid, release) in &self.released {
            sights.entry(uid.as_str().into()).or_default().released.push(*release);
        }
        for uid in &self.listed {
            sights.entry(uid.as_str().into()).or_default().listed = vec![n1()];
        }
        sights
    }
}

/// What really happens to a claim, in seconds.
#[derive(Debug, Clone)]
struct Life {
    uid: String,
    part: u64,
    allocated: i64,
    /// Prepared and unprepared.
    prepared: Option<(i64, i64)>,
    deallocated: i64,
}

/// When somebody is away.
type Away = Vec<(i64, i64)>;

fn is_away(away: &Away, at: i64) -> Option<(i64, i64)> {
    away.iter().copied().find(|(from, to)| (*from..*to).contains(&at))
}

impl Life {
    /// When the naive accountant says that it ends. What nobody prepared and vanishes while no
    /// controller looks is charged as far as somebody looked: that is the rule.
    fn end(&self, controller: &Away) -> i64 {
        match self.prepared {
            Some((_, unprepared)) => unprepared.max(self.deallocated),
            // What ends in the second in which the controller is back was not seen to the end either.
            None => is_away(controller, self.deallocated - 1).map_or(self.deallocated, |(from, _)| from),
        }
    }

    fn taken(&self) -> Taken {
        Taken { site: n1(), since: self.allocated, part: MicroGpus(self.part) }
    }
}

/// The lives during which some controller looked at claims.
fn seen(lives: &[Life], controller: &Away) -> Vec<Life> {
    let unseen =
        |life: &Life| is_away(controller, life.allocated).is_some_and(|(_, back)| life.deallocated <= back);
    lives.iter().filter(|life| !unseen(life)).cloned().collect()
}

/// The same, and no node says when they ended.
fn untold(lives: &[Life]) -> Vec<Life> {
    lives.iter().map(|life| Life { prepared: None, ..life.clone() }).collect()
}

/// Counts each second of each life on its own.
fn naive(lives: &[Life], controller: &Away, since: i64, until: i64) -> Spent {
    let mut total = 0;
    for life in lives {
        for second in since..until {
            if second >= life.allocated && second < life.end(controller) {
                total += Spent::from(life.part);
            }
        }
    }
    total
}

/// A release with its number.
type End = (u64, String, Released);

/// A node's ledger: what it did, what it last told, and what was acknowledged.
#[derive(Default)]
struct Node {
    held: Vec<(String, Taken)>,
    released: Vec<End>,
    numbers: u64,
    told: (Vec<(String, Taken)>, Vec<End>),
}

impl Node {
    fn step(&mut self, lives: &[Life], agent: &Away, acknowledged: u64, now: i64) {
        for life in lives {
            let Some((prepared, unprepared)) = life.prepared else { continue };
            if prepared == now {
                self.held.push((life.uid.clone(), life.taken()));
            }
            if unprepared == now {
                self.held.retain(|(uid, held)| *uid != life.uid || *held != life.taken());
                self.numbers += 1;
                let released = Released { taken: life.taken(), until: now };
                self.released.push((self.numbers, life.uid.clone(), released));
            }
        }
        if is_away(agent, now).is_none() {
            self.released.retain(|(number, ..)| *number > acknowledged);
            self.told = (self.held.clone(), self.released.clone());
        }
    }
}

/// Who counts, besides the account.
#[derive(Default)]
struct Beside {
    /// Told of everything at each look, also by the simple rule. They are not compared once uses were left out.
    simple: Option<Simple>,
    /// Uses that are stored.
    most: Option<usize>,
    /// From when until when what is shown is how much older than now.
    lags: Vec<(i64, i64, i64)>,
}

impl Beside {
    /// As of when things are shown at a moment.
    fn shown(&self, now: i64) -> i64 {
        let of = |(from, length, lag): &(i64, i64, i64)| {
            if (*from..from + length).contains(&now) { *lag } else { 0 }
        };
        (now - self.lags.iter().map(of).max().unwrap_or_default()).max(0)
    }
}

/// Runs everything second by second; the account at the end.
fn play(lives: &[Life], controller: &Away, agent: &Away, end: i64, width: i64) -> Account {
    play_beside(lives, controller, agent, end, width, &mut Beside::default())
}

fn play_beside(
    lives: &[Life],
    controller: &Away,
    agent: &Away,
    end: i64,
    width: i64,
    beside: &mut Beside,
) -> Account {
    let most = beside.most.unwrap_or(MOST_CLAIMS);
    let mut node = Node::default();
    let mut account = Account { most, ..Account::new(0) };
    let mut stored = account.store();
    let (mut acknowledged, mut heartbeat) = (0, 0);
    let mut before: Option<BTreeMap<Arc<str>, Sight>> = None;
    let mut said = Vec::new();
    for now in 0..=end {
        node.step(lives, agent, acknowledged, now);
        said.push((node.told.clone(), acknowledged));
        if is_away(controller, now).is_some() {
            // Whatever it knew is gone; what it had stored is not.
            account = Account { most, ..Account::restore(&stored).expect("readable") };
            before = None;
            continue;
        }
        let shown = beside.shown(now);
        let (told, acknowledged_then) = &said[shown as usize];
        let claims = lives.iter().filter(|life| (life.allocated..life.deallocated).contains(&shown));
        let claims = claims.map(|life| (life.uid.clone(), given(Some(life.allocated), life.part)));
        let released = told.1.iter().filter(|(number, ..)| number > acknowledged_then);
        let look = Look {
            claims: claims.collect(),
            held: told.0.clone(),
            released: released.map(|(_, uid, release)| (uid.clone(), *release)).collect(),
            listed: told.1.iter().map(|(_, uid, _)| uid.clone()).collect(),
        };
        let last = told.1.last().map_or(0, |(number, ..)| *number);
        let sights = look.sights();
        let keep = now - width;
        let changed = match before.replace(sights.clone()) {
            // A look tells of what changed.
            Some(before) => {
                let gone = before.keys().filter(|uid| !sights.contains_key(*uid));
                let gone: Vec<_> = gone.map(|uid| (uid.clone(), Sight::default())).collect();
                let other = sights.into_iter().filter(|(uid, sight)| before.get(uid) != Some(sight));
                account.observe(other.chain(gone), Extent::Changed, keep, now)
            }
            None => account.observe(sights, Extent::All, keep, now),
        };
        if let Some(simple) = &mut beside.simple {
            simple.observe(&look, keep, now);
            assert_eq!(account.running(), simple.running(), "at {now}");
            assert_eq!(account.spent(keep, now), simple.spent(keep, now), "at {now}");
        }
        if changed || now - heartbeat >= 15 {
            stored = account.store();
            assert!(stored.len() <= MOST_BYTES);
            heartbeat = now;
            acknowledged = acknowledged.max(last);
        }
    }
    account
}

/// Whether a node lists a claim is not stored, and what nobody lists comes last.
fn in_order(mut stored: gpu_budget::Account) -> gpu_budget::Account {
    let sites = stored.sites.text.split_whitespace();
    let mut claims: Vec<(&str, &str)> = stored.claims.split_whitespace().zip(sites).collect();
    claims.sort_unstable();
    let (claims, sites): (Vec<&str>, Vec<&str>) = claims.into_iter().unzip();
    (stored.claims, stored.sites.text) = (claims.join(" "), sites.join(" "));
    stored
}

fn away(most: usize, until: i64) -> impl Strategy<Value = Away> {
    prop::collection::vec((0..until, 1i64..400), 0..=most).prop_map(|mut list| {
        list.sort_unstable();
        let mut merged = Away::new();
        for (from, length) in list {
            // What overlaps or touches is one absence: nobody was there in between.
            match merged.last_mut() {
                Some((_, to)) if from <= *to => *to = (*to).max(from + length),
                _ => merged.push((from, from + length)),
            }
        }
        merged
    })
}

fn lives() -> impl Strategy<Value = Vec<Life>> {
    let one = (0i64..1200, 1i64..60, 1i64..400, -30i64..30, any::<bool>(), 1u64..=4, 0usize..3, 61i64..200);
    prop::collection::vec(one, 1..6).prop_map(|drawn| {
        let mut lives: Vec<Life> = Vec::new();
        for (number, (start, wait, run, order, prepared, part, again, pause)) in drawn.into_iter().enumerate()
        {
            let mut at = start;
            // A claim that outlives its pods is allocated anew.
            for _ in 0..=again {
                let (from, to) = (at + wait, at + wait + run);
                let deallocated = if prepared { (to + order).max(from + 1) } else { to };
                let prepared = prepared.then_some((from, to));
                let uid = format!("claim-{number}");
                lives.push(Life { uid, part: part * 250_000, allocated: at, prepared, deallocated });
                at = to.max(deallocated) + pause;
            }
        }
        lives
    })
}

proptest! {
    #[test]
    fn it_is_off_by_at_most_a_minute_a_claim_whoever_is_away(
        lives in lives(), controller in away(3, 2500), agent in away(2, 2500), width in 200i64..4000,
    ) {
        // Long enough for everybody to be back and to have spoken.
        let end = 4000;
        let account = play(&lives, &controller, &agent, end, width);
        let bound: Spent = lives.iter().map(|life| Spent::from(life.part) * 60).sum();
        let (counted, truth) = (account.spent(end - width, end), naive(&lives, &controller, end - width, end));
        // A node's word counts for claims that some controller saw with devices of it.
        let least = naive(&seen(&lives, &controller), &controller, end - width, end);
        prop_assert!(counted <= truth + bound, "{counted} is more than {truth} and {bound}");
        prop_assert!(counted + bound >= least, "{counted} is less than {least} by more than {bound}");
        prop_assert_eq!(account.running().0, 0);
        prop_assert_eq!(account.profile().spent(end - width, end), counted);
    }

    #[test]
    fn while_everybody_is_there_it_is_off_by_two_seconds_a_claim(lives in lives(), width in 200i64..4000) {
        let none = Away::new();
        let account = play(&lives, &none, &none, 4000, width);
        let bound: Spent = lives.iter().map(|life| Spent::from(life.part) * 2).sum();
        let (counted, truth) = (account.spent(4000 - width, 4000), naive(&lives, &none, 4000 - width, 4000));
        prop_assert!((counted - truth).abs() <= bound, "{counted} is not {truth} within {bound}");
    }

    #[test]
    fn it_is_read_as_it_was_stored(lives in lives(), controller in away(2, 1500)) {
        let account = play(&lives, &controller, &Away::new(), 800, 3000);
        let text = serde_json::to_string(&account.store()).unwrap();
        let stored: gpu_budget::Account = serde_json::from_str(&text).unwrap();
        let restored = Account::restore(&stored).unwrap();
        prop_assert_eq!(in_order(restored.store()), in_order(stored));
        prop_assert_eq!(restored.running(), account.running());
        prop_assert_eq!(restored.spent(0, 800), account.spent(0, 800));
    }

    #[test]
    fn what_changed_comes_to_the_same_as_everything_at_each_look_by_the_simple_rule(
        lives in lives(), agent in away(2, 2500), width in 200i64..4000,
    ) {
        let mut beside = Beside { simple: Some(Simple::default()), ..Beside::default() };
        play_beside(&lives, &Away::new(), &agent, 3000, width, &mut beside);
    }

    /// However few uses are stored by themselves: while controllers come and go and nodes are there.
    #[test]
    fn what_is_left_out_of_the_stored_form_is_charged_once_all_the_same(
        lives in lives(), controller in away(3, 2500), most in 0usize..4, width in 200i64..4000,
    ) {
        let mut beside = Beside { most: Some(most), ..Beside::default() };
        let account = play_beside(&lives, &controller, &Away::new(), 4000, width, &mut beside);
        let bound: Spent = lives.iter().map(|life| Spent::from(life.part) * 60).sum();
        let (counted, truth) = (account.spent(4000 - width, 4000), naive(&lives, &controller, 4000 - width, 4000));
        // Of what is left out nobody knows the node.
        let least = naive(&untold(&seen(&lives, &controller)), &controller, 4000 - width, 4000);
        prop_assert!(counted <= truth + bound, "{counted} is more than {truth} and {bound}");
        prop_assert!(counted + bound >= least, "{counted} is less than {least} by more than {bound}");
    }

    /// Whoever is away and however little is remembered: no second of a claim is charged twice.
    #[test]
    fn a_claim_is_never_charged_for_more_than_the_time_that_passed(
        lives in lives(), controller in away(3, 2500), agent in away(3, 2500), most in 0usize..4,
    ) {
        let mut beside = Beside { most: Some(most), ..Beside::default() };
        let account = play_beside(&lives, &controller, &agent, 4000, 4000, &mut beside);
        let mut longest: BTreeMap<&str, (i64, i64, u64)> = BTreeMap::new();
        for life in &lives {
            let (since, until, _) = longest.entry(&life.uid).or_insert((life.allocated, 0, life.part));
            *since = life.allocated.min(*since);
            *until = life.deallocated.max(life.prepared.map_or(0, |(_, to)| to)).max(*until);
        }
        // What a node that is away said last is believed, also once a claim that it held is gone.
        let late = |at: i64| is_away(&agent, at).map_or(at, |(_, to)| to);
        let bound: Spent = longest
            .values()
            .map(|(since, until, part)| Spent::from(late(*until) - since + 60) * Spent::from(*part))
            .sum();
        prop_assert!(account.spent(0, 4000) <= bound, "{} of {bound}", account.spent(0, 4000));
    }

    /// A store at any moment and a new controller: what was charged by then is what the next one begins with.
    #[test]
    fn what_is_charged_is_never_taken_back_by_the_next_controller(
        lives in lives(), at in 1i64..2000, most in 0usize..4,
    ) {
        let mut beside = Beside { most: Some(most), ..Beside::default() };
        let none = Away::new();
        let account = play_beside(&lives, &none, &none, at, 10_000, &mut beside);
        let next = Account::restore(&account.store()).unwrap();
        prop_assert_eq!(next.spent(0, at), account.spent(0, at));
        let later = play_beside(&lives, &vec![(at, at + 5)], &none, at + 60, 10_000, &mut beside);
        prop_assert!(later.spent(0, at) + Spent::from(PART.0) * 120 >= account.spent(0, at));
    }
}

fn claim(uid: &str, since: i64) -> (String, Allocated) {
    (uid.to_owned(), given(Some(since), PART.0))
}

fn release(uid: &str, since: i64, until: i64) -> (String, Released) {
    (uid.to_owned(), Released { taken: Taken { site: n1(), since, part: PART }, until })
}

fn see(account: &mut Account, look: &Look, keep: i64, now: i64) -> bool {
    account.observe(look.sights(), Extent::All, keep, now)
}

/// One look without nodes.
fn look(account: &mut Account, claims: &[(String, Allocated)], now: i64) -> bool {
    see(account, &Look { claims: claims.to_vec(), ..Look::default() }, now - 10_000, now)
}

fn seconds(account: &Account, now: i64) -> Spent {
    account.spent(0, now) / Spent::from(PART.0)
}

#[test]
fn a_claim_is_charged_from_its_allocation_not_from_when_it_was_seen() {
    let mut account = Account::new(0);
    assert!(look(&mut account, &[claim("a", 100)], 160));
    assert!(!look(&mut account, &[claim("a", 100)], 200), "time alone is nothing new");
    assert_eq!(seconds(&account, 200), 100);
}

#[test]
fn a_release_that_is_told_again_and_again_is_counted_once() {
    let mut account = Account::new(0);
    look(&mut account, &[claim("a", 100)], 200);
    let observed =
        Look { released: vec![release("a", 100, 400)], listed: ["a".to_owned()].into(), ..Look::default() };
    assert!(see(&mut account, &observed, 0, 1000));
    for now in 1001..1010 {
        assert!(!see(&mut account, &observed, 0, now));
        account = Account::restore(&account.store()).unwrap();
    }
    look(&mut account, &[], 1010);
    assert!(account.uses.is_empty(), "forgotten when it is not listed any more, and ended long ago");
    assert_eq!(seconds(&account, 1010), 300);
}

#[test]
fn what_a_node_holds_for_a_claim_that_was_deleted_by_force_is_charged_until_it_is_released() {
    let mut account = Account::new(0);
    look(&mut account, &[claim("a", 100)], 110);
    let held = ("a".to_owned(), Taken { site: n1(), since: 100, part: PART });
    see(&mut account, &Look { held: vec![held], ..Look::default() }, 0, 500);
    assert_eq!(seconds(&account, 500), 400);
    let last =
        Look { released: vec![release("a", 100, 450)], listed: ["a".to_owned()].into(), ..Look::default() };
    see(&mut account, &last, 0, 510);
    assert_eq!(seconds(&account, 510), 350, "the release says when");
}

#[test]
fn what_ended_before_the_budget_was_made_is_not_charged() {
    let mut account = Account::new(1000);
    let seen = Look {
        claims: vec![claim("a", 950), claim("b", 800)],
        released: vec![release("a", 100, 900)],
        ..Look::default()
    };
    see(&mut account, &seen, 0, 1010);
    assert_eq!(seconds(&account, 1010), 60 + 210, "what runs is counted from its allocation");
}

#[test]
fn an_allocation_time_in_the_future_saves_nothing() {
    let mut account = Account::new(0);
    for now in 100..=200 {
        look(&mut account, &[claim("a", 150)], now);
    }
    // It splits into two uses when the time comes, between two looks.
    assert!(seconds(&account, 200) >= 99);
}

#[test]
fn a_clock_that_is_set_back_undoes_nothing() {
    let mut account = Account::new(0);
    look(&mut account, &[claim("a", 100)], 500);
    look(&mut account, &[claim("a", 100)], 300);
    look(&mut account, &[], 310);
    assert_eq!(seconds(&account, 600), 400);
}

#[test]
fn a_part_that_becomes_known_later_is_charged_from_the_beginning() {
    let mut account = Account::new(0);
    let unknown = Allocated { part: None, ..given(Some(100), 2_000_000) };
    look(&mut account, &[("a".to_owned(), unknown)], 200);
    assert_eq!(seconds(&account, 200), 0);
    look(&mut account, &[claim("a", 100)], 300);
    assert_eq!(seconds(&account, 300), 200);
}

#[test]
fn two_releases_of_a_claim_that_was_allocated_twice_in_an_absence_are_two_uses() {
    let life = |allocated, prepared, deallocated| Life {
        uid: "a".into(),
        part: PART.0,
        allocated,
        prepared: Some(prepared),
        deallocated,
    };
    let lives = [life(282, (334, 495), 495), life(616, (668, 829), 829)];
    for away in [(465, 828), (465, 829), (465, 845), (53, 616)] {
        let account = play(&lives, &vec![away], &Away::new(), 1000, 999);
        assert_eq!(seconds(&account, 1000), 495 - 282 + 829 - 616, "away {away:?}");
    }
}

/// So many claims that run, allocated at different times of the last day.
fn fleet(account: &mut Account, claims: i64, now: i64) {
    let uid = |number| format!("5b6d8a0e-3c1f-4e7a-9d2b-{number:012}");
    let claims = (0..claims).map(|number| claim(&uid(number), now - (number * 7919) % 86_400)).collect();
    see(account, &Look { claims, ..Look::default() }, now - 86_400, now);
}

#[test]
fn twenty_thousand_claims_are_stored_in_a_bounded_form_and_charged_in_full() {
    let now = 1_800_000_000;
    let mut account = Account::new(0);
    fleet(&mut account, 20_000, now);
    let mut stored = account.store();
    let json = serde_json::to_string(&stored).unwrap();
    assert!(json.len() <= MOST_BYTES && MOST_BYTES < 450_000, "{} of {MOST_BYTES} bytes", json.len());
    assert_eq!(stored.claims.split_whitespace().count(), MOST_CLAIMS);
    assert!(stored.charged.split_whitespace().count() <= MOST_POINTS + 1);
    // Controllers that take turns, and what was stored is all that the next one knows.
    for turn in 1..=3 {
        let mut next = Account::restore(&stored).unwrap();
        fleet(&mut next, 20_000, now);
        assert_eq!(next.spent(now - 86_400, now), account.spent(now - 86_400, now), "turn {turn}");
        assert_eq!(next.running(), account.running());
        stored = next.store();
    }
}

#[test]
fn a_look_visits_what_changed_and_not_what_there_is() {
    let now = 1_800_000_000;
    for claims in [20, 20_000] {
        let mut account = Account::new(0);
        fleet(&mut account, claims, now);
        let before = account.visited();
        account.observe([], Extent::Changed, now - 86_399, now + 1);
        assert_eq!(account.visited(), before, "nothing changed");
        let new = Sight { allocated: Some(claim("new", now).1), ..Sight::default() };
        account.observe([("new".into(), new)], Extent::Changed, now - 86_398, now + 2);
        assert_eq!(account.visited(), before + 1);
    }
}

#[test]
fn uses_without_a_release_are_forgotten_from_the_oldest_on_and_their_release_is_not_charged_again() {
    let mut account = Account { most: 2, ..Account::new(0) };
    for (number, uid) in ["a", "b", "c"].into_iter().enumerate() {
        let now = 100 * (number as i64 + 1);
        look(&mut account, &[claim(uid, now - 50)], now);
    }
    look(&mut account, &[], 400);
    assert_eq!(account.loose.len(), 2, "a is forgotten, charged until 100");
    let charged = seconds(&account, 400);
    let late = |uid: &str, until| Look { released: vec![release(uid, 50, until)], ..Look::default() };
    for until in [100, 130] {
        see(&mut account, &late("a", until), 0, 500);
        assert_eq!(seconds(&account, 500), charged, "nobody knows any more that it was of that node");
    }
}

#[test]
fn an_account_in_the_former_form_is_read_and_written_in_the_new_one() {
    let stored: gpu_budget::Account = serde_json::from_value(serde_json::json!({
        "begun": 0, "seen": 1000, "history": "100:250000 200:-250000",
        "uses": [
            {"uid": "a", "claim": "a", "since": 400, "claimed": 1000, "microGpus": 250_000, "open": true},
            {"uid": "b", "claim": "b", "since": 300, "claimed": 500, "microGpus": 250_000, "open": false},
        ],
    }))
    .unwrap();
    let mut account = Account::restore(&stored).unwrap();
    assert_eq!(seconds(&account, 1000), 200 + 600 + 200);
    look(&mut account, &[claim("a", 400)], 1100);
    assert_eq!(seconds(&account, 1100), 200 + 700 + 200);
    let json = serde_json::to_value(account.store()).unwrap();
    // What a merge patch does not name stays.
    assert_eq!((&json["uses"], &json["history"]), (&serde_json::Value::Null, &serde_json::Value::Null));
    assert_eq!(seconds(&Account::restore(&serde_json::from_value(json).unwrap()).unwrap(), 1100), 1100);
}

#[test]
fn a_uid_that_is_none_breaks_no_account() {
    let mut account = Account::new(0);
    look(&mut account, &[claim("a b:c", 100), claim(&"x".repeat(70_000), 100)], 200);
    let next = Account::restore(&account.store()).unwrap();
    assert_eq!((seconds(&next, 200), next.uses.len()), (200, 0));
}

fn told(site: &str, since: i64, part: u64) -> Taken {
    Taken { site: Site::of(site), since, part: MicroGpus(part) }
}

fn changed(account: &mut Account, sight: Sight, now: i64) {
    account.observe([("a".into(), sight)], Extent::Changed, now - 10_000, now);
}

#[test]
fn what_a_node_says_of_a_claim_of_another_node_is_charged_neither_now_nor_by_the_next_controller() {
    let lie = || Sight {
        held: vec![told("n2", 0, 1_000_000_000_000)],
        released: vec![Released { taken: told("n2", 0, 1_000_000_000_000), until: 400 }],
        listed: vec![Site::of("n2")],
        ..Sight::default()
    };
    let mut account = Account::new(0);
    changed(&mut account, Sight { allocated: Some(given(Some(100), PART.0)), ..lie() }, 200);
    changed(&mut account, lie(), 200);
    let mut next = Account::restore(&account.store()).unwrap();
    for account in [&mut account, &mut next] {
        changed(account, lie(), 500);
        assert_eq!((seconds(account, 500), account.running().0), (100, 0));
    }
    // Its own node is believed.
    for account in [&mut account, &mut next] {
        changed(account, Sight { held: vec![told("n1", 100, PART.0)], ..Sight::default() }, 600);
        assert_eq!((seconds(account, 600), account.running().0), (500, 1));
    }
}

#[test]
fn a_node_is_believed_about_a_claim_of_its_own_from_when_it_was_made_and_for_no_more_than_it_is_worth() {
    let mut account = Account::new(0);
    let allocated = Some(Allocated { born: 300, ..given(Some(400), PART.0) });
    let before = Released { taken: told("n1", 0, 1_000_000_000_000), until: 350 };
    let earlier = Released { taken: told("n1", 0, 1_000_000_000_000), until: 250 };
    let sight = Sight { allocated, released: vec![earlier, before], listed: vec![n1()], ..Sight::default() };
    changed(&mut account, sight, 500);
    assert_eq!(seconds(&account, 500), 50 + 100, "an allocation that no controller saw");
}

#[test]
fn where_its_part_is_not_published_a_node_is_believed_up_to_the_number_of_its_devices() {
    let mut account = Account::new(0);
    let unknown = Allocated { part: None, most: MicroGpus(2_000_000), ..given(Some(100), 0) };
    let held = vec![told("n1", 100, 1_000_000_000_000)];
    changed(&mut account, Sight { allocated: Some(unknown), held, ..Sight::default() }, 200);
    assert_eq!(account.spent(0, 200), 100 * 2_000_000);
}

#[test]
fn nodes_that_another_release_left_in_a_stored_account_say_nothing() {
    let mut account = Account::new(0);
    changed(&mut account, Sight { allocated: Some(given(Some(100), PART.0)), ..Sight::default() }, 200);
    let mut stored = serde_json::to_value(account.store()).unwrap();
    // It writes what it knows, and leaves the rest as it is.
    stored["seen"] = serde_json::json!(210);
    stored["claims"] = serde_json::json!("b:100:210:::250000:1");
    let mut next = Account::restore(&serde_json::from_value(stored).unwrap()).unwrap();
    let held = || Sight { held: vec![told("n1", 100, PART.0)], ..Sight::default() };
    next.observe([("b".into(), held())], Extent::All, 0, 300);
    assert_eq!(next.running().0, 0);
}
