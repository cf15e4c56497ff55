//! Prints the figures; `--json` as a list for `limiter.json`.

use aliquot_limiter_sim::figures::{all, json};

fn main() {
    let figures = all();
    if std::env::args().any(|arg| arg == "--json") {
        println!("{}", json(&figures));
        return;
    }
    for figure in figures {
        println!("{:<45} {:>9.3}  {} ({:.3})", figure.name, figure.value, figure.unit, figure.baseline);
    }
}
