//! `flags.md`: flags of the programs, from the parsers that read them.

use super::chart::CHART;
use super::markdown::{Page, and, aside, code};
use super::read;
use crate::args::Args;
use clap::builder::PossibleValue;
use clap::{Arg, ArgAction, Command, CommandFactory};
use std::ffi::OsStr;

/// Programs of the cluster, with the part of the chart that starts each.
const CONTROLLER: &str = "controller.yaml";
const AGENT: &str = "kubeletplugin.yaml";
const MPS: &str = "mps.yaml";
/// What several of them have in common.
const HELPERS: &str = "_helpers.tpl";

/// All of it.
pub(super) fn page() -> String {
    let about = "Flags of the programs, as `--help` prints them; `…` stands for a value.\n\
                 In a cluster the chart starts the first three, and passes the flags of which it is said here from its \
                 [values](values.md). Others go into `controller.extraArgs` and `kubeletPlugin.extraArgs`; one that is \
                 passed twice is refused.\n\
                 A flag counts more than its environment variable. Durations are numbers with `ms`, `s`, `m` or `h`.";
    let mut page = Page::new("Flags", "the programs' own parsers", about);
    tell(&mut page, 2, &aliquot_controller::args::Args::command(), "aliquot-controller", Some(CONTROLLER));
    tell(&mut page, 2, &aliquot_kubelet_plugin::args::Args::command(), "aliquot-kubelet-plugin", Some(AGENT));
    tell(&mut page, 2, &aliquot_mps::args::Args::command(), "aliquot-mps", Some(MPS));
    let command = Args::command();
    tell(&mut page, 2, &command, "aliquot", None);
    page.text("Installed as `kubectl-aliquot` it is a plugin of kubectl: `kubectl aliquot …`.");
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        tell(&mut page, 3, sub, &format!("aliquot {}", sub.get_name()), None);
    }
    page.done()
}

fn tell(page: &mut Page, level: usize, command: &Command, name: &str, template: Option<&str>) {
    page.heading(level, name);
    let about =
        command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string).unwrap_or_default();
    page.text(&format!("{}.", about.trim_end_matches('.')));
    let parts = template.into_iter().flat_map(|name| [name, HELPERS]);
    let template: String = parts.map(|name| read(&format!("{CHART}/templates/{name}"))).collect();
    let rows = command.get_arguments().filter(|arg| !arg.is_hide_set()).map(|arg| {
        let says = |text: String| template.contains(&text);
        let flag = |long: &str| ["=", "\n"].iter().any(|end| says(format!("- --{long}{end}")));
        let environment = |name: &OsStr| says(format!("name: {}\n", name.to_string_lossy()));
        let passed = arg.get_long().is_some_and(flag) || arg.get_env().is_some_and(environment);
        let chart = if passed { "passes it" } else { "" };
        let [flag, default, environment, about] = row(arg);
        [flag, default, environment, chart.to_owned(), about]
    });
    page.table(["flag", "default", "environment", "chart", "what it does"], rows.collect());
    if let Some(more) = command.get_after_help() {
        page.block("text", &more.to_string());
    }
}

fn row(arg: &Arg) -> [String; 4] {
    let takes = arg.get_action().takes_values();
    let default: Vec<String> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into()).collect();
    let default = match default.join(",") {
        _ if arg.is_required_set() => "required".to_owned(),
        text if text.is_empty() || !takes => String::new(),
        text => code(&text),
    };
    let environment = arg.get_env().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    [name(arg), default, code(&environment), and(&help(arg), &values(arg))]
}

/// What `--help` says of it.
fn help(arg: &Arg) -> String {
    arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default()
}

/// How it is written, with what follows it.
fn name(arg: &Arg) -> String {
    let names = arg.get_value_names().into_iter().flatten();
    let value = names.map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let Some(long) = arg.get_long() else { return code(&format!("<{}>", value.trim_matches(['<', '>']))) };
    let value = match value.as_str() {
        _ if !arg.get_action().takes_values() => String::new(),
        _ if is_boolean(arg) => " true|false".to_owned(),
        // Unless it was given, it is the flag's own name.
        value if value.to_lowercase().replace('_', "-") == long => " …".to_owned(),
        value => format!(" {value}"),
    };
    let short = arg.get_short().map(|short| format!(", `-{short}`")).unwrap_or_default();
    format!("{}{short}", code(&format!("--{long}{value}")))
}

fn is_boolean(arg: &Arg) -> bool {
    let values = arg.get_possible_values();
    values.iter().map(PossibleValue::get_name).eq(["true", "false"])
}

/// Which values there are, each with what is said of it, and whether there may be several.
fn values(arg: &Arg) -> String {
    let takes = arg.get_action().takes_values() && !is_boolean(arg);
    let possible = if takes { arg.get_possible_values() } else { Vec::new() };
    let shown = possible.iter().filter(|value| !value.is_hide_set()).map(|value| {
        let about =
            value.get_help().map(|help| format!(": {}", aside(&help.to_string()))).unwrap_or_default();
        format!("`{}`{about}", value.get_name())
    });
    let shown: Vec<String> = shown.collect();
    let said = help(arg).contains("several times");
    let several = matches!(arg.get_action(), ArgAction::Append) && arg.get_long().is_some() && !said;
    let several = if several { "May be given several times" } else { "" };
    and(several, &shown.join("; "))
}
