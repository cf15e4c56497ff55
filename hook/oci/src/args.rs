//! The command line.

use crate::mounts::Mounted;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What the node agent wants of the hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// See to the limiter.
    Limiter(Args),
    /// See to the driver's files.
    Driver(Driver),
    /// Make links.
    Link(Links),
}

/// What the node agent passes for a container with devices that are found by links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Links {
    /// All of them.
    pub links: Vec<Link>,
    /// The container's root, where it is not to be taken from the state.
    pub root: Option<PathBuf>,
}

/// A link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// What it says.
    pub target: PathBuf,
    /// Where it is, inside the container.
    pub path: PathBuf,
}

/// What the node agent passes for a container with the driver's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The host's version of the driver.
    pub version: String,
    /// The directory of its libraries inside the container.
    pub dir: PathBuf,
    /// Their names there.
    pub libraries: Vec<String>,
    /// Whether newer libraries of the image may come before them.
    pub compat: bool,
    /// The directory of those for 32-bit programs, if there are any.
    pub dir32: Option<PathBuf>,
    /// The names of those.
    pub libraries32: Vec<String>,
    /// The container's root, where it is not to be taken from the state.
    pub root: Option<PathBuf>,
}

/// What the node agent passes for a container of a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Args {
    /// The stub inside the container.
    pub limiter: PathBuf,
    /// The list of preloaded libraries inside the container.
    pub preload: PathBuf,
    /// The folder of quotas inside the container.
    pub quota: PathBuf,
    /// What the node has mounted in the container for one share; nothing by agents of earlier releases.
    pub mounted: Vec<Mounted>,
    /// The container's root, where it is not to be taken from the state.
    pub root: Option<PathBuf>,
}

const LIMITER_OPTIONS: &str = "--limiter, --preload, --quota, --mounted and --root";
const DRIVER_OPTIONS: &str = "--version, --dir, --library, --without-compat, --dir32, --library32 and --root";
const LINK_OPTIONS: &str = "--link and --root";

/// Why a command line was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgsError {
    /// No stage, or one that this hook has nothing to do in.
    #[error("the first argument is create-container, driver or link, not {0:?}")]
    Stage(OsString),
    /// An option that does not exist.
    #[error("no option {0:?}; known are {1}")]
    Unknown(OsString, &'static str),
    /// An option without its value.
    #[error("{0} needs a value")]
    Value(&'static str),
    /// No stub.
    #[error("--limiter is missing: the path of libaliquot_preload.so inside the container")]
    Limiter,
    /// No version or directory.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A library's name that is a path.
    #[error("--library is a file's name, not {0:?}")]
    Library(OsString),
    /// A path that is not absolute.
    #[error("{0} is not an absolute path: {1:?}")]
    Relative(&'static str, PathBuf),
    /// A mount that is not described as it should be.
    #[error("--mounted is <device>:<inode>:<absolute path>, not {0:?}")]
    Mounted(OsString),
    /// A link that is not described as it should be.
    #[error("--link is <target>:<absolute path>, not {0:?}")]
    Link(OsString),
}

impl Task {
    /// Reads the arguments behind the program's name.
    pub fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Self, ArgsError> {
        let stage = arguments.next().unwrap_or_default();
        match stage.to_str() {
            Some("create-container") => Args::parse(arguments).map(Self::Limiter),
            Some("driver") => Driver::parse(arguments).map(Self::Driver),
            Some("link") => Links::parse(arguments).map(Self::Link),
            _ => Err(ArgsError::Stage(stage)),
        }
    }

    /// The container's root, where it is not to be taken from the state.
    pub fn root(&self) -> Option<&Path> {
        match self {
            Self::Limiter(args) => args.root.as_deref(),
            Self::Driver(args) => args.root.as_deref(),
            Self::Link(args) => args.root.as_deref(),
        }
    }
}

fn absolute(name: &'static str, value: Option<OsString>) -> Result<PathBuf, ArgsError> {
    let path = PathBuf::from(value.ok_or(ArgsError::Value(name))?);
    if path.is_absolute() { Ok(path) } else { Err(ArgsError::Relative(name, path)) }
}

impl Driver {
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Self, ArgsError> {
        let (mut version, mut dir, mut dir32, mut root) = (None, None, None, None);
        let (mut libraries, mut libraries32) = (Vec::new(), Vec::new());
        let mut compat = true;
        while let Some(option) = arguments.next() {
            let mut value = |name: &'static str| arguments.next().ok_or(ArgsError::Value(name));
            match option.to_str() {
                Some("--version") => version = Some(value("--version")?.to_string_lossy().into_owned()),
                Some("--library") => libraries.push(library(value("--library")?)?),
                Some("--without-compat") => compat = false,
                Some("--library32") => libraries32.push(library(value("--library32")?)?),
                Some("--dir32") => dir32 = Some(absolute("--dir32", arguments.next())?),
                Some("--dir") => dir = Some(absolute("--dir", arguments.next())?),
                Some("--root") => root = Some(absolute("--root", arguments.next())?),
                _ => return Err(ArgsError::Unknown(option, DRIVER_OPTIONS)),
            }
        }
        let version = version.ok_or(ArgsError::Missing("--version"))?;
        let dir = dir.ok_or(ArgsError::Missing("--dir"))?;
        if dir32.is_none() && !libraries32.is_empty() {
            return Err(ArgsError::Missing("--dir32"));
        }
        Ok(Self { version, dir, libraries, compat, dir32, libraries32, root })
    }
}

impl Links {
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Self, ArgsError> {
        let (mut links, mut root) = (Vec::new(), None);
        while let Some(option) = arguments.next() {
            match option.to_str() {
                Some("--link") => links.push(link(arguments.next().ok_or(ArgsError::Value("--link"))?)?),
                Some("--root") => root = Some(absolute("--root", arguments.next())?),
                _ => return Err(ArgsError::Unknown(option, LINK_OPTIONS)),
            }
        }
        Ok(Self { links, root })
    }
}

fn link(text: OsString) -> Result<Link, ArgsError> {
    match text.to_str().and_then(|text| text.split_once(':')) {
        Some((target, path)) if !target.is_empty() && path.starts_with('/') => {
            Ok(Link { target: target.into(), path: path.into() })
        }
        _ => Err(ArgsError::Link(text)),
    }
}

fn library(name: OsString) -> Result<String, ArgsError> {
    match name.to_str() {
        Some(text) if !text.is_empty() && !text.contains('/') => Ok(text.to_owned()),
        _ => Err(ArgsError::Library(name)),
    }
}

impl Args {
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Self, ArgsError> {
        let (mut limiter, mut root) = (None, None);
        let mut preload = PathBuf::from("/etc/ld.so.preload");
        let mut quota = PathBuf::from("/run/aliquot/quota");
        let mut mounted = Vec::new();
        while let Some(option) = arguments.next() {
            if option == "--mounted" {
                let text = arguments.next().ok_or(ArgsError::Value("--mounted"))?;
                let parsed = text.to_str().and_then(|text| text.parse().ok());
                mounted.push(parsed.ok_or(ArgsError::Mounted(text))?);
                continue;
            }
            let mut value = |name: &'static str| absolute(name, arguments.next());
            match option.to_str() {
                Some("--limiter") => limiter = Some(value("--limiter")?),
                Some("--preload") => preload = value("--preload")?,
                Some("--quota") => quota = value("--quota")?,
                Some("--root") => root = Some(value("--root")?),
                _ => return Err(ArgsError::Unknown(option, LIMITER_OPTIONS)),
            }
        }
        Ok(Self { limiter: limiter.ok_or(ArgsError::Limiter)?, preload, quota, mounted, root })
    }

    /// The core beside the stub.
    pub fn core(limiter: &Path) -> PathBuf {
        limiter.with_file_name("libaliquot_core.so")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(line: &str) -> Result<Task, ArgsError> {
        Task::parse(line.split_whitespace().map(OsString::from))
    }

    fn parse(line: &str) -> Result<Args, ArgsError> {
        match task(line)? {
            Task::Limiter(args) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn libraries_of_the_driver_are_names() {
        let want = Driver {
            version: "535.1".into(),
            dir: "/usr/lib64".into(),
            libraries: vec!["libcuda.so".into(), "libcuda.so.1".into()],
            compat: false,
            dir32: Some("/usr/lib32".into()),
            libraries32: vec!["libcuda.so".into()],
            root: None,
        };
        let line = "driver --version 535.1 --dir /usr/lib64 --library libcuda.so --library libcuda.so.1 \
                    --without-compat --dir32 /usr/lib32 --library32 libcuda.so";
        assert_eq!(task(line), Ok(Task::Driver(want)));
        assert_eq!(task("driver --dir /l"), Err(ArgsError::Missing("--version")));
        let nowhere = task("driver --version 1.2 --dir /l --library32 x.so");
        assert_eq!(nowhere, Err(ArgsError::Missing("--dir32")));
        let escape = task("driver --version 1.2 --dir /l --library ../x");
        assert_eq!(escape, Err(ArgsError::Library("../x".into())));
    }

    #[test]
    fn a_link_is_its_target_before_its_path() {
        let path = "/dev/dri/by-path/pci-0000:17:00.0-card";
        let links = vec![Link { target: "../card1".into(), path: path.into() }];
        let line = format!("link --link ../card1:{path} --root /r");
        assert_eq!(task(&line), Ok(Task::Link(Links { links, root: Some("/r".into()) })));
        for wrong in ["../card1", ":/dev/x", "a:dev/x"] {
            assert_eq!(task(&format!("link --link {wrong}")), Err(ArgsError::Link(wrong.into())));
        }
    }

    #[test]
    fn defaults_are_where_the_agent_mounts() {
        let args = parse("create-container --limiter /l/s.so").unwrap();
        assert_eq!(args.preload, Path::new("/etc/ld.so.preload"));
        assert_eq!(args.quota, Path::new("/run/aliquot/quota"));
        assert_eq!((args.limiter.as_path(), args.root), (Path::new("/l/s.so"), None));
        assert_eq!(args.mounted, []);
        assert_eq!(Args::core(Path::new("/l/s.so")), Path::new("/l/libaliquot_core.so"));
    }

    #[test]
    fn every_mount_is_heard_of() {
        let line = "create-container --limiter /l/s.so --mounted 1:2:/a --mounted 3:4:/b";
        let args = parse(line).unwrap();
        let mounted: Vec<String> = args.mounted.iter().map(ToString::to_string).collect();
        assert_eq!(mounted, ["1:2:/a", "3:4:/b"]);
    }

    #[test]
    fn bad_command_lines_are_refused_by_name() {
        assert_eq!(parse(""), Err(ArgsError::Stage("".into())));
        assert_eq!(parse("poststop"), Err(ArgsError::Stage("poststop".into())));
        assert_eq!(parse("create-container"), Err(ArgsError::Limiter));
        assert_eq!(parse("create-container --limiter"), Err(ArgsError::Value("--limiter")));
        let wrong = parse("create-container --limiter /l --mounted /a");
        assert_eq!(wrong, Err(ArgsError::Mounted("/a".into())));
        assert_eq!(
            parse("create-container --limit /x"),
            Err(ArgsError::Unknown("--limit".into(), LIMITER_OPTIONS))
        );
        assert_eq!(
            parse("create-container --limiter s.so"),
            Err(ArgsError::Relative("--limiter", PathBuf::from("s.so")))
        );
    }
}
