//! The container's root and the label of its process: the state names the bundle, and the bundle's
//! configuration has both.

use crate::json::{JsonError, string_at};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The reason why the root is not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// Standard input cannot be read.
    #[error("the container's state cannot be read: {0}")]
    Read(std::io::Error),
    /// The state names no bundle.
    #[error("the container's state on standard input is no JSON object with a bundle")]
    State,
    /// The bundle's configuration cannot be read.
    #[error("{path} cannot be read: {source}")]
    Config {
        /// The path of the configuration.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The configuration names no root.
    #[error("{0} names no root.path")]
    Root(PathBuf),
}

/// The largest state, in bytes.
const LARGEST_STATE: u64 = 1 << 20;

/// A container as its bundle describes it.
#[derive(Debug, PartialEq, Eq)]
pub struct Container {
    /// The root, as the hook sees it.
    pub root: PathBuf,
    /// The SELinux label that its process is to have.
    pub label: Option<String>,
}

/// Reads the state and finds the container.
pub fn container(state: &mut dyn Read) -> Result<Container, BundleError> {
    let mut text = String::new();
    state.take(LARGEST_STATE).read_to_string(&mut text).map_err(BundleError::Read)?;
    let bundle = string_at(&text, &["bundle"]).map_err(|_: JsonError| BundleError::State)?;
    let bundle = PathBuf::from(bundle.filter(|path| path.starts_with('/')).ok_or(BundleError::State)?);
    let path = bundle.join("config.json");
    let config = std::fs::read_to_string(&path)
        .map_err(|source| BundleError::Config { path: path.clone(), source })?;
    let root = root_in(&bundle, &config).ok_or(BundleError::Root(path))?;
    // A configuration that is not understood was reported with the root.
    let label = string_at(&config, &["process", "selinuxLabel"]).ok().flatten();
    Ok(Container { root, label })
}

/// Returns `root.path` of a configuration, which may be relative to the bundle.
fn root_in(bundle: &Path, config: &str) -> Option<PathBuf> {
    let root = string_at(config, &["root", "path"]).ok().flatten().filter(|root| !root.is_empty())?;
    Some(bundle.join(root))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_may_be_relative_to_the_bundle() {
        let root = |config: &str| root_in(Path::new("/b"), config);
        assert_eq!(root(r#"{"root":{"path":"rootfs"}}"#), Some(PathBuf::from("/b/rootfs")));
        assert_eq!(root(r#"{"root":{"path":"/var/r"}}"#), Some(PathBuf::from("/var/r")));
        assert_eq!(root(r#"{"root":{"path":""}}"#), None);
        assert_eq!(root(r#"{"root":{}}"#), None);
        assert_eq!(root("{"), None);
    }

    #[test]
    fn the_state_leads_to_the_root() {
        let folder = tempfile::tempdir().unwrap();
        let state = format!(r#"{{"ociVersion":"1.2.0","id":"x","pid":1,"bundle":{:?}}}"#, folder.path());
        let find = |state: &str| container(&mut state.as_bytes());
        assert!(matches!(find(&state), Err(BundleError::Config { .. })));
        std::fs::write(folder.path().join("config.json"), r#"{"root":{"path":"r"}}"#).unwrap();
        let root = folder.path().join("r");
        assert_eq!(find(&state).unwrap(), Container { root: root.clone(), label: None });
        let labelled = r#"{"process":{"selinuxLabel":"u:r:t:s0:c1,c2"},"root":{"path":"r"}}"#;
        std::fs::write(folder.path().join("config.json"), labelled).unwrap();
        assert_eq!(find(&state).unwrap(), Container { root, label: Some("u:r:t:s0:c1,c2".into()) });
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        assert!(matches!(find(&state), Err(BundleError::Root(_))));
        assert!(matches!(find(r#"{"bundle":"relative"}"#), Err(BundleError::State)));
        assert!(matches!(find(""), Err(BundleError::State)));
    }
}
