//! GPUs of a node through NVML: inventory, MIG create and destroy, events.
