//! The exported functions, by subject. Each checks its arguments and hands over to the module of that subject.

mod array;
mod context;
mod device;
mod init;
mod ipc;
mod memory;
mod pool;
mod vmm;
