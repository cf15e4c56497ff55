//! Nothing. Where the whole workspace is named, cargo builds each dependency with the features that all its users ask
//! for, and tests ask for more than programs: so `cargo build` and then `cargo test` would build most of them twice. This
//! crate asks for the same, and is part of no program.
#![forbid(unsafe_code)]
