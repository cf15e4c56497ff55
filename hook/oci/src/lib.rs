//! The OCI hook that checks the limiter in a container's root before its entrypoint runs.
