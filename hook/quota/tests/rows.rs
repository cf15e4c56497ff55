//! Every row of the hook table by itself: each entry point is called where the limiter works, where the quota is too
//! small, and where CUDA is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;
#[path = "../../core/src/table.rs"]
#[allow(dead_code, unused_imports, unreachable_pub, reason = "shared with the limiter's two files")]
mod table;

use support::{Bench, GIB, values};
use table::{ROWS, Row, Stream};

#[test]
fn every_entry_is_refused_where_the_limiter_cannot_work() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    bench.write_quota_bytes("a", b"no quota");
    // The resolver says which functions there are; what it hands out refuses.
    let rows: Vec<&Row> = ROWS.iter().filter(|row| row.name != "cuGetProcAddress").collect();
    let calls: Vec<String> = rows.iter().map(|row| format!("call:{}", row.symbol)).collect();
    let output = bench.probe(&calls.iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let answers = values(&output);
    assert_eq!(answers.len(), rows.len());
    for (row, answer) in rows.iter().zip(&answers) {
        let wanted = if row.stream == Stream::nvml { "27" } else { "802" };
        assert_eq!(answer, wanted, "{}", row.symbol);
    }
}
