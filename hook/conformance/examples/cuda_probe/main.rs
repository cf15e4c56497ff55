//! A small CUDA program for the limiter's tests: it calls the driver as its arguments say, in order, and
//! prints one line for each call.
//!
//! `PROBE_RESOLVE` says how it finds the driver's functions: `dlsym` (default), `dlvsym`, `default` and
//! `next` (the pseudo handles), `resolver` (`cuGetProcAddress_v2`).

#![allow(unsafe_code, reason = "calls a C library")]
#![allow(unreachable_pub, reason = "modules of a program")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test program"
)]

#[path = "../driver/mod.rs"]
mod driver;
mod lives;
mod memory;
mod queries;
mod resolve;
mod sharing;
mod work;

use memory::Held;
use resolve::Driver;
use std::collections::BTreeMap;
use std::io::Write;

const MIB: u64 = 1 << 20;

/// The program, and what it has made.
struct Probe {
    driver: Driver,
    device: i32,
    held: Vec<Held>,
    contexts: Vec<u64>,
    execs: Vec<u64>,
    /// Memory of another process.
    opened: u64,
    /// The stream that captures.
    captured: u64,
    kernels: BTreeMap<String, u64>,
}

impl Probe {
    /// Does what a verb says, and returns the answer.
    fn answer(&mut self, argument: &str, place: usize) -> String {
        let verb: Vec<&str> = argument.split(':').collect();
        let families =
            [Self::contexts, Self::memory, Self::kernels, Self::graphs, Self::queries, Self::sharing];
        let found = families.into_iter().find_map(|family| family(self, &verb));
        found.or_else(|| self.lives(&verb, place)).unwrap_or_else(|| panic!("no command {argument:?}"))
    }
}

/// Returns the arguments after one.
fn after(place: usize) -> impl Iterator<Item = String> {
    std::env::args().skip(place + 1)
}

fn size(text: &str) -> u64 {
    let (digits, shift) = match text.as_bytes().last().unwrap() {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().expect("a size") << shift
}

fn main() {
    let mut probe = Probe {
        driver: Driver::open(),
        device: 0,
        held: Vec::new(),
        contexts: Vec::new(),
        execs: Vec::new(),
        opened: 0,
        captured: 0,
        kernels: BTreeMap::new(),
    };
    for (place, argument) in std::env::args().enumerate().skip(1) {
        println!("{argument} = {}", probe.answer(&argument, place));
        std::io::stdout().flush().unwrap();
    }
}
