//! Fresh lists that come in steps.

use super::*;
use aliquot_model::names::pool_name;

/// A world with one GPU, which claim `a` has, and a pod that waits for it with claim `b`; the claims as the API has them.
fn full() -> (World, ResourceClaim, ResourceClaim) {
    let mut world = World::new(&[("n1", 1)]);
    world.one("a", &gpu());
    let job = world.take_job();
    let Job::Allocate { writes, .. } = &job else { panic!("an allocation") };
    let a = world.written("a", &gpu(), &writes[0].allocation.clone(), "a");
    world.done(job, vec![a.clone()], None);
    let b = world.claim_with("b", &gpu(), json!({}), json!({}));
    world.handle(Input::Claim(Seen::Apply(Box::new(b.clone()))));
    world.pod("b", &["b"], |_| {});
    world.work();
    world.take_jobs();
    assert!(world.has("a") && !world.has("b"));
    (world, a, b)
}

impl World {
    fn has(&self, claim: &str) -> bool {
        self.core.index().effective_allocation(&ObjectKey::new("default", claim)).is_some()
    }

    /// Whatever a turn of the loop does.
    fn round(&mut self) {
        self.work();
        self.later(1);
    }

    fn drop_all(&mut self) -> usize {
        let mut steps = 0;
        while self.core.has_steps() {
            self.core.step(self.now);
            self.round();
            steps += 1;
        }
        steps
    }
}

#[test]
fn a_device_is_never_free_while_a_list_that_names_its_claim_is_taken_in() {
    let (mut world, a, b) = full();
    for part in [Part::Begin, Part::Some(vec![b]), Part::Some(vec![a]), Part::End] {
        world.handle(Input::Claims(part));
        world.round();
        assert!(world.has("a") && !world.has("b"));
    }
    world.drop_all();
    assert!(world.has("a") && !world.has("b"));
    assert_eq!(world.take_jobs().len(), 0);
}

#[test]
fn what_a_list_does_not_name_goes_at_its_end_and_nothing_is_decided_before() {
    let (mut world, _, b) = full();
    for part in [Part::Begin, Part::Some(vec![b]), Part::End] {
        world.handle(Input::Claims(part));
        assert!(!world.core.has_work(world.now));
        world.round();
        assert!(world.has("a") && !world.has("b"));
    }
    assert_eq!(world.drop_all(), 1);
    world.round();
    assert!(!world.has("a") && world.has("b"), "its GPU is free now");
}

#[test]
fn a_claim_that_was_made_anew_while_nobody_watched_has_nothing_of_the_one_before() {
    let (mut world, a, b) = full();
    let mut again = a;
    again.metadata.uid = Some("uid-a-again".to_owned());
    again.status = None;
    for part in [Part::Begin, Part::Some(vec![again, b]), Part::End] {
        world.handle(Input::Claims(part));
    }
    world.drop_all();
    world.round();
    assert!(world.has("b"));
}

/// That a list is asked for.
fn asked(world: &mut World) {
    let (ask, mut answered) = tokio::sync::oneshot::channel();
    world.handle(Input::Claims(Part::Asked(ask)));
    assert_eq!(
        answered.try_recv(),
        Err(tokio::sync::oneshot::error::TryRecvError::Closed),
        "it was answered"
    );
}

#[test]
fn what_came_since_a_list_was_asked_for_is_not_missing_in_it() {
    let (mut world, a, b) = full();
    asked(&mut world);
    // We know what we wrote before the watch tells of it.
    let status = a.status.as_ref().map_or_else(|| json!({}), |status| json!(status));
    let c = world.claim_with("c", &gpu(), status, json!({}));
    world.handle(Input::Claim(Seen::Apply(Box::new(c.clone()))));
    for part in [Part::Begin, Part::Some(vec![a, b]), Part::End] {
        world.handle(Input::Claims(part));
    }
    world.drop_all();
    assert!(world.has("c"), "its device is taken");
    // The next list does not name it either.
    asked(&mut world);
    for part in [Part::Begin, Part::Some(Vec::new()), Part::End] {
        world.handle(Input::Claims(part));
    }
    world.drop_all();
    assert!(!world.has("c"));
}

#[test]
fn a_claim_in_the_place_of_one_that_an_older_list_still_names_stays() {
    let (mut world, a, b) = full();
    asked(&mut world);
    world.handle(Input::Claim(Seen::Delete(Box::new(a.clone()))));
    let mut again = a.clone();
    again.metadata.uid = Some("uid-a-again".to_owned());
    again.metadata.resource_version = Some(world.stamp());
    world.handle(Input::Claim(Seen::Apply(Box::new(again.clone()))));
    for part in [Part::Begin, Part::Some(vec![a.clone(), b]), Part::End] {
        world.handle(Input::Claims(part));
    }
    world.drop_all();
    assert!(world.has("a"));
    // As the watch tells.
    world.handle(Input::Claim(Seen::Delete(Box::new(a))));
    world.handle(Input::Claim(Seen::Apply(Box::new(again))));
    assert!(world.has("a"));
}

#[test]
fn what_many_lists_do_not_name_is_dropped_in_bounded_steps() {
    let mut world = World::new(&[("n1", 1)]);
    for number in 0..600 {
        world.claim(&format!("c{number}"), &gpu());
    }
    world.handle(Input::Claims(Part::Begin));
    world.handle(Input::Claims(Part::Some(Vec::new())));
    world.handle(Input::Claims(Part::End));
    assert_eq!(world.core.index().claims().count(), 600);
    assert_eq!(world.drop_all(), 3);
    assert_eq!(world.core.index().claims().count(), 0);
    assert!(world.core.is_synced());
}

#[test]
fn pods_and_slices_of_a_list_take_the_place_of_those_before() {
    let (mut world, _, _) = full();
    let version = |world: &World| {
        let pool =
            world.core.index().sym(&pool_name(DRIVER, "n1")).and_then(|name| world.core.index().pool(name));
        pool.map(|pool| pool.version)
    };
    let before = version(&world).expect("a pool");
    let slices = fixtures::slices("n1", 1, AllocatorMode::Controller, 1);
    world.handle(Input::Slices(Part::Begin));
    world.handle(Input::Slices(Part::Some(slices)));
    world.handle(Input::Slices(Part::End));
    world.drop_all();
    assert_eq!(version(&world), Some(before), "nothing of it changed");
    let slices = fixtures::slices("n2", 1, AllocatorMode::Controller, 1);
    world.handle(Input::Slices(Part::Begin));
    world.handle(Input::Slices(Part::Some(slices)));
    assert_eq!(world.core.index().pools_of_node("n1").count(), 1, "until the list ends");
    world.handle(Input::Slices(Part::End));
    world.drop_all();
    assert_eq!(world.core.index().pools_of_node("n1").count(), 0);
    assert_eq!(world.core.index().pools_of_node("n2").count(), 1);
    world.handle(Input::Pods(Part::Begin));
    world.handle(Input::Pods(Part::Some(Vec::new())));
    assert!(world.core.index().pods().count() > 0);
    world.handle(Input::Pods(Part::End));
    world.drop_all();
    assert_eq!(world.core.index().pods().count(), 0);
}
