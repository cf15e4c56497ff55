//! What NVIDIA's own control daemon can see, reach and do.

use crate::real::{limits, real};
use crate::world::{World, gone, lives, state_of, wait};
use aliquot_mps::contract::Phase;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Fields of a process's status.
fn status(pid: u32) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

fn rights(pid: u32) -> [String; 6] {
    let status = status(pid);
    ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"].map(|name| status[name].clone())
}

/// CAP_KILL and CAP_SETUID.
const KEPT: &str = "00000000000000a0";
const NONE: &str = "0000000000000000";

#[test]
fn a_daemon_keeps_of_roots_rights_what_servers_need_and_can_get_no_others() {
    let Some((files, isolated)) = real("rights") else { return };
    if !isolated {
        return println!("SKIPPED: the daemon's rights: needs root");
    }
    let mut world = World::new(&files, true);
    world.supervise();
    let claim = world.ask("c-1", Some(40), Some(2 << 30));
    let pid = state_of(&claim, Phase::Ready).pid.unwrap();
    assert_eq!(rights(pid), [NONE, KEPT, KEPT, KEPT, NONE, "1"]);
    let status = status(pid);
    assert!(
        !status["Gid"].split('\t').any(|group| group == "0") && status["Groups"].is_empty(),
        "{status:?}"
    );
    assert_eq!(limits(&world, &claim), ("40.0".into(), "2G".into()), "it serves all the same");
}

/// The real control daemon with a stand-in for its server, which needs a GPU.
fn with_server(files: &Path, driver: &Path) {
    for dir in ["usr/bin", "usr/sbin"] {
        fs::create_dir_all(driver.join(dir)).unwrap();
    }
    let control = "usr/bin/nvidia-cuda-mps-control";
    fs::copy(files.join(control), driver.join(control)).unwrap();
    let server = driver.join("usr/sbin/nvidia-cuda-mps-server");
    fs::write(&server, "#!/bin/sh\nexec sleep 1000\n").unwrap();
    fs::set_permissions(&server, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_server_runs_as_its_clients_user_without_any_rights_and_ends_with_the_daemon() {
    let Some((files, isolated)) = real("a server") else { return };
    if !isolated {
        return println!("SKIPPED: a server's user: needs root");
    }
    let driver = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    with_server(&files, driver.path());
    let mut world = World::new(driver.path(), true);
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let daemon = state_of(&claim, Phase::Ready).pid.unwrap();
    drop(world.start_telling(&claim, "start_server -uid 4711"));
    let server = wait("a server", || {
        let children = fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children")).unwrap();
        let pid = children.split_whitespace().next()?.parse().ok()?;
        let is_it = fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n");
        is_it.then_some(pid)
    });
    assert_eq!(status(server)["Uid"], "4711\t4711\t4711\t4711");
    assert_eq!(rights(server), [NONE, NONE, NONE, KEPT, NONE, "1"]);
    claim.withdraw_ask().unwrap();
    gone(&claim);
    assert!(!lives(server) && !lives(daemon));
}

#[test]
fn nothing_of_the_host_but_programs_and_libraries_is_in_what_a_daemon_sees_and_nothing_of_it_can_be_written()
{
    let Some((files, isolated)) = real("the host") else { return };
    if !isolated {
        return println!("SKIPPED: what a daemon sees of the host: needs root");
    }
    let mut world = World::new(&files, true);
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let pid = state_of(&claim, Phase::Ready).pid.unwrap();
    let root = Path::new("/proc").join(pid.to_string()).join("root");
    for path in [world.path(), Path::new("/etc/shadow"), Path::new("/var")] {
        let seen = root.join(path.strip_prefix("/").unwrap());
        assert!(path.exists() && !seen.exists(), "{}", path.display());
    }
    let interfaces = fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
    assert_eq!(interfaces.lines().filter(|line| line.contains(':')).count(), 1, "but lo: {interfaces}");
    // Nothing lies under its root: each mount but one is within another that is listed.
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let mounts: Vec<Vec<&str>> = mounts.lines().map(|line| line.split(' ').collect()).collect();
    let ids: BTreeSet<&str> = mounts.iter().map(|mount| mount[0]).collect();
    let outermost: Vec<_> = mounts.iter().filter(|mount| !ids.contains(mount[1])).collect();
    assert_eq!(outermost.len(), 1, "{outermost:?}");
    assert!(outermost[0][4] == "/" && outermost[0].contains(&"tmpfs"), "{outermost:?}");
    let written = mounts.iter().filter(|mount| mount[5].split(',').any(|option| option == "rw"));
    let written: BTreeSet<&str> = written.map(|mount| mount[4]).collect();
    let own = BTreeSet::from(["/tmp", "/tmp/nvidia-mps", "/tmp/nvidia-mps-log", "/dev/shm"]);
    assert_eq!(written, own);
    let escaping = mounts.iter().filter(|mount| own.contains(mount[4]));
    for option in ["nosuid", "nodev", "noexec"] {
        assert!(escaping.clone().all(|mount| mount[5].split(',').any(|o| o == option)), "{mounts:?}");
    }
}

/// The files of a driver with a loader and libc beside them, as a driver container has them.
fn with_system(files: &Path, root: &Path) {
    for dir in ["usr/bin", "tmp", "dev", "proc"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    let program = files.join("usr/bin/nvidia-cuda-mps-control");
    let needs = Command::new("ldd").arg(&program).output().unwrap();
    for path in
        String::from_utf8(needs.stdout).unwrap().split_whitespace().filter(|word| word.starts_with('/'))
    {
        let target = root.join(&path[1..]);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(path, target).unwrap();
    }
    fs::copy(program, root.join("usr/bin/nvidia-cuda-mps-control")).unwrap();
}

#[test]
fn a_daemon_has_a_root_of_its_own_with_the_claims_gpus_alone() {
    let Some((files, isolated)) = real("the root") else { return };
    if !isolated {
        return println!("SKIPPED: the daemon's root: needs root");
    }
    let driver = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    with_system(&files, driver.path());
    let mut world = World::new(driver.path(), true);
    world.supervise();
    let claim = world.ask("c-1", None, None);
    fs::write(claim.shm().join("sign"), "").unwrap();
    let pid = state_of(&claim, Phase::Ready).pid.unwrap();
    let root = Path::new("/proc").join(pid.to_string()).join("root");
    let names = |dir: &Path| {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(
        names(&root.join("dev")),
        [
            "full",
            "null",
            "nvidia-uvm",
            "nvidia-uvm-tools",
            "nvidia0",
            "nvidia1",
            "nvidiactl",
            "random",
            "shm",
            "urandom",
            "zero"
        ]
    );
    let second = fs::metadata(root.join("dev/nvidia1")).unwrap();
    assert_eq!(second.rdev(), nix::sys::stat::makedev(195, 1));
    assert_eq!(names(&root.join("dev/shm")), ["sign"]);
    assert!(names(&root.join("tmp/nvidia-mps")).contains(&"control".to_owned()));
    assert!(root.join("proc/self").exists());
    let environment = fs::read(root.parent().unwrap().join("environ")).unwrap();
    let mut variables: Vec<String> = environment
        .split(|byte| *byte == 0)
        .map(|variable| String::from_utf8_lossy(variable).split('=').next().unwrap().to_owned())
        .filter(|name| !name.is_empty())
        .collect();
    variables.sort();
    assert_eq!(
        variables,
        [
            "ALIQUOT_MPS_CLAIM",
            "CUDA_MPS_LOG_DIRECTORY",
            "CUDA_MPS_PIPE_DIRECTORY",
            "CUDA_VISIBLE_DEVICES",
            "PATH"
        ]
    );
    let here = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!here.contains(driver.path().to_str().unwrap()), "nothing is mounted here: {here}");
}

/// A directory that is a mount of its own, whose mounts others see, as a kubelet's is.
struct Shared<'a>(&'a Path);

impl<'a> Shared<'a> {
    fn new(path: &'a Path) -> Self {
        mount(Some(path), path, None::<&Path>, MsFlags::MS_BIND, None::<&Path>).unwrap();
        mount(None::<&Path>, path, None::<&Path>, MsFlags::MS_SHARED, None::<&Path>).unwrap();
        Self(path)
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        let _ = umount2(self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_claims_file_system_is_not_seen_by_another_claims_daemon() {
    let Some((files, isolated)) = real("mounts") else { return };
    if !isolated {
        return println!("SKIPPED: mounts of other claims: needs root");
    }
    let mut world = World::new(&files, true);
    fs::create_dir(world.dir.path()).unwrap();
    let path = world.dir.path().to_owned();
    let _shared = Shared::new(&path);
    let other = path.join("c-2");
    fs::create_dir(&other).unwrap();
    mount(Some("tmpfs"), &other, Some("tmpfs"), MsFlags::empty(), Some("size=64k")).unwrap();
    world.supervise();
    let claim = world.ask("c-1", None, None);
    let pid = state_of(&claim, Phase::Ready).pid.unwrap();
    let is_there = || {
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        mounts.contains(other.to_str().unwrap())
    };
    assert!(!is_there());
    claim.withdraw_ask().unwrap();
    gone(&claim);
}

/// Runs a program with the user, the group and the rights of a daemon.
fn as_daemon(group: &str, program: &str, argument: &Path) -> std::process::Output {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=0", "--regid", group, "--clear-groups", "--inh-caps=-all", "--ambient-caps=-all"]);
    command.args(["--bounding-set=-all,+setuid,+kill", program]).arg(argument).output().unwrap()
}

/// The kernel asks for the same user and group, or CAP_SYS_PTRACE (ptrace(2), proc(5)).
#[test]
fn a_daemon_cannot_reach_into_the_file_system_of_another_claims_daemon() {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIPPED: two confined daemons: needs root");
    }
    // It has to be a program that stays when it is started with `-f`.
    let driver = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::create_dir_all(driver.path().join("usr/bin")).unwrap();
    fs::copy("/usr/bin/tail", driver.path().join("usr/bin/nvidia-cuda-mps-control")).unwrap();
    let mut world = World::new(driver.path(), true);
    world.supervise();
    let daemon = |uid: &str| {
        let claim = world.ask(uid, None, None);
        wait("a confined daemon", || {
            let pid = claim.state().unwrap()?.pid?;
            let text = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            (text == "nvidia-cuda-mps\n").then_some(pid)
        })
    };
    let (one, two) = (daemon("c-1"), daemon("c-2"));
    let group = status(one)["Gid"].split('\t').next().unwrap().to_owned();
    assert!(!status(two)["Gid"].split('\t').any(|other| other == group));
    let root = |pid: u32| PathBuf::from(format!("/proc/{pid}/root/dev"));
    let own = as_daemon(&group, "ls", &root(one));
    assert!(String::from_utf8_lossy(&own.stdout).contains("nvidia0"), "the same group may: {own:?}");
    let other = as_daemon(&group, "ls", &root(two));
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(!other.status.success() && said.contains("Permission denied"), "{other:?}");
}
