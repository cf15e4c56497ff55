//! Other processes on the same node: this test program started again, driven line by line.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use aliquot_sim_node::{Node, NodeError, Pool};

const NODE: &str = "ALIQUOT_SIM_TEST_NODE";
/// Set where a process takes the place of one that was asked something.
const GREET: &str = "ALIQUOT_SIM_TEST_GREET";
/// What a process says before each answer, to tell it from the test runner's own lines.
const MARK: &str = "sim> ";

/// Another process.
pub(crate) struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    /// Starts one on the node in `dir`. The test program must have the test `processes::plays_another_process`.
    pub(crate) fn start(dir: &Path) -> Self {
        Self::start_by(Command::new(std::env::current_exe().unwrap()), dir)
    }

    /// Starts one in a pid namespace of its own; `None` where the machine does not allow that.
    pub(crate) fn start_in_container(dir: &Path) -> Option<Self> {
        let base = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"];
        let allowed =
            Command::new("unshare").args(base).arg("true").output().is_ok_and(|o| o.status.success());
        allowed.then(|| {
            let mut command = Command::new("unshare");
            command.args(base).arg(std::env::current_exe().unwrap());
            Self::start_by(command, dir)
        })
    }

    fn start_by(mut command: Command, dir: &Path) -> Self {
        let mut child = command
            .args(["--exact", "processes::plays_another_process", "--nocapture", "--test-threads=1"])
            .env(NODE, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// Runs one command there and gives its answer.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        loop {
            let mut answer = String::new();
            assert_ne!(
                self.output.read_line(&mut answer).unwrap(),
                0,
                "the other process is gone after {line:?}"
            );
            // The runner may have written the test's name without an end of line before it.
            if let Some((_, answer)) = answer.trim_end().split_once(MARK) {
                return answer.to_owned();
            }
        }
    }

    /// Gives it a command without waiting for the answer.
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// Ends it with SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// To be called from the test `processes::plays_another_process`.
pub(crate) fn play() {
    let Some(dir) = std::env::var_os(NODE) else { return };
    let node = Node::open(Path::new(&dir)).unwrap();
    println!();
    if std::env::var_os(GREET).is_some() {
        println!("{MARK}again");
    }
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        let answer = match words[0] {
            "pid" => std::process::id().to_string(),
            "charge" => say(node.charge(Pool::whole(0), number(1))),
            "charge-gi" => {
                let gi = u32::try_from(number(1)).unwrap();
                say(node
                    .context_opened(Pool::instance(0, gi), Some(0))
                    .and_then(|()| node.charge(Pool::instance(0, gi), number(2))))
            }
            "release" => say(node.release(Pool::whole(0), number(1))),
            "share" => {
                node.share(Pool::whole(0), number(1), 7).map_or_else(|e| e.to_string(), |id| id.to_string())
            }
            "attach" => say(node.attach(number(1)).map(|_| ())),
            "detach" => say(node.detach(number(1))),
            "used" => node.memory(Pool::whole(0)).unwrap().used.to_string(),
            "mig" => say(node.set_mig_mode(0, number(1) == 1).map(|_| ())),
            "seen" => {
                let mut seen: Vec<_> = node.processes(0).unwrap();
                seen.sort_by_key(|p| p.bytes);
                seen.iter().map(|p| format!("{}:{:?}", p.bytes, p.visible_pid)).collect::<Vec<_>>().join(" ")
            }
            "gis" => node.gis(0).unwrap().iter().map(|g| g.profile.name).collect::<Vec<_>>().join(" "),
            "hammer" => {
                for _ in 0..number(1) {
                    node.charge(Pool::whole(0), number(2)).unwrap();
                    node.release(Pool::whole(0), number(2)).unwrap();
                }
                "ok".to_owned()
            }
            "exec" => {
                use std::os::unix::process::CommandExt;
                let error = Command::new(std::env::current_exe().unwrap())
                    .args(std::env::args().skip(1))
                    .env(GREET, "1")
                    .exec();
                error.to_string()
            }
            "fork" => fork_and_charge(&node, number(1)),
            other => panic!("no command {other}"),
        };
        println!("{MARK}{answer}");
        std::io::stdout().flush().unwrap();
    }
}

/// Forks; the child takes memory, tells the parent how much the node then has in use, and ends.
#[allow(unsafe_code)]
fn fork_and_charge(node: &Node, bytes: u64) -> String {
    // SAFETY: the child calls only this crate, which is made to work after a fork, and then _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let charged = node.charge(Pool::whole(0), bytes).is_ok();
        let used = node.memory(Pool::whole(0)).map_or(0, |m| m.used);
        // SAFETY: ends the child at once, without the handlers of the parent.
        unsafe { libc::_exit(if charged { i32::try_from(used / bytes).unwrap_or(0) } else { 0 }) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    libc::WEXITSTATUS(status).to_string()
}

fn say(outcome: Result<(), NodeError>) -> String {
    match outcome {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.to_string(),
    }
}
