//! Conformance of the limiter: the shipped files, loaded into real programs that use the simulated driver.
//!
//! `tests/suite` has the tests, a module for each subject; `tests/c` and `examples` have the programs that they run.
//! `make variants` runs the tests on each kind of simulated device (`tests/suite/support/variant.rs`).

#![forbid(unsafe_code)]
