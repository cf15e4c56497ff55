//! The command line.

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
    #[error("no option {0:?}; known are --limiter, --preload, --quota and --root")]
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
        while let Some(option) = arguments.next() {
            let mut value = |name: &'static str| {
                let path = PathBuf::from(arguments.next().ok_or(ArgsError::Value(name))?);
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
        Ok(Self { limiter: limiter.ok_or(ArgsError::Limiter)?, preload, quota, root })
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
        assert_eq!(Args::core(Path::new("/l/s.so")), Path::new("/l/libaliquot_core.so"));
    }

    #[test]
    fn bad_command_lines_are_refused_by_name() {
        assert_eq!(parse(""), Err(ArgsError::Stage("".into())));
        assert_eq!(parse("poststop"), Err(ArgsError::Stage("poststop".into())));
        assert_eq!(parse("create-container"), Err(ArgsError::Limiter));
        assert_eq!(parse("create-container --limiter"), Err(ArgsError::Value("--limiter")));
        assert_eq!(parse("create-container --limit /x"), Err(ArgsError::Unknown("--limit".into())));
        assert_eq!(
            parse("create-container --limiter s.so"),
            Err(ArgsError::Relative("--limiter", PathBuf::from("s.so")))
        );
    }
}
