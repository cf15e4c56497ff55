//! A selinuxfs of plain files. What is written to `access` is answered by a thread at the other end of a terminal.
#![allow(clippy::unwrap_used, reason = "test support")]

use nix::pty::openpty;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// It is there as long as this lives; its thread ends with the process.
pub(crate) struct Selinuxfs {
    folder: tempfile::TempDir,
    /// Keeps the terminal from hanging up between two questions.
    _terminal: OwnedFd,
}

impl Selinuxfs {
    /// An enforcing system with this policy.
    pub(crate) fn new(policy: impl Fn(&str) -> &'static str + Send + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let terminal = openpty(None, None).unwrap();
        let mut raw = tcgetattr(&terminal.slave).unwrap();
        cfmakeraw(&mut raw);
        tcsetattr(&terminal.slave, SetArg::TCSANOW, &raw).unwrap();
        let name = nix::unistd::ttyname(&terminal.slave).unwrap();
        std::os::unix::fs::symlink(name, folder.path().join("access")).unwrap();
        let mut kernel = File::from(terminal.master);
        std::thread::spawn(move || {
            let mut buffer = [0; 1024];
            while let Ok(length) = kernel.read(&mut buffer) {
                let question = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned();
                if kernel.write_all(policy(&question).as_bytes()).is_err() {
                    break;
                }
            }
        });
        let selinuxfs = Self { folder, _terminal: terminal.slave };
        selinuxfs.write("enforce", "1");
        selinuxfs
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn write(&self, file: &str, content: &str) {
        let path = self.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Makes a class known, with its permissions in this order.
    pub(crate) fn class(&self, name: &str, index: u32, permissions: &[&str]) {
        self.write(&format!("class/{name}/index"), &index.to_string());
        for (number, permission) in (1..).zip(permissions) {
            self.write(&format!("class/{name}/perms/{permission}"), &format!("{number}"));
        }
    }
}
