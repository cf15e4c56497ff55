//! Every function of the driver is hooked, or it is said why it passes.

use crate::table;
use std::collections::BTreeSet;
use std::path::Path;

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The symbols of the simulated driver, which are those of the newest header, without version and stream.
fn unhooked() -> BTreeSet<String> {
    let text = read("../../simulator/cuda/symbols/symbols.csv");
    let symbols = text.lines().skip(1).map(|line| line.split(',').nth(3).unwrap());
    let is_hooked = |symbol: &str| table::ROWS.iter().any(|row| row.symbol == symbol);
    let base = |symbol: &str| {
        let symbol = symbol.trim_end_matches("_ptsz").trim_end_matches("_ptds");
        match symbol.rsplit_once("_v") {
            Some((base, version)) if version.parse::<u32>().is_ok() => base.to_owned(),
            _ => symbol.to_owned(),
        }
    };
    symbols.filter(|symbol| !is_hooked(symbol)).map(base).collect()
}

#[test]
fn each_function_that_is_not_hooked_has_one_reason_to_pass() {
    let text = read("../core/table/passes.txt");
    let names: Vec<&str> =
        text.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace).collect();
    let matches = |name: &str, symbol: &str| match name.strip_suffix('*') {
        Some(start) => symbol.starts_with(start),
        None => symbol == name,
    };
    let unhooked = unhooked();
    assert!(unhooked.len() > 400, "{}", unhooked.len());
    for symbol in &unhooked {
        let reasons: Vec<_> = names.iter().filter(|name| matches(name, symbol)).collect();
        assert_eq!(reasons.len(), 1, "{symbol}: {reasons:?}");
    }
    for name in &names {
        assert!(unhooked.iter().any(|symbol| matches(name, symbol)), "{name} names nothing that passes");
    }
    for name in table::KNOWN_HARMLESS {
        assert!(!table::ROWS.iter().any(|row| row.symbol == *name), "{name}");
    }
}
