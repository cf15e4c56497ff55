//! Containers under a real runc, with the edits of our own CDI specs.

use aliquot_cdi::{ContainerEdits, HookName, QualifiedName, Spec};
use aliquot_kubelet_plugin::prepare::{Node, Prepared};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use tempfile::TempDir;

/// A runc, and which one it is.
#[derive(Debug, Clone)]
pub struct Runc {
    pub program: PathBuf,
    pub version: Vec<u32>,
}

impl Runc {
    fn at(program: PathBuf) -> Option<Self> {
        let said = Command::new(&program).arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let version = text.lines().next()?.strip_prefix("runc version ")?;
        let version = version.split(['+', '-']).next()?.split('.').map(|part| part.parse().ok());
        Some(Self { program, version: version.collect::<Option<_>>()? })
    }

    /// Whether a hook without an environment runs with the container's.
    pub fn gives_hooks_the_containers_environment(&self) -> bool {
        self.version < vec![1, 3]
    }
}

/// The machine's runc and the newest one, where they are. Prints why a test that needs them is skipped.
pub fn runcs(test: &str) -> Vec<Runc> {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: {test}: containers need root");
        return Vec::new();
    }
    let own = Runc::at("runc".into());
    if own.is_none() {
        println!("SKIPPED: {test} under the machine's runc: it has none");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/newest-runc");
    let newest =
        Command::new(script).stderr(Stdio::null()).output().ok().filter(|said| said.status.success());
    let newest = newest.and_then(|said| Runc::at(String::from_utf8_lossy(&said.stdout).trim().into()));
    if newest.is_none() {
        println!("SKIPPED: {test} under the newest runc: tools/newest-runc cannot build it");
    }
    own.into_iter().chain(newest).collect()
}

/// Folder of the limiter's two files and the static hook, built once.
pub fn hook_dir() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(folder) = std::env::var_os("ALIQUOT_HOOK_DIR") {
            return folder.into();
        }
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/build-hook");
        let built = Command::new(script).arg("--quiet").env("CARGO_TARGET_DIR", target).status();
        assert!(built.unwrap().success(), "tools/build-hook");
        target.join("hook")
    })
}

/// A node whose shares have the real limiter and the real hook, which lie in `folder`.
pub fn with_limiter(mut node: Node, folder: &Path) -> Node {
    let version = folder.join("limiter").join(env!("CARGO_PKG_VERSION"));
    fs::create_dir_all(&version).unwrap();
    for file in ["libaliquot_preload.so", "libaliquot_core.so", "aliquot-oci-hook"] {
        fs::copy(hook_dir().join(file), version.join(file)).unwrap();
    }
    node.machine.limiter_dir = folder.join("limiter");
    node.machine.site.oci_hook = Some(version.join("aliquot-oci-hook"));
    node
}

/// The edits that a runtime makes for prepared devices.
pub fn edits(node: &Node, uid: &str, prepared: &[Prepared]) -> ContainerEdits {
    let of_claim = |name: &String| name.contains(uid);
    let names = node.machine.cdi.list(&node.machine.site.driver).unwrap();
    let specs: Vec<Spec> = names
        .iter()
        .filter(|name| of_claim(name))
        .map(|name| node.machine.cdi.read(name).unwrap().unwrap())
        .collect();
    let names: Vec<QualifiedName> =
        prepared.iter().flat_map(|device| &device.cdi).map(|id| id.parse().unwrap()).collect();
    let mut edits = aliquot_cdi::resolve(&specs, &names).unwrap();
    // Each device of a claim brings the common ones.
    edits.mounts.dedup();
    edits.device_nodes.sort_by(|a, b| a.path.cmp(&b.path));
    edits.device_nodes.dedup();
    edits
}

/// A root with this machine's own libc and a few programs, and what a runtime is told of it.
pub struct Bundle {
    pub folder: TempDir,
    pub env: Vec<String>,
    pub edits: ContainerEdits,
    /// The pod's own volume mounts: what is mounted, and where.
    pub volumes: Vec<(PathBuf, String)>,
    /// Whether the container may write into its root.
    pub read_only: bool,
    /// The user that the program runs as.
    pub user: u32,
    /// The machine's user that root is in a user namespace of the container's own, if it has one.
    pub root_is: Option<u32>,
}

impl Bundle {
    pub fn new(programs: &[&str]) -> Self {
        let bundle = Self {
            folder: tempfile::tempdir().unwrap(),
            env: vec!["PATH=/bin".into()],
            edits: ContainerEdits::default(),
            volumes: Vec::new(),
            read_only: false,
            user: 0,
            root_is: None,
        };
        for program in programs {
            let found = ["/usr/bin", "/bin"].iter().map(|dir| Path::new(dir).join(program));
            let found = found.clone().find(|path| path.exists()).unwrap();
            let said = Command::new("ldd").arg(&found).output().unwrap();
            let said = String::from_utf8_lossy(&said.stdout).into_owned();
            for library in said.split_whitespace().filter(|word| word.starts_with('/')) {
                bundle.copy(Path::new(library), library);
            }
            bundle.copy(&found, &format!("/bin/{program}"));
        }
        for dir in ["proc", "dev", "tmp"] {
            fs::create_dir_all(bundle.at(dir)).unwrap();
        }
        bundle
    }

    /// A path of the container on this machine.
    pub fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join("rootfs").join(path.trim_start_matches('/'))
    }

    pub fn copy(&self, from: &Path, to: &str) {
        let to = self.at(to);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    }

    pub fn write(&self, path: &str, content: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Gives the container a user namespace, and its root to the root there.
    pub fn map_users(&mut self, root_is: u32) {
        self.root_is = Some(root_is);
        fs::set_permissions(self.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let owner = format!("{root_is}:{root_is}");
        let changed = Command::new("chown").args(["-R", &owner]).arg(self.at("/")).status();
        assert!(changed.unwrap().success());
    }

    fn config(&self, args: &[&str], cwd: &str) -> Value {
        let capabilities: Vec<String> = [
            "CHOWN",
            "DAC_OVERRIDE",
            "FSETID",
            "FOWNER",
            "MKNOD",
            "NET_RAW",
            "SETGID",
            "SETUID",
            "SETFCAP",
            "SETPCAP",
            "NET_BIND_SERVICE",
            "SYS_CHROOT",
            "KILL",
            "AUDIT_WRITE",
        ]
        .map(|name| format!("CAP_{name}"))
        .into();
        let mut mounts = vec![
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}),
        ];
        // As the CDI library has it: ours in the place of the pod's at the same path and otherwise behind the pod's, then
        // all of them by depth.
        let ours = &self.edits.mounts;
        let theirs =
            self.volumes.iter().filter(|(_, at)| ours.iter().all(|mount| mount.container_path != *at));
        mounts.extend(theirs.map(|(source, destination)| {
            json!({"destination": destination, "type": "bind", "source": source, "options": ["rbind", "rw"]})
        }));
        mounts.extend(ours.iter().map(|mount| {
            json!({"destination": mount.container_path, "type": "bind", "source": mount.host_path, "options": mount.options})
        }));
        mounts.sort_by_key(|mount| mount["destination"].as_str().unwrap().matches('/').count());
        let devices = self.edits.device_nodes.iter().map(|node| {
            json!({"path": node.path, "type": node.device_type, "major": node.major, "minor": node.minor})
        });
        let hooks: Vec<Value> = self
            .edits
            .hooks
            .iter()
            .map(|hook| {
                assert_eq!(hook.hook_name, HookName::CreateContainer);
                let mut value = json!({"path": hook.path, "args": hook.args});
                if !hook.env.is_empty() {
                    value["env"] = json!(hook.env);
                }
                if let Some(timeout) = hook.timeout {
                    value["timeout"] = json!(timeout);
                }
                value
            })
            .collect();
        let env: Vec<&String> = self.env.iter().chain(&self.edits.env).collect();
        let mut namespaces = ["pid", "ipc", "uts", "mount", "network"].to_vec();
        namespaces.extend(self.root_is.map(|_| "user"));
        let namespaces: Vec<Value> = namespaces.iter().map(|name| json!({"type": name})).collect();
        let mapping = self.root_is.map(|first| json!([{"containerID": 0, "hostID": first, "size": 65536}]));
        json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": self.user, "gid": self.user}, "args": args, "env": env, "cwd": cwd, "noNewPrivileges": true,
                "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
            },
            "root": {"path": "rootfs", "readonly": self.read_only},
            "mounts": mounts,
            "hooks": {"createContainer": hooks},
            "linux": {
                "devices": devices.collect::<Vec<_>>(),
                "namespaces": namespaces,
                "uidMappings": mapping,
                "gidMappings": mapping,
            },
        })
    }

    /// Runs a program in a container to its end.
    pub fn run(&self, runc: &Runc, args: &[&str], cwd: &str) -> Output {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("aliquot-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        fs::write(self.folder.path().join("config.json"), self.config(args, cwd).to_string()).unwrap();
        let flag = |name: &str, value: &Path| {
            let mut flag = OsString::from(name);
            flag.push(value);
            flag
        };
        Command::new(&runc.program)
            .arg(flag("--root=", &self.folder.path().join("state")))
            .args(["run", "--bundle"])
            .arg(self.folder.path())
            .arg(id)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }
}
