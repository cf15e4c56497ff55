//! Two controllers of others' making.
