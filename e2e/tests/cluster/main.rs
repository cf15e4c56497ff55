//! Tests on a real Kubernetes. Run by `tools/test-cluster`, one after the other; without
//! `ALIQUOT_E2E_CLUSTER=1` each says that it was skipped.

mod adopted;
mod agent;
mod allocation;
mod audit;
mod budget;
mod certificate;
mod compaction;
mod controllers;
mod driver_container;
mod elastic;
mod examples;
mod explain;
mod facts;
mod gang;
mod governance;
mod health;
mod hold;
mod hold_ends;
mod kubelet;
mod lost;
mod modes;
mod network_policy;
mod oversubscription;
mod pod_group;
mod policies;
mod preemption;
mod release;
mod reservation;
mod substitution;
mod support;
mod surroundings;
mod uninstall;
mod values;
mod vanishing;
mod wished_limits;
