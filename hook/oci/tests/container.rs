//! The hook on whole container roots: assembled from this machine's own loader and libc, in a mount namespace
//! of its own where one can be had.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use aliquot_oci_hook::loader::LOADER;
use aliquot_quota::{GpuUuid, QuotaFile};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use support::hook;

const INSIDE: &str = "/usr/local/lib/aliquot/1/libaliquot_preload.so";

struct Container {
    folder: tempfile::TempDir,
}

impl Container {
    /// A root as the runtime has made it when the hook is called, with a glibc and what the node mounts.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let container = Self { folder };
        let libraries = Command::new("ldd").arg("/bin/cat").output().unwrap();
        for word in
            String::from_utf8_lossy(&libraries.stdout).split_whitespace().filter(|word| word.starts_with('/'))
        {
            container.copy(Path::new(word), word);
        }
        container.copy(Path::new("/bin/cat"), "/bin/cat");
        for file in ["libaliquot_preload.so", "libaliquot_core.so"] {
            container.copy(&support::built().join(file), &format!("/usr/local/lib/aliquot/1/{file}"));
        }
        container.write("/etc/ld.so.preload", &format!("{INSIDE}\n"));
        let quota = QuotaFile::new(GpuUuid::new("GPU-1").unwrap());
        container.put("/run/aliquot/quota/a/quota", &quota.encode());
        std::fs::create_dir_all(container.at("/dev")).unwrap();
        container.write("/bundle/config.json", r#"{"root": {"path": "../"}}"#);
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(container.folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        container
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path.trim_start_matches('/'))
    }

    fn copy(&self, from: &Path, to: &str) {
        let to = self.at(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).unwrap();
    }

    fn put(&self, path: &str, content: &[u8]) {
        let path = self.at(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    fn write(&self, path: &str, content: &str) {
        self.put(path, content.as_bytes());
    }

    fn hook(&self) -> Command {
        let mut command = Command::new(hook());
        command.args(["create-container", "--limiter", INSIDE, "--root"]).arg(self.folder.path());
        command
    }

    fn refused(&self) -> String {
        let output = self.hook().output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            text.starts_with("aliquot: the container is not started: ") && text.lines().count() == 1,
            "{text}"
        );
        text
    }
}

fn passed(output: &Output) {
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_sound_container_passes() {
    passed(&Container::new().hook().output().unwrap());
}

#[test]
fn the_root_is_found_from_the_state() {
    let container = Container::new();
    let mut command = Command::new(hook());
    command.args(["create-container", "--limiter", INSIDE]);
    command.stdin(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    use std::io::Write;
    let state = format!(r#"{{"ociVersion":"1.2.0","id":"c","bundle":{:?}}}"#, container.at("/bundle"));
    child.stdin.take().unwrap().write_all(state.as_bytes()).unwrap();
    passed(&child.wait_with_output().unwrap());
}

#[test]
fn what_is_missing_is_named() {
    let container = Container::new();
    std::fs::remove_file(container.at("/etc/ld.so.preload")).unwrap();
    assert!(container.refused().contains("/etc/ld.so.preload in the container does not name"));
    let container = Container::new();
    std::fs::remove_file(container.at("/usr/local/lib/aliquot/1/libaliquot_core.so")).unwrap();
    assert!(container.refused().contains("libaliquot_core.so does not exist in the container"));
    let container = Container::new();
    std::fs::remove_file(container.at("/run/aliquot/quota/a/quota")).unwrap();
    assert!(container.refused().contains("quota/a/quota does not exist"));
    let container = Container::new();
    std::fs::remove_file(container.at(LOADER)).unwrap();
    assert!(container.refused().contains("the image has no glibc"));
}

#[test]
fn a_library_that_the_containers_loader_cannot_load_is_refused() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: entering the root of another libc needs root");
        return;
    }
    let container = Container::new();
    // An image with a loader, but without the library that the stub needs.
    let libc = find(container.folder.path(), "libc.so.6").unwrap();
    std::fs::remove_file(libc).unwrap();
    assert!(container.refused().contains("libc.so.6"));
    let container = Container::new();
    container.write("/usr/local/lib/aliquot/1/libaliquot_preload.so", "no library");
    assert!(container.refused().contains("cannot load the limiter"));
}

#[test]
fn the_images_loader_runs_without_any_right() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root has rights to give up");
        return;
    }
    // An image with a loader of its own making: it tells who it is, through the reason for the refusal.
    let container = Container::new();
    let source = container.at("/spy.c");
    std::fs::write(
        &source,
        r#"
        #include <stdio.h>
        #include <string.h>
        #include <unistd.h>
        int main(void) {
            char line[256];
            FILE *status = fopen("/status", "r");
            int host = access("/etc/passwd", F_OK) == 0, open = 0;
            for (int fd = 3; fd < 100; fd++) open += lseek(fd, 0, SEEK_CUR) != -1;
            printf("ERROR uid %d gid %d host %d open %d\n", geteuid(), getegid(), host, open);
            return !!status || strlen(line) == 1000;
        }"#,
    )
    .unwrap();
    let spy = container.at("/spy");
    let built = Command::new("cc").args(["-static", "-o"]).arg(&spy).arg(&source).status();
    if !built.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no static libc to build the spy with");
        return;
    }
    std::fs::copy(&spy, container.at(LOADER)).unwrap();
    assert!(container.refused().contains("uid 65534 gid 65534 host 0 open 0"), "{}", container.refused());
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    std::fs::read_dir(folder).unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        if path.file_name().unwrap() == name {
            return Some(path);
        }
        if path.is_dir() && !path.is_symlink() { find(&path, name) } else { None }
    })
}

/// Runs a script in a mount namespace of its own, as the runtime does; `None` where there is none to be had.
fn in_mount_namespace(script: &str) -> Option<Output> {
    let works = |arguments: &[&str]| {
        Command::new("unshare")
            .args(arguments)
            .arg("true")
            .output()
            .is_ok_and(|output| output.status.success())
    };
    let arguments: &[&str] = if works(&["-m"]) {
        &["-m"]
    } else if works(&["-r", "-m"]) {
        &["-r", "-m"]
    } else {
        eprintln!("skipped: no mount namespace can be made");
        return None;
    };
    Some(Command::new("unshare").args(arguments).args(["sh", "-e", "-c", script]).output().unwrap())
}

#[test]
fn an_images_own_list_is_kept_in_front() {
    let container = Container::new();
    // The image has a list; the node's file is mounted over it, read-only.
    container.write("/etc/ld.so.preload", "# mine\n/lib/mine.so\n");
    container.write("/node-list", &format!("{INSIDE}\n"));
    let root = container.folder.path().display();
    let hook = hook();
    let hook = hook.display();
    let script = format!(
        "mount --bind {root} {root}; cd {root}; mount -t tmpfs none dev
         mount --bind node-list etc/ld.so.preload; mount -o remount,bind,ro etc/ld.so.preload
         {hook} create-container --limiter {INSIDE} --root {root}
         cat etc/ld.so.preload; ls -A dev
         if echo x 2>/dev/null >etc/ld.so.preload; then echo writable; fi"
    );
    let Some(output) = in_mount_namespace(&script) else { return };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text, format!("/lib/mine.so\n{INSIDE}\n"), "{output:?}");
    let untouched = std::fs::read_to_string(container.at("/etc/ld.so.preload")).unwrap();
    assert_eq!(untouched, "# mine\n/lib/mine.so\n");
}

#[test]
fn an_image_without_a_list_keeps_the_nodes() {
    let container = Container::new();
    container.write("/etc/ld.so.preload", "");
    container.write("/node-list", &format!("{INSIDE}\n"));
    let root = container.folder.path().display();
    let hook = hook();
    let hook = hook.display();
    let script = format!(
        "mount --bind {root} {root}; cd {root}; mount -t tmpfs none dev; mount --bind node-list etc/ld.so.preload
         {hook} create-container --limiter {INSIDE} --root {root}
         cat etc/ld.so.preload; ls -A dev"
    );
    let Some(output) = in_mount_namespace(&script) else { return };
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{INSIDE}\n"), "{output:?}");
}
