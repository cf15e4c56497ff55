use super::*;

const GIB: u64 = 1 << 30;
const SECOND: Duration = Duration::from_secs(1);

fn auditor() -> Auditor {
    Auditor::new(Settings {
        memory_percent: 5,
        memory_per_process: 256 << 20,
        time_points: 10,
        time_burst: Duration::from_secs(5),
        looks: 3,
    })
}

fn process(memory_bytes: Option<u64>, percent: u32) -> Measured {
    Measured { pid: 4711, name: None, pod: "pod".into(), memory_bytes, percent, identity: None }
}

/// A share of 10 GiB and 30 percent.
fn look(processes: Vec<Measured>) -> Look {
    Look {
        subject: ["a".to_owned()].into(),
        quota: Quota { memory_bytes: 10 * GIB, cores_percent: 30, is_soft: false },
        processes,
        region: None,
    }
}

/// For each look, what was reported.
fn reported(auditor: &mut Auditor, looks: impl IntoIterator<Item = Look>) -> Vec<Vec<(&'static str, bool)>> {
    let mut all = Vec::new();
    for look in looks {
        let verdicts = auditor.look(SECOND, &[look]);
        all.push(verdicts.iter().map(|verdict| (verdict.breach.kind(), verdict.is_new)).collect());
    }
    all
}

fn uses(gib: u64) -> Look {
    look(vec![process(Some(gib * GIB), 0)])
}

fn runs(percent: u32) -> Look {
    look(vec![process(Some(GIB), percent)])
}

#[test]
fn too_much_memory_is_reported_after_so_many_looks_in_a_row() {
    let told = reported(&mut auditor(), [12, 12, 9, 12, 12, 12, 12].map(uses));
    let (none, first, again) = (vec![], vec![("memory", true)], vec![("memory", false)]);
    assert_eq!(told, [none.clone(), none.clone(), none.clone(), none.clone(), none, first, again]);
}

#[test]
fn what_no_call_asks_for_is_forgiven() {
    // 10 GiB, 5 percent of it, and 256 MiB for each process.
    let at = |bytes: u64, processes: u64| {
        let each = (0..processes).map(|_| process(Some(bytes / processes), 0)).collect();
        reported(&mut auditor(), vec![look(each); 9]).concat().len()
    };
    let most = 10 * GIB + 10 * GIB / 100 * 5;
    assert_eq!((at(most + (256 << 20), 1), at(most + (512 << 20), 2)), (0, 0));
    assert!(at(most + (257 << 20), 1) > 0);
    // Starting processes does not raise the tolerance for ever.
    assert!(at(most + (100 << 28), 100) > 0);
}

#[test]
fn memory_of_all_processes_of_a_share_counts_together() {
    let two = look(vec![process(Some(7 * GIB), 0), process(Some(7 * GIB), 0)]);
    assert_eq!(auditor().look(SECOND, std::slice::from_ref(&two)), []);
    assert_eq!(reported(&mut auditor(), vec![two; 3])[2], [("memory", true)]);
}

#[test]
fn a_quota_that_is_lowered_binds_once_usage_came_below_it() {
    let mut auditor = auditor();
    let with = |quota: u64, used: u64| {
        let mut look = uses(used);
        look.quota.memory_bytes = quota * GIB;
        look
    };
    let told = |auditor: &mut Auditor, looks| reported(auditor, looks).concat().len();
    assert_eq!(told(&mut auditor, vec![with(10, 9), with(4, 9), with(4, 9), with(4, 9), with(4, 9)]), 0);
    // It gave its memory back, and took it again past the limiter.
    assert_eq!(told(&mut auditor, vec![with(4, 3), with(4, 9), with(4, 9)]), 0);
    assert_eq!(told(&mut auditor, vec![with(4, 9)]), 1);
    // More than it ever was allowed is more than it is allowed.
    let mut other = self::auditor();
    assert_eq!(told(&mut other, vec![with(10, 9), with(4, 12), with(4, 12), with(4, 12)]), 1);
}

#[test]
fn where_the_driver_counts_no_memory_none_is_reported() {
    assert_eq!(reported(&mut auditor(), vec![look(vec![process(None, 0)]); 9]).concat(), []);
}

#[test]
fn too_much_time_is_reported_once_it_adds_up() {
    // 60 points too much each second: 5 s after nine looks, and three looks in a row.
    let told = reported(&mut auditor(), vec![runs(100); 12]);
    let first = told.iter().position(|verdicts| !verdicts.is_empty());
    assert_eq!((first, &told[10]), (Some(10), &vec![("time", true)]));
}

#[test]
fn the_reported_rate_is_that_of_the_excess() {
    let mut auditor = auditor();
    let last = (0..20).flat_map(|_| auditor.look(SECOND, &[runs(80)])).last().unwrap();
    assert_eq!(last.breach, Breach::Time { percent: 80, quota: 30 });
}

#[test]
fn long_kernels_that_are_paid_back_are_not_reported() {
    // 6 s at once, then nothing for as long as that has to be paid for at 30 percent.
    let round = std::iter::repeat_n(runs(100), 6).chain(std::iter::repeat_n(runs(0), 14));
    let looks: Vec<Look> = std::iter::repeat_n(round, 10).flatten().collect();
    assert_eq!(reported(&mut auditor(), looks).concat(), []);
}

#[test]
fn a_share_within_its_time_is_never_reported_and_one_that_stops_is_forgiven() {
    let mut auditor = auditor();
    assert_eq!(reported(&mut auditor, vec![runs(40); 1000]).concat(), []);
    assert!(!reported(&mut auditor, vec![runs(100); 100]).concat().is_empty());
    assert_eq!(reported(&mut auditor, vec![runs(20); 40]).pop(), Some(vec![]));
}

#[test]
fn borrowed_and_unlimited_time_is_not_audited() {
    let mut soft = runs(100);
    soft.quota.is_soft = true;
    let mut free = runs(100);
    free.quota.cores_percent = 0;
    assert_eq!(reported(&mut auditor(), vec![soft; 50]).concat(), []);
    assert_eq!(reported(&mut auditor(), vec![free; 50]).concat(), []);
}

#[test]
fn a_damaged_region_is_reported() {
    let mut damaged = uses(1);
    damaged.region = Some("it has 0 bytes".into());
    assert_eq!(reported(&mut auditor(), vec![damaged; 3])[2], [("region", true)]);
}

#[test]
fn shares_that_cannot_be_told_apart_may_use_what_both_may() {
    let a = Quota { memory_bytes: GIB, cores_percent: 30, is_soft: false };
    let b = Quota { memory_bytes: 2 * GIB, cores_percent: 20, is_soft: true };
    assert_eq!(a.and(b), Quota { memory_bytes: 3 * GIB, cores_percent: 50, is_soft: true });
    let free = Quota { memory_bytes: 0, cores_percent: 80, is_soft: false };
    assert_eq!(a.and(free), Quota { memory_bytes: 0, cores_percent: 0, is_soft: false });
}
