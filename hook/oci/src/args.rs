//! The command line.

use crate::mounts::Mounted;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What the node agent passes.
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

/// Why a command line was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgsError {
    /// No stage, or one that this hook has nothing to do in.
    #[error("the first argument is create-container, not {0:?}")]
    Stage(OsString),
    /// An option that does not exist.
    #[error("no option {0:?}; known are --limiter, --preload, --quota, --mounted and --root")]
    Unknown(OsString),
    /// An option without its value.
    #[error("{0} needs a value")]
    Value(&'static str),
    /// No stub.
    #[error("--limiter is missing: the path of libaliquot_preload.so inside the container")]
    Limiter,
    /// A path that is not absolute.
    #[error("{0} is not an absolute path: {1:?}")]
    Relative(&'static str, PathBuf),
    /// A mount that is not described as it should be.
    #[error("--mounted is <device>:<inode>:<absolute path>, not {0:?}")]
    Mounted(OsString),
}

impl Args {
    /// Reads the arguments behind the program's name.
    pub fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Self, ArgsError> {
        let stage = arguments.next().unwrap_or_default();
        if stage != "create-container" {
            return Err(ArgsError::Stage(stage));
        }
        let (mut limiter, mut root) = (None, None);
        let mut preload = PathBuf::from("/etc/ld.so.preload");
        let mut quota = PathBuf::from("/run/aliquot/quota");
        let mut mounted = Vec::new();
        while let Some(option) = arguments.next() {
            let mut text = |name: &'static str| arguments.next().ok_or(ArgsError::Value(name));
            if option == "--mounted" {
                let text = text("--mounted")?;
                let parsed = text.to_str().and_then(|text| text.parse().ok());
                mounted.push(parsed.ok_or(ArgsError::Mounted(text))?);
                continue;
            }
            let mut value = |name: &'static str| {
                let path = PathBuf::from(text(name)?);
                if path.is_absolute() { Ok(path) } else { Err(ArgsError::Relative(name, path)) }
            };
            match option.to_str() {
                Some("--limiter") => limiter = Some(value("--limiter")?),
                Some("--preload") => preload = value("--preload")?,
                Some("--quota") => quota = value("--quota")?,
                Some("--root") => root = Some(value("--root")?),
                _ => return Err(ArgsError::Unknown(option)),
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

    fn parse(line: &str) -> Result<Args, ArgsError> {
        Args::parse(line.split_whitespace().map(OsString::from))
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
        assert_eq!(parse("create-container --limit /x"), Err(ArgsError::Unknown("--limit".into())));
        assert_eq!(
            parse("create-container --limiter s.so"),
            Err(ArgsError::Relative("--limiter", PathBuf::from("s.so")))
        );
    }
}
