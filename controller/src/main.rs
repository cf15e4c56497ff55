//! The controller's binary.
fn main() {}
