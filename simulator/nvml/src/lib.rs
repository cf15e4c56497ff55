//! A stand-in for libnvidia-ml.so.1 over a simulated node.
//!
//! It exports the part of NVML's C interface that our programs, `nvml-wrapper` and common tools use, with the
//! structures of `nvml-wrapper-sys` and the error codes of the real library. What a function knows comes from
//! [`aliquot_sim_node`]; nothing is kept here but the reference count of `nvmlInit` and the event sets.
//! `simulator/README.md` says what is modelled and what is not.
//!
//! Every exported function goes through [`call::call`], which counts faults on request, refuses calls before
//! `nvmlInit` and lets no panic out. Start reading there, then at `mig.rs`.
#![allow(unsafe_code, reason = "a C interface; all pointers are handled in abi.rs")]
#![allow(non_snake_case, reason = "the exported names are NVML's")]

mod abi;
mod call;
mod compute_instance;
mod device;
mod event;
mod gpu_instance;
mod hardware;
mod process;
mod system;
mod topology;
