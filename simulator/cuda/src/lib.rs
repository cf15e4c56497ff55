//! A stand-in for libcuda.so.1 over a simulated node.
