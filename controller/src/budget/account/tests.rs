//! The account against an accountant that sees everything and counts second by second.

use super::*;
use proptest::prelude::*;

const PART: MicroGpus = MicroGpus(250_000);

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

    fn held(&self) -> HeldClaim {
        HeldClaim {
            namespace: "team".to_owned(),
            name: self.uid.clone(),
            uid: self.uid.clone(),
            micro_gpus: MicroGpus(self.part),
            asked_micro_gpus: None,
            since: self.allocated,
        }
    }
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

/// A node's ledger: what it did, what it last told, and what was acknowledged.
#[derive(Default)]
struct Node {
    held: Vec<HeldClaim>,
    released: Vec<Release>,
    numbers: u64,
    told: (Vec<HeldClaim>, Vec<Release>),
}

impl Node {
    fn step(&mut self, lives: &[Life], agent: &Away, acknowledged: u64, now: i64) {
        for life in lives {
            let Some((prepared, unprepared)) = life.prepared else { continue };
            if prepared == now {
                self.held.push(life.held());
            }
            if unprepared == now {
                self.held.retain(|held| *held != life.held());
                self.numbers += 1;
                self.released.push(Release { number: self.numbers, claim: life.held(), until: now });
            }
        }
        if is_away(agent, now).is_none() {
            self.released.retain(|release| release.number > acknowledged);
            self.told = (self.held.clone(), self.released.clone());
        }
    }
}

/// Runs everything second by second; the account at the end.
fn play(lives: &[Life], controller: &Away, agent: &Away, end: i64, width: i64) -> Account {
    let mut node = Node::default();
    let mut account = Account::new(0);
    let mut stored = account.store();
    let (mut acknowledged, mut heartbeat) = (0, 0);
    for now in 0..=end {
        node.step(lives, agent, acknowledged, now);
        if is_away(controller, now).is_some() {
            // Whatever it knew is gone; what it had stored is not.
            account = Account::restore(&stored).expect("readable");
            continue;
        }
        let claims: Vec<AllocatedClaim> = lives
            .iter()
            .filter(|life| (life.allocated..life.deallocated).contains(&now))
            .map(|life| AllocatedClaim {
                uid: life.uid.as_str().into(),
                name: life.uid.as_str().into(),
                since: Some(life.allocated),
                part: Some(MicroGpus(life.part)),
            })
            .collect();
        let held: Vec<&HeldClaim> = node.told.0.iter().collect();
        let listed: HashSet<&str> = node.told.1.iter().map(|release| release.claim.uid.as_str()).collect();
        let released: Vec<&Release> =
            node.told.1.iter().filter(|release| release.number > acknowledged).collect();
        let observed = Observed { claims: &claims, held: &held, released: &released, listed: Some(&listed) };
        let last = node.told.1.last().map_or(0, |release| release.number);
        let changed = account.observe(&observed, now - width, now);
        if changed || now - heartbeat >= 15 {
            stored = account.store();
            heartbeat = now;
            acknowledged = acknowledged.max(last);
        }
    }
    account
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
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn it_is_off_by_at_most_a_minute_a_claim_whoever_is_away(
        lives in lives(), controller in away(3, 2500), agent in away(2, 2500), width in 200i64..4000,
    ) {
        // Long enough for everybody to be back and to have spoken.
        let end = 4000;
        let account = play(&lives, &controller, &agent, end, width);
        let bound: Spent = lives.iter().map(|life| Spent::from(life.part) * 60).sum();
        let (counted, truth) = (account.spent(end - width, end), naive(&lives, &controller, end - width, end));
        prop_assert!((counted - truth).abs() <= bound, "{counted} is not {truth} within {bound}");
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
        let stored: Stored = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(Account::restore(&stored), Some(account));
    }
}

fn claim(uid: &str, since: i64) -> AllocatedClaim {
    AllocatedClaim { uid: uid.into(), name: uid.into(), since: Some(since), part: Some(PART) }
}

fn release(number: u64, uid: &str, since: i64, until: i64) -> Release {
    let (namespace, name) = ("team".to_owned(), uid.to_owned());
    let claim =
        HeldClaim { namespace, name, uid: uid.to_owned(), micro_gpus: PART, asked_micro_gpus: None, since };
    Release { number, claim, until }
}

/// One look without nodes.
fn look(account: &mut Account, claims: &[AllocatedClaim], now: i64) -> bool {
    account.observe(&Observed { claims, ..Observed::default() }, now - 10_000, now)
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
    let release = release(1, "a", 100, 400);
    let released = [&release];
    let listed = HashSet::from(["a"]);
    let observed = Observed { released: &released, listed: Some(&listed), ..Observed::default() };
    assert!(account.observe(&observed, 0, 1000));
    for now in 1001..1010 {
        assert!(!account.observe(&observed, 0, now));
        account = Account::restore(&account.store()).unwrap();
    }
    look(&mut account, &[], 1010);
    assert!(account.uses.is_empty(), "moved into the profile when it is not listed any more");
    assert_eq!(seconds(&account, 2000), 300);
}

#[test]
fn what_a_node_holds_for_a_claim_that_was_deleted_by_force_is_charged_until_it_is_released() {
    let mut account = Account::new(0);
    look(&mut account, &[claim("a", 100)], 110);
    let held = release(1, "a", 100, 0).claim;
    let observed = Observed { held: &[&held], ..Observed::default() };
    account.observe(&observed, 0, 500);
    assert_eq!(seconds(&account, 500), 400);
    let last = release(1, "a", 100, 450);
    let listed = HashSet::from(["a"]);
    let observed = Observed { released: &[&last], listed: Some(&listed), ..Observed::default() };
    account.observe(&observed, 0, 510);
    assert_eq!(seconds(&account, 600), 350, "the release says when");
}

#[test]
fn what_ended_before_the_budget_was_made_is_not_charged() {
    let mut account = Account::new(1000);
    let old = release(1, "a", 100, 900);
    let running = claim("b", 800);
    let observed = Observed { claims: &[running], released: &[&old], ..Observed::default() };
    account.observe(&observed, 0, 1010);
    assert_eq!(seconds(&account, 1010), 210, "what runs is counted from its allocation");
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
    let unknown = AllocatedClaim { part: None, ..claim("a", 100) };
    look(&mut account, &[unknown], 200);
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
