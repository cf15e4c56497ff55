//! The exported functions, by subject. Each checks its arguments and hands over to the module of that subject.

mod array;
mod context;
mod copy;
mod device;
mod event;
mod exec;
mod graph;
mod init;
mod ipc;
mod launch;
mod memory;
mod module;
mod pool;
mod stream;
mod vmm;
