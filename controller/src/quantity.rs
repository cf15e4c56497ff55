//! Quantities: the model's, under the name that this crate uses.

pub use aliquot_model::Quantity;
