//! The limiter's core, loaded by the stub at the first CUDA or NVML look-up.
