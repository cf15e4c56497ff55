//! Markdown, as far as the pages need it.

/// A page that says what it is made from.
pub(super) struct Page(String);

impl Page {
    /// Begins one. `from` is what has to be changed to change it.
    pub(super) fn new(title: &str, from: &str, about: &str) -> Self {
        let note = format!("<!-- Made by `make generate` from {from}. Do not edit. -->");
        Self(format!("{note}\n\n# {title}\n\n{about}\n"))
    }

    /// A heading of a section, or of one in it.
    pub(super) fn heading(&mut self, level: usize, text: &str) {
        self.0.push_str(&format!("\n{} {text}\n", "#".repeat(level)));
    }

    /// A paragraph; nothing if there is no text.
    pub(super) fn text(&mut self, text: &str) {
        if !text.is_empty() {
            self.0.push_str(&format!("\n{text}\n"));
        }
    }

    /// A block as it is.
    pub(super) fn block(&mut self, language: &str, text: &str) {
        self.0.push_str(&format!("\n```{language}\n{}\n```\n", text.trim_end()));
    }

    /// A table; nothing if it has no rows. Columns that are empty in every row are left out.
    pub(super) fn table<const N: usize>(&mut self, header: [&str; N], rows: Vec<[String; N]>) {
        if rows.is_empty() {
            return;
        }
        let used: Vec<bool> = (0..N).map(|column| rows.iter().any(|row| !row[column].is_empty())).collect();
        let line = |cells: [String; N]| {
            let cells = cells.into_iter().zip(&used).filter(|(_, used)| **used);
            let cells =
                cells.map(
                    |(cell, _)| if cell.is_empty() { cell } else { format!("{} ", cell.replace('|', r"\|")) },
                );
            format!("| {}|\n", cells.collect::<Vec<_>>().join("| "))
        };
        let rule = "---|".repeat(used.iter().filter(|used| **used).count());
        let head = line(header.map(str::to_owned));
        let body: String = rows.into_iter().map(line).collect();
        self.0.push_str(&format!("\n{head}|{rule}\n{body}"));
    }

    /// All of it.
    pub(super) fn done(self) -> String {
        self.0
    }
}

/// Text as it was written.
pub(super) fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}

/// Lines of a comment as one, for a cell: a single sentence stands without its full stop, several keep theirs.
pub(super) fn phrase(text: &str) -> String {
    let mut words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if words.contains(". ") {
        if !words.ends_with('.') {
            words.push('.');
        }
    } else if let Some(sentence) = words.strip_suffix('.') {
        words = sentence.to_owned();
    }
    plain(&words)
}

/// Keeps what looks like HTML from being it.
pub(super) fn plain(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let parts = parts.map(|(at, part)| if at % 2 == 0 { part.replace('<', "&lt;") } else { part.to_owned() });
    parts.collect::<Vec<_>>().join("`")
}

/// Two texts for a cell, one behind the other.
pub(super) fn and(first: &str, second: &str) -> String {
    phrase(&match (first.trim(), second.trim()) {
        (only, "") | ("", only) => only.to_owned(),
        (first, second) => format!("{}. {second}", first.trim_end_matches('.')),
    })
}

/// What is said of one of several values, as it stands behind that: without a capital letter that is none of a name.
pub(super) fn aside(text: &str) -> String {
    let text = phrase(text);
    let mut letters = text.chars();
    match (letters.next(), letters.next()) {
        (Some(first), Some(second)) if second.is_lowercase() || text.starts_with("A ") => {
            first.to_lowercase().chain(text.chars().skip(1)).collect()
        }
        _ => text,
    }
}

/// With links in the place of names of documents.
pub(super) fn linked(text: &str) -> String {
    let mut written = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("docs/") {
        let end = after.find(".md").map_or(0, |at| at + ".md".len());
        let (file, behind) = after.split_at(end);
        let name = file.rsplit('/').next().unwrap_or(file);
        let path = file.strip_prefix("reference/").map_or_else(|| format!("../{file}"), str::to_owned);
        written.push_str(before);
        written.push_str(&if file.is_empty() { "docs/".to_owned() } else { format!("[{name}]({path})") });
        rest = behind;
    }
    written + rest
}

/// The first sentence.
pub(super) fn sentence(text: &str) -> &str {
    text.split_once(". ").map_or(text, |(first, _)| first)
}

/// Lines of a doc comment as text.
pub(super) fn lines(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}
