//! Shell completion of `aliquot`, of `kubectl-aliquot` and of `kubectl aliquot`.
//!
//! kubectl asks a program called `kubectl_complete-aliquot` for the words that may come next. This program
//! answers when it is called by that name.

use crate::args::{Args, CompletionArgs, Shell};
use clap::{Command, CommandFactory, ValueHint};
use std::ffi::OsStr;
use std::path::Path;

/// The name of the program as a plugin of kubectl.
const PLUGIN: &str = "kubectl-aliquot";
/// The name by which kubectl asks for completions.
const ASKED_BY_KUBECTL: &str = "kubectl_complete-aliquot";
/// Prefixes of the objects that can be explained.
const KINDS: [&str; 2] = ["pod/", "claim/"];
/// Tells kubectl not to offer file names, in the notation of the library that kubectl uses.
const NO_FILES: &str = ":4";
/// Tells kubectl to offer file names.
const FILES: &str = ":0";

/// Prints the script of a shell.
pub(crate) fn run(args: &CompletionArgs) {
    say!("{}", script(args.shell).trim_end());
}

/// Returns the command without the hidden subcommands, which only the program itself calls.
fn visible() -> Command {
    let all = Args::command();
    let shown: Vec<Command> = all.get_subcommands().filter(|c| !c.is_hide_set()).cloned().collect();
    Command::new("aliquot").args(all.get_arguments().cloned().collect::<Vec<_>>()).subcommands(shown)
}

fn script(shell: Shell) -> String {
    let of = match shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut written = Vec::new();
    clap_complete::generate(of, &mut visible(), "aliquot", &mut written);
    let script = String::from_utf8_lossy(&written).into_owned();
    match shell {
        Shell::Bash => format!("{script}\ncomplete -F _aliquot -o bashdefault -o default {PLUGIN}\n"),
        Shell::Fish => format!("{script}\ncomplete -c {PLUGIN} -w aliquot\n"),
        Shell::Zsh => script
            .replacen("#compdef aliquot\n", &format!("#compdef aliquot {PLUGIN}\n"), 1)
            .replace("compdef _aliquot aliquot\n", &format!("compdef _aliquot aliquot {PLUGIN}\n")),
    }
}

/// Returns true if kubectl called the program to complete what is typed.
pub(crate) fn is_asked(program: Option<&OsStr>) -> bool {
    program.is_some_and(|program| Path::new(program).file_name() == Some(OsStr::new(ASKED_BY_KUBECTL)))
}

/// Answers kubectl: prints a line for each word that may be in the last place.
pub(crate) fn answer(words: &[String]) {
    let (typed, before) = words.split_last().map_or(("", words), |(last, before)| (last.as_str(), before));
    say!("{}", candidates(typed, before).join("\n"));
}

/// Returns the words that may replace the typed word, with a description of each; the last line is about file
/// names.
fn candidates(typed: &str, before: &[String]) -> Vec<String> {
    let mut command = visible();
    command.build();
    let (mut at, mut values, mut expected) = (&command, 0usize, None);
    for word in before {
        if expected.take().is_some() {
            continue;
        }
        if word.starts_with('-') {
            expected = at.get_arguments().find(|arg| {
                let long = word.strip_prefix("--");
                let short = word.strip_prefix('-').filter(|rest| rest.chars().count() == 1);
                arg.get_action().takes_values()
                    && (long.is_some_and(|long| arg.get_long() == Some(long))
                        || short.is_some_and(|short| short.chars().next() == arg.get_short()))
            });
        } else if let Some(found) = at.find_subcommand(word) {
            at = found;
        } else {
            values += 1;
        }
    }
    let line = |word: &str, about: Option<String>| match about {
        Some(about) => format!("{word}\t{}", about.lines().next().unwrap_or_default()),
        None => word.to_owned(),
    };
    let of_values = |arg: &clap::Arg| {
        let values = arg.get_possible_values();
        values.iter().map(|v| line(v.get_name(), v.get_help().map(ToString::to_string))).collect::<Vec<_>>()
    };
    let mut files = NO_FILES;
    let mut found = if let Some(arg) = expected {
        if matches!(arg.get_value_hint(), ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath) {
            files = FILES;
        }
        of_values(arg)
    } else if typed.starts_with('-') {
        let flags = at.get_arguments().filter(|arg| !arg.is_hide_set());
        flags
            .filter_map(|arg| {
                Some(line(&format!("--{}", arg.get_long()?), arg.get_help().map(ToString::to_string)))
            })
            .collect()
    } else if at.get_name() == "explain" {
        KINDS.iter().filter(|_| values == 0).map(|kind| (*kind).to_owned()).collect()
    } else if at.has_subcommands() {
        let commands = at.get_subcommands().filter(|c| !c.is_hide_set());
        commands.map(|c| line(c.get_name(), c.get_about().map(ToString::to_string))).collect()
    } else {
        at.get_positionals().nth(values).map(of_values).unwrap_or_default()
    };
    found.retain(|line| line.starts_with(typed));
    found.push(files.to_owned());
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("ex", &[], &["explain\t"], ":4")]
    #[case("", &["explain"], &["pod/", "claim/"], ":4")]
    #[case("p", &["explain", "-n", "team"], &["pod/"], ":4")]
    #[case("", &["explain", "-o"], &["json", "yaml"], ":4")]
    #[case("--con", &["explain", "pod/web"], &["--context\t"], ":4")]
    #[case("", &["explain", "--kubeconfig"], &[], ":0")]
    #[case("b", &["completion"], &["bash"], ":4")]
    #[case("__", &[], &[], ":4")]
    fn kubectl_is_told_what_may_come_next(
        #[case] typed: &str,
        #[case] before: &[&str],
        #[case] wanted: &[&str],
        #[case] files: &str,
    ) {
        let before: Vec<String> = before.iter().map(|word| (*word).to_owned()).collect();
        let mut found = candidates(typed, &before);
        assert_eq!(found.pop().as_deref(), Some(files));
        assert_eq!(found.len(), wanted.len(), "{found:?}");
        for (found, wanted) in found.iter().zip(wanted) {
            assert!(found.starts_with(wanted), "{found:?} {wanted}");
        }
    }

    #[rstest]
    #[case(Shell::Bash, "complete -F _aliquot -o bashdefault -o default kubectl-aliquot")]
    #[case(Shell::Zsh, "#compdef aliquot kubectl-aliquot")]
    #[case(Shell::Zsh, "compdef _aliquot aliquot kubectl-aliquot")]
    #[case(Shell::Fish, "complete -c kubectl-aliquot -w aliquot")]
    fn scripts_complete_the_plugin_as_well(#[case] shell: Shell, #[case] wanted: &str) {
        let script = script(shell);
        assert!(script.contains(wanted), "{script}");
        assert!(script.contains("explain") && !script.contains("__tether"), "{script}");
    }

    #[test]
    fn bash_completes_both_names() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("aliquot.bash");
        std::fs::write(&path, script(Shell::Bash)).expect("written");
        for name in ["aliquot", PLUGIN] {
            let try_it = format!(
                "source {}; COMP_WORDS=({name} expl); COMP_CWORD=1; _aliquot {name} expl {name}; echo \"${{COMPREPLY[*]}}\"",
                path.display()
            );
            let output = std::process::Command::new("bash").args(["-c", &try_it]).output().expect("bash");
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "explain", "{output:?}");
        }
    }

    #[test]
    fn only_the_name_that_kubectl_calls_asks_for_completions() {
        assert!(is_asked(Some(OsStr::new("/usr/local/bin/kubectl_complete-aliquot"))));
        assert!(!is_asked(Some(OsStr::new("kubectl-aliquot"))) && !is_asked(None));
    }
}
