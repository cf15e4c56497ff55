//! Processes that cannot be killed, as a server is whose driver waits for hardware that hangs. Here they wait for a file
//! system that does not answer (FUSE, as in fuse(4) and the kernel's `fuse.h`).

use crate::stand_in::driver;
use crate::world::{World, gone, state_of, wait};
use aliquot_mps::contract::Phase;
use aliquot_mps::processes::{MARK, Table};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

const FILE: &str = "STUCK_AT";

/// A file system that answers nothing once it is mounted. Dropped, it lets go of all who wait for it.
struct Silent {
    dir: tempfile::TempDir,
    device: Option<File>,
}

impl Silent {
    /// In a mount namespace of this thread, or why there can be none.
    fn new() -> Result<Self, String> {
        let device =
            OpenOptions::new().read(true).write(true).open("/dev/fuse").map_err(|e| e.to_string())?;
        unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| errno.to_string())?;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&Path>, "/", None::<&Path>, private, None::<&Path>).unwrap();
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("silent"), dir.path(), Some("fuse"), flags, Some(options.as_str()))
            .map_err(|errno| errno.to_string())?;
        Ok(Self { dir, device: Some(device) })
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("file")
    }

    /// Takes what is asked, up to the first look-up, and answers nothing but the greeting.
    fn listen(&mut self) {
        let device = self.device.as_mut().unwrap();
        let mut request = vec![0; 1 << 17];
        loop {
            let length = device.read(&mut request).unwrap();
            let number = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
            assert!(length >= 40);
            // FUSE_INIT
            if number(4) != 26 {
                return;
            }
            let mut answer = Vec::from(80_u32.to_le_bytes());
            answer.extend([0; 4]);
            answer.extend(&request[8..16]);
            answer.extend([7_u32, 31].iter().flat_map(|version| version.to_le_bytes()));
            answer.resize(80, 0);
            device.write_all(&answer).unwrap();
        }
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        drop(self.device.take());
        let _ = umount2(self.dir.path(), MntFlags::MNT_DETACH);
    }
}

/// What the test below runs as a process of its own: its first thread waits for the one that is stuck.
#[test]
#[ignore = "a part of another test"]
fn a_thread_that_waits_for_a_file_system() {
    if let Some(file) = std::env::var_os(FILE) {
        let _ = fs::metadata(file);
    }
}

/// A process of a claim's daemon of which a thread cannot be killed.
fn stuck(claim: &Path, silent: &mut Silent) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--ignored",
        "--exact",
        "stuck::a_thread_that_waits_for_a_file_system",
        "--test-threads=2",
    ]);
    command.env_clear().env(MARK, claim).env(FILE, silent.file());
    let child = command.spawn().unwrap();
    silent.listen();
    child
}

fn has_ended_first_thread(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().trim().starts_with('Z')
}

#[test]
fn a_process_that_cannot_be_killed_holds_up_its_own_claim_only_and_only_until_it_ends() {
    let mut silent = match Silent::new() {
        Ok(silent) => silent,
        Err(reason) => return println!("SKIPPED: a process that cannot be killed: no file system: {reason}"),
    };
    let driver = driver("true");
    let mut world = World::new(driver.path(), false);
    let claim = world.ask("c-1", None, None);
    let mut server = stuck(claim.path(), &mut silent);
    world.supervise();
    assert!(has_ended_first_thread(server.id()), "nothing but the stuck thread is left");
    let mut table = Table::new(world.dir.path());
    table.look().unwrap();
    assert_eq!(table.of_claim(claim.path()).count(), 1);
    let state = state_of(&claim, Phase::Failed);
    let reason = state.reason.unwrap();
    for words in [server.id().to_string().as_str(), "cannot be killed", "reset"] {
        assert!(reason.contains(words), "{words}: {reason}");
    }
    let other = world.ask("c-2", None, None);
    state_of(&other, Phase::Ready);
    claim.withdraw_ask().unwrap();
    // The supervisor has looked at all of them several times when the third one is ready.
    state_of(&world.ask("c-3", None, None), Phase::Ready);
    assert!(claim.state().unwrap().is_some(), "nobody is told that it has ended");
    drop(silent);
    wait("the end of the process", || server.try_wait().unwrap());
    gone(&claim);
}
