//! `symbols.txt` is what the README refers to: the list of what the library exports.
#![allow(unsafe_code, reason = "looks symbols up")]

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::fixture;

#[test]
fn the_list_of_exports_is_complete_and_true() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let listed: BTreeSet<String> =
        std::fs::read_to_string(here.join("symbols.txt")).unwrap().lines().map(str::to_owned).collect();
    let mut defined = BTreeSet::new();
    for file in std::fs::read_dir(here.join("src")).unwrap() {
        let source = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for part in source.split("fn nvml").skip(1) {
            let name = part.split('(').next().unwrap();
            defined.insert(format!("nvml{name}"));
        }
    }
    assert_eq!(listed, defined);
    let f = fixture(&["T4"]);
    for name in listed {
        // SAFETY: the symbol is looked up, not called.
        let found = unsafe { f.nvml.lib().__library.get::<*const ()>(name.as_bytes()) };
        assert!(found.is_ok(), "{name} is not exported");
    }
}
