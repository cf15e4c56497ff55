use super::*;

const MS: u64 = 1_000_000;
const NOW: u64 = 1_000_000 * MS;

fn until(own: &Own) -> u64 {
    own.until_ns.load(Relaxed)
}

/// A process that has launched for 100 ms at 50 %, and so waits until `NOW + 160 ms`.
fn busy() -> Own {
    let own = Own::new();
    assert_eq!(own.admit(NOW, 100 * MS, 50), Ok(()));
    assert_eq!(until(&own), NOW + 160 * MS, "it begins with 20 ms saved up");
    own
}

fn told(true_up_ns: i64) -> Grant {
    Grant { true_up_ns, ..Grant::default() }
}

fn seen(wall_ms: u64, taken_ms: u64) -> Seen {
    Seen { start_ns: NOW, end_ns: NOW + wall_ms * MS, taken_ns: taken_ms * MS, key: 1, ..Seen::default() }
}

#[test]
fn idle_time_saves_up_a_hundred_milliseconds() {
    let own = busy();
    let later = NOW + 60_000 * MS;
    let mut got = 0;
    while own.admit(later, MS, 50).is_ok() {
        got += 1;
    }
    assert_eq!(got, 101, "and the last launch");
}

#[test]
fn what_was_put_right_before_a_process_came_is_not_its() {
    let own = busy();
    own.note(false, &seen(100, 50));
    own.true_up(NOW, &told(-40 * MS as i64), 50);
    assert_eq!(until(&own), NOW + 160 * MS);
    own.true_up(NOW, &told(-50 * MS as i64), 50);
    assert_eq!(until(&own), NOW + 140 * MS, "what came later is");
}

#[test]
fn corrections_count_between_nothing_and_all_the_wall_time_of_what_was_logged() {
    for (found, wanted) in [(-1_000_000, -100), (1_000_000, 20), (-30, -30), (15, 15)] {
        let own = busy();
        own.true_up(NOW, &told(0), 50);
        own.note(false, &seen(120, 100));
        own.true_up(NOW, &told(found * MS as i64), 50);
        let wanted = (NOW + 160 * MS).saturating_add_signed(wanted * 2 * MS as i64);
        assert_eq!(until(&own), wanted, "{found}");
    }
}

#[test]
fn corrections_of_what_was_never_logged_do_not_count() {
    let own = busy();
    for found in [0, -5_000_000_000, 9_000_000_000, i64::MIN, i64::MAX, 7] {
        own.true_up(NOW, &told(found), 50);
        assert_eq!(until(&own), NOW + 160 * MS);
    }
}

#[test]
fn a_lease_that_was_not_spent_comes_back_to_what_it_was_charged_to() {
    let own = busy();
    own.give_back(NOW, Lease { ns: 10 * MS, is_borrowed: false }, 50);
    assert_eq!(until(&own), NOW + 140 * MS);
    assert_eq!(own.borrow(NOW, 10 * MS, 10), Ok(()));
    own.give_back(NOW, Lease { ns: 4 * MS, is_borrowed: true }, 50);
    assert_eq!(own.borrowed_until_ns.load(Relaxed), NOW + 96 * MS);
    assert_eq!(until(&own), NOW + 140 * MS);
}

#[test]
fn kernels_that_are_on_the_gpu_longer_than_the_share_and_its_neighbours_can_be_wait() {
    let own = Own::new();
    let grant = Grant { valid_until_ns: u64::MAX, beside_ns: 1, own_permille: 1, ..Grant::default() };
    let fresh_ns = crate::wall::WALL_SLACK_NS + 10 * MS;
    own.true_up(NOW, &grant, 50);
    // The agent was made to believe that next to nothing of it was the process's own.
    own.note(false, &Seen { fresh_ns, taken_ns: 1, ..seen(1, 0) });
    assert_eq!(own.admit(NOW, MS, 50), Err(NOW + 10 * MS));
    assert_eq!(own.borrow(NOW, MS, 50), Err(NOW + 10 * MS));
    // Nor does a launch wait for minutes after a kernel of a minute.
    assert_eq!(own.admit_overdue(NOW, MS, 50), Ok(()));
    own.true_up(NOW + 20 * MS, &grant, 50);
    assert_eq!(own.admit(NOW + 20 * MS, MS, 50), Ok(()));
}
