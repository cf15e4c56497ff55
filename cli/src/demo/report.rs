//! The results of the demo, as a table and as JSON.

use super::lines::wrapped;
use super::program::Program;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Everything that the demo prints with `--json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    /// `user namespaces` or `scratch roots`.
    pub(crate) isolation: &'static str,
    pub(crate) nodes: Vec<NodeReport>,
    pub(crate) containers: Vec<Row>,
    /// The reasons why pods without devices wait, each with the pod's place in the files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) waiting: Vec<String>,
    /// Objects that the demo knows but does not apply.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) left_out: Vec<String>,
    /// True if everything was released and nothing is left.
    pub(crate) clean: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct NodeReport {
    pub(crate) name: String,
    pub(crate) devices: usize,
}

/// A container and the devices that it held.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Row {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) container: String,
    pub(crate) claim: String,
    pub(crate) node: String,
    pub(crate) devices: Vec<String>,
    /// The promised memory of all devices together, in bytes; `None` if no limit is enforced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) limit_bytes: Option<u64>,
    /// The bytes that the program had when CUDA refused more.
    pub(crate) got_bytes: u64,
    /// The CUDA error codes of the refusals; 2 is CUDA_ERROR_OUT_OF_MEMORY.
    pub(crate) refused_with: Vec<i32>,
    /// The container's own program.
    pub(crate) program: Program,
    /// The reason why the pod was ended by something other than the demo; `None` if it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ended: Option<String>,
    /// The claims and requests that the container uses; containers that use the same have one limit together.
    #[serde(skip)]
    pub(crate) uses: BTreeSet<(String, Option<String>)>,
}

impl Row {
    /// Returns pod and container as text.
    fn name(&self) -> String {
        format!("{}/{} {}", self.namespace, self.pod, self.container)
    }

    /// Returns true for another container that uses the same requests of the same claims.
    fn has_the_limit_of(&self, other: &Self) -> bool {
        self.name() != other.name() && (&self.namespace, &self.uses) == (&other.namespace, &other.uses)
    }

    /// Returns true if the limit held: memory was refused for lack of it, and was never more than promised.
    pub(crate) fn held(&self) -> bool {
        self.got_bytes > 0
            && self.limit_bytes.is_none_or(|limit| self.got_bytes <= limit)
            && !self.refused_with.is_empty()
            && self.refused_with.iter().all(|code| *code == 2)
    }
}

/// Formats bytes for users, rounded down to MiB.
pub(crate) fn mebibytes(bytes: u64) -> String {
    let mib = bytes >> 20;
    let digits = mib.to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{grouped} MiB")
}

/// Widths of the columns of the table: pod and container, limit, result.
const COLUMNS: (usize, usize, usize) = (40, 12, 24);

/// Returns the table: for each container a line with figures, and one with its devices.
pub(crate) fn table(rows: &[Row]) -> String {
    let (first, second, third) = COLUMNS;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:<first$}  {:>second$}  {:>third$}",
        "POD AND CONTAINER", "LIMIT", "GOT BEFORE OUT OF MEMORY"
    );
    for row in rows {
        let mut name = row.name();
        if name.chars().count() > first {
            let _ = writeln!(out, "{name}");
            name.clear();
        }
        let limit = row.limit_bytes.map_or_else(|| "none".to_owned(), mebibytes);
        let got = mebibytes(row.got_bytes);
        let _ = writeln!(out, "{name:<first$}  {limit:>second$}  {got:>third$}");
        let mut facts = format!("{} of {}, claim {}", row.devices.join(", "), row.node, row.claim);
        let with: Vec<String> =
            rows.iter().filter(|other| other.has_the_limit_of(row)).map(Row::name).collect();
        if !with.is_empty() {
            let _ = write!(facts, "; one limit together with {}", with.join(", "));
        }
        if !row.held() {
            let _ =
                write!(facts, "; CUDA refused with {:?}, not for memory below the limit", row.refused_with);
        }
        out.push_str(&wrapped(&facts, 2));
        match &row.ended {
            Some(why) => out.push_str(&wrapped(&format!("ended before its program ran: {why}"), 2)),
            None => out.push_str(&row.program.lines()),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::program::State;

    fn row(got: u64, code: i32) -> Row {
        Row {
            namespace: "n".into(),
            pod: "p".into(),
            container: "c".into(),
            claim: "k".into(),
            node: "node-a".into(),
            devices: vec!["gpu-0-share".into()],
            limit_bytes: Some(10 << 30),
            got_bytes: got,
            refused_with: vec![code],
            program: Program { command: "true".into(), state: State::Running, said: vec!["a line".into()] },
            ended: None,
            uses: BTreeSet::from([("k".into(), None)]),
        }
    }

    #[test]
    fn a_limit_holds_only_if_memory_ran_out_below_it() {
        assert!(row(10 << 30, 2).held());
        assert!(!row((10 << 30) + 1, 2).held(), "more than promised");
        assert!(!row(10 << 30, 1).held(), "refused for another reason");
        assert!(!row(0, 2).held(), "got nothing");
        let unlimited = Row { limit_bytes: None, ..row(80 << 30, 2) };
        assert!(unlimited.held() && table(&[unlimited]).contains(" none "), "nobody promised less");
    }

    #[test]
    fn the_table_lines_up() {
        let mut other = row(5 << 30, 999);
        (other.pod, other.claim) = ("another".into(), "another".into());
        other.uses = BTreeSet::from([("another".into(), None)]);
        insta::assert_snapshot!(table(&[row(10 << 30, 2), other]));
    }

    #[test]
    fn a_table_fits_80_columns_and_says_whose_limit_it_is() {
        let mut long = row(10 << 30, 2);
        (long.pod, long.container) = ("a-pod-with-quite-a-long-name-for-a-pod-5qbqt".into(), "main".into());
        let text = table(&[row(10 << 30, 2), long]);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let also = "one limit together with n/p c";
        assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(also), "{text}");
    }

    #[test]
    fn two_requests_of_one_claim_have_limits_of_their_own() {
        let (mut one, mut other) = (row(10 << 30, 2), row(10 << 30, 2));
        (one.container, other.container) = ("a".into(), "b".into());
        one.uses = BTreeSet::from([("k".into(), Some("a".into()))]);
        other.uses = BTreeSet::from([("k".into(), Some("b".into()))]);
        let text = table(&[one, other]);
        assert!(!text.contains("one limit together"), "{text}");
    }

    #[test]
    fn mebibytes_are_grouped() {
        assert_eq!(mebibytes(1 << 20), "1 MiB");
        assert_eq!(mebibytes(80 << 30), "81,920 MiB");
        assert_eq!(mebibytes(1 << 50), "1,073,741,824 MiB");
    }
}
