//! What the tests share: a node for each test, processes on it, and the driver by name.
//!
//! The driver reads its surroundings once per process, so a test's body runs in a process of its own: the test
//! binary again, told by [`ROLE`] which part to play.
#![allow(unsafe_code, reason = "the tests call a C library")]

use std::collections::HashMap;
use std::ffi::CString;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use aliquot_sim_node::{CUDA_LIBRARY, Node, NodeSpec, built_library, create};

/// Names the part that a process of a test plays.
pub const ROLE: &str = "SIM_CUDA_TEST_ROLE";
/// What it is told besides.
pub const ARGUMENT: &str = "SIM_CUDA_TEST_ARGUMENT";

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// The built library.
pub fn library() -> PathBuf {
    built_library(CUDA_LIBRARY).expect("cargo has built libcuda.so beside this test")
}

/// The loaded driver.
pub struct Cuda {
    library: libloading::Library,
    entries: Mutex<HashMap<String, usize>>,
}

/// Address of a place for a result or an argument.
pub fn at<T>(place: &mut T) -> u64 {
    std::ptr::from_mut(place) as u64
}

/// Address of an argument.
pub fn of<T: ?Sized>(value: &T) -> u64 {
    std::ptr::from_ref(value).cast::<u8>() as u64
}

type Six = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> i32;
type Twelve = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> i32;

/// Calls a function of the C library with whole-word arguments.
pub fn call_at(address: usize, arguments: &[u64]) -> i32 {
    let a = |i: usize| arguments.get(i).copied().unwrap_or(0);
    // SAFETY: integers and pointers are passed one word each, and a callee ignores words that it has no use for.
    unsafe {
        if arguments.len() <= 6 {
            std::mem::transmute::<usize, Six>(address)(a(0), a(1), a(2), a(3), a(4), a(5))
        } else {
            std::mem::transmute::<usize, Twelve>(address)(
                a(0),
                a(1),
                a(2),
                a(3),
                a(4),
                a(5),
                a(6),
                a(7),
                a(8),
                a(9),
                a(10),
                a(11),
            )
        }
    }
}

impl Cuda {
    /// Loads the driver without initialising it.
    pub fn load() -> Self {
        // SAFETY: the library has no constructors of its own.
        let library = unsafe { libloading::Library::new(library()) }.expect("libcuda.so loads");
        Self { library, entries: Mutex::default() }
    }

    /// Loads and initialises it.
    pub fn start() -> Self {
        let cuda = Self::load();
        assert_eq!(cuda.call("cuInit", &[0]), 0);
        cuda
    }

    /// Loads it, initialises it and makes the first device's primary context current.
    pub fn with_context() -> Self {
        let cuda = Self::start();
        cuda.use_device(0);
        cuda
    }

    /// Makes a device's primary context current.
    pub fn use_device(&self, device: u64) -> u64 {
        let mut context = 0_u64;
        self.ok("cuDevicePrimaryCtxRetain", &[at(&mut context), device]);
        self.ok("cuCtxSetCurrent", &[context]);
        context
    }

    /// Address of an exported function.
    pub fn entry(&self, name: &str) -> usize {
        let mut entries = self.entries.lock().unwrap();
        *entries.entry(name.to_owned()).or_insert_with(|| {
            // SAFETY: only the address is taken.
            let symbol = unsafe { self.library.get::<*const ()>(name.as_bytes()) };
            *symbol.unwrap_or_else(|e| panic!("{name}: {e}")) as usize
        })
    }

    /// Calls a function and returns its code.
    pub fn call(&self, name: &str, arguments: &[u64]) -> i32 {
        call_at(self.entry(name), arguments)
    }

    /// Calls a function that must succeed.
    #[track_caller]
    pub fn ok(&self, name: &str, arguments: &[u64]) {
        assert_eq!(self.call(name, arguments), 0, "{name}");
    }

    /// Calls a function that must succeed and whose first argument is its result.
    #[track_caller]
    pub fn make(&self, name: &str, rest: &[u64]) -> u64 {
        let mut made = 0_u64;
        let mut arguments = vec![at(&mut made)];
        arguments.extend_from_slice(rest);
        self.ok(name, &arguments);
        made
    }

    #[track_caller]
    pub fn alloc(&self, bytes: u64) -> u64 {
        self.make("cuMemAlloc_v2", &[bytes])
    }

    #[track_caller]
    pub fn free(&self, address: u64) {
        self.ok("cuMemFree_v2", &[address]);
    }

    /// (free, total).
    #[track_caller]
    pub fn info(&self) -> (u64, u64) {
        let (mut free, mut total) = (0_u64, 0_u64);
        self.ok("cuMemGetInfo_v2", &[at(&mut free), at(&mut total)]);
        (free, total)
    }

    #[track_caller]
    pub fn free_bytes(&self) -> u64 {
        self.info().0
    }

    /// A module from text, and a function of it.
    #[track_caller]
    pub fn kernel(&self, text: &str, name: &str) -> u64 {
        let text = CString::new(text).unwrap();
        let module = self.make("cuModuleLoadData", &[text.as_ptr() as u64]);
        let name = CString::new(name).unwrap();
        self.make("cuModuleGetFunction", &[module, name.as_ptr() as u64])
    }

    /// One block of a kernel.
    pub fn launch(&self, function: u64, stream: u64) -> i32 {
        self.call("cuLaunchKernel", &[function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0])
    }

    #[track_caller]
    pub fn stream(&self) -> u64 {
        // CU_STREAM_NON_BLOCKING.
        self.make("cuStreamCreate", &[1])
    }

    #[track_caller]
    pub fn event(&self) -> u64 {
        self.make("cuEventCreate", &[0])
    }

    /// Milliseconds between two events.
    #[track_caller]
    pub fn elapsed(&self, start: u64, end: u64) -> f64 {
        let mut ms = 0_f32;
        self.ok("cuEventElapsedTime", &[at(&mut ms), start, end]);
        f64::from(ms)
    }
}

/// A node in a directory of its own, which goes with it.
pub struct TestNode {
    pub node: Node,
    folder: tempfile::TempDir,
}

impl TestNode {
    pub fn new(spec: &NodeSpec) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let node = create(folder.path(), spec).unwrap();
        Self { node, folder }
    }

    pub fn of(boards: &[&str]) -> Self {
        Self::new(&NodeSpec::new(boards.iter().copied()))
    }

    pub fn dir(&self) -> &Path {
        self.folder.path()
    }

    /// Writes the parameters that all processes of the node start with.
    pub fn configure(&self, text: &str) {
        std::fs::write(self.dir().join("cuda.conf"), text).unwrap();
    }

    /// A process of the calling test in that role.
    pub fn command(&self, role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let test = std::thread::current().name().expect("tests run in threads of their name").to_owned();
        command.args(["--exact", &test, "--nocapture", "--test-threads=1", "--include-ignored"]);
        command.env(ROLE, role).env("ALIQUOT_SIM_NODE", self.dir());
        command.env("ALIQUOT_SIM_ROOT", self.dir().join("root"));
        for name in [
            "ALIQUOT_SIM_CUDA",
            "ALIQUOT_SIM_CUDA_LOG",
            "CUDA_VISIBLE_DEVICES",
            "CUDA_DEVICE_ORDER",
            "CUDA_MPS_PIPE_DIRECTORY",
        ] {
            command.env_remove(name);
        }
        command
    }

    /// Runs a role to its end, which must be a good one.
    #[track_caller]
    pub fn run(&self, role: &str) {
        check(self.command(role));
    }

    /// Starts a role that is spoken to line by line.
    pub fn spawn(&self, role: &str) -> Process {
        Process::start(self.command(role))
    }
}

/// Runs a command to its end, which must be a good one.
#[track_caller]
pub fn check(mut command: Command) {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The role that this process plays; `None` in the test itself.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Runs `body` in a process on a fresh node of these boards.
#[track_caller]
pub fn on(boards: &[&str], body: impl FnOnce()) {
    on_node(boards, "", body);
}

/// Runs `body` in a process on a fresh node with these parameters.
#[track_caller]
pub fn on_node(boards: &[&str], parameters: &str, body: impl FnOnce()) {
    if role().is_some() {
        return body();
    }
    let node = TestNode::of(boards);
    node.configure(parameters);
    node.run("only");
}

/// A process of a test that answers lines with lines.
pub struct Process {
    child: Child,
    replies: BufReader<std::process::ChildStdout>,
}

/// Marks the lines of a [`Process`] among what a test binary prints itself.
const MARK: &str = "\u{1}reply ";

impl Process {
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let replies = BufReader::new(child.stdout.take().unwrap());
        Self { child, replies }
    }

    /// Sends a line without waiting for an answer.
    pub fn send(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The next answer.
    #[track_caller]
    pub fn reply(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.replies.read_line(&mut line).unwrap(), 0, "the process has ended");
            if let Some((_, reply)) = line.trim_end().split_once(MARK) {
                return reply.to_owned();
            }
        }
    }

    #[track_caller]
    pub fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.reply()
    }

    #[track_caller]
    pub fn number(&mut self, line: &str) -> u64 {
        let reply = self.ask(line);
        reply.parse().unwrap_or_else(|_| panic!("{line}: {reply}"))
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets it end by itself.
    #[track_caller]
    pub fn finish(mut self) {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        while self.replies.read_line(&mut rest).unwrap_or(0) > 0 {}
        assert!(self.child.wait().unwrap().success(), "{rest}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A test that failed in between leaves nothing behind; a process that has ended is not there to be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Answers the lines of the test until it has no more.
pub fn serve(mut answer: impl FnMut(&str) -> String) {
    for line in std::io::stdin().lines() {
        let reply = answer(&line.unwrap());
        println!("{MARK}{reply}");
    }
}

/// Answers requests that every test can use: `alloc <bytes>`, `free <address>`, `free-bytes`.
pub fn serve_memory(cuda: &Cuda) {
    serve(|line| {
        let mut words = line.split(' ');
        let (verb, number) = (words.next().unwrap(), words.next().map(|n| n.parse::<u64>().unwrap()));
        match verb {
            "alloc" => {
                let mut address = 0_u64;
                let code = cuda.call("cuMemAlloc_v2", &[at(&mut address), number.unwrap()]);
                if code == 0 { address.to_string() } else { format!("code {code}") }
            }
            "free" => cuda.call("cuMemFree_v2", &[number.unwrap()]).to_string(),
            "free-bytes" => cuda.free_bytes().to_string(),
            other => panic!("no such request: {other}"),
        }
    });
}
