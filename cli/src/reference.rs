//! The reference in `docs/reference`, made from what the programs and the chart say of themselves: flags, metrics, tables
//! of names, schemas, comments of values.
//!
//! The test compares it with what is there; `tools/generate` has it write instead.

mod attributes;
mod chart;
mod configuration;
mod crds;
mod events;
mod flags;
mod markdown;
mod metrics;
mod schema;
mod values;

use std::path::{Path, PathBuf};
use std::{env, fs};

/// With this in the environment the test writes the pages.
const WRITE: &str = "ALIQUOT_WRITE_REFERENCE";

/// A path in the repository.
fn path(within: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(within)
}

/// A file of the repository.
fn read(within: &str) -> String {
    fs::read_to_string(path(within)).unwrap_or_else(|error| panic!("{within}: {error}"))
}

#[test]
fn the_reference_is_what_programs_and_chart_say() {
    let pages = [
        ("values.md", values::page()),
        ("crds.md", crds::page()),
        ("configuration.md", configuration::page()),
        ("flags.md", flags::page()),
        ("attributes.md", attributes::page()),
        ("metrics.md", metrics::page()),
        ("events.md", events::page()),
    ];
    let folder = path("docs/reference");
    let mut stale: Vec<&str> = Vec::new();
    for (name, page) in &pages {
        let file = folder.join(name);
        if env::var_os(WRITE).is_some() {
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(&file, page).expect("a page");
        } else if fs::read_to_string(&file).ok().as_ref() != Some(page) {
            stale.push(name);
        }
    }
    assert!(stale.is_empty(), "stale in docs/reference: {}; run make generate", stale.join(", "));
    let there = fs::read_dir(&folder).expect("docs/reference");
    let strangers = there.map(|file| file.expect("a file").file_name());
    let strangers: Vec<_> = strangers.filter(|file| pages.iter().all(|(name, _)| file != name)).collect();
    assert!(strangers.is_empty(), "nothing makes these in docs/reference: {strangers:?}; remove them");
}
