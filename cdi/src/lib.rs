//! Container Device Interface spec types, validation and the atomic spec directory.
