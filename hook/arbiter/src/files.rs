//! Reads shares' regions and writes their grants.
