//! Console blocks of Markdown files: the commands that a document shows, and what it says that they print.
//!
//! A block that no test runs has a comment on the line before it, which readers do not see and which says
//! why: `<!-- not run: REASON -->`.

use anyhow::{Context, Result, ensure};

const MARK: &str = "<!-- not run:";

/// A console block.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    /// Line of its first fence, from 1 on.
    pub line: usize,
    /// Why no test runs it, if none does.
    pub not_run: Option<String>,
    /// Its commands in order, at least one.
    pub commands: Vec<Command>,
}

/// A command of a block.
#[derive(Debug, PartialEq, Eq)]
pub struct Command {
    /// Line on which it begins, from 1 on.
    pub line: usize,
    /// What a shell gets; several lines where all but the last end with a backslash.
    pub text: String,
    /// What it prints, as the document shows it.
    pub shown: Vec<String>,
}

impl Command {
    /// Index of the line after the command.
    fn end(&self) -> usize {
        self.line - 1 + self.text.lines().count()
    }
}

/// Reads the console blocks of a document.
///
/// # Errors
/// If a block does not end or begins with no command, or if a mark has no reason or no block below it; the
/// error has the line.
pub fn blocks(markdown: &str) -> Result<Vec<Block>> {
    let mut found = Vec::new();
    let mut lines = markdown.lines().zip(1..);
    let mut mark = None;
    while let Some((text, line)) = lines.next() {
        let fence = text.trim() == "```console";
        ensure!(fence || mark.is_none(), "line {}: a mark stands right before a console block", line - 1);
        if let Some(reason) = text.trim().strip_prefix(MARK) {
            let reason = reason.strip_suffix("-->").map(str::trim).filter(|reason| !reason.is_empty());
            mark = Some(reason.with_context(|| format!("line {line}: a mark without a reason"))?.to_owned());
        }
        if fence {
            let indent = text.len() - text.trim_start().len();
            let commands = commands(&mut lines, indent).with_context(|| format!("block of line {line}"))?;
            found.push(Block { line, not_run: mark.take(), commands });
        }
    }
    ensure!(mark.is_none(), "a mark on the last line, with no console block below it");
    Ok(found)
}

/// Reads commands up to the fence that ends their block.
fn commands<'a>(lines: &mut impl Iterator<Item = (&'a str, usize)>, indent: usize) -> Result<Vec<Command>> {
    let mut found: Vec<Command> = Vec::new();
    let mut continues = false;
    for (text, line) in lines {
        if text.trim() == "```" {
            ensure!(!found.is_empty(), "no command in it");
            return Ok(found);
        }
        // A list indents its blocks.
        let text = text.get(indent..).unwrap_or_default();
        if let Some(command) = text.strip_prefix("$ ").filter(|_| !continues) {
            found.push(Command { line, text: command.to_owned(), shown: Vec::new() });
            continues = command.ends_with('\\');
            continue;
        }
        let last = found.last_mut().with_context(|| format!("line {line} is above the first command"))?;
        if continues {
            last.text.push('\n');
            last.text.push_str(text);
            continues = text.ends_with('\\');
        } else {
            last.shown.push(text.to_owned());
        }
    }
    anyhow::bail!("no end")
}

/// The document with other output below some of its commands, which come in its order.
pub fn with_output(markdown: &str, printed: &[(&Command, Vec<String>)]) -> String {
    let mut lines: Vec<String> = markdown.lines().map(str::to_owned).collect();
    // From the end on, as lines above keep their numbers.
    for (command, output) in printed.iter().rev() {
        let indent: String = match lines.get(command.line - 1) {
            Some(line) => line.chars().take_while(|c| *c == ' ').collect(),
            None => continue,
        };
        let indented = output.iter().map(|line| format!("{indent}{line}").trim_end().to_owned());
        lines.splice(command.end()..command.end() + command.shown.len(), indented);
    }
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, bail, ensure};
    use std::collections::BTreeSet;
    use std::path::Path;

    macro_rules! documents {
        ($($name:ident: $file:literal,)*) => {
            /// Documents whose commands are run by the cluster's tests.
            const DOCUMENTS: &[&str] = &[$($file),*];
        };
    }

    include!("../tests/cluster/documents.rs");

    const DOCUMENT: &str = "\
# Title

```console
$ kubectl apply -f a.yaml
pod/a created
$ kubectl get pods \\
    -n team
NAME
a
```

1. item

   <!-- not run: takes a registry -->
   ```console
   $ skopeo copy
     done
   ```
";

    #[test]
    fn commands_come_with_their_continuation_lines_and_what_they_print() {
        let found = blocks(DOCUMENT).unwrap();
        let command = |line, text: &str, shown: &[&str]| Command {
            line,
            text: text.to_owned(),
            shown: shown.iter().map(|line| (*line).to_owned()).collect(),
        };
        let commands = vec![
            command(4, "kubectl apply -f a.yaml", &["pod/a created"]),
            command(6, "kubectl get pods \\\n    -n team", &["NAME", "a"]),
        ];
        assert_eq!(found[0], Block { line: 3, not_run: None, commands });
        let commands = vec![command(16, "skopeo copy", &["  done"])];
        let not_run = Some("takes a registry".to_owned());
        assert_eq!(found[1], Block { line: 15, not_run, commands });
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn a_mark_needs_a_reason_and_a_block_right_below_it() {
        let error = |markdown: &str| format!("{:#}", blocks(markdown).unwrap_err());
        let block = "```console\n$ ls\n```\n";
        assert!(blocks(&format!("<!-- not run: no -->\n{block}")).is_ok());
        assert!(error(&format!("<!-- not run: -->\n{block}")).contains("line 1: a mark without a reason"));
        assert!(error(&format!("<!-- not run: no\n{block}")).contains("without a reason"));
        assert!(error(&format!("<!-- not run: no -->\n\n{block}")).contains("line 1"));
        assert!(error("<!-- not run: no -->\n").contains("last line"));
    }

    #[test]
    fn a_block_begins_with_a_command_and_ends() {
        assert!(blocks("```console\nls\n```\n").is_err());
        assert!(blocks("```console\n```\n").is_err());
        assert!(blocks("```console\n$ ls\n").is_err());
        assert!(blocks("```text\nls\n```\n").unwrap().is_empty());
    }

    #[test]
    fn output_is_replaced_where_it_stands_and_nothing_else_changes() {
        let found = blocks(DOCUMENT).unwrap();
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let commands: Vec<&Command> = found.iter().flat_map(|block| &block.commands).collect();
        let recorded = with_output(
            DOCUMENT,
            &[(commands[0], lines("one\n\ntwo")), (commands[1], lines("b")), (commands[2], lines("c"))],
        );
        let wanted = DOCUMENT
            .replace("pod/a created", "one\n\ntwo")
            .replace("NAME\na\n", "b\n")
            .replace("     done", "   c");
        assert_eq!(recorded, wanted);
        assert_eq!(with_output(DOCUMENT, &[]), DOCUMENT);
    }

    /// Markdown files that people read: README.md, and those of `docs/` and `examples/` that are not generated.
    fn markdown(repo: &Path) -> Result<BTreeSet<String>> {
        let mut found = BTreeSet::from(["README.md".to_owned()]);
        let mut open = vec!["docs".to_owned(), "examples".to_owned()];
        while let Some(dir) = open.pop() {
            for entry in std::fs::read_dir(repo.join(&dir)).with_context(|| dir.clone())? {
                let entry = entry?;
                let path = format!("{dir}/{}", entry.file_name().to_string_lossy());
                if entry.file_type()?.is_dir() {
                    open.extend((path != "docs/reference").then_some(path));
                } else if path.ends_with(".md") {
                    found.insert(path);
                }
            }
        }
        Ok(found)
    }

    #[test]
    fn every_command_of_the_docs_is_run_or_says_why_not() -> Result<()> {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("no repository")?;
        let files = markdown(repo)?;
        for file in &files {
            let blocks = blocks(&std::fs::read_to_string(repo.join(file))?).with_context(|| file.clone())?;
            let run = blocks.iter().find(|block| block.not_run.is_none());
            match (run, DOCUMENTS.contains(&file.as_str())) {
                (Some(block), false) => {
                    bail!("{file}:{}: the block is neither run nor marked with a reason", block.line)
                }
                (None, true) => bail!("{file}: no command of it is run"),
                _ => {}
            }
        }
        for file in DOCUMENTS {
            ensure!(files.contains(*file), "{file} is not there");
        }
        for entry in std::fs::read_dir(repo.join("examples"))? {
            let entry = entry?;
            let readme = format!("examples/{}/README.md", entry.file_name().to_string_lossy());
            let is_run = DOCUMENTS.contains(&readme.as_str());
            ensure!(is_run || !entry.file_type()?.is_dir(), "{readme} is not run");
        }
        Ok(())
    }
}
