//! There has to be one for dependencies of builds to count.
fn main() {}
