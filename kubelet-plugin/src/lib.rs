//! The node agent: publishes a node's GPUs, prepares and unprepares claims.
