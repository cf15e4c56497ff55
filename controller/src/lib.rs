//! The cluster brain: allocates ResourceClaims of our driver, one writer, many pure decisions.
