//! Tests on a real Kubernetes. Run by `tools/test-cluster`, one after the other; without
//! `ALIQUOT_E2E_CLUSTER=1` each says that it was skipped.

mod examples;
mod support;
