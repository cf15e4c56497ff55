//! How much more device memory than its quota a share gets, on a simulated node: of what calls ask for, and of
//! what none does.

use aliquot_e2e::figure::Figure;
use aliquot_kubelet_plugin::audit::{Look, Measured, Quota, measured};
use aliquot_kubelet_plugin::selinux::Labels;
use aliquot_quota::{GpuUuid, QuotaFile, REGION_FILE_SIZE, region};
use aliquot_sim_node::{Node, NodeSpec, Pool, ProcessView, Record, create, limiter_at};
use anyhow::{Context, Result};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const QUOTA: u64 = 4096 * MIB;
/// Options of `unshare` for a container's namespaces.
const NAMESPACES: [&str; 6] = ["-r", "-p", "-f", "--kill-child", "-m", "--mount-proc"];
/// As the chart sets it.
const INTERVAL: Duration = Duration::from_secs(2);
/// How often the driver's own account is read.
const POLL: Duration = Duration::from_millis(1);

/// Programs that take all they get, each by another family of calls. Managed memory takes the device's only where it
/// is written.
const FILLS: [&[&str]; 9] = [
    &["fill:linear:3M"],
    &["fill:linear:100K"],
    &["fill:pitched:1M"],
    &["fill:async:7M"],
    &["fill:async_ptsz:700K"],
    &["fill:array:4M"],
    &["fill:vmm:6M"],
    &["fill:mapped:2M"],
    &["graph:1G", "launch", "graph:3G", "launch", "graph:5G", "launch", "fill:linear:2M"],
];

/// What several processes do at once.
const RACE: [&str; 4] = ["fill:linear:1M", "fill:async:3M", "fill:vmm:2M", "fill:linear:300K"];

/// How much no call asks for: bytes of code, and of local memory a thread. Of the quota as much less is left.
const HIDDEN: &str = "code:100000000:2048";
/// MiB of a context of an H100 where there is no record, and of the quota that is left for it and for what is hidden.
const CONTEXT: u64 = 528;
const SPARE: u64 = 168;

pub(crate) fn figures(build: &Path, stub: &Path, dir: &Path, record: &Record) -> Result<Vec<Figure>> {
    let contained = Command::new("unshare").args(NAMESPACES).arg("true").status();
    if !contained.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: limiter.memory: no pid namespace can be made");
        return Ok(Vec::new());
    }
    let tools = Tools::new(build, stub, dir, record)?;
    let mut over = 0;
    for (number, fill) in FILLS.iter().enumerate() {
        let place = tools.place(&format!("fill-{number}"), ProcessView::Host)?;
        over = over.max(place.most_beyond(vec![place.program(true, fill)])?);
    }
    let race = |limited: bool| {
        let place = tools.place(&format!("race-{limited}"), ProcessView::Host)?;
        place.most_beyond(RACE.iter().map(|fill| place.program(limited, &[fill])).collect())
    };
    over = over.max(race(true)?);
    let wild = race(false)?;
    let mut figures = vec![Figure {
        name: "limiter.memory.over_bytes".to_owned(),
        value: over as f64,
        unit: "bytes beyond the quota, at most".to_owned(),
        baseline: wild as f64,
        ratio: over as f64 / wild as f64,
        command: format!(
            "{} families of allocation and {} processes at once fill a share of 4 GiB, simulated driver; baseline: \
             the same processes without the limiter",
            FILLS.len(),
            RACE.len()
        ),
        assumed: tools.assumed(&["resolver", "context size"], "packing of memory"),
    }];
    figures.extend(hidden(&tools)?);
    Ok(figures)
}

/// By each way in which NVML names processes inside the container.
fn hidden(tools: &Tools) -> Result<Vec<Figure>> {
    let views = [
        ("host", ProcessView::Host),
        ("own", ProcessView::Own),
        ("empty", ProcessView::Empty),
        // Where the driver counts nothing, nobody knows.
        ("not_available", ProcessView::NotAvailable),
    ];
    let (mut figures, mut worst) = (Vec::new(), 0);
    let context = tools.record.context_mib.unwrap_or(CONTEXT);
    let asked = QUOTA / MIB - SPARE;
    let asked = asked.checked_sub(context).context("a context is recorded that takes the whole quota")?;
    let asked = format!("alloc:linear:{asked}M");
    let assumed = tools.assumed(&["context size"], "memory of code");
    for (name, view) in views {
        let place = tools.place(&format!("hidden-{name}"), view)?;
        let script = [&asked, HIDDEN, "refused:linear:2M:10"];
        let started = place.program(true, &script).stdout(Stdio::piped()).spawn().context("cuda_probe")?;
        let (most, answer) = place.watch_with_agent(started, view)?;
        worst = worst.max(most.saturating_sub(QUOTA));
        let Ok(millis) = answer.parse::<f64>() else { continue };
        figures.push(Figure {
            name: format!("limiter.memory.hidden_refused_ms.{name}"),
            value: millis,
            unit: "ms until new allocations are refused".to_owned(),
            baseline: INTERVAL.as_secs_f64() * 1e3,
            ratio: millis / (INTERVAL.as_secs_f64() * 1e3),
            command: format!("{} in a pid namespace, the node agent's looks every 2 s", script.join(" ")),
            assumed: assumed.clone(),
        });
    }
    figures.insert(
        0,
        Figure {
            name: "limiter.memory.hidden_over_bytes".to_owned(),
            value: worst as f64,
            unit: "bytes beyond the quota, at most".to_owned(),
            baseline: QUOTA as f64,
            ratio: worst as f64 / QUOTA as f64,
            command: format!("{asked} {HIDDEN} in a share of 4 GiB, worst of NVML's views of processes"),
            assumed,
        },
    );
    Ok(figures)
}

struct Tools {
    program: PathBuf,
    driver: PathBuf,
    stub: PathBuf,
    dir: PathBuf,
    record: Record,
}

impl Tools {
    fn new(build: &Path, stub: &Path, dir: &Path, record: &Record) -> Result<Self> {
        let driver = dir.join("simulated");
        std::fs::create_dir_all(&driver)?;
        for (from, to) in [("libcuda.so", "libcuda.so.1"), ("libnvidia_ml.so", "libnvidia-ml.so.1")] {
            let library = build.join(from).canonicalize().with_context(|| format!("{from} is not built"))?;
            symlink(library, driver.join(to))?;
        }
        let program = build.join("examples/cuda_probe").canonicalize().context("cuda_probe is not built")?;
        Ok(Self { program, driver, stub: stub.to_owned(), dir: dir.to_owned(), record: record.clone() })
    }

    /// Which of these parameters have no record, and what never has one.
    fn assumed(&self, of: &[&str], never: &str) -> Vec<String> {
        let assumed = self.record.assumed();
        let of = of.iter().filter(|what| assumed.contains(what)).copied();
        of.chain([never]).map(str::to_owned).collect()
    }

    /// A node of one GPU with one share, as the node agent lays it out and as a container sees it.
    fn place(&self, name: &str, view: ProcessView) -> Result<Place<'_>> {
        let dir = self.dir.join(name);
        let spec = NodeSpec { process_view: view, ..NodeSpec::new(["H100-80"]).recorded(&self.record) };
        let node = create(&dir.join("node"), &spec)?;
        let uuid = &node.gpus().first().context("no GPU")?.uuid;
        let gpu = GpuUuid::new(uuid).map_err(|error| anyhow::anyhow!("{error}"))?;
        let share = dir.join("shares").join(SHARE);
        for part in ["quota", "region"] {
            std::fs::create_dir_all(share.join(part))?;
            std::fs::create_dir_all(dir.join("run").join(part))?;
            symlink(share.join(part), dir.join("run").join(part).join(SHARE))?;
        }
        let quota = QuotaFile { memory_bytes: QUOTA, ..QuotaFile::new(gpu) };
        std::fs::write(share.join("quota/quota"), quota.encode())?;
        let mut bytes = vec![0u8; REGION_FILE_SIZE];
        let header = region::initial_header();
        bytes.get_mut(..header.len()).context("a region is larger than its header")?.copy_from_slice(&header);
        std::fs::write(share.join("region/region"), bytes)?;
        let limiter = self.stub.parent().context("no folder of the limiter")?;
        let stub = limiter_at(&dir.join("run"), limiter, &dir.join("limiter"))?;
        Ok(Place { tools: self, node, dir, stub })
    }
}

const SHARE: &str = "bench";

struct Place<'a> {
    tools: &'a Tools,
    node: Node,
    dir: PathBuf,
    /// The limiter's, for the share.
    stub: PathBuf,
}

impl Place<'_> {
    /// The test program in a pid namespace of its own, as in a container.
    fn program(&self, limited: bool, script: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command
            .args(NAMESPACES)
            .arg(&self.tools.program)
            .args(["init", "retain"])
            .args(script)
            .arg("sleep:200")
            .env("LD_LIBRARY_PATH", &self.tools.driver)
            .env("ALIQUOT_SIM_ROOT", self.dir.join("node/root"))
            .env("ALIQUOT_SIM_NODE", self.dir.join("node"))
            .stdout(Stdio::null());
        if limited {
            command.env("LD_PRELOAD", &self.stub);
        }
        command
    }

    fn used(&self) -> Result<u64> {
        Ok(self.node.memory(Pool::whole(0))?.used)
    }

    /// Most bytes beyond the quota at any time while these programs run.
    fn most_beyond(&self, programs: Vec<Command>) -> Result<u64> {
        let mut running = Vec::new();
        for mut program in programs {
            running.push(program.spawn().context("unshare")?);
        }
        let mut most = 0;
        while !running.is_empty() {
            most = most.max(self.used()?);
            let mut left = Vec::new();
            for mut child in running {
                match child.try_wait()? {
                    None => left.push(child),
                    Some(status) => anyhow::ensure!(status.success(), "cuda_probe: {status}"),
                }
            }
            running = left;
            std::thread::sleep(POLL);
        }
        anyhow::ensure!(most > QUOTA / 2, "the programs took {most} bytes only");
        Ok(most.saturating_sub(QUOTA))
    }

    /// Most bytes used, and the program's last answer but one, with the agent's looks meanwhile.
    fn watch_with_agent(&self, mut program: Child, view: ProcessView) -> Result<(u64, String)> {
        let (mut most, mut looked) = (0, Instant::now());
        let status = loop {
            most = most.max(self.used()?);
            if looked.elapsed() >= INTERVAL {
                looked = Instant::now();
                self.tell(view)?;
            }
            if let Some(status) = program.try_wait()? {
                break status;
            }
            std::thread::sleep(POLL);
        };
        anyhow::ensure!(status.success(), "cuda_probe: {status}");
        let text = std::io::read_to_string(program.stdout.take().context("no output")?)?;
        let line = text.lines().find(|line| line.starts_with("refused")).context(text.clone())?;
        Ok((most, line.rsplit(' ').next().unwrap_or_default().to_owned()))
    }

    /// A look of the node agent, with its own code. It sees the node's pids, whatever containers are shown.
    fn tell(&self, view: ProcessView) -> Result<()> {
        let shares = self.dir.join("shares");
        let ids = [SHARE.to_owned()];
        let taken = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?;
        let taken_ns = u64::try_from(Duration::from(taken).as_nanos())?;
        let before = measured::read_accounts(&shares, ids.iter());
        let seen = self.node.processes(0)?;
        let after = measured::read_accounts(&shares, ids.iter());
        let processes = seen.iter().filter_map(|process| {
            let pid = u32::try_from(process.host_pid?).ok()?;
            Some(Measured {
                pid,
                name: None,
                pod: "bench".to_owned(),
                memory_bytes: (view != ProcessView::NotAvailable).then_some(process.bytes),
                percent: 0,
                identity: measured::identity(Path::new("/proc"), pid),
            })
        });
        let look = Look {
            subject: ids.iter().cloned().collect(),
            quota: Quota::default(),
            processes: processes.collect(),
            region: None,
        };
        let pages = measured::pages(&[look], &before, &after);
        measured::write(&shares, &Labels::default(), &pages, taken_ns, INTERVAL);
        Ok(())
    }
}
