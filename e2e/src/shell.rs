//! Commands as a reader of the documents types them, on the test cluster.

use crate::cluster::Cluster;
use anyhow::Result;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;

/// Verbs of kubectl and aliquot that only look.
const LOOKS: [&str; 8] = ["get", "describe", "logs", "events", "wait", "exec", "explain", "plan"];

/// A shell in the repository's root whose `kubectl`, `aliquot` and `helm` are those of the cluster.
pub struct Shell {
    programs: tempfile::TempDir,
    kubeconfig: String,
    node: String,
    repo: PathBuf,
}

impl Shell {
    /// Makes a folder with the programs.
    ///
    /// # Errors
    /// If it cannot be written, or `cluster.env` lacks something.
    pub fn new(cluster: &Cluster) -> Result<Self> {
        let programs = tempfile::tempdir()?;
        let at = |name: &str| programs.path().join(name);
        symlink(cluster.setting("KUBECTL")?, at("kubectl"))?;
        for name in ["aliquot", "kubectl-aliquot"] {
            symlink(cluster.program("aliquot"), at(name))?;
        }
        // What our chart is installed with here; what the command itself sets comes later and counts.
        let values = cluster.values()?.iter().map(|value| format!("--set '{value}'")).collect::<Vec<_>>();
        let helm = format!(
            "#!/usr/bin/env bash\nverb=$1; shift\ncase $verb in install | upgrade) set -- {} \"$@\" ;; esac\n\
             exec '{}' \"$verb\" \"$@\"\n",
            values.join(" "),
            cluster.setting("HELM")?
        );
        std::fs::write(at("helm"), helm)?;
        std::fs::set_permissions(at("helm"), std::fs::Permissions::from_mode(0o755))?;
        Ok(Self {
            kubeconfig: cluster.setting("KUBECONFIG")?.to_owned(),
            node: cluster.setting("NODE_NAME")?.to_owned(),
            repo: cluster.repo().to_owned(),
            programs,
        })
    }

    /// Runs a command; returns whether it succeeded, and its lines of both outputs.
    ///
    /// # Errors
    /// If it does not start.
    pub fn run(&self, command: &str) -> Result<(bool, Vec<String>)> {
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new("timeout")
            .args(["120", "bash", "-euo", "pipefail", "-c"])
            .arg(format!("exec 2>&1\n{}", self.filled_in(command)))
            .current_dir(&self.repo)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("PATH", format!("{}:{path}", self.programs.path().display()))
            .output()?;
        let printed = String::from_utf8_lossy(&output.stdout);
        // That a pod cannot be placed now is an answer.
        let answered = command.starts_with("aliquot explain") && output.status.code() == Some(3);
        let lines = printed.trim_end().lines().map(|line| line.trim_end().to_owned()).collect();
        Ok((output.status.success() || answered, lines))
    }

    /// The command with this cluster's names in the place of a reader's.
    fn filled_in(&self, command: &str) -> String {
        let name = |word| match word {
            "NODE" => &self.node,
            "NAMESPACE" => "team",
            "NAME" => "trainer",
            "pod/NAME" => "pod/trainer",
            other => other,
        };
        command.split(' ').map(name).collect::<Vec<_>>().join(" ")
    }
}

/// Whether a command only looks, so that it can be repeated until what it looks for is there.
pub fn looks(command: &str) -> bool {
    let mut words = command.split_whitespace();
    if !matches!(words.next(), Some("kubectl" | "aliquot")) {
        return false;
    }
    while let Some(word) = words.next() {
        match word {
            "-n" | "--namespace" => drop(words.next()),
            // A plugin of kubectl.
            "aliquot" => {}
            "rollout" => return words.next() == Some("status"),
            option if option.starts_with('-') => {}
            verb => return LOOKS.contains(&verb),
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_change_something_are_never_repeated() {
        for command in [
            "kubectl -n a get pods",
            "kubectl logs a",
            "aliquot explain pod/a",
            "kubectl aliquot explain pod/a",
        ] {
            assert!(looks(command), "{command}");
        }
        for command in [
            "kubectl apply -f a",
            "kubectl -n a delete pod b",
            "aliquot release --all",
            "helm upgrade a b",
            "kubectl -n get delete pod b",
            "kubectl rollout restart a",
        ] {
            assert!(!looks(command), "{command}");
        }
    }
}
