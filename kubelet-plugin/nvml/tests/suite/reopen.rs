//! The library closed and opened anew when its driver is gone or another.

use aliquot_nvml::fake::{FakeGpus, FaultKind, h100_80};
use aliquot_nvml::{GpuError, Gpus, NvmlCode, NvmlGpus, Opened, Operation, Options, Pauses, Reopening};
use aliquot_sim_node::NodeSpec;
use rstest::rstest;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const NONE: Pauses = Pauses { first: Duration::ZERO, longest: Duration::ZERO };

/// A library that was opened on a fake node, what the next openings come to, and how many there were.
struct Scene {
    first: FakeGpus,
    held: Arc<AtomicBool>,
    answers: Arc<Mutex<VecDeque<Result<FakeGpus, NvmlCode>>>>,
    opened: Arc<AtomicU32>,
    gpus: Reopening,
}

fn library(gpus: FakeGpus, held: &Arc<AtomicBool>) -> Opened {
    let held = Arc::clone(held);
    Opened { gpus: Arc::new(gpus), held: Box::new(move || held.load(Ordering::Relaxed)) }
}

impl Scene {
    fn new(pauses: Pauses, answers: impl IntoIterator<Item = Result<FakeGpus, NvmlCode>>) -> Self {
        let (first, held) = (FakeGpus::new([h100_80(0)]), Arc::new(AtomicBool::new(false)));
        let answers = Arc::new(Mutex::new(answers.into_iter().collect::<VecDeque<_>>()));
        let opened = Arc::new(AtomicU32::new(0));
        let open = {
            let (answers, opened, held) = (Arc::clone(&answers), Arc::clone(&opened), Arc::clone(&held));
            move || {
                opened.fetch_add(1, Ordering::Relaxed);
                let answer = answers.lock().unwrap().pop_front().unwrap_or(Err(NvmlCode::UNKNOWN));
                let failed = |code| GpuError::of_library(Operation::Load("lib".into()), code);
                answer.map(|gpus| library(gpus, &held)).map_err(failed)
            }
        };
        let gpus = Reopening::new(library(first.clone(), &held), pauses, open);
        Self { first, held, answers, opened, gpus }
    }

    /// A look in which the driver says this.
    fn look_with(&self, code: NvmlCode) {
        self.first.fault("nvmlDeviceGetCount_v2", 1, FaultKind::Fail(code));
        assert_eq!(self.gpus.inventory().unwrap_err().code(), Some(code));
    }

    fn opened(&self) -> u32 {
        self.opened.load(Ordering::Relaxed)
    }
}

#[rstest]
#[case(NvmlCode::DRIVER_NOT_LOADED)]
#[case(NvmlCode::UNINITIALIZED)]
#[case(NvmlCode::LIB_RM_VERSION_MISMATCH)]
fn after_looks_in_a_row_without_a_driver_the_library_is_opened_anew(#[case] code: NvmlCode) {
    let other = FakeGpus::new([h100_80(0), h100_80(1)]);
    let scene = Scene::new(NONE, [Err(NvmlCode::DRIVER_NOT_LOADED), Ok(other)]);
    scene.look_with(code);
    // One look that goes well, and it counts anew.
    assert_eq!(scene.gpus.inventory().unwrap().gpus.len(), 1);
    assert_eq!(scene.gpus.inventory().unwrap().gpus.len(), 1);
    scene.look_with(code);
    scene.look_with(code);
    assert_eq!(scene.opened(), 0);
    // Closed, opened in vain, and everything is refused with the reason.
    let refused = scene.gpus.inventory().unwrap_err().to_string();
    assert_eq!(refused, "cannot load lib: NVML says DRIVER_NOT_LOADED (9); load the nvidia kernel module");
    assert_eq!(scene.gpus.gpu(&h100_80(0).uuid).unwrap_err().to_string(), refused);
    assert_eq!(scene.gpus.inventory().unwrap().gpus.len(), 2);
    assert_eq!(scene.opened(), 2);
}

#[test]
fn what_is_the_matter_with_one_gpu_or_one_call_closes_nothing() {
    let scene = Scene::new(NONE, []);
    scene.first.lose(&h100_80(0).uuid);
    for _ in 0..5 {
        assert_eq!(scene.gpus.inventory().unwrap().unreadable.len(), 1);
        scene.look_with(NvmlCode::UNKNOWN);
    }
    assert_eq!(scene.opened(), 0);
}

#[test]
fn a_library_that_somebody_still_holds_is_not_opened_beside_itself() {
    let scene = Scene::new(NONE, [Ok(FakeGpus::new([h100_80(0)]))]);
    scene.held.store(true, Ordering::Relaxed);
    scene.look_with(NvmlCode::UNINITIALIZED);
    scene.look_with(NvmlCode::UNINITIALIZED);
    assert_eq!(scene.gpus.inventory().unwrap_err().code(), Some(NvmlCode::UNINITIALIZED));
    assert_eq!(scene.opened(), 0);
    scene.held.store(false, Ordering::Relaxed);
    assert_eq!(scene.gpus.inventory().unwrap().gpus.len(), 1);
}

#[test]
fn between_attempts_there_are_pauses_in_which_nothing_is_opened() {
    let hour = Duration::from_secs(3600);
    let scene = Scene::new(Pauses { first: hour, longest: hour }, [Err(NvmlCode::DRIVER_NOT_LOADED)]);
    scene.look_with(NvmlCode::DRIVER_NOT_LOADED);
    scene.look_with(NvmlCode::DRIVER_NOT_LOADED);
    for _ in 0..5 {
        assert!(scene.gpus.inventory().is_err());
    }
    assert_eq!(scene.opened(), 1);
    assert!(scene.answers.lock().unwrap().is_empty());
}

#[test]
fn a_library_that_was_let_go_of_stays_closed_with_the_reason_until_it_may_be_opened() {
    let scene = Scene::new(NONE, [Ok(FakeGpus::new([h100_80(0), h100_80(1)]))]);
    scene.gpus.let_go("it is closed, as somebody asks");
    for _ in 0..3 {
        assert_eq!(
            scene.gpus.inventory().unwrap_err().to_string(),
            "cannot use NVML: it is closed, as somebody asks; it is opened again when that is over"
        );
    }
    assert_eq!(scene.opened(), 0);
    scene.gpus.resume();
    assert_eq!(scene.gpus.inventory().unwrap().gpus.len(), 2);
    // Of one that is open there is nothing to resume.
    scene.gpus.resume();
    assert_eq!((scene.gpus.inventory().unwrap().gpus.len(), scene.opened()), (2, 1));
}

/// Down to `dlopen`: the kernel module away, and there again in another version.
#[test]
fn a_driver_that_was_exchanged_is_read_through_its_own_library() {
    let spec = NodeSpec {
        nvml_library: aliquot_sim_node::built_library(aliquot_sim_node::NVML_LIBRARY),
        ..NodeSpec::new(["H100-80"])
    };
    let folder = tempfile::tempdir().unwrap();
    let node = aliquot_sim_node::create(folder.path(), &spec).unwrap();
    let root = folder.path().join("root");
    let open = move || {
        let link = root.join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
        let options =
            Options { library: link.canonicalize().unwrap(), sys_root: root.join("sys"), nvidia_smi: None };
        NvmlGpus::open(options).map(NvmlGpus::opened)
    };
    let gpus = Reopening::new(open().unwrap(), NONE, open);
    let uuid = gpus.inventory().unwrap().gpus.remove(0).uuid;
    let events = gpus.watch(std::slice::from_ref(&uuid)).unwrap();
    node.unload_module(true).unwrap();
    assert_eq!(gpus.gpu(&uuid).unwrap_err().code(), Some(NvmlCode::DRIVER_NOT_LOADED));
    node.load_module(Some("590.10.01")).unwrap();
    let answers = || gpus.inventory().unwrap_err().code();
    // Told once before the first look; the event set is of the former library, which is not opened beside itself.
    let mismatch = Some(NvmlCode::LIB_RM_VERSION_MISMATCH);
    assert_eq!([answers(), answers(), answers()], [mismatch; 3]);
    drop(events);
    assert_eq!(gpus.inventory().unwrap().driver.driver_version, "590.10.01");
    gpus.watch(std::slice::from_ref(&uuid)).unwrap();

    // Let go of, the module is free; and there is nobody who holds it.
    gpus.let_go("asked");
    node.unload_module(false).unwrap();
    node.load_module(None).unwrap();
    gpus.resume();
    assert_eq!(gpus.inventory().unwrap().gpus.len(), 1);

    // Loaded anew in the same version: the same file, opened anew all the same.
    node.unload_module(true).unwrap();
    node.load_module(None).unwrap();
    assert_eq!([answers(), answers()], [Some(NvmlCode::UNINITIALIZED); 2]);
    assert_eq!(gpus.inventory().unwrap().gpus.len(), 1);
}
