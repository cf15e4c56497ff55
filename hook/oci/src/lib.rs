//! The OCI hook: before a container's entrypoint runs, it makes sure that the limiter will be in every
//! process of the container.
//!
//! A preloaded library that cannot be loaded is skipped by the loader with one line on standard error, and
//! the program runs without limits. So this hook looks first, in the container's own root and with the
//! container's own loader. Where something is wrong, it fails the container's creation with the reason. It
//! also keeps an image's own `/etc/ld.so.preload` working, which the limiter's would otherwise hide.
//!
//! # How the node agent calls it
//!
//! The node agent calls it as a CDI hook at the stage `createContainer`: there the runtime has made the
//! container's mounts, has not yet entered its root, and still has the rights to mount.
//!
//! ```json
//! {
//!   "hookName": "createContainer",
//!   "path": "/opt/aliquot/bin/aliquot-oci-hook",
//!   "args": ["aliquot-hook", "create-container",
//!            "--limiter", "/usr/local/lib/aliquot/0.1.0/libaliquot_preload.so",
//!            "--mounted", "2049:1311:/run/aliquot/quota/<result id>", …],
//!   "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
//! }
//! ```
//!
//! It runs as root on the host, in a working directory that the image's author chose. With runc up to 1.2 and
//! without `env`, the environment is that author's too. So `env` is never left out, and the program is static
//! (`tools/build-hook`): no loader reads variables for it, and it runs on hosts with any C library.
//!
//! `--limiter` is the stub's path inside the container; the core lies beside it. `--mounted`, once for each
//! mount of a share, says which file or directory of the host the container has to find there ([`mounts`]).
//! Agents of earlier releases say none, and then nothing is compared. A container with several shares has a
//! hook for each.
//!
//! The container's state comes on standard input, as the runtime specification says. `--preload` (default
//! `/etc/ld.so.preload`) and `--quota` (default `/run/aliquot/quota`) are paths inside the container.
//! `--root` names the container's root in place of the state. Exit status 0 = the container may start; 1 = it
//! must not, and the reason is the one line on standard error.
//!
//! With `driver` as its first argument the same program sees to the driver's libraries in the container
//! ([`driver`]). `--version` is the host's, `--dir` the directory that they are mounted in, `--library` the
//! name of each. `--dir32` and `--library32` are the same for 32-bit programs. With `--without-compat` no
//! library of the image comes before them. With `link` as its first argument it makes links in the
//! container's `/dev` ([`links`]), one for each `--link <target>:<path>`.
//!
//! # What it must never do
//!
//! The hook must never follow a link of the image out of the container's root, run anything of the image with
//! the runtime's rights, or change the image's files. (The loader's cache is exchanged in the container's own
//! layer; see [`driver`].)
//!
//! Reading order: [`run`], then [`mounts`] (what is mounted), [`preload`] (merging), [`selinux`] (what the
//! policy lets the container do), [`loader`] and `trial` (the trial), [`bundle`] (where the root is).

#![allow(unsafe_code, reason = "system calls that nix does not wrap; every block says why it is sound")]

pub mod args;
pub mod bundle;
mod cache;
mod compat;
mod cover;
pub mod driver;
mod filter;
pub mod inside;
mod json;
pub mod links;
pub mod loader;
pub mod mounts;
pub mod preload;
pub mod quota;
pub mod selinux;
mod trial;

pub use args::{Args, Task};
use bundle::Container;
use std::io::{Read, Write};

/// The reason why a container must not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HookError {
    /// The command line is wrong.
    #[error("{0}")]
    Args(#[from] args::ArgsError),
    /// The container's state or configuration cannot be used.
    #[error(transparent)]
    Bundle(#[from] bundle::BundleError),
    /// A file inside the container cannot be used.
    #[error(transparent)]
    Inside(#[from] inside::InsideError),
    /// The container does not find what the node has mounted.
    #[error(transparent)]
    Mounts(#[from] mounts::MountsError),
    /// The limiter is not in the list of preloaded libraries.
    #[error(transparent)]
    Preload(#[from] preload::PreloadError),
    /// The trial with the container's loader failed.
    #[error(transparent)]
    Loader(#[from] loader::LoaderError),
    /// SELinux does not let the container use the limiter.
    #[error(transparent)]
    Selinux(#[from] selinux::SelinuxError),
    /// A quota cannot be used.
    #[error(transparent)]
    Quota(#[from] quota::QuotasError),
}

/// Does everything for one task of a container. `state` is the container's state.
///
/// For a share, it makes sure that what the node has mounted is what is there, checks quotas, merges the
/// preload lists, asks SELinux's policy, and tries the limiter with the container's loader. For the driver's
/// files, it does what they need beside mounts, as far as possible.
///
/// Nothing that was checked changes before the entrypoint runs: the loader may not mount anything, the
/// runtime no longer mounts anything of the pod's, and no directory on the way there is on a volume that
/// users other than root can change.
pub fn run(task: &Task, state: &mut dyn Read) -> Result<(), HookError> {
    run_on(task, state, &selinux::Kernel::host())
}

/// Tells the user what the container does without. If nobody can be told, that is no reason to fail.
fn tell<E: std::error::Error>(error: &E) {
    let _ = writeln!(std::io::stderr(), "aliquot: {error}");
}

/// Does what [`run`] does, with the kernel's files about SELinux elsewhere.
pub fn run_on(task: &Task, state: &mut dyn Read, kernel: &selinux::Kernel) -> Result<(), HookError> {
    let Container { root, label } = match task.root() {
        Some(root) => Container { root: root.to_owned(), label: None },
        None => bundle::container(state)?,
    };
    let root = inside::Root::open(&root)?;
    match task {
        Task::Limiter(args) => {
            preload::uncover(&root, &args.preload)?;
            mounts::check(&root, &args.mounted, &args.quota)?;
            quota::check(&root, &args.quota)?;
            preload::apply(&root, &args.preload, &args.limiter)?;
            selinux::check(&root, label.as_deref(), args, kernel)?;
            loader::check(&root, &args.limiter)?;
        }
        Task::Driver(args) => {
            driver::apply(&root, args).iter().for_each(tell);
        }
        Task::Link(args) => links::make(&root, &args.links).iter().for_each(tell),
    }
    Ok(())
}
