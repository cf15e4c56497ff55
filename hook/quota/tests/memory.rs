//! The memory quota, by real programs under the limiter on a simulated node.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use support::{Bench, GIB, MIB};

#[test]
fn linear_memory_is_limited_to_the_byte() {
    let bench = Bench::new(["H100-80"]);
    bench.share("a", 0, GIB);
    let answers = bench.run(&["init", "retain", "bisect:linear:1", "info"]);
    assert_eq!(answers, ["0", "0", &GIB.to_string(), &format!("0 {GIB} {GIB}")]);
    assert_eq!(bench.charged("a"), (0, 0));
}
