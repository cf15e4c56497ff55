//! Defines mounts that the administrator asks for.

use std::path::PathBuf;
use std::str::FromStr;

/// A mount that the administrator asked for in every container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtraMount {
    /// Path on the host.
    pub host: PathBuf,
    /// Path in the container.
    pub container: PathBuf,
    /// Whether the container may write.
    pub writable: bool,
}

/// The fault in the text of a mount.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExtraMountError {
    /// The text has not two or three parts.
    #[error("expected host:container or host:container:ro|rw")]
    Form,
    /// A path is not absolute.
    #[error("{} is not an absolute path", .0.display())]
    Relative(PathBuf),
    /// The third part is no mode.
    #[error("unknown mode {0:?}, expected ro or rw")]
    Mode(String),
}

impl FromStr for ExtraMount {
    type Err = ExtraMountError;

    /// Parses `host:container[:ro|rw]`.
    fn from_str(text: &str) -> Result<Self, ExtraMountError> {
        let parts: Vec<&str> = text.split(':').collect();
        let (host, container, mode) = match parts.as_slice() {
            [host, container] => (*host, *container, "ro"),
            [host, container, mode] => (*host, *container, *mode),
            _ => return Err(ExtraMountError::Form),
        };
        let absolute = |path: &str| {
            let path = PathBuf::from(path);
            if path.is_absolute() { Ok(path) } else { Err(ExtraMountError::Relative(path)) }
        };
        let writable = match mode {
            "ro" => false,
            "rw" => true,
            other => return Err(ExtraMountError::Mode(other.to_owned())),
        };
        Ok(Self { host: absolute(host)?, container: absolute(container)?, writable })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("/a:/b", Some(("/a", "/b", false)))]
    #[case("/a:/b:rw", Some(("/a", "/b", true)))]
    #[case("/a:/b:ro", Some(("/a", "/b", false)))]
    #[case("/a:/b:rx", None)]
    #[case("/a", None)]
    #[case("a:/b", None)]
    fn mounts_are_host_container_and_mode(#[case] text: &str, #[case] want: Option<(&str, &str, bool)>) {
        let want = want.map(|(host, container, writable)| ExtraMount {
            host: host.into(),
            container: container.into(),
            writable,
        });
        assert_eq!(text.parse::<ExtraMount>().ok(), want);
    }

    #[rstest]
    #[case("/a", "expected host:container or host:container:ro|rw")]
    #[case("/a:b", "b is not an absolute path")]
    #[case("/a:/b:rx", "unknown mode \"rx\", expected ro or rw")]
    fn a_fault_is_named(#[case] text: &str, #[case] said: &str) {
        assert_eq!(text.parse::<ExtraMount>().unwrap_err().to_string(), said);
    }
}
