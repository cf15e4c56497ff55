//! Programs in namespaces of their own, as containers have them.

use super::{Bench, built};
use std::path::Path;
use std::process::Command;

/// Options of `unshare` that work here, with `-r` where we are not root.
pub(crate) fn unshare(options: &[&str]) -> Option<Vec<String>> {
    [vec![], vec!["-r"]].into_iter().map(|first| [first, options.to_vec()].concat()).find_map(|options| {
        let works =
            Command::new("unshare").args(&options).arg("true").output().is_ok_and(|out| out.status.success());
        works.then(|| options.into_iter().map(str::to_owned).collect())
    })
}

/// The test program in namespaces of its own.
pub(crate) fn apart(bench: &Bench, options: &[String], before: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(options).args(["sh", "-c", &format!("{before} exec \"$0\" \"$@\"")]);
    command.arg(&built().probe).args(arguments);
    let like = bench.probe(&[]);
    command
        .env_clear()
        .envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .env("PATH", "/bin:/usr/bin");
    command
}

/// A program in a mount namespace in which the limiter is what `/etc/ld.so.preload` names, and the bench's folder is
/// `/run/aliquot`, as in a container; `before` is run first. `None` where no namespace can be made.
pub(crate) fn contained(bench: &Bench, before: &str, program: &Path, arguments: &[&str]) -> Option<Command> {
    let options = unshare(&["-m"])?;
    let etc = bench.folder.path().join("etc");
    std::fs::create_dir_all(&etc).unwrap();
    for file in ["passwd", "group", "ld.so.cache", "ld.so.conf", "nsswitch.conf"] {
        let _ = std::fs::copy(Path::new("/etc").join(file), etc.join(file));
    }
    let stub = built().limiter.join("libaliquot_preload.so");
    std::fs::write(etc.join("ld.so.preload"), format!("{}\n", stub.display())).unwrap();
    let mounts = format!(
        "mount -t tmpfs none /run && mkdir /run/aliquot && mount --bind {} /run/aliquot && \
         {before} mount --bind {} /etc && exec \"$0\" \"$@\"",
        bench.root().display(),
        etc.display(),
    );
    let mut command = Command::new("unshare");
    command.args(options).args(["sh", "-ec", &mounts]).arg(program).args(arguments);
    let like = bench.unlimited(program);
    let own = like.get_envs().filter_map(|(name, value)| Some((name, value?)));
    command.env_clear().envs(own).env("PATH", "/bin:/usr/bin:/sbin:/usr/sbin");
    Some(command)
}
