//! Views that lag behind: what the API or a node showed before is shown again.

use super::*;

/// A claim that was allocated at 100, and whose end at 300 was counted, acknowledged and forgotten by its node.
fn settled(uid: &str) -> Account {
    let mut account = Account::new(0);
    settle(&mut account, uid, 100, 300);
    account
}

fn settle(account: &mut Account, uid: &str, since: i64, until: i64) {
    tell(account, uid, allocated(Some(since)), until);
    let listed =
        Sight { released: vec![release(uid, since, until).1], listed: vec![n1()], ..Sight::default() };
    tell(account, uid, listed, until + 1);
    tell(account, uid, Sight::default(), until + 2);
}

fn allocated(since: Option<i64>) -> Sight {
    Sight { allocated: Some(given(since, PART.0)), ..Sight::default() }
}

fn held(since: i64) -> Sight {
    Sight { held: vec![Taken { site: n1(), since, part: PART }], ..Sight::default() }
}

/// What there is of one claim changed.
fn tell(account: &mut Account, uid: &str, sight: Sight, now: i64) -> bool {
    account.observe([(uid.into(), sight)], Extent::Changed, now - 10_000, now)
}

/// Time passes.
fn wait(account: &mut Account, now: i64) {
    account.observe([], Extent::Changed, now - 10_000, now);
}

#[test]
fn a_settled_claim_that_a_lagging_view_shows_again_is_charged_nothing_more() {
    for since in [Some(100), Some(250), None] {
        let mut account = settled("a");
        assert!(!tell(&mut account, "a", allocated(since), 310), "{since:?} is nothing new");
        assert_eq!((seconds(&account, 310), account.running().0), (200, 0), "{since:?}");
        wait(&mut account, 340);
        tell(&mut account, "a", Sight::default(), 350);
        assert_eq!(seconds(&account, 400), 200, "{since:?}");
        assert!(account.loose.is_empty());
    }
}

#[test]
fn so_is_one_whose_release_is_still_listed() {
    let mut account = Account::new(0);
    tell(&mut account, "a", allocated(Some(100)), 300);
    let listed = || Sight { listed: vec![n1()], ..Sight::default() };
    tell(&mut account, "a", Sight { released: vec![release("a", 100, 300).1], ..listed() }, 301);
    tell(&mut account, "a", Sight { ..listed() }, 302);
    tell(&mut account, "a", Sight { listed: vec![n1()], ..allocated(Some(100)) }, 310);
    assert_eq!((seconds(&account, 400), account.running().0), (200, 0));
    // However long its node lists it: what is shown for so long is there.
    wait(&mut account, 300 + LAG);
    assert_eq!(account.running().0, 1);
}

#[test]
fn what_a_node_showed_before_is_not_charged_twice_either() {
    let mut account = settled("a");
    tell(&mut account, "a", held(100), 310);
    let repeated = Sight { released: vec![release("a", 100, 300).1], listed: vec![n1()], ..Sight::default() };
    tell(&mut account, "a", repeated, 320);
    tell(&mut account, "a", Sight::default(), 330);
    assert_eq!((seconds(&account, 400), account.running().0), (200, 0));
}

#[test]
fn a_new_allocation_of_a_settled_claim_is_charged_from_its_beginning() {
    let mut account = settled("a");
    assert!(tell(&mut account, "a", allocated(Some(300)), 320));
    assert_eq!((seconds(&account, 320), account.running().0), (220, 1));
    settle(&mut account, "a", 300, 400);
    assert_eq!(seconds(&account, 500), 300);
}

#[test]
fn an_allocation_without_a_time_is_told_apart_by_what_a_node_holds() {
    let mut account = settled("a");
    tell(&mut account, "a", allocated(None), 310);
    tell(&mut account, "a", Sight { held: held(315).held, ..allocated(None) }, 320);
    assert_eq!((seconds(&account, 320), account.running().0), (205, 1));
    tell(&mut account, "a", allocated(None), 330);
    assert_eq!((seconds(&account, 330), account.running().0), (215, 1), "the API shows that one");
}

#[test]
fn what_is_shown_for_longer_than_views_lag_is_charged_from_then_on() {
    for since in [Some(299), None] {
        let mut account = settled("a");
        tell(&mut account, "a", allocated(since), 310);
        wait(&mut account, 300 + LAG - 1);
        assert_eq!(account.running().0, 0, "{since:?}");
        wait(&mut account, 300 + LAG);
        wait(&mut account, 310 + LAG);
        assert_eq!((seconds(&account, 310 + LAG), account.running().0), (210, 1), "{since:?}");
        wait(&mut account, 320 + LAG);
        tell(&mut account, "a", Sight::default(), 321 + LAG);
        assert_eq!(seconds(&account, 400 + LAG), 220, "{since:?}");
    }
}

#[test]
fn what_was_held_back_wrongly_is_charged_in_full_once_its_node_releases_it() {
    let mut account = settled("a");
    // The clock of whoever allocates is behind.
    tell(&mut account, "a", allocated(Some(298)), 303);
    settle(&mut account, "a", 298, 360);
    assert_eq!(seconds(&account, 400), 260);
}

#[test]
fn the_next_controller_knows_what_was_settled() {
    let mut account = Account::restore(&settled("a").store()).unwrap();
    account.observe([("a".into(), allocated(Some(100)))], Extent::All, 0, 310);
    account.observe([], Extent::All, 0, 320);
    assert_eq!((seconds(&account, 400), account.running().0), (200, 0));
}

#[test]
fn a_settled_claim_is_forgotten_once_no_view_lags_so_far_behind() {
    let mut account = settled("a");
    wait(&mut account, 300 + LAG - 1);
    assert_eq!(account.uses.len(), 1);
    wait(&mut account, 300 + LAG);
    assert!(account.uses.is_empty() && account.settled.is_empty());
    assert_eq!((seconds(&account, 1000), account.store().claims.as_str()), (200, ""));
}

#[test]
fn only_the_newest_settled_claims_are_remembered_and_stored_beside_those_that_run() {
    let now = 1_800_000_000;
    let mut account = Account::new(0);
    fleet(&mut account, MOST_CLAIMS as i64, now);
    let many = MOST_SETTLED as i64 + 100;
    for number in 0..many {
        let uid: Arc<str> = format!("0a6d8a0e-3c1f-4e7a-9d2b-{number:012}").into();
        let at = now + number / 100;
        let released = vec![release(&uid, now - 60, at).1];
        let listed = Sight { released, listed: vec![n1()], ..Sight::default() };
        for sight in [allocated(Some(now - 60)), listed, Sight::default()] {
            account.observe([(uid.clone(), sight)], Extent::Changed, now - 86_400, at);
        }
    }
    assert_eq!(account.settled.len(), MOST_SETTLED);
    let stored = account.store();
    assert!(serde_json::to_string(&stored).unwrap().len() <= MOST_BYTES);
    assert_eq!(stored.claims.split_whitespace().count(), MOST_CLAIMS + MOST_STORED_SETTLED);
    let next = Account::restore(&stored).unwrap();
    assert_eq!((next.running(), next.watermark), (account.running(), i64::MIN), "no one else is left out");
    assert_eq!(next.settled.last(), account.settled.last(), "the newest");
    assert_eq!(next.spent(now - 86_400, now + 100), account.spent(now - 86_400, now + 100));
}

#[test]
fn forgetting_what_was_settled_visits_nothing_else() {
    let now = 1_800_000_000;
    for claims in [20, 20_000] {
        let mut account = Account::new(0);
        fleet(&mut account, claims, now);
        settle(&mut account, "a", now, now + 10);
        let before = account.visited();
        wait(&mut account, now + 10 + LAG);
        assert_eq!(account.visited(), before + 1);
        assert!(account.settled.is_empty());
    }
}

proptest! {
    /// What claims and nodes show may be from a while ago, at any time, also as the first that a controller sees.
    #[test]
    fn views_that_lag_cost_a_claim_no_more_than_their_lag(
        lives in lives(), lags in prop::collection::vec((0i64..2500, 1i64..200, 1i64..120), 1..4),
        restarts in prop::collection::btree_set(0i64..2500, 0..3),
    ) {
        let controller = restarts.into_iter().map(|at| (at, at + 1)).collect();
        let mut beside = Beside { lags: lags.clone(), ..Beside::default() };
        let account = play_beside(&lives, &controller, &Away::new(), 4000, 4000, &mut beside);
        let longest = lags.iter().map(|(_, _, lag)| lag).max().unwrap();
        let bound: Spent = lives.iter().map(|life| Spent::from(life.part) * Spent::from(60 + longest)).sum();
        let (counted, truth) = (account.spent(0, 4000), naive(&lives, &controller, 0, 4000));
        prop_assert!((counted - truth).abs() <= bound, "{counted} is not {truth} within {bound}");
        prop_assert_eq!(account.running().0, 0);
    }
}
