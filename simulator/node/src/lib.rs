//! A node of simulated GPUs: board tables, MIG life, memory accounting and faults in one shared file.
//!
//! A *node directory* holds `node.json` (what the node is made of), `state` (what changes; mapped and
//! shared by every process of the node), `procs` (signs of life of those processes) and `root`, a driver
//! root as a real node has it. [`create`] makes one, [`Node::open`] joins it, [`reboot`] loses what a
//! reboot loses. The stand-ins for `libnvidia-ml.so.1` and `libcuda.so.1` are built on this crate.
//!
//! This crate is linked into libraries that are loaded into arbitrary processes: it starts no threads,
//! prints nothing, and holds no lock outside a call.
//!
//! Start reading at [`node`], then [`memory`] and [`mig`].

pub mod artifact;
pub mod board;
pub mod compute;
mod dev;
mod drm;
pub mod error;
pub mod events;
pub mod faults;
pub mod layout;
mod life;
mod map;
pub mod memory;
pub mod mig;
mod module;
pub mod node;
pub mod pci;
pub mod record;
mod root;
mod sight;
pub mod spec;
pub mod tables;
mod utilization;

pub use artifact::{CUDA_LIBRARY, NVML_LIBRARY, built_library, limiter_at};
pub use board::{Architecture, Board, CiProfile, Engines, GiProfile};
pub use dev::has_frontend;
pub use error::NodeError;
pub use events::Event;
pub use faults::{Fault, FaultRule};
pub use layout::{MAX_CIS, MAX_GIS};
pub use life::{GpuSettings, create, reboot};
pub use map::now_ns;
pub use memory::{MemoryInfo, ProcessUse, SharedMemory};
pub use mig::{Activation, CiInfo, GiInfo, MigDevice, MigMode};
pub use module::ModuleHold;
pub use node::{DEFAULT_DIR, Node, Pool};
pub use pci::{Hardware, PciBus, PciDevice};
pub use record::{Record, RecordError};
pub use sight::{Sight, library_version};
pub use spec::{Gpu, GpuSpec, NodeSpec, NvLinks, ProcessView, ci_capability_minor, gi_capability_minor};
pub use tables::{BOARDS, board};
pub use utilization::Utilization;
