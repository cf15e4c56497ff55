//! A stand-in for libnvidia-ml.so.1 over a simulated node.
