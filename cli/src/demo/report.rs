//! What the demo found, as a table and as JSON.

use serde::Serialize;
use std::fmt::Write;

/// Everything the demo prints with `--json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    /// `user namespaces` or `scratch roots`.
    pub(crate) isolation: &'static str,
    pub(crate) nodes: Vec<NodeReport>,
    pub(crate) containers: Vec<Row>,
    /// Whether everything was released and nothing of it is left.
    pub(crate) clean: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct NodeReport {
    pub(crate) name: String,
    pub(crate) devices: usize,
}

/// One container and a device that it held.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Row {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) container: String,
    pub(crate) claim: String,
    pub(crate) node: String,
    pub(crate) devices: Vec<String>,
    /// What the claim was promised of memory, all its devices together.
    pub(crate) limit_bytes: u64,
    /// What the program had when CUDA refused more.
    pub(crate) got_bytes: u64,
    /// How CUDA refused; 2 is CUDA_ERROR_OUT_OF_MEMORY.
    pub(crate) refused_with: Vec<i32>,
}

impl Row {
    /// Whether the limit held: refused for memory, and never more than promised.
    pub(crate) fn held(&self) -> bool {
        self.got_bytes > 0
            && self.got_bytes <= self.limit_bytes
            && !self.refused_with.is_empty()
            && self.refused_with.iter().all(|code| *code == 2)
    }
}

/// Bytes for people, exact to the MiB.
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

/// The table, columns as wide as their content.
pub(crate) fn table(rows: &[Row]) -> String {
    let head = ["POD", "CONTAINER", "CLAIM", "NODE", "DEVICES", "LIMIT", "GOT BEFORE OUT OF MEMORY"]
        .map(String::from);
    let mut lines = vec![head];
    for row in rows {
        lines.push([
            format!("{}/{}", row.namespace, row.pod),
            row.container.clone(),
            row.claim.clone(),
            row.node.clone(),
            row.devices.join(","),
            mebibytes(row.limit_bytes),
            if row.held() {
                mebibytes(row.got_bytes)
            } else {
                format!("{} (refused with {:?})", mebibytes(row.got_bytes), row.refused_with)
            },
        ]);
    }
    let width = |column: usize| {
        lines.iter().filter_map(|l| l.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..7).map(width).collect();
    let mut out = String::new();
    for line in &lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(i, (cell, width))| {
            if i >= 5 { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        let _ = writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(got: u64, code: i32) -> Row {
        Row {
            namespace: "n".into(),
            pod: "p".into(),
            container: "c".into(),
            claim: "k".into(),
            node: "node-a".into(),
            devices: vec!["gpu-0-share".into()],
            limit_bytes: 10 << 30,
            got_bytes: got,
            refused_with: vec![code],
        }
    }

    #[test]
    fn a_limit_holds_only_if_memory_ran_out_below_it() {
        assert!(row(10 << 30, 2).held());
        assert!(!row((10 << 30) + 1, 2).held(), "more than promised");
        assert!(!row(10 << 30, 1).held(), "refused for another reason");
        assert!(!row(0, 2).held(), "got nothing");
    }

    #[test]
    fn the_table_lines_up() {
        insta::assert_snapshot!(table(&[row(10 << 30, 2), row(5 << 30, 999)]));
    }

    #[test]
    fn mebibytes_are_grouped() {
        assert_eq!(mebibytes(1 << 20), "1 MiB");
        assert_eq!(mebibytes(80 << 30), "81,920 MiB");
        assert_eq!(mebibytes(1 << 50), "1,073,741,824 MiB");
    }
}
