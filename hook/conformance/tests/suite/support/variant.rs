//! Variants of the device, under each of which every test of the limiter is to pass: what drivers differ in, or what is
//! not known of them. `ALIQUOT_TEST_VARIANT` names the one of a run, `tools/test-variants` goes through all of them. `recorded` is what a real driver was seen to be
//! like, by the file that `ALIQUOT_GPU_RECORD` names.
//!
//! A test that says by itself what its device is like ([`super::Bench::with`]) keeps to that; what it says of the driver
//! ([`super::Bench::driver`]) wins over the variant's.

use aliquot_sim_node::board::ci_profiles;
use aliquot_sim_node::{MigDevice, Node, NodeSpec, ProcessView, Record};
use std::sync::OnceLock;

/// What a run's devices are like.
#[derive(Debug)]
pub(crate) struct Variant {
    name: &'static str,
    /// How NVML names processes.
    view: ProcessView,
    /// How long a killed process's memory stays in use.
    reap_delay_ms: u64,
    /// Whether shares are of partitions: of each GPU that can be divided the whole one.
    mig: bool,
    /// Settings of the driver.
    pub(crate) driver: &'static str,
}

const PLAIN: Variant =
    Variant { name: "plain", view: ProcessView::Host, reap_delay_ms: 0, mig: false, driver: "" };
/// Code that was loaded is memory that only NVML or a node agent shows; without either no test could find it.
const UNSEEN: &str = "module_kib=0";

const ALL: [Variant; 9] = [
    PLAIN,
    Variant { name: "alias", driver: "resolver=alias", ..PLAIN },
    Variant { name: "own-pids", view: ProcessView::Own, ..PLAIN },
    Variant { name: "no-pids", view: ProcessView::Empty, driver: UNSEEN, ..PLAIN },
    Variant { name: "no-bytes", view: ProcessView::NotAvailable, driver: UNSEEN, ..PLAIN },
    Variant { name: "late-release", reap_delay_ms: 700, ..PLAIN },
    Variant { name: "eager", driver: "module_load=eager,free_syncs=0", ..PLAIN },
    Variant { name: "mig", mig: true, ..PLAIN },
    Variant { name: "slow", driver: "slice_us=500,switch_us=10,call_ns=2000", ..PLAIN },
];

impl Variant {
    /// The one of this run.
    pub(crate) fn of_this_run() -> &'static Self {
        static RECORDED: OnceLock<Variant> = OnceLock::new();
        let named = std::env::var("ALIQUOT_TEST_VARIANT").unwrap_or_else(|_| PLAIN.name.to_owned());
        if named == "recorded" {
            let record = std::env::var_os("ALIQUOT_GPU_RECORD").expect("ALIQUOT_GPU_RECORD names a record");
            return RECORDED.get_or_init(|| Self::recorded(&Record::read(record.as_ref()).unwrap()));
        }
        let names = ALL.iter().map(|variant| variant.name).collect::<Vec<_>>();
        let found = ALL.iter().find(|variant| variant.name == named);
        found.unwrap_or_else(|| panic!("ALIQUOT_TEST_VARIANT={named} is none of {names:?}"))
    }

    /// As a real driver was, but for the size of contexts: most tests count on sums that are round.
    fn recorded(record: &Record) -> Self {
        let NodeSpec { process_view: view, reap_delay_ms, .. } = PLAIN.node(["H100-80"]).recorded(record);
        let record = Record { context_mib: None, ..record.clone() };
        let unseen =
            matches!(view, ProcessView::Empty | ProcessView::NotAvailable).then(|| UNSEEN.to_owned());
        let settings: Vec<String> = record.settings().into_iter().chain(unseen).collect();
        Self { name: "recorded", view, reap_delay_ms, mig: false, driver: settings.join(",").leak() }
    }

    /// A node of these boards.
    pub(crate) fn node<const N: usize>(&self, boards: [&str; N]) -> NodeSpec {
        let mut spec =
            NodeSpec { process_view: self.view, reap_delay_ms: self.reap_delay_ms, ..NodeSpec::new(boards) };
        spec.gpus.iter_mut().for_each(|gpu| gpu.mig = self.mig);
        spec
    }

    /// The same with GPUs that are not divided, whatever the variant.
    pub(crate) fn whole<const N: usize>(&self, boards: [&str; N]) -> NodeSpec {
        Self { mig: false, ..*self }.node(boards)
    }

    /// The same with GPUs in MIG mode, whatever the variant.
    pub(crate) fn divided<const N: usize>(&self, boards: [&str; N]) -> NodeSpec {
        Self { mig: true, ..*self }.node(boards)
    }

    /// Plain, with an NVML that lists processes like this, and divided as this is.
    pub(crate) fn viewed(&self, view: ProcessView) -> Self {
        Self { mig: self.mig, view, ..PLAIN }
    }

    /// Makes its partitions on a node of it.
    pub(crate) fn partition(&self, node: &Node) {
        for gpu in node.gpus().iter().filter(|_| self.mig) {
            let whole = gpu.board.profiles.iter().max_by_key(|profile| profile.slices).unwrap();
            make(node, gpu.index, whole.name);
        }
    }
}

/// Makes a partition of a GPU, with one compute instance that takes all of it.
pub(crate) fn make(node: &Node, gpu: usize, profile: &str) -> MigDevice {
    let id = node.gpu(gpu).unwrap().board.profile_by_name(profile).unwrap().id;
    let gi = node.create_gi(gpu, id, None).unwrap();
    let all = ci_profiles(gi.profile.slices).iter().find(|ci| ci.slices == gi.profile.slices).unwrap();
    node.create_ci(gpu, gi.id, gi.serial, all.id, None).unwrap();
    node.mig_devices(gpu).unwrap().into_iter().find(|device| device.gi.id == gi.id).unwrap()
}
