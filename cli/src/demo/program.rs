//! The containers' own programs, which run after the probe has found their limits.

use super::lines::{WIDTH, cut};
use super::said::printable;
use k8s_openapi::api::core::v1::Container;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// A container's own program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Program {
    /// Command and arguments, or the image if there is no command.
    pub(crate) command: String,
    #[serde(flatten)]
    pub(crate) state: State,
    /// The first lines of its output.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) said: Vec<String>,
}

/// The result of a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "camelCase")]
pub(crate) enum State {
    /// The program cannot run here.
    NotRun {
        /// The reason.
        reason: String,
    },
    /// The program ran until the demo ended it.
    Running,
    /// The program ended by itself. The demo reports that and goes on, because files of the program's image
    /// may be missing here.
    Ended {
        /// Exit code as in a shell.
        code: i32,
    },
}

/// Returns program and arguments of a container, as a kubelet derives them from the manifest.
///
/// # Errors
/// If the demo cannot run the program; the error is the reason.
pub(crate) fn argv(
    container: &Container,
    env: &BTreeMap<String, String>,
    without_namespaces: Option<&str>,
) -> Result<Vec<String>, String> {
    let command = container.command.iter().flatten();
    let argv: Vec<String> =
        command.chain(container.args.iter().flatten()).map(|word| expanded(word, env)).collect();
    if container.command.as_ref().is_none_or(Vec::is_empty) {
        return Err("it is its image's, and the demo has no images".to_owned());
    }
    if let Some(why) = without_namespaces {
        return Err(format!("without user namespaces it could write this machine's files ({why})"));
    }
    if let Some(volume) = container.volume_mounts.iter().flatten().next() {
        return Err(format!("it mounts volume {}, and the demo has no volumes", volume.name));
    }
    Ok(argv)
}

/// Returns the command as text.
pub(crate) fn shown(container: &Container) -> String {
    let words = container.command.iter().chain(&container.args).flatten();
    let quoted = words.map(|word| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@%".contains(c);
        if !word.is_empty() && word.chars().all(plain) { word.clone() } else { format!("'{word}'") }
    });
    let command = quoted.collect::<Vec<_>>().join(" ");
    match command.as_str() {
        "" => format!("image {}", container.image.as_deref().unwrap_or("without a name")),
        _ => command,
    }
}

/// Expands the variables that a word names as `$(NAME)`; `$$` is one `$`, and an unknown name stays as it is.
///
/// Source: the Kubernetes API's `Container.command`.
fn expanded(word: &str, env: &BTreeMap<String, String>) -> String {
    let (mut out, mut rest) = (String::new(), word);
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let name = after.strip_prefix('(').and_then(|inner| inner.split_once(')'));
        rest = match (name, after.strip_prefix('$')) {
            (_, Some(behind)) => {
                out.push('$');
                behind
            }
            (Some((name, behind)), None) => {
                match env.get(name) {
                    Some(value) => out.push_str(value),
                    None => out.extend(["$(", name, ")"]),
                }
                behind
            }
            (None, None) => {
                out.push('$');
                after
            }
        };
    }
    out + rest
}

impl Program {
    /// Returns the lines below a container in the table.
    pub(crate) fn lines(&self) -> String {
        let command = printable(&self.command);
        let command = command.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut out = String::new();
        let mut line = |text: &str| {
            // Writing to a String does not fail.
            let _ = writeln!(out, "{}", cut(text, WIDTH));
        };
        match &self.state {
            State::NotRun { reason } => {
                line(&format!("  not run: {command}"));
                line(&format!("    {reason}"));
            }
            State::Running => line(&format!("  $ {command}")),
            State::Ended { code: 0 } => line(&format!("  $ {command}  (ended)")),
            State::Ended { code } => line(&format!("  $ {command}  (ended with {code})")),
        }
        self.said.iter().for_each(|said| line(&format!("    {said}")));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(yaml: serde_json::Value) -> Container {
        serde_json::from_value(yaml).expect("a container")
    }

    #[test]
    fn a_command_is_made_of_command_args_and_variables() {
        let env = BTreeMap::from([("NAME".to_owned(), "value".to_owned())]);
        for (word, expanded_to) in [
            ("$(NAME)", "value"),
            ("a-$(NAME)-$(NAME)$", "a-value-value$"),
            ("$(OTHER)", "$(OTHER)"),
            ("$$(NAME)", "$(NAME)"),
            ("$NAME $(NAME", "$NAME $(NAME"),
        ] {
            assert_eq!(expanded(word, &env), expanded_to, "{word}");
        }
        let both =
            container(serde_json::json!({"name": "c", "command": ["sh", "-c"], "args": ["echo $(NAME)"]}));
        assert_eq!(argv(&both, &env, None), Ok(vec!["sh".into(), "-c".into(), "echo value".into()]));
        assert_eq!(shown(&both), "sh -c 'echo $(NAME)'");
    }

    #[test]
    fn what_cannot_run_says_why() {
        let none =
            container(serde_json::json!({"name": "c", "image": "example.com/trainer:1", "args": ["-x"]}));
        assert!(argv(&none, &BTreeMap::new(), None).is_err_and(|why| why.contains("image's")));
        let mounts = container(serde_json::json!({
            "name": "c", "command": ["true"], "volumeMounts": [{"name": "data", "mountPath": "/data"}]}));
        assert!(argv(&mounts, &BTreeMap::new(), None).is_err_and(|why| why.contains("volume data")));
        let one = container(serde_json::json!({"name": "c", "command": ["true"]}));
        assert!(argv(&one, &BTreeMap::new(), Some("forbidden")).is_err_and(|why| why.contains("forbidden")));
    }

    #[test]
    fn a_program_is_shown_with_what_it_said_in_80_columns() {
        let mut program = Program {
            command: "sh -c 'nvidia-smi -L; sleep infinity'".into(),
            state: State::Running,
            said: vec![
                "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000000)".into(),
            ],
        };
        let text = program.lines();
        assert!(text.starts_with("  $ sh -c 'nvidia-smi -L; sleep infinity'\n    GPU 0: "), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        program.state = State::Ended { code: 3 };
        assert!(program.lines().contains("(ended with 3)"), "{}", program.lines());
        program.state = State::NotRun { reason: "it mounts a volume".into() };
        assert!(program.lines().starts_with("  not run: sh -c"), "{}", program.lines());
    }
}
