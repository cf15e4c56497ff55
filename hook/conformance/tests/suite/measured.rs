//! What the node agent measures reaches programs in pid namespaces of their own, where NVML cannot tell them.

use crate::support::namespace::{apart, unshare};
use crate::support::{Bench, GIB, Holder, MIB, answers};
use aliquot_quota::measured::{EMPTY_SIZE, Identity, MOST_SIZE, Process, encode};
use aliquot_quota::region::RegionView;
use aliquot_sim_node::ProcessView;

/// Options of `unshare` for a container's namespaces.
fn container() -> Option<Vec<String>> {
    let options = unshare(&["-p", "-f", "--kill-child", "-m", "--mount-proc"]);
    if options.is_none() {
        eprintln!("skipped: no pid namespace can be made");
    }
    options
}

fn bench(view: ProcessView) -> Bench {
    let bench = Bench::viewed(view, ["H100-80"]).driver("");
    bench.share("a", 0, 2 * GIB);
    bench
}

fn now_ns() -> u64 {
    aliquot_arbiter::files::now_ns().unwrap()
}

fn identity(host_pid: i32) -> Identity {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{host_pid}/{name}")).unwrap();
    let link = std::fs::read_link(format!("/proc/{host_pid}/ns/pid")).unwrap();
    let status = read("status");
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    Identity {
        pid_namespace: link.to_str().unwrap().trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap(),
        start_time: read("stat").rsplit(") ").next().unwrap().split(' ').nth(19).unwrap().parse().unwrap(),
        pid: pids.split_whitespace().last().unwrap().parse().unwrap(),
    }
}

/// What the agent would measure of a share's processes, which are all but these.
fn measure(bench: &Bench, strangers: &[u32]) -> Vec<Process> {
    let region = std::fs::read(bench.region_path("a")).unwrap();
    let counted = RegionView::parse(&region).unwrap().processes().collect::<Vec<_>>();
    let seen = bench.node.processes(0).unwrap();
    let host_pids = seen.iter().map(|process| (process.host_pid.unwrap(), process.bytes));
    let own = host_pids.filter(|(pid, _)| !strangers.contains(&(*pid as u32)));
    own.map(|(pid, bytes)| {
        let identity = identity(pid);
        let is_it = |slot: &&aliquot_quota::region::ProcessUsage| {
            (slot.pid_namespace, slot.start_time, slot.pid)
                == (identity.pid_namespace, identity.start_time, identity.pid)
        };
        let slot = counted.iter().find(is_it).expect("it has an account");
        let counted_bytes = [slot.charged_bytes - slot.overhead_bytes; 2];
        Process { identity, host_pid: pid as u32, bytes, counted_bytes }
    })
    .collect()
}

fn page(processes: &[Process], taken_ns: u64, valid_ns: u64) -> Vec<u8> {
    let mut out = [0; MOST_SIZE];
    let size = encode(taken_ns, taken_ns + valid_ns, processes, &mut out);
    out[..size].to_vec()
}

fn publish(bench: &Bench, bytes: &[u8]) {
    let folder = bench.root().join("quota/a");
    std::fs::write(folder.join("measured.new"), bytes).unwrap();
    std::fs::rename(folder.join("measured.new"), folder.join("measured")).unwrap();
}

const LONG_NS: u64 = 600_000_000_000;

/// A context of 528 MiB that grows by 200 MiB which no allocation shows, and 100 MiB that one does. So 1220 MiB of
/// the quota are left, of which 1420 are thought to be.
const SCRIPT: [&str; 8] = [
    "init",
    "retain",
    "alloc:linear:100M",
    "code:209715200:0",
    "hold",
    "sleep:600",
    "alloc:linear:1400M",
    "alloc:linear:1200M",
];

#[test]
fn hidden_memory_is_charged_where_nvml_does_not_show_it() {
    let Some(options) = container() else { return };
    for view in [ProcessView::Host, ProcessView::Empty] {
        let bench = bench(view);
        let start = || Holder::start(&mut apart(&bench, &options, "", &SCRIPT));
        // Without an agent nobody knows.
        assert_eq!(start().finish(), ["0", "0", "2"], "{view:?}");
        let holder = start();
        let measured = measure(&bench, &[]);
        assert_eq!((measured.len(), measured[0].bytes), (1, 828 * MIB));
        assert_ne!(measured[0].host_pid, measured[0].identity.pid);
        publish(&bench, &page(&measured, now_ns(), LONG_NS));
        // The same bytes, and the program never asked how much it has.
        assert_eq!(holder.finish(), ["0", "2", "0"], "{view:?}");
        assert!(bench.used(0) <= 2 * GIB);
        // For those that come after it says nothing.
        assert_eq!(start().finish(), ["0", "0", "2"], "{view:?}");
    }
}

#[test]
fn what_has_run_out_or_cannot_be_read_changes_nothing() {
    let Some(options) = container() else { return };
    let bench = bench(ProcessView::Host);
    let good = |bench: &Bench| page(&measure(bench, &[]), now_ns(), LONG_NS);
    let stale = |bench: &Bench| page(&measure(bench, &[]), now_ns() - 2 * LONG_NS / 1000, LONG_NS / 1000);
    let future = |bench: &Bench| page(&measure(bench, &[]), now_ns() + LONG_NS, LONG_NS);
    type Content<'a> = &'a dyn Fn(&Bench) -> Vec<u8>;
    let cases: [(&str, Content<'_>); 9] = [
        ("stale", &stale),
        ("not yet", &future),
        ("empty", &|_| Vec::new()),
        ("short", &|bench| good(bench)[..EMPTY_SIZE + 7].to_vec()),
        ("long", &|bench| [good(bench), vec![0; 48]].concat()),
        ("huge", &|_| vec![0xff; MOST_SIZE * 9]),
        ("of nobody", &|_| page(&[], now_ns(), LONG_NS)),
        ("of a newer release", &|bench| {
            let mut bytes = good(bench);
            bytes[7] = b'2';
            bytes
        }),
        ("more than it has", &|bench| {
            let mut bytes = good(bench);
            bytes[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
            bytes
        }),
    ];
    for (what, bytes) in cases {
        let holder = Holder::start(&mut apart(&bench, &options, "", &SCRIPT));
        publish(&bench, &bytes(&bench));
        assert_eq!(holder.finish(), ["0", "0", "2"], "{what}");
    }
    // Without the account's figures, or the driver's, there is nothing to compare.
    for spoil in
        [|one: &mut Process| one.counted_bytes = [u64::MAX; 2], |one: &mut Process| one.bytes = u64::MAX]
    {
        let holder = Holder::start(&mut apart(&bench, &options, "", &SCRIPT));
        let mut measured = measure(&bench, &[]);
        spoil(&mut measured[0]);
        publish(&bench, &page(&measured, now_ns(), LONG_NS));
        assert_eq!(holder.finish(), ["0", "0", "2"]);
    }
}

#[test]
fn what_is_measured_while_a_program_allocates_blames_no_allocation() {
    let Some(options) = container() else { return };
    let bench = bench(ProcessView::Host);
    let script =
        ["init", "retain", "alloc:linear:300M", "hold", "sleep:600", "free", "hold", "sleep:600", "info"];
    let mut holder = Holder::start(&mut apart(&bench, &options, "", &script));
    // Before the agent asked the driver the program had nothing, after it 300 MiB.
    let mut measured = measure(&bench, &[]);
    measured[0].counted_bytes[0] = 0;
    publish(&bench, &page(&measured, now_ns(), LONG_NS));
    holder.step();
    assert_eq!(bench.charged("a").0, 528 * MIB);
    // What is measured is compared with what was counted then, not with what is now.
    assert_eq!(holder.finish(), ["0", &format!("0 {} {}", 2 * GIB - 528 * MIB, 2 * GIB)]);
}

#[test]
fn a_context_that_went_since_is_not_charged_again() {
    let Some(options) = container() else { return };
    let bench = bench(ProcessView::Host);
    let script = ["init", "retain", "hold", "release", "sleep:600", "retain", "info"];
    let holder = Holder::start(&mut apart(&bench, &options, "", &script));
    let mut measured = measure(&bench, &[]);
    measured[0].bytes += 300 * MIB;
    publish(&bench, &page(&measured, now_ns(), LONG_NS));
    assert_eq!(holder.finish()[2..], ["0", &format!("0 {} {}", 2 * GIB - 528 * MIB, 2 * GIB)]);
}

#[test]
fn where_nvml_names_the_nodes_pids_a_tenant_sees_its_own_processes_and_no_strangers() {
    let Some(options) = container() else { return };
    let bench = bench(ProcessView::Host);
    let mut stranger = bench.unlimited(&crate::support::built().probe);
    let stranger = Holder::start(stranger.args(["init", "retain", "hold"]));
    let host_pid = stranger.child.id();
    // A process whose pid in its namespace is the stranger's on the node.
    let before = format!(
        "echo {} > /proc/sys/kernel/ns_last_pid || exit 7; (exec \"$0\" \"$@\"); exit $?;",
        host_pid - 1
    );
    let may = apart(&bench, &options, "echo 9 > /proc/sys/kernel/ns_last_pid || exit 7;", &["init"]).output();
    if may.unwrap().status.code() == Some(7) {
        eprintln!("skipped: no pid can be chosen");
        return;
    }
    let script = ["init", "retain", "hold", "processes"];
    let listed = |answers: &[String]| answers.last().unwrap().rsplit_once(' ').unwrap().0.to_owned();
    let lists = |of: &Bench, published: bool| {
        let holder = Holder::start(&mut apart(of, &options, &before, &script));
        let measured = measure(of, &[host_pid]);
        let (own, there) = (measured[0].host_pid, measured[0].identity.pid);
        assert!(measured.len() == 1 && own != host_pid && there == host_pid, "{measured:?}");
        if published {
            publish(of, &page(&measured, now_ns(), LONG_NS));
        }
        (own, listed(&holder.finish()))
    };
    assert_eq!(lists(&bench, false).1, format!("[{host_pid}]"), "without an agent it is taken for itself");
    let (own, seen) = lists(&bench, true);
    assert_eq!(seen, format!("[{own}]"));
    // A program without memory on the GPU sees those of its claim, in a namespace of another container too.
    let holder = Holder::start(&mut apart(&bench, &options, "", &["init", "retain", "hold"]));
    let measured = measure(&bench, &[host_pid]);
    publish(&bench, &page(&measured, now_ns(), LONG_NS));
    let looker = apart(&bench, &options, &before, &["processes"]);
    assert_eq!(listed(&answers(looker)), format!("[{}]", measured[0].host_pid));
    // Those that NVML names by our own pids are seen as before.
    bench.node.set_process_view(ProcessView::Own).unwrap();
    let program = apart(&bench, &options, "", &["init", "retain", "processes"]);
    assert_eq!(answers(program)[2], "[1] 1");
    holder.kill();
    stranger.kill();
}
