//! Prints the figures. `--json` prints them as a list for `limiter.json`; `--record FILE` takes what is
//! recorded of a real driver.

use aliquot_limiter_sim::figures::all;
use aliquot_limiter_sim::json::json;
use aliquot_limiter_sim::world::Devices;
use aliquot_sim_node::Record;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let record = arguments.iter().position(|argument| argument == "--record");
    let record = match record.map(|at| arguments.get(at + 1).map(|path| Record::read(Path::new(path)))) {
        None => Record::default(),
        Some(Some(Ok(record))) => record,
        Some(Some(Err(error))) => {
            eprintln!("limiter-sim: {error}");
            return ExitCode::FAILURE;
        }
        Some(None) => {
            eprintln!("limiter-sim: --record wants a file of e2e/gpu/results");
            return ExitCode::FAILURE;
        }
    };
    let devices = Devices::new(record.slice_us.map(|us| us * 1000));
    let figures = all(&devices);
    if arguments.iter().any(|argument| argument == "--json") {
        println!("{}", json(&figures, &devices));
        return ExitCode::SUCCESS;
    }
    for figure in figures {
        println!("{:<45} {:>9.3}  {} ({:.3})", figure.name, figure.value, figure.unit, figure.baseline);
    }
    println!("assumed: {}", devices.assumed.join(", "));
    ExitCode::SUCCESS
}
