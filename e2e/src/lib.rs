//! Tests of the whole product.
//!
//! `tests/sim.rs` runs the product on simulators, everywhere. `tests/cluster/` runs it on a real
//! Kubernetes that `e2e/cluster` brings up; those tests run only with `ALIQUOT_E2E_CLUSTER=1`, which
//! `tools/test-cluster` sets, one after the other, on one cluster. This library is what they share:
//! [`cluster::Cluster`] is the cluster with the product on it, as operator (`install`, `release`), user
//! (`objects`, `look`) and administrator of the node (`hardware`, `process`) see it;
//! [`auditor::Auditor`] watches that no hardware is ever given out or prepared twice; [`console`] reads the
//! commands of documents, [`shell`] runs them, and [`likeness`] compares what they print with what is shown.
#![forbid(unsafe_code)]

pub mod auditor;
pub mod cluster;
pub mod command;
pub mod console;
pub mod figure;
pub mod hardware;
pub mod install;
pub mod likeness;
pub mod look;
pub mod objects;
pub mod process;
pub mod release;
pub mod scrape;
pub mod shell;
