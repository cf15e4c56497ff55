//! A stand-in for `libcuda.so.1` over a simulated node.
//!
//! It is for testing a library that limits what programs get of a GPU, and for showing that library on machines
//! without one. It is a driver as programs see it: devices, contexts, memory, modules, streams, events and graphs
//! with the driver's own rules and error codes, sharing the memory and the time of the node's GPUs with the other
//! processes of the node. No kernel computes anything: a kernel takes time and that is all.
//!
//! Invariants:
//! - Every symbol of the real driver is exported; what is not modelled returns `CUDA_ERROR_NOT_SUPPORTED`
//!   (NOT_MODELLED.md lists it).
//! - Nobody's limit is known here. What is refused is refused because the simulated GPU has no more of it.
//! - Device memory takes no host memory beyond a stated bound, whatever is allocated.
//!
//! In layers, each of which uses only those before it: the tables of each subject, in modules below [`state`]; the
//! state that they make up; [`driver`], which holds it; the operations, a module for each subject; and [`entry`] with
//! the exported functions in `api`.
//!
//! Start reading at [`entry`] (the way into every function), [`driver`] and [`state`].
#![allow(
    unsafe_code,
    reason = "a C library's boundary; unsafe parts are in ffi, space, span, image, vmm, thread, worker, mps and driver"
)]

mod api;
mod array;
mod backing;
mod capture;
mod charge;
mod codes;
mod config;
mod context;
mod copy;
mod device;
mod driver;
mod engine;
mod entry;
mod event;
mod exec;
mod extents;
mod ffi;
mod graph;
mod image;
mod ipc;
mod launch;
mod log;
mod memory;
mod module;
mod mps;
mod plan;
mod pool;
mod resolver;
mod shape;
mod shared;
mod space;
mod span;
mod state;
mod stream;
mod thread;
mod track;
mod transfer;
mod types;
mod visible;
mod vmm;
mod worker;
